// Contexts, failures, waiting: what all kernels stand on.
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "a2a.h"
#include "queue.h"
#include "signal.h"
#include "simd.h"

namespace a2a {
namespace {

constexpr std::uint64_t kMagic = 0x3161326132613261ull;
constexpr std::uint32_t kAbi = 5;
constexpr std::uint64_t kSliceNs = 20'000'000;  // a sleeping rank looks around this often
constexpr std::uint32_t kYields = 32;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

long futex(std::atomic<std::uint32_t>* word, int op, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, op, value, timeout, nullptr, 0);
}

bool gone(int pidfd) {
  if (pidfd < 0) return false;
  pollfd p{pidfd, POLLIN, 0};
  return poll(&p, 1, 0) == 1 && (p.revents & (POLLIN | POLLHUP));
}

}  // namespace

std::uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return std::uint64_t(t.tv_sec) * 1'000'000'000ull + std::uint64_t(t.tv_nsec);
}

// getpid() is a system call, which small exchanges would notice; so it is for kernels that can't wipe a page (Linux before 4.14).
bool in_child(const Context& c) { return c.owner ? *c.owner == 0 : c.pid != getpid(); }

void wake(Doorbell& bell) {
  bell.bell.fetch_add(1, std::memory_order_seq_cst);
  futex(&bell.bell, FUTEX_WAKE, 1 << 30, nullptr);
}

void fail(Context& c, Cause cause, std::uint32_t peer, std::uint32_t text, const char* message) {
  if (c.header().failure.load(std::memory_order_acquire) != 0) return;
  if (message) {  // this rank's own slot, so that the record and its text can't be torn apart
    std::strncpy(c.cause_text(c.rank), message, kCauseBytes - 1);
    c.cause_text(c.rank)[kCauseBytes - 1] = 0;
  }
  std::uint64_t none = 0;
  if (c.header().failure.compare_exchange_strong(none, pack_failure(cause, c.rank, peer, text),
                                                 std::memory_order_acq_rel)) {
    c.header().ok.store(0, std::memory_order_release);
    for (std::uint32_t r = 0; r < c.world && !mutant(kSilentFailure); r++)
      wake(c.bell(r));  // this rank's other thread, too
  }
}

// Everything that can end a wait. A dead or closed peer ends it only if the op still misses that peer on a pass made after
// the death was seen: what it stored before it left still counts.
int Wait::look(const void* f, bool (*missing)(const void*, std::uint32_t), std::uint64_t now) {
  std::uint32_t first = ~0u;
  for (std::uint32_t p = 0; p < c_.world; p++) {
    if (p == c_.rank || !missing(f, p)) continue;
    if (first == ~0u) first = p;
    const bool closed = c_.state(p).open.load(std::memory_order_acquire) == 2;
    if (!closed && !gone(c_.pidfds ? c_.pidfds[p] : -1)) continue;
    if (dead_ == p) {
      fail(c_, closed ? kClosed : kDied, p, text_, nullptr);
      return kFailed;
    }
    dead_ = p;  // one more pass
    return kOk;
  }
  if (inline_ && c_.interrupted && c_.interrupted()) {
    fail(c_, kInterrupted, c_.rank, text_, nullptr);
    return kFailed;
  }
  if (first != ~0u && now - began_ > c_.timeout_ns) {
    for (std::uint32_t p = 0; p < c_.world; p++) {  // whoever sleeps waits, too: the one to name is awake, elsewhere
      if (p == c_.rank || !missing(f, p) || c_.bell(p).sleeping.load(std::memory_order_relaxed)) continue;
      first = p;
      break;
    }
    fail(c_, kTimeout, first, text_, nullptr);
    return kFailed;
  }
  return kOk;
}

// A failure ends a wait only if a pass made after it was seen got nowhere, too: what peers stored before it is complete.
bool Wait::failed() { return failed_ = c_.header().failure.load(std::memory_order_acquire) != 0; }

int Wait::idle_(const void* f, bool (*missing)(const void*, std::uint32_t)) {
  if (failed_) return kFailed;  // and don't sleep first: the bell has been rung for it
  if (turns_++ == 0) dead_ = ~0u;
  // The clock is read once every 16 turns: a turn is one pause and one pass of the caller.
  if (c_.spin_ns != 0 && turns_ % 16 != 0) {
    pause();
    return kOk;
  }
  if (began_ == 0) began_ = looked_ = now_ns();
  if (c_.spin_ns != 0) {
    if (now_ns() - began_ < c_.spin_ns) {
      pause();
      return kOk;
    }
    if (turns_ < (1u << 30)) turns_ = 1u << 30;
  } else if (turns_ < (1u << 30)) {
    turns_ = (1u << 30);
  }
  Doorbell& bell = c_.bell(c_.rank);
  if (!asleep_) {
    if (turns_ < (1u << 30) + kYields) {
      sched_yield();
      failed();
      return kOk;
    }
    if (!mutant(kLateFlag)) bell.sleeping.store(1, std::memory_order_seq_cst);
    asleep_ = true;
  } else {
    if (mutant(kLateFlag)) sched_yield(), bell.sleeping.store(1, std::memory_order_seq_cst);
    const timespec slice{0, kSliceNs};
    futex(&bell.bell, FUTEX_WAIT, bell_, &slice);
  }
  bell_ = bell.bell.load(std::memory_order_seq_cst);
  const std::uint64_t now = now_ns();
  if (failed()) return kOk;
  if (now - looked_ < kSliceNs && now - began_ <= c_.timeout_ns) return kOk;
  looked_ = now;
  return look(f, missing, now);
}

int begin_op(Context& c, std::uint32_t text, bool inline_call) {
  if (in_child(c)) return kForked;
  if (c.state(c.rank).open.load(std::memory_order_relaxed) != 1) return kNotOpen;
  if (c.header().failure.load(std::memory_order_acquire) != 0) return kFailed;
  if (c.unconfirmed && !mutant(kSkipConfirm)) {  // this rank refused its last call and did not wait for the peers then
    Wait wait(c, text, inline_call);
    auto missing = [&](std::uint32_t p) {
      return !reached(c.entry(c.rank, p, c.epoch).epoch.load(std::memory_order_acquire), c.epoch);
    };
    for (std::uint32_t p = 0; p < c.world; p++) {
      if (p == c.rank) continue;
      while (missing(p))
        if (int rc = wait.idle(missing)) return rc;
    }
    c.unconfirmed = false;
  }
  c.epoch++;
  c.ops++;
  return kOk;
}

int await_entries(Context& c, const Request& request, bool inline_call) {
  const std::uint32_t text = request.text;
  const std::uint32_t e = c.epoch;
  auto missing = [&](std::uint32_t p) {
    return !reached(c.entry(c.rank, p, e).epoch.load(std::memory_order_acquire), e);
  };
  if (!mutant(kSkipEntry)) {
    Wait wait(c, text, inline_call);
    std::uint64_t start = 0;
    for (std::uint32_t i = 1; i < c.world; i++) {
      const std::uint32_t p = (c.rank + i) % c.world;
      if (!missing(p)) continue;
      do {
        if (int rc = wait.idle(missing)) return rc;
      } while (missing(p));
      const bool late = wait.was_long();
      if (start == 0) start = wait.began();
      wait.progressed();
      if (!late) continue;
      const std::uint64_t waited = now_ns() - start;  // since this rank was ready: how late that peer was
      PeerStats& s = c.stats[p];
      s.waits++;
      s.waited_ns += waited;
      if (waited > s.longest_ns) s.longest_ns = waited;
    }
  }
  auto agrees = [&](const Entry& entry) {
    return entry.digest == request.digest &&
           (!entry.row_bytes || !request.row_bytes || entry.row_bytes == request.row_bytes);
  };
  bool same = true;
  for (std::uint32_t p = 0; p < c.world; p++) {
    if (p == c.rank) continue;
    const Entry& entry = c.entry(c.rank, p, e);
    if (entry.digest == kPoison) {
      c.last_peer = p;
      std::memcpy(c.refusal, c.refusal_text(p, e), kCauseBytes);
      return kPeerRefused;
    }
    same = same && agrees(entry);
  }
  if (same) return kOk;
  for (std::uint32_t p = 0; p < c.world; p++) {
    if (p == c.rank || agrees(c.entry(c.rank, p, e))) continue;
    char message[kCauseBytes];
    std::snprintf(message, sizeof message, "rank %u called %s; rank %u called %s", c.rank, c.text(c.rank, text), p,
                  c.text(p, c.entry(c.rank, p, e).text));
    fail(c, kMismatch, p, text, message);
    break;
  }
  return kFailed;
}

}  // namespace a2a

using namespace a2a;

static Context* C(a2a_context* c) { return reinterpret_cast<Context*>(c); }

uint32_t a2a_abi(void) { return kAbi; }
size_t a2a_control_bytes(uint32_t world, size_t staging_bytes) { return Geometry(world, staging_bytes).total; }

void a2a_format(void* base, uint32_t world, size_t staging_bytes, uint32_t first_epoch) {
  Context c(0, world, staging_bytes);
  c.base = static_cast<std::uint8_t*>(base);
  Header& h = *new (base) Header();
  h.magic = kMagic;
  h.abi = kAbi;
  h.world = world;
  h.failure.store(0);
  h.ok.store(1);
  for (std::uint32_t to = 0; to < world; to++) {
    c.published(to).store(first_epoch);
    for (std::uint32_t from = 0; from < world; from++) {
      for (std::uint32_t parity = 0; parity < 2; parity++) c.entry(to, from, parity).epoch.store(first_epoch);
      for (int kind = 0; kind < Geometry::kKinds; kind++) c.word(Geometry::Kind(kind), to, from).store(first_epoch);
    }
  }
}

void* a2a_map(int fd, size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return nullptr;
  madvise(p, bytes, MADV_HUGEPAGE);  // a wish: most systems have huge pages off for shared memory
  return p;
}
void a2a_unmap(void* base, size_t bytes) { munmap(base, bytes); }

void a2a_populate(void* base, size_t bytes) {
  if (madvise(base, bytes, 23 /* MADV_POPULATE_WRITE, Linux 5.14 */) == 0) return;
  auto* p = static_cast<volatile std::uint8_t*>(base);
  for (std::size_t i = 0; i < bytes; i += kPage) p[i] = p[i];
}

a2a_context* a2a_attach(void* base, size_t mapped_bytes, uint32_t rank, uint32_t world, size_t staging_bytes,
                        const int* pidfds, uint32_t cores, double spin_us, double timeout_s, int (*interrupted)(void)) {
  const Header& h = *static_cast<Header*>(base);
  if (h.magic != kMagic || h.abi != kAbi || h.world != world || rank >= world) return nullptr;
  void* memory = std::malloc(sizeof(Context));
  if (!memory) return nullptr;
  Context* c = new (memory) Context(rank, world, staging_bytes);
  c->pid = getpid();
  void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page != MAP_FAILED && madvise(page, kPage, 18 /* MADV_WIPEONFORK */) == 0) {
    c->owner = static_cast<std::uint8_t*>(page);
    *c->owner = 1;
  } else if (page != MAP_FAILED) {
    munmap(page, kPage);
  }
  c->base = static_cast<std::uint8_t*>(base);
  c->mapped = mapped_bytes;
  c->cores = cores;
  c->spin_ns = spin_us < 0 ? (world <= cores ? 30'000 : 0) : std::uint64_t(spin_us * 1e3);
  c->interrupted = interrupted;
  c->epoch = c->published(rank).load();
  c->stats = static_cast<PeerStats*>(std::calloc(world, sizeof(PeerStats)));
  c->requests = static_cast<Request*>(std::calloc(kTexts, sizeof(Request)));
  c->scratch = static_cast<std::uint8_t*>(std::malloc(world * 256));
  if (pidfds) {
    c->pidfds = static_cast<int*>(std::malloc(world * sizeof(int)));
    std::memcpy(c->pidfds, pidfds, world * sizeof(int));
  }
  c->stream_bytes = 1 << 20;  // of an op; below, what was copied is soon read from the cache
  a2a_set_timeout(reinterpret_cast<a2a_context*>(c), timeout_s);
  c->queue = queue_create();
  simd();
  c->state(rank).open.store(1, std::memory_order_release);
  return reinterpret_cast<a2a_context*>(c);
}

void a2a_set_timeout(a2a_context* c, double timeout_s) {
  C(c)->timeout_ns = timeout_s > 9e9 ? ~0ull >> 1 : std::uint64_t(timeout_s * 1e9);
}

int a2a_close(a2a_context* h) {
  Context* c = C(h);
  if (in_child(*c) || c->state(c->rank).open.load() != 1) return 1;
  queue_stop(*c);
  c->state(c->rank).open.store(2, std::memory_order_seq_cst);
  for (std::uint32_t r = 0; r < c->world; r++)
    if (r != c->rank && c->bell(r).sleeping.load()) wake(c->bell(r));
  return queue_left(*c);
}

void a2a_destroy(a2a_context* h) {
  Context* c = C(h);
  queue_free(c->queue, !in_child(*c));
  if (c->owner) munmap(c->owner, kPage);
  if (c->mapped) munmap(c->base, c->mapped);
  if (c->pidfds) {
    for (std::uint32_t r = 0; r < c->world; r++)
      if (c->pidfds[r] >= 0) close(c->pidfds[r]);
    std::free(c->pidfds);
  }
  std::free(c->pids);
  std::free(c->stats);
  std::free(c->requests);
  std::free(c->scratch);
  std::free(c->bounce);
  c->~Context();
  std::free(c);
}

int a2a_add_segment(a2a_context* h, void* base, size_t stride) {
  Context* c = C(h);
  std::uint32_t n = c->num_segments.load();
  for (std::uint32_t i = 0; i < n; i++)
    if (!c->segments[i].base) {
      c->segments[i] = {static_cast<std::uint8_t*>(base), stride};
      return int(i);
    }
  if (n == kMaxSegments) return -1;
  c->segments[n] = {static_cast<std::uint8_t*>(base), stride};
  c->num_segments.store(n + 1, std::memory_order_release);
  return int(n);
}

int a2a_read(int pid, uint64_t from, void* to, size_t bytes) {
  const iovec local{to, bytes}, remote{reinterpret_cast<void*>(from), bytes};
  const ssize_t n = syscall(SYS_process_vm_readv, pid, &local, 1ul, &remote, 1ul, 0ul);
  return n == ssize_t(bytes) ? 0 : n < 0 ? errno : EFAULT;
}

void a2a_enable_reads(a2a_context* h, const int* pids) {
  Context* c = C(h);
  std::free(c->pids);
  c->pids = nullptr;
  if (!pids) return;
  c->pids = static_cast<int*>(std::malloc(c->world * sizeof(int)));
  if (!c->bounce) c->bounce = static_cast<std::uint8_t*>(std::malloc(kBounce));
  std::memcpy(c->pids, pids, c->world * sizeof(int));
}

uint64_t a2a_failure(a2a_context* c) { return C(c)->header().failure.load(std::memory_order_acquire); }
const char* a2a_cause_text(a2a_context* c, uint32_t rank) { return C(c)->cause_text(rank); }
const char* a2a_request_text(a2a_context* c, uint32_t rank, uint32_t text) { return C(c)->text(rank, text); }
void a2a_fail(a2a_context* c, uint32_t cause, uint32_t peer, const char* message) {
  fail(*C(c), Cause(cause), peer, 0, message);
}
uint32_t a2a_last_peer(a2a_context* c) { return C(c)->last_peer; }
const char* a2a_refusal(a2a_context* c) { return C(c)->refusal; }
uint32_t a2a_epoch(a2a_context* c) { return C(c)->epoch; }
uint32_t a2a_peer_epoch(a2a_context* h, uint32_t peer) {
  Context& c = *C(h);
  const std::uint32_t a = c.entry(c.rank, peer, 0).epoch.load(), b = c.entry(c.rank, peer, 1).epoch.load();
  return reached(a, b) ? a : b;
}
uint32_t* a2a_ok_word(a2a_context* c) { return reinterpret_cast<uint32_t*>(&C(c)->header().ok); }

void a2a_stats(a2a_context* h, uint64_t* per_peer, uint64_t* totals) {
  Context& c = *C(h);
  std::memcpy(per_peer, c.stats, c.world * sizeof(PeerStats));
  const uint64_t t[6] = {c.ops, c.bytes_eager, c.bytes_pushed, c.bytes_pulled, c.bytes_read, c.bytes_staged};
  std::memcpy(totals, t, sizeof t);
}

int a2a_request(a2a_context* h, uint64_t digest, uint64_t row_bytes, const char* text) {
  Context& c = *C(h);
  const std::uint32_t index = c.num_requests++ % kTexts;
  c.requests[index] = {digest, row_bytes, index};
  std::strncpy(c.text(c.rank, index), text, kTextBytes - 1);
  c.text(c.rank, index)[kTextBytes - 1] = 0;
  return int(index);
}
