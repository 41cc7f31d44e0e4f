// reduce_multimem: all-reduces, reduce-scatters and all-gathers through the switch, which adds up what all ranks have at one place
// of a multicast buffer, and stores to all of them at once.
//   all-reduce      rank p loads part p of each slice reduced, and stores it to all
//   reduce-scatter  rank p loads share p reduced                              all-gather  rank p stores its input to all
// The order of a sum's terms is the switch's: not the same bits as the other algorithms', though the same on every rank.
//
// With A2A_SOFTWARE_SWITCH, the switch is a loop over the ranks' unicast pointers, in rank order: all else is as with a real one,
// and the bits are those of the other algorithms.
//
// A block has slices of the tensor, one after the other, in a slot of its own: it copies its rank's terms there, meets the equal
// blocks of all other ranks, does its part, meets them again, and copies the results out.
//
// Cost     2 steps a slice; scale-up bytes per rank: an all-reduce loads and stores 1 / world_size of the tensor, whatever world_size
// Launch   the same grid on every rank, at most kBlocks
// Buffers  a multicast buffer with a unicast address, and staging for words, symmetric, zero at first; in and out any, out may be
//          in, or the smaller of them the own share of the other
// VISIBLE  W: all threads of a block store to the slot, or to all ranks' through the switch; a proxy fence, since addresses differ;
//          barrier; S: st.release.sys of `met`, cumulative over the barrier. A: a thread of the equal block of another rank loads it,
//          ld.acquire.sys; barrier; a proxy fence; R: all its threads load, through the switch or its rank's own slot.
// REUSE    A slot is stored to again after the second meeting, which every rank joins when it has loaded all that it wants of other
//          ranks' slots, and after a barrier that follows the copy out. Part p of an all-reduce's slot is loaded, between the
//          meetings, by rank p alone, vector by vector before it is stored to. Words are two by the epoch's parity, as headers are.
// PROGRESS equal blocks meet equally often; each says that it is there before it waits. All blocks fit on the device at once.
// FAILURE  a thread whose deadline passes stores the missing rank in every rank's record and waits for nothing any more; so
//          does everybody who sees a record. The threads of a block agree at each meeting whether to go on. Out is undefined then;
//          the host raises. A header with another digest is a failure.
#include "copy.cuh"
#include "reduce.cuh"

#ifndef A2A_SOFTWARE_SWITCH
#define A2A_SOFTWARE_SWITCH 0
#endif

namespace a2a {

constexpr std::uint64_t kSlotBytes = SLOT_BYTES;  // of a block
constexpr std::uint64_t kSliceBytes =             // of a share; of an all-reduce's tensor
    COLLECTIVE == kAllReduce ? kSlotBytes : kSlotBytes / kWorld / 16 * 16;
static_assert(kSliceBytes >= 16, "a slot holds a vector of every rank");

// Words of one rank: [s] how often block b of rank [s] has met the others in the epoch above the count; two by its parity.
struct Meetings {
  std::uint64_t met[kWorld][2][kBlocks];
};

struct MultimemParams {
  Params call;              // its staging: a Meetings
  std::uint64_t multicast;  // address of the buffer of all ranks; in software: its offset in the windows
  std::uint64_t own;        // address of this rank's
};

// One 16-byte vector of all ranks' buffers.
struct Switch {
  const MultimemParams& a;

  __device__ uint4 load(std::uint64_t at) const {
#if A2A_SOFTWARE_SWITCH
    Sum sum;
    for (std::uint32_t p = 0; p < kWorld; p++) {
      const uint4 term = ptx::load_relaxed_sys(a.call.place.at<const uint4>(p, a.multicast + at));
      p == 0 ? sum.first(term) : sum.next(term);
    }
    return sum.result();
#else
    return load_multicast(a.multicast + at);
#endif
  }

  __device__ void store(std::uint64_t at, uint4 v) const {
#if A2A_SOFTWARE_SWITCH
    for (std::uint32_t p = 0; p < kWorld; p++) ptx::store_relaxed_sys(a.call.place.at<uint4>(p, a.multicast + at), v);
#else
    ptx::multimem_store(reinterpret_cast<uint4*>(a.multicast + at), v);
#endif
  }

 private:
  template <class T, class Load>
  __device__ static uint4 by_elements(std::uint64_t address, const Load& one) {
    union {
      uint4 v;
      T elements[16 / sizeof(T)];
    };
#pragma unroll
    for (std::uint32_t i = 0; i < 16 / sizeof(T); i++) elements[i] = one(reinterpret_cast<const T*>(address) + i);
    return v;
  }

  // Which reductions there are: `SWITCHED` of a2a/algorithms/multimem_base.py.
  template <std::uint32_t kType = DTYPE>
  __device__ static uint4 load_multicast(std::uint64_t address) {
    const uint4* p = reinterpret_cast<const uint4*>(address);
    using Word = std::uint32_t;
    using Long = std::uint64_t;
    if constexpr (!kReduces)
      return {};
    else if constexpr (kType == kFloat32 && REDUCE == kSum)
      return ptx::multimem_load_add_f32(p);
    else if constexpr (kType == kBfloat16 && REDUCE == kSum)
      return ptx::multimem_load_add_bf16(p);
    else if constexpr (kType == kFloat16 && REDUCE == kSum)
      return ptx::multimem_load_add_f16(p);
    else if constexpr (kType == kInt32 && REDUCE == kSum)
      return by_elements<Word>(address, [](const Word* e) { return ptx::multimem_load_add_s32(e); });
    else if constexpr (kType == kInt32 && REDUCE == kMin)
      return by_elements<Word>(address, [](const Word* e) { return ptx::multimem_load_min_s32(e); });
    else if constexpr (kType == kInt32 && REDUCE == kMax)
      return by_elements<Word>(address, [](const Word* e) { return ptx::multimem_load_max_s32(e); });
    else if constexpr (kType == kInt64 && REDUCE == kSum)
      return by_elements<Long>(address, [](const Long* e) { return ptx::multimem_load_add_s64(e); });
    else if constexpr (kType == kInt64 && REDUCE == kMin)
      return by_elements<Long>(address, [](const Long* e) { return ptx::multimem_load_min_s64(e); });
    else if constexpr (kType == kInt64 && REDUCE == kMax)
      return by_elements<Long>(address, [](const Long* e) { return ptx::multimem_load_max_s64(e); });
    else
      static_assert(kType > 1000, "the switch has no instruction for this");
  }
};

struct Multimem {
  const MultimemParams& a;
  const Switch all;
  Wait wait;
  const std::uint32_t rank, epoch;
  std::uint32_t count = 0;  // meetings so far

  __device__ std::uint8_t* in() const { return reinterpret_cast<std::uint8_t*>(a.call.in); }
  __device__ std::uint8_t* out() const { return reinterpret_cast<std::uint8_t*>(a.call.out); }
  __device__ static std::uint64_t slot() { return blockIdx.x * kSlotBytes; }
  __device__ std::uint8_t* own() const { return reinterpret_cast<std::uint8_t*>(a.own + slot()); }
  __device__ static void move(void* to, const void* from, std::uint64_t bytes) {
    copy(to, from, bytes, threadIdx.x, blockDim.x);
  }
  __device__ std::uint64_t* met(std::uint32_t at, std::uint32_t from) const {
    return &a.call.place.at<Meetings>(at, a.call.staging)->met[from][epoch % 2][blockIdx.x];
  }

  // With the equal blocks of all other ranks. False: somebody has failed.
  __device__ bool meet() {
    ptx::fence_alias();
    __syncthreads();
    count++;
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != rank) ptx::store_release_sys(met(p, rank), std::uint64_t(epoch) << 32 | count);
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
      if (p != rank) {
        while (!reached(p) && wait.again(p)) {
        }
        ptx::load_acquire_sys(met(rank, p));
      }
    const bool together = !__syncthreads_or(wait.broken);
    ptx::fence_alias();
    return together;
  }
  __device__ bool reached(std::uint32_t p) const {
    const std::uint64_t word = ptx::load_relaxed_sys(met(rank, p));
    return std::uint32_t(word >> 32) == epoch && std::uint32_t(word) >= count;
  }

  // `bytes` of each share, or of the tensor, from `begin` on.
  __device__ bool slice(std::uint64_t begin, std::uint64_t bytes) {
    const std::uint64_t share = a.call.shares.each;
    const std::uint32_t vectors = std::uint32_t(ceil_div(bytes, 16));
    if constexpr (COLLECTIVE == kAllReduce) {
      move(own(), in() + begin, bytes);
      if (!meet()) return false;
      const std::uint32_t part = std::uint32_t(ceil_div(vectors, kWorld)), first = rank * part;
      const std::uint32_t end = first + part < vectors ? first + part : vectors;
      for (std::uint32_t v = first + threadIdx.x; v < end; v += blockDim.x)
        all.store(slot() + 16 * v, all.load(slot() + 16 * v));
      if (!meet()) return false;
      move(out() + begin, own(), bytes);
    } else if constexpr (COLLECTIVE == kReduceScatter) {
      for (std::uint32_t p = 0; p < kWorld; p++) move(own() + p * kSliceBytes, in() + p * share + begin, bytes);
      if (!meet()) return false;
      for (std::uint32_t v = threadIdx.x; v < vectors; v += blockDim.x)
        store_vector(out() + begin + 16 * v, all.load(slot() + rank * kSliceBytes + 16 * v), bytes - 16 * v);
      if (!meet()) return false;
    } else {
      for (std::uint32_t v = threadIdx.x; v < vectors; v += blockDim.x)
        all.store(slot() + rank * kSliceBytes + 16 * v, load_vector(in() + begin + 16 * v, bytes - 16 * v));
      if (!meet()) return false;
      for (std::uint32_t p = 0; p < kWorld; p++) move(out() + p * share + begin, own() + p * kSliceBytes, bytes);
      if (!meet()) return false;
    }
    __syncthreads();  // what is copied out may be stored over
    return true;
  }

  __device__ void run() {
    if (blockIdx.x == 0) {
      for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
        if (p != rank) send_header(a.call, p, epoch, kOrdinary, kOrdinary);
      for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
        if (p != rank) wait.await_header(p, epoch, a.call.digest, true);
    }
    if (a.call.digest == kRefusal) return;
    const std::uint64_t bytes = COLLECTIVE == kAllReduce ? a.call.shares.total : a.call.shares.each;
    for (std::uint64_t begin = blockIdx.x * kSliceBytes; begin < bytes; begin += gridDim.x * kSliceBytes)
      if (!slice(begin, bytes - begin < kSliceBytes ? bytes - begin : kSliceBytes)) return;
  }
};

}  // namespace a2a

extern "C" __device__ const unsigned long long reduce_multimem_words = sizeof(a2a::Meetings);

extern "C" __global__ void __launch_bounds__(512) reduce_multimem(const __grid_constant__ a2a::MultimemParams a) {
  using namespace a2a;
  const std::uint32_t rank = a.call.place.rank, epoch = next_epoch(a.call.place.control(rank)->epoch[blockIdx.x]);
  Multimem multimem{a, Switch{a}, Wait(a.call.place, kWorld), rank, epoch};
  multimem.run();
  leave(a.call.place, epoch);
}
