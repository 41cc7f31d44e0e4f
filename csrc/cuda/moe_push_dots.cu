// moe_push_dots: combine's backward where the weights want gradients, which also reads the rows that combine was given.
//   grad_rows[row] = round(weight[row] * g[token]);  grad_weights[row] = dot(out_rows[row], g[token])
//   The dot product has 256 lanes by column, added in order, then halves pairwise: the CPU kernels' order.
//
// A warp takes some rows of a token from end to end, piece by piece. Pieces come into its ring in shared memory by bulk copies,
// some steps ahead of the one that is worked on; a token that travelled in a wire format is loaded when its piece's turn comes.
//
// Cost     copied bytes: each token read once for kRows rows, each row read once and written once
// Launch   any grid of blocks of kDotThreads with kDotBytes of shared memory, behind the gate of what it reads; the call's last
//          kernel says so.
// Buffers  rows, weights and their gradients private; slots symmetric
// VISIBLE  REUSE  PROGRESS  FAILURE: as the other kernels of moe_push_expand.cu
#include "moe_push.cuh"

namespace a2a {
constexpr std::uint32_t kDeep = 4;  // vectors of a lane in a piece: a multiple of kStep
}
#include "moe_push_expand.cuh"

namespace a2a {

constexpr std::uint32_t kDotThreads = 320;
constexpr std::uint32_t kSpots = 10;                 // a warp's ring
constexpr std::uint32_t kRows = CHUNKS > 1 ? 4 : 1;  // at a time: small requests want many warps
constexpr std::uint32_t kPieceBytes = P::kSize * 16;
constexpr bool kWired = kWire != kNoWire;
constexpr std::uint32_t kStage = kRows + !kWired, kStages = kSpots / kStage;  // spots of a step, steps on their way
constexpr std::uint32_t kGroups = ceil_div(kTopK, kRows);                     // of a token's rows, at most
constexpr std::uint32_t kStep = 256 / (32 * kColumns);  // vectors of a lane that hold the 256 lanes
static_assert(kDeep % kStep == 0, "a lane's vectors keep their places in all pieces");

struct Dots : Expander {
  std::uint64_t* barriers;          // of this warp's steps
  mutable std::uint32_t steps = 0;  // that it has begun: the step's spots and the phase of its barrier

  __device__ Dots(const Expand& args, std::uint64_t* all) : Expander(args), barriers(all + threadIdx.x / 32 * kStages) {
    if (lane == 0)
      for (std::uint32_t i = 0; i < kStages; i++) ptx::bulk_barrier_init(barriers + i);
    __syncwarp();
  }

  __device__ std::uint8_t* spot(std::uint32_t step, std::uint32_t i) const {
    extern __shared__ __align__(128) std::uint8_t spots[];
    return spots + (threadIdx.x / 32 * kSpots + step % kStages * kStage + i) * kPieceBytes;
  }

  // Some rows of a token, and their weights.
  struct Group {
    std::uint32_t count, rows[kRows];
    float by[kRows];
    std::int32_t mine;  // the lane's, of the first `count` lanes
  };
  __device__ __forceinline__ Group group_of(std::uint32_t s, std::uint32_t u, std::uint32_t which) const {
    const std::int32_t row = lane < kTopK ? m.list(s, u)[lane] : -1;
    std::uint32_t left = __ballot_sync(kFull, row >= 0);
    for (std::uint32_t i = 0; i < which * kRows; i++) left &= left - 1;
    Group g;
    g.count = 0, g.mine = -1;
#pragma unroll
    for (std::uint32_t r = 0; r < kRows; r++) {
      const bool there = left != 0;
      g.rows[r] = __shfl_sync(kFull, row, there ? __ffs(left) - 1 : 0);
      g.by[r] = there ? a.weights[g.rows[r]] : 0.0f;
      if (there && lane == r) g.mine = std::int32_t(g.rows[r]);
      g.count += there;
      left &= left - 1;
    }
    return g;
  }

  // Start the copies of a piece of the token, which lies at `token` unless it came in a wire format, and of its rows.
  __device__ __forceinline__ void start(const Group& g, const std::uint8_t* token, std::uint32_t step,
                                        std::uint32_t number) const {
    const std::uint32_t bytes = number + 1 < P::kCount ? kPieceBytes : kRowBytes - number * kPieceBytes;
    std::uint64_t* barrier = barriers + step % kStages;
    if (lane == 0) ptx::bulk_expect(barrier, (g.count + !kWired) * bytes);
    __syncwarp();
    const std::uint64_t at = std::uint64_t(number) * kPieceBytes;
    if (g.mine >= 0)
      ptx::bulk_load(spot(step, lane), a.out_rows + std::uint64_t(g.mine) * kRowBytes + at, bytes, barrier);
    if (!kWired && lane == kRows) ptx::bulk_load(spot(step, kRows), token + at, bytes, barrier);
  }

  // `load(got, piece)` gives a piece of a token that came in a wire format.
  template <typename Load>
  __device__ __forceinline__ void work(std::uint32_t s, std::uint32_t u, std::uint32_t which, const std::uint8_t* token,
                                       Load load) const {
    const Group g = group_of(s, u, which);
    if (g.count == 0) return;
    float lanes[kRows][kStep * kColumns] = {};
    std::uint32_t begun = 0;
    for (std::uint32_t number = 0; number < P::kCount; number++) {
      for (; begun < P::kCount && begun < number + kStages; begun++) start(g, token, steps + begun, begun);
      const std::uint32_t step = steps + number;
      const P piece(number, lane);
      Got<false> got;
      if (kWired) load(got, piece);
      ptx::bulk_await(barriers + step % kStages, step / kStages & 1);
      if (!kWired) {
#pragma unroll
        for (std::uint32_t k = 0; k < kDeep; k++)
          got.v[k] = reinterpret_cast<const uint4*>(spot(step, kRows))[k * 32 + lane];
      }
#pragma unroll
      for (std::uint32_t r = 0; r < kRows; r++)
        if (r < g.count) add(lanes[r], got, piece, spot(step, r), g.rows[r], g.by[r]);
      __syncwarp();  // the spots may be filled again
    }
    steps += P::kCount;
#pragma unroll
    for (std::uint32_t r = 0; r < kRows; r++) {
      const float dot = fold(lanes[r]);
      if (lane == 0 && r < g.count) a.grad_weights[g.rows[r]] = dot;
    }
  }

  // One row's piece: the dot product's terms, and the row of the gradient.
  __device__ __forceinline__ void add(float (&lanes)[kStep * kColumns], const Got<false>& got, const P& piece,
                                      const std::uint8_t* from, std::uint32_t row, float by) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) {
      if (!piece.has(k)) continue;
      float g[kColumns], o[kColumns];
      Vec::split(g, got.v[k]);
      Vec::split(o, reinterpret_cast<const uint4*>(from)[k * 32 + lane]);
#pragma unroll
      for (std::uint32_t i = 0; i < kColumns; i++) {
        float& sum = lanes[k % kStep * kColumns + i];
        const float product = __fmul_rn(o[i], g[i]);
        sum = piece.at(k) < 32 * kStep ? product : __fadd_rn(sum, product);
        g[i] = __fmul_rn(by, g[i]);
      }
      reinterpret_cast<uint4*>(a.rows + std::uint64_t(row) * kRowBytes)[piece.at(k)] = Vec::join(g);
    }
  }

  // Add 256 lanes, halves pairwise: first a thread's, where it holds both halves, then the warp's, then a vector's.
  template <std::uint32_t kCount>
  __device__ static float fold(float (&lanes)[kCount]) {
    if constexpr (kCount > kColumns) {
#pragma unroll
      for (std::uint32_t i = 0; i < kColumns; i++) lanes[i] = __fadd_rn(lanes[i], lanes[i + kColumns]);
    }
#pragma unroll
    for (std::uint32_t d = 16; d; d /= 2)
#pragma unroll
      for (std::uint32_t i = 0; i < kColumns; i++) lanes[i] = __fadd_rn(lanes[i], __shfl_down_sync(kFull, lanes[i], d));
#pragma unroll
    for (std::uint32_t d = kColumns / 2; d; d /= 2)
#pragma unroll
      for (std::uint32_t i = 0; i < d; i++) lanes[i] = __fadd_rn(lanes[i], lanes[i + d]);
    return lanes[0];
  }

  __device__ void run() const {
    own(kGroups, [&](std::uint32_t token, std::uint32_t which, std::uint32_t) {
      work(m.rank(), token, which, a.x + std::uint64_t(token) * kRowBytes,
           [&](Got<false>& got, const P& piece) { load<false>(got, piece, token); });
    });
    padding<false>();
    peers(kGroups, [&](std::uint32_t which, std::uint32_t s, std::uint32_t u, std::uint64_t slot) {
      work(s, u, which, m.slot(m.rank(), slot, epoch),
           [&](Got<false>& got, const P& piece) { load_slot(got, piece, slot); });
    });
  }
};

}  // namespace a2a

using namespace a2a;

extern "C" __global__ void __launch_bounds__(kDotThreads) moe_push_dots(const __grid_constant__ Expand a) {
  __shared__ std::uint64_t barriers[kDotThreads / 32 * kStages];
  ptx::await_previous();
  if (has_failed(a.m)) return;
  const Dots dots(a, barriers);
  dots.run();
  dots.end();
}
