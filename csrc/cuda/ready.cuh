// Ready flags of ExpertParallel, for kernels that work on its rows: `ready_rows=n` gives every n consecutive rows of a dispatch a
// word that says they have arrived, and one that says they may be sent. This file needs signal.cuh, ptx.cuh and
// ../common/layout.h beside it, and nothing else. `ep.ready.params(routing)` is a ReadyFlags to pass to a kernel by value, which is
// compiled with the macros of `ep.ready.defines`.
//
//   dispatch                                 your kernel                                  combine(..., ready=True)
//   epoch    counts are here      ------->   ep.ready.start(): launch it
//   arrived  rows are here        ------->   wait_ready
//                                            read rows, compute, store rows
//                                 sendable   mark_ready, mark_ready_part      ------->    sums what has been marked
//
// A word holds the epoch of the last dispatch that it is true of, counted by the instance. It only grows, so nothing is ever
// reset and a replayed graph finds its own epoch in `epoch`; and one that is ahead says no less (`reached`).
//
// VISIBLE  arrived: whoever stores a piece of a row counts it (acq_rel), and the last one stores the word (release); wait_ready
//          loads it (acquire).  sendable: your block stores rows and meets at a barrier; one thread stores the word (release, or
//          acq_rel on `parts` before it); a gate of combine acquires it.
// REUSE    the words of a dispatch are read while it, and what was launched for it, runs; a later dispatch of the instance on this
//          rank stores them only when its own rows are here.  So mark routings in the order of their dispatches: a mark of a
//          later one also holds for those before.
// PROGRESS rows arrive by kernels that may start after yours.  Blocks that wait must leave them SMs, however many blocks there
//          are: a grid of at most (SMs - ep.ready.reserved_sms) blocks does.  Launch it before you call combine.
// FAILURE  wait_ready gives up when a peer has failed, or after the communicator's timeout, which then is the failure.  Leave, and
//          don't mark: the host learns of it by its next call, the device by comm.ok.
#pragma once
#include "signal.cuh"

namespace a2a {

struct ReadyFlags {
  Place place;
  const std::uint32_t* arrived;  // [word]
  std::uint32_t* sendable;       // [word]
  std::uint32_t* parts;          // [word]: how many have been done; 0 between kernels
  const std::uint32_t* epoch;    // of the routing; there when ep.ready.start() lets a stream go on
  std::uint32_t world, rows;     // ranks; rows of a word: row r is in word r / rows
};

// Rows [first, end) are here, with all that describes them. Call it on one thread and have the others wait at a barrier; what
// that thread then copies in bulk (TMA) it may copy, too. False: give up.
__device__ inline bool wait_ready(const ReadyFlags& flags, std::uint32_t first, std::uint32_t end) {
  Wait wait(flags.place, flags.world);
  const std::uint32_t epoch = *flags.epoch;
  for (std::uint32_t word = first / flags.rows; first < end && word <= (end - 1) / flags.rows; word++)
    while (!reached(ptx::load_acquire_gpu(flags.arrived + word), epoch))
      if (!wait.again_for_own()) return false;
  ptx::fence_bulk();
  return true;
}

// The rows of a word may be sent. Call it on one thread, behind a barrier of all that stored them; bulk stores have been waited
// for (cp.async.bulk.wait_group 0, not .read).
__device__ inline void mark_ready(const ReadyFlags& flags, std::uint32_t word) {
  ptx::store_release_gpu(flags.sendable + word, *flags.epoch);
}

// The same where `parts` pieces of work make the rows of a word: each calls this once, and the last one marks it.
__device__ inline void mark_ready_part(const ReadyFlags& flags, std::uint32_t word, std::uint32_t parts) {
  if (ptx::add_acq_rel_gpu(flags.parts + word, 1) + 1 != parts) return;
  flags.parts[word] = 0;
  mark_ready(flags, word);
}

}  // namespace a2a
