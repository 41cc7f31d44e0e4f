// Wire formats: e4m3 with block scales. A part of simd.cpp; see simd_types.h.
#pragma once
#include "simd_types.h"

namespace a2a {
namespace A2A_ISA {

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
}  // namespace a2a
