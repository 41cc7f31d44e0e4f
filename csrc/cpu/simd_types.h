// What simd.cpp and its parts stand on: registers of the instruction set they are compiled for, and the element types.
//
// get and put convert one element, load and store a run of them. With registers, get2 and put2 convert kStep elements to and from
// two vectors of floats. Which element sits where in the two is the type's own choice: bfloat16 keeps its even elements in
// one and its odd ones in the other, since splitting them is one shift and one mask. Sums don't care; lanes are put in order
// when they are folded.
//
// This header and the other simd_*.h are parts of simd.cpp, which is compiled once per instruction set (A2A_ISA = plain, avx2,
// avx512): all they define lies in a namespace of that name, so that no linker takes one set's code for another's.
#pragma once
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
#endif

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

}  // namespace A2A_ISA
}  // namespace a2a
