// all_to_all_pairwise: every rank exchanges a piece with every peer; each pair takes the shortest way it has.
//   out[p] of rank r = in[r] of rank p        bytes; any sizes, 0 too
// Ways     eager   at most eager_bytes: the data lies in the pair's eager slot before the entry is posted; one signal in all
//          push    the receiver's memory is symmetric: the sender stores into it, then signals          one copy
//          pull    else, the sender's is: the receiver loads from it, then signals                       one copy
//          read    the same from ordinary memory, through the kernel, where ranks may read each other's    one copy
//          staged  none of these: through a ring of slots, the copies of both sides overlapped                 two copies
// Cost     1 step (eager) or 2; bytes written once a peer, plus once more where eager or staged
// VISIBLE  eager:  S stores the slot, then entry.epoch (seq_cst); R loads epoch (acquire), then the slot.
//          push:   S sees R's entry (R's out is free, its readers are done), stores into out, then push_done; R loads
//                  push_done (acquire), then returns to its caller, who reads out.
//          pull, read: S's caller wrote in before the entry; R sees the entry, then loads in.
//          staged: S stores slot n, then produced = n + 1; R loads produced (acquire), then the slot.
//          Stores past the cache are weakly ordered: copy_stream ends with a store fence, before the signal.
// REUSE    eager slots and entries: two, by parity; S posts epoch e + 2 after it saw R's entry e + 1, which R posts after it is
//          done with e. in (pull, read): S returns after pull_done. Ring slot n: S waits for consumed > n - slots, which R stores
//          after its last load. out (push): R's caller may overwrite it after R returned, i.e. after push_done.
// PROGRESS nobody waits inside a copy: each pass tries every peer, and only a pass in which nothing moved idles. The entry is
//          posted before anything is waited for. Ring space is freed by R's passes, which need nothing of S but data.
// FAILURE  kFailed: the record says why. out is undefined, rings may hold half an op: the context is not used again.
#include <cstdio>
#include <cstring>

#include "a2a.h"
#include "queue.h"
#include "signal.h"
#include "simd.h"

namespace a2a {
namespace {

// Bytes that one push or pull moves before the rings are served again, and where there are none to serve.
constexpr std::size_t kStep = 512 << 10, kLongStep = 16 << 20;
constexpr std::size_t kGapStep = 32 << 10;  // of the own piece, while peers have not come
// Larger pieces are staged: both sides then copy at once, the target's side past the cache.
constexpr std::uint64_t kReadMost = 4 << 20;
constexpr std::uint64_t kPastCache = 2 << 20;  // the least that is read, or copied at home, past the cache

enum Way : std::uint8_t { kDone, kEager, kPush, kPull, kStaged };

struct PeerState {
  std::uint64_t sent, received;
  std::uint8_t* remote_out;       // push: where to store
  const std::uint8_t* remote_in;  // pull: where to load
  std::uint64_t plain_in;         // read: where, in the peer's own addresses
  Way send, recv;
};

// Small pieces are not worth a way past the cache.
void move(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes, bool stream) {
  if (stream && bytes >= 4096)
    simd().copy_stream(out, in, bytes);
  else if (bytes)
    std::memcpy(out, in, bytes);
}

struct Exchange {
  Context& c;
  const Pair* pairs;
  PeerState* peers;
  std::uint32_t e, text;
  bool stream;
  std::uint32_t left = 0;  // directions that are not kDone
  std::size_t step = kLongStep;
  bool broken = false;  // somebody failed while this rank was reading

  // The kernel's own copy fetches every line of its target before it overwrites it. Large pieces therefore go through a
  // small buffer that stays in the cache, and past the cache from there.
  int read(std::uint32_t p, std::uint64_t from, std::uint8_t* to, std::size_t bytes, bool past_cache) {
    if (!past_cache) return a2a_read(c.pids[p], from, to, bytes);
    for (std::size_t at = 0; at < bytes; at += kBounce) {
      const std::size_t n = bytes - at < kBounce ? bytes - at : kBounce;
      if (int error = a2a_read(c.pids[p], from + at, c.bounce, n)) return error;
      move(to + at, c.bounce, n, true);
    }
    return 0;
  }

  int check(std::uint32_t p) {
    const Entry& entry = c.entry(c.rank, p, e);
    if (entry.send_bytes == pairs[p].recv_bytes && entry.recv_bytes == pairs[p].send_bytes) return kOk;
    const bool receiving = entry.send_bytes != pairs[p].recv_bytes;
    char message[kCauseBytes];
    std::snprintf(message, sizeof message,
                  "split sizes disagree: rank %u sends %llu bytes to rank %u, which expects %llu (rank %u called %s; "
                  "rank %u called %s)",
                  receiving ? p : c.rank, (unsigned long long)(receiving ? entry.send_bytes : pairs[p].send_bytes),
                  receiving ? c.rank : p, (unsigned long long)(receiving ? pairs[p].recv_bytes : entry.recv_bytes),
                  c.rank, c.text(c.rank, text), p, c.text(p, entry.text));
    fail(c, kSplits, p, text, message);
    return kFailed;
  }

  void choose(std::uint32_t p) {
    const Entry& entry = c.entry(c.rank, p, e);
    const Pair& pair = pairs[p];
    PeerState& s = peers[p];
    auto way = [&](std::uint64_t bytes, std::uint64_t out, std::uint64_t in) {
      return bytes == 0 ? kDone : bytes <= c.geo.eager_bytes ? kEager : out ? kPush : in ? kPull : kStaged;
    };
    const Entry& mine = c.entry(p, c.rank, e);
    s = PeerState{};
    s.send = way(pair.send_bytes, entry.out_address, mine.in_address);
    s.recv = way(pair.recv_bytes, mine.out_address, entry.in_address);
    if (s.send == kPush) s.remote_out = c.at(p, entry.out_address);
    if (s.recv == kPull && Context::is_plain(entry.in_address))
      s.plain_in = entry.in_address;
    else if (s.recv == kPull)
      s.remote_in = c.at(p, entry.in_address);
    if (s.send == kEager) s.send = kDone;
    left += (s.send != kDone) + (s.recv != kDone);
    if (s.send == kStaged || s.recv == kStaged) step = kStep;
  }

  bool finish(Way& way) {
    way = kDone;
    left--;
    return true;
  }

  bool send(std::uint32_t p) {
    PeerState& s = peers[p];
    const Pair& pair = pairs[p];
    if (s.send == kPush) {
      const std::size_t n = std::size_t(pair.send_bytes - s.sent < step ? pair.send_bytes - s.sent : step);
      if (mutant(kEarlySignal) && s.sent == 0) signal(c, p, c.word(Geometry::kPushDone, p, c.rank), e);
      move(s.remote_out + s.sent, pair.in + s.sent, n, stream);
      s.sent += n;
      if (s.sent < pair.send_bytes) return true;
      c.bytes_pushed += pair.send_bytes;
      if (!mutant(kEarlySignal)) signal(c, p, c.word(Geometry::kPushDone, p, c.rank), e);
      return finish(s.send);
    }
    if (s.send == kPull) {
      if (!mutant(kSkipPullDone) && c.word(Geometry::kPullDone, c.rank, p).load(std::memory_order_acquire) != e)
        return false;
      return finish(s.send);
    }
    auto& produced = c.word(Geometry::kProduced, p, c.rank);  // only this rank writes it
    std::uint32_t n = produced.load(std::memory_order_relaxed);
    bool moved = false;
    while (s.sent < pair.send_bytes) {
      const std::uint32_t consumed = c.word(Geometry::kConsumed, c.rank, p).load(std::memory_order_acquire);
      if (!mutant(kIgnoreRingSpace) && reached(n, consumed + c.geo.ring_slots)) return moved;
      const std::size_t bytes =
          std::size_t(pair.send_bytes - s.sent < c.geo.slot_bytes ? pair.send_bytes - s.sent : c.geo.slot_bytes);
      if (stream)
        simd().copy_fetch(c.ring(p, c.rank, n), pair.in + s.sent, bytes);
      else
        std::memcpy(c.ring(p, c.rank, n), pair.in + s.sent, bytes);
      signal(c, p, produced, ++n);
      s.sent += bytes;
      moved = true;
      if (s.recv != kDone) break;  // serve the other direction between slots
    }
    if (s.sent < pair.send_bytes) return moved;
    c.bytes_staged += pair.send_bytes;
    return finish(s.send);
  }

  bool recv(std::uint32_t p) {
    PeerState& s = peers[p];
    const Pair& pair = pairs[p];
    if (s.recv == kEager) {
      std::memcpy(pair.out, c.eager(c.rank, p, e), pair.recv_bytes);
      c.bytes_eager += pair.recv_bytes;
      return finish(s.recv);
    }
    if (s.recv == kPush) {
      if (!mutant(kSkipPushDone) && c.word(Geometry::kPushDone, c.rank, p).load(std::memory_order_acquire) != e)
        return false;
      return finish(s.recv);
    }
    if (s.recv == kPull) {
      const std::size_t n = std::size_t(pair.recv_bytes - s.received < step ? pair.recv_bytes - s.received : step);
      if (!s.plain_in) {
        move(pair.out + s.received, s.remote_in + s.received, n, stream);
      } else if (read(p, s.plain_in + s.received, pair.out + s.received, n, stream && pair.recv_bytes >= kPastCache)) {
        fail(c, kUnreadable, p, text, nullptr);  // it waits for this rank, so its memory can only be gone with it
        return false;
      }
      s.received += n;
      if (s.received < pair.recv_bytes) return true;
      // A peer that has failed may have gone on and changed what was being read. It records the failure before it does.
      std::atomic_thread_fence(std::memory_order_acquire);
      if (!mutant(kTrustTorn) && c.header().failure.load(std::memory_order_relaxed) != 0) return !(broken = true);
      (s.plain_in ? c.bytes_read : c.bytes_pulled) += pair.recv_bytes;
      signal(c, p, c.word(Geometry::kPullDone, p, c.rank), e);
      return finish(s.recv);
    }
    auto& consumed = c.word(Geometry::kConsumed, p, c.rank);  // only this rank writes it
    std::uint32_t n = consumed.load(std::memory_order_relaxed);
    if (reached(n, c.word(Geometry::kProduced, c.rank, p).load(std::memory_order_acquire))) return false;
    const std::size_t bytes =
        std::size_t(pair.recv_bytes - s.received < c.geo.slot_bytes ? pair.recv_bytes - s.received : c.geo.slot_bytes);
    if (mutant(kEarlyConsume)) signal(c, p, consumed, n + 1);
    move(pair.out + s.received, c.ring(c.rank, p, n), bytes, stream);
    if (!mutant(kEarlyConsume)) signal(c, p, consumed, n + 1);
    s.received += bytes;
    if (s.received < pair.recv_bytes) return true;
    return finish(s.recv);
  }
};

}  // namespace

int all_to_all_pairwise(Context& c, const Request& request, const Pair* pairs, bool inline_call) {
  if (int rc = begin_op(c, request.text, inline_call)) return rc;
  const std::uint32_t e = c.epoch, me = c.rank, P = c.world;
  const std::uint32_t text = request.text;
  std::uint64_t total = 0;
  std::int64_t balance = 0;
  for (std::uint32_t p = 0; p < P; p++) {
    total += pairs[p].send_bytes + pairs[p].recv_bytes;
    balance += std::int64_t(pairs[p].send_bytes) - std::int64_t(pairs[p].recv_bytes);
  }
  for (std::uint32_t i = 1; i < P; i++) {
    const std::uint32_t p = (me + i) % P;
    const Pair& pair = pairs[p];
    Entry& entry = c.entry(p, me, e);
    entry.digest = request.digest;
    entry.row_bytes = request.row_bytes;
    entry.balance = balance;
    entry.send_bytes = pair.send_bytes;
    entry.recv_bytes = pair.recv_bytes;
    entry.in_address = pair.send_bytes > c.geo.eager_bytes ? c.address_of(pair.in, pair.send_bytes) : 0;
    if (!entry.in_address && c.pids && pair.send_bytes > c.geo.eager_bytes && pair.send_bytes <= kReadMost)
      entry.in_address = reinterpret_cast<std::uint64_t>(pair.in);
    entry.out_address = pair.recv_bytes > c.geo.eager_bytes ? c.address_of(pair.out, pair.recv_bytes) : 0;
    entry.text = text;
    if (pair.send_bytes && pair.send_bytes <= c.geo.eager_bytes)
      std::memcpy(c.eager(p, me, e), pair.in, pair.send_bytes);
    post_entry(c, p, e);
  }
  const bool stream = total / 2 >= c.stream_bytes;
  const Pair& self = pairs[me];
  std::uint64_t copied = 0;
  if (self.send_bytes != self.recv_bytes || self.in == self.out)
    copied = self.send_bytes;                                            // checked by the caller; nothing to do
  if (total <= 2 * c.geo.eager_bytes * P && copied < self.send_bytes) {  // while the peers' entries travel
    move(self.out, self.in, self.send_bytes, stream);
    copied = self.send_bytes;
  }
  auto all_came = [&] {
    for (std::uint32_t p = 0; p < P; p++)
      if (p != me && !reached(c.entry(me, p, e).epoch.load(std::memory_order_relaxed), e)) return false;
    return true;
  };
  while (copied < self.send_bytes && !all_came()) {  // the own piece fills the gaps, this one first
    const std::uint64_t n = self.send_bytes - copied < kGapStep ? self.send_bytes - copied : kGapStep;
    move(self.out + copied, self.in + copied, n, stream && self.send_bytes >= kPastCache);
    copied += n;
  }
  if (int rc = await_entries(c, request, inline_call)) return rc;

  Exchange x{c, pairs, reinterpret_cast<PeerState*>(c.scratch), e, text, stream};
  static_assert(sizeof(PeerState) <= 256, "scratch");
  for (std::uint32_t p = 0; p < P; p++) {
    if (p != me && x.check(p)) return kFailed;
    if (p != me) balance += c.entry(me, p, e).balance;
  }
  if (balance != 0) {  // two other ranks disagree with each other; they are saying so
    Wait others(c, text, inline_call);
    for (;;)
      if (int rc = others.idle([](std::uint32_t) { return true; })) return rc;
  }
  for (std::uint32_t p = 0; p < P; p++)
    if (p != me) x.choose(p);

  Wait wait(c, text, inline_call);
  auto missing = [&](std::uint32_t p) { return p != me && (x.peers[p].send != kDone || x.peers[p].recv != kDone); };
  while (x.left) {
    bool moved = false;
    for (std::uint32_t i = 1; i < P; i++) {
      const std::uint32_t to = (me + i) % P,
                          from = (me + P - i) % P;  // destinations rotated: no rank is everybody's first
      if (x.peers[to].send != kDone) moved |= x.send(to);
      if (x.peers[from].recv != kDone) moved |= x.recv(from);
    }
    if (!moved && copied < self.send_bytes) {
      const std::uint64_t most = x.step == kStep ? kStep / 2 : kLongStep;
      const std::uint64_t n = self.send_bytes - copied < most ? self.send_bytes - copied : most;
      move(self.out + copied, self.in + copied, n, stream && self.send_bytes >= kPastCache);
      copied += n;
      continue;
    }
    if (x.broken) return kFailed;
    if (moved)
      wait.progressed();
    else if (int rc = wait.idle(missing))
      return rc;
  }
  if (copied < self.send_bytes)
    move(self.out + copied, self.in + copied, self.send_bytes - copied, stream && self.send_bytes >= kPastCache);
  return kOk;
}

// The rank can't make its own call (bad arguments): it still takes its place in the order of collectives, with an entry that
// says why. It does not wait for its peers here; begin_op of its next call does.
int refuse(Context& c, const Request& request, const char* why, bool inline_call) {
  if (int rc = begin_op(c, request.text, inline_call)) return rc;
  char* text = c.refusal_text(c.rank, c.epoch);
  std::strncpy(text, why, kCauseBytes - 1);
  text[kCauseBytes - 1] = 0;
  for (std::uint32_t i = 1; i < c.world; i++) {
    const std::uint32_t p = (c.rank + i) % c.world;
    Entry& entry = c.entry(p, c.rank, c.epoch);
    entry.digest = kPoison;
    entry.text = request.text;
    post_entry(c, p, c.epoch);
  }
  c.unconfirmed = true;
  return kOk;
}

}  // namespace a2a

using namespace a2a;

namespace {
struct Locked {
  Context& c;
  explicit Locked(Context& c_) : c(c_) { lock(c, true); }
  ~Locked() { unlock(c); }
};
}  // namespace

int a2a_refuse(a2a_context* h, uint32_t request, const char* why) {
  Context& c = *reinterpret_cast<Context*>(h);
  Locked locked(c);
  return refuse(c, c.requests[request % kTexts], why, true);
}

int a2a_all_to_all_even(a2a_context* h, uint32_t request, void* out, const void* in, size_t bytes) {
  Context& c = *reinterpret_cast<Context*>(h);
  Locked locked(c);
  Pair* pairs = static_cast<Pair*>(__builtin_alloca(c.world * sizeof(Pair)));
  for (std::uint32_t p = 0; p < c.world; p++)
    pairs[p] = {static_cast<const std::uint8_t*>(in) + p * bytes, static_cast<std::uint8_t*>(out) + p * bytes, bytes,
                bytes};
  return all_to_all_pairwise(c, c.requests[request % kTexts], pairs, true);
}

int a2a_all_to_all_again(const a2a_even* call, void* out, const void* in) {
  return a2a_all_to_all_even(call->context, uint32_t(call->request), out, in, call->bytes_per_peer);
}

int a2a_all_to_all(a2a_context* h, uint32_t request, void* const* out, const uint64_t* recv_bytes,
                   const void* const* in, const uint64_t* send_bytes) {
  Context& c = *reinterpret_cast<Context*>(h);
  Locked locked(c);
  Pair* pairs = static_cast<Pair*>(__builtin_alloca(c.world * sizeof(Pair)));
  for (std::uint32_t p = 0; p < c.world; p++)
    pairs[p] = {static_cast<const std::uint8_t*>(in[p]), static_cast<std::uint8_t*>(out[p]), send_bytes[p],
                recv_bytes[p]};
  return all_to_all_pairwise(c, c.requests[request % kTexts], pairs, true);
}

int a2a_barrier(a2a_context* h, uint32_t request) { return a2a_all_to_all_even(h, request, nullptr, nullptr, 0); }

// Everybody's `bytes` to everybody, in rank order. For set-up and agreement: small.
int a2a_all_gather_small(a2a_context* h, uint32_t request, void* out, const void* in, size_t bytes) {
  Context& c = *reinterpret_cast<Context*>(h);
  Locked locked(c);
  Pair* pairs = static_cast<Pair*>(__builtin_alloca(c.world * sizeof(Pair)));
  for (std::uint32_t p = 0; p < c.world; p++)
    pairs[p] = {static_cast<const std::uint8_t*>(in), static_cast<std::uint8_t*>(out) + p * bytes, bytes, bytes};
  return all_to_all_pairwise(c, c.requests[request % kTexts], pairs, true);
}
