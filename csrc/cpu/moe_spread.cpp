// moe_spread: the gradient of a combine goes back to the expert rows.
//   grad_rows[r] = round(weights[r] * g[token of r]);  weight_grads[r] = dot(rows[r], g[token of r]), lanes as in simd.h
//   Every rank stores its g once into its publication ring; every peer scales it into the rows that it holds, reading
//   its expert rows on the way for the dot products. g may lie in parts, some of them quantised before (a2a_moe_bring).
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
  const std::size_t most_rows = m.top_k;  // of one token here
  float* lanes = m.scratch<float>(4, (wire.cut.tiles > 1 ? P * most_rows : 1) * 256);
  auto* dequantized = m.scratch<std::uint8_t>(6, row_bytes);
  const a2a_moe_part own{g, nullptr, nullptr, tokens, 0};
  Brought brought{m.brought ? m.brought : &own};
  const bool quantized_g = brought.parts->scales != nullptr;
  auto fill = [&](std::uint32_t number, std::uint8_t* slot) {
    if (P == 1 && m.wire == kNoWire) return;  // nobody reads it
    const Unit unit(wire.cut, m.hidden, tokens, number);
    for (std::uint32_t t = 0; t < unit.tokens; t++) {
      std::uint8_t* to = slot + wire.rows_at + t * wire.stride;
      const std::uint8_t* in = brought.row(unit.first + t, quantized_g ? m.hidden : row_bytes);
      if (m.wire == kNoWire)
        std::memcpy(to, in + unit.at * element, unit.columns * element);
      else if (quantized_g)
        copy_quantized(m, to, in, brought.scales(unit.first + t, m.scale_row_bytes()), unit.at, unit.columns);
      else
        simd().quantize(m.dtype, m.wire, to, to + unit.columns, in + unit.at * element, unit.columns);
    }
  };
  auto consume = [&](std::uint32_t source, std::uint32_t number, const std::uint8_t* slot) {
    const bool raw = source == me && m.wire == kNoWire;
    const Unit unit(wire.cut, m.hidden, std::size_t(m.tokens[source]), number);
    const std::uint32_t t0 = unit.first, n = unit.tokens, at = unit.at, columns = unit.columns;
    for (std::uint32_t t = 0; t < n; t++) {
      const std::int64_t i = index.first_token[source] + t0 + t;
      for (std::int32_t r = index.start[i + 1]; weight_grads && t + 1 < n && r < index.start[i + 2]; r++)
        prefetch(static_cast<const std::uint8_t*>(rows) + std::size_t(index.rows[r]) * row_bytes + at * element,
                 columns * element);
      if (index.start[i] == index.start[i + 1]) continue;
      const std::uint8_t* in =
          raw ? brought.row(t0 + t, row_bytes) + at * element : slot + wire.rows_at + t * wire.stride;
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
                         weights ? weights[row] : 1.0f, lane, unit.tile == 0, columns, stream);
        if (lane && unit.tile + 1 == wire.cut.tiles) weight_grads[row] = simd().fold(m.dtype, lane);
      }
    }
  };
  const int rc = circulate(m, wire.cut, fill, consume);
  if (rc == kOk && stream) simd().fence();
  return rc;
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
