// reduce_shares: all-reduces, reduce-scatters and all-gathers of any size, bound by the link.
//   all-reduce      rank p reduces share p of all inputs, in rank order, and hands the result to all
//   reduce-scatter  the first half of it        all-gather  the second half: share p is rank p's input
// Sums are reduce.cuh's: the same bits whoever takes them, and in however many blocks.
//
// Ways     in    symmetric: rank p loads its share of it over the link; else its owner pushes the share through a ring at rank p
//          out   symmetric: rank p stores its share into it; else it goes through a ring, and its owner takes it from there
//          Each rank's own tensors decide, and its header tells everybody: ranks may mix them. Only tensors and shares
//          that begin at multiples of 16 bytes count as symmetric.
//          Loads and stores of all ranks at once fill both directions of the link.
//
// A block is two channels; a channel's threads are up to three teams, with a job each:
//   send     pushes the other ranks' shares of an ordinary input into their rings, chunk by chunk
//   reduce   reduces this rank's share and hands it out: chunk by chunk where a ring is in the way, else all channels at once
//   collect  takes the other ranks' shares out of the result rings into an ordinary output, chunk by chunk
// Chunk i of a channel is the (i * channels + channel)-th of a share, in every ring: all three agree without asking.
//
// Cost     3 signals one after the other (entered or produced, progress, and for rings taken), the latter two hidden but for
//          the last chunk; scale-up bytes: a share each way for every peer and half
// Launch   1024 threads; the same grid on all ranks, at most kBlocks
// Buffers  staging symmetric, zero at first; in and out any, out may be in, or the smaller of them the own share of the other
// VISIBLE  load: W: rank r's earlier kernel writes in.  S: st.release.sys of `entered`, which W precedes.  A: thread r of each
//          block loads it with ld.acquire.sys, then __syncthreads, then the load.  ring: all threads of a team store, their
//          barrier, then st.release.sys of `produced` or `progress`; ld.acquire.sys by one thread of the other team, its barrier,
//          then the load.  store: the same with `progress`, and the kernel's end for what follows.
// REUSE    out is stored to after its rank's header, so after all that its stream did before; in is written by its rank's later
//          kernels, after `progress` of all who load it.  Slot i of a ring is stored to once chunk i - kSlots has been read
//          (`progress`, `taken`), and first in a call after the header of its reader, whose last call is over.  In place: a result
//          reaches share p, by its way, only after rank p has read that chunk of every input, by `produced` or itself.
// PROGRESS step i of a send team waits for step i - kSlots of reduce teams, step i of those for step i of send teams and step
//          i - kSlots of collect teams, and step i of these for step i of reduce teams: the earliest unfinished step waits for
//          nothing. Headers are sent before anything is waited for. All blocks fit on the device at once.
// FAILURE  a thread whose deadline passes stores the missing rank in every rank's record; its team, and whoever sees a record,
//          does nothing any more. Out is undefined then, and so is in where that is out; the host raises. Nothing is stored
//          into a tensor before all headers have been checked.
#include "copy.cuh"
#include "reduce.cuh"

namespace a2a {

constexpr std::uint32_t kChannelThreads = 512, kBlockThreads = 2 * kChannelThreads;
constexpr std::uint64_t kLeastChunkBytes = kChunkBytes < 16384 ? kChunkBytes : 16384;
constexpr std::uint32_t kTerms = kReduces ? kWorld : 1, kResults = kGathers ? kWorld : 1;
constexpr std::uint32_t kAtOnce = kTerms < 8 ? kTerms : 8;    // terms that a thread loads at a time,
constexpr std::uint32_t kDeep = kTerms < 8 ? 8 / kTerms : 1;  // of so many vectors: what fills the link with few SMs
constexpr std::uint32_t kAll = ~0u;                           // "chunks": everything

enum Job : std::uint32_t { kReduce = 0, kSend = 1, kCollect = 2 };

// The threads of a channel by what they do.
struct Team {
  Job job;
  std::uint32_t thread, threads;

  __device__ Team(std::uint32_t t, bool sends, bool collects) {
    const std::uint32_t helpers = std::uint32_t(sends) + std::uint32_t(collects);
    const std::uint32_t part = helpers ? kChannelThreads / (helpers + 1) / 32 * 32 : 0;  // the reducers have the rest
    if (t < helpers * part) {
      job = sends && t < part ? kSend : kCollect;
      thread = t % part;
      threads = part;
    } else {
      job = kReduce;
      thread = t - helpers * part;
      threads = kChannelThreads - helpers * part;
    }
  }
};

__device__ constexpr std::uint64_t counted(std::uint32_t epoch, std::uint32_t chunks) {
  return std::uint64_t(epoch) << 32 | chunks;
}
__device__ constexpr bool covers(std::uint64_t word, std::uint32_t epoch, std::uint32_t chunks) {
  return std::uint32_t(word >> 32) == epoch && std::uint32_t(word) >= chunks;
}

struct Chunk {
  std::uint64_t begin, bytes;
};

// Where this rank's share of everybody's tensors lies, for one chunk or all of it; shared by a team.
struct Lines {
  const std::uint8_t* from[kTerms];
  std::uint8_t* to[kResults];  // 0: it is there already
};

struct Exchange {
  const Params& a;
  Wait wait;
  const std::uint32_t rank, epoch, channels, channel;
  const Team team;
  const std::uint64_t* const ins;
  const std::uint64_t* const outs;  // shared by the block: peers' tensors, 0 where they are ordinary
  Lines& lines;                     // shared by the reducers of a channel
  volatile std::uint32_t& stop;     // shared by a team: a thread of it has given up
  const std::uint32_t barrier_number;

  __device__ Staging& staging(std::uint32_t r) const { return *a.place.at<Staging>(r, a.staging); }
  __device__ std::uint8_t* in() const { return reinterpret_cast<std::uint8_t*>(a.in); }
  __device__ std::uint8_t* out() const { return reinterpret_cast<std::uint8_t*>(a.out); }
  // Of share p in the tensors of a rank.
  __device__ std::uint64_t in_at(std::uint32_t p) const { return kReduces ? a.shares.at(p) : 0; }
  __device__ std::uint64_t out_at(std::uint32_t p) const { return kGathers ? a.shares.at(p) : 0; }

  // ---- chunks

  // A few of them a channel, so that its teams overlap in middling tensors, too.
  __device__ std::uint64_t chunk_bytes() const {
    const std::uint64_t quarter = align_up(ceil_div(a.shares.each, 4 * channels), 4096);
    return quarter > kChunkBytes ? kChunkBytes : quarter < kLeastChunkBytes ? kLeastChunkBytes : quarter;
  }
  __device__ std::uint32_t chunks(std::uint32_t p) const {
    const std::uint64_t all = ceil_div(a.shares.bytes(p), chunk_bytes());
    return channel < all ? std::uint32_t((all - channel - 1) / channels + 1) : 0;
  }
  __device__ Chunk chunk(std::uint32_t p, std::uint32_t i) const {
    const std::uint64_t begin = (std::uint64_t(i) * channels + channel) * chunk_bytes();
    const std::uint64_t left = a.shares.bytes(p) - begin;
    return {begin, left < chunk_bytes() ? left : chunk_bytes()};
  }
  __device__ std::uint32_t most_chunks() const {
    std::uint32_t most = 0;
    for (std::uint32_t p = 0; p < kWorld; p++)
      if (p != rank && chunks(p) > most) most = chunks(p);
    return most;
  }

  // ---- waiting and telling

  __device__ void barrier() const { ptx::barrier(barrier_number, team.threads); }

  // By one thread, before its team's barrier.
  __device__ void await(const std::uint64_t* word, std::uint32_t count, std::uint32_t p) {
    while (!covers(ptx::load_relaxed_sys(word), epoch, count) && wait.again_behind(p, epoch)) {
    }
    ptx::load_acquire_sys(word);  // once: every acquire empties the L1 cache of its SM
    if (wait.broken) stop = 1;
  }

  // By one thread, after its team's barrier.
  __device__ void tell(std::uint64_t* word, std::uint32_t count) const {
    ptx::store_release_sys(word, counted(epoch, count));
  }

  // ---- send

  __device__ static void move(std::uint8_t* to, const std::uint8_t* from, std::uint64_t bytes, const Team& team) {
    if (aligned(to) && aligned(from)) {
      copy(to, from, bytes, team.thread, team.threads);
      return;
    }
    for (std::uint64_t at = 16 * team.thread; at < bytes; at += 16 * team.threads)
      store_vector(to + at, load_vector(from + at, bytes - at), bytes - at);
  }

  __device__ void send() {
    const std::uint32_t steps = most_chunks();
    for (std::uint32_t i = 0; i < steps; i++)
      for (std::uint32_t k = 1; k < kWorld; k++) {
        const std::uint32_t p = (rank + k) % kWorld;  // rotated: no rank is everybody's first
        if (i >= chunks(p)) continue;
        if (i >= kSlots) {
          if (team.thread == 0) await(&staging(rank).progress[p][channel], i + 1 - kSlots, p);
          barrier();
          if (stop) return;
        }
        const Chunk c = chunk(p, i);
        void* slot = staging(p).input_rings[rank][channel][i % kSlots];
        move(static_cast<std::uint8_t*>(slot), in() + in_at(p) + c.begin, c.bytes, team);
        barrier();
        if (team.thread == 0) tell(&staging(p).produced[rank][channel], i + 1);
      }
  }

  // ---- collect

  __device__ void collect() {
    const std::uint32_t steps = most_chunks();
    for (std::uint32_t i = 0; i < steps; i++)
      for (std::uint32_t k = 1; k < kWorld; k++) {
        const std::uint32_t p = (rank + kWorld - k) % kWorld;
        if (i >= chunks(p)) continue;
        if (team.thread == 0) await(&staging(rank).progress[p][channel], i + 1, p);
        barrier();
        if (stop) return;
        const Chunk c = chunk(p, i);
        const void* slot = staging(rank).result_rings[p][channel][i % kSlots];
        move(out() + out_at(p) + c.begin, static_cast<const std::uint8_t*>(slot), c.bytes, team);
        barrier();
        if (team.thread == 0) tell(&staging(p).taken[rank][channel], i + 1);
      }
  }

  // ---- reduce

  __device__ bool sends(std::uint32_t p) const { return kReduces && !ins[p]; }      // this rank's share, through a ring
  __device__ bool collects(std::uint32_t p) const { return kGathers && !outs[p]; }  // the result, out of a ring

  // Whether others load from or store into p's tensors, which p waits for.
  __device__ bool reaches(std::uint32_t p) const { return (kReduces && ins[p]) || (kGathers && outs[p]); }

  // Thread p: where rank p's part of a chunk lies. Before the team's barrier.
  __device__ void aim(std::uint32_t p, std::uint64_t begin, std::uint32_t slot) {
    const std::uint64_t from = in_at(rank) + begin, to = out_at(rank) + begin;
    if (p == rank) {
      std::uint8_t* own = out() + to;
      lines.from[kReduces ? p : 0] = in() + from;
      lines.to[kGathers ? p : 0] = kReduces || own != in() + from ? own : nullptr;
      return;
    }
    if constexpr (kReduces)
      lines.from[p] = ins[p] ? reinterpret_cast<const std::uint8_t*>(ins[p] + from)
                             : reinterpret_cast<const std::uint8_t*>(staging(rank).input_rings[p][channel][slot]);
    if constexpr (kGathers)
      lines.to[p] = outs[p] ? reinterpret_cast<std::uint8_t*>(outs[p] + to)
                            : reinterpret_cast<std::uint8_t*>(staging(p).result_rings[rank][channel][slot]);
  }

  // So many bytes at the lines, by some threads that each take every so-manyeth vector.
  __device__ void reduce_lines(std::uint64_t bytes, std::uint64_t thread, std::uint64_t threads) const {
    std::uint64_t addresses = 0;
    for (const std::uint8_t* from : lines.from) addresses |= reinterpret_cast<std::uint64_t>(from);
    for (std::uint8_t* to : lines.to) addresses |= reinterpret_cast<std::uint64_t>(to);
    const std::uint64_t whole = addresses % 16 ? 0 : bytes / 16 * 16;
    for (std::uint64_t at = 16 * thread; at < whole; at += 16 * kDeep * threads)
      reduce_vectors<kDeep>(
          at, 16 * threads, whole, [](const std::uint8_t* p) { return *reinterpret_cast<const uint4*>(p); },
          [](std::uint8_t* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; });
    for (std::uint64_t at = whole + 16 * thread; at < bytes; at += 16 * threads)
      reduce_vectors<1>(
          at, 0, bytes, [=](const std::uint8_t* p) { return load_vector(p, bytes - at); },
          [=](std::uint8_t* p, uint4 v) { store_vector(p, v, bytes - at); });
  }

  // Of each line the vectors at `at`, `at + stride`, ... before `end`.
  template <std::uint32_t kVectors, class Load, class Store>
  __device__ __forceinline__ void reduce_vectors(std::uint64_t at, std::uint64_t stride, std::uint64_t end,
                                                 const Load& load, const Store& store) const {
    Sum sums[kVectors];
#pragma unroll 1
    for (std::uint32_t first = 0; first < kTerms; first += kAtOnce) {
      uint4 v[kVectors][kAtOnce];
#pragma unroll
      for (std::uint32_t d = 0; d < kVectors; d++)
#pragma unroll
        for (std::uint32_t j = 0; j < kAtOnce; j++)
          if (at + d * stride < end && first + j < kTerms) v[d][j] = load(lines.from[first + j] + at + d * stride);
#pragma unroll
      for (std::uint32_t d = 0; d < kVectors; d++)
#pragma unroll
        for (std::uint32_t j = 0; j < kAtOnce; j++)
          if (first + j < kTerms) first + j == 0 ? sums[d].first(v[d][j]) : sums[d].next(v[d][j]);
    }
#pragma unroll
    for (std::uint32_t d = 0; d < kVectors; d++) {
      if (at + d * stride >= end) break;
      const uint4 result = sums[d].result();
#pragma unroll(kResults < 8 ? kResults : 8)
      for (std::uint32_t k = 0; k < kResults; k++) {
        std::uint8_t* to = lines.to[kGathers ? (rank + k) % kWorld : 0];  // rotated: no rank is everybody's first
        if (to) store(to + at + d * stride, result);
      }
    }
  }

  __device__ void reduce() {
    bool rings = false;
    for (std::uint32_t p = 0; p < kWorld; p++) rings |= p != rank && (sends(p) || collects(p));
    if (rings) {
      if (!reduce_chunks()) return;
    } else {
      for (std::uint32_t p = team.thread; p < kWorld; p += team.threads) aim(p, 0, 0);
      barrier();
      const std::uint64_t thread = channel * team.threads + team.thread;
      reduce_lines(a.shares.bytes(rank), thread, std::uint64_t(channels) * team.threads);
    }
    barrier();
    for (std::uint32_t p = team.thread; p < kWorld; p += team.threads)
      if (p != rank && reaches(p)) tell(&staging(p).progress[rank][channel], kAll);
    if (!reaches(rank)) return;
    for (std::uint32_t p = team.thread; p < kWorld; p += team.threads)
      if (p != rank) await(&staging(rank).progress[p][channel], kAll, p);
  }

  __device__ bool reduce_chunks() {
    const std::uint32_t steps = chunks(rank);
    for (std::uint32_t i = 0; i < steps; i++) {
      const Chunk c = chunk(rank, i);
      for (std::uint32_t p = team.thread; p < kWorld; p += team.threads) {
        aim(p, c.begin, i % kSlots);
        if (p == rank) continue;
        if (sends(p)) await(&staging(rank).produced[p][channel], i + 1, p);
        if (collects(p) && i >= kSlots) await(&staging(rank).taken[p][channel], i + 1 - kSlots, p);
      }
      barrier();
      if (stop) return false;
      reduce_lines(c.bytes, team.thread, team.threads);
      barrier();
      for (std::uint32_t p = team.thread; p < kWorld; p += team.threads)
        if (p != rank && (sends(p) || collects(p))) tell(&staging(p).progress[rank][channel], i + 1);
    }
    return true;
  }

  __device__ void run() {
    if (team.job == kSend)
      send();
    else if (team.job == kCollect)
      collect();
    else
      reduce();
  }
};

// The symmetric address of a tensor that all ranks may reach, in 16-byte accesses; else kOrdinary.
__device__ inline std::uint64_t symmetric(const Params& a, std::uint64_t tensor) {
  return tensor % 16 == 0 && a.shares.each % 16 == 0 ? a.place.offset_of(tensor, kOrdinary) : kOrdinary;
}

// By all threads: everybody's header. False: something is wrong.
__device__ inline bool enter(const Params& a, std::uint32_t epoch, std::uint64_t (&ins)[kWorld],
                             std::uint64_t (&outs)[kWorld]) {
  const std::uint32_t rank = a.place.rank;
  const std::uint64_t in = kReduces ? symmetric(a, a.in) : kOrdinary, out = kGathers ? symmetric(a, a.out) : kOrdinary;
  if (blockIdx.x == 0)
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x) {
      send_header(a, p, epoch, in, out);  // also to itself: for messages
      if (in != kOrdinary) ptx::store_release_sys(&a.place.at<Staging>(p, a.staging)->entered[rank], epoch);
    }
  Wait wait(a.place, kWorld);
  for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x) {
    std::uint64_t theirs_in = in, theirs_out = out;
    if (p != rank) {
      const Header header = wait.await_header(p, epoch, a.digest, blockIdx.x == 0);
      theirs_in = high_half(header.request) & kOrdinary;
      theirs_out = high_half(header.more) & kOrdinary;
      const std::uint32_t* entered = &a.place.at<Staging>(rank, a.staging)->entered[p];
      if (theirs_in != kOrdinary && a.digest != kRefusal) {
        while (!wait.broken && ptx::load_relaxed_sys(entered) != epoch && wait.again(p)) {
        }
        ptx::load_acquire_sys(entered);
      }
    }
    const std::uint64_t memory = a.place.memory(p);
    ins[p] = theirs_in == kOrdinary ? 0 : memory + theirs_in;
    outs[p] = theirs_out == kOrdinary ? 0 : memory + theirs_out;
  }
  return !__syncthreads_or(wait.broken) && a.digest != kRefusal;
}

}  // namespace a2a

extern "C" __global__ void __launch_bounds__(1024) reduce_shares(const __grid_constant__ a2a::Params a) {
  using namespace a2a;
  __shared__ std::uint64_t ins[kWorld], outs[kWorld];
  __shared__ Lines lines[2];
  __shared__ volatile std::uint32_t stop[2 * 3];
  const std::uint32_t rank = a.place.rank, half = threadIdx.x / kChannelThreads;
  const std::uint32_t epoch = next_epoch(a.place.control(rank)->epoch[blockIdx.x]);
  if (threadIdx.x < 2 * 3) stop[threadIdx.x] = 0;
  if (enter(a, epoch, ins, outs)) {
    const bool sends = kReduces && kWorld > 1 && !ins[rank], collects = kGathers && kWorld > 1 && !outs[rank];
    const Team team(threadIdx.x % kChannelThreads, sends, collects);
    Exchange exchange{a,
                      Wait(a.place, kWorld),
                      rank,
                      epoch,
                      gridDim.x * 2,
                      blockIdx.x * 2 + half,
                      team,
                      ins,
                      outs,
                      lines[half],
                      stop[half * 3 + team.job],
                      1 + half * 3 + team.job};
    exchange.run();
  }
  leave(a.place, epoch);
}
