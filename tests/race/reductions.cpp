// Random all-reduces, reduce-scatters and all-gathers of integers, whose sums every rank can compute. The kind of memory is each
// rank's own choice; tensors are used again at once, as callers do.
#include <cstring>

#include "harness.h"

namespace race {

constexpr std::uint64_t kDigest = 0x7654321;
constexpr std::uint32_t kUint8 = 4, kInt32 = 7, kSum = 0;  // of simd.h

struct Reductions::Call {
  std::uint64_t key;
  a2a_reduction what;
  std::size_t in_bytes, out_bytes;
  std::uint8_t *in, *out;
  a2a_ticket* ticket = nullptr;
};

Reductions::Reductions(Rank& rank, bool two_shot, Memory memory, bool async)
    : r_(rank),
      two_shot_(two_shot),
      async_(async),
      memory_(memory),
      request_(std::uint32_t(a2a_request(rank.c, kDigest, 0, "reduction"))) {}

Reductions::~Reductions() { drain(); }

// Bytes of a share: around the one-shot's limit, or none, part of a unit, and more units than rings have slots.
std::size_t Reductions::draw_share(std::uint32_t shares) {
  if (!two_shot_) {
    const std::size_t most = a2a_one_shot_bytes() / shares;
    const std::size_t sizes[4] = {0, 1 + r_.plan.below(64), r_.plan.below(std::uint32_t(most)), most};
    return sizes[r_.plan.below(4)];
  }
  const std::size_t slot = r_.world.geo.slot_bytes;
  const std::size_t sizes[5] = {0, 1 + r_.plan.below(std::uint32_t(slot)), slot, 5 * slot + r_.plan.below(3),
                                r_.plan.below(std::uint32_t(10 * slot))};
  return sizes[r_.plan.below(5)];
}

std::uint8_t* Reductions::place(std::size_t bytes) {
  const bool symmetric = memory_ == Memory::kSymmetric || (memory_ == Memory::kAny && r_.own.one_in(2));
  Arena& arena = !symmetric ? r_.ordinary : r_.own.one_in(2) ? r_.symmetric : r_.other_symmetric;
  std::uint8_t* piece = arena.take(bytes + 1, 4);
  if (!piece) wrong("rank %u: a tensor of %zu bytes fits no arena", r_.rank, bytes);
  return piece;
}

void Reductions::prepare(Call& x) {
  const std::uint32_t kind = r_.plan.below(3), P = r_.ranks;
  const bool in_place = r_.own.one_in(2);
  const std::size_t element = kind != A2A_ALL_GATHER && r_.plan.one_in(2) ? 4 : 1;
  const std::size_t share = draw_share(kind == A2A_REDUCE_SCATTER ? P : 1) / element * element;
  const std::size_t whole = kind == A2A_ALL_REDUCE && !two_shot_
                                ? share
                                : share * P - (kind == A2A_ALL_REDUCE && share ? r_.plan.below(2) * element : 0);
  x.in_bytes = kind == A2A_ALL_GATHER ? share : whole;
  x.out_bytes = kind == A2A_REDUCE_SCATTER ? share : whole;
  x.what = {r_.c, request_, kind, element == 4 ? kInt32 : kUint8, kSum, two_shot_, 0, x.in_bytes / element};
  if (kind == A2A_REDUCE_SCATTER) x.what.count = share / element;
  if (kind == A2A_ALL_REDUCE) {
    x.in = x.out = place(whole);
  } else if (kind == A2A_ALL_GATHER) {
    x.out = place(whole);
    x.in = in_place ? x.out + r_.rank * share : place(share);
  } else {
    x.in = place(whole);
    x.out = in_place ? x.in + r_.rank * share : place(share);
  }
  std::vector<std::uint8_t> content(x.in_bytes + 1);
  pattern(content.data(), x.in_bytes, mix(x.key, r_.rank));
  if (x.in_bytes) std::memcpy(x.in, content.data(), x.in_bytes);
}

void Reductions::check(const Call& x) const {
  const std::uint32_t P = r_.ranks;
  std::vector<std::uint8_t> term(x.in_bytes + 4), wanted(x.out_bytes + 4, 0);
  for (std::uint32_t p = 0; p < P; p++) {
    pattern(term.data(), x.in_bytes, mix(x.key, p));
    if (x.what.kind == A2A_ALL_GATHER) {
      std::memcpy(wanted.data() + p * x.in_bytes, term.data(), x.in_bytes);
      continue;
    }
    const std::uint8_t* mine = term.data() + (x.what.kind == A2A_REDUCE_SCATTER ? r_.rank * x.out_bytes : 0);
    for (std::size_t i = 0; i < x.out_bytes && x.what.dtype == kUint8; i++)
      wanted[i] = std::uint8_t(wanted[i] + mine[i]);
    for (std::size_t i = 0; i < x.out_bytes && x.what.dtype == kInt32; i += 4) {
      std::uint32_t a, b;
      std::memcpy(&a, wanted.data() + i, 4), std::memcpy(&b, mine + i, 4);
      a += b;
      std::memcpy(wanted.data() + i, &a, 4);
    }
  }
  if (x.out_bytes && std::memcmp(x.out, wanted.data(), x.out_bytes) != 0)
    wrong("rank %u: reduction of kind %u, %zu bytes to %zu, is wrong (epoch %u)", r_.rank, x.what.kind, x.in_bytes,
          x.out_bytes, a2a_epoch(r_.c));
  if (x.out_bytes) std::memset(x.out, 0xee, x.out_bytes);  // the caller may
  if (x.in_bytes) std::memset(x.in, 0xdd, x.in_bytes);
}

void Reductions::finish_first() {
  const Call x = under_way_.front();
  under_way_.erase(under_way_.begin());
  int result;
  while ((result = a2a_wait(x.ticket, 0.05)) == a2a::kPending) {
  }
  r_.expect("the result of a reduction", result, a2a::kOk);
  check(x);
  a2a_release(x.ticket);
}

void Reductions::drain() {
  while (!under_way_.empty()) finish_first();
}

void Reductions::step() {
  pause_a_moment(r_.own);
  const bool async = async_ && r_.plan.one_in(2);
  if (under_way_.size() >= 4) finish_first();
  if (under_way_.empty() && !r_.own.one_in(3)) r_.symmetric.reset(), r_.other_symmetric.reset(), r_.ordinary.reset();
  if (++calls_ % 8 == 0) {
    drain();
    r_.symmetric.reset(), r_.other_symmetric.reset(), r_.ordinary.reset();
  }
  Call x{};
  x.key = r_.plan.next();
  prepare(x);
  if (async) {
    x.ticket = a2a_submit_reduction(&x.what, x.out, x.in);
    under_way_.push_back(x);
  } else {
    r_.expect("the result of a reduction", a2a_reduce(&x.what, x.out, x.in), a2a::kOk);
    check(x);
  }
}

}  // namespace race
