// moe_combine: y[token] = sum over ranks, in rank order, of round(sum over that rank's rows of the token, in expert order)
//   Inner sum: float32, each weight * row rounded, then added, from the first term; rounded once to the row dtype (or kept in
//   float32, wire_combine). Outer sum: float32 from the first term, rounded once (not at all with kWideSums). No contribution: 0.
//   With weight_grads, every row's float travels home too: token_weight_grads[token, k].
// Cost     2 steps; every row read once; one partial row stored and loaded per (token, rank that has rows of it)
// Buffers  rows and y private; partials cross in the pair rings of the communicator
// VISIBLE  E stores a unit of partials, then produced = n + 1 (seq_cst); the owner loads produced (acquire), then the unit.
// REUSE    ring slot n: E waits for consumed > n - slots, which the owner stores after its last load.
// PROGRESS E fills rings while they have room, in turns with summing what is complete for its own tokens; a full ring only
//          stops that peer's units. The rank that is furthest behind always finds room: everybody before it has consumed.
// FAILURE  as in signal.h; y is undefined.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "moe.h"

namespace a2a {
namespace {

struct Grad {
  std::uint16_t token, k;
  float value;
};

// A unit of partials in a ring slot.
struct PartialLayout {
  Cut cut;
  std::size_t element, stride, tokens_at, grads_at, rows_at;
  PartialLayout(const a2a_moe& m, bool grads) {
    element = m.wire_combine ? 4 : m.element();
    cut = make_cut(m.hidden, m.c->geo.slot_bytes, 256, 4 + (grads ? m.top_k * sizeof(Grad) : 0), element, 1, 256);
    stride = align_up(cut.tile_columns * element, 64);
    tokens_at = 64;
    grads_at = align_up(tokens_at + cut.tokens_per_unit * 4, 8);
    rows_at = align_up(grads_at + (grads ? cut.tokens_per_unit * m.top_k * sizeof(Grad) : 0), 64);
  }
};

struct Combine {
  a2a_moe& m;
  const PartialLayout layout;
  const TokenRows& index;
  const std::uint8_t* rows;
  const float* weights;
  const std::int32_t *row_k, *row_index;
  const float* weight_grads;
  std::uint8_t* y;
  float* token_weight_grads;

  // The sum of this rank's rows of one token, columns [at, at + columns). False: it has none.
  bool partial(std::uint32_t source, std::uint32_t token, std::uint32_t at, std::uint32_t columns,
               std::uint8_t* out) const {
    const std::int64_t i = index.first_token[source] + token;
    const std::int32_t from = index.start[i], to = index.start[i + 1];
    for (std::int32_t r = to; r < index.start[i + 2] && !row_index;
         r++)  // the next token's rows are far away: ask for them now
      prefetch(rows + std::size_t(index.rows[r]) * m.row_bytes() + at * m.element(), columns * m.element());
    if (from == to) return false;
    const void* in[32 * 2];
    float w[32 * 2];
    std::size_t n = 0;
    if (row_index) {  // compact: the token lies here once
      in[n++] = rows + std::size_t(row_index[index.rows[from]]) * m.row_bytes() + at * m.element();
    } else {
      for (std::int32_t r = from; r < to && n < 64; r++) {
        in[n] = rows + std::size_t(index.rows[r]) * m.row_bytes() + at * m.element();
        w[n++] = weights ? weights[index.rows[r]] : 0;
      }
    }
    simd().weighted_sum(m.dtype, m.wire_combine ? std::uint32_t(kFloat32) : m.dtype, out, in,
                        weights && !row_index ? w : nullptr, n, columns);
    return true;
  }

  void fill(std::uint32_t owner, std::uint32_t number, std::uint8_t* slot) const {
    const Unit unit(layout.cut, m.hidden, std::size_t(m.tokens[owner]), number);
    const std::uint32_t tile = unit.tile, t0 = unit.first, n = unit.tokens, at = unit.at, columns = unit.columns;
    auto* head = reinterpret_cast<std::uint32_t*>(slot);
    auto* tokens = reinterpret_cast<std::uint32_t*>(slot + layout.tokens_at);
    auto* grads = reinterpret_cast<Grad*>(slot + layout.grads_at);
    std::uint32_t filled = 0, num_grads = 0;
    for (std::uint32_t t = 0; t < n; t++) {
      if (!partial(owner, t0 + t, at, columns, slot + layout.rows_at + filled * layout.stride)) continue;
      tokens[filled++] = t;
      if (weight_grads && tile == 0) {
        const std::int64_t i = index.first_token[owner] + t0 + t;
        for (std::int32_t r = index.start[i]; r < index.start[i + 1]; r++)
          grads[num_grads++] = {std::uint16_t(t), std::uint16_t(row_k[index.rows[r]]), weight_grads[index.rows[r]]};
      }
    }
    head[0] = filled;
    head[1] = num_grads;
  }

  // Sum one unit of this rank's own tokens; slots[p] is peer p's part of it.
  void sum(std::uint32_t number, const std::uint8_t* const* slots, std::uint32_t* cursor, std::uint8_t* own) const {
    const std::uint32_t P = m.c->world, me = m.c->rank;
    const Unit unit(layout.cut, m.hidden, std::size_t(m.tokens[me]), number);
    const std::uint32_t tile = unit.tile, t0 = unit.first, n = unit.tokens, at = unit.at, columns = unit.columns;
    const std::uint32_t partial_dtype = m.wire_combine ? std::uint32_t(kFloat32) : m.dtype;
    const std::uint32_t y_dtype = m.wire_combine == kWideSums ? std::uint32_t(kFloat32) : m.dtype;
    const std::size_t y_element = dtype_bytes(y_dtype);
    const void** in = static_cast<const void**>(__builtin_alloca(P * sizeof(void*)));
    std::memset(cursor, 0, P * sizeof *cursor);
    for (std::uint32_t t = 0; t < n; t++) {
      std::size_t terms = 0;
      for (std::uint32_t p = 0; p < P; p++) {
        if (p == me) {
          if (partial(me, t0 + t, at, columns, own)) in[terms++] = own;
          continue;
        }
        const auto* head = reinterpret_cast<const std::uint32_t*>(slots[p]);
        const auto* tokens = reinterpret_cast<const std::uint32_t*>(slots[p] + layout.tokens_at);
        if (cursor[p] < head[0] && tokens[cursor[p]] == t)
          in[terms++] = slots[p] + layout.rows_at + cursor[p]++ * layout.stride;
      }
      std::uint8_t* out = y + (std::size_t(t0 + t) * m.hidden + at) * y_element;
      if (terms == 0)
        std::memset(out, 0, columns * y_element);
      else
        simd().weighted_sum(partial_dtype, y_dtype, out, in, nullptr, terms, columns);
    }
    if (!token_weight_grads || tile != 0) return;
    for (std::uint32_t p = 0; p < P; p++) {
      if (p == me) {
        for (std::int64_t i = index.first_token[me] + t0; i < index.first_token[me] + t0 + n; i++)
          for (std::int32_t r = index.start[i]; r < index.start[i + 1]; r++)
            token_weight_grads[std::size_t(i - index.first_token[me]) * m.top_k + std::size_t(row_k[index.rows[r]])] =
                weight_grads[index.rows[r]];
        continue;
      }
      const auto* head = reinterpret_cast<const std::uint32_t*>(slots[p]);
      const auto* grads = reinterpret_cast<const Grad*>(slots[p] + layout.grads_at);
      for (std::uint32_t g = 0; g < head[1]; g++)
        token_weight_grads[std::size_t(t0 + grads[g].token) * m.top_k + grads[g].k] = grads[g].value;
    }
  }
};

int run(a2a_moe& m, std::uint32_t request, const void* rows, std::int64_t num_rows, const float* weights,
        const std::int32_t* row_rank, const std::int32_t* row_token, const std::int32_t* row_k,
        const std::int32_t* row_index, const float* weight_grads, void* y, float* token_weight_grads,
        std::uint32_t tokens) {
  Context& c = *m.c;
  const std::uint32_t P = c.world, me = c.rank;
  if (int rc = begin_op(c, request % kTexts, true)) return rc;
  if (int rc = exchange_tokens(m, request, tokens, 0)) return rc;
  TokenRows index;
  std::int64_t bad = 0;
  if (token_rows(m, num_rows, row_rank, row_token, &index, &bad)) {
    char message[kCauseBytes];
    std::snprintf(message, sizeof message,
                  "rank %u: routing row %lld names token %d of rank %d, which has %llu tokens in this call: "
                  "combine was given the routing of another dispatch",
                  me, (long long)bad, row_token[bad], row_rank[bad],
                  row_rank[bad] < std::int32_t(P) ? (unsigned long long)m.tokens[row_rank[bad]] : 0ull);
    fail(c, kMismatch, me, m.text, message);
    return kFailed;
  }
  const PartialLayout layout(m, weight_grads != nullptr);
  if (token_weight_grads) std::memset(token_weight_grads, 0, std::size_t(tokens) * m.top_k * 4);
  const Combine k{m,     layout,    index,        static_cast<const std::uint8_t*>(rows), weights,
                  row_k, row_index, weight_grads, static_cast<std::uint8_t*>(y),          token_weight_grads};
  std::uint32_t* sent = m.scratch<std::uint32_t>(3, 2 * P);
  std::uint32_t* cursor = sent + P;
  std::memset(sent, 0, P * sizeof *sent);
  auto* own = m.scratch<std::uint8_t>(6, layout.stride);
  const std::uint8_t** slots = static_cast<const std::uint8_t**>(__builtin_alloca(P * sizeof(void*)));
  auto units_of = [&](std::uint32_t r) { return layout.cut.units(std::size_t(m.tokens[r])); };
  const std::uint32_t my_units = units_of(me);
  std::uint32_t summed = 0;
  auto has_room = [&](std::uint32_t p) {
    return mutant(kIgnoreRingSpace) ||
           !reached(c.word(Geometry::kProduced, p, me).load(std::memory_order_relaxed),
                    c.word(Geometry::kConsumed, me, p).load(std::memory_order_acquire) + c.geo.ring_slots);
  };
  auto arrived = [&](std::uint32_t p) {
    return !reached(c.word(Geometry::kConsumed, p, me).load(std::memory_order_relaxed),
                    c.word(Geometry::kProduced, me, p).load(std::memory_order_acquire));
  };
  auto missing = [&](std::uint32_t p) {
    return p != me && ((summed < my_units && !arrived(p)) || (sent[p] < units_of(p) && !has_room(p)));
  };
  Wait wait(c, m.text, true);
  for (;;) {
    bool moved = false, left = false;
    for (std::uint32_t i = 1; i < P; i++) {
      const std::uint32_t p = (me + i) % P;
      if (sent[p] >= units_of(p)) continue;
      left = true;
      if (!has_room(p)) continue;
      auto& produced = c.word(Geometry::kProduced, p, me);
      const std::uint32_t n = produced.load(std::memory_order_relaxed);
      k.fill(p, sent[p]++, c.ring(p, me, n));
      signal(c, p, produced, n + 1);
      moved = true;
    }
    if (summed < my_units) {
      left = true;
      bool ready = true;
      for (std::uint32_t p = 0; p < P; p++) ready = ready && (p == me || arrived(p));
      if (ready) {
        for (std::uint32_t p = 0; p < P; p++)
          slots[p] =
              p == me ? nullptr : c.ring(me, p, c.word(Geometry::kConsumed, p, me).load(std::memory_order_relaxed));
        if (!mutant(kEarlyConsume)) k.sum(summed++, slots, cursor, own);
        for (std::uint32_t i = 1; i < P; i++) {
          const std::uint32_t p = (me + i) % P;
          auto& consumed = c.word(Geometry::kConsumed, p, me);
          signal(c, p, consumed, consumed.load(std::memory_order_relaxed) + 1);
        }
        if (mutant(kEarlyConsume)) k.sum(summed++, slots, cursor, own);
        moved = true;
      }
    }
    if (!left) return kOk;
    if (moved)
      wait.progressed();
    else if (int rc = wait.idle(missing))
      return rc;
  }
}

}  // namespace
}  // namespace a2a

int a2a_moe_combine(a2a_moe* m, uint32_t request, const void* rows, int64_t num_rows, const float* weights,
                    const int32_t* row_rank, const int32_t* row_token, const int32_t* row_k, const int32_t* row_index,
                    const float* weight_grads, void* y, float* token_weight_grads, uint32_t tokens) {
  a2a::lock(*m->c, true);
  const int rc = a2a::run(*m, request, rows, num_rows, weights, row_rank, row_token, row_k, row_index, weight_grads, y,
                          token_weight_grads, tokens);
  a2a::unlock(*m->c);
  return rc;
}
