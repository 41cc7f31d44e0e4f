// moe_dispatch: rows[offset of (expert, source, token, k)] = x_source[token], on the rank that holds the expert.
//   A token is stored once into its rank's publication ring, whatever the number of its experts; every peer copies from
//   there the rows that are its own (staged). A receiver whose rows lie in symmetric memory may ask for direct instead: then
//   the source stores the rows where they belong, and the ring carries only ids and weights.
//   With a wire format the ring holds e4m3 and scales; receivers dequantise (or keep them, rows_wire).
//   A rank may bring other ranks' tokens, which came to it over rails, beside its own: then `source` and `token` above are those
//   of the rank that the token belongs to, and the row's bringer and place say who stored it here.
// Cost     2 steps (moe_count's and this); staged: tokens written once, rows copied once; direct: rows written once
// Buffers  x private; rows private (staged) or symmetric (direct); the ring belongs to the communicator
// VISIBLE  S stores a unit and, direct, the rows of its tokens, fences streamed stores, then published = n + 1 (seq_cst).
//          R loads published (acquire), then the unit. Direct rows: R returns only after the last unit of every source.
// REUSE    a slot is written again when every reader's `taken` has passed it, which it stores after its last load. Direct
//          rows: the block is this call's alone until the tensor that owns it dies.
// PROGRESS as in circulate (moe.h).
// FAILURE  as in signal.h; the outputs are undefined.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "moe.h"

namespace a2a {
namespace {

struct Dispatch {
  a2a_moe& m;
  const a2a_moe_rows& out;
  const WireRow wire;
  bool stream;
  std::int64_t* position;         // [world][tokens_per_unit * top_k] rows of a source's running unit
  std::int64_t* remote_position;  // [tokens_per_unit * top_k] rows of this rank's running unit elsewhere (direct)
  std::int32_t* compact_at;       // [world * parts] next distinct token of each source
  std::int64_t* compact_row;      // [world][tokens_per_unit]
  bool direct;                    // peers store this rank's rows
  std::int32_t overflow = 0;

  // Which part of what `rank` brings its token t is in, t being in part `hint` or a later one.
  std::uint32_t part_of(std::uint32_t rank, std::uint32_t t, std::uint32_t hint) const {
    const std::uint32_t* first = m.first_of_part + rank * (m.parts + 1);
    while (t >= first[hint + 1]) hint++;
    return hint;
  }

  std::size_t unit_ids() const { return std::size_t(wire.cut.tokens_per_unit) * m.top_k; }

  // Store columns [at, at + columns) of one received token.
  void put(std::int64_t row, std::uint32_t at, std::uint32_t columns, const std::uint8_t* in, bool raw) {
    auto* rows = static_cast<std::uint8_t*>(out.rows);
    if (raw) {
      copy_row(rows + std::size_t(row) * m.row_bytes() + at * m.element(), in, columns * m.element(), stream);
    } else if (out.rows_wire) {
      const std::size_t block = wire_block(m.wire), sb = scale_bytes(m.wire), blocks = ceil_div(m.hidden, block);
      std::memcpy(rows + std::size_t(row) * m.hidden + at, in, columns);
      std::memcpy(static_cast<std::uint8_t*>(out.scales) + (std::size_t(row) * blocks + at / block) * sb, in + columns,
                  ceil_div(columns, block) * sb);
    } else {
      simd().dequantize(m.dtype, m.wire, rows + std::size_t(row) * m.row_bytes() + at * m.element(), in, in + columns,
                        columns);
    }
  }

  // Copy what is this rank's from one unit of `source`. With `brought`, from where it is brought: the unit is this rank's own.
  void consume(std::uint32_t source, std::uint32_t number, const std::uint8_t* slot, Brought* brought) {
    Context& c = *m.c;
    const Unit unit(wire.cut, m.hidden, std::size_t(m.tokens[source]), number);
    const std::uint32_t t0 = unit.first, n = unit.tokens, at = unit.at, columns = unit.columns, K = m.top_k;
    std::int64_t* where = position + source * unit_ids();
    if (unit.tile == 0) {
      const auto* ids = reinterpret_cast<const std::int32_t*>(slot + wire.ids_at);
      const auto* weights = reinterpret_cast<const float*>(slot + wire.weights_at);
      const auto* numbers = reinterpret_cast<const std::int32_t*>(slot + wire.numbers_at);
      for (std::uint32_t t = 0, part = 0; t < n; t++) {
        part = part_of(source, t0 + t, part);
        const std::uint32_t from = source * m.parts + part;
        std::int64_t compact = -1;
        for (std::uint32_t k = 0; k < K; k++) {
          const std::int32_t id = ids[t * K + k];
          std::int64_t& row = where[t * K + k];
          row = -1;
          if (id < 0 || m.owner[id] != std::int32_t(c.rank)) continue;
          row = m.next[std::size_t(m.local[id]) * c.world * m.parts + from]++;
          if (out.compact && compact < 0) compact = compact_at[from]++;
          if (row >= out.capacity) {
            row = -1;
            overflow++;
            continue;
          }
          out.weights[row] = weights[t * K + k];
          out.rank[row] = m.source[from];
          out.token[row] = m.parts > 1 ? numbers[t] : std::int32_t(t0 + t);
          out.k[row] = std::int32_t(k);
          if (out.bringer) {
            out.bringer[row] = std::int32_t(source);
            out.place[row] = std::int32_t(t0 + t);
          }
          if (out.compact) out.index[row] = std::int32_t(compact);
        }
        compact_row[source * wire.cut.tokens_per_unit + t] = compact < out.compact_capacity ? compact : -1;
      }
    }
    if (direct && source != c.rank) return;  // its rows are in place already
    const bool raw = brought || m.wire == kNoWire;
    for (std::uint32_t t = 0; t < n; t++) {
      const std::uint8_t* in =
          brought ? brought->row(t0 + t, m.row_bytes()) + at * m.element() : slot + wire.rows_at + t * wire.stride;
      if (out.compact) {
        const std::int64_t row = compact_row[source * wire.cut.tokens_per_unit + t];
        if (row >= 0) put(row, at, columns, in, raw);
      } else {
        for (std::uint32_t k = 0; k < K; k++)
          if (where[t * K + k] >= 0) put(where[t * K + k], at, columns, in, raw);
      }
    }
  }
};

}  // namespace
}  // namespace a2a

using namespace a2a;

int a2a_moe_dispatch(a2a_moe* moe, const void* x, const void* x_scales, const void* ids, int ids_bytes,
                     const void* weights, uint32_t tokens, const a2a_moe_rows* rows) {
  a2a_moe& m = *moe;
  Context& c = *m.c;
  const std::uint32_t P = c.world, me = c.rank, K = m.top_k;
  const WireRow wire(m, true);
  const a2a_moe_part own{x, x_scales, nullptr, tokens, 0};
  Brought brought{m.brought ? m.brought : &own};
  const bool quantized_x = brought.parts->scales != nullptr;
  const std::size_t ids_n = std::size_t(wire.cut.tokens_per_unit) * K;
  Dispatch d{m,
             *rows,
             wire,
             false,
             m.scratch<std::int64_t>(4, (P + 1) * ids_n + P * wire.cut.tokens_per_unit),
             nullptr,
             nullptr,
             nullptr,
             rows->direct != 0};
  d.remote_position = d.position + P * ids_n;
  d.compact_row = d.remote_position + ids_n;
  d.compact_at = m.scratch<std::int32_t>(5, P * m.parts);
  std::int32_t distinct = 0;
  for (std::uint32_t i = 0; i < m.sources; i++) {
    const std::uint32_t place = m.order[i];
    d.compact_at[place] = distinct;
    distinct += std::int32_t(m.counts(place / m.parts)[place % m.parts * m.part_counts() + m.experts + me]);
  }
  // Everything that depends on counts alone: ends, padding, rows past the end.
  const std::int64_t used = m.rows_padded < rows->capacity ? m.rows_padded : rows->capacity;
  d.stream = !rows->compact && std::size_t(used) * m.row_bytes() >= c.stream_bytes;
  for (std::int64_t r = 0; r < rows->capacity; r++) rows->weights[r] = 0;
  std::memset(rows->rank, 0xff, std::size_t(rows->capacity) * 4);
  std::memset(rows->token, 0xff, std::size_t(rows->capacity) * 4);
  std::memset(rows->k, 0xff, std::size_t(rows->capacity) * 4);
  if (rows->bringer) {
    std::memset(rows->bringer, 0xff, std::size_t(rows->capacity) * 4);
    std::memset(rows->place, 0xff, std::size_t(rows->capacity) * 4);
  }
  if (rows->compact) std::memset(rows->index, 0, std::size_t(rows->capacity) * 4);
  std::int64_t row = 0;
  for (std::uint32_t i = 0; i < m.my_experts; i++) {
    std::int64_t count = 0;
    for (std::uint32_t n = 0; n < P * m.parts; n++)
      count +=
          m.counts(n / m.parts)[n % m.parts * m.part_counts() + std::size_t(m.of_rank[m.first[me] + std::int32_t(i)])];
    const std::int64_t end = row + m.pad(count);
    if (!rows->compact) {
      const std::int64_t from = row + count < used ? row + count : used, to = end < used ? end : used;
      const std::size_t bytes = rows->rows_wire ? m.hidden : m.row_bytes();
      std::memset(static_cast<std::uint8_t*>(rows->rows) + std::size_t(from) * bytes, 0,
                  std::size_t(to - from) * bytes);
      if (rows->rows_wire) {
        const std::size_t blocks = ceil_div(m.hidden, wire_block(m.wire));
        auto* scales = static_cast<std::uint8_t*>(rows->scales) + std::size_t(from) * blocks * scale_bytes(m.wire);
        for (std::size_t b = 0; b < std::size_t(to - from) * blocks; b++) {  // scale 1, as for any block of zeros
          const float one = 1.0f;
          if (m.wire == kFp8)
            std::memcpy(scales + b * 4, &one, 4);
          else
            scales[b] = 127;
        }
      }
    }
    row = end;
    rows->offsets[i] = std::int32_t(end < rows->capacity ? end : rows->capacity);
  }

  bool staged_peer = false, direct_peer = false;
  for (std::uint32_t p = 0; p < P; p++) {
    if (p == me) continue;
    staged_peer |= m.direct[p] == 0;
    direct_peer |= m.direct[p] != 0;
  }
  const bool ring_rows = staged_peer || m.wire != kNoWire;
  auto id_of = [&](std::size_t i) {  // of the i-th (token, k) of this rank
    return ids_bytes == 4 ? static_cast<const std::int32_t*>(ids)[i]
                          : std::int32_t(static_cast<const std::int64_t*>(ids)[i]);
  };
  auto fill = [&](std::uint32_t number, std::uint8_t* slot) {
    const Unit unit(wire.cut, m.hidden, tokens, number);
    const std::uint32_t t0 = unit.first, n = unit.tokens, at = unit.at, columns = unit.columns;
    auto* unit_ids = reinterpret_cast<std::int32_t*>(slot + wire.ids_at);
    if (unit.tile == 0) {
      for (std::size_t i = 0; i < std::size_t(n) * K; i++) unit_ids[i] = id_of(std::size_t(t0) * K + i);
      auto* unit_weights = reinterpret_cast<float*>(slot + wire.weights_at);
      if (weights)
        std::memcpy(unit_weights, static_cast<const float*>(weights) + std::size_t(t0) * K, std::size_t(n) * K * 4);
      else
        for (std::size_t i = 0; i < std::size_t(n) * K; i++) unit_weights[i] = 1.0f;
      auto* numbers = reinterpret_cast<std::int32_t*>(slot + wire.numbers_at);
      for (std::uint32_t t = 0; t < n && m.parts > 1; t++) numbers[t] = brought.number(t0 + t);
    }
    for (std::uint32_t t = 0; t < n && ring_rows; t++) {
      std::uint8_t* to = slot + wire.rows_at + t * wire.stride;
      if (m.wire == kNoWire) {
        std::memcpy(to, brought.row(t0 + t, m.row_bytes()) + at * m.element(), columns * m.element());
      } else if (quantized_x) {
        copy_quantized(m, to, brought.row(t0 + t, m.hidden), brought.scales(t0 + t, m.scale_row_bytes()), at, columns);
      } else {
        simd().quantize(m.dtype, m.wire, to, to + columns, brought.row(t0 + t, m.row_bytes()) + at * m.element(),
                        columns);
      }
    }
    if (direct_peer) {
      const bool stream = std::size_t(tokens) * K * m.row_bytes() >= c.stream_bytes;
      for (std::uint32_t t = 0; t < n; t++) {
        const std::uint8_t* in = brought.row(t0 + t, m.row_bytes()) + at * m.element();
        for (std::uint32_t k = 0; k < K; k++) {
          std::int64_t& to = d.remote_position[t * K + k];
          const std::int32_t id = id_of(std::size_t(t0 + t) * K + k);
          if (unit.tile == 0) {
            to = -1;
            if (id < 0 || m.owner[id] == std::int32_t(me) || !m.direct[m.owner[id]]) continue;
            to = m.remote[std::size_t(brought.at) * m.experts + std::size_t(id)]++;
            if (rows->limit >= 0 && to >= rows->limit) to = -1;
          }
          if (to < 0) continue;
          const std::uint32_t p = std::uint32_t(m.owner[id]);
          copy_row(c.at(p, m.direct[p]) + std::size_t(to) * m.row_bytes() + at * m.element(), in, columns * m.element(),
                   stream);
        }
      }
      if (stream) simd().fence();
    }
  };
  const int rc =
      circulate(m, wire.cut, fill, [&](std::uint32_t source, std::uint32_t number, const std::uint8_t* slot) {
        d.consume(source, number, slot, source == me && m.wire == kNoWire ? &brought : nullptr);
      });
  if (rc == kOk) {
    if (d.stream) simd().fence();
    *rows->overflow = d.overflow;
  }
  unlock(c);
  return rc;
}
