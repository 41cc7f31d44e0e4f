// Rows after an all-reduce: residual add and RMSNorm, with the bits of csrc/cpu/simd_norm.h.
//   r = round(residual + round(sum));   scale = 1 / sqrt(S / columns + eps);   out = round((r * scale) * weight)
// S, the sum of r's squares, is a tree of neighbouring columns, with zeros behind the row's end: any aligned power of two of
// columns has a sum of its own. A vector's is its thread's, that of 32 vectors a warp's (a group), that of the groups everybody's.
//
// And what the two kernels that do so share: their parameters, and the staging through which rows travel.
#pragma once
#include "../common/layout.h"
#include "signal.cuh"
#include "vector.cuh"

namespace a2a {

constexpr std::uint32_t kWorld = WORLD, kDtype = DTYPE, kColumns = HIDDEN;
using RowVector = Vector<kDtype>;
constexpr std::uint32_t kVectors = kColumns / RowVector::kColumns;  // of a row
constexpr std::uint32_t kGroups = (kVectors + 31) / 32;
constexpr std::uint32_t power_of_two(std::uint32_t n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
constexpr std::uint32_t kTree = power_of_two(kGroups) < 32 ? 32 : power_of_two(kGroups);  // leaves; some may be 0
static_assert(kColumns % RowVector::kColumns == 0, "rows are whole vectors");
static_assert(kColumns <= 16384, "as on a CPU");
static_assert(kWorld <= kMostRanks, "headers");

struct Params {
  std::uint64_t out, residual_out;  // first: the launcher replaces them from call to call
  std::uint64_t input, residual, weight;
  Place place;
  std::uint64_t staging;  // offset in the window
  std::uint32_t digest;   // of shape, dtype, eps and algorithm: equal on all ranks
  float eps;
  std::uint32_t rows, batch_rows;  // batch_rows: what one signal is for, in norm_rows
};

// Staging of one rank, the same for every row length and dtype. [s]: written by rank s; [2]: by the epoch's parity. Whatever an
// epoch marks needs no reset: no two calls of a communicator have the same.
constexpr std::uint32_t kBlocks = 32, kMostBatches = 64;
constexpr std::uint64_t kPacketBytes = PACKET_BYTES;  // a rank's packets
constexpr std::uint64_t kRowBytes = ROW_BYTES;        // and its rows
struct Staging {
  std::uint32_t arrived[kWorld][2][kBlocks][kMostBatches];  // epoch: a batch is there
  std::uint32_t made[kWorld][kBlocks][kMostBatches];        // and its results are
  uint4 packets[kWorld][2][kPacketBytes / 16];
  uint4 terms[kWorld][2][kRowBytes / 16];
  uint4 results[kWorld][kRowBytes / 16];
};

// r, and the sum of its squares, of one vector.
__device__ inline uint4 add_residual(const float (&sum)[RowVector::kColumns], uint4 residual, float& squares) {
  float s[RowVector::kColumns], r[RowVector::kColumns];
  RowVector::split(s, RowVector::join(sum));
  RowVector::split(r, residual);
#pragma unroll
  for (std::uint32_t i = 0; i < RowVector::kColumns; i++) r[i] = __fadd_rn(r[i], s[i]);
  const uint4 rounded = RowVector::join(r);
  RowVector::split(r, rounded);
#pragma unroll
  for (std::uint32_t i = 0; i < RowVector::kColumns; i++) r[i] = __fmul_rn(r[i], r[i]);
#pragma unroll
  for (std::uint32_t n = RowVector::kColumns / 2; n; n /= 2)
#pragma unroll
    for (std::uint32_t i = 0; i < n; i++) r[i] = __fadd_rn(r[2 * i], r[2 * i + 1]);
  squares = r[0];
  return rounded;
}

// The tree over the lanes of a warp; every lane gets it.
__device__ __forceinline__ float sum_of_lanes(float s) {
#pragma unroll
  for (std::uint32_t d = 1; d < 32; d *= 2) s = __fadd_rn(s, __shfl_xor_sync(kFull, s, d));
  return s;
}

// The scale of a row from the sums of its groups, which are in shared memory; by whole warps.
__device__ inline float scale_of(const float* groups, float eps, std::uint32_t lane) {
  constexpr std::uint32_t kMine = kTree / 32;
  float s[kMine];
#pragma unroll
  for (std::uint32_t i = 0; i < kMine; i++) s[i] = lane * kMine + i < kGroups ? groups[lane * kMine + i] : 0.0f;
#pragma unroll
  for (std::uint32_t n = kMine / 2; n; n /= 2)
#pragma unroll
    for (std::uint32_t i = 0; i < n; i++) s[i] = __fadd_rn(s[2 * i], s[2 * i + 1]);
  const float mean = __fdiv_rn(sum_of_lanes(s[0]), float(kColumns));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

__device__ inline uint4 normalise(uint4 row, float scale, uint4 weight) {
  float r[RowVector::kColumns], w[RowVector::kColumns];
  RowVector::split(r, row);
  RowVector::split(w, weight);
#pragma unroll
  for (std::uint32_t i = 0; i < RowVector::kColumns; i++) r[i] = __fmul_rn(__fmul_rn(r[i], scale), w[i]);
  return RowVector::join(r);
}

// sum += term, or = term where it is the first.
__device__ __forceinline__ void add_term(float (&sum)[RowVector::kColumns], uint4 term, bool first) {
  float f[RowVector::kColumns];
  RowVector::split(f, term);
#pragma unroll
  for (std::uint32_t i = 0; i < RowVector::kColumns; i++) sum[i] = first ? f[i] : __fadd_rn(sum[i], f[i]);
}

// Header to every peer; by block 0.
__device__ inline void send_headers(const Params& a, std::uint32_t epoch) {
  for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
    if (p != a.place.rank) a.place.send_header(p, epoch, a.digest, a.rows, 0);
}

// And every peer's, by the last threads, which have the least to do; by block 0.
__device__ inline void await_headers(const Params& a, Wait& wait, std::uint32_t epoch) {
  for (std::uint32_t p = blockDim.x - 1 - threadIdx.x; p < kWorld; p += blockDim.x)
    if (p != a.place.rank) wait.await_header(p, epoch, a.digest, true);
}

// The end of a call: its epoch is over. By all threads of every block.
__device__ inline void leave(const Place& place, std::uint32_t epoch) {
  std::uint32_t* epochs = place.control(place.rank)->epoch;
  __syncthreads();
  if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;
  if (blockIdx.x == 0)
    for (std::uint32_t c = gridDim.x + threadIdx.x; c < kEpochs; c += blockDim.x) epochs[c] = epoch;
}

}  // namespace a2a

extern "C" __device__ const unsigned long long norm_staging = sizeof(a2a::Staging);
