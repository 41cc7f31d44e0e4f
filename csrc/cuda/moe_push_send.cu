// moe_push_send: the first kernel of a dispatch or of combine's backward. Every rank stores each of its tokens once into a slot
// at every rank that holds one of its experts.
//   dispatch: counts its ids first, tells every rank what comes (starts, counts of its experts), and sends with each token
//   which rows it becomes.  The other: tokens are those of an earlier dispatch, whose plan says where they go.
//   With a wire format, tokens are quantised on the way; `_quantised` kernels take them so from the caller.
//
// Cost     1 step; scale-up bytes per rank: one row a token and rank
// Launch   kRanges / kTeams blocks of kTeams teams, the same on every rank, resident together; dynamic shared memory:
//          (planners + 2) * (experts + kWorld) words a team (dispatch only)
// Buffers  x private; slots and counts symmetric; plan and workspace private
// VISIBLE  counts: marks, each a number and the epoch in one 64-bit store.  Slots: W: all threads of a team store; then their
//          barrier; S: one thread stores `progress` with st.release.sys, cumulative over the barrier.  A: a gate at the receiver
//          (moe_push_expand.cu) loads it with ld.acquire.sys, and R, the kernel after it, reads the slots.
// REUSE    counts and slots are two by the epoch's parity: as headers in signal.cuh; a rank's call e + 1 begins with this kernel
//          or moe_push_sum's, after all kernels of its call e.  Within a call, chunk c is stored when `consumed` says that the
//          chunks whose slots it takes have been expanded.
// PROGRESS the barrier among the senders: all are resident and come to it without waiting.  A sender waits for `consumed`
//          only where a ring is smaller than the request, and then for kernels that wait for nobody.
// FAILURE  as in signal.cuh: nothing is sent any more; gates see the record.
#include "moe_push.cuh"

namespace a2a {

struct Send {
  Moe m;
  const std::uint8_t* x;         // [tokens][kHidden] of the dtype, or e4m3
  const std::uint8_t* x_scales;  // with e4m3
  const void* ids;               // [tokens][kTopK]
  const float* weights;          // the same, or null: ones
  std::int32_t* ids_out;         // a copy
  std::uint32_t ids_bytes, unused;
};

constexpr std::uint32_t kNone = 0xffffffff;
constexpr std::uint32_t kDeep = 8;  // vectors of a lane in flight: what fills the link with few SMs

struct Sender {
  const Send& a;
  const Moe& m;
  Wait wait;
  const std::uint32_t rank, epoch, team, range, t, warp, lane;

  __device__ Sender(const Send& args, std::uint32_t e)
      : a(args),
        m(args.m),
        wait(args.m.place, kWorld),
        rank(args.m.rank()),
        epoch(e),
        team(threadIdx.x / kTeam),
        range(blockIdx.x * kTeams + team),
        t(threadIdx.x % kTeam),
        warp(t / 32),
        lane(t % 32) {}

  __device__ void barrier() const { ptx::barrier(1 + team, kTeam); }
  __device__ std::uint32_t columns() const { return m.experts + kWorld; }

  __device__ void send_count(std::uint32_t to, std::uint32_t word, std::uint32_t value) const {
    ptx::store_relaxed_sys(m.counts_at(to, rank, epoch) + word, mark(epoch, value));
  }

  // ---- the plan

  __device__ std::int64_t id(std::uint32_t i) const {
    return a.ids_bytes == 4 ? static_cast<const std::int32_t*>(a.ids)[i] : static_cast<const std::int64_t*>(a.ids)[i];
  }
  __device__ std::uint32_t expert(std::uint32_t i) const {  // kNone: of no expert, and no row
    const std::int64_t e = id(i);
    return e >= 0 && e < m.experts ? std::uint32_t(e) : kNone;
  }

  // What the lanes of a warp look at together: the ids of kGroup tokens.
  static constexpr std::uint32_t kGroup = 32 / kTopK;

  // Warps that count: no more than have a group. Their counters are cleared and summed.
  __device__ std::uint32_t planners() const {
    const std::uint32_t groups = ceil_div(Moe::range_tokens(m.tokens), kGroup);
    return groups < m.planners ? (groups ? groups : 1) : m.planners;
  }
  // Tokens of this warp: the planners cut their range in turn.
  __device__ std::uint32_t warp_token(std::uint32_t w) const {
    const std::uint32_t begin = m.token_at(range, 0), end = m.token_at(range + 1, 0);
    const std::uint32_t at = begin + w * ceil_div(end - begin, planners());
    return at < end ? at : end;
  }

  struct Ids {
    std::uint32_t expert, home;
  };
  __device__ Ids ids_of(std::uint32_t token0, std::uint32_t end) {
    const std::uint32_t i = token0 * kTopK + lane;
    if (lane >= kGroup * kTopK || token0 + lane / kTopK >= end) return {kNone, kNone};
    const std::uint32_t e = expert(i);
    a.ids_out[i] = std::int32_t(id(i));
    if (e == kNone && id(i) != -1) wait.fail(kOutOfRange, rank);
    return {e, e == kNone ? kNone : m.homes[e]};
  }

  // Rows of each expert and tokens of each rank among this warp's tokens; each id's and each token's place among them.
  __device__ void count(std::uint32_t* counts) {
    const std::uint32_t begin = warp_token(warp), end = warp_token(warp + 1), before = (1u << lane) - 1;
    std::uint32_t* positions = WorkspaceAt::positions(m);
    for (std::uint32_t i = begin * kWorld + lane; i < end * kWorld; i += 32) m.numbers()[i] = -1;
    Ids now = ids_of(begin, end);
    for (std::uint32_t t0 = begin; t0 < end; t0 += kGroup) {
      const Ids next = ids_of(t0 + kGroup, end);
      const bool valid = now.expert != kNone;
      const std::uint32_t r = now.home >> 16, token = t0 + lane / kTopK;
      const std::uint32_t same = __match_any_sync(kFull, now.expert);
      const std::uint32_t same_token = __match_any_sync(kFull, (lane / kTopK) << 16 | r);
      const bool first = valid && lane == std::uint32_t(__ffs(same_token)) - 1;  // of the token's ids at rank r
      const std::uint32_t firsts = __ballot_sync(kFull, first);
      const std::uint32_t same_rank = __match_any_sync(kFull, first ? r : kNone) & firsts;
      const std::uint32_t rows = valid ? counts[now.expert] : 0, tokens = first ? counts[m.experts + r] : 0;
      start_chunks(counts, t0, end, firsts, r);
      __syncwarp();
      if (valid) {
        positions[token * kTopK + lane % kTopK] = rows + __popc(same & before);
        if (!(same & before)) counts[now.expert] = rows + __popc(same);
      }
      if (first) {
        m.numbers()[std::uint64_t(token) * kWorld + r] = std::int32_t(tokens + __popc(same_rank & before));
        if (!(same_rank & before)) counts[m.experts + r] = tokens + __popc(same_rank);
      }
      __syncwarp();
      now = next;
    }
  }

  // A small request: each range counts all ids, so that none waits for another. By the warps that don't plan, if they are most.
  __device__ bool is_small() const { return m.tokens * kTopK <= 16 * kTeam; }
  __device__ void count_all(std::uint32_t* base, std::uint32_t* all) const {
    constexpr std::uint32_t kWarps = kTeam / 32, kAhead = 4;  // groups whose ids are on their way at once
    const std::uint32_t first_warp = planners() <= kWarps / 2 ? planners() : 0, step = (kWarps - first_warp) * kGroup;
    const std::uint32_t first_token = m.token_at(range, 0), of_group = lane / kTopK;
    if (warp < first_warp) return;
    for (std::uint32_t t0 = (warp - first_warp) * kGroup; t0 < m.tokens; t0 += kAhead * step) {
      std::uint32_t experts[kAhead], homes[kAhead];
#pragma unroll
      for (std::uint32_t k = 0; k < kAhead; k++) {
        const std::uint32_t token = t0 + k * step + of_group;
        experts[k] = lane < kGroup * kTopK && token < m.tokens ? expert((t0 + k * step) * kTopK + lane) : kNone;
      }
#pragma unroll
      for (std::uint32_t k = 0; k < kAhead; k++) homes[k] = experts[k] == kNone ? kNone : m.homes[experts[k]] >> 16;
#pragma unroll
      for (std::uint32_t k = 0; k < kAhead; k++) {
        const std::uint32_t e = experts[k], r = homes[k];
        const std::uint32_t same_token = __match_any_sync(kFull, of_group << 16 | (r & 0xffff));
        if (e == kNone) continue;
        const bool first = lane == std::uint32_t(__ffs(same_token)) - 1;
        atomicAdd(all + e, 1u);
        if (first) atomicAdd(all + m.experts + r, 1u);
        if (t0 + k * step + of_group >= first_token) continue;
        atomicAdd(base + e, 1u);
        if (first) atomicAdd(base + m.experts + r, 1u);
      }
    }
  }

  // Keep the counts before each chunk that begins among the kGroup tokens from t0 on. `firsts`: lanes that stand for a token at
  // their rank r.
  __device__ void start_chunks(const std::uint32_t* counts, std::uint32_t t0, std::uint32_t end, std::uint32_t firsts,
                               std::uint32_t r) const {
    const std::uint32_t each = Moe::chunk_tokens(m.tokens), first = m.token_at(range, 0);
    for (std::uint32_t c = ceil_div(t0 - first, each); c < kChunks; c++) {
      const std::uint32_t at = first + c * each;
      if (at >= t0 + kGroup || at >= end) break;
      const std::uint32_t earlier = firsts & ((1u << (at - t0) * kTopK) - 1);
      for (std::uint32_t rank0 = 0; rank0 < kWorld; rank0 += 32) {
        const std::uint32_t to = rank0 + lane;
        std::uint32_t start = to < kWorld ? counts[m.experts + to] : 0;
        for (std::uint32_t left = earlier; left; left &= left - 1)
          start += __shfl_sync(kFull, r, __ffs(left) - 1) == to;
        if (to < kWorld) m.plan[PlanAt::kTo + to * PlanAt::kStarts + range * kChunks + c] = std::int32_t(start);
      }
    }
  }

  // Counts of the warps before instead of each warp's own, and the range's in the histogram.
  __device__ void sum_warps(std::uint32_t* counts) const {
    for (std::uint32_t q = t; q < columns(); q += kTeam) {
      std::uint32_t sum = 0;
      for (std::uint32_t w = 0; w < planners(); w++) {
        const std::uint32_t own = counts[w * columns() + q];
        counts[w * columns() + q] = sum;
        sum += own;
      }
      WorkspaceAt::histogram(m, range)[q] = sum;
    }
  }

  // All senders have come.
  __device__ void meet() {
    __syncthreads();
    if (threadIdx.x == 0) {
      std::uint32_t* word = m.workspace + WorkspaceAt::kArrived;
      const std::uint32_t wanted = (ptx::add_acq_rel_gpu(word, 1) / gridDim.x + 1) * gridDim.x;
      while (!reached(ptx::load_acquire_gpu(word), wanted) && wait.again(rank)) {
      }
    }
    __syncthreads();
  }

  // Where this range's rows and tokens begin among the rank's, and how many there are of all ranges.
  __device__ void sum_ranges(std::uint32_t* base, std::uint32_t* total) const {
    for (std::uint32_t q = t; q < columns(); q += kTeam) {
      std::uint32_t before = 0, all = 0;
#pragma unroll
      for (std::uint32_t b = 0; b < kRanges; b++) {
        const std::uint32_t own = WorkspaceAt::histogram(m, b)[q];
        all += own;
        before += b < range ? own : 0;
      }
      base[q] = before;
      total[q] = all;
    }
  }

  // Each range tells its share of what the others must know of all of them.
  __device__ void tell(const std::uint32_t* total) const {
    for (std::uint32_t q = range + t * kRanges; q < columns(); q += kTeam * kRanges) {
      if (q < m.experts)
        send_count(m.homes[q] >> 16, kCountsAt + (m.homes[q] & 0xffff), total[q]);
      else
        send_start(q - m.experts, kRanges * kChunks, total[q]);
    }
    if (range == 0)
      for (std::uint32_t r = t; r < kWorld; r += kTeam) send_count(r, 0, m.tokens);
  }

  __device__ void send_start(std::uint32_t to, std::uint32_t at, std::uint32_t u) const {
    m.plan[PlanAt::kTo + to * PlanAt::kStarts + at] = std::int32_t(u);
    send_count(to, kStartsAt + at, u);
  }

  // The tokens' places among those of the range.
  __device__ void number_slots(const std::uint32_t* counts) const {
    const std::uint32_t begin = warp_token(warp), end = warp_token(warp + 1);
    for (std::uint32_t i = begin * kWorld + lane; i < end * kWorld; i += 32)
      if (const std::int32_t in_warp = m.numbers()[i]; in_warp >= 0)
        m.numbers()[i] = in_warp + std::int32_t(counts[warp * columns() + m.experts + i % kWorld]);
  }

  // The ids' places among all of this rank's; and where the chunks begin.
  __device__ void number_rows(const std::uint32_t* counts, const std::uint32_t* base) const {
    const std::uint32_t begin = warp_token(warp), end = warp_token(warp + 1), first = m.token_at(range, 0);
    const std::uint32_t each = Moe::chunk_tokens(m.tokens);
    const std::uint32_t* before = counts + warp * columns();
    std::uint32_t* positions = WorkspaceAt::positions(m);
    for (std::uint32_t i = begin * kTopK + lane; i < end * kTopK; i += 32)
      if (const std::uint32_t e = expert(i); e != kNone) positions[i] += base[e] + before[e];
    if (begin == end) return;
    for (std::uint32_t c = ceil_div(begin - first, each); c < kChunks && first + c * each < end; c++)
      for (std::uint32_t r = lane; r < kWorld; r += 32) {
        const std::uint32_t at = range * kChunks + c, q = m.experts + r;
        send_start(r, at, m.plan[PlanAt::kTo + r * PlanAt::kStarts + at] + base[q] + before[q]);
      }
  }

  // Chunks without tokens begin where the range ends.
  __device__ void number_empty_chunks(const std::uint32_t* base) const {
    for (std::uint32_t i = t; i < kChunks * kWorld; i += kTeam) {
      const std::uint32_t chunk = i / kWorld, r = i % kWorld;
      if (m.token_at(range, chunk) < m.token_at(range + 1, 0)) continue;
      const std::uint32_t q = m.experts + r;
      send_start(r, range * kChunks + chunk, base[q] + WorkspaceAt::histogram(m, range)[q]);
    }
  }

  // This range's own counts. After it, slots are known: they are numbered by range.
  __device__ void plan_range() {
    std::uint32_t *counts = shared(), *base = counts + planners() * columns(), *total = base + columns();
    for (std::uint32_t q = t; q < (planners() + 2) * columns(); q += kTeam) counts[q] = 0;
    barrier();
    if (warp < planners()) count(counts + warp * columns());
    if (is_small()) count_all(base, total);
    barrier();
    sum_warps(counts);
    barrier();
    if (warp < planners()) number_slots(counts);
  }
  // All ranges'. After it, rows are known.
  __device__ void plan() {
    std::uint32_t *counts = shared(), *base = counts + planners() * columns(), *total = base + columns();
    if (!is_small()) {
      meet();
      sum_ranges(base, total);
      barrier();
    }
    tell(total);
    if (warp < planners()) number_rows(counts, base);
    number_empty_chunks(base);
    barrier();
    if (t == 0) ptx::store_release_sys(&m.stage_at(rank).progress[rank][range], mark(epoch, 0));  // planned
  }
  __device__ std::uint32_t* shared() const {
    extern __shared__ std::uint32_t words[];
    return words + team * (m.planners + 2) * columns();
  }

  // ---- sending

  // The chunks whose slots chunk `c` takes have been expanded.
  __device__ bool await_room(std::uint32_t c, volatile std::uint32_t* stop) {
    const std::uint32_t each = Moe::chunk_tokens(m.max_tokens), depth = each ? m.ring / each : kChunks;
    if (c < depth) return true;
    if (t < kWorld && t != rank) {
      while (!has_reached(ptx::load_acquire_sys(&m.stage_here().consumed[t]), mark(epoch, c - depth + 1)) &&
             again(wait, m, epoch, t)) {
      }
      if (wait.broken) stop[team] = 1;
    }
    barrier();
    return !stop[team];
  }

  // Which rows a token becomes, to every other rank that gets it.
  __device__ void send_meta(std::uint32_t token) const {
    const std::uint32_t i = token * kTopK + lane;
    const std::uint32_t e = lane < kTopK ? expert(i) : kNone, home = e != kNone ? m.homes[e] : kNone;
    uint4 entry{home & 0xffff, 0, __float_as_uint(1.0f), lane};
    if (e != kNone) {
      entry.y = WorkspaceAt::positions(m)[i];
      if (a.weights) entry.z = __float_as_uint(a.weights[i]);
    }
    const std::uint32_t place = place_of(home, lane);
    for (std::uint32_t left = __ballot_sync(kFull, e != kNone); left;) {
      const std::uint32_t r = __shfl_sync(kFull, home, __ffs(left) - 1) >> 16;
      const std::uint32_t same = __ballot_sync(kFull, e != kNone && home >> 16 == r);
      left &= ~same;
      if (r == rank) continue;
      const std::uint32_t number = m.numbers()[std::uint64_t(token) * kWorld + r];
      Meta& meta = m.meta(r, m.slot_number(r, rank, range, number), epoch);
      if (same >> lane & 1) *reinterpret_cast<uint4*>(meta.entries + place) = entry;
      if (lane == 0) *reinterpret_cast<uint4*>(&meta) = uint4{token, std::uint32_t(__popc(same)), 0, 0};
    }
  }

  // A piece of a token, to every other rank that gets it.
  template <bool kReady>
  __device__ void send_piece(std::uint32_t token, std::uint32_t number) const {
    using P = Piece<kDeep>;
    const P piece(number, lane);
    uint4 v[kDeep];
    Quantised q[kDeep];
    float scales[kDeep];
    std::uint32_t codes[kDeep];
    if constexpr (kReady) {
#pragma unroll
      for (std::uint32_t k = 0; k < kDeep; k++)
        if (piece.has(k)) q[k].load(a.x + std::uint64_t(token) * kHidden, piece.at(k));
    } else {
      piece.load(v, a.x + std::uint64_t(token) * kRowBytes);
    }
    if constexpr (kWire != kNoWire && !kReady) {
#pragma unroll
      for (std::uint32_t k = 0; k < kDeep; k++) {
        const Scale scale = Quantise<kDtype, kWire>::run(q[k].q, v[k]);
        scales[k] = scale.value, codes[k] = scale.code;
      }
    }
    for (std::uint32_t first = 0; first < kWorld; first += 32) {
      const std::uint32_t to = first + lane;
      const std::int32_t mine = to < kWorld && to != rank ? m.numbers()[std::uint64_t(token) * kWorld + to] : -1;
      for (std::uint32_t left = __ballot_sync(kFull, mine >= 0); left; left &= left - 1) {
        const std::uint32_t r = first + __ffs(left) - 1, i = __shfl_sync(kFull, mine, __ffs(left) - 1);
        std::uint8_t* slot = m.slot(r, m.slot_number(r, rank, range, i), epoch);
        if constexpr (kWire == kNoWire) {
          piece.store(slot, v);
        } else {
#pragma unroll
          for (std::uint32_t k = 0; k < kDeep; k++) {
            if (!piece.has(k)) continue;
            q[k].store(slot, piece.at(k));
            if constexpr (!kReady) store_scale<kDtype, kWire>(slot + kScalesAt, piece.at(k), scales[k], codes[k]);
          }
          if (kReady && number == 0)
            for (std::uint32_t b = lane; b < kScales * scale_bytes(kWire); b += 32)
              slot[kScalesAt + b] = a.x_scales[std::uint64_t(token) * kScales * scale_bytes(kWire) + b];
        }
      }
    }
  }

  // `planned`: rows are known. Where they are not, in a request of one chunk, the plan is made while its tokens travel.
  template <bool kPlan, bool kReady>
  __device__ void send(volatile std::uint32_t* stop, bool planned) {
    constexpr std::uint32_t kPieces = Piece<kDeep>::kCount;
    const std::uint32_t items = kPieces + (kPlan && planned);
    for (std::uint32_t c = 0; c < kChunks; c++) {
      if (!await_room(c, stop)) return;
      const std::uint32_t begin = m.token_at(range, c), end = m.token_at(range, c + 1);
      for (std::uint32_t item = warp; item < (end - begin) * items; item += kTeam / 32) {
        const std::uint32_t token = begin + item / items, piece = item % items;
        if (piece < kPieces)
          send_piece<kReady>(token, piece);
        else
          send_meta(token);
      }
      if (kPlan && !planned) {
        plan();
        for (std::uint32_t token = begin + warp; token < end; token += kTeam / 32) send_meta(token);
      }
      barrier();
      for (std::uint32_t r = t; r < kWorld; r += kTeam)
        ptx::store_release_sys(&m.stage_at(r).progress[rank][range], mark(epoch, c + 1));
    }
  }
};

template <bool kPlan, bool kReady>
__device__ void run(const Send& a) {
  __shared__ volatile std::uint32_t stop[kTeams];
  if (threadIdx.x < kTeams) stop[threadIdx.x] = 0;
  ptx::launch_next();
  const std::uint32_t epoch = a.m.epoch();
  const bool failed = threadIdx.x == 0 && record_is_set(a.m);
  if (blockIdx.x == 0)
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != a.m.rank()) a.m.place.send_header(p, epoch, a.m.digest, a.m.tokens, 0);
  if (__syncthreads_or(failed)) return;  // peers may still read what earlier calls have sent
  Sender sender(a, epoch);
  const bool planned = kChunks > 1 || sender.is_small();
  if constexpr (kPlan) {
    sender.plan_range();
    if (planned) sender.plan();
    sender.barrier();
  }
  sender.send<kPlan, kReady>(stop, planned);
}

}  // namespace a2a

extern "C" __global__ void __launch_bounds__(a2a::kTeam* a2a::kTeams)
    moe_push_send(const __grid_constant__ a2a::Send a) {
  a2a::run<true, false>(a);
}

extern "C" __global__ void __launch_bounds__(a2a::kTeam* a2a::kTeams)
    moe_push_send_gradient(const __grid_constant__ a2a::Send a) {
  a2a::run<false, false>(a);
}

#if WIRE
extern "C" __global__ void __launch_bounds__(a2a::kTeam* a2a::kTeams)
    moe_push_send_quantised(const __grid_constant__ a2a::Send a) {
  a2a::run<true, true>(a);
}
#endif
