// The twin of csrc/cuda/ptx.cuh for the CPU: the same functions, with the same names and arguments. An instruction that is
// added there and not here does not compile, and tests/test_cuda_shim.py says which.
#pragma once
#include <cstdint>

#include "convert.h"

namespace a2a::ptx {

using shim::Order;
using shim::Scope;

__device__ __forceinline__ void store_release_sys(std::uint32_t* p, std::uint32_t v) {
  shim::store(p, &v, sizeof v, Order::kRelease, Scope::kSystem);
}

__device__ __forceinline__ std::uint32_t load_acquire_sys(const std::uint32_t* p) {
  std::uint32_t v;
  shim::load(p, &v, sizeof v, Order::kAcquire, Scope::kSystem);
  return v;
}

__device__ __forceinline__ std::uint32_t load_relaxed_sys(const std::uint32_t* p) {
  std::uint32_t v;
  shim::load(p, &v, sizeof v, Order::kRelaxed, Scope::kSystem);
  return v;
}

__device__ __forceinline__ void store_relaxed_sys(std::uint64_t* p, std::uint64_t v) {
  shim::store(p, &v, sizeof v, Order::kRelaxed, Scope::kSystem);
}

__device__ __forceinline__ std::uint64_t load_relaxed_sys(const std::uint64_t* p) {
  std::uint64_t v;
  shim::load(p, &v, sizeof v, Order::kRelaxed, Scope::kSystem);
  return v;
}

__device__ __forceinline__ void store_relaxed_sys(uint4* p, uint4 v) {
  shim::store(p, &v, sizeof v, Order::kRelaxed, Scope::kSystem);
}

__device__ __forceinline__ uint4 load_relaxed_sys(const uint4* p) {
  uint4 v;
  shim::load(p, &v, sizeof v, Order::kRelaxed, Scope::kSystem);
  return v;
}

__device__ __forceinline__ void store_release_sys(std::uint64_t* p, std::uint64_t v) {
  shim::store(p, &v, sizeof v, Order::kRelease, Scope::kSystem);
}

__device__ __forceinline__ std::uint64_t load_acquire_sys(const std::uint64_t* p) {
  std::uint64_t v;
  shim::load(p, &v, sizeof v, Order::kAcquire, Scope::kSystem);
  return v;
}

__device__ __forceinline__ std::uint32_t add_acq_rel_gpu(std::uint32_t* p, std::uint32_t v) {
  return shim::update(p, Order::kAcquireRelease, Scope::kDevice, [v](std::uint32_t was) { return was + v; });
}

__device__ __forceinline__ void store_release_gpu(std::uint32_t* p, std::uint32_t v) {
  shim::store(p, &v, sizeof v, Order::kRelease, Scope::kDevice);
}

__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  shim::load(p, &v, sizeof v, Order::kAcquire, Scope::kDevice);
  return v;
}

__device__ __forceinline__ void barrier(std::uint32_t number, std::uint32_t threads) { shim::barrier(number, threads); }

__device__ __forceinline__ std::uint64_t swap_if_zero_sys(std::uint64_t* p, std::uint64_t v) {
  return shim::update(p, Order::kRelaxed, Scope::kSystem, [v](std::uint64_t was) { return was ? was : v; });
}

// The machine has no switch: kernels run here with A2A_SOFTWARE_SWITCH, and never come to these.
__device__ __forceinline__ uint4 multimem_load_add_f32(const uint4* p) { __builtin_trap(); }
__device__ __forceinline__ uint4 multimem_load_add_bf16(const uint4* p) { __builtin_trap(); }
__device__ __forceinline__ uint4 multimem_load_add_f16(const uint4* p) { __builtin_trap(); }
__device__ __forceinline__ std::uint32_t multimem_load_add_s32(const std::uint32_t* p) { __builtin_trap(); }
__device__ __forceinline__ std::uint64_t multimem_load_add_s64(const std::uint64_t* p) { __builtin_trap(); }
__device__ __forceinline__ std::uint32_t multimem_load_min_s32(const std::uint32_t* p) { __builtin_trap(); }
__device__ __forceinline__ std::uint64_t multimem_load_min_s64(const std::uint64_t* p) { __builtin_trap(); }
__device__ __forceinline__ std::uint32_t multimem_load_max_s32(const std::uint32_t* p) { __builtin_trap(); }
__device__ __forceinline__ std::uint64_t multimem_load_max_s64(const std::uint64_t* p) { __builtin_trap(); }
__device__ __forceinline__ void multimem_store(uint4* p, uint4 v) { __builtin_trap(); }
__device__ __forceinline__ void fence_alias() {}

__device__ __forceinline__ void launch_next() { shim::let_next_launch_start(); }
__device__ __forceinline__ void await_previous() { shim::wait_for_launch_before(); }

__device__ __forceinline__ std::uint32_t add_acq_rel_block(std::uint32_t* p, std::uint32_t v) {
  return shim::update(p, Order::kAcquireRelease, Scope::kBlock, [v](std::uint32_t was) { return was + v; });
}

// A barrier of bulk loads is a shim::BulkBarrier.
__device__ __forceinline__ void bulk_barrier_init(std::uint64_t* barrier) { *barrier = 0; }

__device__ __forceinline__ void bulk_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  shim::bulk_expect(barrier, bytes);
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  shim::bulk_copy(to, from, bytes, barrier);
}

__device__ __forceinline__ void bulk_await(std::uint64_t* barrier, std::uint32_t phase) {
  shim::BulkBarrier seen;
  do shim::load(barrier, &seen, sizeof seen, Order::kAcquire, Scope::kBlock);
  while (seen.phases % 2 == phase);
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  shim::bulk_copy(to, from, bytes, nullptr);
}

__device__ __forceinline__ void fence_bulk() {}  // the copy engine sees what its thread does

__device__ __forceinline__ void bulk_commit() { shim::bulk_commit(); }
__device__ __forceinline__ void bulk_wait_read() { shim::bulk_wait(false); }
__device__ __forceinline__ void bulk_wait() { shim::bulk_wait(true); }

__device__ __forceinline__ std::uint32_t to_bf16x2(float low, float high) {
  return shim::to_bf16(high) << 16 | shim::to_bf16(low);
}

__device__ __forceinline__ std::uint32_t to_f16x2(float low, float high) {
  return shim::to_f16(high) << 16 | shim::to_f16(low);
}

__device__ __forceinline__ float from_f16(std::uint16_t h) { return shim::of_f16(h); }

__device__ __forceinline__ std::uint16_t to_e4m3x2(float low, float high) {
  return std::uint16_t(shim::to_e4m3(high) << 8 | shim::to_e4m3(low));
}

__device__ __forceinline__ std::uint32_t e4m3x2_to_f16x2(std::uint16_t q) {
  return shim::to_f16(shim::of_e4m3(q >> 8)) << 16 | shim::to_f16(shim::of_e4m3(q & 0xff));
}

__device__ __forceinline__ std::uint64_t global_timer_ns() { return shim::timer_ns(); }

}  // namespace a2a::ptx
