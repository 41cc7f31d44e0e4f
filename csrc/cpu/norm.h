// The rows of an all-reduce with a residual add and RMSNorm (a2a_reduce_norm), for both of its algorithms.
#pragma once
#include <cstring>

#include "a2a.h"
#include "simd.h"

namespace a2a {

struct Norm {
  const a2a_norm& call;
  std::uint8_t *out, *residual_out;
  const std::uint8_t* residual;
  const void* weight;
  std::uint32_t ranks;
  const void** terms;  // room for one a rank

  std::size_t row_bytes() const { return call.columns * dtype_bytes(call.reduction.dtype); }

  // The row at byte `at` of every tensor. Rank p's term is at inputs[p] + offset. Returns the row's scale.
  float reduce(const void* const* inputs, std::size_t offset, std::size_t at) const {
    for (std::uint32_t p = 0; p < ranks; p++) terms[p] = static_cast<const std::uint8_t*>(inputs[p]) + offset;
    const std::uint32_t dtype = call.reduction.dtype;
    const float scale = simd().add_norm(dtype, residual_out + at, terms, ranks, residual + at, call.eps, call.columns);
    simd().normalise(dtype, out + at, residual_out + at, scale, weight, call.columns);
    return scale;
  }
  // The row at byte `at`, of which another rank has made `r`, what residual_out gets, and the scale.
  void take(const std::uint8_t* r, float scale, std::size_t at) const {
    std::memcpy(residual_out + at, r, row_bytes());
    simd().normalise(call.reduction.dtype, out + at, r, scale, weight, call.columns);
  }
};

}  // namespace a2a
