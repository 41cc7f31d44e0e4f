// Signals between the ranks of one CPU host: what lies in the control segment, how a rank publishes, and how it waits.
//
// Every word here has one writer. Words only grow (epochs, ring counters), are compared by signed distance and never reset.
// push_done and pull_done are compared for equality: a pair may do without them for more than 2^31 epochs, after which an old one
// would seem to lie ahead.
// A writer stores its data, then the word with memory_order_seq_cst; a reader loads the word with memory_order_acquire, then
// reads the data. seq_cst, where release would do for the data, is for the doorbell: the store of the word must come before
// the load of `sleeping` in one total order, or a peer could fall asleep on a word that has just changed (see Wait).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../common/layout.h"

// The mutants that the race tests must catch are compiled from the same source: A2A_MUTANT names the line to break.
#ifndef A2A_MUTANT
#define A2A_MUTANT 0
#endif

namespace a2a {

enum Mutant {
  kNoMutant = 0,
  kRelaxedSignal = 1,
  kIgnoreRingSpace = 2,
  kSkipPushDone = 3,
  kSkipEntry = 4,
  kSkipPullDone = 5,
  kEarlySignal = 6,
  kOneParity = 7,
  kNoDoorbell = 8,
  kIgnoreReaders = 9,
  kOneEager = 10,
  kOneCounts = 11,
  kSkipConfirm = 12,
  kNoPublishBell = 13,
  kEarlyConsume = 14,
  kEarlyTake = 15,
  kEarlyPublish = 16,
  kSilentFailure = 17,
  kTrustTorn = 18,
  kLateFlag = 19,
  kOneInput = 20
};
constexpr bool mutant(int which) { return A2A_MUTANT == which; }

enum Cause : std::uint32_t {
  kFine = 0,
  kTimeout = 1,
  kDied = 2,
  kClosed = 3,
  kMismatch = 4,
  kSplits = 5,
  kOverflow = 6,
  kInterrupted = 7,
  kRefused = 8,
  kUnreadable = 9
};
enum Result : int { kOk = 0, kFailed = 1, kPeerRefused = 2, kForked = 3, kNotOpen = 4, kPending = 5, kInvalid = 6 };

constexpr std::uint64_t kPoison = ~0ull;  // digest of an entry whose rank refused its own call
constexpr std::uint32_t kTexts = 256;     // request descriptions kept per rank
constexpr std::size_t kTextBytes = 192;
constexpr std::size_t kCauseBytes = 1024;
constexpr std::size_t kBounce = 256 << 10;
constexpr std::size_t kOneShotBytes = 64 << 10;  // the largest input of a one-shot

struct alignas(kLine) Word {
  std::atomic<std::uint32_t> value;
};

struct alignas(kLine) Doorbell {  // written by the others, slept on by its rank
  std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleeping;  // written by its rank
};

// The first signal of every collective, one line from each rank to each peer, at one fixed place: {epoch, digest} and what
// the pair needs to choose its side of the protocol. Two of them, by parity of the epoch: a rank posts epoch e + 2 only
// after it has seen every peer's entry e + 1, which each peer posts after it is done with the entries e.
struct alignas(kLine) Entry {
  std::uint64_t digest;      // of op, dtype, row size: equal on all ranks, or MismatchError
  std::uint64_t send_bytes;  // what this rank sends to that peer (MoE: its number of tokens)
  std::uint64_t recv_bytes;  // what it expects from that peer
  std::uint64_t
      in_address;  // symmetric address of what it sends; or, where peers may read this process, its plain address; or 0
  std::uint64_t out_address;  // symmetric address of where that peer may store, 0 if in ordinary memory
  std::uint64_t row_bytes;    // of dimension 0, 0 where rows mean nothing; two that are not 0 must agree
  std::int64_t
      balance;         // all that it sends less all that it expects: zero over all ranks, or splits disagree somewhere
  std::uint32_t text;  // which of the rank's request descriptions
  std::atomic<std::uint32_t> epoch;
};
static_assert(sizeof(Entry) == kLine, "an entry is one line");

struct alignas(kLine) RankState {
  std::atomic<std::uint32_t> open;  // 1 from attach, 2 after close
};

struct Header {
  std::uint64_t magic;
  std::uint32_t abi, world;
  alignas(kLine) std::atomic<std::uint64_t> failure;  // the first failure wins: see pack_failure
  alignas(kLine) std::atomic<std::uint32_t> ok;       // 1 until a failure, for whoever polls a word
};

// cause 8 bits | who noticed 16 | which peer 16 | text 16, or the noticing rank's cause text
constexpr std::uint64_t pack_failure(Cause cause, std::uint32_t by, std::uint32_t peer, std::uint32_t text) {
  return std::uint64_t(cause) << 48 | std::uint64_t(by) << 32 | std::uint64_t(peer) << 16 | text;
}

// Geometry of the control segment. All ranks compute it from the same three numbers.
struct Geometry {
  std::uint32_t world;
  std::uint32_t ring_slots = 4;
  std::size_t eager_bytes, slot_bytes;  // per ordered pair
  std::uint32_t publish_slots = 4;
  std::size_t publish_bytes;  // per rank
  std::size_t states, bells, entries, words, texts, causes, eager, rings, published, inputs, total;

  enum Kind { kProduced, kConsumed, kPushDone, kPullDone, kTaken, kKinds };  // words of an ordered pair

  Geometry(std::uint32_t world_, std::size_t staging_bytes) : world(world_) {
    const std::size_t P = world;
    slot_bytes = align_up(staging_bytes / ring_slots, kPage);
    eager_bytes = align_up(slot_bytes / 8 < 16384 ? slot_bytes / 8 : 16384, kLine);
    publish_bytes = align_up(slot_bytes * 2, kPage);
    std::size_t at = align_up(sizeof(Header), kPage);
    auto take = [&at](std::size_t bytes) {
      std::size_t here = at;
      at = align_up(at + bytes, kPage);
      return here;
    };
    states = take(P * sizeof(RankState));
    bells = take(P * sizeof(Doorbell));
    entries = take(P * P * 2 * sizeof(Entry));
    words = take((P * P * kKinds + P) * sizeof(Word));
    texts = take(P * kTexts * kTextBytes);
    causes = take(P * 3 * kCauseBytes);  // a rank's failure, and its refusals by parity of the epoch
    eager = take(P * P * 2 * eager_bytes);
    rings = take(P * P * ring_slots * slot_bytes);
    published = take(P * publish_slots * publish_bytes);
    inputs = take(P * 2 * kOneShotBytes);
    total = at;
  }
};

struct PeerStats {
  std::uint64_t waits, waited_ns, longest_ns;
};

constexpr std::uint32_t kMaxSegments = 1024;
struct Segment {
  std::uint8_t* base;  // rank 0's part; rank r's is at base + r * stride
  std::size_t stride;
};

struct Queue;

// What a collective was asked for, as far as all ranks must agree. Its text lies in the control segment.
struct Request {
  std::uint64_t digest, row_bytes;
  std::uint32_t text;
};

struct Context {
  std::uint32_t rank, world;
  int pid;
  std::uint8_t* owner = nullptr;  // a page whose first byte is 1 here and, as the system wipes it, 0 in a forked child
  Geometry geo;
  std::uint8_t* base;
  std::size_t mapped;  // bytes to unmap, 0 where the memory is the caller's
  std::uint32_t epoch = 0;
  bool unconfirmed = false;  // the last op was refused here without waiting for the peers
  std::uint32_t cores = 1;
  std::uint64_t spin_ns = 0, timeout_ns = 0;
  std::size_t stream_bytes = 0;  // copies of ops larger than this bypass the cache
  int* pidfds = nullptr;         // one a peer, -1 unknown
  int* pids = nullptr;  // one a peer, as this process sees it; null unless every rank may read every other's memory
  int (*interrupted)() = nullptr;  // asks the host language whether a signal wants the call to end
  PeerStats* stats = nullptr;
  Request* requests = nullptr;  // the last kTexts that were registered
  std::uint32_t num_requests = 0;
  std::uint32_t last_peer = 0;     // whose refusal the last kPeerRefused was about
  char refusal[kCauseBytes] = {};  // and why
  std::uint64_t ops = 0, bytes_pushed = 0, bytes_pulled = 0, bytes_staged = 0, bytes_eager = 0, bytes_read = 0;
  Segment segments[kMaxSegments];
  std::atomic<std::uint32_t> num_segments;
  std::uint8_t* scratch = nullptr;  // per-peer state of the running op
  std::uint8_t* bounce = nullptr;   // kBounce bytes, once reads are enabled
  Queue* queue = nullptr;
  std::atomic<std::uint32_t> callers{0};  // threads in a call of python.cpp's, which changes this with the GIL

  Context(std::uint32_t r, std::uint32_t w, std::size_t staging)
      : rank(r), world(w), geo(w, staging), num_segments(0) {}

  Header& header() { return *reinterpret_cast<Header*>(base); }
  RankState& state(std::uint32_t r) { return reinterpret_cast<RankState*>(base + geo.states)[r]; }
  Doorbell& bell(std::uint32_t r) { return reinterpret_cast<Doorbell*>(base + geo.bells)[r]; }
  Entry& entry(std::uint32_t to, std::uint32_t from, std::uint32_t e) {
    const std::uint32_t parity = mutant(kOneParity) ? 0 : (e & 1);
    return reinterpret_cast<Entry*>(base + geo.entries)[(std::size_t(to) * world + from) * 2 + parity];
  }
  std::atomic<std::uint32_t>& word(Geometry::Kind kind, std::uint32_t to, std::uint32_t from) {
    return reinterpret_cast<Word*>(base + geo.words)[(std::size_t(kind) * world + to) * world + from].value;
  }
  std::atomic<std::uint32_t>& published(std::uint32_t r) {
    return reinterpret_cast<Word*>(base + geo.words)[std::size_t(Geometry::kKinds) * world * world + r].value;
  }
  char* text(std::uint32_t r, std::uint32_t index) {
    return reinterpret_cast<char*>(base + geo.texts) + (std::size_t(r) * kTexts + index % kTexts) * kTextBytes;
  }
  char* cause_text(std::uint32_t r) {
    return reinterpret_cast<char*>(base + geo.causes) + std::size_t(r) * 3 * kCauseBytes;
  }
  char* refusal_text(std::uint32_t r, std::uint32_t e) { return cause_text(r) + (1 + (e & 1)) * kCauseBytes; }
  std::uint8_t* eager(std::uint32_t to, std::uint32_t from, std::uint32_t e) {
    const std::uint32_t parity = mutant(kOneEager) ? 0 : (e & 1);
    return base + geo.eager + ((std::size_t(to) * world + from) * 2 + parity) * geo.eager_bytes;
  }
  std::uint8_t* ring(std::uint32_t to, std::uint32_t from, std::uint32_t n) {
    return base + geo.rings + ((std::size_t(to) * world + from) * geo.ring_slots + n % geo.ring_slots) * geo.slot_bytes;
  }
  std::uint8_t* publication(std::uint32_t r, std::uint32_t n) {
    return base + geo.published + (std::size_t(r) * geo.publish_slots + n % geo.publish_slots) * geo.publish_bytes;
  }

  std::uint8_t* input(std::uint32_t r, std::uint32_t e) {
    const std::uint32_t parity = mutant(kOneInput) ? 0 : (e & 1);
    return base + geo.inputs + (std::size_t(r) * 2 + parity) * kOneShotBytes;
  }

  // Symmetric addresses: segment + 1 in the high 16 bits, offset below; 0 is "not symmetric". A plain address of a process has
  // no high bits.
  static constexpr bool is_plain(std::uint64_t address) { return address >> 48 == 0; }
  std::uint64_t address_of(const void* p, std::size_t bytes) const {
    const auto* q = static_cast<const std::uint8_t*>(p);
    for (std::uint32_t i = 0; i < num_segments.load(std::memory_order_acquire); i++) {
      const std::uint8_t* mine = segments[i].base + rank * segments[i].stride;
      if (segments[i].base && q >= mine && q + bytes <= mine + segments[i].stride)
        return std::uint64_t(i + 1) << 48 | std::uint64_t(q - mine);
    }
    return 0;
  }
  std::uint8_t* at(std::uint32_t r, std::uint64_t address) const {
    const Segment& s = segments[(address >> 48) - 1];
    return s.base + r * s.stride + (address & ((1ull << 48) - 1));
  }
};

std::uint64_t now_ns();
bool in_child(const Context& c);  // a forked child has the memory of its parent, but none of its calls to make
void wake(Doorbell& bell);        // the slow half of signal()

// Publish `value` in `word`, which rank `to` may be waiting for.
inline void signal(Context& c, std::uint32_t to, std::atomic<std::uint32_t>& word, std::uint32_t value) {
  word.store(value, mutant(kRelaxedSignal) ? std::memory_order_relaxed : std::memory_order_seq_cst);
  if (!mutant(kNoDoorbell) && c.bell(to).sleeping.load(std::memory_order_seq_cst)) wake(c.bell(to));
}

// Record a failure unless there is one, and wake everybody. `message` goes to this rank's cause text (may be null).
void fail(Context& c, Cause cause, std::uint32_t peer, std::uint32_t text, const char* message);

// One stretch of waiting inside an op. The caller makes a pass over all it waits for; a pass that got nowhere calls idle(),
// one that moved something calls progressed(). idle() spins, then yields, then sleeps on this rank's doorbell:
//   sleeping := 1 and bell0 := bell, then one more pass by the caller, then futex_wait(bell == bell0).
// A signaller stores its word and then loads `sleeping`; both in the total order of seq_cst, so that either it sees 1 and
// rings, or its word was there for the last pass.
class Wait {
 public:
  Wait(Context& c, std::uint32_t text, bool inline_call) : c_(c), text_(text), inline_(inline_call) {}
  ~Wait() { progressed(); }
  Wait(const Wait&) = delete;

  void progressed() {
    if (asleep_) c_.bell(c_.rank).sleeping.store(0, std::memory_order_relaxed);
    asleep_ = failed_ = false;
    began_ = turns_ = 0;
  }
  // Whether so long passed that the clock was read, about a microsecond; and when that was first.
  bool was_long() const { return began_ != 0; }
  std::uint64_t began() const { return began_; }
  // `missing(peer)` says whether the op still waits for that peer. Returns kOk, or kFailed once waiting must end.
  template <class Missing>
  int idle(const Missing& missing) {
    return idle_(&missing, [](const void* f, std::uint32_t peer) { return (*static_cast<const Missing*>(f))(peer); });
  }

 private:
  int idle_(const void* f, bool (*missing)(const void*, std::uint32_t));
  bool failed();
  int look(const void* f, bool (*missing)(const void*, std::uint32_t), std::uint64_t now);

  Context& c_;
  std::uint32_t text_;
  bool inline_;
  bool asleep_ = false, failed_ = false;
  std::uint64_t began_ = 0, looked_ = 0;
  std::uint32_t bell_ = 0, turns_ = 0, dead_ = ~0u;
};

// Begin an op: check that it may run, take the next epoch. `entries(peer, entry)` fills the line for a peer.
int begin_op(Context& c, std::uint32_t text, bool inline_call);
// Wait for every peer's entry of the current epoch and compare digests.
int await_entries(Context& c, const Request& request, bool inline_call);
inline void post_entry(Context& c, std::uint32_t peer, std::uint32_t e) {
  signal(c, peer, c.entry(peer, c.rank, e).epoch, e);
}

void lock(Context& c, bool wait_for_queue);
void unlock(Context& c);

}  // namespace a2a
