// norm_rows: an all-reduce with a residual add and RMSNorm by whole rows, in batches of rows with a signal each.
//   residual_out = residual + in_0 + in_1 + ...;  out = RMSNorm(residual_out) * weight      norm.cuh has the order of operations
//
//   one-shot   every rank stores its rows into all others' staging, and does all of it for all rows.
//   two-shot   a batch has an owner, to whom all others send it. The owner sends residual_out and the rows' scales back; then
//              everybody multiplies for itself, which is half the bytes of two results.
// Block b of every rank has the same batches, b, b + blocks, ...; batch g of block b is of owner (b + g) mod world_size.
//
// Cost     one-shot 1 step, two-shot 2; scale-up bytes sent per rank: world_size - 1 inputs, or 2 (world_size - 1) / world_size
// Launch   the same grid on every rank, at most kBlocks; blocks of kTeams * kTeam threads, a row a team at a time
// Buffers  staging symmetric, zero at first; out and residual_out may each be in or residual; all aligned to 16 bytes
// VISIBLE  S: all threads of a block store a batch into p's terms (results, the same); barrier; a thread's st.release.sys of
//          `arrived` (`made`), cumulative over the barrier. A: a thread of the same block of p loads it, ld.acquire.sys; barrier;
//          R: all threads of that block load the batch.
// REUSE    terms and their words are two by the epoch's parity, as headers are (signal.cuh). Results and theirs are stored when terms
//          of this epoch have come from every rank, whose earlier call is then over. In place: a batch of in is stored over,
//          vector by vector by the threads that load it, after the block's own push of it and a barrier. `groups` is two by the
//          parity of a team's rows: it is stored again after the barrier that follows its last load.
// PROGRESS every block pushes batch g + 1 before it waits for batch g of its equals, and waits for results when it has pushed and
//          made everything of its own. All blocks fit on the device at once.
// FAILURE  a thread whose deadline passes stores the missing rank in every rank's record and waits for nothing any more; so
//          does everybody who sees a record. The threads of a block agree at each wait whether to go on. Out and residual_out are
//          undefined then; the host raises. A header with another digest is a failure.
#include "copy.cuh"
#include "norm.cuh"

namespace a2a {

struct Batch {
  std::uint32_t number, first, rows;
};

struct Rows {
  static constexpr bool kTwoShot = TWO_SHOT;
  static constexpr std::uint32_t kMostThreads = 1024, kMostTeams = 8;  // a team has a barrier of its own
  static constexpr std::uint32_t kTeam = kVectors < kMostThreads ? (kVectors + 31) / 32 * 32 : kMostThreads;
  static constexpr std::uint32_t kTeams = kMostThreads / kTeam < kMostTeams ? kMostThreads / kTeam : kMostTeams;
  static constexpr std::uint32_t kThreads = kTeam * kTeams;
  static constexpr std::uint32_t kMine = (kVectors + kTeam - 1) / kTeam;  // vectors of a thread in a row
  static constexpr std::uint32_t kPerOwner = kTwoShot ? kWorld : 1;       // a block's batches of which an owner has one

  const Params& a;
  Wait wait;
  const std::uint32_t rank, epoch, t, team;  // t: in the team
  float (*groups)[kTree];                    // shared: this team's two
  std::uint32_t turn = 0;                    // rows that the team has had
  uint4 weight[kMine];

  // ---- batches

  __device__ std::uint32_t batches() const {
    return std::uint32_t(ceil_div(a.rows, std::uint64_t(gridDim.x) * a.batch_rows));
  }
  __device__ Batch batch(std::uint32_t g) const {
    const std::uint32_t first = (g * gridDim.x + blockIdx.x) * a.batch_rows;
    const std::uint32_t left = first < a.rows ? a.rows - first : 0;
    return {g, first, left < a.batch_rows ? left : a.batch_rows};
  }
  __device__ std::uint32_t owner(std::uint32_t g) const { return (blockIdx.x + g) % kWorld; }
  __device__ bool mine(std::uint32_t g) const { return !kTwoShot || owner(g) == rank; }

  // Where a batch lies among those of one owner, in vectors; its scales follow its rows.
  __device__ std::uint64_t place_of(std::uint32_t g) const {
    const std::uint64_t bytes = align_up(a.batch_rows * (std::uint64_t(kVectors) * 16 + 4), 16);
    return (blockIdx.x * ceil_div(batches(), kPerOwner) + g / kPerOwner) * bytes / 16;
  }
  __device__ Staging& staging(std::uint32_t r) const { return *a.place.at<Staging>(r, a.staging); }
  __device__ uint4* terms(std::uint32_t at, std::uint32_t from, std::uint32_t g) const {
    return staging(at).terms[from][epoch % 2] + place_of(g);
  }
  __device__ uint4* results(std::uint32_t at, std::uint32_t from, std::uint32_t g) const {
    return staging(at).results[from] + place_of(g);
  }
  __device__ float* scales(uint4* rows) const { return reinterpret_cast<float*>(rows + a.batch_rows * kVectors); }
  __device__ static uint4* row_of(std::uint64_t tensor, std::uint64_t row) {
    return reinterpret_cast<uint4*>(tensor) + row * kVectors;
  }

  // ---- the steps of a batch

  __device__ void push(const Batch& batch) {
    const std::uint32_t g = batch.number;
    for (std::uint32_t k = 1; k < kWorld; k++) {
      const std::uint32_t p = (rank + k) % kWorld;
      if (!kTwoShot || owner(g) == p)
        copy(terms(p, rank, g), row_of(a.input, batch.first), std::uint64_t(batch.rows) * kVectors * 16, threadIdx.x,
             kThreads);
    }
    __syncthreads();
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += kThreads)
      if (p != rank && (!kTwoShot || owner(g) == p))
        ptx::store_release_sys(&staging(p).arrived[rank][epoch % 2][blockIdx.x][g], epoch);
  }

  // Wait for a word of p's.
  __device__ void await(const std::uint32_t* word, std::uint32_t p) {
    while (ptx::load_relaxed_sys(word) != epoch && wait.again_behind(p, epoch)) {
    }
    ptx::load_acquire_sys(word);  // once: every acquire empties the L1 cache of its SM
  }
  // Whether the block goes on: nobody in it has seen a failure.
  __device__ bool together() { return !__syncthreads_or(wait.broken); }

  __device__ bool make(const Batch& batch) {
    const std::uint32_t g = batch.number;
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += kThreads)
      if (p != rank) await(&staging(rank).arrived[p][epoch % 2][blockIdx.x][g], p);
    if (!together()) return false;
    for (std::uint32_t i = team; i < batch.rows; i += kTeams) reduce(batch, i);
    if (!kTwoShot) return true;
    __syncthreads();
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += kThreads)
      if (p != rank) ptx::store_release_sys(&staging(p).made[rank][blockIdx.x][g], epoch);
    return true;
  }

  // Row i of a batch of one's own, by a team.
  __device__ void reduce(const Batch& batch, std::uint32_t i) {
    const std::uint32_t g = batch.number, lane = t % 32;
    const std::uint64_t row = batch.first + i;
    float* sums = groups[turn++ % 2];
    uint4 r[kMine];
#pragma unroll
    for (std::uint32_t k = 0; k < kMine; k++) {
      const std::uint32_t v = t + k * kTeam;
      float squares = 0;
      if (v < kVectors) {
        const uint4 residual = row_of(a.residual, row)[v];
        float sum[RowVector::kColumns];
        for (std::uint32_t p = 0; p < kWorld; p++)
          add_term(sum, p == rank ? row_of(a.input, row)[v] : terms(rank, p, g)[i * kVectors + v], p == 0);
        r[k] = add_residual(sum, residual, squares);
        row_of(a.residual_out, row)[v] = r[k];
        if (kTwoShot)
          for (std::uint32_t j = 1; j < kWorld; j++) results((rank + j) % kWorld, rank, g)[i * kVectors + v] = r[k];
      }
      squares = sum_of_lanes(squares);
      if (lane == 0 && v / 32 < kGroups) sums[v / 32] = squares;
    }
    barrier();
    const float scale = scale_of(sums, a.eps, lane);
    store(row, r, scale);
    if (kTwoShot && t == 0)
      for (std::uint32_t j = 1; j < kWorld; j++) scales(results((rank + j) % kWorld, rank, g))[i] = scale;
  }

  __device__ void store(std::uint64_t row, const uint4 (&r)[kMine], float scale) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kMine; k++) {
      const std::uint32_t v = t + k * kTeam;
      if (v < kVectors) row_of(a.out, row)[v] = normalise(r[k], scale, weight[k]);
    }
  }

  // A batch that another rank has made.
  __device__ bool take(const Batch& batch) {
    const std::uint32_t g = batch.number, from = owner(g);
    if (threadIdx.x == 0) await(&staging(rank).made[from][blockIdx.x][g], from);
    if (!together()) return false;
    uint4* rows = results(rank, from, g);
    for (std::uint32_t i = team; i < batch.rows; i += kTeams) {
      uint4 r[kMine];
#pragma unroll
      for (std::uint32_t k = 0; k < kMine; k++) {
        const std::uint32_t v = t + k * kTeam;
        if (v >= kVectors) break;
        r[k] = rows[i * kVectors + v];
        row_of(a.residual_out, batch.first + i)[v] = r[k];
      }
      store(batch.first + i, r, scales(rows)[i]);
    }
    return true;
  }

  __device__ void barrier() const {
    if (kTeam == 32)
      __syncwarp();
    else
      ptx::barrier(1 + team, kTeam);
  }

  __device__ void run() {
    if (blockIdx.x == 0) send_headers(a, epoch);
    const std::uint32_t all = a.digest == kRefusal ? 0 : batches();
#pragma unroll
    for (std::uint32_t k = 0; k < kMine; k++)
      if (t + k * kTeam < kVectors) weight[k] = row_of(a.weight, 0)[t + k * kTeam];
    if (all) push(batch(0));
    if (blockIdx.x == 0) await_headers(a, wait, epoch);
    for (std::uint32_t g = 0; g < all; g++) {
      if (g + 1 < all) push(batch(g + 1));
      if (mine(g) && !make(batch(g))) return;
    }
    for (std::uint32_t g = 0; g < all; g++)
      if (!mine(g) && !take(batch(g))) return;
  }
};

}  // namespace a2a

extern "C" __device__ const unsigned long long norm_rows_threads = a2a::Rows::kThreads;

extern "C" __global__ void __launch_bounds__(a2a::Rows::kThreads) norm_rows(const __grid_constant__ a2a::Params a) {
  using namespace a2a;
  __shared__ float groups[Rows::kTeams][2][kTree];
  const std::uint32_t epoch = next_epoch(a.place.control(a.place.rank)->epoch[blockIdx.x]);
  const std::uint32_t team = threadIdx.x / Rows::kTeam;
  Rows rows{a, Wait(a.place, kWorld), a.place.rank, epoch, threadIdx.x % Rows::kTeam, team, groups[team]};
  rows.run();
  leave(a.place, epoch);
}
