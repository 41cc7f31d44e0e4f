// The least that an exchange between two ranks of this machine takes: what it cannot do without, and nothing else. Compiled by
// bounds.py, called by bounds_ranks.py; the copies are the library's own (csrc/cpu/simd_copy.h) and libc's.
//
// Both ranks call the same function at the same time. It moves a send buffer of two halves, one for each rank, tells the peer, and
// returns once the peer has told, too. There is no request to agree on, no failure, no deadline, and nobody asks
// whether the peer's buffer is free: each of these would only add to it.
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "../csrc/cpu/a2a.h"
#include "../csrc/cpu/simd_copy.h"

namespace {

typedef std::uint8_t u8;
typedef void (*Copy)(u8* out, const u8* in, std::size_t bytes);
constexpr std::size_t kSlot = 256 << 10, kSlots = 4;  // of a ring in shared memory; also what is read at once

void libc_copy(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
void line_by_line(u8* out, const u8* in, std::size_t bytes) {
  a2a::A2A_ISA::copy_row_stream(out, in, bytes);
  a2a::A2A_ISA::fence();
}
constexpr Copy kCopies[] = {libc_copy, a2a::A2A_ISA::copy_stream, line_by_line};

// One cache line each, in shared memory; each is written by one rank.
struct Words {
  alignas(64) std::atomic<std::uint32_t> done, produced, consumed;
};

void tell(std::atomic<std::uint32_t>& word, std::uint32_t value) { word.store(value, std::memory_order_release); }

void await(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  while (std::int32_t(word.load(std::memory_order_acquire) - value) < 0) __builtin_ia32_pause();
}

}  // namespace

struct Exchange {  // as bounds.py fills it in
  Words *mine, *theirs;
  u8* peer_out;                       // symmetric: the half of the peer's output that this rank fills
  u8 *ring, *peer_ring;               // kSlots slots that the peer writes, or this rank
  u8* bounce;                         // kSlot bytes
  std::uint64_t own_half, peer_half;  // offsets, in input and output alike
  std::uint64_t bytes;                // of a half
  std::uint64_t peer_pid;
  std::uint64_t peer_input;  // read: the half that the peer has for this rank, in its own addresses
  std::uint32_t copy;        // index in kCopies
  std::uint32_t past_cache;
  std::uint32_t epoch, count;  // of `done`; of slots
};

static void finish(Exchange& x) {
  tell(x.mine->done, ++x.epoch);
  await(x.theirs->done, x.epoch);
}

typedef int (*Call)(void* what, void* out, const void* in);

// Many calls in one: what Python takes to call C is measured by itself.
extern "C" int bound_repeat(Call call, void* what, void* out, const void* in, std::uint32_t times) {
  for (std::uint32_t i = 0; i < times; i++)
    if (int error = call(what, out, in)) return error;
  return 0;
}

extern "C" int bound_nothing(void*, void*, const void*) { return 0; }

// Nothing moves: two processes exchange a cache line each.
extern "C" int bound_flag(Exchange* x, void*, const void*) {
  finish(*x);
  return 0;
}

// Symmetric tensors: one copy of each half, this rank's own into `out`, the other into the peer's.
extern "C" int bound_copy(Exchange* x, void* out, const void* in) {
  const u8* from = static_cast<const u8*>(in);
  kCopies[x->copy](x->peer_out, from + x->peer_half, x->bytes);
  kCopies[x->copy](static_cast<u8*>(out) + x->own_half, from + x->own_half, x->bytes);
  finish(*x);
  return 0;
}

// The same, the own half while the peer's travels.
extern "C" int bound_push(Exchange* x, void* out, const void* in) {
  const u8* from = static_cast<const u8*>(in);
  kCopies[x->copy](x->peer_out, from + x->peer_half, x->bytes);
  tell(x->mine->done, ++x->epoch);
  kCopies[x->copy](static_cast<u8*>(out) + x->own_half, from + x->own_half, x->bytes);
  await(x->theirs->done, x->epoch);
  return 0;
}

// Ordinary tensors, two copies: the remote half by way of shared memory in one piece, of which there are two, used in turn. A rank
// that has told of its call e + 1 is done with e, so the piece is free without another word.
extern "C" int bound_slot(Exchange* x, void* out, const void* in) {
  const u8* from = static_cast<const u8*>(in);
  const std::size_t place = (++x->epoch & 1) * (kSlots / 2 * kSlot);
  kCopies[x->copy](x->peer_ring + place, from + x->peer_half, x->bytes);
  tell(x->mine->done, x->epoch);
  kCopies[x->copy](static_cast<u8*>(out) + x->own_half, from + x->own_half, x->bytes);
  await(x->theirs->done, x->epoch);
  kCopies[x->copy](static_cast<u8*>(out) + x->peer_half, x->ring + place, x->bytes);
  return 0;
}

// Ordinary tensors, two copies: the remote half through a ring in shared memory that both ranks fill and empty in turn. What
// has been taken out of the ring needs no further word.
extern "C" int bound_staged(Exchange* x, void* out, const void* in) {
  const u8* from = static_cast<const u8*>(in);
  u8* to = static_cast<u8*>(out);
  std::uint64_t sent = 0, received = 0;
  std::uint32_t produced = x->count, consumed = x->count;
  while (received < x->bytes || sent < x->bytes) {
    while (sent < x->bytes && produced - x->theirs->consumed.load(std::memory_order_acquire) < kSlots) {
      const std::uint64_t n = x->bytes - sent < kSlot ? x->bytes - sent : kSlot;
      a2a::A2A_ISA::copy_fetch(x->peer_ring + produced % kSlots * kSlot, from + x->peer_half + sent, n);
      tell(x->mine->produced, ++produced);
      sent += n;
      if (std::int32_t(x->theirs->produced.load(std::memory_order_relaxed) - consumed) > 0) break;
    }
    if (received == x->bytes || std::int32_t(x->theirs->produced.load(std::memory_order_acquire) - consumed) <= 0)
      continue;
    const std::uint64_t n = x->bytes - received < kSlot ? x->bytes - received : kSlot;
    kCopies[x->copy](to + x->peer_half + received, x->ring + consumed % kSlots * kSlot, n);
    tell(x->mine->consumed, ++consumed);
    received += n;
  }
  x->count = produced;
  kCopies[x->copy](to + x->own_half, from + x->own_half, x->bytes);
  return 0;
}

// Ordinary tensors, one copy: the system reads the peer's half (process_vm_readv), at once or, past the cache, by way of a small
// buffer that stays in it.
extern "C" int bound_read(Exchange* x, void* out, const void* in) {
  const u8* from = static_cast<const u8*>(in);
  u8* to = static_cast<u8*>(out);
  const std::size_t step = x->past_cache ? kSlot : x->bytes;
  for (std::size_t at = 0; at < x->bytes; at += step) {
    const std::size_t n = x->bytes - at < step ? x->bytes - at : step;
    u8* target = to + x->peer_half + at;
    const iovec local{x->past_cache ? x->bounce : target, n}, remote{reinterpret_cast<void*>(x->peer_input + at), n};
    if (syscall(SYS_process_vm_readv, pid_t(x->peer_pid), &local, 1ul, &remote, 1ul, 0ul) != ssize_t(n)) return 1;
    if (x->past_cache) a2a::A2A_ISA::copy_stream(target, x->bounce, n);
  }
  kCopies[x->copy](to + x->own_half, from + x->own_half, x->bytes);
  finish(*x);
  return 0;
}

// The same, and then a pass over the output, as whoever asked for the exchange makes: what was stored past the cache comes
// back from memory there.
extern "C" int bound_read_used(Exchange* x, void* out, const void* in) {
  if (int error = bound_read(x, out, in)) return error;
  static volatile std::uint64_t sink;
  const std::uint64_t* words = static_cast<const std::uint64_t*>(out);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < x->bytes * 2 / sizeof *words; i++) sum += words[i];
  sink = sum;
  return 0;
}

// The least that CPython takes to bring two tensors to C and wait there without the GIL: no foreign-function layer, nothing looked
// up in Python, nothing checked.
static a2a_python python;

struct Least {  // what a function is bound to
  Call call;
  void* what;
};

static void* least(void* capsule, void* const* tensors, std::ptrdiff_t) {
  struct {
    void* data;
    std::int32_t device_type, device_id, ndim;
    std::uint32_t dtype;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
  } out, in;  // DLTensor
  const Least* bound = static_cast<const Least*>(python.pointer_of(capsule, "bound"));
  if (python.describe(tensors[0], &out) || python.describe(tensors[1], &in)) return nullptr;
  void* thread = python.release_gil();
  const int result = bound->call(bound->what, out.data, in.data);
  python.take_gil(thread);
  return python.integer(result);
}

// A function of Python's that calls `bound`, which stays the caller's, with the memory of two tensors.
extern "C" void* bound_function(const a2a_python* functions, Least* bound) {
  static const struct {
    const char* name;
    void* (*function)(void*, void* const*, std::ptrdiff_t);
    int flags;
    const char* doc;
  } definition = {"least", least, 0x80, nullptr};  // PyMethodDef, METH_FASTCALL
  python = *functions;
  void* capsule = python.new_capsule(bound, "bound", nullptr);
  void* function = python.new_function(&definition, capsule, nullptr);
  python.forget(capsule);
  return function;
}
