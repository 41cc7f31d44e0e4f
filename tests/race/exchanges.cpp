// Random all-to-alls of bytes. Each pair's size and each piece's memory is drawn anew, so that all ways of a pair mix; pieces
// start at any address; memory is used again at once, as callers do.
#include <cstring>

#include "harness.h"

namespace race {

constexpr std::uint64_t kDigest = 0x1234567;

struct Exchanges::Exchange {
  std::uint64_t key;
  std::vector<void*> out;
  std::vector<void*> in;  // empty: this rank refuses
  std::vector<std::uint64_t> received, sent;
  std::uint32_t refusers = 0;
  a2a_ticket* ticket = nullptr;
};

namespace {

std::uint64_t piece_key(std::uint64_t key, std::uint32_t from, std::uint32_t to) { return mix(key, from + 1, to + 1); }

// memcpy, for the sanitizers to see: the caller writes its input
void write_piece(std::uint8_t* to, std::size_t bytes, std::uint64_t key) {
  std::vector<std::uint8_t> content(bytes + 1);
  pattern(content.data(), bytes, key);
  if (bytes) std::memcpy(to, content.data(), bytes);
}

std::size_t first_difference(const std::uint8_t* a, const std::uint8_t* b, std::size_t bytes) {
  std::size_t i = 0;
  while (i < bytes && a[i] == b[i]) i++;
  return i;
}

}  // namespace

Exchanges::Exchanges(Rank& rank, Way way, bool async, bool refusals)
    : r_(rank),
      way_(way),
      async_(async),
      refusals_(refusals),
      request_(std::uint32_t(a2a_request(rank.c, kDigest, 0, "exchange of bytes"))) {}

Exchanges::~Exchanges() { drain(); }

// Sizes lie around the thresholds, where ways and slots change.
std::uint64_t Exchanges::draw_size(bool even) {
  const std::uint64_t eager = r_.world.geo.eager_bytes, slot = r_.world.geo.slot_bytes;
  const std::uint32_t kind = r_.plan.below(64);
  const std::uint64_t jitter = r_.plan.below(3);
  if (way_ == Way::kEager || (way_ == Way::kAny && kind < 24)) {
    const std::uint64_t few[4] = {0, jitter, r_.plan.below(std::uint32_t(eager)), eager - jitter};
    return few[kind % 4];
  }
  if (kind == 24 && !even && way_ != Way::kStaged) return (std::uint64_t(512 << 10) << r_.plan.below(3)) - 1 + jitter;
  const std::uint64_t many[5] = {eager + 1 + jitter, slot - 1 + jitter, 4 * slot - 1 + jitter, 9 * slot + 5 * jitter,
                                 eager + 1 + r_.plan.below(std::uint32_t(14 * slot))};
  return many[kind % 5];
}

// Memory for a piece: which kind is this rank's own choice, unless the scenario is about one way.
std::uint8_t* Exchanges::place(std::uint64_t bytes, bool receives) {
  bool symmetric = r_.own.one_in(2);
  if (way_ == Way::kPush) symmetric = receives || symmetric;
  if (way_ == Way::kPull) symmetric = !receives;
  if (way_ == Way::kRead || way_ == Way::kStaged) symmetric = false;
  Arena& arena = !symmetric ? r_.ordinary : r_.own.one_in(2) ? r_.symmetric : r_.other_symmetric;
  return arena.take(bytes);
}

// The next exchange, as `plan` has it; every rank draws it, also one that is going to refuse.
std::unique_ptr<Exchanges::Exchange> Exchanges::draw(bool even) {
  const std::uint32_t P = r_.ranks, me = r_.rank;
  auto x = std::make_unique<Exchange>();
  x->key = r_.plan.next();
  x->sent.resize(P);
  x->received.resize(P);
  const std::uint64_t each = draw_size(true);
  for (std::uint32_t from = 0; from < P; from++)
    for (std::uint32_t to = 0; to < P; to++) {
      const std::uint64_t bytes = even ? each : draw_size(false);
      if (from == me) x->sent[to] = bytes;
      if (to == me) x->received[from] = bytes;
    }
  return x;
}

void Exchanges::prepare(Exchange& x) {
  const std::uint32_t P = r_.ranks, me = r_.rank;
  x.out.resize(P);
  x.in.resize(P);
  if (under_way_.empty() && !r_.own.one_in(3)) {
    r_.symmetric.reset();
    r_.other_symmetric.reset();
    r_.ordinary.reset();
  }
  for (int attempt = 0;; attempt++) {  // a second time with empty arenas, if they were full
    bool fits = true;
    for (std::uint32_t p = 0; p < P && fits; p++) {
      std::uint8_t* in = place(x.sent[p], false);
      x.out[p] = place(x.received[p], true);
      x.in[p] = in;
      fits = in && x.out[p];
    }
    if (fits) break;
    if (attempt == 3) wrong("rank %u: pieces fit no arena", me);
    drain();
    r_.symmetric.reset();
    r_.other_symmetric.reset();
    r_.ordinary.reset();
  }
  for (std::uint32_t p = 0; p < P; p++)
    write_piece(static_cast<std::uint8_t*>(x.in[p]), x.sent[p], piece_key(x.key, me, p));
}

void Exchanges::check(const Exchange& x) const {
  std::vector<std::uint8_t> content;
  for (std::uint32_t p = 0; p < r_.ranks; p++) {
    const std::size_t bytes = x.received[p];
    content.resize(bytes + 1);
    pattern(content.data(), bytes, piece_key(x.key, p, r_.rank));
    auto* out = static_cast<std::uint8_t*>(x.out[p]);
    if (bytes && std::memcmp(out, content.data(), bytes) != 0)
      wrong("rank %u: piece of %zu bytes from rank %u differs from byte %zu on (epoch %u)", r_.rank, bytes, p,
            first_difference(out, content.data(), bytes), a2a_epoch(r_.c));
    if (bytes) std::memset(out, 0xee, bytes);  // the caller may
    if (x.sent[p]) std::memset(x.in[p], 0xdd, x.sent[p]);
  }
}

// What a call must return, given who refused it. Refusers themselves made no call.
void Exchanges::expect_result(int result, std::uint32_t peer, std::uint32_t refusers) const {
  if (refusers == 0) return r_.expect("the result", result, a2a::kOk);
  r_.expect("the result of a refused call", result, a2a::kPeerRefused);
  std::uint32_t first = 0;
  while (!(refusers >> first & 1)) first++;
  r_.expect("who refused", peer, first);
}

// The same from one matrix into another.
int Exchanges::even(const Exchange& x) {
  const std::size_t each = x.sent[0], all = each * r_.ranks;
  Arena& arena = r_.own.one_in(2) ? r_.symmetric : r_.ordinary;
  std::uint8_t *in = arena.take(all), *out = in ? arena.take(all) : nullptr;
  if (!out) return a2a_all_to_all(r_.c, request_, x.out.data(), x.received.data(), x.in.data(), x.sent.data());
  for (std::uint32_t p = 0; p < r_.ranks; p++)
    if (each) std::memcpy(in + p * each, x.in[p], each);
  const a2a_even again = {r_.c, request_, each};
  const int result =
      r_.own.one_in(2) ? a2a_all_to_all_again(&again, out, in) : a2a_all_to_all_even(r_.c, request_, out, in, each);
  for (std::uint32_t p = 0; p < r_.ranks; p++)
    if (each) std::memcpy(x.out[p], out + p * each, each);
  if (all) std::memset(in, 0xdd, all);
  return result;
}

std::string Exchanges::reason(const Exchange& x, std::uint32_t rank) {
  return "rank " + std::to_string(rank) + " does not like exchange " + std::to_string(x.key) +
         std::string(x.key % 200, '!');
}

void Exchanges::call(const Exchange& x, bool alike) {
  const int result = alike && way_ == Way::kAny
                         ? even(x)
                         : a2a_all_to_all(r_.c, request_, x.out.data(), x.received.data(), x.in.data(), x.sent.data());
  expect_result(result, a2a_last_peer(r_.c), x.refusers);
  if (result == a2a::kOk) return check(x);
  expect_reason(x, a2a_last_peer(r_.c), a2a_refusal(r_.c));
}

void Exchanges::expect_reason(const Exchange& x, std::uint32_t refuser, const char* told) const {
  const std::string why = reason(x, refuser);
  if (why != told) wrong("rank %u: the refusal says '%s', not '%s'", r_.rank, told, why.c_str());
}

void Exchanges::finish_first() {
  const Exchange& x = *under_way_.front();
  if (under_way_.size() > 1 && !x.in.empty() && !x.refusers && r_.own.one_in(4)) {  // its ticket goes before it is done
    a2a_release(x.ticket);
    const std::unique_ptr<Exchange> forgotten = std::move(under_way_.front());
    under_way_.erase(under_way_.begin());
    finish_first();
    return check(*forgotten);
  }
  if (r_.own.one_in(2))
    while (a2a_test(x.ticket) == a2a::kPending) pause_a_moment(r_.own);
  int result;
  while ((result = a2a_wait(x.ticket, 0.05)) == a2a::kPending) {
  }
  if (x.in.empty()) {
    r_.expect("the result of this rank's refusal", result, a2a::kOk);
  } else {
    expect_result(result, result == a2a::kPeerRefused ? a2a_ticket_peer(x.ticket) : 0, x.refusers);
    if (result == a2a::kOk) check(x);
    if (result == a2a::kPeerRefused) expect_reason(x, a2a_ticket_peer(x.ticket), a2a_ticket_refusal(x.ticket));
  }
  a2a_release(x.ticket);
  under_way_.erase(under_way_.begin());
}

void Exchanges::drain() {
  while (!under_way_.empty()) finish_first();
}

void Exchanges::gather() {
  const std::uint64_t key = r_.plan.next();
  const std::size_t bytes = r_.plan.below(std::uint32_t(3 * r_.world.geo.eager_bytes));
  std::vector<std::uint8_t> in(bytes + 1), out(bytes * r_.ranks + 1), content(bytes + 1);
  write_piece(in.data(), bytes, mix(key, r_.rank));
  r_.expect("the result of all_gather_small", a2a_all_gather_small(r_.c, request_, out.data(), in.data(), bytes),
            a2a::kOk);
  for (std::uint32_t p = 0; p < r_.ranks; p++) {
    pattern(content.data(), bytes, mix(key, p));
    if (bytes && std::memcmp(out.data() + p * bytes, content.data(), bytes) != 0)
      wrong("rank %u: all_gather_small from rank %u", r_.rank, p);
  }
}

void Exchanges::step() {
  const std::uint32_t kind = r_.plan.below(16);
  const bool alike = r_.plan.one_in(3), async = async_ && r_.plan.one_in(2);
  pause_a_moment(r_.own);
  if (kind == 0 && way_ == Way::kAny) return gather();
  if (kind == 1 && way_ == Way::kAny)
    return r_.expect("the result of a barrier", a2a_barrier(r_.c, request_), a2a::kOk);
  if (kind == 2) drain();
  if (under_way_.size() >= 6) finish_first();
  std::unique_ptr<Exchange> x = draw(alike);
  if (refusals_ && r_.plan.one_in(3)) x->refusers = 1 + r_.plan.below((1u << r_.ranks) - 1);
  const bool refuses = x->refusers >> r_.rank & 1;
  if (!refuses) prepare(*x);
  if (async) {
    x->ticket = refuses ? a2a_submit_refusal(r_.c, request_, reason(*x, r_.rank).c_str())
                        : a2a_submit(r_.c, request_, x->out.data(), x->received.data(), x->in.data(), x->sent.data());
    under_way_.push_back(std::move(x));
  } else if (refuses) {
    r_.expect("the result of a refusal", a2a_refuse(r_.c, request_, reason(*x, r_.rank).c_str()), a2a::kOk);
  } else {
    call(*x, alike);
  }
}

}  // namespace race
