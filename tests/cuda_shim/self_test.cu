// Kernels of self_test.cpp.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(64) warp_functions(std::uint32_t* out) {
  const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % 32, odd = lane % 2;
  const std::uint32_t half = odd ? 0xaaaaaaaa : 0x55555555;
  std::uint32_t* o = out + thread * 10;
  o[0] = __shfl_sync(~0u, lane * 3, int(lane + 5));
  o[1] = __shfl_up_sync(~0u, lane, 2, 8);
  o[2] = std::uint32_t(__shfl_xor_sync(~0u, std::uint64_t(lane), 16));
  o[3] = __ballot_sync(~0u, lane % 3 == 0);
  o[4] = __match_any_sync(~0u, lane % 4);
  o[5] = __reduce_add_sync(half, lane);  // two halves of a warp, each by itself
  o[6] = __reduce_max_sync(half, lane);
  o[7] = std::uint32_t(__all_sync(half, odd));
  o[8] = std::uint32_t(__syncthreads_count(thread % 3 == 0));
  o[9] = std::uint32_t(__syncthreads_or(thread == 70) + 2 * __syncthreads_and(thread > 63));
}

extern "C" __global__ void shared_histogram(const std::uint32_t* values, std::uint32_t n, std::uint32_t* bins) {
  extern __shared__ std::uint32_t local[];
  const std::uint32_t threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
  for (std::uint32_t b = t; b < 16; b += threads) local[b] = 0;
  __syncthreads();
  for (std::uint32_t i = blockIdx.x * threads + t; i < n; i += gridDim.x * threads)
    atomicAdd_block(local + values[i], 1);
  __syncthreads();
  for (std::uint32_t b = t; b < 16; b += threads) atomicAdd(bins + b, local[b]);
}

enum Message { kReleased, kFenced, kRelaxed, kNotAcquired, kDeviceScope, kVolatile, kPlain };

__device__ inline void store_word(std::uint32_t* word, Message how) {
  using shim::Order;
  using shim::Scope;
  const std::uint32_t one = 1;
  if (how == kFenced) shim::fence(Order::kAcquireRelease, Scope::kSystem);
  if (how == kPlain)
    *word = one;
  else if (how == kVolatile)
    *const_cast<volatile std::uint32_t*>(word) = one;
  else
    shim::store(word, &one, 4, how == kFenced || how == kRelaxed ? Order::kRelaxed : Order::kRelease,
                how == kDeviceScope ? Scope::kDevice : Scope::kSystem);
}

extern "C" __global__ void send_message(std::uint32_t* data, Message how) {
  data[threadIdx.x] = 100 + threadIdx.x;
  __syncwarp();
  if (threadIdx.x == 0) store_word(data + 64, how);
}

extern "C" __global__ void receive_message(std::uint32_t* data, Message how) {
  using shim::Order;
  if (threadIdx.x == 0) {
    std::uint32_t seen = 0;
    while (!seen)
      if (how == kFenced || how == kNotAcquired)
        seen = a2a::ptx::load_relaxed_sys(data + 64);
      else
        seen = a2a::ptx::load_acquire_sys(data + 64);
    if (how == kFenced) shim::fence(Order::kAcquireRelease, shim::Scope::kSystem);
  }
  __syncwarp();
  data[128 + threadIdx.x] = data[threadIdx.x];
}

extern "C" __global__ void two_stores(std::uint32_t* to) {
  const std::uint32_t one = 1;
  if (threadIdx.x) return;
  shim::store(to, &one, 4, shim::Order::kRelaxed, shim::Scope::kSystem);
  shim::store(to + 32, &one, 4, shim::Order::kRelaxed, shim::Scope::kSystem);
}

extern "C" __global__ void second_first(std::uint32_t* from) {
  if (threadIdx.x) return;
  while (!a2a::ptx::load_relaxed_sys(from + 32)) {
  }
  from[64] = a2a::ptx::load_relaxed_sys(from);
}

// Rows go through shared memory by bulk copies, as in a2a's kernels; `how` leaves a wait out.
enum Bulk { kRight, kNoAwait, kNoWaitRead, kNoWait };
extern "C" __global__ void bulk_rows(std::uint32_t* p, Bulk how) {
  __shared__ __align__(16) std::uint32_t row[32];
  __shared__ std::uint64_t barrier;
  if (threadIdx.x == 0) a2a::ptx::bulk_barrier_init(&barrier);
  p[threadIdx.x] = threadIdx.x;
  __syncthreads();
  for (std::uint32_t i = 0; i < 4; i++) {
    std::uint32_t* from = p + i * 32;
    if (threadIdx.x == 0) {
      a2a::ptx::bulk_expect(&barrier, sizeof row);
      a2a::ptx::bulk_load(row, from, sizeof row / 2, &barrier);
      a2a::ptx::bulk_load(row + 16, from + 16, sizeof row / 2, &barrier);
    }
    if (how != kNoAwait) a2a::ptx::bulk_await(&barrier, i % 2);
    row[threadIdx.x] += 1;
    __syncthreads();
    if (threadIdx.x == 0) {
      a2a::ptx::bulk_store(from + 32, row, sizeof row);
      a2a::ptx::bulk_commit();
      if (how == kNoWait)
        a2a::ptx::bulk_wait_read();
      else if (how != kNoWaitRead)
        a2a::ptx::bulk_wait();
    }
    __syncthreads();
  }
}

extern "C" __global__ void fill(std::uint32_t* p, std::uint32_t v) {
  a2a::ptx::launch_next();
  p[blockIdx.x * blockDim.x + threadIdx.x] = v;
}
extern "C" __global__ void add_after_wait(std::uint32_t* p) {
  a2a::ptx::await_previous();
  p[blockIdx.x * blockDim.x + threadIdx.x] += 1;
}
extern "C" __global__ void add_without_wait(std::uint32_t* p) { p[blockIdx.x * blockDim.x + threadIdx.x] += 1; }

extern "C" __global__ void exchange_rows(std::uint32_t* p) {
  __shared__ std::uint32_t rows[2][32];
  rows[threadIdx.x / 32][threadIdx.x % 32] = threadIdx.x;
  __syncthreads();
  p[blockIdx.x * 64 + threadIdx.x] = rows[1 - threadIdx.x / 32][threadIdx.x % 32];
}

extern "C" __global__ void exchange_rows_too_early(std::uint32_t* p) {
  __shared__ std::uint32_t rows[2][32];
  rows[threadIdx.x / 32][threadIdx.x % 32] = threadIdx.x;
  a2a::ptx::barrier(1 + threadIdx.x / 32, 32);  // of the wrong threads
  p[blockIdx.x * 64 + threadIdx.x] = rows[1 - threadIdx.x / 32][threadIdx.x % 32];
}

extern "C" __global__ void shuffle_is_no_barrier(std::uint32_t* p) {
  __shared__ std::uint32_t row[64];
  row[threadIdx.x] = threadIdx.x;
  const std::uint32_t from = __shfl_xor_sync(~0u, threadIdx.x, 1);
  p[blockIdx.x * 64 + threadIdx.x] = row[from];
}

extern "C" __global__ void count_in_block_scope(std::uint32_t* p) { atomicAdd_block(p, 1); }
extern "C" __global__ void blocks_share_a_word(std::uint32_t* p) {
  __syncthreads();
  if (threadIdx.x == 0) *p = blockIdx.x;
}

extern "C" __global__ void divergent_barrier(std::uint32_t*) {
  if (threadIdx.x % 2) __syncthreads();
}
extern "C" __global__ void unlike_exchanges(std::uint32_t* p) {
  p[threadIdx.x] = threadIdx.x % 2 ? __ballot_sync(~0u, 1) : __shfl_sync(~0u, 1u, 0);
}
extern "C" __global__ void spin_for_ever(std::uint32_t* p) {
  while (!a2a::ptx::load_relaxed_sys(p)) {
  }
}
extern "C" __global__ void half_a_warp(std::uint32_t*) { a2a::ptx::barrier(1, 16); }
