// Somebody's kernel between a dispatch and its combine that uses ready flags: it takes rows as they arrive, and marks rows as it
// makes them. Two blocks make the rows of a word, half of the columns each.
#include "ready.cuh"

namespace a2a {

struct Maker {
  ReadyFlags flags;
  const std::uint8_t *rows, *scales;  // of the dispatch; scales or null
  const float* weights;
  const std::int32_t *rank, *index;  // [row]; index with compact rows, or null
  const std::int32_t* offsets;       // [expert]
  const std::uint8_t* made;          // what rows become; null: what they were
  std::uint8_t *seen_rows, *seen_scales;
  float* seen_weights;
  std::uint8_t* out;
  std::uint32_t experts, row_bytes, scale_bytes, out_bytes;  // of a row
  std::uint32_t marks, unused;                               // not 0: mark what has been made
};

constexpr std::uint32_t kParts = 2;

// A part of a row, by a warp.
template <typename T>
__device__ inline void copy_units(T* to, const T* from, std::uint32_t units, std::uint32_t part) {
  const std::uint32_t half = units / kParts;
  for (std::uint32_t i = (part ? half : 0) + threadIdx.x % 32; i < (part ? units : half); i += 32) to[i] = from[i];
}
__device__ inline void copy_part(std::uint8_t* to, const std::uint8_t* from, std::uint32_t bytes, std::uint32_t part) {
  if (bytes % 16 == 0)
    copy_units(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), bytes / 16, part);
  else
    copy_units(to, from, bytes, part);
}

__device__ inline void make_row(const Maker& a, std::uint64_t row, std::uint32_t part) {
  const std::uint64_t from = a.index ? a.index[row] : row;
  if (a.rank[row] >= 0 || !a.index) {  // compact rows have no padding
    copy_part(a.seen_rows + row * a.row_bytes, a.rows + from * a.row_bytes, a.row_bytes, part);
    if (a.scales) copy_part(a.seen_scales + row * a.scale_bytes, a.scales + from * a.scale_bytes, a.scale_bytes, part);
    if (a.out) copy_part(a.out + row * a.out_bytes, (a.made ? a.made : a.rows) + row * a.out_bytes, a.out_bytes, part);
  }
  if (part == 0 && threadIdx.x % 32 == 0) a.seen_weights[row] = a.weights[row];
}

}  // namespace a2a

using namespace a2a;

extern "C" __global__ void make_rows(const __grid_constant__ Maker a) {
  __shared__ std::uint32_t there;
  const std::uint32_t rows = a.experts ? std::uint32_t(a.offsets[a.experts - 1]) : 0, each = a.flags.rows;
  for (std::uint32_t item = blockIdx.x; item == 0 || item / kParts * each < rows; item += gridDim.x) {
    const std::uint32_t word = item / kParts, first = word * each, end = first + each < rows ? first + each : rows;
    if (threadIdx.x == 0) there = wait_ready(a.flags, first, end > first ? end : first + 1);
    __syncthreads();
    if (!there) return;
    for (std::uint32_t row = first + threadIdx.x / 32; row < end; row += blockDim.x / 32)
      make_row(a, row, item % kParts);
    __syncthreads();
    if (threadIdx.x == 0 && a.marks && first < rows) mark_ready_part(a.flags, word, kParts);
  }
}
