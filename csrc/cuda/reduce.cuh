// What the kernels of all-reduces, reduce-scatters and all-gathers share: how terms are reduced, how tensors are cut into
// shares, their parameters, and the staging through which they travel.
//
// Results are the CPU kernels' (csrc/cpu/simd_reduce.h), bit for bit but for what a NaN looks like: terms in rank order, from
// the first; bfloat16 and float16 in float32, rounded once; an average is the sum and one true division; the first NaN is the
// greatest and the least. The kernels are compiled without fused multiply-add.
#pragma once
#include "../common/layout.h"
#include "signal.cuh"
#include "vector.cuh"

namespace a2a {

// As in a2a/algorithms/reduction_base.py.
enum ReduceOp : std::uint32_t { kSum = 0, kAvg = 1, kMax = 2, kMin = 3, kCopy = 4 };  // kCopy: there is one term
enum Collective : std::uint32_t { kAllReduce = 0, kReduceScatter = 1, kAllGather = 2 };
enum OtherDtype : std::uint32_t { kFloat64 = 3, kUint8 = 4, kInt8 = 5, kInt16 = 6, kInt32 = 7, kInt64 = 8 };

constexpr std::uint32_t kWorld = WORLD;
constexpr std::uint64_t kFlagBytes = FLAG_BYTES;    // the most that a rank sends another as packets
constexpr std::uint64_t kChunkBytes = CHUNK_BYTES;  // of a slot of a ring
constexpr std::uint32_t kBlocks = 24, kSlots = 4;
constexpr std::uint32_t kChannels = 2 * kBlocks;  // two a block, which hide each other's waits
static_assert(kWorld <= kMostRanks, "headers");

constexpr bool kReduces = COLLECTIVE != kAllGather, kGathers = COLLECTIVE != kReduceScatter;

// ---------------------------------------------------------------- elements

// Elements that are reduced as they are.
template <class X>
struct Plain {
  using Term = X;
  static constexpr std::uint32_t kColumns = 16 / sizeof(X);

  __device__ static void split(X (&x)[kColumns], uint4 v) {
    const std::uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (std::uint32_t i = 0; i < kColumns; i++) {
      if constexpr (sizeof(X) == 8)
        x[i] = of_bits(std::uint64_t(w[2 * i + 1]) << 32 | w[2 * i]);
      else
        x[i] = X(w[i * sizeof(X) / 4] >> 8 * (i * sizeof(X) % 4));
    }
  }

  __device__ static uint4 join(const X (&x)[kColumns]) {
    std::uint32_t w[4] = {};
#pragma unroll
    for (std::uint32_t i = 0; i < kColumns; i++) {
      if constexpr (sizeof(X) == 8) {
        const std::uint64_t b = bits_of(x[i]);
        w[2 * i] = std::uint32_t(b);
        w[2 * i + 1] = std::uint32_t(b >> 32);
      } else {
        constexpr std::uint32_t kMask = std::uint32_t((1ull << 8 * sizeof(X)) - 1);
        w[i * sizeof(X) / 4] |= (std::uint32_t(x[i]) & kMask) << 8 * (i * sizeof(X) % 4);
      }
    }
    return {w[0], w[1], w[2], w[3]};
  }

 private:
  __device__ static X of_bits(std::uint64_t b) {
    if constexpr (X(0.5) != 0)
      return __longlong_as_double(static_cast<long long>(b));
    else
      return X(b);
  }
  __device__ static std::uint64_t bits_of(X x) {
    if constexpr (X(0.5) != 0)
      return std::uint64_t(__double_as_longlong(x));
    else
      return std::uint64_t(x);
  }
};

// How elements of DTYPE are reduced by REDUCE. Sums of integers wrap around, which only unsigned types may.
template <std::uint32_t kDtype>
struct Elements : Vector<kDtype> {};
constexpr bool kSigned = REDUCE == kMax || REDUCE == kMin;
template <bool kChoice, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};
template <>
struct Elements<kFloat64> : Plain<double> {};
template <>
struct Elements<kUint8> : Plain<std::uint8_t> {};
template <>
struct Elements<kInt8> : Plain<Choose<kSigned, signed char, std::uint8_t>::type> {};
template <>
struct Elements<kInt16> : Plain<Choose<kSigned, short, std::uint16_t>::type> {};
template <>
struct Elements<kInt32> : Plain<Choose<kSigned, std::int32_t, std::uint32_t>::type> {};
template <>
struct Elements<kInt64> : Plain<Choose<kSigned, std::int64_t, std::uint64_t>::type> {};

using Lanes = Elements<DTYPE>;
using Term = Lanes::Term;
constexpr std::uint32_t kElementBytes = 16 / Lanes::kColumns;

template <class X>
__device__ constexpr bool is_nan(X) {
  return false;
}
__device__ inline bool is_nan(float x) { return x != x; }
__device__ inline bool is_nan(double x) { return x != x; }

// One 16-byte vector of a result, term by term.
struct Sum {
  Term sum[Lanes::kColumns];

  __device__ void first(uint4 v) { Lanes::split(sum, v); }

  __device__ void next(uint4 v) {
    Term term[Lanes::kColumns];
    Lanes::split(term, v);
#pragma unroll
    for (std::uint32_t i = 0; i < Lanes::kColumns; i++) {
      const Term a = sum[i], b = term[i];
      if constexpr (REDUCE == kMax)
        sum[i] = (b > a || is_nan(b)) && !is_nan(a) ? b : a;
      else if constexpr (REDUCE == kMin)
        sum[i] = (b < a || is_nan(b)) && !is_nan(a) ? b : a;
      else
        sum[i] = Term(a + b);
    }
  }

  __device__ uint4 result() {
    if constexpr (REDUCE == kAvg) {
#pragma unroll
      for (std::uint32_t i = 0; i < Lanes::kColumns; i++) sum[i] = Term(sum[i] / Term(kWorld));
    }
    return Lanes::join(sum);
  }
};

// ---------------------------------------------------------------- memory

// What loads and stores that can't be of 16 bytes are made of: elements lie at multiples of their size.
using Piece =
    Choose<kElementBytes == 1, std::uint8_t, Choose<kElementBytes == 2, std::uint16_t, std::uint32_t>::type>::type;

__device__ __noinline__ uint4 load_pieces(const std::uint8_t* from, std::uint32_t bytes) {
  std::uint32_t w[4] = {};
#pragma unroll
  for (std::uint32_t at = 0; at < 16; at += sizeof(Piece))
    if (at < bytes) w[at / 4] |= std::uint32_t(*reinterpret_cast<const Piece*>(from + at)) << 8 * (at % 4);
  return {w[0], w[1], w[2], w[3]};
}

__device__ __noinline__ void store_pieces(std::uint8_t* to, uint4 v, std::uint32_t bytes) {
  const std::uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (std::uint32_t at = 0; at < 16; at += sizeof(Piece))
    if (at < bytes) *reinterpret_cast<Piece*>(to + at) = Piece(w[at / 4] >> 8 * (at % 4));
}

__device__ __forceinline__ bool aligned(const void* p) { return reinterpret_cast<std::uint64_t>(p) % 16 == 0; }

// 16 bytes, or as many as are left.
__device__ __forceinline__ uint4 load_vector(const std::uint8_t* from, std::uint64_t left) {
  if (left >= 16 && aligned(from)) return *reinterpret_cast<const uint4*>(from);
  return load_pieces(from, left < 16 ? std::uint32_t(left) : 16);
}

__device__ __forceinline__ void store_vector(std::uint8_t* to, uint4 v, std::uint64_t left) {
  if (left >= 16 && aligned(to))
    *reinterpret_cast<uint4*>(to) = v;
  else
    store_pieces(to, v, left < 16 ? std::uint32_t(left) : 16);
}

// Rank p reduces, or gives to all, share p: bytes [at(p), at(p) + bytes(p)) of the whole tensor.
struct Shares {
  std::uint64_t total, each;
  __device__ std::uint64_t at(std::uint32_t p) const { return p * each < total ? p * each : total; }
  __device__ std::uint64_t bytes(std::uint32_t p) const { return total - at(p) < each ? total - at(p) : each; }
};

struct Params {
  std::uint64_t out, in;  // first: the launcher replaces them from call to call
  Place place;
  std::uint64_t staging;  // offset in the window
  std::uint64_t count;    // elements of the smaller tensor: for messages
  Shares shares;          // of the whole tensor; the other one is a rank's own share of it
  std::uint32_t digest;   // of op, dtype, count and algorithm: equal on all ranks
  std::uint32_t about;    // op and dtype, 16 bits: for messages
};

// In a header: the symmetric addresses of its sender's input and output, or kOrdinary, in 48 bits each, and count and about.
constexpr std::uint64_t kOrdinary = ~0ull >> 16;  // windows are smaller

__device__ inline void send_header(const Params& a, std::uint32_t to, std::uint32_t epoch, std::uint64_t in,
                                   std::uint64_t out) {
  a.place.send_header(to, epoch, a.digest, in | a.count >> 32 << 48, out | std::uint64_t(a.about) << 48,
                      std::uint32_t(a.count));
}

constexpr std::uint64_t kUnit = 48;  // bytes of a thread's four packets
constexpr std::uint64_t kSlab = (kFlagBytes + kUnit - 1) / kUnit * 4;

// Staging of one rank. [s]: written by rank s. Counts of chunks have the epoch above them, so that none is left over.
struct Staging {
  std::uint32_t entered[kWorld];              // epoch: what rank [s] passes may be read
  std::uint64_t produced[kWorld][kChannels];  // chunks stored into input_rings[s]
  std::uint64_t progress[kWorld]
                        [kChannels];  // chunks of its share that rank [s] has read everywhere and stored everywhere
  std::uint64_t taken[kWorld][kChannels];  // chunks that rank [s] has taken from its result_rings[mine]
  uint4 input_slabs[kWorld][2][kSlab];     // packets to reduce, by the epoch's parity
  uint4 result_slabs[kWorld][2][kSlab];    // packets of rank [s]'s share
  uint4 input_rings[kWorld][kChannels][kSlots][kChunkBytes / 16];   // chunks to reduce
  uint4 result_rings[kWorld][kChannels][kSlots][kChunkBytes / 16];  // chunks of rank [s]'s share
};

// The end of a call: its epoch is over. By all threads of every block.
__device__ inline void leave(const Place& place, std::uint32_t epoch) {
  std::uint32_t* epochs = place.control(place.rank)->epoch;
  __syncthreads();
  if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;
  if (blockIdx.x == 0)
    for (std::uint32_t c = gridDim.x + threadIdx.x; c < kEpochs; c += blockDim.x) epochs[c] = epoch;
}

}  // namespace a2a

extern "C" __device__ const unsigned long long reduce_staging = sizeof(a2a::Staging);
