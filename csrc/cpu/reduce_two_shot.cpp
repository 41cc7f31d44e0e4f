// reduce_two_shot: each rank reduces its share of everybody's input and publishes it; everybody takes the others' shares.
//   all-reduce      share r of out = in_0 op in_1 op ... of share r, for all r      rank order, from the first term
//   reduce-scatter  the first half: rank r keeps its share.    all-gather: the second half, share r is rank r's input, as bytes
//   Sums of bfloat16 and float16 are taken in float32 and rounded once: the same bits on every rank and as one-shot's.
//   With a Norm    shares and units are whole rows. What is published are rows of residual_out, each unit's scales behind them; who
//                  takes them norms them itself: half the bytes of two outputs. They are never stored into a peer's memory.
// Ways     in    symmetric: peers load their share of it; else it goes through the pair rings, unit by unit
//          out   symmetric: peers store their share into it; else it is read from their publication rings
//          Each rank's own kinds of memory decide, which its entry tells everybody: ranks may mix them.
// Cost     3 steps (2 for a half); bytes stored: each share once where out is symmetric, up to twice more where staged
// Buffers  out may be in (all-reduce), or have the rank's own share in common with it
// VISIBLE  ring: S stores the slot, then produced; O loads produced (acquire), then the slot. load: S's caller wrote in before
//          S's entry; O sees the entry, then loads. publication: O stores the slot, then published; R loads published
//          (acquire), then the slot. store: O stores into R's out, then push_done; R loads push_done (acquire), then returns.
// REUSE    ring and publication slots: after the readers' consumed and taken. out of R (store): O saw R's entry, and R's in
//          has nothing there that another rank than O reads. in: R's caller may write it when R returns, i.e. when each O
//          has sent what it made of it (a published share, push_done) or says pull_done. In place, R overwrites share O only
//          with what O made of it.
// PROGRESS nobody waits inside a pass. Taking needs only what is published; reducing needs units of all peers and room for
//          the result, which taking frees; sending to one owner needs room in that one's ring, which its reducing frees.
//          The unit that is furthest behind can always be sent, reduced and taken.
// FAILURE  as in signal.h; out is undefined. What was loaded from a peer that failed meanwhile may be torn, and is not passed on.
#include <cstring>

#include "a2a.h"
#include "norm.h"
#include "publication.h"
#include "queue.h"
#include "signal.h"
#include "simd.h"

namespace a2a {
namespace {

constexpr std::size_t kLeastUnit = 16 << 10;  // below, signals cost more than what they let overlap
// With a core for each rank a unit passes from hand to hand while it lies in the nearest caches: twice as fast as units that
// fill a slot. Ranks that share cores take turns, and each turn should move much.
constexpr std::size_t kHandUnit = 32 << 10;

// Where the shares lie: share p of a whole tensor, or the only one of a tensor that is a share.
struct Shares {
  std::size_t total, each, unit;  // bytes
  Shares(const a2a_reduction& call, const Context& c, std::size_t row_bytes) {
    const std::uint32_t P = c.world;
    const std::size_t most = P <= c.cores && kHandUnit < c.geo.slot_bytes ? kHandUnit : c.geo.slot_bytes;
    const std::size_t bytes = call.count * (call.kind == A2A_ALL_GATHER ? 1 : dtype_bytes(call.dtype));
    each = call.kind == A2A_ALL_REDUCE ? align_up(ceil_div(bytes, P), kLine) : bytes;
    total = call.kind == A2A_ALL_REDUCE ? bytes : bytes * P;
    unit = align_up(each / 4, kPage);
    if (unit < kLeastUnit) unit = kLeastUnit;
    if (unit > most) unit = most;
    if (!row_bytes) return;
    each = ceil_div(total / row_bytes, P) * row_bytes;
    unit = unit < row_bytes ? row_bytes : unit / row_bytes * row_bytes;
  }
  std::size_t at(std::uint32_t p) const { return p * each < total ? p * each : total; }
  std::size_t bytes(std::uint32_t p) const { return total - at(p) < each ? total - at(p) : each; }
  std::uint32_t units(std::uint32_t p) const { return std::uint32_t(ceil_div(bytes(p), unit)); }
  std::size_t unit_bytes(std::uint32_t p, std::uint32_t u) const {
    const std::size_t left = bytes(p) - u * unit;
    return left < unit ? left : unit;
  }
};

struct Peer {
  const std::uint8_t* in;   // its input, if that can be loaded
  std::uint8_t* out;        // its output, if that can be stored to
  std::uint32_t sent;       // units of its share that left this rank
  std::uint32_t received;   // units of its share that arrived here
  bool readable, writable;  // its memory; also of this rank, as peers see it
};

void copy(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes, bool stream) {
  if (stream && bytes >= 4096)
    simd().copy_stream(out, in, bytes);
  else if (bytes && out != in)
    std::memcpy(out, in, bytes);
}

struct TwoShot {
  Context& c;
  const a2a_reduction& call;
  const std::uint8_t* in;
  std::uint8_t* out;
  const Norm* norm;  // or null
  const Shares shares;
  const bool reduces, gathers;
  const std::uint32_t e, me, P;
  Peer* peers;
  const void** terms;
  Publication ring;
  bool stream;  // past the cache: what is large and was not just read, as everything in place was
  bool readers = false, any_readable = false, broken = false, announced = false;
  std::uint32_t reduced = 0;  // units of this rank's share

  std::atomic<std::uint32_t>& word(Geometry::Kind kind, std::uint32_t to, std::uint32_t from) {
    return c.word(kind, to, from);
  }
  std::uint32_t load(Geometry::Kind kind, std::uint32_t to, std::uint32_t from) {
    return word(kind, to, from).load(std::memory_order_acquire);
  }
  std::size_t in_at(std::uint32_t p) const { return reduces ? shares.at(p) : 0; }
  std::size_t out_at(std::uint32_t p) const { return gathers ? shares.at(p) : 0; }

  void choose() {
    for (std::uint32_t p = 0; p < P; p++) {
      const Entry& entry = p == me ? c.entry(me == 0 ? P - 1 : 0, me, e) : c.entry(me, p, e);
      Peer& s = peers[p] = Peer{};
      s.readable = P > 1 && entry.in_address != 0;
      s.writable = P > 1 && entry.out_address != 0;
      if (p == me) continue;
      if (s.readable) s.in = c.at(p, entry.in_address);
      if (s.writable) s.out = c.at(p, entry.out_address);
      readers |= gathers && !s.writable;
      any_readable |= s.readable;
    }
  }

  bool sends(std::uint32_t p) const { return reduces && !peers[me].readable && peers[p].sent < shares.units(p); }
  bool has_room(std::uint32_t p) {
    return mutant(kIgnoreRingSpace) || !reached(word(Geometry::kProduced, p, me).load(std::memory_order_relaxed),
                                                load(Geometry::kConsumed, me, p) + c.geo.ring_slots);
  }
  void send(std::uint32_t p) {
    auto& produced = word(Geometry::kProduced, p, me);  // only this rank writes it
    const std::uint32_t n = produced.load(std::memory_order_relaxed), u = peers[p].sent++;
    const std::size_t bytes = shares.unit_bytes(p, u);
    (stream ? simd().copy_fetch : plain_copy)(c.ring(p, me, n), in + in_at(p) + u * shares.unit, bytes);
    signal(c, p, produced, n + 1);
    c.bytes_staged += bytes;
  }
  static void plain_copy(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
  }

  bool arrived(std::uint32_t p) {
    return !reduces || peers[p].readable ||
           !reached(word(Geometry::kConsumed, p, me).load(std::memory_order_relaxed), load(Geometry::kProduced, me, p));
  }
  bool full_for(std::uint32_t p) const {
    return !mutant(kIgnoreReaders) && gathers && !peers[p].writable && ring.full_for(p);
  }
  // One unit of this rank's share, from every rank's input to everybody who wants it.
  void reduce() {
    const std::uint32_t u = reduced++;
    const std::size_t bytes = shares.unit_bytes(me, u), at = u * shares.unit;
    std::uint8_t* mine = out + out_at(me) + at;
    // Readers wait for the result, this rank does not: it goes to them first, and into the own output from the cache.
    std::uint8_t* first = readers ? ring.slot() : mine;
    if (mutant(kEarlyPublish) && readers) ring.publish();
    if (reduces) {
      for (std::uint32_t p = 0; p < P; p++) {
        if (p == me)
          terms[p] = in + in_at(me) + at;
        else if (peers[p].readable)
          terms[p] = peers[p].in + in_at(me) + at;
        else
          terms[p] = c.ring(me, p, word(Geometry::kConsumed, p, me).load(std::memory_order_relaxed));
      }
      if (mutant(kEarlyConsume)) consume();
      if (norm)
        norm_rows(u, bytes, first);
      else
        simd().reduce(call.dtype, call.reduce, first, terms, P, bytes / dtype_bytes(call.dtype), stream && !gathers);
      if (any_readable) {
        // A peer that has failed may have gone on and changed what was being read. It records the failure before it does.
        std::atomic_thread_fence(std::memory_order_acquire);
        if (!mutant(kTrustTorn) && c.header().failure.load(std::memory_order_relaxed) != 0) {
          broken = true;
          return;
        }
      }
      if (!mutant(kEarlyConsume)) consume();
    } else if (readers) {
      std::memcpy(first, in + at, bytes);
    }
    if (readers && !mutant(kEarlyPublish)) ring.publish();
    if (norm) return;  // every row is where it belongs
    const std::uint8_t* result = reduces ? first : in + at;
    for (std::uint32_t i = 1; i < P; i++) {
      Peer& s = peers[(me + i) % P];
      if (!s.writable) continue;
      copy(s.out + out_at(me) + at, result, bytes, stream);
      c.bytes_pushed += bytes;
    }
    copy(mine, result, bytes, stream && mine != result);
  }
  // Rows of unit u of this rank's share, whose terms are in place; also into the slot.
  void norm_rows(std::uint32_t u, std::size_t bytes, std::uint8_t* slot) {
    const std::size_t start = shares.at(me) + u * shares.unit, row_bytes = norm->row_bytes();
    for (std::size_t at = 0, row = 0; at < bytes; at += row_bytes, row++) {
      const float scale = norm->reduce(terms, at, start + at);
      if (!readers) continue;
      std::memcpy(slot + at, norm->residual_out + start + at, row_bytes);
      std::memcpy(slot + scales_at(bytes) + row * sizeof scale, &scale, sizeof scale);
    }
  }
  void take_rows(const std::uint8_t* from, std::size_t bytes, std::size_t start) {
    const std::size_t row_bytes = norm->row_bytes();
    for (std::size_t at = 0, row = 0; at < bytes; at += row_bytes, row++) {
      float scale;
      std::memcpy(&scale, from + scales_at(bytes) + row * sizeof scale, sizeof scale);
      norm->take(from + at, scale, start + at);
    }
  }
  // In a slot of the publication ring.
  static std::size_t scales_at(std::size_t bytes) { return align_up(bytes, kLine); }
  void consume() {
    for (std::uint32_t i = 1; i < P; i++) {
      const std::uint32_t p = (me + i) % P;
      if (peers[p].readable) continue;
      auto& consumed = word(Geometry::kConsumed, p, me);
      signal(c, p, consumed, consumed.load(std::memory_order_relaxed) + 1);
    }
  }
  // This rank's share is done: nothing more is stored to or loaded from peers' memory.
  void announce() {
    announced = true;
    for (std::uint32_t i = 1; i < P; i++) {
      const std::uint32_t p = (me + i) % P;
      if (peers[p].writable)
        signal(c, p, word(Geometry::kPushDone, p, me), e);
      else if (peers[p].readable)
        signal(c, p, word(Geometry::kPullDone, p, me), e);
    }
  }

  // Whether this rank still waits for what p makes of its share.
  bool awaits(std::uint32_t p) {
    if (peers[me].writable) return !mutant(kSkipPushDone) && load(Geometry::kPushDone, me, p) != e;
    if (gathers && peers[p].received < shares.units(p)) return true;
    return peers[me].readable && !mutant(kSkipPullDone) && load(Geometry::kPullDone, me, p) != e;
  }
  bool receive(std::uint32_t p) {
    Peer& s = peers[p];
    if (peers[me].writable || !gathers || s.received >= shares.units(p)) return false;
    const std::uint8_t* from = ring.next(p);
    if (!from) return false;
    const std::size_t bytes = shares.unit_bytes(p, s.received);
    if (mutant(kEarlyTake)) ring.take(p);
    if (norm)
      take_rows(from, bytes, shares.at(p) + s.received * shares.unit);
    else
      copy(out + out_at(p) + s.received * shares.unit, from, bytes, stream);
    if (!mutant(kEarlyTake)) ring.take(p);
    s.received++;
    return true;
  }
  // What p published for others counts as taken here.
  void skip_published() {
    bool others = false;  // readers among all but p: this rank is none
    for (std::uint32_t p = 0; p < P; p++) {
      others = false;
      for (std::uint32_t q = 0; q < P; q++) others |= q != p && !peers[q].writable;
      if (p != me && others && shares.units(p)) ring.take(p, shares.units(p));
    }
  }

  bool missing(std::uint32_t p) {
    if (p == me) return false;
    return (sends(p) && !has_room(p)) || (reduced < shares.units(me) && (!arrived(p) || full_for(p))) || awaits(p);
  }
  // Try everything once. False: nothing moved; `left` says whether anything is left to do.
  bool pass(bool& left) {
    bool moved = false;
    left = false;
    for (std::uint32_t i = 1; i < P; i++) {
      const std::uint32_t p = (me + i) % P;
      if (sends(p) && has_room(p)) send(p), moved = true;
      left |= sends(p);
    }
    if (reduced < shares.units(me)) {
      bool ready = true;
      for (std::uint32_t p = 0; p < P; p++) ready = ready && (p == me || (arrived(p) && !full_for(p)));
      if (ready) reduce(), moved = true;
      left |= reduced < shares.units(me);
    }
    if (reduced == shares.units(me) && !announced && !broken) announce();
    for (std::uint32_t i = 1; i < P; i++) {
      const std::uint32_t p = (me + P - i) % P;
      moved |= receive(p);
      left |= awaits(p);
    }
    return moved;
  }
};

}  // namespace

std::size_t two_shot_row_bytes(const Context& c) { return c.geo.slot_bytes; }

int reduce_two_shot(Context& c, const Request& request, const a2a_reduction& call, void* out, const void* in,
                    bool inline_call, const Norm* norm) {
  if (int rc = begin_op(c, request.text, inline_call)) return rc;
  const std::uint32_t e = c.epoch, me = c.rank, P = c.world;
  const bool reduces = call.kind != A2A_ALL_GATHER, gathers = call.kind != A2A_REDUCE_SCATTER;
  const Shares shares(call, c, norm ? norm->row_bytes() : 0);
  for (std::uint32_t i = 1; i < P; i++) {
    const std::uint32_t p = (me + i) % P;
    Entry& entry = c.entry(p, me, e);
    entry.digest = request.digest;
    entry.row_bytes = request.row_bytes;
    entry.in_address = reduces ? c.address_of(in, shares.total) : 0;
    entry.out_address = gathers && !norm ? c.address_of(out, shares.total) : 0;
    entry.text = request.text;
    post_entry(c, p, e);
  }
  if (int rc = await_entries(c, request, inline_call)) return rc;

  static_assert(sizeof(Peer) + sizeof(std::uint32_t) <= 256, "scratch");
  auto* peers = reinterpret_cast<Peer*>(c.scratch);
  const void** terms = static_cast<const void**>(__builtin_alloca(P * sizeof(void*)));
  TwoShot x{c,
            call,
            static_cast<const std::uint8_t*>(in),
            static_cast<std::uint8_t*>(out),
            norm,
            shares,
            reduces,
            gathers,
            e,
            me,
            P,
            peers,
            terms,
            Publication(c, c.scratch + P * sizeof(Peer)),
            in != out && shares.total >= 2 * c.stream_bytes};
  x.choose();
  Wait wait(c, request.text, inline_call);
  auto missing = [&](std::uint32_t p) { return x.missing(p); };
  for (bool left = true;;) {
    const bool moved = x.pass(left);
    if (x.broken) return kFailed;
    if (!left) break;
    if (moved)
      wait.progressed();
    else if (int rc = wait.idle(missing))
      return rc;
  }
  if (x.peers[me].writable) x.skip_published();
  return kOk;
}

}  // namespace a2a
