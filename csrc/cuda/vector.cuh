// Rows as 16-byte vectors: element types, the wire formats, and the sums' arithmetic.
//
// Every conversion and sum gives the bits of the CPU kernels (csrc/cpu/simd.cpp): products are rounded, then added, and
// quantised values are quotients of a true division. The kernels are compiled without fused multiply-add.
#pragma once
#include "ptx.cuh"

namespace a2a {

enum Dtype : std::uint32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
enum Wire : std::uint32_t { kNoWire = 0, kFp8 = 1, kMxfp8 = 2 };

constexpr std::uint32_t kFull = 0xffffffff;  // all lanes of a warp

__device__ constexpr std::uint32_t element_bytes(std::uint32_t dtype) { return dtype == kFloat32 ? 4 : 2; }
__device__ constexpr std::uint32_t wire_block(std::uint32_t wire) { return wire == kMxfp8 ? 32 : 128; }
__device__ constexpr std::uint32_t scale_bytes(std::uint32_t wire) { return wire == kMxfp8 ? 1 : 4; }

// One 16-byte vector of a row, and its columns as floats.
template <std::uint32_t kDtype>
struct Vector {
  using Term = float;
  static constexpr std::uint32_t kColumns = 16 / element_bytes(kDtype);

  __device__ static void split(float (&f)[kColumns], uint4 v) {
    const std::uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (std::uint32_t i = 0; i < 4; i++) {
      if constexpr (kDtype == kFloat32) {
        f[i] = __uint_as_float(w[i]);
      } else if constexpr (kDtype == kBfloat16) {
        f[2 * i] = __uint_as_float(w[i] << 16);
        f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
      } else {
        f[2 * i] = ptx::from_f16(std::uint16_t(w[i]));
        f[2 * i + 1] = ptx::from_f16(std::uint16_t(w[i] >> 16));
      }
    }
  }

  __device__ static uint4 join(const float (&f)[kColumns]) {
    std::uint32_t w[4];
#pragma unroll
    for (std::uint32_t i = 0; i < 4; i++) {
      if constexpr (kDtype == kFloat32)
        w[i] = __float_as_uint(f[i]);
      else if constexpr (kDtype == kBfloat16)
        w[i] = ptx::to_bf16x2(f[2 * i], f[2 * i + 1]);
      else
        w[i] = ptx::to_f16x2(f[2 * i], f[2 * i + 1]);
    }
    return {w[0], w[1], w[2], w[3]};
  }
};

// ---------------------------------------------------------------- e4m3 with block scales

__device__ __forceinline__ float e8m0_value(std::uint32_t code) {  // 2^(code - 127); 255 is NaN
  return __uint_as_float(code == 255 ? 0x7fc00000u : code ? code << 23 : 0x00400000u);
}

__device__ __forceinline__ float scale_value(std::uint32_t wire, const std::uint8_t* scales, std::uint32_t block) {
  return wire == kFp8 ? reinterpret_cast<const float*>(scales)[block] : e8m0_value(scales[block]);
}

// The scale of a block whose greatest magnitude has the bits `top`, and how it is written. NaN orders above all: a block that
// holds one gets the scale NaN, and arrives as NaN.
struct Scale {
  float value;
  std::uint32_t code;  // of mxfp8

  __device__ Scale(std::uint32_t wire, std::uint32_t top) {
    value = __fdiv_rn(__uint_as_float(top), 448.0f);
    code = 0;
    if (wire == kFp8) {
      if (value == 0) value = 1.0f;  // nothing in the block, or nothing that a float32 scale can lift
      return;
    }
    const std::uint32_t s = __float_as_uint(value);  // the smallest power of two that is at least amax / 448
    code = (s >> 23) + ((s & 0x7fffff) != 0);
    if (s < 0x00800000) code = s > 0x00400000 ? 1 : 0;
    if (code > 254) code = 255;
    if (top == 0) code = 127;
    value = e8m0_value(code);
  }
};

// Quantise a warp's vector k of a piece: lanes side by side hold a block's columns. Returns the lane's bytes, four to a word.
// Lanes past the end of the row bring zeros.
template <std::uint32_t kDtype, std::uint32_t kWire>
struct Quantise {
  static constexpr std::uint32_t kColumns = Vector<kDtype>::kColumns;
  static constexpr std::uint32_t kLanes = wire_block(kWire) / kColumns;  // of a block

  __device__ static Scale run(std::uint32_t (&q)[kColumns / 4], uint4 v) {
    float f[kColumns];
    Vector<kDtype>::split(f, v);
    std::uint32_t top = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kColumns; i++) {
      const std::uint32_t magnitude = __float_as_uint(f[i]) & 0x7fffffff;
      top = magnitude > top ? magnitude : top;
    }
#pragma unroll
    for (std::uint32_t d = kLanes / 2; d; d /= 2) {
      const std::uint32_t other = __shfl_xor_sync(kFull, top, d);
      top = other > top ? other : top;
    }
    const Scale scale(kWire, top);
#pragma unroll
    for (std::uint32_t i = 0; i < kColumns / 4; i++) {
      const std::uint32_t low = ptx::to_e4m3x2(__fdiv_rn(f[4 * i], scale.value), __fdiv_rn(f[4 * i + 1], scale.value));
      const std::uint32_t high =
          ptx::to_e4m3x2(__fdiv_rn(f[4 * i + 2], scale.value), __fdiv_rn(f[4 * i + 3], scale.value));
      q[i] = low | high << 16;
    }
    return scale;
  }
};

// By the first lane of each block; `vector` is the lane's.
template <std::uint32_t kDtype, std::uint32_t kWire>
__device__ __forceinline__ void store_scale(std::uint8_t* scales, std::uint32_t vector, float value,
                                            std::uint32_t code) {
  constexpr std::uint32_t kLanes = Quantise<kDtype, kWire>::kLanes;
  if (vector % kLanes) return;
  if constexpr (kWire == kFp8)
    reinterpret_cast<float*>(scales)[vector / kLanes] = value;
  else
    scales[vector / kLanes] = std::uint8_t(code);
}

template <std::uint32_t kDtype>
__device__ uint4 dequantise(const std::uint32_t* q, float scale) {
  constexpr std::uint32_t kColumns = Vector<kDtype>::kColumns;
  float f[kColumns];
#pragma unroll
  for (std::uint32_t i = 0; i < kColumns / 2; i++) {
    const std::uint32_t h = ptx::e4m3x2_to_f16x2(std::uint16_t(q[i / 2] >> 16 * (i % 2)));
    f[2 * i] = __fmul_rn(ptx::from_f16(std::uint16_t(h)), scale);
    f[2 * i + 1] = __fmul_rn(ptx::from_f16(std::uint16_t(h >> 16)), scale);
  }
  return Vector<kDtype>::join(f);
}

}  // namespace a2a
