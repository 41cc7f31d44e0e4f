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

// Within a block, in shared memory. Returns what was there.
__device__ __forceinline__ std::uint32_t add_acq_rel_block(std::uint32_t* p, std::uint32_t v) {
  std::uint32_t was;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(was)
               : "r"(std::uint32_t(__cvta_generic_to_shared(p))), "r"(v)
               : "memory");
  return was;
}

__device__ __forceinline__ void store_release_gpu(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// In-switch operations on multicast addresses: a load of the sum (or the least, or the greatest) of what all ranks have there, and a
// store to all ranks. bfloat16 and float16 are summed in float32. The order of a sum's terms is the switch's.
__device__ __forceinline__ uint4 multimem_load_add_f32(const uint4* p) {
  uint4 v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 multimem_load_add_bf16(const uint4* p) {
  uint4 v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 multimem_load_add_f16(const uint4* p) {
  uint4 v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t multimem_load_add_s32(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint64_t multimem_load_add_s64(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t multimem_load_min_s32(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.min.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint64_t multimem_load_min_s64(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.min.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t multimem_load_max_s32(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.max.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint64_t multimem_load_max_s64(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.max.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void multimem_store(uint4* p, uint4 v) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Between accesses of the same memory by its own and by its multicast address.
__device__ __forceinline__ void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// Programmatic launches: the stream's next kernel, if launched so, may start now; this one's predecessor has ended, and what it
// wrote is there. Without such a launch the first does nothing and the second returns at once.
__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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

// Bulk copies, by the copy engine of an SM; 16-byte addresses and sizes. Loads arrive at a barrier in shared memory, which one
// thread has told how many bytes to expect. Stores belong to the thread that made them: `bulk_wait_read` says that their sources
// may be written again, `bulk_wait` that they have arrived.
__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void bulk_barrier_init(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void bulk_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_await(std::uint64_t* barrier, std::uint32_t phase) {
  std::uint32_t done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(phase)
                 : "memory");
  } while (!done);
}

// What is stored is not read soon: it leaves the cache before what others are about to read.
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy)::"memory");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes), "l"(policy)
               : "memory");
}

// What this thread has acquired, its bulk loads see too.
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

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
