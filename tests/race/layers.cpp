// Random Mixture-of-Experts layers: counts, dispatch (staged, direct, compact, with a wire format), combine, and their gradients,
// against a reference that every rank computes for itself (layer_plan.h).
#include <cstring>

#include "layer_plan.h"

namespace race {

namespace {

constexpr std::uint64_t kDigest = 0x7654321;
constexpr std::size_t kCountsBytes = 1 << 14;  // room for the counts of one layer

}  // namespace

struct Layers::Layer {
  Rank& r;
  const Shape shape;
  std::size_t counts_at;
  a2a_moe* moe;
  std::uint32_t request[4];
  // The last dispatch
  std::unique_ptr<Plan> plan;
  std::int64_t capacity = 0;
  std::vector<float> weights;
  std::vector<std::int32_t> rank, token, k, index, offsets;  // rank and token: who brought the row, and its place there
  // What this rank brings, each part in memory of its own
  std::vector<std::vector<std::uint8_t>> part_rows, part_scales;
  std::vector<std::vector<std::int32_t>> part_numbers;
  std::vector<a2a_moe_part> parts;

  Layer(Rank& r_, std::size_t number) : r(r_), shape(r_.plan, r_.ranks, number), counts_at(number * kCountsBytes) {
    moe = a2a_moe_create(r.c, shape.experts, shape.top_k, shape.hidden, shape.max_tokens, shape.dtype, shape.alignment,
                         shape.wire, shape.wire_combine, shape.owner.data(), World::moe_address(counts_at));
    if (shape.parts > 1) a2a_moe_sources(moe, shape.parts, shape.source.data());
    for (std::uint32_t i = 0; i < 4; i++)
      request[i] = std::uint32_t(a2a_request(r.c, kDigest + 4 * number + i, 0, "a layer"));
  }
  ~Layer() { a2a_moe_destroy(moe); }

  std::uint64_t row_key(std::uint64_t salt, std::uint32_t s, std::uint32_t t, std::uint32_t kk = 99) const {
    return mix(plan->key ^ salt, s + 1, t + 1, kk + 1);
  }
  float weight(std::uint32_t s, std::uint32_t t, std::uint32_t kk) const { return float(1 + row_key(5, s, t, kk) % 3); }
  bool given_weights() const { return mix(plan->key, 6) % 3 != 0; }
  bool mine(std::int32_t id) const { return id >= 0 && shape.owner[std::size_t(id)] == std::int32_t(r.rank); }

  void compare(const char* what, const std::uint8_t* got, const std::vector<float>& values, std::int64_t at) const {
    std::vector<std::uint8_t> wanted(shape.row_bytes());
    shape.store(wanted.data(), values);
    if (std::memcmp(got, wanted.data(), wanted.size()) != 0)
      wrong("rank %u: %s: row %lld is wrong (hidden %u, top_k %u, %s, wire %u%s%s, epoch %u)", r.rank, what,
            (long long)at, shape.hidden, shape.top_k, shape.dtype ? "bfloat16" : "float32", shape.wire,
            shape.rows_wire ? ", kept" : "", shape.compact ? ", compact" : "", a2a_epoch(r.c));
  }

  // This rank's tokens, as `dispatch` takes them. With scales: quantised by the caller.
  std::vector<std::uint8_t> tokens(std::uint64_t salt, std::vector<std::uint8_t>* scales) const {
    const std::uint32_t n = plan->tokens[r.rank];
    std::vector<std::uint8_t> x(n * (scales ? shape.hidden : shape.row_bytes()) + 1);
    for (std::uint32_t t = 0; t < n; t++) {
      const std::vector<float> values = shape.row(row_key(salt, r.rank, t), true);
      if (!scales)
        shape.store(x.data() + t * shape.row_bytes(), values);
      else
        for (std::uint32_t c = 0; c < shape.hidden; c++) x[t * shape.hidden + c] = to_e4m3(values[c]);
    }
    if (scales) *scales = ones(n);
    return x;
  }
  std::vector<std::uint8_t> ones(std::int64_t rows) const {
    std::vector<std::uint8_t> scales(std::size_t(rows) * shape.blocks() * shape.scale_bytes() + 1, 127);
    const float one = 1;
    for (std::size_t i = 0; shape.wire == kFp8 && i + 4 < scales.size(); i += 4) __builtin_memcpy(&scales[i], &one, 4);
    return scales;
  }

  // Bring these tokens; of one part, the arguments say where they lie.
  void bring(const std::vector<std::uint8_t>& x, const std::vector<std::uint8_t>* x_scales) {
    a2a_moe_bring(moe, nullptr);
    if (shape.parts == 1) return;
    const std::size_t row = x_scales ? shape.hidden : shape.row_bytes(), scales = shape.blocks() * shape.scale_bytes();
    part_rows.clear(), part_scales.clear(), part_numbers.clear(), parts.clear();
    for (std::uint32_t i = 0; i < shape.parts; i++) {
      const std::uint32_t* cut = &plan->cut[r.rank * (shape.parts + 1) + i];
      auto piece = [&](const std::vector<std::uint8_t>& of, std::size_t bytes) {
        std::vector<std::uint8_t> own(of.begin() + std::ptrdiff_t(cut[0] * bytes),
                                      of.begin() + std::ptrdiff_t(cut[1] * bytes));
        own.reserve(1);  // an address, also of nothing
        return own;
      };
      part_rows.push_back(piece(x, row));
      part_scales.push_back(x_scales ? piece(*x_scales, scales) : std::vector<std::uint8_t>());
      part_numbers.emplace_back();
      for (std::uint32_t t = cut[0]; t < cut[1]; t++) part_numbers.back().push_back(plan->number(shape, r.rank, t));
    }
    for (std::uint32_t i = 0; i < shape.parts; i++)
      parts.push_back({part_rows[i].data(), x_scales ? part_scales[i].data() : nullptr,
                       i ? part_numbers[i].data() : nullptr, std::uint32_t(part_numbers[i].size()), 0});
    a2a_moe_bring(moe, parts.data());
  }

  void dispatch(std::uint64_t key, std::uint32_t refuser) {
    plan = std::make_unique<Plan>(shape, r.ranks, key);
    const std::uint32_t n = plan->tokens[r.rank], K = shape.top_k;
    const std::vector<std::int32_t>& ids = plan->ids[r.rank];
    const std::vector<std::int64_t> wide(ids.begin(), ids.end());
    const bool use_wide = r.own.one_in(2);
    const void* ids_pointer = use_wide ? static_cast<const void*>(wide.data()) : ids.data();
    std::vector<std::int64_t> result(3 + shape.experts);
    const bool direct = shape.wire == kNoWire && !shape.compact && r.own.one_in(2);
    const std::size_t pool_at = 4 * kCountsBytes;
    std::vector<std::uint8_t> x_scales;
    const bool quantised = shape.wire && r.own.one_in(2);
    const std::vector<std::uint8_t> x = tokens(1, quantised ? &x_scales : nullptr);
    bring(x, quantised ? &x_scales : nullptr);
    if (refuser == r.rank) {
      if (n) {  // an id out of range is found before anything is posted
        std::vector<std::int32_t> bad = ids;
        bad.back() = std::int32_t(shape.experts);
        r.expect("the result for a bad id", a2a_moe_count(moe, request[0], bad.data(), 4, n, 0, result.data()),
                 a2a::kInvalid);
      }
      return r.expect("the result of a refusal", a2a_refuse(r.c, request[0], "no dispatch"), a2a::kOk);
    }
    const int counted = a2a_moe_count(moe, request[0], ids_pointer, use_wide ? 8 : 4, n,
                                      direct ? World::moe_address(pool_at) : 0, result.data());
    if (refuser < r.ranks) {
      r.expect("the result of a refused count", counted, a2a::kPeerRefused);
      return r.expect("who refused", a2a_last_peer(r.c), refuser);
    }
    r.expect("the result of count", counted, a2a::kOk);
    r.expect("rows with padding", result[0], plan->padded[r.rank]);
    r.expect("rows", result[1], plan->rows[r.rank]);
    r.expect("distinct tokens", result[2], plan->distinct[r.rank]);
    std::size_t local = 0;
    for (std::uint32_t e = 0; e < shape.experts; e++)
      if (mine(std::int32_t(e))) r.expect("rows of an expert", result[3 + local++], plan->true_rows[e]);
    pause_a_moment(r.own);

    capacity = shape.limit >= 0 ? shape.limit : plan->padded[r.rank];
    const std::int64_t height = shape.compact ? plan->distinct[r.rank] : capacity;
    const std::size_t row_size = shape.rows_wire ? shape.hidden : shape.row_bytes();
    std::vector<std::uint8_t> own_rows(direct ? 0 : std::size_t(height) * row_size), scales(ones(height));
    std::uint8_t* rows = direct ? r.world.moe_memory(r.rank) + pool_at : own_rows.data();
    std::fill(scales.begin(), scales.end(), std::uint8_t(0xee));
    weights.assign(std::size_t(capacity), -1);
    for (auto* v : {&rank, &token, &k, &index}) v->assign(std::size_t(capacity), -7);
    offsets.assign(local, -7);
    std::int32_t overflow = -7;
    std::vector<std::int32_t> source(std::size_t(capacity), -7), number(std::size_t(capacity), -7);
    const bool brings = shape.parts > 1;
    std::vector<float> w;
    for (std::uint32_t i = 0; i < n * K; i++) w.push_back(weight(r.rank, i / K, i % K));
    const a2a_moe_rows out = {rows,
                              scales.data(),
                              weights.data(),
                              brings ? source.data() : rank.data(),
                              brings ? number.data() : token.data(),
                              k.data(),
                              index.data(),
                              offsets.data(),
                              &overflow,
                              capacity,
                              height,
                              shape.limit,
                              shape.rows_wire,
                              shape.compact,
                              direct,
                              brings ? rank.data() : nullptr,
                              brings ? token.data() : nullptr};
    r.expect("the result of dispatch",
             a2a_moe_dispatch(moe, x.data(), quantised ? x_scales.data() : nullptr, ids_pointer, use_wide ? 8 : 4,
                              given_weights() ? w.data() : nullptr, n, &out),
             a2a::kOk);
    r.expect("overflow", overflow, plan->dropped[r.rank]);
    local = 0;
    for (std::uint32_t e = 0; e < shape.experts; e++)
      if (mine(std::int32_t(e))) r.expect("the end of an expert", offsets[local++], std::min(plan->end[e], capacity));
    check_rows(rows, scales);
    for (std::size_t row = 0; brings && row < std::size_t(capacity); row++) {
      const bool filled = rank[row] >= 0;
      const auto s = std::uint32_t(rank[row]), t = std::uint32_t(token[row]);
      r.expect("the source of a row", source[row],
               filled ? shape.source[s * shape.parts + plan->part_of(shape, s, t)] : -1);
      r.expect("its number there", number[row], filled ? plan->number(shape, s, t) : -1);
    }
    if (direct && capacity)
      std::memset(rows, 0xee, std::size_t(capacity) * row_size);  // the tensor dies, its memory goes to the next
  }

  void check_row(const std::uint8_t* rows, const std::vector<std::uint8_t>& scales, std::int64_t at,
                 const std::vector<float>& values) const {
    if (!shape.rows_wire) return compare("dispatch", rows + std::size_t(at) * shape.row_bytes(), values, at);
    std::vector<std::uint8_t> q;
    for (float f : values) q.push_back(to_e4m3(f));
    const std::size_t bytes = shape.blocks() * shape.scale_bytes();
    if (std::memcmp(rows + std::size_t(at) * shape.hidden, q.data(), q.size()) != 0 ||
        std::memcmp(scales.data() + std::size_t(at) * bytes, ones(1).data(), bytes) != 0)
      wrong("rank %u: dispatch: row %lld of wire %u is wrong (hidden %u)", r.rank, (long long)at, shape.wire,
            shape.hidden);
  }

  void check_rows(const std::uint8_t* rows, const std::vector<std::uint8_t>& scales) const {
    std::vector<bool> filled(std::size_t(capacity), false);
    for (std::uint32_t s = 0; s < r.ranks; s++)
      for (std::uint32_t i = 0; i < plan->ids[s].size(); i++) {
        const std::uint32_t t = i / shape.top_k;
        const std::int64_t at = plan->position[s][i];
        if (at < 0 || !mine(plan->ids[s][i])) continue;
        filled[std::size_t(at)] = true;
        const std::size_t row = std::size_t(at);
        r.expect("row_rank", rank[row], s);
        r.expect("row_token", token[row], t);
        r.expect("row_k", k[row], i % shape.top_k);
        if (weights[row] != (given_weights() ? weight(s, t, i % shape.top_k) : 1))
          wrong("rank %u: weight of row %lld", r.rank, (long long)at);
        const std::int64_t lies_at = shape.compact ? plan->compact[r.rank][plan->first[s] + t] : at;
        if (shape.compact) r.expect("row_index", index[row], lies_at);
        check_row(rows, scales, lies_at, shape.row(row_key(1, s, t), true));
      }
    const std::int64_t used = std::min(plan->padded[r.rank], capacity);
    for (std::size_t row = 0; row < std::size_t(capacity); row++) {
      if (filled[row]) continue;
      r.expect("row_rank of padding", rank[row], -1);
      r.expect("row_token of padding", token[row], -1);
      r.expect("row_k of padding", k[row], -1);
      if (weights[row] != 0) wrong("rank %u: padding has a weight", r.rank);
      if (!shape.compact && std::int64_t(row) < used)
        check_row(rows, scales, std::int64_t(row), std::vector<float>(shape.hidden, 0));
    }
  }

  // Rows that this rank's experts put out, one for each row of the routing.
  std::vector<std::uint8_t> expert_rows(std::uint64_t salt) const {
    std::vector<std::uint8_t> rows(std::size_t(capacity) * shape.row_bytes() + 1, 0xee);
    for (std::size_t row = 0; row < std::size_t(capacity); row++)
      if (rank[row] >= 0)
        shape.store(rows.data() + row * shape.row_bytes(),
                    shape.row(row_key(salt, std::uint32_t(rank[row]), std::uint32_t(token[row]), std::uint32_t(k[row])),
                              false));
    return rows;
  }

  // Whether a call went well. With a refuser it must not: that rank makes none, and the others are told.
  template <class Call>
  bool done(const char* what, std::uint32_t which, std::uint32_t refuser, const Call& call) const {
    if (refuser == r.rank) {
      r.expect("the result of a refusal", a2a_refuse(r.c, request[which], what), a2a::kOk);
      return false;
    }
    const int result = call();
    r.expect(what, result, refuser < r.ranks ? a2a::kPeerRefused : a2a::kOk);
    if (result == a2a::kOk) return true;
    r.expect("who refused", a2a_last_peer(r.c), refuser);
    return false;
  }

  void combine(std::uint64_t salt, bool weighted, std::uint32_t refuser) {
    const std::uint32_t n = plan->tokens[r.rank];
    const std::vector<std::uint8_t> rows = expert_rows(salt);
    std::vector<std::uint8_t> y(n * shape.row_bytes() + 1, 0xee);
    const bool summed = done("the result of combine", 1, refuser, [&] {
      return a2a_moe_combine(moe, request[1], rows.data(), capacity, weighted ? weights.data() : nullptr, rank.data(),
                             token.data(), k.data(), nullptr, nullptr, y.data(), nullptr, n);
    });
    if (!summed) return;
    for (std::uint32_t t = 0; t < n; t++) {
      std::vector<float> sum(shape.hidden, 0);
      for (std::uint32_t kk = 0; kk < shape.top_k; kk++) {
        if (plan->position[r.rank][t * shape.top_k + kk] < 0) continue;
        const float w = weighted && given_weights() ? weight(r.rank, t, kk) : 1;
        const std::vector<float> row = shape.row(row_key(salt, r.rank, t, kk), false);
        for (std::uint32_t c = 0; c < shape.hidden; c++) sum[c] += w * row[c];
      }
      compare("combine", y.data() + t * shape.row_bytes(), sum, t);
    }
  }

  // The gradient of dispatch: rows of this rank (compact: its distinct tokens) and one float a row go home.
  void dispatch_backward(std::uint64_t salt) {
    const std::uint32_t n = plan->tokens[r.rank], K = shape.top_k;
    std::vector<std::uint8_t> rows = expert_rows(salt);
    if (shape.compact) {
      rows.assign(std::size_t(plan->distinct[r.rank]) * shape.row_bytes() + 1, 0xee);
      for (std::size_t row = 0; row < std::size_t(capacity); row++)
        if (rank[row] >= 0)
          shape.store(
              rows.data() + std::size_t(index[row]) * shape.row_bytes(),
              shape.row(row_key(salt, std::uint32_t(rank[row]), std::uint32_t(token[row]), 50 + r.rank), false));
    }
    std::vector<float> grads(std::size_t(capacity) + 1), home(n * K + 1, -9);
    for (std::size_t row = 0; row < std::size_t(capacity); row++)
      if (rank[row] >= 0)
        grads[row] = 1 + weight(std::uint32_t(rank[row]), std::uint32_t(token[row]), std::uint32_t(k[row]) + 40);
    std::vector<std::uint8_t> y(n * shape.row_bytes() + 1, 0xee);
    r.expect("the result of dispatch_backward",
             a2a_moe_combine(moe, request[2], rows.data(), capacity, nullptr, rank.data(), token.data(), k.data(),
                             shape.compact ? index.data() : nullptr, grads.data(), y.data(), home.data(), n),
             a2a::kOk);
    for (std::uint32_t t = 0; t < n; t++) {
      std::vector<float> sum(shape.hidden, 0);
      std::vector<bool> seen(r.ranks, false);
      for (std::uint32_t kk = 0; kk < K; kk++) {
        const bool there = plan->position[r.rank][t * K + kk] >= 0;
        const float wanted = there ? 1 + weight(r.rank, t, kk + 40) : 0;
        if (home[t * K + kk] != wanted)
          wrong("rank %u: weight gradient of token %u, k %u is %g, not %g", r.rank, t, kk, home[t * K + kk], wanted);
        if (!there) continue;
        const auto holder = std::size_t(shape.owner[std::size_t(plan->ids[r.rank][t * K + kk])]);
        if (shape.compact && seen[holder]) continue;
        seen[holder] = true;
        const std::vector<float> row =
            shape.row(row_key(salt, r.rank, t, shape.compact ? std::uint32_t(50 + holder) : kk), false);
        for (std::uint32_t c = 0; c < shape.hidden; c++) sum[c] += row[c];
      }
      compare("dispatch_backward", y.data() + t * shape.row_bytes(), sum, t);
    }
  }

  void spread(std::uint64_t salt, bool weighted, std::uint32_t refuser) {
    std::vector<std::uint8_t> g_scales;
    const bool quantised = shape.parts > 1 && shape.wire && r.own.one_in(2);
    const std::vector<std::uint8_t> g = tokens(salt, quantised ? &g_scales : nullptr), rows = expert_rows(salt + 1);
    bring(g, quantised ? &g_scales : nullptr);
    std::vector<std::uint8_t> grad_rows(std::size_t(capacity) * shape.row_bytes() + 1, 0xee);
    std::vector<float> dots(std::size_t(capacity) + 1, -9);
    const bool dotted = r.own.one_in(2);
    const bool spread = done("the result of spread", 3, refuser, [&] {
      return a2a_moe_spread(moe, request[3], g.data(), plan->tokens[r.rank], dotted ? rows.data() : nullptr, capacity,
                            weighted ? weights.data() : nullptr, rank.data(), token.data(), grad_rows.data(),
                            dotted ? dots.data() : nullptr);
    });
    if (!spread) return;
    for (std::size_t row = 0; row < std::size_t(capacity); row++) {
      std::vector<float> wanted(shape.hidden, 0);
      float dot = 0;
      if (rank[row] >= 0) {
        const auto s = std::uint32_t(rank[row]), t = std::uint32_t(token[row]), kk = std::uint32_t(k[row]);
        wanted = shape.row(row_key(salt, s, t), true);
        const std::vector<float> mine_row = shape.row(row_key(salt + 1, s, t, kk), false);
        for (std::uint32_t c = 0; c < shape.hidden; c++) {
          dot += wanted[c] * mine_row[c];
          if (weighted && given_weights()) wanted[c] *= weight(s, t, kk);
        }
      }
      if (dotted && dots[row] != dot)
        wrong("rank %u: dot product of row %zu is %g, not %g", r.rank, row, dots[row], dot);
      compare("spread", grad_rows.data() + row * shape.row_bytes(), wanted, std::int64_t(row));
    }
  }
};

Layers::Layers(Rank& rank) : r_(rank) {
  for (std::size_t i = 0; i < 3; i++) layers_.push_back(std::make_unique<Layer>(rank, i));
}
Layers::~Layers() = default;

void Layers::step(Part part) {
  Layer& layer = *layers_[r_.plan.below(std::uint32_t(layers_.size()))];
  const std::uint64_t key = r_.plan.next();
  const bool weighted = r_.plan.one_in(2);
  const std::uint32_t nobody = ~0u, somebody = r_.plan.below(r_.ranks), refused = r_.plan.below(part == kAll ? 9 : 1);
  auto refuser = [&](std::uint32_t call) { return refused == call ? somebody : nobody; };
  pause_a_moment(r_.own);
  layer.dispatch(key, refuser(1));
  if (refused == 1 || part == kDispatch) return;
  pause_a_moment(r_.own);
  if (part != kSpread) layer.combine(10, weighted, refuser(2));
  if (part != kCombine) layer.spread(20, weighted, refuser(3));
  if (part != kSpread) layer.dispatch_backward(30);
}

}  // namespace race
