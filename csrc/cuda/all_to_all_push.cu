// all_to_all_push: every rank stores its pieces into the memory of the ranks they are for.
//   piece of rank r from rank s here = piece of rank s for rank r there; sizes are any, each pair has its own
//
// Each ordered pair of ranks takes one of three ways, which both ends work out from the size and the receiver's memory:
//   flags    up to kFlagBytes: 16-byte packets of 12 bytes and the epoch, into a slab at the receiver, which polls every packet.
//            One crossing of the link, no fence; any bits are data.
//   direct   into the receiver's symmetric output, when its header has come; then one signal a channel.
//   staged   the receiver's output is ordinary memory: through a ring of chunks at the receiver, a ring a channel.
//
// Cost     flags 1 step, direct 2, staged 2 and a local copy; scale-up bytes sent per rank: all but its own piece (flags: 4/3)
// Launch   _small with at most 512 threads a block where no pair of the rank is large, _large with 1024 where one is; blocks
//          for the channels of every pair that the rank has (see channels()), at most kBlocks, and then `copiers` blocks that
//          copy the own piece and wait for nobody.  Grids may differ between ranks.
// Ragged   (RAGGED=1) what goes where is in lists in this GPU's memory, as jax.lax.ragged_all_to_all has them: pairs are made
//          from them by every block, but for where a peer's rows begin here, which only the peer knows and says in its header.
//          So every block waits for all headers before it receives. Outputs count as ordinary memory.
// Buffers  staging symmetric, zero at first, owned by this kernel; in and out any, out not overlapping in
// VISIBLE  flags: the epoch is in the same 16-byte access as the data.  direct: W: all threads of a team store; then
//          their barrier; S: thread 0 stores `done` with st.release.sys, which is cumulative over the barrier.  A: a thread
//          of the receiving team loads it with ld.acquire.sys, then a barrier, and the kernel's end for what follows.
//          staged: the same with `produced`, chunk by chunk.
// REUSE    slabs are two by the epoch's parity, as headers are (signal.cuh).  A symmetric output is stored to after its
//          rank's header of this epoch, so after all that its stream did before.  A chunk of the ring is stored to once
//          `consumed` has come within kSlots of it.
// PROGRESS every block first sends what needs no answer (headers, packets).  It waits for headers, which every rank's block 0
//          sends first of all.  In the staged loop, step i of a sending team waits for step i - kSlots of receiving teams, and
//          step i of a receiving team for step i of sending teams: the earliest unfinished step never waits for a later
//          one.  All blocks that wait fit on the device at once.
// FAILURE  a thread whose deadline passes stores the missing rank in every rank's record and waits for nothing any more; so
//          does everybody who sees a record. Out is undefined then; the host raises. A header with another digest or another
//          size is a failure, too: nothing is stored into an output before it has been checked. Lists that name rows outside
//          in or out are a failure of this rank's own, kSplits with itself as the peer.
#include "copy.cuh"
#include "signal.cuh"

#ifndef RAGGED
#define RAGGED 0
#endif

namespace a2a {

constexpr bool kRagged = RAGGED;
constexpr std::uint32_t kWorld = WORLD;
constexpr std::uint64_t kFlagBytes = FLAG_BYTES;    // the most that a pair sends as packets
constexpr std::uint64_t kChunkBytes = CHUNK_BYTES;  // of a slot of the ring
constexpr std::uint64_t kLeastChunkBytes = kChunkBytes < 16384 ? kChunkBytes : 16384;
constexpr std::uint32_t kTeams = TEAMS;        // a block is kTeams pairs of teams: one sends, one receives large pieces
constexpr std::uint32_t kTeam = 512 / kTeams;  // threads of a team
static_assert(kWorld <= kMostRanks, "headers");
constexpr std::uint32_t kBlocks = 24, kChannels = kBlocks * kTeams, kSlots = 4;
constexpr std::uint64_t kChannelBytes = 32 << 10;     // a pair gets a channel for so many bytes
constexpr std::uint64_t kTileBytes = 16 * 8 * kTeam;  // of a direct piece: what a team has in flight at a time
constexpr std::uint64_t kUnit = 48;                   // bytes of a thread's four packets
constexpr std::uint64_t kOrdinary = ~0ull >> 16;  // "address" of an output that peers can't reach; windows are smaller

struct Pair {
  std::uint64_t in, out;  // offsets from Params::in and out
  std::uint64_t send_bytes, recv_bytes;
};

struct Params {
  std::uint64_t out, in;  // first: the launcher replaces them from call to call
#if RAGGED
  const std::int32_t *in_offset, *send, *out_offset, *recv;  // these too: [kWorld], in rows; out_offset: at the peer
#endif
  Place place;
  std::uint64_t staging;  // offset in the window
  std::uint32_t digest;   // of op and dtype: equal on all ranks
  std::uint32_t copiers;
#if RAGGED
  std::uint64_t row_bytes;
  std::int64_t in_rows, out_rows;
#else
  Pair pairs[kWorld];
#endif
};

// In a header: the bytes that its sender sends; the symmetric address of its output for that peer, or kOrdinary, in 48 bits;
// and the bytes that it expects, in 48 more, so that no end stores or takes what the other hasn't got in mind. Ragged: instead
// of the bytes sent, how many rows they are, and in 32 bits more, where these begin in the peer's output.

// Staging of one rank. [s][c]: written by rank s's channel c unless it says mine.
struct Staging {
  std::uint32_t sent[kWorld][kChannels];      // mine: chunks ever sent to rank [s]
  std::uint32_t received[kWorld][kChannels];  // mine: chunks ever received from rank [s]
  std::uint32_t done[kWorld][kChannels];      // epoch of the last direct piece that is complete
  std::uint32_t produced[kWorld][kChannels];  // chunks ever stored into my ring
  std::uint32_t consumed[kWorld][kChannels];  // chunks ever taken from rank [s]'s ring
  uint4 slabs[kWorld][2][(kFlagBytes + kUnit - 1) / kUnit * 4];
  uint4 rings[kWorld][kChannels][kSlots][kChunkBytes / 16];
};

__device__ constexpr std::uint32_t channels(std::uint64_t bytes) {
  const std::uint64_t wanted = ceil_div(bytes, kChannelBytes);
  return wanted < kChannels ? std::uint32_t(wanted) : kChannels;
}

// Of a piece that goes through a ring: a few chunks a channel, so that both copies overlap in middling pieces, too.
__device__ constexpr std::uint64_t chunk_bytes(std::uint64_t bytes) {
  const std::uint64_t quarter = align_up(ceil_div(bytes, 4 * kChannels), 4096);
  return quarter > kChunkBytes ? kChunkBytes : quarter < kLeastChunkBytes ? kLeastChunkBytes : quarter;
}

// A piece is cut into tiles, which its channels take in turn: all of them work in one neighbourhood of memory.
struct Tile {
  std::uint64_t begin, bytes;
};

__device__ constexpr std::uint32_t tiles(std::uint64_t bytes, std::uint64_t tile_bytes, std::uint32_t channel) {
  const std::uint64_t all = ceil_div(bytes, tile_bytes), n = channels(bytes);
  return channel < n && channel < all ? std::uint32_t((all - channel - 1) / n + 1) : 0;
}

__device__ constexpr Tile tile_of(std::uint64_t bytes, std::uint64_t tile_bytes, std::uint32_t channel,
                                  std::uint32_t i) {
  const std::uint64_t begin = (std::uint64_t(i) * channels(bytes) + channel) * tile_bytes;
  return {begin, bytes - begin < tile_bytes ? bytes - begin : tile_bytes};
}

// 48 bytes, or as many as are left, at any address.
__device__ __forceinline__ void load_unit(uint4 (&v)[3], const std::uint8_t* from, std::uint64_t left) {
  if (left >= kUnit && reinterpret_cast<std::uint64_t>(from) % 16 == 0) {
#pragma unroll
    for (int k = 0; k < 3; k++) v[k] = reinterpret_cast<const uint4*>(from)[k];
    return;
  }
  std::uint32_t words[12];
#pragma unroll
  for (int b = 0; b < 48; b++) {
    const std::uint32_t byte = std::uint64_t(b) < left ? from[b] : 0;
    words[b / 4] = b % 4 ? words[b / 4] | byte << 8 * (b % 4) : byte;
  }
#pragma unroll
  for (int k = 0; k < 3; k++) v[k] = {words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]};
}

__device__ __forceinline__ void store_unit(std::uint8_t* to, const uint4 (&v)[3], std::uint64_t left) {
  if (left >= kUnit && reinterpret_cast<std::uint64_t>(to) % 16 == 0) {
#pragma unroll
    for (int k = 0; k < 3; k++) reinterpret_cast<uint4*>(to)[k] = v[k];
    return;
  }
#pragma unroll
  for (int b = 0; b < 48; b++) {
    const uint4& part = v[b / 16];
    const std::uint32_t word = b % 16 < 4 ? part.x : b % 16 < 8 ? part.y : b % 16 < 12 ? part.z : part.w;
    if (std::uint64_t(b) < left) to[b] = std::uint8_t(word >> 8 * (b % 4));
  }
}

#if RAGGED
__device__ inline bool lies_within(std::int64_t begin, std::int64_t rows, std::int64_t all) {
  return begin >= 0 && rows >= 0 && begin <= all && rows <= all - begin;
}

// What this rank's lists say of p; where p's rows begin here, they don't.
__device__ inline bool make_pair(const Params& a, std::uint32_t p, Pair& pair) {
  const std::int64_t from = a.in_offset[p], send = a.send[p], there = a.out_offset[p], recv = a.recv[p];
  const bool own = p == a.place.rank;
  if (!lies_within(from, send, a.in_rows) || !lies_within(own ? there : 0, recv, a.out_rows) || there < 0) return false;
  if (own && send != recv) return false;
  pair = {from * a.row_bytes, own ? there * a.row_bytes : 0, send * a.row_bytes, recv * a.row_bytes};
  return true;
}
#endif

struct Exchange {
  const Params& a;
  Wait wait;
  const std::uint32_t rank, block, epoch;
  std::uint64_t* const outputs;        // shared by a team: where each peer's output lies, from its header
  volatile std::uint32_t* const stop;  // shared: a team's first thread has given up
  const std::uint32_t team, receives, channel,
      t;  // large pieces: this thread's team, what that does, and its place there
#if RAGGED
  Pair* const pairs;                   // shared by the block
  volatile std::uint32_t* const lost;  // shared, too; [1]: a thread has given up before anything was received
#endif

  __device__ const Pair& pair(std::uint32_t p) const {
#if RAGGED
    return pairs[p];
#else
    return a.pairs[p];
#endif
  }
  __device__ Staging& staging(std::uint32_t r) const { return *a.place.at<Staging>(r, a.staging); }
  __device__ std::uint8_t* in(std::uint32_t p) const { return reinterpret_cast<std::uint8_t*>(a.in + pair(p).in); }
  __device__ std::uint8_t* out(std::uint32_t p) const { return reinterpret_cast<std::uint8_t*>(a.out + pair(p).out); }
  __device__ std::uint64_t address(std::uint32_t p) const {  // of the output for p's piece
    if (kRagged) return kOrdinary;
    return a.place.offset_of(reinterpret_cast<std::uint64_t>(out(p)), kOrdinary);
  }
  __device__ std::uint64_t output(std::uint32_t p) const { return kRagged ? kOrdinary : outputs[p]; }  // at p, for mine
  __device__ static bool by_flags(std::uint64_t bytes) { return bytes <= kFlagBytes; }

  // Wait for p's header and hold it against this rank's call.
  __device__ void await_header(std::uint32_t p, bool measure) {
    const Header header = wait.await_header(p, epoch, a.digest, measure);
    const std::uint64_t to = high_half(header.more), expected = to >> 48 << 32 | header.more.y;
#if RAGGED
    if (wait.broken) return;
    const std::int64_t rows = header.request.z, at = header.request.w;
    if (rows * a.row_bytes != pairs[p].recv_bytes || expected != pairs[p].send_bytes ||
        !lies_within(at, rows, a.out_rows))
      wait.fail(kSplits, p);
    pairs[p].out = at * a.row_bytes;
#else
    outputs[p] = to & kOrdinary;
    if (wait.broken || a.digest == kRefusal) return;
    if (high_half(header.request) != pair(p).recv_bytes || expected != pair(p).send_bytes) wait.fail(kSplits, p);
#endif
  }

#if RAGGED
  // The whole block waits for every header. False: one hasn't come, or doesn't fit.
  __device__ bool await_headers() {
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != rank) await_header(p, block == 0);
    if (wait.broken) lost[1] = 1;
    __syncthreads();
    return !lost[1];
  }
#endif

  __device__ void send_headers() const {
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x) {  // also to itself: for messages
      const std::uint64_t expected = pair(p).recv_bytes;
#if RAGGED
      const std::uint64_t first = std::uint32_t(a.send[p]) | std::uint64_t(std::uint32_t(a.out_offset[p])) << 32;
#else
      const std::uint64_t first = pair(p).send_bytes;
#endif
      a.place.send_header(p, epoch, a.digest, first, address(p) | expected >> 32 << 48, std::uint32_t(expected));
    }
  }

  __device__ void send_packets(std::uint32_t p, std::uint32_t blocks) {
    const std::uint64_t bytes = pair(p).send_bytes;
    const std::uint32_t units = std::uint32_t(ceil_div(bytes, kUnit));
    uint4* slab = staging(p).slabs[rank][epoch % 2];
    for (std::uint32_t u = block * blockDim.x + threadIdx.x; u < units; u += blocks * blockDim.x) {
      uint4 v[3];
      load_unit(v, in(p) + u * kUnit, bytes - u * kUnit);
      ptx::store_relaxed_sys(slab + u, uint4{v[0].x, v[0].y, v[0].z, epoch});
      ptx::store_relaxed_sys(slab + units + u, uint4{v[0].w, v[1].x, v[1].y, epoch});
      ptx::store_relaxed_sys(slab + 2 * units + u, uint4{v[1].z, v[1].w, v[2].x, epoch});
      ptx::store_relaxed_sys(slab + 3 * units + u, uint4{v[2].y, v[2].z, v[2].w, epoch});
    }
  }

  __device__ void receive_packets(std::uint32_t p, std::uint32_t blocks) {
    const std::uint64_t bytes = pair(p).recv_bytes;
    const std::uint32_t units = std::uint32_t(ceil_div(bytes, kUnit));
    const uint4* slab = staging(rank).slabs[p][epoch % 2];
    for (std::uint32_t u = block * blockDim.x + threadIdx.x; u < units; u += blocks * blockDim.x) {
      uint4 w[4];
      do {
#pragma unroll
        for (int k = 0; k < 4; k++) w[k] = ptx::load_relaxed_sys(slab + k * units + u);
      } while ((w[0].w != epoch || w[1].w != epoch || w[2].w != epoch || w[3].w != epoch) && wait.again(p));
      if (wait.broken) return;
      const uint4 v[3] = {
          {w[0].x, w[0].y, w[0].z, w[1].x}, {w[1].y, w[1].z, w[2].x, w[2].y}, {w[2].z, w[3].x, w[3].y, w[3].z}};
      store_unit(out(p) + u * kUnit, v, bytes - u * kUnit);
    }
  }

  // ---- large pieces: even teams send, odd ones receive

  __device__ void barrier() const { ptx::barrier(1 + team, kTeam); }

  // p sends its data only when it has every rank's header.
  __device__ bool again(std::uint32_t p) { return wait.again_behind(p, epoch); }

  // The team's first thread waits for a word; all go on together, and know whether to.
  __device__ bool await(const std::uint32_t* word, std::uint32_t value, std::uint32_t peer) {
    if (t == 0) {
      while (!reached(ptx::load_relaxed_sys(word), value) && again(peer)) {
      }
      ptx::load_acquire_sys(word);  // once: every acquire empties the L1 cache of its SM
      if (wait.broken) stop[team] = 1;
    }
    barrier();
    return !stop[team];
  }

  __device__ void signal(std::uint32_t* word, std::uint32_t value) const {
    barrier();
    if (t == 0) ptx::store_release_sys(word, value);
  }

  __device__ void send_direct(std::uint32_t p) {
    const std::uint64_t bytes = pair(p).send_bytes;
    if (channel >= channels(bytes)) return;
    for (std::uint32_t i = 0; i < tiles(bytes, kTileBytes, channel); i++) {
      const Tile tile = tile_of(bytes, kTileBytes, channel, i);
      copy(a.place.at<std::uint8_t>(p, output(p) + tile.begin), in(p) + tile.begin, tile.bytes, t, kTeam);
    }
    signal(&staging(p).done[rank][channel], epoch);
  }

  // Compared for equality: after more than 2^31 calls without a direct piece, an old epoch would seem to lie ahead.
  __device__ void await_direct(std::uint32_t p) {
    const std::uint32_t* word = &staging(rank).done[p][channel];
    if (channel >= channels(pair(p).recv_bytes)) return;
    while (ptx::load_relaxed_sys(word) != epoch && again(p)) {
    }
    ptx::load_acquire_sys(word);
  }

  __device__ bool send_chunk(std::uint32_t p, std::uint32_t i) {
    const Tile tile = tile_of(pair(p).send_bytes, chunk_bytes(pair(p).send_bytes), channel, i);
    const std::uint32_t n = staging(rank).sent[p][channel] + i;
    if (!await(&staging(rank).consumed[p][channel], n + 1 - kSlots, p)) return false;
    copy(staging(p).rings[rank][channel][n % kSlots], in(p) + tile.begin, tile.bytes, t, kTeam);
    signal(&staging(p).produced[rank][channel], n + 1);
    return true;
  }

  __device__ bool receive_chunk(std::uint32_t p, std::uint32_t i) {
    const Tile tile = tile_of(pair(p).recv_bytes, chunk_bytes(pair(p).recv_bytes), channel, i);
    const std::uint32_t n = staging(rank).received[p][channel] + i;
    if (!await(&staging(rank).produced[p][channel], n + 1, p)) return false;
    copy(out(p) + tile.begin, staging(rank).rings[p][channel][n % kSlots], tile.bytes, t, kTeam);
    signal(&staging(p).consumed[rank][channel], n + 1);
    return true;
  }

  // Chunks of this channel that this team moves to or from p through a ring.
  __device__ std::uint32_t chunks(std::uint32_t p) const {
    const std::uint64_t bytes = receives ? pair(p).recv_bytes : pair(p).send_bytes;
    const bool staged = p != rank && !by_flags(bytes) && (receives ? address(p) : output(p)) == kOrdinary;
    return staged ? tiles(bytes, chunk_bytes(bytes), channel) : 0;
  }

  __device__ void staged() {
    std::uint32_t steps = 0;
    for (std::uint32_t p = 0; p < kWorld; p++) steps = chunks(p) > steps ? chunks(p) : steps;
    if (!steps) return;
    for (std::uint32_t i = 0; i < steps; i++)
      for (std::uint32_t k = 1; k < kWorld; k++) {
        const std::uint32_t p = (rank + (receives ? kWorld - k : k)) % kWorld;
        if (i < chunks(p) && !(receives ? receive_chunk(p, i) : send_chunk(p, i))) return;
      }
    barrier();
    for (std::uint32_t p = t; p < kWorld; p += kTeam)
      (receives ? staging(rank).received : staging(rank).sent)[p][channel] += chunks(p);
  }

  __device__ void large() {
    if (receives) {
      staged();
      for (std::uint32_t p = t; p < kWorld; p += kTeam)
        if (p != rank && !by_flags(pair(p).recv_bytes) && address(p) != kOrdinary) await_direct(p);
      return;
    }
    for (std::uint32_t p = t; !kRagged && p < kWorld; p += kTeam)
      if (p != rank) await_header(p, block == 0 && team == 0);
    if (wait.broken) stop[team] = 1;
    barrier();
    if (stop[team]) return;
    for (std::uint32_t k = 1; k < kWorld; k++) {
      const std::uint32_t p = (rank + k) % kWorld;  // rotated: no rank is everybody's first
      if (!by_flags(pair(p).send_bytes) && output(p) != kOrdinary) send_direct(p);
    }
    staged();
  }

  template <bool kLarge>
  __device__ void run(std::uint32_t blocks) {
    if (block == 0) send_headers();
    for (std::uint32_t k = 1; k < kWorld; k++) {
      const std::uint32_t p = (rank + k) % kWorld;
      if (by_flags(pair(p).send_bytes)) send_packets(p, blocks);
    }
#if RAGGED
    if (!await_headers()) return;
#endif
    if (!a.copiers && in(rank) != out(rank))
      copy(out(rank), in(rank), pair(rank).send_bytes, block * blockDim.x + threadIdx.x, blocks * blockDim.x);
    if constexpr (kLarge)
      large();
    else if (!kRagged && block == 0)  // the last threads, which have no packets where there are few
      for (std::uint32_t p = blockDim.x - 1 - threadIdx.x; p < kWorld; p += blockDim.x)
        if (p != rank) await_header(p, true);
    for (std::uint32_t k = 1; k < kWorld; k++) {
      const std::uint32_t p = (rank + kWorld - k) % kWorld;
      if (by_flags(pair(p).recv_bytes)) receive_packets(p, blocks);
    }
  }
};

}  // namespace a2a

extern "C" __device__ const unsigned long long all_to_all_push_staging = sizeof(a2a::Staging);

namespace a2a {

template <bool kLarge>
__device__ void all_to_all_push(const Params& a) {
  __shared__ std::uint64_t outputs[kTeams][kWorld];
  __shared__ volatile std::uint32_t stop[2 * kTeams];
  const std::uint32_t rank = a.place.rank, blocks = gridDim.x - a.copiers;
#if RAGGED
  __shared__ Pair pairs[kWorld];
  // [0]: the lists name rows that there aren't. [1]: a header hasn't come, or doesn't fit.
  __shared__ volatile std::uint32_t lost[2];
  if (threadIdx.x < 2) lost[threadIdx.x] = 0;
  __syncthreads();
  for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
    if (!make_pair(a, p, pairs[p])) lost[0] = 1;
  __syncthreads();
  const bool outside = lost[0];
#else
  const Pair* const pairs = a.pairs;
  constexpr bool outside = false;
#endif
  if (blockIdx.x >= blocks) {
    const Pair& own = pairs[rank];
    if (!outside && a.in + own.in != a.out + own.out)
      copy(reinterpret_cast<void*>(a.out + own.out), reinterpret_cast<const void*>(a.in + own.in), own.send_bytes,
           (blockIdx.x - blocks) * blockDim.x + threadIdx.x, a.copiers * blockDim.x);
    return;
  }
  std::uint32_t* epochs = a.place.control(rank)->epoch;
  const std::uint32_t epoch = next_epoch(epochs[blockIdx.x]);
  if (kLarge) {
    if (threadIdx.x < 2 * kTeams) stop[threadIdx.x] = 0;
    __syncthreads();
  }
  const std::uint32_t team = threadIdx.x / kTeam;
  Exchange exchange{a,
                    Wait(a.place, kWorld),
                    rank,
                    blockIdx.x,
                    epoch,
                    outputs[team / 2],
                    stop,
                    team,
                    team % 2,
                    blockIdx.x * kTeams + team / 2,
                    threadIdx.x % kTeam
#if RAGGED
                    ,
                    pairs,
                    lost
#endif
  };
  if (!outside)
    exchange.run<kLarge>(blocks);
  else if (blockIdx.x == 0 && threadIdx.x == 0)
    exchange.wait.fail(kSplits, rank);
  __syncthreads();
  if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;
  if (blockIdx.x == 0)
    for (std::uint32_t c = blocks + threadIdx.x; c < kEpochs; c += blockDim.x) epochs[c] = epoch;
}

}  // namespace a2a

// For ranks of which no pair is large, and for all others: one protocol, two ends of it may run different ones.
extern "C" __global__ void __launch_bounds__(512) all_to_all_push_small(const __grid_constant__ a2a::Params a) {
  a2a::all_to_all_push<false>(a);
}

extern "C" __global__ void __launch_bounds__(1024) all_to_all_push_large(const __grid_constant__ a2a::Params a) {
  a2a::all_to_all_push<true>(a);
}
