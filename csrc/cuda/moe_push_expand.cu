// moe_push_expand: the gates, which wait for peers, and the kernels behind them, which turn tokens into rows.
//   rows[first row of (expert, source) + position] = x_source[token]            dispatch
//   grad_rows[row] = round(weight[row] * g[token])                              combine's backward; see moe_push_dots.cu, too
//
// Cost     copied bytes: each token read once, each row written once
// Launch   gates: one block.  Others: any grid, behind the gate of what they read; the call's last one says so.  Blocks of
//          moe_push_expand without a wire format have kTilers warps, each with kTileBytes of dynamic shared memory.
// Buffers  rows and all that describes them private; slots symmetric
// VISIBLE  see moe_push_send.cu: a gate acquires every sender's `progress` (counts carry their own marks), and its end precedes
//          the next kernel's loads.  Own tokens are expanded behind a gate that has acquired this rank's own `progress`.
//          Rows that have arrived, and rows that may be sent: see ready.cuh.
// REUSE    slots and counts: see moe_push_send.cu.  `consumed` is stored by the last block of a chunk's kernel (release), when
//          all blocks have read (acq_rel on `done`).
// PROGRESS gates wait for signals that senders give without waiting for gates, except where a ring is short: then for
//          `consumed` of an earlier chunk, whose gate and kernel wait for no later one.  gate_rows: for whoever makes the rows.
// FAILURE  as in signal.cuh: kernels behind a gate look at the record first, and leave.
//
// In a request of one chunk the three kernels follow each other on one stream as programmatic launches: a gate starts while
// senders still send, waits for signals, and ends only after its predecessor; rows are made after the gate has ended.
#include "moe_push.cuh"

namespace a2a {
constexpr std::uint32_t kDeep = 8;  // vectors of a lane in flight
}
#include "moe_push_expand.cuh"

namespace a2a {

// ---------------------------------------------------------------- gates

struct Gate {
  Moe m;
  std::uint32_t chunk;    // of every source, that must be there
  std::uint32_t signals;  // blocks or teams of a source that signal
  std::uint32_t headers;  // not 0: the first gate of a call without counts
  std::uint32_t unused;
};

struct Counts {
  Moe m;
  std::int32_t *offsets, *counts, *overflow;  // [local expert], [local expert], [1]
  std::uint64_t* host;                        // or null: ticket, padded rows, rows, distinct tokens
  std::uint64_t ticket;
  std::uint32_t capacity;  // rows that the outputs hold
  std::uint32_t signals;   // not 0: as in Gate, all chunks of all sources must be there, too
};

struct RowsGate {
  Moe m;
  std::uint32_t pass, passes;
};

__device__ inline void await_mark(Wait& wait, const Moe& m, const std::uint64_t* word, std::uint64_t wanted,
                                  std::uint32_t peer) {
  while (!has_reached(ptx::load_relaxed_sys(word), wanted) && again(wait, m, std::uint32_t(wanted >> 32), peer)) {
  }
  ptx::load_acquire_sys(word);
}

// Chunk `chunk` of every source is here.
__device__ inline void await_chunk(const Moe& m, Wait& wait, std::uint32_t epoch, std::uint32_t chunk,
                                   std::uint32_t signals) {
  for (std::uint32_t i = threadIdx.x; i < kWorld * signals; i += blockDim.x) {
    const std::uint32_t s = i / signals;
    await_mark(wait, m, &m.stage_here().progress[s][i % signals], mark(epoch, chunk + 1), s);
  }
}

// Sums of a block's values up to each thread's; `sums` holds 33 words.
__device__ inline std::uint32_t scan(std::uint32_t value, std::uint32_t* sums) {
  const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = scan_warp(value, lane);
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  if (warp == 0) sums[lane] = scan_warp(lane < blockDim.x / 32 ? sums[lane] : 0, lane);
  __syncthreads();
  value += warp ? sums[warp - 1] : 0;
  __syncthreads();
  return value;
}

// Wait for everybody's counts and keep them. False: somebody failed.
__device__ inline bool await_counts(const Moe& m, std::uint32_t epoch, std::uint32_t signals) {
  Wait wait(m.place, kWorld);
  for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
    if (p != m.rank()) wait.await_header(p, epoch, m.digest, true);
  const std::uint32_t words = kCountsAt + m.local_experts;
  for (std::uint32_t i = threadIdx.x; i < kWorld * words; i += blockDim.x) {
    const std::uint32_t s = i / words, w = i % words;
    const std::uint64_t* word = m.counts_at(m.rank(), s, epoch) + w;
    std::uint64_t seen;
    do {
      seen = ptx::load_relaxed_sys(word);
    } while (seen >> 32 != epoch && again(wait, m, epoch, s));
    if (w >= kCountsAt)
      WorkspaceAt::first_rows(m)[(w - kCountsAt) * kWorld + s] = std::uint32_t(seen);
    else if (w >= kStartsAt)
      m.plan[PlanAt::kFrom + s * PlanAt::kStarts + w - kStartsAt] = std::int32_t(seen);
  }
  for (std::uint32_t b = threadIdx.x; b < kRanges; b += blockDim.x)  // this rank's own plan
    await_mark(wait, m, &m.stage_here().progress[m.rank()][b], mark(epoch, 0), m.rank());
  await_chunk(m, wait, epoch, kChunks - 1, signals);
  return !__syncthreads_or(wait.broken);
}

// Where every expert's and every source's rows begin.
__device__ inline void place_rows(const Counts& a) {
  __shared__ std::uint32_t sums[33], padded_before, true_rows, dropped;
  const Moe& m = a.m;
  if (threadIdx.x == 0) padded_before = true_rows = dropped = 0;
  __syncthreads();
  for (std::uint32_t l0 = 0; l0 < m.local_experts; l0 += blockDim.x) {
    const std::uint32_t l = l0 + threadIdx.x;
    const bool mine = l < m.local_experts;
    std::uint32_t* first = WorkspaceAt::first_rows(m) + l * kWorld;
    std::uint32_t rows = 0;
    for (std::uint32_t s = 0; mine && s < kWorld; s++) rows += first[s];
    const std::uint32_t padded = mine ? align_up(rows, m.alignment) : 0;
    const std::uint32_t end = padded_before + scan(padded, sums), begin = end - padded;
    std::uint32_t row = begin;
    for (std::uint32_t s = 0; mine && s < kWorld; s++) {
      const std::uint32_t of_source = first[s];
      first[s] = row;
      row += of_source;
    }
    if (mine) {
      a.counts[l] = std::int32_t(rows);
      a.offsets[l] = std::int32_t(end < a.capacity ? end : a.capacity);
      m.plan[PlanAt::kPadding + 2 * l] = std::int32_t(row);
      m.plan[PlanAt::kPadding + 2 * l + 1] = std::int32_t(end);
      atomicAdd(&true_rows, rows);
      if (row > a.capacity) atomicAdd(&dropped, begin < a.capacity ? row - a.capacity : rows);
    }
    if (threadIdx.x == blockDim.x - 1) padded_before = end;
    __syncthreads();
  }
  if (threadIdx.x) return;
  std::int32_t distinct = 0;
  for (std::uint32_t s = 0; s < kWorld; s++) {
    m.plan[PlanAt::kDistinct + s] = distinct;
    distinct += m.starts_from(s)[PlanAt::kStarts - 1];
  }
  m.plan[PlanAt::kDistinct + kWorld] = distinct;
  *a.overflow = std::int32_t(dropped);
  if (kReadyFlags) begin_arrivals(m, padded_before < a.capacity ? padded_before : a.capacity);
  if (!kDrop && padded_before > a.capacity) Wait(m.place, kWorld).fail(kOverflow, m.rank());
  if (!a.host) return;
  ptx::store_relaxed_sys(a.host + 1, padded_before);
  ptx::store_relaxed_sys(a.host + 2, true_rows);
  ptx::store_relaxed_sys(a.host + 3, std::uint64_t(distinct));
  ptx::store_release_sys(a.host, a.ticket);
}

// After a failure there are no rows, whatever lay in the outputs: what follows on the stream reads them.
__device__ inline void place_nothing(const Counts& a) {
  for (std::uint32_t l = threadIdx.x; l < a.m.local_experts; l += blockDim.x) a.offsets[l] = a.counts[l] = 0;
  if (threadIdx.x) return;
  *a.overflow = 0;
  if (kReadyFlags) begin_arrivals(a.m, 0);
}

// ---------------------------------------------------------------- rows

struct Rows : Expander {
  using Expander::Expander;

  // ---- dispatch

  // A lane's row of a token, as the source says it: none where the expert is not here.
  struct Entry {
    bool valid;
    std::uint32_t expert, position, k, place;
    float weight;
  };

  __device__ Entry entry_of_slot(const Meta& meta) const {
    Entry e{lane < meta.rows, 0, 0, 0, lane, 0};
    if (e.valid) {
      const uint4 sent = reinterpret_cast<const uint4*>(meta.entries)[lane];
      e.expert = sent.x, e.position = sent.y, e.weight = __uint_as_float(sent.z), e.k = sent.w;
    }
    return e;
  }
  __device__ Entry entry_of_own(std::uint32_t token) const {
    const std::uint32_t i = token * kTopK + lane;
    const std::int32_t id = lane < kTopK ? a.ids[i] : -1;
    const std::uint32_t home = id >= 0 && std::uint32_t(id) < m.experts ? m.homes[id] : 0xffffffff;
    const std::uint32_t position = lane < kTopK ? WorkspaceAt::positions(m)[i] : 0;
    const float weight = lane < kTopK && a.topk_weights ? a.topk_weights[i] : 1.0f;
    return {home >> 16 == m.rank(), home & 0xffff, position, lane, place_of(home, lane), weight};
  }

  // The lane's row, or -1 where it has none or it was dropped.
  __device__ std::int32_t row_of(const Entry& e, std::uint32_t s) const {
    if (!e.valid) return -1;
    const std::uint32_t at = WorkspaceAt::first_rows(m)[e.expert * kWorld + s] + e.position;
    return at < a.capacity ? std::int32_t(at) : -1;
  }

  // What the rows of a token are told about it, and the list of them. u: of an own token, unless rows are compact, any.
  __device__ void describe(std::uint32_t s, std::uint32_t token, std::uint32_t u, const Entry& e,
                           std::int32_t row) const {
    const std::uint32_t rows = __popc(__ballot_sync(kFull, e.valid));
    std::int32_t* list = m.list(s, s == m.rank() ? token : u);
    if (e.valid) list[e.place] = row;
    if (lane >= rows && lane < kTopK) list[lane] = -1;
    if (row < 0) return;
    a.weights[row] = e.weight;
    a.rank[row] = std::int32_t(s);
    a.token[row] = std::int32_t(token);
    a.k[row] = std::int32_t(e.k);
    if (kCompact) a.index[row] = m.plan[PlanAt::kDistinct + s] + std::int32_t(u);
  }

  // Store a piece of a token into its rows.
  __device__ void put(const Got<kWireRows>& got, const P& piece, std::uint32_t number, std::uint32_t s,
                      std::uint32_t token, std::uint32_t u, const Entry& e) const {
    const std::int32_t row = row_of(e, s);
    if (kCompact) {
      const std::uint32_t compact = m.plan[PlanAt::kDistinct + s] + u;
      if (compact < a.compact_capacity) got.store(piece, a, compact);
    } else {
      for (std::uint32_t left = __ballot_sync(kFull, row >= 0); left; left &= left - 1)
        got.store(piece, a, __shfl_sync(kFull, row, __ffs(left) - 1));
    }
    if (number == 0) describe(s, token, u, e, row);
    count_arrivals<P::kCount>(m, row, 1);
  }

  // The same for a tile that is on its way into shared memory. `stored`: the lane's row of the tile before, which has arrived when
  // its store is over, and likely is by the time that this one is here.
  __device__ void put_tile(Tile& tile, std::uint32_t number, std::uint32_t s, std::uint32_t token, std::uint32_t u,
                           const Entry& e, std::int32_t& stored) const {
    const std::int32_t row = row_of(e, s);
    std::int64_t to = row;
    if (kCompact) {
      const std::uint32_t compact = m.plan[PlanAt::kDistinct + s] + u;
      to = lane == 0 && compact < a.compact_capacity ? std::int64_t(compact) : -1;
    }
    tile.await();
    arrive(stored);
    if (to >= 0) tile.store(a.rows + to * kRowBytes, number);
    if (number == 0) describe(s, token, u, e, row);
    tile.release();
    stored = row;
  }
  __device__ void arrive(std::int32_t stored) const {
    if constexpr (kReadyFlags) ptx::bulk_wait();
    count_arrivals<kTiles>(m, stored, 1);
  }

  __device__ void dispatch_tiles(Tile tile) const {
    std::int32_t stored = -1;
    own(kTiles, [&](std::uint32_t token, std::uint32_t number, std::uint32_t u) {
      tile.load(a.x + std::uint64_t(token) * kRowBytes, number, lane);
      put_tile(tile, number, m.rank(), token, u, entry_of_own(token), stored);
    });
    padding<true, kTiles>();
    peers(kTiles, [&](std::uint32_t number, std::uint32_t s, std::uint32_t u, std::uint64_t slot) {
      tile.load(m.slot(m.rank(), slot, epoch), number, lane);
      const Meta& meta = m.meta(m.rank(), slot, epoch);
      put_tile(tile, number, s, meta.token, u, entry_of_slot(meta), stored);
    });
    ptx::bulk_wait();
    arrive(stored);
  }

  template <bool kReady>
  __device__ void dispatch() const {
    own(P::kCount, [&](std::uint32_t token, std::uint32_t number, std::uint32_t u) {
      const P piece(number, lane);
      Got<kWireRows> got;
      load<kReady>(got, piece, token);
      put(got, piece, number, m.rank(), token, u, entry_of_own(token));
    });
    padding<true, P::kCount>();
    peers(P::kCount, [&](std::uint32_t number, std::uint32_t s, std::uint32_t u, std::uint64_t slot) {
      const P piece(number, lane);
      Got<kWireRows> got;
      load_slot(got, piece, slot);
      const Meta& meta = m.meta(m.rank(), slot, epoch);
      put(got, piece, number, s, meta.token, u, entry_of_slot(meta));
    });
  }

  // ---- combine's backward

  __device__ static uint4 scaled(uint4 v, float weight) {
    float f[kColumns];
    Vec::split(f, v);
#pragma unroll
    for (std::uint32_t i = 0; i < kColumns; i++) f[i] = __fmul_rn(weight, f[i]);
    return Vec::join(f);
  }

  template <bool kWeighted>
  __device__ void put_gradient(const Got<false>& got, const P& piece, std::uint32_t s, std::uint32_t u) const {
    const std::int32_t row = lane < kTopK ? m.list(s, u)[lane] : -1;
    const float weight = kWeighted && row >= 0 ? a.weights[row] : 1.0f;
    for (std::uint32_t left = __ballot_sync(kFull, row >= 0); left; left &= left - 1) {
      const std::uint32_t j = __ffs(left) - 1;
      const std::uint32_t to = __shfl_sync(kFull, row, j);
      const float by = __shfl_sync(kFull, weight, j);
      uint4 v[kDeep];
#pragma unroll
      for (std::uint32_t k = 0; k < kDeep; k++) v[k] = kWeighted ? scaled(got.v[k], by) : got.v[k];
      piece.store(a.rows + std::uint64_t(to) * kRowBytes, v);
    }
  }

  template <bool kWeighted>
  __device__ void gradient() const {
    own(P::kCount, [&](std::uint32_t token, std::uint32_t number, std::uint32_t) {
      const P piece(number, lane);
      Got<false> got;
      load<false>(got, piece, token);
      put_gradient<kWeighted>(got, piece, m.rank(), token);
    });
    padding<false>();
    peers(P::kCount, [&](std::uint32_t number, std::uint32_t s, std::uint32_t u, std::uint64_t slot) {
      const P piece(number, lane);
      Got<false> got;
      load_slot(got, piece, slot);
      put_gradient<kWeighted>(got, piece, s, u);
    });
  }
};

}  // namespace a2a

using namespace a2a;

extern "C" __global__ void __launch_bounds__(1024) moe_push_gate(const __grid_constant__ Gate a) {
  const Moe& m = a.m;
  const std::uint32_t epoch = m.epoch();
  Wait wait(m.place, kWorld);
  if (a.headers)
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != m.rank()) wait.await_header(p, epoch, m.digest, true);
  await_chunk(m, wait, epoch, a.chunk, a.signals);
  ptx::launch_next();
  ptx::await_previous();
}

extern "C" __global__ void __launch_bounds__(1024) moe_push_gate_counts(const __grid_constant__ Counts a) {
  const std::uint32_t epoch = a.m.epoch();
  const bool all = await_counts(a.m, epoch, a.signals);
  ptx::launch_next();
  if (all)
    place_rows(a);
  else
    place_nothing(a);
  ptx::await_previous();
}

// A rank that can't make its call says so, in the place of the call's first kernel.
extern "C" __global__ void moe_push_refuse(const __grid_constant__ Gate a) {
  const std::uint32_t epoch = a.m.epoch();
  for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
    if (p != a.m.rank()) a.m.place.send_header(p, epoch, kRefusal, 0, 0);
  __syncthreads();
  end_call(a.m, epoch);
}

#if READY
// Of a combine whose rows are marked as they are made: those of one pass may be sent. The call's first kernel, and one before each
// of its sums.
extern "C" __global__ void __launch_bounds__(1024) moe_push_gate_rows(const __grid_constant__ RowsGate a) {
  const Moe& m = a.m;
  if (a.pass == 0) send_headers(m);
  if (has_failed(m)) return;  // the plan, too
  Wait wait(m.place, kWorld);
  const Pass pass(m, a.pass, a.passes);
  for (std::uint32_t word = pass.first + threadIdx.x; word < pass.end; word += blockDim.x)
    while (!reached(ptx::load_acquire_gpu(ReadyAt::sendable(m) + word), ready_epoch(m)) && wait.again_for_own()) {
    }
}
#endif

#if WIRE
extern "C" __global__ void __launch_bounds__(512) moe_push_expand(const __grid_constant__ Expand a) {
  ptx::await_previous();
  if (has_failed(a.m)) return;
  const Rows e(a);
  e.dispatch<false>();
  e.end();
}
#else
extern "C" __global__ void __launch_bounds__(32 * kTilers) moe_push_expand(const __grid_constant__ Expand a) {
  extern __shared__ __align__(128) std::uint8_t buffers[];
  __shared__ std::uint64_t barriers[kTilers];
  ptx::await_previous();
  if (has_failed(a.m)) return;
  const Rows e(a);
  e.dispatch_tiles(Tile(buffers, barriers, threadIdx.x / 32, e.lane));
  e.end();
}
#endif

#if WIRE
extern "C" __global__ void __launch_bounds__(512) moe_push_expand_quantised(const __grid_constant__ Expand a) {
  ptx::await_previous();
  if (has_failed(a.m)) return;
  const Rows e(a);
  e.dispatch<true>();
  e.end();
}
#endif

extern "C" __global__ void __launch_bounds__(512) moe_push_expand_gradient(const __grid_constant__ Expand a) {
  ptx::await_previous();
  if (has_failed(a.m)) return;
  const Rows e(a);
  e.gradient<false>();
  e.end();
}

extern "C" __global__ void __launch_bounds__(512) moe_push_expand_gradient_weighted(const __grid_constant__ Expand a) {
  ptx::await_previous();
  if (has_failed(a.m)) return;
  const Rows e(a);
  e.gradient<true>();
  e.end();
}
