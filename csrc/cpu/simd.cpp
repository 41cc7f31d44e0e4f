// Inner loops, compiled once per instruction set (A2A_ISA = plain, avx2, avx512) from the same source.
//
// Sums work on blocks of 256 columns held in a float array, so that the compiler vectorises plain loops for each set and the
// order of operations cannot differ between them: every column is its own chain of rounded products and rounded sums
// (-ffp-contract=off), whatever the register width. That is what makes results equal bit for bit on every machine.
// The dot product's order is fixed by its 256 lanes in the same way (simd.h).
#include "simd.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define A2A_CAT2(a, b) a##b
#define A2A_CAT(a, b) A2A_CAT2(a, b)
#define A2A_STR2(a) #a
#define A2A_STR(a) A2A_STR2(a)
#define A2A_IS_plain 0
#define A2A_IS_avx2 2
#define A2A_IS_avx512 5
#define A2A_LEVEL A2A_CAT(A2A_IS_, A2A_ISA)

namespace a2a {
namespace A2A_ISA {

typedef std::uint8_t u8;
typedef std::uint16_t u16;
typedef std::uint32_t u32;
constexpr std::size_t kBlock = 256;

inline u32 bits(float f) {
  u32 u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float from_bits(u32 u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// ---------------------------------------------------------------- copies past the cache

#if A2A_LEVEL >= 2
#if A2A_LEVEL == 5
typedef __m512i Vec;
inline Vec load(const u8* p) { return _mm512_loadu_si512(p); }
inline void stream(u8* p, Vec v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
#else
typedef __m256i Vec;
inline Vec load(const u8* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void stream(u8* p, Vec v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
#endif

inline void stream_line(u8* out, const u8* in) {
  for (std::size_t k = 0; k < 64; k += sizeof(Vec)) stream(out + k, load(in + k));
}

// Four pages at a time, their lines interleaved and the next four prefetched: one page after the other leaves the memory
// controller with too few requests in flight (12.3 against 8.3 GB/s a rank with two ranks, 32 MiB).
void copy_stream(u8* out, const u8* in, std::size_t bytes) {
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(out)) & 63;
  if (bytes < head + 64) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  constexpr std::size_t kPages = 4, kPageBytes = 4096;
  while (bytes >= kPages * kPageBytes) {
    const bool more = bytes >= 2 * kPages * kPageBytes;
    for (std::size_t i = 0; i < kPageBytes; i += 128) {
      for (std::size_t w = 0; w < kPages; w++) {
        const std::size_t o = w * kPageBytes + i;
        if (more) {
          _mm_prefetch(reinterpret_cast<const char*>(in + o + kPages * kPageBytes), _MM_HINT_T1);
          _mm_prefetch(reinterpret_cast<const char*>(in + o + kPages * kPageBytes + 64), _MM_HINT_T1);
        }
        stream_line(out + o, in + o);
        stream_line(out + o + 64, in + o + 64);
      }
    }
    out += kPages * kPageBytes, in += kPages * kPageBytes, bytes -= kPages * kPageBytes;
  }
  while (bytes >= 64) {
    stream_line(out, in);
    out += 64, in += 64, bytes -= 64;
  }
  std::memcpy(out, in, bytes);
  _mm_sfence();  // streamed stores are weakly ordered; the signal that follows is not allowed to overtake them
}

void copy_row_stream(u8* out, const u8* in, std::size_t bytes) {
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(out)) & 63;
  if (bytes < head + 64) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  for (; bytes >= 64; out += 64, in += 64, bytes -= 64) stream_line(out, in);
  std::memcpy(out, in, bytes);
}

void fence() { _mm_sfence(); }
#else
void copy_stream(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
void copy_row_stream(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
void fence() {}
#endif

// ---------------------------------------------------------------- element types

// get and put are for loops that the compiler vectorises; load and store move blocks.

struct F32 {
  typedef float type;
  static constexpr bool kInline = true;
  static float get(float x) { return x; }
  static float put(float f) { return f; }
  static void load(float* f, const float* x, std::size_t n) { std::memcpy(f, x, n * 4); }
  static void store(float* x, const float* f, std::size_t n) { std::memcpy(x, f, n * 4); }
};

struct Bf16 {
  typedef u16 type;
  static constexpr bool kInline = true;
  static float get(u16 x) { return from_bits(u32(x) << 16); }
  static u16 put(float f) {  // to nearest even; NaN becomes 0x7fc0, as in torch
    const u32 u = bits(f);
    const u32 r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return u16((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0u : r);
  }
  static void load(float* __restrict f, const u16* __restrict x, std::size_t n) {
    for (std::size_t i = 0; i < n; i++) f[i] = get(x[i]);
  }
  static void store(u16* __restrict x, const float* __restrict f, std::size_t n) {
    for (std::size_t i = 0; i < n; i++) x[i] = put(f[i]);
  }
};

struct F16 {  // its conversions are instructions that compilers don't find by themselves: blocks only
  typedef u16 type;
  static constexpr bool kInline = false;
  static float get(u16) { return 0; }
  static u16 put(float) { return 0; }
#if A2A_LEVEL >= 2
  static void load(float* f, const u16* x, std::size_t n) {
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(f + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
    for (; i < n; i++) f[i] = _cvtsh_ss(x[i]);
  }
  static void store(u16* x, const float* f, std::size_t n) {
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(x + i), _mm256_cvtps_ph(_mm256_loadu_ps(f + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) x[i] = _cvtss_sh(f[i], _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static void load(float* f, const u16* x, std::size_t n) {
    for (std::size_t i = 0; i < n; i++) {
      const u32 sign = u32(x[i] & 0x8000) << 16, e = (x[i] >> 10) & 31, m = x[i] & 1023;
      if (e == 31)
        f[i] = from_bits(sign | 0x7f800000 | (m ? 0x400000 : 0) | m << 13);
      else if (e)
        f[i] = from_bits(sign | (e + 112) << 23 | m << 13);
      else
        f[i] = from_bits(bits(float(m) * from_bits(0x33800000)) | sign);  // m * 2^-24
    }
  }
  static void store(u16* x, const float* f, std::size_t n) {
    for (std::size_t i = 0; i < n; i++) {
      const u32 u = bits(f[i]), a = u & 0x7fffffff, sign = (u >> 16) & 0x8000;
      u32 r;
      if (a > 0x7f800000)
        r = 0x7e00 | ((a >> 13) & 0x3ff);
      else if (a >= 0x477ff000)
        r = 0x7c00;
      else if (a < 0x38800000)
        r = bits(from_bits(a) + 0.5f) - 0x3f000000;  // adding 0.5 rounds to multiples of 2^-24
      else
        r = (a + 0xfff + ((a >> 13) & 1) - 0x38000000) >> 13;
      x[i] = u16(r | sign);
    }
  }
#endif
};

// ---------------------------------------------------------------- sums

// Up to four terms at once, without a detour through memory.
template <class In, class Out, int N, bool W>
void few(void* out, const void* const* in, const float* w, std::size_t columns) {
  typedef typename In::type type;
  auto* __restrict o = static_cast<typename Out::type*>(out);
  const auto* __restrict x0 = static_cast<const type*>(in[0]);
  const auto* __restrict x1 = static_cast<const type*>(in[N > 1 ? 1 : 0]);
  const auto* __restrict x2 = static_cast<const type*>(in[N > 2 ? 2 : 0]);
  const auto* __restrict x3 = static_cast<const type*>(in[N > 3 ? 3 : 0]);
  const float w0 = W ? w[0] : 1, w1 = W && N > 1 ? w[1] : 1, w2 = W && N > 2 ? w[2] : 1, w3 = W && N > 3 ? w[3] : 1;
  for (std::size_t i = 0; i < columns; i++) {
    float sum = W ? w0 * In::get(x0[i]) : In::get(x0[i]);
    if (N > 1) sum = sum + (W ? w1 * In::get(x1[i]) : In::get(x1[i]));
    if (N > 2) sum = sum + (W ? w2 * In::get(x2[i]) : In::get(x2[i]));
    if (N > 3) sum = sum + (W ? w3 * In::get(x3[i]) : In::get(x3[i]));
    o[i] = Out::put(sum);
  }
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

template <class In, class Out, bool W>
void sum_of(void* out, const void* const* in, const float* w, std::size_t n, std::size_t columns) {
  if (In::kInline && Out::kInline && n <= 4) {
    if (n == 1) return few<In, Out, 1, W>(out, in, w, columns);
    if (n == 2) return few<In, Out, 2, W>(out, in, w, columns);
    if (n == 3) return few<In, Out, 3, W>(out, in, w, columns);
    return few<In, Out, 4, W>(out, in, w, columns);
  }
  many<In, Out, W>(out, in, w, n, columns);
}

template <class In, class Out>
void weighted_sum_of(void* out, const void* const* in, const float* w, std::size_t n, std::size_t columns) {
  if (w) return sum_of<In, Out, true>(out, in, w, n, columns);
  sum_of<In, Out, false>(out, in, w, n, columns);
}

void weighted_sum(u32 in_dtype, u32 out_dtype, void* out, const void* const* in, const float* w, std::size_t n, std::size_t columns) {
  if (in_dtype == kFloat32 && out_dtype == kFloat32) return weighted_sum_of<F32, F32>(out, in, w, n, columns);
  if (in_dtype == kBfloat16 && out_dtype == kBfloat16) return weighted_sum_of<Bf16, Bf16>(out, in, w, n, columns);
  if (in_dtype == kFloat16 && out_dtype == kFloat16) return weighted_sum_of<F16, F16>(out, in, w, n, columns);
  if (in_dtype == kBfloat16) return weighted_sum_of<Bf16, F32>(out, in, w, n, columns);
  if (in_dtype == kFloat16) return weighted_sum_of<F16, F32>(out, in, w, n, columns);
  if (out_dtype == kBfloat16) return weighted_sum_of<F32, Bf16>(out, in, w, n, columns);
  return weighted_sum_of<F32, F16>(out, in, w, n, columns);
}

template <class T, bool Dot>
void scale_dot_of(void* out, const void* g, const void* rows, float w, float* lanes, bool first, std::size_t columns, bool past_cache) {
  typedef typename T::type type;
  alignas(64) float a[kBlock], b[kBlock];
  alignas(64) type scaled[kBlock];
  auto* to = static_cast<type*>(out);
  past_cache = past_cache && (reinterpret_cast<std::uintptr_t>(out) & 63) == 0;
  for (std::size_t at = 0; at < columns; at += kBlock) {
    const std::size_t len = columns - at < kBlock ? columns - at : kBlock;
    const type* __restrict x = static_cast<const type*>(g) + at;
    const type* __restrict y = static_cast<const type*>(rows) + (Dot ? at : 0);
    type* __restrict o = past_cache ? scaled : to + at;
    if (!T::kInline) {
      T::load(a, x, len);
      if (Dot) T::load(b, y, len);
    }
    auto xi = [&](std::size_t i) { return T::kInline ? T::get(x[i]) : a[i]; };
    auto yi = [&](std::size_t i) { return T::kInline ? T::get(y[i]) : b[i]; };
    if (Dot && first && at == 0) {
      for (std::size_t i = 0; i < len; i++) lanes[i] = yi(i) * xi(i);
      for (std::size_t i = len; i < kBlock; i++) lanes[i] = 0;
    } else if (Dot) {
      for (std::size_t i = 0; i < len; i++) lanes[i] = lanes[i] + yi(i) * xi(i);
    }
    if (T::kInline) {
      for (std::size_t i = 0; i < len; i++) o[i] = T::put(w * T::get(x[i]));
    } else {
      for (std::size_t i = 0; i < len; i++) a[i] = w * a[i];
      T::store(o, a, len);
    }
    if (past_cache) copy_row_stream(reinterpret_cast<u8*>(to + at), reinterpret_cast<const u8*>(scaled), len * sizeof(type));
  }
}

template <class T>
void scale_dot_to(void* out, const void* g, const void* rows, float w, float* lanes, bool first, std::size_t columns, bool past_cache) {
  if (lanes) return scale_dot_of<T, true>(out, g, rows, w, lanes, first, columns, past_cache);
  scale_dot_of<T, false>(out, g, g, w, nullptr, first, columns, past_cache);
}

void scale_dot(u32 dtype, void* out, const void* g, const void* rows, float w, float* lanes, bool first, std::size_t columns,
               bool past_cache) {
  if (dtype == kFloat32) return scale_dot_to<F32>(out, g, rows, w, lanes, first, columns, past_cache);
  if (dtype == kBfloat16) return scale_dot_to<Bf16>(out, g, rows, w, lanes, first, columns, past_cache);
  scale_dot_to<F16>(out, g, rows, w, lanes, first, columns, past_cache);
}

// ---------------------------------------------------------------- e4m3 with block scales

inline u32 to_e4m3(float f) {  // to nearest even, saturating at 448; NaN stays NaN
  const u32 u = bits(f), a = u & 0x7fffffff, sign = (u >> 24) & 0x80;
  const u32 normal = ((a + 0x7ffff + ((a >> 20) & 1)) >> 20) - ((127 - 7) << 3);
  const u32 subnormal = bits(from_bits(a) + 16384.0f) - 0x46800000;  // 16384 has ulp 2^-9, e4m3's smallest step
  u32 r = a < 0x3c800000 ? subnormal : normal;                       // 2^-6
  r = a >= 0x43e80000 ? 0x7eu : r;                                   // 464 and above
  r = a > 0x7f800000 ? 0x7fu : r;
  return sign | r;
}

inline float from_e4m3(u8 v) {
  const u32 sign = u32(v & 0x80) << 24, a = v & 0x7f;
  const u32 normal = (a << 20) + ((127 - 7) << 23);
  const u32 subnormal = bits(float(a) * 0.001953125f);
  u32 r = a < 8 ? subnormal : normal;
  r = a == 0x7f ? 0x7fc00000u : r;
  return from_bits(sign | r);
}

inline float scale_of(const u8* scales, u32 wire, std::size_t block) {
  if (wire == kFp8) {
    float s;
    std::memcpy(&s, scales + block * 4, 4);
    return s;
  }
  const u32 e = scales[block];  // e8m0: 2^(e - 127); 255 is NaN
  return from_bits(e == 255 ? 0x7fc00000u : e ? e << 23 : 0x00400000u);
}

// amax of a block that holds a NaN is NaN, and so is its scale: the block arrives as NaN and is seen, not hidden.
template <class T>
void quantize_of(u32 wire, u8* q, u8* scales, const void* x, std::size_t columns) {
  const std::size_t block = wire_block(wire);
  alignas(64) float f[128];
  for (std::size_t at = 0, b = 0; at < columns; at += block, b++) {
    const std::size_t len = columns - at < block ? columns - at : block;
    T::load(f, static_cast<const typename T::type*>(x) + at, len);
    u32 top = 0;  // magnitudes order like their bits, NaN above all
    for (std::size_t i = 0; i < len; i++) {
      const u32 a = bits(f[i]) & 0x7fffffff;
      top = a > top ? a : top;
    }
    const float amax = from_bits(top);
    float scale = amax / 448.0f;
    if (top == 0) scale = 1.0f;
    if (wire == kFp8) {
      std::memcpy(scales + b * 4, &scale, 4);
    } else {  // the smallest power of two that is at least amax / 448
      const u32 s = bits(scale);
      u32 e = (s >> 23) + ((s & 0x7fffff) != 0);
      if (s < 0x00800000) e = s > 0x00400000 ? 1 : 0;
      if (e > 254) e = 255;
      if (top == 0) e = 127;
      scales[b] = u8(e);
      scale = scale_of(scales, wire, b);
    }
    for (std::size_t i = 0; i < len; i++) q[at + i] = u8(to_e4m3(f[i] / scale));
  }
}

template <class T>
void dequantize_of(u32 wire, void* x, const u8* q, const u8* scales, std::size_t columns) {
  const std::size_t block = wire_block(wire);
  alignas(64) float f[128];
  for (std::size_t at = 0, b = 0; at < columns; at += block, b++) {
    const std::size_t len = columns - at < block ? columns - at : block;
    const float scale = scale_of(scales, wire, b);
    for (std::size_t i = 0; i < len; i++) f[i] = from_e4m3(q[at + i]) * scale;
    T::store(static_cast<typename T::type*>(x) + at, f, len);
  }
}

void quantize(u32 dtype, u32 wire, u8* q, u8* scales, const void* x, std::size_t columns) {
  if (dtype == kFloat32) return quantize_of<F32>(wire, q, scales, x, columns);
  if (dtype == kBfloat16) return quantize_of<Bf16>(wire, q, scales, x, columns);
  quantize_of<F16>(wire, q, scales, x, columns);
}

void dequantize(u32 dtype, u32 wire, void* x, const u8* q, const u8* scales, std::size_t columns) {
  if (dtype == kFloat32) return dequantize_of<F32>(wire, x, q, scales, columns);
  if (dtype == kBfloat16) return dequantize_of<Bf16>(wire, x, q, scales, columns);
  dequantize_of<F16>(wire, x, q, scales, columns);
}

}  // namespace A2A_ISA

#if A2A_LEVEL == 5
#define A2A_TABLE kSimdAvx512
#elif A2A_LEVEL == 2
#define A2A_TABLE kSimdAvx2
#else
#define A2A_TABLE kSimdPlain
#endif

const Simd A2A_TABLE = {A2A_STR(A2A_ISA),       A2A_ISA::copy_stream, A2A_ISA::copy_row_stream, A2A_ISA::fence, A2A_ISA::weighted_sum,
                        A2A_ISA::scale_dot, A2A_ISA::quantize,    A2A_ISA::dequantize};

}  // namespace a2a
