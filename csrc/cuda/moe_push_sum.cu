// moe_push_sum: combine, and dispatch's backward. The rank that holds a token's rows sums them and stores the sum into a slot at
// the token's owner (sum); the owner adds the ranks' sums (finish), chunk by chunk behind the gates of moe_push_expand.cu.
//   sum_r[token] = round(w_a * rows[a] + w_b * rows[b] + ...)     rows of rank r, in expert order, then k; products rounded
//   y[token] = round(sum_r + sum_s + ...)                         ranks in order; sums in float32, from the first term
//   Dispatch's backward has no weights, and brings one float a row back to the token's top-k.
//
// Cost     1 step; scale-up bytes per rank: one row for each token of another rank that it holds rows of
// Launch   sum: the same grid on every rank, at most kMostBlocks, waits for nobody while the rings hold the request; it is the
//          call's first kernel.  finish: any grid; the call's last one says so.
// Buffers  rows, weights, y private; slots symmetric; the plan of the dispatch
// VISIBLE  W: all threads of a block store sums; then __syncthreads; S: one thread a peer stores `progress` (st.release.sys).
//          A: the gate (ld.acquire.sys); R: finish, after it on its stream.
// REUSE    as in moe_push_send.cu, with owners in the place of receivers.
// PROGRESS sum waits for `consumed` only where a ring is smaller than the request, and then for a chunk that it has signalled.
// FAILURE  as in signal.cuh; finish leaves when it sees the record.
#include "moe_push.cuh"

namespace a2a {

constexpr std::uint32_t kDeep = 2, kBatch = 4;  // vectors of a lane and row, and rows, in flight
constexpr std::uint32_t kThreads = 256;         // of a block; three share an SM
using P = Piece<kDeep>;

struct Sum {
  Moe m;
  const std::uint8_t* rows;
  const float* weights;                 // [row], or null
  const float* row_grads;               // [row]: dispatch's backward, for the gradient of the top-k weights
  const std::int32_t* ids;              // [token][k], the same
  std::uint8_t* y;                      // finish: [token][kHidden]
  float* weight_grads;                  // finish: [token][k], or null
  std::uint32_t compact, compact_rows;  // not 0: there is one row a token, by its number; so many
  std::uint32_t chunk, last;            // finish: which chunk; the call's last kernel
};

// What travels in a slot's Meta: rows that are left of the token (where rows may be dropped), and a float for each.
struct Back {
  std::uint32_t rows, unused[3];
  float grads[kTopK];
};

// A piece of a sum in float32.
struct Part {
  float f[kDeep][kColumns];

  __device__ void set(const Part& other) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++)
#pragma unroll
      for (std::uint32_t i = 0; i < kColumns; i++) f[k][i] = other.f[k][i];
  }
  __device__ void add(const Part& other) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++)
#pragma unroll
      for (std::uint32_t i = 0; i < kColumns; i++) f[k][i] = __fadd_rn(f[k][i], other.f[k][i]);
  }
  template <bool kWeighted>
  __device__ void add_row(const uint4 (&v)[kDeep], float weight, bool first) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) {
      float g[kColumns];
      Vec::split(g, v[k]);
#pragma unroll
      for (std::uint32_t i = 0; i < kColumns; i++) {
        const float term = kWeighted ? __fmul_rn(weight, g[i]) : g[i];
        f[k][i] = first ? term : __fadd_rn(f[k][i], term);
      }
    }
  }
  __device__ void join(uint4 (&v)[kDeep]) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) v[k] = Vec::join(f[k]);
  }
  __device__ void split(const uint4 (&v)[kDeep]) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) Vec::split(f[k], v[k]);
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

__device__ inline void load_sum(Part& part, const P& piece, const std::uint8_t* slot) {
  if constexpr (kWideSums) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) {
      if (!piece.has(k)) continue;
      const uint4* from = reinterpret_cast<const uint4*>(slot) + 2 * piece.at(k);
      const uint4 low = from[0], high = from[1];
      const std::uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (std::uint32_t i = 0; i < 8; i++) part.f[k][i] = __uint_as_float(w[i]);
    }
  } else {
    uint4 v[kDeep];
    piece.load(v, slot);
    part.split(v);
  }
}

struct Summer {
  const Sum& a;
  const Moe& m;
  const std::uint32_t epoch, lane, warp, warps;

  __device__ explicit Summer(const Sum& args)
      : a(args),
        m(args.m),
        epoch(args.m.epoch()),
        lane(threadIdx.x % 32),
        warp(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32),
        warps(gridDim.x * (blockDim.x / 32)) {}

  // The sum of one rank's rows of a token, here; returns how many there are. `row`: the lane's row of it, or -1.
  template <bool kWeighted>
  __device__ std::uint32_t sum_rows(Part& part, const P& piece, std::int32_t row) const {
    const float weight = kWeighted && row >= 0 ? a.weights[row] : 1.0f;
    std::uint32_t left = __ballot_sync(kFull, row >= 0);
    const std::uint32_t all = __popc(left);
    for (bool first = true; left; first = false) {
      uint4 v[kBatch][kDeep];
      float by[kBatch];
      std::uint32_t count = 0;
#pragma unroll
      for (std::uint32_t b = 0; b < kBatch; b++) {
        const std::uint32_t j = left ? __ffs(left) - 1 : 0;
        const std::uint32_t from = __shfl_sync(kFull, row, j);
        by[b] = kWeighted ? __shfl_sync(kFull, weight, j) : 1.0f;
        if (!left) continue;
        piece.load(v[b], a.rows + std::uint64_t(from) * kRowBytes);
        count++;
        left &= left - 1;
      }
#pragma unroll
      for (std::uint32_t b = 0; b < kBatch; b++)
        if (b < count) part.add_row<kWeighted>(v[b], by[b], first && b == 0);
    }
    return all;
  }

  // The lane's row of token u of another rank, or of an own one.
  __device__ std::int32_t row_of(std::uint32_t source, std::uint32_t u) const {
    return a.compact ? compact_row(source, u) : lane < kTopK ? m.list(source, u)[lane] : -1;
  }
  __device__ std::int32_t row_of_own(std::uint32_t token, std::uint32_t i) const {
    if (a.compact) return compact_row(m.rank(), m.u_of(token, m.rank(), i));
    return lane < kTopK ? m.list(m.rank(), token)[lane] : -1;
  }
  __device__ std::int32_t compact_row(std::uint32_t source, std::uint32_t u) const {
    const std::uint32_t row = m.plan[PlanAt::kDistinct + source] + u;
    return lane == 0 && row < a.compact_rows ? std::int32_t(row) : -1;
  }

  // ---- sum: at the rank that holds the rows

  __device__ bool await_room(Wait& wait, std::uint32_t c) const {
    const std::uint32_t each = Moe::chunk_tokens(m.max_tokens), depth = each ? m.ring / each : kChunks;
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x) {
      if (p == m.rank()) continue;
      if (c == 0) wait.failed();
      if (c >= depth)
        while (!has_reached(ptx::load_acquire_sys(&m.stage_here().consumed[p]), mark(epoch, c - depth + 1)) &&
               wait.again(p)) {
        }
    }
    return !__syncthreads_or(wait.broken);
  }

  template <bool kWeighted>
  __device__ void sum() const {
    Wait wait(m.place, kWorld);
    for (std::uint32_t c = 0; c < kChunks; c++) {
      if (!await_room(wait, c)) return;
      for (std::uint32_t step = 1; step < kWorld; step++) {
        const std::uint32_t s = (m.rank() + step) % kWorld;
        const Chunk chunk(m.starts_from(s), c, lane);
        for (std::uint32_t item = warp; item < chunk.total * P::kCount; item += warps) {
          std::uint32_t u, range, i;
          chunk.find(item / P::kCount, u, range, i);
          send_sum<kWeighted>(s, u, m.slot_number(s, m.rank(), range, i), item % P::kCount);
        }
      }
      __syncthreads();
      for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
        ptx::store_release_sys(&m.stage_at(p).progress[m.rank()][blockIdx.x], mark(epoch, c + 1));
    }
  }

  template <bool kWeighted>
  __device__ void send_sum(std::uint32_t s, std::uint32_t u, std::uint64_t slot, std::uint32_t number) const {
    const P piece(number, lane);
    Part part;
    const std::uint32_t rows = sum_rows<kWeighted>(part, piece, row_of(s, u));
    if (rows) store_sum(m.slot(s, slot, epoch), piece, part);
    if (number != 0) return;
    Back& back = *reinterpret_cast<Back*>(&m.meta(s, slot, epoch));
    if (kDrop && lane == 0) back.rows = rows;
    if (a.row_grads && lane < kTopK) {
      const std::int32_t row = m.list(s, u)[lane];
      back.grads[lane] = row >= 0 ? a.row_grads[row] : 0;
    }
  }

  // ---- finish: at the owner

  __device__ std::uint64_t slot_number(std::uint32_t token, std::uint32_t r, std::uint32_t i) const {
    return m.slot_number(m.rank(), r, m.range_of(token), i);
  }

  template <bool kWeighted>
  __device__ void finish_piece(std::uint32_t token, std::uint32_t number) const {
    const P piece(number, lane);
    Part total;
    bool any = false;
    for (std::uint32_t r = 0; r < kWorld; r++) {
      const std::int32_t i = m.numbers()[std::uint64_t(token) * kWorld + r];
      if (i < 0) continue;
      Part part;
      if (r == m.rank()) {
        if (!sum_rows<kWeighted>(part, piece, row_of_own(token, i))) continue;
        if constexpr (!kWideSums && kDtype != kFloat32) {  // as if it had travelled
          uint4 v[kDeep];
          part.join(v);
          part.split(v);
        }
      } else {
        const std::uint64_t slot = slot_number(token, r, i);
        if (kDrop && !reinterpret_cast<const Back*>(&m.meta(m.rank(), slot, epoch))->rows) continue;
        load_sum(part, piece, m.slot(m.rank(), slot, epoch));
      }
      if (any)
        total.add(part);
      else
        total.set(part);
      any = true;
    }
    uint4 v[kDeep];
    if (any) {
      total.join(v);
    } else {
#pragma unroll
      for (std::uint32_t k = 0; k < kDeep; k++) v[k] = {0, 0, 0, 0};
    }
    piece.store(a.y + std::uint64_t(token) * kRowBytes, v);
  }

  // One float a row, back to the place of its id.
  __device__ void bring_weight_grads(std::uint32_t token) const {
    const std::uint32_t i = token * kTopK + lane;
    const std::int32_t id = lane < kTopK ? a.ids[i] : -1;
    const bool valid = id >= 0 && std::uint32_t(id) < m.experts;
    const std::uint32_t home = valid ? m.homes[id] : 0xffffffff, r = home >> 16;
    const std::uint32_t place = place_of(home, lane);
    if (lane >= kTopK) return;
    float grad = 0;
    if (valid) {
      if (r == m.rank()) {
        const std::int32_t row = m.list(r, token)[place];
        if (row >= 0) grad = a.row_grads[row];
      } else {
        const std::uint32_t number = m.numbers()[std::uint64_t(token) * kWorld + r];
        grad = reinterpret_cast<const Back*>(&m.meta(m.rank(), slot_number(token, r, number), epoch))->grads[place];
      }
    }
    a.weight_grads[i] = grad;
  }

  template <bool kWeighted>
  __device__ void finish() const {
    const std::uint32_t each = Moe::chunk_tokens(m.tokens), tokens = kRanges * each;
    for (std::uint32_t item = warp; item < tokens * P::kCount; item += warps) {
      const std::uint32_t j = item / P::kCount, number = item % P::kCount;
      const std::uint32_t token = m.token_at(j / each, a.chunk) + j % each;
      if (token >= m.token_at(j / each, a.chunk + 1)) continue;
      finish_piece<kWeighted>(token, number);
      if (a.weight_grads && number == 0) bring_weight_grads(token);
    }
    if (!is_last_block(m)) return;
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != m.rank()) ptx::store_release_sys(&m.stage_at(p).consumed[m.rank()], mark(epoch, a.chunk + 1));
    if (a.last) end_call(m, epoch);
  }
};

__device__ inline void send_headers(const Moe& m) {
  if (blockIdx.x == 0)
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != m.rank()) m.place.send_header(p, m.epoch(), m.digest, m.tokens, 0);
}

}  // namespace a2a

using namespace a2a;

extern "C" __global__ void __launch_bounds__(kThreads, 3) moe_push_sum(const __grid_constant__ Sum a) {
  send_headers(a.m);
  Summer(a).sum<false>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) moe_push_sum_weighted(const __grid_constant__ Sum a) {
  send_headers(a.m);
  Summer(a).sum<true>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) moe_push_finish(const __grid_constant__ Sum a) {
  if (!has_failed(a.m)) Summer(a).finish<false>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) moe_push_finish_weighted(const __grid_constant__ Sum a) {
  if (!has_failed(a.m)) Summer(a).finish<true>();
}
