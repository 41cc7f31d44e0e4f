// moe_push_sum: combine, and dispatch's backward. The rank that holds a token's rows sums them and stores the sum into a slot at
// the token's owner (sum); the owner adds the ranks' sums (finish), chunk by chunk behind the gates of moe_push_expand.cu.
//   sum_r[token] = round(w_a * rows[a] + w_b * rows[b] + ...)     rows of rank r, in expert order, then k; products rounded
//   y[token] = round(sum_r + sum_s + ...)                         ranks in order; sums in float32, from the first term
//   Dispatch's backward has no weights, and brings one float a row back to the token's top-k.
//
// Cost     1 step; scale-up bytes per rank: one row for each token of another rank that it holds rows of
// Launch   blocks of kThreads with kSpots * kSpotBytes of shared memory a warp.  sum: the same grid on every rank, at most
//          kMostBlocks, waits for nobody while the rings hold the request; it is the call's first kernel, unless a gate of rows
//          is.  finish: any grid; the call's last one says so.
// Buffers  rows, weights, y private; slots symmetric; the plan of the dispatch
// VISIBLE  W: all warps of a block store sums, then count themselves (acq_rel in the block); S: the last one stores `progress`
//          (st.release.sys, cumulative).  A: the gate (ld.acquire.sys); R: finish, after it on its stream.
//          Rows that are marked as they are made (ready.cuh) are summed in passes, each behind a gate of moe_push_expand.cu; the
//          last pass signals, and finish adds own rows only behind that.
// REUSE    as in moe_push_send.cu, with owners in the place of receivers.
// PROGRESS sum waits for `consumed` only where a ring is smaller than the request, and then for a chunk that it has signalled.
// FAILURE  as in signal.cuh; finish leaves when it sees the record.
#include "moe_push_sum.cuh"

namespace a2a {

// Pieces of an item: all it can while there are enough items, since looking one up costs as much as adding a piece.
constexpr std::uint32_t kItems = kChunks == 1 ? P::kCount : P::kCount < 2 ? 1 : 2;  // of a token
constexpr std::uint32_t kItemPieces = ceil_div(P::kCount, kItems);

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

  // ---- the pipeline: pieces come by bulk copies while earlier ones are added up

  __device__ std::uint8_t* spot(std::uint32_t number) const {
    extern __shared__ __align__(128) std::uint8_t spots[];
    return spots + (threadIdx.x / 32 * kSpots + number % kSpots) * kSpotBytes;
  }
  __device__ static std::uint32_t piece_bytes(std::uint32_t number) {
    return number + 1 < P::kCount ? kPieceBytes : kRowBytes - number * kPieceBytes;
  }

  template <bool kWeighted>
  __device__ Known ready(const Item& item) const {
    Known r;
    static_cast<Item&>(r) = item;
    const std::uint32_t lower = (1u << lane) - 1, below = m.rank() < 32 ? (1u << m.rank()) - 1 : kFull;
    const std::uint32_t sums = __ballot_sync(kFull, item.sum != nullptr);
    r.rows = __ballot_sync(kFull, item.row >= 0);
    r.before = __popc(sums & below);
    r.after = __popc(sums) - r.before;
    r.row_place = r.before + __popc(r.rows & lower);
    r.sum_place = __popc(sums & lower) + (lane > m.rank() ? __popc(r.rows) : 0);
    if (kWeighted && item.row >= 0) r.weight = a.weights[item.row];
    return r;
  }

  // Start the copies of an item's next piece.
  __device__ Waiting start(const Known& item, std::uint32_t first, std::uint64_t* barrier) const {
    const std::uint32_t bytes = piece_bytes(item.number), wide = bytes * (kSpotBytes / kPieceBytes);
    if (item.pieces()) {
      if (lane == 0) ptx::bulk_expect(barrier, __popc(item.rows) * bytes + (item.before + item.after) * wide);
      __syncwarp();
    }
    if (item.row >= 0)
      ptx::bulk_load(spot(first + item.row_place),
                     a.rows + std::uint64_t(item.row) * kRowBytes + item.number * kPieceBytes, bytes, barrier);
    if (item.sum) ptx::bulk_load(spot(first + item.sum_place), item.sum + item.number * kSpotBytes, wide, barrier);
    return {item.number, item.chunk, item.owner,  item.u,     item.slot,
            first,       item.rows,  item.before, item.after, item.weight};
  }

  // Add a piece up, once it is here; there is at least one term.
  template <bool kWeighted, bool kAlone>
  __device__ void add_up(Part& total, const Waiting& w) const {
    const std::uint32_t rows = __popc(w.rows);
    if constexpr (kAlone) {
      add_rows<kWeighted>(total, w);
    } else if constexpr (kWorld <= 2) {  // one sum beside the rows: a + b is b + a, and one accumulator is enough
      const std::uint8_t* sum = spot(w.before ? w.spot : w.spot + rows);
      if (!rows) {
        total.add_sum<true>(lane, sum);
      } else {
        add_rows<kWeighted>(total, w);
        total.round();
        if (w.before + w.after) total.add_sum<false>(lane, sum);
      }
    } else {
      bool first = true;
      for (std::uint32_t i = 0; i < w.before; i++) add_sum(total, w.spot + i, first);
      if (rows) {
        Part part;
        add_rows<kWeighted>(part, w);
        part.round();
        if (first)
          total = part;
        else
          total.add(part);
        first = false;
      }
      for (std::uint32_t i = 0; i < w.after; i++) add_sum(total, w.spot + w.before + rows + i, first);
    }
  }
  template <bool kWeighted>
  __device__ void add_rows(Part& part, const Waiting& w) const {
    std::uint32_t from = w.spot + w.before, left = w.rows;
    part.add_row<true, kWeighted>(lane, spot(from), __shfl_sync(kFull, w.weight, __ffs(left) - 1));
    while (left &= left - 1)
      part.add_row<false, kWeighted>(lane, spot(++from), __shfl_sync(kFull, w.weight, __ffs(left) - 1));
  }
  __device__ void add_sum(Part& total, std::uint32_t number, bool& first) const {
    if (first)
      total.add_sum<true>(lane, spot(number));
    else
      total.add_sum<false>(lane, spot(number));
    first = false;
  }

  // Add up all items that `fetch` gives, in their order; `done` takes each piece of the result. The rows of an item are looked
  // up before the copies of the item before it start, and their weights before its own: no step waits for the one just begun.
  // kAlone: items have no sums.
  template <bool kWeighted, bool kAlone, typename Fetch, typename Done>
  __device__ void pipeline(Fetch fetch, Done done) const {
    __shared__ std::uint64_t all_barriers[kWarps][kAhead];
    std::uint64_t* barriers = all_barriers[threadIdx.x / 32];
    if (lane == 0)
      for (std::uint32_t i = 0; i < kAhead; i++) ptx::bulk_barrier_init(barriers + i);
    __syncwarp();
    Waiting queue[kAhead];
    std::uint32_t head = 0, tail = 0, used = 0, spots = 0, phases = 0;
    Known next = ready<kWeighted>(fetch());
    Item after = fetch();
    while (true) {
      while (next.valid && head - tail < kAhead && used + next.pieces() <= kSpots) {
        const Waiting started = start(next, spots, barriers + head % kAhead);
#pragma unroll
        for (std::uint32_t i = 0; i < kAhead; i++)  // registers have no addresses: no index that the compiler can't see
          if (i == head % kAhead) queue[i] = started;
        head++, used += next.pieces(), spots += next.pieces();
        if (++next.number < next.end) continue;
        next = ready<kWeighted>(after);
        after = fetch();
      }
      if (head == tail) return;
      const std::uint32_t at = tail % kAhead;
      Waiting w = queue[0];
#pragma unroll
      for (std::uint32_t i = 1; i < kAhead; i++)
        if (i == at) w = queue[i];
      Part total;
      if (w.pieces()) {
        ptx::bulk_await(barriers + at, phases >> at & 1);
        phases ^= 1u << at;
        add_up<kWeighted, kAlone>(total, w);
      }
      done(w, total);
      __syncwarp();  // the spots may be filled again
      used -= w.pieces(), tail++;
    }
  }

  __device__ static void take(Item& item, std::uint32_t which) {
    item.valid = true;
    item.number = which * kItemPieces;
    item.end = item.number + kItemPieces < P::kCount ? item.number + kItemPieces : P::kCount;
  }

  // The lane's row of token u of another rank.
  __device__ std::int32_t row_of(std::uint32_t source, std::uint32_t u) const {
    return a.compact ? compact_row(source, u) : lane < kTopK ? m.list(source, u)[lane] : -1;
  }
  __device__ std::int32_t compact_row(std::uint32_t source, std::uint32_t u) const {
    const std::uint32_t row = m.plan[PlanAt::kDistinct + source] + u;
    return lane == 0 && row < a.compact_rows ? std::int32_t(row) : -1;
  }

  // ---- sum: at the rank that holds the rows

  // The owner has taken the sums whose slots chunk c takes.
  __device__ bool await_room(Wait& wait, std::uint32_t c) const {
    const std::uint32_t each = Moe::chunk_tokens(m.max_tokens), depth = each ? m.ring / each : kChunks;
    if (c < depth) return true;
    for (std::uint32_t p = lane; p < kWorld; p += 32)
      while (p != m.rank() &&
             !has_reached(ptx::load_acquire_sys(&m.stage_here().consumed[p]), mark(epoch, c - depth + 1)) &&
             again(wait, m, epoch, p)) {
      }
    __syncwarp();  // what one lane has acquired holds for all: a vote orders no memory
    return !__any_sync(kFull, wait.broken);
  }

  // This warp is done with the chunks from `done` to `upto`; the block's last one says so to all ranks.
  __device__ void signal(std::uint32_t& done, std::uint32_t upto, std::uint32_t* arrived) const {
    for (; done < upto; done++) {
      __syncwarp();
      std::uint32_t before = lane == 0 ? ptx::add_acq_rel_block(arrived + done, 1) : 0;
      before = __shfl_sync(kFull, before, 0);
      if (before + 1 != kWarps) continue;
      __syncwarp();
      for (std::uint32_t p = lane; p < kWorld; p += 32)
        ptx::store_release_sys(&m.stage_at(p).progress[m.rank()][blockIdx.x], mark(epoch, done + 1));
    }
  }

  // All chunks, one after the other, and in each one owner after the other.
  template <bool kWeighted>
  __device__ void sum(std::uint32_t* arrived) const {
    Wait wait(m.place, kWorld);
    std::uint32_t chunk_at = 0, step = 0, item = 0, source = 0, done = 0, room = 0;
    bool failed = false;  // the same on all lanes
    const bool last_pass = !kReadyFlags || a.pass + 1 >= a.passes;
    const Marked marked(a);
    Chunk chunk;
    auto fetch = [&]() {
      while (true) {
        while (step == 0 || item >= chunk.total * kItems) {
          if (step + 1 >= kWorld) {
            if (step && ++chunk_at >= kChunks) return Item{};
            if (kWorld == 1) return Item{};
            step = 0;
          }
          step++;
          source = (m.rank() + step) % kWorld;
          chunk = Chunk(m.starts_from(source), chunk_at, lane);
          item = warp;
        }
        std::uint32_t u, range, i;
        chunk.find(item / kItems, u, range, i);
        Item next;
        take(next, item % kItems);
        next.chunk = chunk_at;
        next.owner = source, next.u = u;
        next.slot = std::uint32_t(m.slot_number(source, m.rank(), range, i));
        next.row = row_of(source, u);
        item += warps;
        if (marked.has(next.row)) return next;
      }
    };
    pipeline<kWeighted, true>(fetch, [&](const Waiting& w, const Part& total) {
      if (failed) return;
      if (last_pass) signal(done, w.chunk, arrived);
      if (w.chunk >= room) {
        failed = !await_room(wait, w.chunk);
        if (failed) return;
        room = w.chunk + 1;
      }
      if (w.rows) store_sum(m.slot(w.owner, w.slot, epoch), P(w.number, lane), total);
      if (w.number != 0) return;
      Back& back = *reinterpret_cast<Back*>(&m.meta(w.owner, w.slot, epoch));
      if (kDrop && lane == 0) back.rows = __popc(w.rows);
      if (a.brings && lane < kTopK) {
        const std::int32_t row = m.list(w.owner, w.u)[lane];
        back.grads[lane] = row >= 0 ? a.row_grads[row] : 0;
      }
    });
    if (!failed && last_pass) signal(done, kChunks, arrived);
  }

  // ---- finish: at the owner

  __device__ std::uint64_t slot_number(std::uint32_t token, std::uint32_t r, std::uint32_t i) const {
    return m.slot_number(m.rank(), r, m.range_of(token), i);
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
    const std::uint32_t each = Moe::chunk_tokens(m.tokens);
    std::uint32_t chunk = a.first_chunk, item = warp;
    auto fetch = [&]() {
      Item next;
      while (chunk < a.end_chunk) {
        if (item >= kRanges * each * kItems) {
          chunk++;
          item = warp;
          continue;
        }
        const std::uint32_t j = item / kItems, range = j / each, token = m.token_at(range, chunk) + j % each;
        const std::uint32_t which = item % kItems;
        item += warps;
        if (token >= m.token_at(range, chunk + 1)) continue;
        take(next, which);
        next.u = token;
        find(next, range);
        return next;
      }
      return next;
    };
    pipeline<kWeighted, false>(fetch, [&](const Waiting& w, const Part& total) {
      uint4 v[kDeep] = {};
      if (w.pieces()) total.join(v);
      P(w.number, lane).store(a.y + std::uint64_t(w.u) * kRowBytes, v);
      if (a.brings && w.number == 0) bring_weight_grads(w.u);
    });
    end_chunks(m, epoch, a.end_chunk, a.credits, a.last);
  }

  // The lane's row of an own token, and the sum that the lane's rank has sent for it.
  __device__ void find(Item& next, std::uint32_t range) const {
    const std::int32_t* numbers = m.numbers() + std::uint64_t(next.u) * kWorld;
    const std::int32_t here = numbers[m.rank()], there = lane < kWorld && lane != m.rank() ? numbers[lane] : -1;
    const std::int32_t row = lane < kTopK && !a.compact ? m.list(m.rank(), next.u)[lane] : -1;
    if (here >= 0) next.row = a.compact ? compact_row(m.rank(), m.u_of(next.u, m.rank(), here)) : row;
    if (there < 0) return;
    const std::uint64_t slot = m.slot_number(m.rank(), lane, range, there);
    if (kDrop && !reinterpret_cast<const Back*>(&m.meta(m.rank(), slot, epoch))->rows) return;
    next.sum = m.slot(m.rank(), slot, epoch);
  }
};

template <bool kWeighted>
__device__ void run_sum(const Sum& a) {
  __shared__ std::uint32_t arrived[kChunks];
  ptx::launch_next();
  const bool failed = threadIdx.x == 0 && record_is_set(a.m);
  for (std::uint32_t c = threadIdx.x; c < kChunks; c += kThreads) arrived[c] = 0;
  if (!kReadyFlags || !a.passes) send_headers(a.m);
  if (__syncthreads_or(failed)) return;  // peers may still read what earlier calls have sent
  Summer(a).sum<kWeighted>(arrived);
}

template <bool kWeighted>
__device__ void run_finish(const Sum& a) {
  ptx::await_previous();
  if (!has_failed(a.m)) Summer(a).finish<kWeighted>();
}

}  // namespace a2a

using namespace a2a;

extern "C" __global__ void __launch_bounds__(kThreads, 3) moe_push_sum(const __grid_constant__ Sum a) {
  run_sum<false>(a);
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) moe_push_sum_weighted(const __grid_constant__ Sum a) {
  run_sum<true>(a);
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) moe_push_finish(const __grid_constant__ Sum a) {
  run_finish<false>(a);
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) moe_push_finish_weighted(const __grid_constant__ Sum a) {
  run_finish<true>(a);
}
