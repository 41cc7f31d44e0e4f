// all_to_all_copy: what stands around an even all-to-all whose bytes the copy engines move, so that no SM does.
//   enter    all ranks are in this call, so their outputs may be stored to
//   (copies of the pieces into the peers' symmetric outputs, on the same stream: the host's part)
//   leave    tell every peer that its piece is there; wait for the own pieces
//
// Cost     2 steps; scale-up bytes per rank: everything but its own piece; no SM while the bytes travel
// Launch   one block each, on the stream of the copies
// Buffers  inputs private; outputs and `done` symmetric
// VISIBLE  W: the copies precede leave on their stream; S: leave stores `done` (st.release.sys).  A: a peer's leave
//          (ld.acquire.sys); R: whatever follows it on its stream.
// REUSE    an output is stored to after its rank's header of this epoch, so after all that its stream did before. `done` grows.
// PROGRESS one block of each rank waits, for headers, then for `done`: a rank's leave follows its own enter and copies, which
//          wait for headers only, and a header waits for nobody.
// FAILURE  as in signal.cuh. The host's copies run also after a failure, into outputs whose calls fail with it.
#include "signal.cuh"

namespace a2a {

constexpr std::uint32_t kWorld = WORLD, kThreads = 128;

struct Copy {
  Place place;
  std::uint64_t done;  // offset of this algorithm's words: [rank], the epoch of its last piece that is complete here
  std::uint32_t digest, unused;

  __device__ std::uint32_t epoch() const { return next_epoch(place.control(place.rank)->epoch[0]); }
};

}  // namespace a2a

using namespace a2a;

extern "C" __global__ void __launch_bounds__(kThreads) all_to_all_copy_enter(const __grid_constant__ Copy a) {
  const std::uint32_t epoch = a.epoch();
  for (std::uint32_t p = threadIdx.x; p < kWorld; p += kThreads)
    if (p != a.place.rank) a.place.send_header(p, epoch, a.digest, 0, 0);
  Wait wait(a.place, kWorld);
  for (std::uint32_t p = threadIdx.x; p < kWorld; p += kThreads)
    if (p != a.place.rank) wait.await_header(p, epoch, a.digest, true);
}

extern "C" __global__ void __launch_bounds__(kThreads) all_to_all_copy_leave(const __grid_constant__ Copy a) {
  const std::uint32_t epoch = a.epoch();
  Wait wait(a.place, kWorld);
  if (!__syncthreads_or(wait.failed())) {
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += kThreads)
      if (p != a.place.rank) ptx::store_release_sys(a.place.at<std::uint32_t>(p, a.done) + a.place.rank, epoch);
    for (std::uint32_t p = threadIdx.x; p < kWorld; p += kThreads) {
      if (p == a.place.rank) continue;
      // Compared for equality: no peer is a call ahead, as its enter waits for this rank's header.
      const std::uint32_t* word = a.place.at<std::uint32_t>(a.place.rank, a.done) + p;
      while (ptx::load_acquire_sys(word) != epoch && wait.again(p)) {
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < kEpochs) a.place.control(a.place.rank)->epoch[threadIdx.x] = epoch;
}
