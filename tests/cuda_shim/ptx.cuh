// The twin of csrc/cuda/ptx.cuh for the CPU: the same functions, with the same names and arguments. An instruction that is
// added there and not here does not compile, and tests/test_cuda_shim.py says which.
#pragma once
#include <cstdint>

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

__device__ __forceinline__ void barrier(std::uint32_t number, std::uint32_t threads) { shim::barrier(number, threads); }

__device__ __forceinline__ std::uint64_t swap_if_zero_sys(std::uint64_t* p, std::uint64_t v) {
  return shim::update(p, Order::kRelaxed, Scope::kSystem, [v](std::uint64_t was) { return was ? was : v; });
}

__device__ __forceinline__ std::uint64_t global_timer_ns() { return shim::timer_ns(); }

}  // namespace a2a::ptx
