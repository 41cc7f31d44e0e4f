// moe_spread: the gradient of a combine goes back to the expert rows.
//   grad_rows[r] = round(weights[r] * g[token of r]);  weight_grads[r] = dot(rows[r], g[token of r]), lanes as in simd.h
//   Every rank stores its g once into its publication ring; every peer scales it into the rows that it holds, reading
//   its expert rows on the way for the dot products.
// Cost     2 steps; g stored once, loaded once a rank that needs it; rows read once if weight_grads; grad_rows written once
// Buffers  all private but the ring
// VISIBLE, REUSE, PROGRESS, FAILURE  as in moe_dispatch.cpp (staged).
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "moe.h"

namespace a2a {
namespace {

int run(a2a_moe& m, std::uint32_t request, const void* g, std::uint32_t tokens, const void* rows, std::int64_t num_rows,
        const float* weights, const std::int32_t* row_rank, const std::int32_t* row_token, void* grad_rows,
        float* weight_grads) {
  Context& c = *m.c;
  const std::uint32_t P = c.world, me = c.rank;
  if (int rc = begin_op(c, request % kTexts, true)) return rc;
  if (int rc = exchange_tokens(m, request, tokens, 0)) return rc;
  TokenRows index;
  std::int64_t bad = 0;
  if (token_rows(m, num_rows, row_rank, row_token, &index, &bad)) {
    fail(c, kMismatch, me, m.text, "the routing of another dispatch came to this combine's backward");
    return kFailed;
  }
  const WireRow wire(m, false);
  const std::size_t element = m.element(), row_bytes = m.row_bytes();
  auto* out = static_cast<std::uint8_t*>(grad_rows);
  const bool stream = std::size_t(num_rows) * row_bytes >= c.stream_bytes && row_bytes % 64 == 0;
  for (std::int64_t r = 0; r < num_rows; r++) {  // rows of no token: padding, and what lies past the end
    if (row_rank[r] >= 0) continue;
    std::memset(out + std::size_t(r) * row_bytes, 0, row_bytes);
    if (weight_grads) weight_grads[r] = 0;
  }
  std::uint32_t* done = m.scratch<std::uint32_t>(3, P);
  std::memset(done, 0, P * sizeof *done);
  const std::size_t most_rows = m.top_k;  // of one token here
  float* lanes = m.scratch<float>(4, (wire.cut.tiles > 1 ? P * most_rows : 1) * 256);
  auto* dequantized = m.scratch<std::uint8_t>(6, row_bytes);
  Publication ring(c, c.scratch);
  Wait wait(c, m.text, true);
  const std::uint32_t my_units = std::uint32_t(wire.cut.units(tokens));
  std::uint32_t published = 0;
  auto units_of = [&](std::uint32_t s) { return std::uint32_t(wire.cut.units(std::size_t(m.tokens[s]))); };
  auto missing = [&](std::uint32_t p) {
    return p != me &&
           (done[p] < units_of(p) ||
            (published < my_units &&
             reached(c.published(me).load(std::memory_order_relaxed),
                     c.word(Geometry::kTaken, me, p).load(std::memory_order_relaxed) + c.geo.publish_slots)));
  };
  auto consume = [&](std::uint32_t source, std::uint32_t unit, const std::uint8_t* slot, const std::uint8_t* raw) {
    const std::uint32_t tile = unit % wire.cut.tiles, t0 = unit / wire.cut.tiles * wire.cut.tokens_per_unit;
    const std::uint32_t left = std::uint32_t(m.tokens[source]) - t0;
    const std::uint32_t n = left < wire.cut.tokens_per_unit ? left : wire.cut.tokens_per_unit;
    const std::uint32_t at = tile * wire.cut.tile_columns, columns = wire.columns(m, tile);
    for (std::uint32_t t = 0; t < n; t++) {
      const std::int64_t i = index.first_token[source] + t0 + t;
      for (std::int32_t r = index.start[i + 1]; weight_grads && t + 1 < n && r < index.start[i + 2]; r++)
        prefetch(static_cast<const std::uint8_t*>(rows) + std::size_t(index.rows[r]) * row_bytes + at * element,
                 columns * element);
      if (index.start[i] == index.start[i + 1]) continue;
      const std::uint8_t* in =
          raw ? raw + std::size_t(t0 + t) * row_bytes + at * element : slot + wire.rows_at + t * wire.stride;
      if (!raw && m.wire != kNoWire) {
        simd().dequantize(m.dtype, m.wire, dequantized, in, in + columns, columns);
        in = dequantized;
      }
      for (std::int32_t r = index.start[i]; r < index.start[i + 1]; r++) {
        const std::size_t row = std::size_t(index.rows[r]);
        const std::size_t which = std::size_t(r - index.start[i]);
        float* lane =
            weight_grads ? lanes + (wire.cut.tiles > 1 ? (source * most_rows + which % most_rows) * 256 : 0) : nullptr;
        simd().scale_dot(m.dtype, out + row * row_bytes + at * element, in,
                         rows ? static_cast<const std::uint8_t*>(rows) + row * row_bytes + at * element : nullptr,
                         weights ? weights[row] : 1.0f, lane, tile == 0, columns, stream);
        if (lane && tile + 1 == wire.cut.tiles) weight_grads[row] = simd().fold(m.dtype, lane);
      }
    }
  };
  for (;;) {
    bool moved = false, left = false;
    if (published < my_units) {
      left = true;
      if (ring.has_space()) {
        const std::uint32_t tile = published % wire.cut.tiles,
                            t0 = published / wire.cut.tiles * wire.cut.tokens_per_unit;
        const std::uint32_t n = tokens - t0 < wire.cut.tokens_per_unit ? tokens - t0 : wire.cut.tokens_per_unit;
        const std::uint32_t at = tile * wire.cut.tile_columns, columns = wire.columns(m, tile);
        std::uint8_t* slot = ring.slot();
        const auto* x = static_cast<const std::uint8_t*>(g);
        for (std::uint32_t t = 0; t < n && (P > 1 || m.wire != kNoWire); t++) {
          std::uint8_t* to = slot + wire.rows_at + t * wire.stride;
          const std::uint8_t* in = x + std::size_t(t0 + t) * row_bytes + at * element;
          if (m.wire == kNoWire)
            std::memcpy(to, in, columns * element);
          else
            simd().quantize(m.dtype, m.wire, to, to + columns, in, columns);
        }
        if (P > 1) ring.publish();
        consume(me, published, slot, m.wire == kNoWire ? x : nullptr);
        published++;
        moved = true;
      }
    }
    for (std::uint32_t i = 1; i < P; i++) {
      const std::uint32_t s = (me + i) % P;
      if (done[s] >= units_of(s)) continue;
      left = true;
      const std::uint8_t* slot = ring.next(s);
      if (!slot) continue;
      if (mutant(kEarlyTake)) ring.take(s);
      consume(s, done[s]++, slot, nullptr);
      if (!mutant(kEarlyTake)) ring.take(s);
      moved = true;
    }
    if (!left) {
      if (stream) simd().fence();
      return kOk;
    }
    if (moved)
      wait.progressed();
    else if (int rc = wait.idle(missing))
      return rc;
  }
}

}  // namespace
}  // namespace a2a

int a2a_moe_spread(a2a_moe* m, uint32_t request, const void* g, uint32_t tokens, const void* rows, int64_t num_rows,
                   const float* weights, const int32_t* row_rank, const int32_t* row_token, void* grad_rows,
                   float* weight_grads) {
  a2a::lock(*m->c, true);
  const int rc =
      a2a::run(*m, request, g, tokens, rows, num_rows, weights, row_rank, row_token, grad_rows, weight_grads);
  a2a::unlock(*m->c);
  return rc;
}
