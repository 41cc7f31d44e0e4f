// What every kernel shares: where a rank's memory is mapped, the failure record, and waiting with a deadline.
//
// Each rank's symmetric memory is one window of address space, and an offset into it means the same to all ranks. Windows lie
// in one row, rank r's at `base + r * window`, unless another library maps them (PEER_TABLE): then a table tells where each
// lies. At the beginning of a window, or where the table says, is the control block:
//   failure  the first failure, kept for good: cause 8 bits | who noticed 16 | which peer 16 | request 16.
//            Written by whoever notices one, into every rank's window; a rank that finds it set does nothing any more.
//   ok       1 until then, then 0: comm.ok
//   closed   word r: rank r has left, and everything that it ever stored here has arrived. Written by rank r's host.
//   epoch    mine: calls so far, of all kernels together; one copy for each block that might read it while another is done.
//   late     [r]: how often rank r's header was not there after a first look around (some 20 us), and how long it took then.
//            Written by one thread a call: comm.stats().
//   headers  [r]: the first signal of rank r's call, two by the epoch's parity. One place for every collective, so that a
//            peer that is in another one is found out.
// `host` is the rank's copy of the record in pinned memory of its own process, which its next call looks at.
//
// Why two headers are enough: rank s writes that of epoch e + 2 after its call e + 1, in which it saw a header e + 1 of every
// peer, which that peer sent after its call e. The same holds for whatever else is kept twice by the epoch's parity.
#pragma once
#include "../common/layout.h"
#include "ptx.cuh"

namespace a2a {

enum Cause : std::uint32_t {
  kTimeout = 1,
  kClosed = 3,
  kMismatch = 4,
  kSplits = 5,
  kOverflow = 6,
  kRefused = 8,
  kOutOfRange = 10,
  kNotReady = 11
};  // as in cpu/signal.h

constexpr std::uint32_t kRefusal = 0;  // digest of a rank whose own call was wrong
constexpr std::uint32_t kMostRanks = 1024, kEpochs = 32;

// Of the call after: never 0, which words and packets hold that nobody has written. 2 keeps the parity in turn.
__device__ constexpr std::uint32_t next_epoch(std::uint32_t epoch) { return epoch + 1 ? epoch + 1 : 2; }

// Two packets, each whole by itself.
struct Header {
  uint4 request;  // epoch, digest, and 64 bits of the collective's own
  uint4 more;     // epoch, and 96 bits of the collective's own
};

struct Control {
  std::uint64_t failure;
  std::uint32_t ok, unused;
  std::uint64_t closed[kMostRanks];
  std::uint32_t epoch[kEpochs];
  struct {
    std::uint64_t times, ns, longest_ns;
  } late[kMostRanks];  // mine: how often and how long a header was waited for
  Header headers[kMostRanks][2];
};

struct Mapped {
  std::uint64_t memory, control;  // addresses
};

struct Place {
  std::uint64_t base, window;  // see memory(); window: bytes
  std::uint64_t* host;
  std::uint64_t timeout_ns;
  std::uint32_t rank, text;  // text: which request this is, for messages

#ifdef PEER_TABLE  // base: where the table lies, a row a rank
  __device__ std::uint64_t memory(std::uint32_t r) const { return reinterpret_cast<const Mapped*>(base)[r].memory; }
  __device__ Control* control(std::uint32_t r) const {
    return reinterpret_cast<Control*>(reinterpret_cast<const Mapped*>(base)[r].control);
  }
#else
  __device__ std::uint64_t memory(std::uint32_t r) const { return base + r * window; }
  __device__ Control* control(std::uint32_t r) const { return at<Control>(r, 0); }
#endif

  template <typename T>
  __device__ T* at(std::uint32_t r, std::uint64_t offset) const {
    return reinterpret_cast<T*>(memory(r) + offset);
  }
  // The offset that peers know this rank's address by, or `otherwise` where it isn't symmetric memory.
  __device__ std::uint64_t offset_of(std::uint64_t address, std::uint64_t otherwise) const {
    const std::uint64_t offset = address - memory(rank);
    return offset < window ? offset : otherwise;
  }

  __device__ void send_header(std::uint32_t to, std::uint32_t epoch, std::uint32_t digest, std::uint64_t first,
                              std::uint64_t second, std::uint32_t third = 0) const {
    Header& header = control(to)->headers[rank][epoch % 2];
    ptx::store_relaxed_sys(&header.request, uint4{epoch, digest, std::uint32_t(first), std::uint32_t(first >> 32)});
    ptx::store_relaxed_sys(&header.more, uint4{epoch, third, std::uint32_t(second), std::uint32_t(second >> 32)});
  }
};

__device__ inline std::uint64_t high_half(uint4 v) { return std::uint64_t(v.w) << 32 | v.z; }

// One thread's waiting. After a failure, its own or anybody's, nothing waits any more.
struct Wait {
  const Place& place;
  std::uint32_t world;
  bool broken = false, last_look = false;
  std::uint32_t spins = 0;
  std::uint64_t start = 0;

  __device__ Wait(const Place& p, std::uint32_t ranks) : place(p), world(ranks) {}

  // Whether somebody failed, at any time before. Takes note of it for the host.
  __device__ bool failed() {
    const std::uint64_t record = ptx::load_relaxed_sys(&place.control(place.rank)->failure);
    if (record) note(record);
    return broken;
  }

  __device__ void fail(Cause cause, std::uint32_t peer) {
    const std::uint64_t record =
        std::uint64_t(cause) << 48 | std::uint64_t(place.rank) << 32 | std::uint64_t(peer) << 16 | place.text;
    const std::uint64_t was = ptx::swap_if_zero_sys(&place.control(place.rank)->failure, record);
    if (!was)
      for (std::uint32_t r = 0; r < world; r++)
        if (r != place.rank) ptx::swap_if_zero_sys(&place.control(r)->failure, record);
    note(was ? was : record);
  }

  // Call between two looks at what is waited for; false: give up. The clock is read once in 64 looks. `blame` says whom to name
  // when the deadline passes, and `late` what to call that.
  template <typename Blame>
  __device__ bool again(std::uint32_t peer, const Blame& blame, Cause late = kTimeout) {
    if (broken) return false;
    if (++spins % 64) return true;
    if (failed()) return false;
    const std::uint64_t now = ptx::global_timer_ns();
    if (!start) start = now;
    if (last_look)
      fail(kClosed, peer);  // what it had sent has arrived, and that was looked for since
    else if (now - start > place.timeout_ns)
      fail(late, blame(peer));
    last_look = ptx::load_relaxed_sys(&place.control(place.rank)->closed[peer]) != 0;
    return !broken;
  }

  __device__ bool again(std::uint32_t peer) {
    return again(peer, [](std::uint32_t p) { return p; });
  }

  // The same for what this rank's own work has to bring.
  __device__ bool again_for_own() {
    return again(place.rank, [](std::uint32_t own) { return own; }, kNotReady);
  }

  // The same for what p sends only when it has something from every rank: perhaps another has not come.
  __device__ bool again_behind(std::uint32_t peer, std::uint32_t epoch) {
    return again(peer, [this, epoch](std::uint32_t blamed) {
      for (std::uint32_t r = 0; r < world; r++)
        if (r != place.rank &&
            ptx::load_relaxed_sys(&place.control(place.rank)->headers[r][epoch % 2].request).x != epoch)
          return r;
      return blamed;
    });
  }

  // Wait for p's header of this call; a peer that is in another one, or has refused its own, is a failure. `measure`: on one
  // thread a call.
  __device__ Header await_header(std::uint32_t p, std::uint32_t epoch, std::uint32_t digest, bool measure) {
    const Header& header = place.control(place.rank)->headers[p][epoch % 2];
    Header seen;
    failed();  // once a call, also where nothing is waited for long
    do {
      seen.request = ptx::load_relaxed_sys(&header.request);
      seen.more = ptx::load_relaxed_sys(&header.more);
    } while ((seen.request.x != epoch || seen.more.x != epoch) && again(p));
    if (measure && start) {
      auto& late = place.control(place.rank)->late[p];
      const std::uint64_t ns = ptx::global_timer_ns() - start;
      late.times++;
      late.ns += ns;
      if (ns > late.longest_ns) late.longest_ns = ns;
    }
    start = 0;
    if (digest == kRefusal) return seen;  // peers blame this rank, not this rank them
    if (!broken && seen.request.y != digest) fail(seen.request.y == kRefusal ? kRefused : kMismatch, p);
    return seen;
  }

 private:
  __device__ void note(std::uint64_t record) {
    broken = true;
    *const_cast<volatile std::uint32_t*>(&place.control(place.rank)->ok) = 0;
    ptx::store_relaxed_sys(place.host, record);
  }
};

}  // namespace a2a
