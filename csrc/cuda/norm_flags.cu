// norm_flags: few rows of an all-reduce with a residual add and RMSNorm, by packets that mark their own arrival.
//   residual_out = residual + in_0 + in_1 + ...;  out = RMSNorm(residual_out) * weight      norm.cuh has the order of operations
//
// One-shot: every rank sends its rows to all, and does all of it for all rows. A thread has 48 bytes of a row (three vectors,
// four packets of 12 bytes and the epoch) from its own loads to the result; a block has a row at a time.
//
// Cost     one crossing of the link and no fence; scale-up bytes sent per rank: 4/3 of world_size - 1 inputs
// Launch   the same grid on every rank; blocks of kThreads
// Buffers  staging symmetric, zero at first; out and residual_out may each be in or residual; all aligned to 16 bytes
// VISIBLE  the epoch is in the same 16-byte access as the data.
// REUSE    slabs are two by the epoch's parity, as headers are (signal.cuh). In place: a thread has sent its vectors of in, and
//          loads those of a row and of residual before it stores there; nobody else touches them.
//          `parts` is stored again after the barrier that follows its last load, `groups` after the one that follows that.
// PROGRESS every block sends its packets, and block 0 headers, before it waits. All blocks fit on the device at once.
// FAILURE  a thread whose deadline passes stores the missing rank in every rank's record and waits for nothing any more; so
//          does everybody who sees a record. It goes on with what it has, so that no barrier lacks it. Out and residual_out are
//          undefined then; the host raises. A header with another digest is a failure.
#include "norm.cuh"

namespace a2a {

struct Flags {
  static constexpr std::uint32_t kUnits = (kVectors + 2) / 3;  // of a row
  static constexpr std::uint32_t kMostThreads = 512;
  static constexpr std::uint32_t kThreads = kUnits < kMostThreads ? (kUnits + 31) / 32 * 32 : kMostThreads;
  static constexpr std::uint32_t kMine = (kUnits + kThreads - 1) / kThreads;  // units of a thread

  const Params& a;
  Wait wait;
  const std::uint32_t rank, epoch, t;
  float *parts, *groups;  // shared: the sums of vectors, and of 32 of them

  __device__ uint4* slab(std::uint32_t at, std::uint32_t from, std::uint32_t row) const {
    return a.place.at<Staging>(at, a.staging)->packets[from][epoch % 2] + std::uint64_t(row) * kUnits * 4;
  }
  __device__ static const uint4* row_of(std::uint64_t tensor, std::uint32_t row) {
    return reinterpret_cast<const uint4*>(tensor) + std::uint64_t(row) * kVectors;
  }
  __device__ static void load(uint4 (&v)[3], const uint4* row, std::uint32_t u) {
#pragma unroll
    for (std::uint32_t k = 0; k < 3; k++) v[k] = 3 * u + k < kVectors ? row[3 * u + k] : uint4{0, 0, 0, 0};
  }
  __device__ static void store(std::uint64_t tensor, std::uint32_t row, std::uint32_t u, const uint4 (&v)[3]) {
    uint4* to = reinterpret_cast<uint4*>(tensor) + std::uint64_t(row) * kVectors;
#pragma unroll
    for (std::uint32_t k = 0; k < 3; k++)
      if (3 * u + k < kVectors) to[3 * u + k] = v[k];
  }

  __device__ void send(std::uint32_t row) const {
    for (std::uint32_t u = t; u < kUnits; u += kThreads) {
      uint4 v[3];
      load(v, row_of(a.input, row), u);
      for (std::uint32_t k = 1; k < kWorld; k++) {
        const std::uint32_t p = (rank + k) % kWorld;
        uint4* to = slab(p, rank, row) + u;
        ptx::store_relaxed_sys(to, uint4{v[0].x, v[0].y, v[0].z, epoch});
        ptx::store_relaxed_sys(to + kUnits, uint4{v[0].w, v[1].x, v[1].y, epoch});
        ptx::store_relaxed_sys(to + 2 * kUnits, uint4{v[1].z, v[1].w, v[2].x, epoch});
        ptx::store_relaxed_sys(to + 3 * kUnits, uint4{v[2].y, v[2].z, v[2].w, epoch});
      }
    }
  }

  __device__ void receive(uint4 (&v)[3], std::uint32_t p, std::uint32_t row, std::uint32_t u) {
    const uint4* from = slab(rank, p, row) + u;
    uint4 w[4];
    do {
#pragma unroll
      for (std::uint32_t k = 0; k < 4; k++) w[k] = ptx::load_relaxed_sys(from + k * kUnits);
    } while ((w[0].w != epoch || w[1].w != epoch || w[2].w != epoch || w[3].w != epoch) && wait.again(p));
    v[0] = {w[0].x, w[0].y, w[0].z, w[1].x};
    v[1] = {w[1].y, w[1].z, w[2].x, w[2].y};
    v[2] = {w[2].z, w[3].x, w[3].y, w[3].z};
  }

  // r of this thread's units, stored, with the sums of squares in `parts`.
  __device__ void reduce(uint4 (&r)[kMine][3], std::uint32_t row) {
#pragma unroll
    for (std::uint32_t i = 0; i < kMine; i++) {
      const std::uint32_t u = t + i * kThreads;
      if (u >= kUnits) break;
      uint4 own[3], residual[3], term[3];
      load(own, row_of(a.input, row), u);
      load(residual, row_of(a.residual, row), u);
      float sum[3][RowVector::kColumns];
#pragma unroll(kWorld < 9 ? kWorld : 1)
      for (std::uint32_t p = 0; p < kWorld; p++) {
        if (p == rank)
          for (std::uint32_t k = 0; k < 3; k++) term[k] = own[k];
        else
          receive(term, p, row, u);
#pragma unroll
        for (std::uint32_t k = 0; k < 3; k++) add_term(sum[k], term[k], p == 0);
      }
#pragma unroll
      for (std::uint32_t k = 0; k < 3; k++) {
        float squares;
        r[i][k] = add_residual(sum[k], residual[k], squares);
        if (3 * u + k < kVectors) parts[3 * u + k] = squares;
      }
      store(a.residual_out, row, u, r[i]);
    }
  }

  __device__ float scale() const {
    const std::uint32_t lane = t % 32;
    __syncthreads();
    for (std::uint32_t g = t / 32; g < kGroups; g += kThreads / 32) {
      const std::uint32_t v = g * 32 + lane;
      const float sum = sum_of_lanes(v < kVectors ? parts[v] : 0.0f);
      if (lane == 0) groups[g] = sum;
    }
    __syncthreads();
    return scale_of(groups, a.eps, lane);
  }

  __device__ void run() {
    if (blockIdx.x == 0) send_headers(a, epoch);
    const std::uint32_t rows = a.digest == kRefusal ? 0 : a.rows;
    for (std::uint32_t row = blockIdx.x; row < rows; row += gridDim.x) send(row);
    if (blockIdx.x == 0) await_headers(a, wait, epoch);
    for (std::uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
      uint4 r[kMine][3];
      reduce(r, row);
      const float s = scale();
      const uint4* weights = reinterpret_cast<const uint4*>(a.weight);
#pragma unroll
      for (std::uint32_t i = 0; i < kMine; i++) {
        const std::uint32_t u = t + i * kThreads;
        if (u >= kUnits) break;
        uint4 weight[3], v[3];
        load(weight, weights, u);
#pragma unroll
        for (std::uint32_t k = 0; k < 3; k++) v[k] = normalise(r[i][k], s, weight[k]);
        store(a.out, row, u, v);
      }
    }
  }
};

}  // namespace a2a

extern "C" __device__ const unsigned long long norm_flags_threads = a2a::Flags::kThreads;

extern "C" __global__ void __launch_bounds__(a2a::Flags::kThreads) norm_flags(const __grid_constant__ a2a::Params a) {
  using namespace a2a;
  __shared__ float parts[kVectors];
  __shared__ float groups[kTree];
  const std::uint32_t epoch = next_epoch(a.place.control(a.place.rank)->epoch[blockIdx.x]);
  Flags flags{a, Wait(a.place, kWorld), a.place.rank, epoch, threadIdx.x, parts, groups};
  flags.run();
  leave(a.place, epoch);
}
