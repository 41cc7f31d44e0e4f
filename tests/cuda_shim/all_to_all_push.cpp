// Random all-to-alls through the kernel of csrc/cuda. Every rank draws the same sizes and, for itself, where its pieces lie and
// with how many blocks it comes; every byte of the outputs, and around them, is compared.
#include "machine.h"

#include "cuda/all_to_all_push.cu"

namespace {

using a2a::Cause;
using a2a::Control;
using a2a::kBlocks;
using a2a::kChannels;
using a2a::kWorld;
using a2a::Staging;
using shim::Device;
using shim::World;
using shim::wrong;

constexpr std::uint32_t kDigest = 0x1234567, kText = 7;
constexpr std::uint64_t kStagingAt = a2a::align_up(sizeof(Control), 4096),
                        kUserAt = a2a::align_up(kStagingAt + sizeof(Staging), 4096);
constexpr std::uint64_t kDeadlineNs = 5'000'000'000, kGuard = 16;
static_assert(kUserAt < World::kWindow / 2, "staging fits the window");

enum class Way { kFlags, kDirect, kStaged, kAny };

std::uint8_t pattern(std::uint64_t key, std::uint64_t i) {
  return std::uint8_t((key + i / 8 + 1) * 0x9e3779b97f4a7c15ull >> (i % 8 * 7));
}

struct Arena {
  std::uint8_t *begin, *at, *end;
  Arena(std::uint8_t* p, std::size_t bytes) : begin(p), at(p), end(p + bytes) {}
  void reset() { at = begin; }
  std::uint8_t* take(std::uint64_t bytes, shim::Random& random) {
    at += (16 - reinterpret_cast<std::uintptr_t>(at) % 16) % 16 + kGuard;
    at += random.one_in(2) ? 0 : random.one_in(2) ? random.below(16) : random.below(4) * 4;
    std::uint8_t* p = at;
    at += bytes + kGuard;
    if (at > end) wrong(shim::kMisuse, "an arena is full");
    return p;
  }
};

// Sizes lie around the thresholds, where ways, channels and slots change.
std::uint64_t draw_size(shim::Random& random, Way way) {
  const std::uint64_t flag = FLAG_BYTES, channel = a2a::kChannelBytes, jitter = random.below(3);
  const bool few = way == Way::kFlags || (way == Way::kAny && random.one_in(2));
  const std::uint64_t small[6] = {0, jitter, 47 + jitter, random.below(FLAG_BYTES), flag - jitter, flag};
  const std::uint64_t large[6] = {flag + 1 + jitter,
                                  channel - 1 + jitter,
                                  4 * CHUNK_BYTES - 1 + jitter,
                                  2 * channel + random.below(3000),
                                  flag + 1 + random.below(std::uint32_t(4 * channel)),
                                  random.one_in(4) ? (kChannels + 1) * channel + jitter : 3 * channel + 16 * jitter};
  return (few ? small : large)[random.below(6)];
}

struct Call {
  std::uint64_t key;
  std::uint64_t bytes[kWorld][kWorld];  // [from][to]
  std::uint8_t *in[kWorld], *out[kWorld];
};

class Rank {
 public:
  Rank(Device& device, Way way)
      : d(device),
        way_(way),
        symmetric_(d.window + kUserAt, World::kWindow - kUserAt),
        ordinary_(d.memory + 4096, World::kMemory - 4096) {}

  // Some calls back to back, with memory of their own each; then all of them are checked.
  void calls(std::uint32_t most) {
    Call batch[3];
    symmetric_.reset();
    ordinary_.reset();
    const std::uint32_t n = 1 + d.own.below(most < 3 ? most : 3), all = most;
    for (std::uint32_t done = 0; done < all; done += n) {
      symmetric_.reset();
      ordinary_.reset();
      const std::uint32_t here = all - done < n ? all - done : n;
      for (std::uint32_t i = 0; i < here; i++) {
        draw(batch[i]);
        prepare(batch[i]);
        launch(batch[i], kDigest);
      }
      d.synchronize();
      if (record()) wrong(shim::kWrong, "a failure was recorded: cause %u, peer %u", cause(), peer());
      for (std::uint32_t i = 0; i < here; i++) check(batch[i]);
    }
  }

  void draw(Call& c) {
    c.key = d.plan.next();
    const bool even = d.plan.one_in(4);
    const std::uint64_t each = draw_size(d.plan, way_);
    for (auto& row : c.bytes)
      for (std::uint64_t& bytes : row) bytes = even ? each : draw_size(d.plan, way_);
  }

  void prepare(Call& c) {
    for (std::uint32_t p = 0; p < kWorld; p++) {
      const std::uint64_t sent = c.bytes[d.rank][p], received = c.bytes[p][d.rank];
      const bool direct = way_ == Way::kDirect || (way_ == Way::kAny && d.own.one_in(2));
      c.in[p] = (d.own.one_in(2) ? symmetric_ : ordinary_).take(sent, d.own);
      c.out[p] = (direct ? symmetric_ : ordinary_).take(received, d.own);
      for (std::uint64_t i = 0; i < received + 2 * kGuard; i++) (c.out[p] - kGuard)[i] = 0xee;
      for (std::uint64_t i = 0; i < sent; i++) c.in[p][i] = pattern(c.key + d.rank * 64 + p, i);
    }
    if (d.own.one_in(4)) {  // in place, as far as the own piece goes
      c.out[d.rank] = c.in[d.rank];
    }
  }

  // As a2a/algorithms/all_to_all_push.py decides, except for what any value of must do.
  void launch(const Call& c, std::uint32_t digest) {
    a2a::Params a{};
    a.place = {std::uint64_t(d.world.base), World::kWindow, host(), kDeadlineNs, d.rank, kText};
    a.staging = kStagingAt;
    a.digest = digest;
    std::uint64_t largest = 0;
    for (std::uint32_t p = 0; p < kWorld; p++) {
      a.pairs[p] = {std::uint64_t(c.in[p]), std::uint64_t(c.out[p]), c.bytes[d.rank][p], c.bytes[p][d.rank]};
      if (p != d.rank) largest = a2a_max(largest, a2a_max(a.pairs[p].send_bytes, a.pairs[p].recv_bytes));
    }
    if (largest <= FLAG_BYTES && !d.own.one_in(8)) {
      d.launch(all_to_all_push_small, {1 + d.own.below(kBlocks), 32 * (1 + d.own.below(2))}, a);
      return;
    }
    const auto least = std::uint32_t(a2a::ceil_div(a2a_max(largest, 1), a2a::kChannelBytes * a2a::kTeams));
    const std::uint32_t needed = least < kBlocks ? least : kBlocks, more = d.own.one_in(3) ? kBlocks - needed : 0;
    a.copiers = d.own.one_in(2) ? 0 : 1 + d.own.below(2);
    d.launch(all_to_all_push_large, {needed + d.own.below(more + 1) + a.copiers, 2 * a2a::kTeams * a2a::kTeam}, a);
  }

  void check(const Call& c) const {
    check_around(c);
    for (std::uint32_t p = 0; p < kWorld; p++) {
      const std::uint64_t bytes = c.bytes[p][d.rank], key = c.key + p * 64 + d.rank;
      for (std::uint64_t i = 0; i < bytes; i++)
        if (c.out[p][i] != pattern(key, i))
          wrong(shim::kWrong, "byte %llu of %llu from rank %u is wrong", (unsigned long long)i,
                (unsigned long long)bytes, p);
    }
  }

  void check_around(const Call& c) const {
    for (std::uint32_t p = 0; p < kWorld; p++) {
      const std::uint64_t bytes = c.bytes[p][d.rank];
      for (std::uint64_t i = 0; i < kGuard && c.out[p] != c.in[p]; i++)
        if ((c.out[p] - kGuard)[i] != 0xee || c.out[p][bytes + i] != 0xee)
          wrong(shim::kWrong, "a byte beside the piece from rank %u was written", p);
    }
  }

  std::uint64_t* host() const { return reinterpret_cast<std::uint64_t*>(d.memory); }
  std::uint64_t record() const { return *host(); }
  std::uint32_t cause() const { return std::uint32_t(record() >> 48); }
  std::uint32_t noticed_by() const { return std::uint32_t(record() >> 32 & 0xffff); }
  std::uint32_t peer() const { return std::uint32_t(record() >> 16 & 0xffff); }

  // A failure is on record with the host. A disagreement has two sides; who is missing is not the one to notice.
  void expect(std::uint32_t wanted, std::uint32_t who) const {
    const bool mutual = wanted == a2a::kMismatch || wanted == a2a::kSplits;
    if (cause() != wanted || (peer() != who && !(mutual && noticed_by() == who)) || (record() & 0xffff) != kText)
      wrong(shim::kWrong, "the record is %llx, expected cause %u of rank %u", (unsigned long long)record(), wanted,
            who);
    if (reinterpret_cast<Control*>(d.window)->ok) wrong(shim::kWrong, "ok is still set");
  }

  Device& d;

 private:
  static constexpr std::uint64_t a2a_max(std::uint64_t a, std::uint64_t b) { return a > b ? a : b; }
  const Way way_;
  Arena symmetric_, ordinary_;
};

Staging& staging(World& world, std::uint32_t rank) {
  return *reinterpret_cast<Staging*>(world.base + rank * World::kWindow + kStagingAt);
}
Control& control(World& world, std::uint32_t rank) {
  return *reinterpret_cast<Control*>(world.base + rank * World::kWindow);
}

// A communicator that has been used: calls and chunks are about to wrap around, or not.
void begin(World& world) {
  const std::uint32_t calls = 0u - std::uint32_t(shim::mix(world.seed, 3) % 12);
  for (std::uint32_t r = 0; r < kWorld; r++) {
    control(world, r).ok = 1;
    for (std::uint32_t& epoch : control(world, r).epoch) epoch = calls;
    for (std::uint32_t p = 0; p < kWorld; p++)
      for (std::uint32_t c = 0; c < kChannels; c++) {
        const auto chunks = [&](std::uint32_t from, std::uint32_t to) {
          return 0u - std::uint32_t(shim::mix(world.seed, from, to, c) % 12);
        };
        staging(world, r).sent[p][c] = staging(world, r).consumed[p][c] = chunks(r, p);
        staging(world, r).received[p][c] = staging(world, r).produced[p][c] = chunks(p, r);
      }
  }
}

void exchanges(std::uint64_t seed, Way way, std::uint32_t calls) {
  World world(seed, kWorld);
  begin(world);
  world.run([&](Device& d) { Rank(d, way).calls(calls); });
}

// One rank does something else; the others are told what and who, and so is every rank in its next call.
void failure(std::uint64_t seed, std::uint32_t cause, const std::function<void(Rank&, Call&)>& otherwise) {
  if (kWorld == 1) return;
  World world(seed, kWorld);
  begin(world);
  const auto culprit = std::uint32_t(shim::mix(seed, 5) % kWorld);
  const Way way = shim::mix(seed, 6) % 2 ? Way::kFlags : Way::kAny;
  std::uint64_t records[kWorld] = {};
  world.run([&](Device& d) { Rank(d, way).calls(2); });
  if (cause == a2a::kClosed)
    for (std::uint32_t r = 0; r < kWorld; r++) (&control(world, r).closed[0])[culprit] = 1;
  Call calls[kWorld];
  auto one_call = [&](Device& d, int round) {
    const bool other = round == 0 && d.rank == culprit;
    // one pair disagrees, and the rest of the call may be over on others before they hear of it
    const bool aside = round == 0 && cause == a2a::kSplits && d.rank != (culprit + 1) % kWorld;
    Rank rank(d, way);
    Call& call = calls[d.rank];
    rank.draw(call);
    for (auto& row : call.bytes) row[culprit] += row[culprit] == 0;  // something to disagree on
    rank.prepare(call);
    Call made = call;
    if (other)
      otherwise(rank, made);
    else
      rank.launch(call, kDigest);
    d.synchronize();
    if (!other && !(aside && !rank.record())) {
      rank.expect(cause, culprit);
      if (!records[d.rank]) records[d.rank] = rank.record();
      if (rank.record() != records[d.rank]) wrong(shim::kWrong, "the record has changed");
    }
  };
  for (int round = 0; round < 3; round++) {
    world.run([&](Device& d) { one_call(d, round); });
    world.run([&](Device& d) { Rank(d, way).check_around(calls[d.rank]); });  // when nobody writes any more
  }
}

// One rank leaves as soon as its own call is over: what it had sent counts, and the others' calls go well.
void leaving(std::uint64_t seed) {
  World world(seed, kWorld);
  begin(world);
  const auto leaver = std::uint32_t(shim::mix(seed, 5) % kWorld);
  world.run([&](Device& d) {
    if (d.rank == leaver) shim::be_late(d.own.below(5000));
    Rank(d, shim::mix(world.seed, 6) % 4 ? Way::kFlags : Way::kAny).calls(1);
    const std::uint64_t one = 1;
    for (std::uint32_t r = 0; r < kWorld && d.rank == leaver; r++)
      shim::store(control(world, r).closed + leaver, &one, sizeof one, shim::Order::kRelaxed, shim::Scope::kSystem);
  });
}

const std::vector<shim::Scenario> kScenarios = {
    {"flags", [](std::uint64_t seed) { exchanges(seed, Way::kFlags, 16); }},
    {"direct", [](std::uint64_t seed) { exchanges(seed, Way::kDirect, 4); }},
    {"staged", [](std::uint64_t seed) { exchanges(seed, Way::kStaged, 4); }},
    {"any", [](std::uint64_t seed) { exchanges(seed, Way::kAny, 6); }},
    {"leaving", leaving},
    {"absent", [](std::uint64_t seed) { failure(seed, a2a::kTimeout, [](Rank&, Call&) {}); }},
    {"closed", [](std::uint64_t seed) { failure(seed, a2a::kClosed, [](Rank&, Call&) {}); }},
    {"refused",
     [](std::uint64_t seed) {
       failure(seed, a2a::kRefused, [](Rank& rank, Call& call) {
         std::memset(call.bytes, 0, sizeof call.bytes);
         rank.launch(call, a2a::kRefusal);
       });
     }},
    {"mismatch",
     [](std::uint64_t seed) {
       failure(seed, a2a::kMismatch, [](Rank& rank, Call& call) { rank.launch(call, kDigest + 1); });
     }},
    {"splits",
     [](std::uint64_t seed) {
       failure(seed, a2a::kSplits, [](Rank& rank, Call& call) {
         call.bytes[rank.d.rank][(rank.d.rank + 1) % kWorld] ^= 1;
         rank.launch(call, kDigest);
       });
     }},
};

}  // namespace

int main(int argc, char** argv) { return shim::run_scenarios(argc, argv, kScenarios); }
