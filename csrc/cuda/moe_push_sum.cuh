// What moe_push_sum adds up: its parameters, a piece of a sum, and a piece's way from a token to the sum.
#pragma once
#include "moe_push_ready.cuh"

namespace a2a {

constexpr std::uint32_t kDeep = SUM_DEEP;  // vectors of a lane in a piece: few cost more looking up than adding
using P = Piece<kDeep>;
constexpr std::uint32_t kThreads = 128, kWarps = kThreads / 32;  // of a block; three share an SM
constexpr std::uint32_t kPieceBytes = P::kSize * 16;             // of a row
constexpr std::uint32_t kSpotBytes = kPieceBytes * (kWideSums ? 2 : 1);
constexpr std::uint32_t kSpots = SPOTS;  // a warp's ring of pieces on their way
static_assert(kSpots >= kTopK, "an item takes as many");
constexpr std::uint32_t kAhead = 2;  // items of a warp on their way

struct Sum {
  Moe m;
  const std::uint8_t* rows;
  const float* weights;                 // [row], or null
  const float* row_grads;               // [row]: dispatch's backward, where it brings the gradient of the weights
  const std::int32_t* ids;              // [token][k], the same
  std::uint8_t* y;                      // finish: [token][kHidden]
  float* weight_grads;                  // finish: [token][k], the same
  std::uint32_t compact, compact_rows;  // not 0: there is one row a token, by its number; so many
  std::uint32_t brings;                 // not 0: row_grads go back to the top-k; they may be none here, and no pointer
  std::uint32_t pass, passes;  // sum: which part of the tokens, behind moe_push_gate_rows; 0 passes: all, behind none
  std::uint32_t first_chunk, end_chunk;  // finish: of which tokens
  std::uint32_t credits, last;           // finish: as moe_push_expand's
  std::uint32_t unused;
};

// What travels in a slot's Meta: rows that are left of the token (where rows may be dropped), and a float for each.
struct Back {
  std::uint32_t rows, unused[3];
  float grads[kTopK];
};

// Which tokens a launch of `sum` takes: of pass p those whose last row lies in the p-th part of the rows.
struct Marked {
  std::uint32_t first = 0, end = 0xffffffff;

  __device__ explicit Marked(const Sum& a) {
    if (!kReadyFlags || a.passes < 2) return;
    const Pass pass(a.m, a.pass, a.passes);
    first = pass.first;
    if (a.pass + 1 < a.passes) end = pass.end;
  }
  // All lanes of a warp: of a token, whose rows these are, from the lowest on. One that has none left is in the first pass.
  __device__ bool has(std::int32_t row) const {
    if constexpr (!kReadyFlags) return true;
    if (first == 0 && end == 0xffffffff) return true;
    const std::uint32_t rows = __ballot_sync(kFull, row >= 0);
    const std::uint32_t last = __shfl_sync(kFull, row, rows ? 31 - __clz(rows) : 0);
    const std::uint32_t word = rows ? last / kReadyRows : 0;
    return word >= first && word < end;
  }
};

// A piece of a sum in float32. kFirst: the first term, which is taken as it is.
struct Part {
  float f[kDeep][kColumns];

  __device__ void add(const Part& other) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++)
#pragma unroll
      for (std::uint32_t i = 0; i < kColumns; i++) f[k][i] = __fadd_rn(f[k][i], other.f[k][i]);
  }
  // From shared memory, which holds the lanes' vectors of a piece side by side: a row, or what another rank has sent.
  template <bool kFirst, bool kWeighted>
  __device__ void add_row(std::uint32_t lane, const std::uint8_t* spot, float weight) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) {
      float g[kColumns];
      Vec::split(g, reinterpret_cast<const uint4*>(spot)[k * 32 + lane]);
#pragma unroll
      for (std::uint32_t i = 0; i < kColumns; i++) {
        const float term = kWeighted ? __fmul_rn(weight, g[i]) : g[i];
        f[k][i] = kFirst ? term : __fadd_rn(f[k][i], term);
      }
    }
  }
  template <bool kFirst>
  __device__ void add_sum(std::uint32_t lane, const std::uint8_t* spot) {
    if constexpr (!kWideSums) {
      add_row<kFirst, false>(lane, spot, 1.0f);
    } else {
#pragma unroll
      for (std::uint32_t k = 0; k < kDeep; k++) {
        const uint4* from = reinterpret_cast<const uint4*>(spot) + 2 * (k * 32 + lane);
        const uint4 low = from[0], high = from[1];
        const std::uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (std::uint32_t i = 0; i < 8; i++)
          f[k][i] = kFirst ? __uint_as_float(w[i]) : __fadd_rn(f[k][i], __uint_as_float(w[i]));
      }
    }
  }
  __device__ void join(uint4 (&v)[kDeep]) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) v[k] = Vec::join(f[k]);
  }
  __device__ void round() {  // as if it had travelled
    if constexpr (kWideSums || kDtype == kFloat32) return;
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) Vec::split(f[k], Vec::join(f[k]));
  }
};

// Sums travel rounded to the dtype, or as they are (kWideSums).
__device__ inline void store_sum(std::uint8_t* slot, const P& piece, const Part& part) {
  if constexpr (kWideSums) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) {
      if (!piece.has(k)) continue;
      uint4* to = reinterpret_cast<uint4*>(slot) + 2 * piece.at(k);
      const float* f = part.f[k];
      to[0] = {__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])};
      to[1] = {__float_as_uint(f[4]), __float_as_uint(f[5]), __float_as_uint(f[6]), __float_as_uint(f[7])};
    }
  } else {
    uint4 v[kDeep];
    part.join(v);
    piece.store(slot, v);
  }
}

// What a warp looks up at a time: some pieces of a token, [number, end), as rows of this rank, and as sums that other ranks have
// sent.
struct Item {
  bool valid = false;
  std::uint32_t number = 0, end = 0, chunk = 0;
  std::uint32_t owner = 0, u = 0,
                slot = 0;             // sum: whose token it is, its number, where its sum goes.  finish: u is the token
  std::int32_t row = -1;              // the lane's row here
  const std::uint8_t* sum = nullptr;  // finish: the sum of the lane's rank, where there is one
};

// The same, when the rows are known. Pieces are added in this order: sums of the ranks before this one, rows, other sums.
struct Known : Item {
  std::uint32_t rows = 0, before = 0, after = 0;  // a lane a row; how many sums
  std::uint32_t row_place = 0, sum_place = 0;     // of the lane's
  float weight = 1.0f;                            // of the lane's row

  __device__ std::uint32_t pieces() const { return __popc(rows) + before + after; }
};

// A piece on its way into the ring.
struct Waiting {
  std::uint32_t number, chunk, owner, u, slot;
  std::uint32_t spot, rows, before, after;  // its first spot, and as above
  float weight;

  __device__ std::uint32_t pieces() const { return __popc(rows) + before + after; }
};

}  // namespace a2a
