// Inner loops, compiled once per instruction set (A2A_ISA = plain, avx2, avx512) from the same source.
//
// Sums work on blocks of 256 columns held in a float array, so that the compiler vectorises plain loops for each set and the
// order of operations cannot differ between them: every column is its own chain of rounded products and rounded sums
// (-ffp-contract=off), whatever the register width. That is what makes results equal bit for bit on every machine.
// The dot product's order is fixed by its 256 lanes in the same way (simd.h).
#include "simd.h"

#include "simd_copy.h"
#include "simd_norm.h"
#include "simd_reduce.h"
#include "simd_types.h"
#include "simd_wire.h"

namespace a2a {
namespace A2A_ISA {

// ---------------------------------------------------------------- sums

// Up to four terms at once, without a detour through memory.
template <class T, int N, bool W>
void few(void* out, const void* const* in, const float* w, std::size_t columns, bool past_cache = false) {
  typedef typename T::type type;
  auto* __restrict o = static_cast<type*>(out);
  const type* x[4];
  float weight[4];
  for (int k = 0; k < N; k++) {
    x[k] = static_cast<const type*>(in[k]);
    weight[k] = W ? w[k] : 1;
  }
  auto one_by_one = [&](std::size_t i, std::size_t end) {
    for (; i < end; i++) {
      float sum = W ? weight[0] * T::get(x[0][i]) : T::get(x[0][i]);
      for (int k = 1; k < N; k++) sum = sum + (W ? weight[k] * T::get(x[k][i]) : T::get(x[k][i]));
      o[i] = T::put(sum);
    }
  };
  std::size_t i = 0;
#if A2A_LEVEL >= 2
  const std::size_t unaligned = (0 - reinterpret_cast<std::uintptr_t>(o)) & 63;
  past_cache = past_cache && unaligned % sizeof(type) == 0 && unaligned / sizeof(type) <= columns;
  if (past_cache) one_by_one(0, i = unaligned / sizeof(type));  // streamed vectors are whole lines
  Floats v[4];
  for (int k = 0; k < N; k++) v[k] = splat(weight[k]);
  for (; i + kStep <= columns; i += kStep) {
    Floats a, b, c, d;
    T::get2(x[0] + i, a, b);
    if (W) a = times(v[0], a), b = times(v[0], b);
    for (int k = 1; k < N; k++) {
      T::get2(x[k] + i, c, d);
      if (W) c = times(v[k], c), d = times(v[k], d);
      a = plus(a, c), b = plus(b, d);
    }
    T::put2(o + i, a, b, past_cache);
  }
  if (past_cache) fence();
#else
  (void)past_cache;
#endif
  one_by_one(i, columns);
}

template <class In, class Out, bool W>
void many(void* out, const void* const* in, const float* w, std::size_t n, std::size_t columns) {
  alignas(64) float sum[kBlock], term[kBlock];
  typedef typename In::type type;
  for (std::size_t at = 0; at < columns; at += kBlock) {
    const std::size_t len = columns - at < kBlock ? columns - at : kBlock;
    In::load(sum, static_cast<const type*>(in[0]) + at, len);
    if (W)
      for (std::size_t i = 0; i < len; i++) sum[i] = w[0] * sum[i];
    for (std::size_t k = 1; k < n; k++) {
      In::load(term, static_cast<const type*>(in[k]) + at, len);
      const float wk = W ? w[k] : 1;
      for (std::size_t i = 0; i < len; i++) sum[i] = sum[i] + (W ? wk * term[i] : term[i]);
    }
    Out::store(static_cast<typename Out::type*>(out) + at, sum, len);
  }
}

template <class T, bool W>
void same_type_sum(void* out, const void* const* in, const float* w, std::size_t n, std::size_t columns) {
  if (n == 1) return few<T, 1, W>(out, in, w, columns);
  if (n == 2) return few<T, 2, W>(out, in, w, columns);
  if (n == 3) return few<T, 3, W>(out, in, w, columns);
  if (n == 4) return few<T, 4, W>(out, in, w, columns);
  many<T, T, W>(out, in, w, n, columns);
}

template <class T>
void same_type(void* out, const void* const* in, const float* w, std::size_t n, std::size_t columns) {
  if (w) return same_type_sum<T, true>(out, in, w, n, columns);
  same_type_sum<T, false>(out, in, w, n, columns);
}

template <class In, class Out>
void mixed(void* out, const void* const* in, const float* w, std::size_t n, std::size_t columns) {
  if (w) return many<In, Out, true>(out, in, w, n, columns);
  many<In, Out, false>(out, in, w, n, columns);
}

void weighted_sum(u32 in_dtype, u32 out_dtype, void* out, const void* const* in, const float* w, std::size_t n,
                  std::size_t columns) {
  if (in_dtype == kFloat32 && out_dtype == kFloat32) return same_type<F32>(out, in, w, n, columns);
  if (in_dtype == kBfloat16 && out_dtype == kBfloat16) return same_type<Bf16>(out, in, w, n, columns);
  if (in_dtype == kFloat16 && out_dtype == kFloat16) return same_type<F16>(out, in, w, n, columns);
  if (in_dtype == kBfloat16) return mixed<Bf16, F32>(out, in, w, n, columns);
  if (in_dtype == kFloat16) return mixed<F16, F32>(out, in, w, n, columns);
  if (out_dtype == kBfloat16) return mixed<F32, Bf16>(out, in, w, n, columns);
  mixed<F32, F16>(out, in, w, n, columns);
}

// Plain sums of at most four terms, past the cache. False: of more terms, or another type; nothing is done then.
template <class T>
void sum_of(void* out, const void* const* in, std::size_t n, std::size_t columns) {
  if (n == 1) return few<T, 1, false>(out, in, nullptr, columns, true);
  if (n == 2) return few<T, 2, false>(out, in, nullptr, columns, true);
  if (n == 3) return few<T, 3, false>(out, in, nullptr, columns, true);
  few<T, 4, false>(out, in, nullptr, columns, true);
}

bool sum_past_cache(u32 dtype, void* out, const void* const* in, std::size_t n, std::size_t columns) {
  if (n > 4 || dtype > kFloat16) return false;
  if (dtype == kFloat32) return sum_of<F32>(out, in, n, columns), true;
  if (dtype == kBfloat16) return sum_of<Bf16>(out, in, n, columns), true;
  return sum_of<F16>(out, in, n, columns), true;
}

// ---------------------------------------------------------------- scaling, and the dot product's lanes
//
// A block of 256 columns adds to the 256 lanes. Within each kStep of them the lanes lie in the type's own order (get2) as long
// as whole steps come; what is left of a row at its end is added lane by lane, to where the step order would have put it.

template <class T>
std::size_t lane_of(std::size_t c) {
  if (!T::kSplit || kStep == 0) return c;
  return c / (kStep ? kStep : 1) * kStep + (c % 2) * kWidth + c % (kStep ? kStep : 1) / 2;
}

template <class T, bool Dot>
void scale_dot_of(void* out, const void* g, const void* rows, float w, float* lanes, bool first, std::size_t columns,
                  bool past_cache) {
  typedef typename T::type type;
  auto* __restrict o = static_cast<type*>(out);
  const auto* __restrict x = static_cast<const type*>(g);
  const auto* __restrict y = static_cast<const type*>(rows);
  if (Dot && first)
    for (std::size_t c = columns; c < kBlock; c++) lanes[lane_of<T>(c)] = 0;
  past_cache = past_cache && (reinterpret_cast<std::uintptr_t>(out) & 63) == 0;
  std::size_t i = 0;
#if A2A_LEVEL >= 2
  const Floats v = splat(w);
  for (; i + kStep <= columns; i += kStep) {
    Floats a, b, c, d;
    T::get2(x + i, a, b);
    if (Dot) {
      T::get2(y + i, c, d);
      float* lane = lanes + i % kBlock;
      c = times(c, a), d = times(d, b);
      if (!first || i >= kBlock) c = plus(read(lane), c), d = plus(read(lane + kWidth), d);
      write(lane, c);
      write(lane + kWidth, d);
    }
    T::put2(o + i, times(v, a), times(v, b), past_cache);
  }
#else
  (void)past_cache;
#endif
  for (; i < columns; i++) {
    const float a = T::get(x[i]);
    if (Dot) {
      float& lane = lanes[lane_of<T>(i % kBlock)];
      lane = first && i < kBlock ? T::get(y[i]) * a : lane + T::get(y[i]) * a;
    }
    o[i] = T::put(w * a);
  }
}

template <class T>
void scale_dot_to(void* out, const void* g, const void* rows, float w, float* lanes, bool first, std::size_t columns,
                  bool past_cache) {
  if (lanes) return scale_dot_of<T, true>(out, g, rows, w, lanes, first, columns, past_cache);
  scale_dot_of<T, false>(out, g, g, w, nullptr, first, columns, past_cache);
}

void scale_dot(u32 dtype, void* out, const void* g, const void* rows, float w, float* lanes, bool first,
               std::size_t columns, bool past_cache) {
  if (dtype == kFloat32) return scale_dot_to<F32>(out, g, rows, w, lanes, first, columns, past_cache);
  if (dtype == kBfloat16) return scale_dot_to<Bf16>(out, g, rows, w, lanes, first, columns, past_cache);
  scale_dot_to<F16>(out, g, rows, w, lanes, first, columns, past_cache);
}

// Halve 256 lanes into one: lane[c] += lane[c + 128], then 64, 32, ... 1, by column. In the split order a half of whole pairs is
// the same half of the even and of the odd elements, and the last one adds the two.
float fold(u32 dtype, const float* lanes) {
#if A2A_LEVEL >= 2
  Floats v[kBlock / kWidth];
  for (std::size_t k = 0; k < kBlock / kWidth; k++) v[k] = read(lanes + k * kWidth);
  for (std::size_t half = kBlock / kWidth / 2; half >= 2; half /= 2)
    for (std::size_t k = 0; k < half; k++) v[k] = plus(v[k], v[k + half]);
  float low[kWidth], high[kWidth];
  const bool split = dtype == kBfloat16;
  if (!split) v[0] = plus(v[0], v[1]);
  write(low, v[0]);
  write(high, v[1]);
  for (std::size_t half = kWidth / 2; half; half /= 2)
    for (std::size_t c = 0; c < half; c++) {
      low[c] = low[c] + low[c + half];
      high[c] = high[c] + high[c + half];
    }
  return split ? low[0] + high[0] : low[0];
#else
  (void)dtype;
  float sum[kBlock / 2];
  for (std::size_t c = 0; c < kBlock / 2; c++) sum[c] = lanes[c] + lanes[c + kBlock / 2];
  for (std::size_t half = kBlock / 4; half; half /= 2)
    for (std::size_t c = 0; c < half; c++) sum[c] = sum[c] + sum[c + half];
  return sum[0];
#endif
}

}  // namespace A2A_ISA

#if A2A_LEVEL == 5
#define A2A_TABLE kSimdAvx512
#elif A2A_LEVEL == 2
#define A2A_TABLE kSimdAvx2
#else
#define A2A_TABLE kSimdPlain
#endif

const Simd A2A_TABLE = {A2A_STR(A2A_ISA),  A2A_ISA::copy_stream,  A2A_ISA::copy_fetch, A2A_ISA::copy_row_stream,
                        A2A_ISA::fence,    A2A_ISA::weighted_sum, A2A_ISA::scale_dot,  A2A_ISA::fold,
                        A2A_ISA::quantize, A2A_ISA::dequantize,   A2A_ISA::reduce,     A2A_ISA::add_norm,
                        A2A_ISA::normalise};

}  // namespace a2a
