// Rows of an all-reduce that is followed by a residual add and RMSNorm. A part of simd.cpp; see simd_types.h.
//
//   r = round(residual + round(terms[0] + terms[1] + ...))     each sum in float32, rounded to the dtype
//   scale = 1 / sqrt(S / columns + eps)                          S: the squares of r, summed as a tree of neighbours
//   out = round((r * scale) * weight)                            in float32, rounded once
// The tree adds columns 2i and 2i + 1, then these sums in the same way, with zeros behind the row's end up to a power of two. So any
// aligned piece of a power of two columns can be summed by itself, which is how GPUs cut a row among threads.
#pragma once
#include <cmath>

#include "simd_types.h"

namespace a2a {
namespace A2A_ISA {

void weighted_sum(u32 in_dtype, u32 out_dtype, void* out, const void* const* in, const float* w, std::size_t n,
                  std::size_t columns);

// n, a power of two, floats of `a` as a tree of neighbours; `b` has room for half as many.
inline float sum_of_tree(float* __restrict a, float* __restrict b, std::size_t n) {
  while (n > 1) {
    n /= 2;
    for (std::size_t i = 0; i < n; i++) b[i] = a[2 * i] + a[2 * i + 1];
    if (n == 1) return b[0];
    n /= 2;
    for (std::size_t i = 0; i < n; i++) a[i] = b[2 * i] + b[2 * i + 1];
  }
  return a[0];
}

// A block of up to kBlock columns: r, and the sum of its squares.
template <class T>
float add_block(typename T::type* r, const typename T::type* sum, const typename T::type* residual, std::size_t len) {
  alignas(64) float square[kBlock], pair[kBlock / 2];
  std::size_t i = 0, paired = 0;
#if A2A_LEVEL >= 2
  for (; i + kStep <= len; i += kStep) {
    Floats a, b, c, d;
    T::get2(sum + i, a, b);
    T::get2(residual + i, c, d);
    T::put2(r + i, plus(c, a), plus(d, b), false);
    T::get2(r + i, a, b);  // rounded
    if (T::kSplit) {       // neighbours are side by side in the two
      write(pair + i / 2, plus(times(a, a), times(b, b)));
    } else {
      write(square + i, times(a, a));
      write(square + i + kWidth, times(b, b));
    }
  }
  if (T::kSplit) paired = i / 2;
#endif
  for (; i < len; i++) {
    r[i] = T::put(T::get(residual[i]) + T::get(sum[i]));
    const float x = T::get(r[i]);
    square[i] = x * x;
  }
  for (; i < kBlock; i++) square[i] = 0;
  for (std::size_t k = paired; k < kBlock / 2; k++) pair[k] = square[2 * k] + square[2 * k + 1];
  return sum_of_tree(pair, square, kBlock / 2);
}

template <class T>
float add_norm_of(u32 dtype, void* r, const void* const* terms, std::size_t n, const void* residual, float eps,
                  std::size_t columns) {
  typedef typename T::type type;
  alignas(64) type sum[kBlock];
  alignas(64) float blocks[kNormColumns / kBlock], half[kNormColumns / kBlock / 2];
  const void** here = static_cast<const void**>(__builtin_alloca(n * sizeof(void*)));
  std::size_t count = 0;
  for (std::size_t at = 0; at < columns; at += kBlock) {
    const std::size_t len = columns - at < kBlock ? columns - at : kBlock;
    for (std::size_t k = 0; k < n; k++) here[k] = static_cast<const type*>(terms[k]) + at;
    weighted_sum(dtype, dtype, sum, here, nullptr, n, len);
    blocks[count++] = add_block<T>(static_cast<type*>(r) + at, sum, static_cast<const type*>(residual) + at, len);
  }
  std::size_t whole = 1;
  while (whole < count) whole *= 2;
  while (count < whole) blocks[count++] = 0;
  const float total = sum_of_tree(blocks, half, whole);
  return 1.0f / std::sqrt(total / float(columns) + eps);
}

float add_norm(u32 dtype, void* r, const void* const* terms, std::size_t n, const void* residual, float eps,
               std::size_t columns) {
  if (dtype == kFloat32) return add_norm_of<F32>(dtype, r, terms, n, residual, eps, columns);
  if (dtype == kBfloat16) return add_norm_of<Bf16>(dtype, r, terms, n, residual, eps, columns);
  return add_norm_of<F16>(dtype, r, terms, n, residual, eps, columns);
}

template <class T>
void normalise_of(void* out, const void* r, float scale, const void* weight, std::size_t columns) {
  typedef typename T::type type;
  auto* o = static_cast<type*>(out);
  const auto* x = static_cast<const type*>(r);
  const auto* w = static_cast<const type*>(weight);
  std::size_t i = 0;
#if A2A_LEVEL >= 2
  const Floats v = splat(scale);
  for (; i + kStep <= columns; i += kStep) {
    Floats a, b, c, d;
    T::get2(x + i, a, b);
    T::get2(w + i, c, d);
    T::put2(o + i, times(times(a, v), c), times(times(b, v), d), false);
  }
#endif
  for (; i < columns; i++) o[i] = T::put((T::get(x[i]) * scale) * T::get(w[i]));
}

void normalise(u32 dtype, void* out, const void* r, float scale, const void* weight, std::size_t columns) {
  if (dtype == kFloat32) return normalise_of<F32>(out, r, scale, weight, columns);
  if (dtype == kBfloat16) return normalise_of<Bf16>(out, r, scale, weight, columns);
  normalise_of<F16>(out, r, scale, weight, columns);
}

}  // namespace A2A_ISA
}  // namespace a2a
