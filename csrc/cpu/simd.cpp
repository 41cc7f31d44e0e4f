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

// GCC 12 and 13 warn of their own headers' deliberately undefined registers.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
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
inline void copy_line(u8* out, const u8* in) { std::memcpy(out, in, 64); }

// Four pages at a time, their lines interleaved and the next four prefetched: one page after the other leaves the memory
// controller with too few requests in flight (12.3 against 8.3 GB/s a rank with two ranks, 32 MiB).
template <void (*kLine)(u8*, const u8*)>
void copy_pages(u8* out, const u8* in, std::size_t bytes) {
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
        kLine(out + o, in + o);
        kLine(out + o + 64, in + o + 64);
      }
    }
    out += kPages * kPageBytes, in += kPages * kPageBytes, bytes -= kPages * kPageBytes;
  }
  while (bytes >= 64) {
    kLine(out, in);
    out += 64, in += 64, bytes -= 64;
  }
  std::memcpy(out, in, bytes);
}

void copy_stream(u8* out, const u8* in, std::size_t bytes) {
  copy_pages<stream_line>(out, in, bytes);
  _mm_sfence();  // streamed stores are weakly ordered; the signal that follows is not allowed to overtake them
}
void copy_fetch(u8* out, const u8* in, std::size_t bytes) { copy_pages<copy_line>(out, in, bytes); }

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
void copy_fetch(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
void copy_row_stream(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
void fence() {}
#endif

// ---------------------------------------------------------------- element types
//
// get and put convert one element, load and store a run of them. With registers, get2 and put2 convert kStep elements to and from
// two vectors of floats. Which element sits where in the two is the type's own choice: bfloat16 keeps its even elements in
// one and its odd ones in the other, since splitting them is one shift and one mask. Sums don't care; lanes are put in order
// when they are folded.

#if A2A_LEVEL == 5
typedef __m512 Floats;
constexpr std::size_t kWidth = 16;
inline Floats splat(float f) { return _mm512_set1_ps(f); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats read(const float* p) { return _mm512_loadu_ps(p); }
inline void write(float* p, Floats v) { _mm512_storeu_ps(p, v); }
#elif A2A_LEVEL == 2
typedef __m256 Floats;
constexpr std::size_t kWidth = 8;
inline Floats splat(float f) { return _mm256_set1_ps(f); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats read(const float* p) { return _mm256_loadu_ps(p); }
inline void write(float* p, Floats v) { _mm256_storeu_ps(p, v); }
#else
constexpr std::size_t kWidth = 0;
#endif
constexpr std::size_t kStep = 2 * kWidth;

#if A2A_LEVEL >= 2
inline void put_vec(void* p, Vec v, bool past_cache) {
  if (past_cache)
    stream(static_cast<u8*>(p), v);
  else
    std::memcpy(p, &v, sizeof v);
}
#endif

struct F32 {
  typedef float type;
  static constexpr bool kSplit = false;
  static float get(float x) { return x; }
  static float put(float f) { return f; }
  static void load(float* f, const float* x, std::size_t n) { std::memcpy(f, x, n * 4); }
  static void store(float* x, const float* f, std::size_t n) { std::memcpy(x, f, n * 4); }
#if A2A_LEVEL >= 2
  static void get2(const float* x, Floats& a, Floats& b) { a = read(x), b = read(x + kWidth); }
  static void put2(float* x, Floats a, Floats b, bool past_cache) {
    put_vec(x, Vec(a), past_cache);
    put_vec(x + kWidth, Vec(b), past_cache);
  }
#endif
};

struct Bf16 {
  typedef u16 type;
  static constexpr bool kSplit = true;
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
#if A2A_LEVEL == 5
  static void get2(const u16* x, Floats& a, Floats& b) {
    const Vec v = _mm512_loadu_si512(x);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000))));
  }
  static Vec round(Floats f) {  // the result is the upper half of each word
    const Vec u = _mm512_castps_si512(f);
    const Vec odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const Vec r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  }
  static void put2(u16* x, Floats a, Floats b, bool past_cache) {
    put_vec(x, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(round(a), 16), round(b)), past_cache);
  }
#elif A2A_LEVEL == 2
  static void get2(const u16* x, Floats& a, Floats& b) {
    const Vec v = _mm256_loadu_si256(reinterpret_cast<const Vec*>(x));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000))));
  }
  static Vec round(Floats f) {
    const Vec u = _mm256_castps_si256(f);
    const Vec odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const Vec r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    const Vec nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), nan);
  }
  static void put2(u16* x, Floats a, Floats b, bool past_cache) {
    put_vec(x, _mm256_blend_epi16(_mm256_srli_epi32(round(a), 16), round(b), 0xaa), past_cache);
  }
#endif
};

struct F16 {
  typedef u16 type;
  static constexpr bool kSplit = false;
#if A2A_LEVEL >= 2
  static float get(u16 x) { return _cvtsh_ss(x); }
  static u16 put(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
#if A2A_LEVEL == 5
  static Floats wide(const u16* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
  static void put2(u16* x, Floats a, Floats b, bool past_cache) {
    const Vec low = _mm512_castsi256_si512(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    put_vec(x, _mm512_inserti64x4(low, _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT), 1), past_cache);
  }
#else
  static Floats wide(const u16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
  static void put2(u16* x, Floats a, Floats b, bool past_cache) {
    const Vec low = _mm256_castsi128_si256(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    put_vec(x, _mm256_inserti128_si256(low, _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT), 1), past_cache);
  }
#endif
  static void get2(const u16* x, Floats& a, Floats& b) { a = wide(x), b = wide(x + kWidth); }
#else
  static float get(u16 x) {
    const u32 sign = u32(x & 0x8000) << 16, e = (x >> 10) & 31, m = x & 1023;
    if (e == 31) return from_bits(sign | 0x7f800000 | (m ? 0x400000 : 0) | m << 13);
    if (e) return from_bits(sign | (e + 112) << 23 | m << 13);
    return from_bits(bits(float(m) * from_bits(0x33800000)) | sign);  // m * 2^-24
  }
  static u16 put(float f) {
    const u32 u = bits(f), a = u & 0x7fffffff, sign = (u >> 16) & 0x8000;
    u32 r;
    if (a > 0x7f800000)
      r = 0x7e00 | ((a >> 13) & 0x3ff);
    else if (a >= 0x477ff000)
      r = 0x7c00;
    else if (a < 0x38800000)
      r = bits(from_bits(a) + 0.5f) - 0x3f000000;  // adding 0.5 rounds to multiples of 2^-24
    else
      r = (a + 0xfff + ((a >> 13) & 1) - 0x38000000) >> 13;
    return u16(r | sign);
  }
#endif
  static void load(float* f, const u16* x, std::size_t n) {
    std::size_t i = 0;
#if A2A_LEVEL >= 2
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(f + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
    for (; i < n; i++) f[i] = get(x[i]);
  }
  static void store(u16* x, const float* f, std::size_t n) {
    std::size_t i = 0;
#if A2A_LEVEL >= 2
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(x + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(f + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) x[i] = put(f[i]);
  }
};

// ---------------------------------------------------------------- sums

// Up to four terms at once, without a detour through memory.
template <class T, int N, bool W>
void few(void* out, const void* const* in, const float* w, std::size_t columns) {
  typedef typename T::type type;
  auto* __restrict o = static_cast<type*>(out);
  const type* x[4];
  float weight[4];
  for (int k = 0; k < N; k++) {
    x[k] = static_cast<const type*>(in[k]);
    weight[k] = W ? w[k] : 1;
  }
  std::size_t i = 0;
#if A2A_LEVEL >= 2
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
    T::put2(o + i, a, b, false);
  }
#endif
  for (; i < columns; i++) {
    float sum = W ? weight[0] * T::get(x[0][i]) : T::get(x[0][i]);
    for (int k = 1; k < N; k++) sum = sum + (W ? weight[k] * T::get(x[k][i]) : T::get(x[k][i]));
    o[i] = T::put(sum);
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
    if (wire == kFp8) {
      if (scale == 0) scale = 1.0f;  // nothing in the block, or nothing that a float32 scale can lift
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

const Simd A2A_TABLE = {A2A_STR(A2A_ISA),  A2A_ISA::copy_stream,  A2A_ISA::copy_fetch, A2A_ISA::copy_row_stream,
                        A2A_ISA::fence,    A2A_ISA::weighted_sum, A2A_ISA::scale_dot,  A2A_ISA::fold,
                        A2A_ISA::quantize, A2A_ISA::dequantize};

}  // namespace a2a
