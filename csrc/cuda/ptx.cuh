// The only inline assembly of a2a's CUDA kernels, one function an instruction. Every one that touches memory has a "memory"
// clobber, so that the compiler moves no other access across it.
//
// Orders and scopes are in the names. sys: between GPUs. A 16-byte access of type b128 is one access to the memory model, so
// that a reader sees all of a 16-byte store or none of it.
#pragma once
#include <cstdint>

namespace a2a::ptx {

__device__ __forceinline__ void store_release_sys(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ std::uint32_t load_acquire_sys(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t load_relaxed_sys(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed_sys(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ std::uint64_t load_relaxed_sys(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed_sys(uint4* p, uint4 v) {
  const std::uint64_t low = std::uint64_t(v.y) << 32 | v.x, high = std::uint64_t(v.w) << 32 | v.z;
  // clang-format off
  asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v; }"
               :: "l"(p), "l"(low), "l"(high) : "memory");
  // clang-format on
}

__device__ __forceinline__ uint4 load_relaxed_sys(const uint4* p) {
  std::uint64_t low, high;
  // clang-format off
  asm volatile("{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
               : "=l"(low), "=l"(high) : "l"(p) : "memory");
  // clang-format on
  return {std::uint32_t(low), std::uint32_t(low >> 32), std::uint32_t(high), std::uint32_t(high >> 32)};
}

__device__ __forceinline__ void store_release_sys(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ std::uint64_t load_acquire_sys(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// Within this GPU. Returns what was there.
__device__ __forceinline__ std::uint32_t add_acq_rel_gpu(std::uint32_t* p, std::uint32_t v) {
  std::uint32_t was;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(was) : "l"(p), "r"(v) : "memory");
  return was;
}

__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// 16 bytes that are read once, or not again soon: they leave the L1 cache alone.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Of a part of the block, a multiple of 32 threads; __syncthreads is number 0.
__device__ __forceinline__ void barrier(std::uint32_t number, std::uint32_t threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Returns what was there: 0 means that `v` is there now.
__device__ __forceinline__ std::uint64_t swap_if_zero_sys(std::uint64_t* p, std::uint64_t v) {
  std::uint64_t was;
  asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], 0, %2;" : "=l"(was) : "l"(p), "l"(v) : "memory");
  return was;
}

// Conversions: two floats to a word (low half first) and back, to nearest even. e4m3 saturates at 448. They touch no memory,
// and say so: the compiler may move loads across them.
__device__ __forceinline__ std::uint32_t to_bf16x2(float low, float high) {
  std::uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ std::uint32_t to_f16x2(float low, float high) {
  std::uint32_t v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ float from_f16(std::uint16_t h) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
  return v;
}

__device__ __forceinline__ std::uint16_t to_e4m3x2(float low, float high) {
  std::uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ std::uint32_t e4m3x2_to_f16x2(std::uint16_t q) {
  std::uint32_t v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(q));
  return v;
}

__device__ __forceinline__ std::uint64_t global_timer_ns() {
  std::uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
  return v;
}

}  // namespace a2a::ptx
