// Worlds in which something goes wrong: every rank is told, soon, of the first cause; nobody hangs, and what was reported as
// done was right.
#include <cstring>
#include <string>

#include "harness.h"

extern "C" __attribute__((weak)) void __tsan_init();  // there in a build for ThreadSanitizer

namespace race {
namespace {

constexpr double kSoonS = 1.0;  // on top of a deadline, the time in which this process could not run not counted
constexpr std::uint64_t kDigest = 0x1111, kOtherDigest = 0x2222;

struct Record {
  std::uint32_t cause, by, peer;
  explicit Record(a2a_context* c) {
    const std::uint64_t f = a2a_failure(c);
    cause = std::uint32_t(f >> 48), by = std::uint32_t(f >> 32 & 0xffff), peer = std::uint32_t(f >> 16 & 0xffff);
  }
};

// One rank's calls of every kind, with fixed sizes and contents.
struct Calls {
  Rank& r;
  std::uint32_t request;
  a2a_moe* moe;
  static constexpr std::uint32_t kTokens = 60, kHidden = 256;
  std::vector<std::uint8_t> in, out;
  std::vector<std::int32_t> ids;
  std::vector<float> x;
  std::uint64_t count = 0;

  explicit Calls(Rank& r_, std::uint64_t digest = kDigest, std::uint64_t row_bytes = 0)
      : r(r_),
        request(std::uint32_t(a2a_request(r.c, digest, row_bytes, "a call"))),
        ids(kTokens),
        x(kTokens * kHidden, 1) {
    std::vector<std::int32_t> owner(r.ranks);
    for (std::uint32_t e = 0; e < r.ranks; e++) owner[e] = std::int32_t(e);
    for (std::uint32_t t = 0; t < kTokens; t++) ids[t] = std::int32_t(t % r.ranks);
    moe = a2a_moe_create(r.c, r.ranks, 1, kHidden, kTokens, 0, 1, 0, 0, owner.data(), World::moe_address(0));
  }
  ~Calls() { a2a_moe_destroy(moe); }

  // An all-to-all through the rings (ordinary memory, many slots) or eager; kOk only with the right data.
  int exchange(bool large, std::uint64_t more = 0) {
    const std::size_t each = large ? 20 * r.world.geo.slot_bytes : 100;
    in.assign(each * r.ranks, 0), out.assign((each + more) * r.ranks, 0);
    count++;
    for (std::uint32_t p = 0; p < r.ranks; p++) pattern(in.data() + p * each, each, mix(count, r.rank, p));
    std::vector<const void*> from;
    std::vector<void*> to;
    for (std::uint32_t p = 0; p < r.ranks; p++)
      from.push_back(in.data() + p * each), to.push_back(out.data() + p * (each + more));
    std::vector<std::uint64_t> sent(r.ranks, each), received(r.ranks, each);
    for (std::uint32_t p = 0; p < r.ranks; p++)
      if (p != r.rank) received[p] += more;
    const int result = a2a_all_to_all(r.c, request, to.data(), received.data(), from.data(), sent.data());
    if (result) return result;
    std::vector<std::uint8_t> content(each);
    for (std::uint32_t p = 0; p < r.ranks; p++) {
      pattern(content.data(), each, mix(count, p, r.rank));
      if (std::memcmp(content.data(), to[p], each) != 0)
        wrong("rank %u: exchange %llu was done, but is wrong", r.rank, (unsigned long long)count);
    }
    return result;
  }

  int dispatch(bool only_count = false) {
    std::vector<std::int64_t> result(4);
    if (const int rc = a2a_moe_count(moe, request, ids.data(), 4, kTokens, 0, result.data())) return rc;
    if (only_count) return a2a::kOk;
    const auto rows = std::size_t(result[0]);
    std::vector<float> y(rows * kHidden), weights(rows);
    std::vector<std::int32_t> rank(rows), token(rows), k(rows);
    std::int32_t end, overflow;
    const a2a_moe_rows where = {y.data(), nullptr,   weights.data(), rank.data(), token.data(), k.data(), nullptr,
                                &end,     &overflow, result[0],      result[0],   -1,           0,        0,
                                0};
    return a2a_moe_dispatch(moe, x.data(), nullptr, ids.data(), 4, nullptr, kTokens, &where);
  }

  int spread() {
    return a2a_moe_spread(moe, request, x.data(), kTokens, nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr);
  }

  int combine(std::int32_t row_token = 0) {
    std::vector<float> row(kHidden, 1), y(kTokens * kHidden);
    const std::int32_t rank = 0, k = 0;
    return a2a_moe_combine(moe, request, row.data(), 1, nullptr, &rank, &row_token, &k, nullptr, nullptr, y.data(),
                           nullptr, kTokens);
  }

  int any(std::uint32_t kind) {
    switch (kind % 6) {
      case 0:
        return exchange(false);
      case 1:
        return exchange(true);
      case 2:
        return dispatch();
      case 3:
        return combine();
      case 4:
        return spread();
      default: {
        a2a_ticket* ticket =
            a2a_submit(r.c, request, nullptrs().data(), zeros().data(), const_nullptrs().data(), zeros().data());
        int result;
        while ((result = a2a_wait(ticket, 0.05)) == a2a::kPending) {
        }
        a2a_release(ticket);
        return result;
      }
    }
  }
  std::vector<std::uint64_t> zeros() const { return std::vector<std::uint64_t>(r.ranks, 0); }
  std::vector<void*> nullptrs() const { return std::vector<void*>(r.ranks, nullptr); }
  std::vector<const void*> const_nullptrs() const { return std::vector<const void*>(r.ranks, nullptr); }

  // Whatever is called from now on fails at once, whoever else comes.
  void stays_broken() {
    for (std::uint32_t kind = 0; kind < 6; kind++)
      r.expect("the result of a call after a failure", any(kind), a2a::kFailed);
    r.expect("the result of a refusal after a failure", a2a_refuse(r.c, request, "late"), a2a::kFailed);
    r.expect("the ok word after a failure", __atomic_load_n(a2a_ok_word(r.c), __ATOMIC_ACQUIRE), 0);
  }
};

std::uint32_t ranks_of(std::uint64_t seed) { return 2 + std::uint32_t(seed % 3); }

void good_calls(Rank& r, Calls& calls) {
  for (int i = 0; i < 4; i++) r.expect("the result before a failure", calls.any(r.plan.below(6)), a2a::kOk);
  r.world.meet();  // a failure may end what others are still at
}

// Time passes for all ranks alike while the machine is kept busy by others; then a deadline may name another one. Once more.
template <class Body>
void undisturbed(std::uint64_t seed, Body body) {
  for (std::uint64_t attempt = 0;; attempt++) {
    Stalls stalls;
    const std::string problem = body(seed + 1000 * attempt, stalls);
    if (problem.empty()) return;
    if (stalls.seconds() == 0 || attempt == 20) wrong("%s", problem.c_str());
  }
}

// A rank never comes, to a call of any kind; or it comes to the first half of a dispatch only.
void absent(std::uint64_t any_seed) {
  undisturbed(any_seed, [&](std::uint64_t seed, Stalls& stalls) {
    const std::uint32_t ranks = ranks_of(seed), missing = std::uint32_t(mix(seed, 1) % ranks),
                        kind = std::uint32_t(mix(seed, 2) % 7);
    std::vector<std::string> problems(ranks);
    World world(seed, ranks, Sleep::kSlices);
    constexpr double kTimeoutS = 0.2;
    world.run([&](Rank& r) {
      Calls calls(r);
      good_calls(r, calls);
      a2a_set_timeout(r.c, kTimeoutS);
      const double start = now_s();
      if (r.rank == missing) {
        if (kind == 6) r.expect("the result of count", calls.dispatch(true), a2a::kOk);
        while (!a2a_failure(r.c)) pause_a_moment(r.own);
        if (kind == 6) a2a_moe_abort(calls.moe);
      } else {
        r.expect("the result without a rank", kind == 6 ? calls.dispatch() : calls.any(kind), a2a::kFailed);
        const double took = now_s() - start - stalls.seconds();
        if (took > kTimeoutS + kSoonS)
          problems[r.rank] = "it took " + std::to_string(took) + " s to notice a missing rank";
      }
      const Record record(r.c);
      if (record.cause != a2a::kTimeout || record.peer != missing || record.by == missing)
        problems[r.rank] = "rank " + std::to_string(missing) + " is missing; recorded: cause " +
                           std::to_string(record.cause) + ", peer " + std::to_string(record.peer) + ", by " +
                           std::to_string(record.by);
      calls.stays_broken();
    });
    for (const std::string& problem : problems)
      if (!problem.empty()) return problem;
    return std::string();
  });
}

// A rank closes instead of calling, perhaps with calls of its own under way that nobody else will come to.
void closing(std::uint64_t any_seed) {
  undisturbed(any_seed, [&](std::uint64_t seed, Stalls& stalls) {
    const std::uint32_t ranks = ranks_of(seed), leaver = std::uint32_t(mix(seed, 1) % ranks),
                        kind = std::uint32_t(mix(seed, 2) % 6);
    const std::uint32_t queued = std::uint32_t(mix(seed, 3) % 3);
    std::vector<std::string> problems(ranks);
    World world(seed, ranks, Sleep::kSlices);
    world.run([&](Rank& r) {
      Calls calls(r);
      good_calls(r, calls);
      if (r.rank == leaver) {
        std::vector<a2a_ticket*> tickets;
        for (std::uint32_t i = 0; i < queued; i++)
          tickets.push_back(a2a_submit(r.c, calls.request, calls.nullptrs().data(), calls.zeros().data(),
                                       calls.const_nullptrs().data(), calls.zeros().data()));
        a2a_close(r.c);
        for (a2a_ticket* ticket : tickets) {
          r.expect("a queued call after close", a2a_test(ticket), a2a::kFailed);
          a2a_release(ticket);
        }
        r.expect("a call after close", calls.exchange(false), a2a::kNotOpen);
        a2a_ticket* late = a2a_submit_refusal(r.c, calls.request, "closed");
        r.expect("a submission after close", a2a_test(late), a2a::kNotOpen);
        a2a_release(late);
      } else {
        if (queued) {  // they must not come to the queued calls
          while (!a2a_failure(r.c)) pause_a_moment(r.own);
        }
        const double start = now_s();
        r.expect("the result after a rank has closed", calls.any(kind), a2a::kFailed);
        const double took = now_s() - start - stalls.seconds();
        if (took > kSoonS) problems[r.rank] = "it took " + std::to_string(took) + " s to notice a closed rank";
        calls.stays_broken();
      }
      while (!a2a_failure(r.c)) pause_a_moment(r.own);
      const Record record(r.c);
      if (record.cause != a2a::kClosed || record.peer != leaver)
        problems[r.rank] = "the wrong rank is said to have closed";
    });
    for (const std::string& problem : problems)
      if (!problem.empty()) return problem;
    return std::string();
  });
}

// Ranks that ask for different things. Nobody looks around here: whoever sleeps must be woken by who finds out.
void disagreement(std::uint64_t seed) {
  const std::uint32_t ranks = ranks_of(seed), odd = std::uint32_t(mix(seed, 1) % ranks);
  for (int what = 0; what < 4; what++) {
    World world(mix(seed, what), ranks, Sleep::kUntilRung);
    world.run([&](Rank& r) {
      Calls calls(r, kDigest, r.rank == odd ? 0 : 8);  // 0 agrees with all
      good_calls(r, calls);
      Calls other(r, what == 0 && r.rank == odd ? kOtherDigest : kDigest, what == 1 && r.rank == odd ? 16 : 8);
      int result = 0;
      if (what <= 1) result = other.any(r.plan.below(6));
      if (what == 2) result = calls.exchange(r.plan.one_in(2), r.rank == odd);
      if (what == 3) result = calls.combine(r.rank == odd ? Calls::kTokens : 0);  // a row of no token
      r.expect("the result of a call that differs", result, a2a::kFailed);
      const Record record(r.c);
      r.expect("the cause", record.cause, what == 2 ? a2a::kSplits : a2a::kMismatch);
      if (record.by != odd && record.peer != odd)
        wrong("rank %u: the wrong ranks are said to differ: %u, %u", r.rank, record.by, record.peer);
      const std::string text = a2a_cause_text(r.c, record.by);
      if (text.find("rank " + std::to_string(record.by)) == std::string::npos)
        wrong("rank %u: strange text: %s", r.rank, text.c_str());
      calls.stays_broken();
    });
  }
}

thread_local bool interrupt_me = false;

// A rank gives up by itself: it says so, it is interrupted, or it drops the second half of a dispatch.
void giving_up(std::uint64_t seed) {
  const std::uint32_t ranks = ranks_of(seed), who = std::uint32_t(mix(seed, 1) % ranks);
  for (int how = 0; how < 3; how++) {
    World world(mix(seed, how), ranks, how == 1 ? Sleep::kSlices : Sleep::kUntilRung, false,
                [] { return int(interrupt_me); });
    world.run([&](Rank& r) {
      Calls calls(r);
      good_calls(r, calls);
      const std::uint32_t kind = r.plan.below(6), before = r.plan.below(5);
      if (r.rank == who) {
        for (std::uint32_t i = 0; how == 0 && i < before; i++) calls.any(kind);
        if (how == 0) a2a_fail(r.c, a2a::kOverflow, r.rank, "too many rows");
        if (how == 1) {
          interrupt_me = true;
          r.expect("the result of an interrupted call", calls.exchange(true), a2a::kFailed);
          interrupt_me = false;
        }
        if (how == 2) {
          r.expect("the result of count", calls.dispatch(true), a2a::kOk);
          a2a_moe_abort(calls.moe);
        }
      } else if (how == 1) {
        while (!a2a_failure(r.c)) pause_a_moment(r.own);
      } else {
        int result = 0;
        for (std::uint32_t i = 0; how == 0 && i <= before && !result; i++) result = calls.any(kind);
        if (how == 2) result = calls.dispatch();
        r.expect("the result of the last call", result, a2a::kFailed);
      }
      const Record record(r.c);
      r.expect("the cause", record.cause, how == 0 ? a2a::kOverflow : how == 1 ? a2a::kInterrupted : a2a::kRefused);
      r.expect("who gave up", record.by, who);
      if (how == 0 && std::strcmp(a2a_cause_text(r.c, who), "too many rows") != 0)
        wrong("rank %u: another text", r.rank);
      calls.stays_broken();
    });
  }
}

// A failure from elsewhere while large pieces are pulled and read. A rank that is told of it goes on and changes its input;
// a rank that was reading it then must not report success.
void torn(std::uint64_t seed) {
  for (std::uint64_t round = 0; round < 10; round++) {
    World world(mix(seed, round), 3, Sleep::kUntilRung, true);
    std::atomic<bool> started{false};
    std::thread troublemaker([&] {
      Random random{mix(seed, round, 1)};
      while (!started.load(std::memory_order_relaxed)) pause_a_moment(random);
      for (std::uint32_t i = random.below(40); i; i--) pause_a_moment(random);
      a2a_fail(world.context(0), a2a::kOverflow, 0, "from elsewhere");
    });
    world.run([&](Rank& r) {
      const std::uint32_t request = std::uint32_t(a2a_request(r.c, kDigest, 0, "large pieces"));
      const std::size_t each = 700'000;
      const bool symmetric = r.plan.one_in(2);
      std::uint8_t *in = (symmetric ? r.symmetric : r.ordinary).take(3 * each), *out = r.ordinary.take(3 * each);
      std::vector<std::uint8_t> content(each);
      int result = a2a::kOk;
      for (std::uint64_t count = 0; !result; count++) {
        for (std::uint32_t p = 0; p < 3; p++) {
          pattern(content.data(), each, mix(count, r.rank, p));
          std::memcpy(in + p * each, content.data(), each);
        }
        result = a2a_all_to_all_even(r.c, request, out, in, each);
        if (result == a2a::kOk)
          for (std::uint32_t p = 0; p < 3; p++) {
            pattern(content.data(), each, mix(count, p, r.rank));
            if (std::memcmp(content.data(), out + p * each, each) != 0)
              wrong("rank %u: exchange %llu was done, but is torn", r.rank, (unsigned long long)count);
          }
        started.store(true, std::memory_order_relaxed);
      }
      r.expect("the last result", result, a2a::kFailed);
      if (!__tsan_init) std::memset(in, 0xdd, 3 * each);  // the data race that the readers find out about
    });
    troublemaker.join();
  }
}

}  // namespace

const std::vector<Scenario> kFailures = {
    {"absent", absent}, {"closing", closing}, {"disagreement", disagreement}, {"giving_up", giving_up}, {"torn", torn},
};

}  // namespace race
