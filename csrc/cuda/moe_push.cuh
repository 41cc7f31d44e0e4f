// What the kernels of ExpertParallel on NVLink share: geometry, where everything lies, and how a call is cut.
//
// A call is a few kernels on three streams (a2a/algorithms/moe_push.py orders them):
//   spread (dispatch; combine's backward): every rank stores each of its tokens once into a slot at every rank that holds one
//            of its experts (moe_push_send.cu); there, chunk by chunk behind the signals, slots are expanded into rows
//            (moe_push_expand.cu).  A rank's own tokens are expanded from where they are.
//   gather (combine; dispatch's backward): the rank that holds a token's experts sums the token's rows and stores the sum into
//            a slot at the token's owner, which adds the ranks' sums in rank order (moe_push_sum.cu).
// Only the senders (one block an SM, few of them) and one block that looks at signals (a gate) ever wait for a peer.
//
// Cuts     A rank's T tokens are cut into kRanges ranges, one for each team of the senders, and each range into kChunks chunks;
//          chunk c of a rank is chunk c of all its ranges.  The tokens of rank s that rank r needs are numbered in token
//          order (u), so that those of (range b, chunk c) are u in [start[b][c], start[b][c + 1]).
// Slots    at the receiver, for each peer and range a ring of `ring` slots; number i of a range lies in slot i % ring.  The two
//          halves of the data are used in turn, by the epoch's parity.
// Plan     the tensor of a routing that combine and the backwards need: see PlanAt.
#pragma once
#include "signal.cuh"
#include "vector.cuh"

namespace a2a {

constexpr std::uint32_t kWorld = WORLD, kTopK = TOP_K, kHidden = HIDDEN, kDtype = DTYPE, kWire = WIRE;
constexpr std::uint32_t kRanges = RANGES, kChunks = CHUNKS;
constexpr bool kWireRows = ROWS_WIRE, kCompact = COMPACT, kDrop = DROP;
constexpr bool kReadyFlags = READY > 0;                      // there are ready flags: see moe_push_ready.cuh
constexpr std::uint32_t kReadyRows = READY ? READY : 1;      // rows of a flag
constexpr bool kWideSums = WIDE_SUMS && kDtype != kFloat32;  // partial sums travel in float32

constexpr std::uint32_t kTeam = TEAM,
                        kTeams = 2;         // threads of a team; teams of a sender, which hide each other's waits
constexpr std::uint32_t kMostBlocks = 256;  // of a kernel that signals for each of its blocks
static_assert(kRanges <= 32, "a warp holds one range a lane");
static_assert(kTopK <= 32, "a warp holds one expert a lane");

using Vec = Vector<kDtype>;
constexpr std::uint32_t kColumns = Vec::kColumns;  // of a vector
constexpr std::uint32_t kRowBytes = kHidden * element_bytes(kDtype), kVectors = kRowBytes / 16;
static_assert(kRowBytes % 16 == 0, "rows are whole vectors");
constexpr std::uint32_t kScales = ceil_div(kHidden, wire_block(kWire));
constexpr std::uint32_t kScalesAt = align_up(kHidden, 16);  // in a slot, behind the e4m3 values
constexpr std::uint32_t kWireBytes = kWire ? kScalesAt + align_up(kScales * scale_bytes(kWire), 16) : kRowBytes;
constexpr std::uint32_t kSumBytes = kWideSums ? kHidden * 4 : kRowBytes;
constexpr std::uint32_t kSlotBytes = align_up(kWireBytes > kSumBytes ? kWireBytes : kSumBytes, 128);

// Of a slot: which rows its token becomes (dispatch), in expert order, then k. Gathers keep a float a row there.
struct Entry {
  std::uint32_t expert, position;  // the receiver's number of the expert; place among the source's rows there
  float weight;
  std::uint32_t k;
};

struct Meta {
  std::uint32_t token, rows, unused[2];
  Entry entries[kTopK];
};

// Symmetric, of a communicator, for all instances. [r]: written by rank r. {epoch, chunks}: high and low half.
struct Stage {
  std::uint64_t progress[kWorld][kMostBlocks];  // chunks that its block, or team, has stored here; 0: the plan is made
  std::uint64_t consumed[kWorld];               // chunks of mine that it has taken
};

__device__ constexpr std::uint64_t mark(std::uint32_t epoch, std::uint32_t value) {
  return std::uint64_t(epoch) << 32 | value;
}
// A peer may be one call ahead of a rank that still looks: it needs what the rank has sent, not that it was seen. It can't be
// two ahead. Any other epoch is old.
__device__ constexpr bool has_reached(std::uint64_t seen, std::uint64_t wanted) {
  const std::uint32_t at = std::uint32_t(seen >> 32), call = std::uint32_t(wanted >> 32);
  return at == next_epoch(call) || (at == call && std::uint32_t(seen) >= std::uint32_t(wanted));
}

// int32 offsets into a plan, the tensor that a dispatch leaves for its combine and the backwards.
struct PlanAt {
  static constexpr std::uint32_t kStarts = kRanges * kChunks + 1;
  static constexpr std::uint32_t kEpoch = 0, kRows = 1;           // with ready flags: its epoch, rows that are here
  static constexpr std::uint32_t kTo = kReadyFlags ? 2 : 0;       // [rank][kStarts]: of my tokens there
  static constexpr std::uint32_t kFrom = kTo + kWorld * kStarts;  // [rank][kStarts]: of its tokens here
  static constexpr std::uint32_t kDistinct = kFrom + kWorld * kStarts;  // [rank + 1]: tokens here of the ranks before
  static constexpr std::uint32_t kPadding = kDistinct + kWorld + 1;     // [local expert][2]: its rows of padding
};

// Words of the counts that a rank sends with a dispatch: tokens, starts, rows of each expert of the receiver.
constexpr std::uint32_t kStartsAt = 1, kCountsAt = kStartsAt + PlanAt::kStarts;

struct Moe {
  Place place;
  std::uint64_t stage;       // offset of Stage
  std::uint64_t data, half;  // offset of the slots' first half; bytes of a half
  std::uint64_t counts;      // offset of this instance's counts: marks, see moe_push_send.cu
  std::uint32_t* workspace;  // this instance's, private; see WorkspaceAt
  std::int32_t* plan;
  const std::uint32_t* homes;  // [expert]: rank << 16 | the expert's number there
  std::uint32_t* ready;        // this instance's ready flags
  std::uint32_t digest, tokens, max_tokens, experts, local_experts, most_local, alignment, ring;
  std::uint32_t planners;  // warps of a team that count ids
  std::uint32_t words;     // ready flags of a kind

  __device__ std::uint32_t rank() const { return place.rank; }
  __device__ const Stage& stage_here() const { return *place.at<Stage>(rank(), stage); }
  __device__ Stage& stage_at(std::uint32_t r) const { return *place.at<Stage>(r, stage); }
  __device__ std::uint32_t epoch() const { return next_epoch(place.control(rank())->epoch[0]); }  // of the running call

  // Tokens of a range, or of one chunk of it.
  __device__ static constexpr std::uint32_t range_tokens(std::uint32_t tokens) { return ceil_div(tokens, kRanges); }
  __device__ static constexpr std::uint32_t chunk_tokens(std::uint32_t tokens) {
    return ceil_div(range_tokens(tokens), kChunks);
  }
  __device__ std::uint32_t token_at(std::uint32_t range, std::uint32_t chunk) const {  // where that chunk begins
    const std::uint32_t each = range_tokens(tokens), into = chunk * chunk_tokens(tokens);
    const std::uint32_t at = range * each + (into < each ? into : each);
    return at < tokens ? at : tokens;
  }

  __device__ const std::int32_t* starts_to(std::uint32_t r) const { return plan + PlanAt::kTo + r * PlanAt::kStarts; }
  __device__ const std::int32_t* starts_from(std::uint32_t s) const {
    return plan + PlanAt::kFrom + s * PlanAt::kStarts;
  }
  // [token][rank]: the token's number i there among those of its range, or -1
  __device__ std::int32_t* numbers() const { return plan + PlanAt::kPadding + 2 * local_experts; }
  // [source][u, or the token where this rank is the source][k]: its rows in expert order, then -1; also -1 for a row that was
  // dropped
  __device__ std::int32_t* lists() const { return numbers() + std::uint64_t(max_tokens) * kWorld; }
  __device__ std::int32_t* list(std::uint32_t source, std::uint32_t u) const {
    return lists() + (std::uint64_t(source) * max_tokens + u) * kTopK;
  }

  __device__ std::uint64_t* counts_at(std::uint32_t at, std::uint32_t source, std::uint32_t epoch) const {
    return place.at<std::uint64_t>(at, counts) + std::uint64_t(epoch % 2 * kWorld + source) * (kCountsAt + most_local);
  }

  __device__ std::uint32_t range_of(std::uint32_t token) const { return token / range_tokens(tokens); }
  // u of a token whose number in its range is i, at rank r
  __device__ std::uint32_t u_of(std::uint32_t token, std::uint32_t r, std::uint32_t i) const {
    return i + std::uint32_t(starts_to(r)[range_of(token) * kChunks]);
  }

  // Where rank `source` writes at rank `at`.
  __device__ std::uint64_t slot_number(std::uint32_t at, std::uint32_t source, std::uint32_t range,
                                       std::uint32_t i) const {
    const std::uint32_t region = (source + kWorld - 1 - at) % kWorld;  // kWorld - 1 would be its own
    return (std::uint64_t(region) * kRanges + range) * ring + (i < ring ? i : i % ring);
  }
  __device__ std::uint8_t* slot(std::uint32_t at, std::uint64_t number, std::uint32_t epoch) const {
    return place.at<std::uint8_t>(at, data + epoch % 2 * half + number * kSlotBytes);
  }
  __device__ Meta& meta(std::uint32_t at, std::uint64_t number, std::uint32_t epoch) const {
    const std::uint64_t slots = std::uint64_t(kWorld - 1) * kRanges * ring;
    return *place.at<Meta>(at, data + epoch % 2 * half + slots * kSlotBytes + number * sizeof(Meta));
  }
};

// In uint32 of the workspace, which is zero at first.
struct WorkspaceAt {
  static constexpr std::uint32_t kArrived = 0;  // blocks that came to the senders' barrier, ever
  static constexpr std::uint32_t kDone = 1;     // blocks of the running kernel that are done
  static constexpr std::uint32_t kHead = 64;

  // [range][expert, rank]: rows and tokens of that range
  __device__ static std::uint32_t* histogram(const Moe& m, std::uint32_t range) {
    return m.workspace + kHead + range * (m.experts + kWorld);
  }
  // [local expert][source]: the first row of that source
  __device__ static std::uint32_t* first_rows(const Moe& m) { return histogram(m, kRanges); }
  // [token][k]: place among this rank's rows of that expert
  __device__ static std::uint32_t* positions(const Moe& m) {
    return first_rows(m) + align_up(m.most_local * kWorld, 4);
  }
};

// Sums of a warp's values up to each lane's.
__device__ inline std::uint32_t scan_warp(std::uint32_t value, std::uint32_t lane) {
#pragma unroll
  for (std::uint32_t d = 1; d < 32; d *= 2) {
    const std::uint32_t before = __shfl_up_sync(kFull, value, d);
    if (lane >= d) value += before;
  }
  return value;
}

// The tokens of one chunk of a pair of ranks, as a warp sees them: one range a lane.
struct Chunk {
  std::uint32_t first, upto, count, origin, total;

  Chunk() = default;
  __device__ Chunk(const std::int32_t* starts, std::uint32_t chunk, std::uint32_t lane) {
    const std::int32_t* at = starts + lane * kChunks;
    const bool mine = lane < kRanges;
    first = mine ? at[chunk] : 0;
    origin = mine ? at[0] : 0;
    count = mine ? at[chunk + 1] - first : 0;
    upto = scan_warp(count, lane);
    total = __shfl_sync(kFull, upto, 31);
  }

  // The j-th of them: its number u, its range, and its number i in the range. j is the same on all lanes.
  __device__ void find(std::uint32_t j, std::uint32_t& u, std::uint32_t& range, std::uint32_t& i) const {
    range = __ffs(__ballot_sync(kFull, upto > j)) - 1;
    u = __shfl_sync(kFull, first - (upto - count), range) + j;
    i = u - __shfl_sync(kFull, origin, range);
  }
};

// A piece of a row: what a warp moves at a time, kDeep vectors a lane.
template <std::uint32_t kDeep>
struct Piece {
  static constexpr std::uint32_t kSize = kDeep * 32;
  static constexpr std::uint32_t kCount = ceil_div(kVectors, kSize);

  std::uint32_t base;
  __device__ Piece(std::uint32_t piece, std::uint32_t lane) : base(piece * kSize + lane) {}
  __device__ std::uint32_t at(std::uint32_t k) const { return base + k * 32; }
  __device__ bool has(std::uint32_t k) const { return kVectors % kSize == 0 || at(k) < kVectors; }

  __device__ void load(uint4 (&v)[kDeep], const void* row) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) v[k] = has(k) ? static_cast<const uint4*>(row)[at(k)] : uint4{0, 0, 0, 0};
  }
  __device__ void store(void* row, const uint4 (&v)[kDeep]) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++)
      if (has(k)) static_cast<uint4*>(row)[at(k)] = v[k];
  }
};

// Among a token's entries for the same rank: by expert, then k. `home` is the lane's, of its k.
__device__ inline std::uint32_t place_of(std::uint32_t home, std::uint32_t lane) {
  std::uint32_t place = 0;
  for (std::uint32_t k = 0; k < kTopK; k++) {
    const std::uint32_t other = __shfl_sync(kFull, home, k);
    place += other >> 16 == home >> 16 && (other < home || (other == home && k < lane));
  }
  return place;
}

// wait.again(peer) where `peer` may itself wait for a rank that has not come: that one is named.
__device__ inline bool again(Wait& wait, const Moe& m, std::uint32_t epoch, std::uint32_t peer) {
  return wait.again(peer, [&](std::uint32_t blamed) {
    for (std::uint32_t r = 0; r < kWorld; r++)
      if (r != m.rank() && ptx::load_relaxed_sys(&m.place.control(m.rank())->headers[r][epoch % 2].request).x != epoch)
        return r;
    return blamed;
  });
}

// The first signal of a call that has no counts.
__device__ inline void send_headers(const Moe& m) {
  if (blockIdx.x == 0)
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != m.rank()) m.place.send_header(p, m.epoch(), m.digest, m.tokens, 0);
}

__device__ inline bool record_is_set(const Moe& m) {
  return ptx::load_relaxed_sys(&m.place.control(m.rank())->failure) != 0;
}
// Of a whole block, which must agree: the record may be set while it looks.
__device__ inline bool has_failed(const Moe& m) { return __syncthreads_or(threadIdx.x == 0 && record_is_set(m)); }

// A tile of a row: what a warp moves by bulk copies, through its part of shared memory.
constexpr std::uint32_t kTiles = ceil_div(kRowBytes, TILE_BYTES);
constexpr std::uint32_t kTileBytes = align_up(ceil_div(kRowBytes, kTiles), 16);
constexpr std::uint32_t kMostTilers = 112 * 1024 / kTileBytes, kTilers = kMostTilers < 16 ? kMostTilers : 16;  // warps

struct Tile {
  std::uint8_t* buffer;
  std::uint64_t* barrier;
  std::uint32_t phase = 0;

  // The warp's own; all lanes call it once.
  __device__ Tile(std::uint8_t* shared, std::uint64_t* barriers, std::uint32_t warp, std::uint32_t lane)
      : buffer(shared + warp * kTileBytes), barrier(barriers + warp) {
    if (lane == 0) ptx::bulk_barrier_init(barrier);
    __syncwarp();
  }
  __device__ static std::uint32_t bytes(std::uint32_t tile) {
    return tile + 1 < kTiles ? kTileBytes : kRowBytes - tile * kTileBytes;
  }
  __device__ void load(const std::uint8_t* row, std::uint32_t tile, std::uint32_t lane) const {
    if (lane) return;
    ptx::bulk_expect(barrier, bytes(tile));
    ptx::bulk_load(buffer, row + tile * kTileBytes, bytes(tile), barrier);
  }
  __device__ void await() {
    ptx::bulk_await(barrier, phase);
    phase ^= 1;
  }
  // By each lane to a row of its own. `release` lets the buffer be loaded again.
  __device__ void store(std::uint8_t* row, std::uint32_t tile) const {
    ptx::bulk_store(row + tile * kTileBytes, buffer, bytes(tile));
    ptx::bulk_commit();
  }
  __device__ void release() const {
    ptx::bulk_wait_read();
    __syncwarp();
  }
};

// Columns are kColumns a vector; on the wire, a byte each.
struct Quantised {
  static constexpr std::uint32_t kWords = kColumns / 4;
  std::uint32_t q[kWords];

  __device__ void load(const std::uint8_t* row, std::uint32_t vector) {
    const auto* from = reinterpret_cast<const std::uint32_t*>(row) + vector * kWords;
    if constexpr (kWords == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      q[0] = v.x, q[1] = v.y;
    } else {
      q[0] = *from;
    }
  }
  __device__ void store(std::uint8_t* row, std::uint32_t vector) const {
    auto* to = reinterpret_cast<std::uint32_t*>(row) + vector * kWords;
    if constexpr (kWords == 2)
      *reinterpret_cast<uint2*>(to) = uint2{q[0], q[1]};
    else
      *to = q[0];
  }
};

// Of a kernel's last block: all others have finished. Every thread of a block calls it once, at its end.
__device__ inline bool is_last_block(const Moe& m) {
  __shared__ std::uint32_t last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = ptx::add_acq_rel_gpu(m.workspace + WorkspaceAt::kDone, 1) + 1 == gridDim.x;
    if (last) m.workspace[WorkspaceAt::kDone] = 0;
  }
  __syncthreads();
  return last;
}

// The call is over: what follows on this rank is the next one.
__device__ inline void end_call(const Moe& m, std::uint32_t epoch) {
  if (threadIdx.x < kEpochs) m.place.control(m.rank())->epoch[threadIdx.x] = epoch;
}

// At the end of a kernel that has taken chunks up to `end` out of their slots.
__device__ inline void end_chunks(const Moe& m, std::uint32_t epoch, std::uint32_t end, bool credits, bool last) {
  if (!(credits && end) && !last) return;
  if (!is_last_block(m)) return;
  if (credits && end)
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != m.rank()) ptx::store_release_sys(&m.stage_at(p).consumed[m.rank()], mark(epoch, end));
  if (last) end_call(m, epoch);
}

}  // namespace a2a
