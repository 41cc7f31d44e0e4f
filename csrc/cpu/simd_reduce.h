// Reductions of every dtype, in the order of their terms. A part of simd.cpp; see simd_types.h.
//
// Sums of bfloat16, float16 and float32 are weighted_sum's. All else goes block by block through plain loops, each column a
// chain of its own, so that the bits are the same on every instruction set.
#pragma once
#include "simd_types.h"

namespace a2a {
namespace A2A_ISA {

void weighted_sum(u32 in_dtype, u32 out_dtype, void* out, const void* const* in, const float* w, std::size_t n,
                  std::size_t columns);

bool sum_past_cache(u32 dtype, void* out, const void* const* in, std::size_t n, std::size_t columns);

// An element type that is reduced in itself.
template <class X>
struct Itself {
  typedef X type;
  static void load(X* a, const X* x, std::size_t n) { std::memcpy(a, x, n * sizeof(X)); }
  static void store(X* x, const X* a, std::size_t n) { std::memcpy(x, a, n * sizeof(X)); }
};

template <class T>
struct Accumulator {
  typedef float type;
};
template <class X>
struct Accumulator<Itself<X>> {
  typedef X type;
};

template <class X>
bool is_nan(X) {
  return false;
}
inline bool is_nan(float x) { return x != x; }
inline bool is_nan(double x) { return x != x; }

struct Plus {
  template <class X>
  static X of(X a, X b) {
    return X(a + b);
  }
};
struct Larger {  // the first NaN wins
  template <class X>
  static X of(X a, X b) {
    return (b > a || is_nan(b)) && !is_nan(a) ? b : a;
  }
};
struct Smaller {
  template <class X>
  static X of(X a, X b) {
    return (b < a || is_nan(b)) && !is_nan(a) ? b : a;
  }
};

template <class T, class Op, bool kDivide>
void reduce_blocks(void* out, const void* const* in, std::size_t n, std::size_t count) {
  typedef typename T::type type;
  typedef typename Accumulator<T>::type acc;
  alignas(64) acc sum[kBlock], term[kBlock];
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t len = count - at < kBlock ? count - at : kBlock;
    T::load(sum, static_cast<const type*>(in[0]) + at, len);
    for (std::size_t k = 1; k < n; k++) {
      T::load(term, static_cast<const type*>(in[k]) + at, len);
      for (std::size_t i = 0; i < len; i++) sum[i] = Op::of(sum[i], term[i]);
    }
    if (kDivide)
      for (std::size_t i = 0; i < len; i++) sum[i] = acc(sum[i] / acc(n));
    T::store(static_cast<type*>(out) + at, sum, len);
  }
}

template <class T>
void reduce_float(u32 op, void* out, const void* const* in, std::size_t n, std::size_t count) {
  if (op == kSum) return reduce_blocks<T, Plus, false>(out, in, n, count);
  if (op == kAvg) return reduce_blocks<T, Plus, true>(out, in, n, count);
  if (op == kMax) return reduce_blocks<T, Larger, false>(out, in, n, count);
  reduce_blocks<T, Smaller, false>(out, in, n, count);
}

// Sums wrap around, which only unsigned types may.
template <class X, class Unsigned>
void reduce_integer(u32 op, void* out, const void* const* in, std::size_t n, std::size_t count) {
  if (op == kSum) return reduce_blocks<Itself<Unsigned>, Plus, false>(out, in, n, count);
  if (op == kMax) return reduce_blocks<Itself<X>, Larger, false>(out, in, n, count);
  reduce_blocks<Itself<X>, Smaller, false>(out, in, n, count);
}

void reduce(u32 dtype, u32 op, void* out, const void* const* in, std::size_t n, std::size_t count, bool past_cache) {
  if (op == kSum && past_cache && sum_past_cache(dtype, out, in, n, count)) return;
  if (op == kSum && (dtype == kFloat32 || dtype == kBfloat16 || dtype == kFloat16))
    return weighted_sum(dtype, dtype, out, in, nullptr, n, count);
  switch (dtype) {
    case kFloat32:
      return reduce_float<F32>(op, out, in, n, count);
    case kBfloat16:
      return reduce_float<Bf16>(op, out, in, n, count);
    case kFloat16:
      return reduce_float<F16>(op, out, in, n, count);
    case kFloat64:
      return reduce_float<Itself<double>>(op, out, in, n, count);
    case kUint8:
      return reduce_integer<std::uint8_t, std::uint8_t>(op, out, in, n, count);
    case kInt8:
      return reduce_integer<std::int8_t, std::uint8_t>(op, out, in, n, count);
    case kInt16:
      return reduce_integer<std::int16_t, std::uint16_t>(op, out, in, n, count);
    case kInt32:
      return reduce_integer<std::int32_t, std::uint32_t>(op, out, in, n, count);
    case kInt64:
      return reduce_integer<std::int64_t, std::uint64_t>(op, out, in, n, count);
  }
}

}  // namespace A2A_ISA
}  // namespace a2a
