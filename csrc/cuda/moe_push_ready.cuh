// Where moe_push keeps ready flags (see ready.cuh), and how rows that arrive are counted.
//
//   gate_counts   epoch = ++serial, in the plan                                     before any row of the dispatch is stored
//   expand        each warp that has stored a piece of a row, or a row of padding, counts it; the last of a word's pieces stores
//                 arrived[word] = epoch.  Words that no row has are stored beside the padding: nobody waits for them in vain.
//   gate_rows     combine's: waits for sendable[word] of a part of all words, which the maker of the rows stores
//   sum           behind each gate, the tokens whose last row lies in that part
#pragma once
#include "moe_push.cuh"

namespace a2a {

struct ReadyAt {
  __device__ static std::uint32_t* arrived(const Moe& m) { return m.ready; }
  __device__ static std::uint32_t* sendable(const Moe& m) { return m.ready + m.words; }
  // 2 * words on: parts of the words that are marked (ReadyFlags::parts)
  __device__ static std::uint32_t* counted(const Moe& m) { return m.ready + 3 * m.words; }  // 0 between dispatches
  __device__ static std::uint32_t* serial(const Moe& m) { return m.ready + 4 * m.words; }
};

__device__ inline std::uint32_t ready_epoch(const Moe& m) { return std::uint32_t(m.plan[PlanAt::kEpoch]); }
__device__ inline std::uint32_t rows_here(const Moe& m) { return std::uint32_t(m.plan[PlanAt::kRows]); }

// A dispatch begins, of which `rows` rows will be here. By one thread.
__device__ inline void begin_arrivals(const Moe& m, std::uint32_t rows) {
  m.plan[PlanAt::kEpoch] = std::int32_t(++*ReadyAt::serial(m));
  m.plan[PlanAt::kRows] = std::int32_t(rows);
}

// All lanes of the warp, which has stored `pieces` of the kPieces pieces of each lane's row (-1: none).
template <std::uint32_t kPieces>
__device__ inline void count_arrivals(const Moe& m, std::int32_t row, std::uint32_t pieces) {
  if constexpr (kReadyFlags) {
    __syncwarp();  // what the others have stored of this lane's row
    if (row < 0) return;
    const std::uint32_t word = std::uint32_t(row) / kReadyRows, left = rows_here(m) - word * kReadyRows;
    const std::uint32_t all = (left < kReadyRows ? left : kReadyRows) * kPieces;
    std::uint32_t* counted = ReadyAt::counted(m) + word;
    if (ptx::add_acq_rel_gpu(counted, pieces) + pieces != all) return;
    *counted = 0;
    ptx::store_release_gpu(ReadyAt::arrived(m) + word, ready_epoch(m));
  }
}

// Words behind the last row. By all threads of a grid.
__device__ inline void arrive_beyond(const Moe& m) {
  const std::uint32_t at = std::uint32_t(ceil_div(rows_here(m), kReadyRows)), all = gridDim.x * blockDim.x;
  for (std::uint32_t word = at + blockIdx.x * blockDim.x + threadIdx.x; word < m.words; word += all)
    ptx::store_release_gpu(ReadyAt::arrived(m) + word, ready_epoch(m));
}

// The words of pass number `pass` of a combine.
struct Pass {
  std::uint32_t first, end;
  __device__ Pass(const Moe& m, std::uint32_t pass, std::uint32_t passes) {
    const std::uint64_t words = ceil_div(rows_here(m), kReadyRows);
    first = std::uint32_t(words * pass / passes), end = std::uint32_t(words * (pass + 1) / passes);
  }
};

}  // namespace a2a
