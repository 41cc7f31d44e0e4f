// Random all-reduces, reduce-scatters or all-gathers (as COLLECTIVE says) through both kernels of csrc/cuda. Every rank draws
// the same kernels and sizes and, for itself, where its tensors lie; every element of the outputs is compared with a result made
// one term after the other, and every byte around them, and of inputs that are no outputs, with what it was.
#include <cmath>

#include "machine.h"

#include "cuda/reduce_flags.cu"
#include "cuda/reduce_shares.cu"
#ifdef SLOT_BYTES  // the switch instead of these
#include "cuda/reduce_multimem.cu"
#endif

namespace {

using a2a::Control;
using a2a::kBlocks;
using a2a::kElementBytes;
using a2a::kGathers;
using a2a::kReduces;
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

// How a scenario's calls go: by which kernel, and from and to which memory.
enum class Way { kFlags, kDirect, kRings, kAny };

using Bits = a2a::Choose<kElementBytes == 8, std::uint64_t,
                         a2a::Choose<kElementBytes == 4, std::uint32_t,
                                     a2a::Choose<kElementBytes == 2, std::uint16_t, std::uint8_t>::type>::type>::type;

// ---- elements, without any of the kernels' code

double value(Bits b) {
  if (DTYPE == a2a::kFloat32) return double(shim::of_bits<float>(b));
  if (DTYPE == a2a::kBfloat16) return double(shim::of_bits<float>(std::uint64_t(b) << 16));
  if (DTYPE == a2a::kFloat16) return double(shim::of_f16(std::uint16_t(b)));
  if (DTYPE == a2a::kFloat64) return shim::of_bits<double>(b);
  if (DTYPE == a2a::kUint8) return double(b);
  const std::uint64_t sign = 1ull << (8 * kElementBytes - 1);
  return double(std::int64_t((std::uint64_t(b) ^ sign) - sign));
}

constexpr bool kFloats = DTYPE <= a2a::kFloat64;

Bits of_float(float v) {
  if (DTYPE == a2a::kBfloat16) return Bits(shim::to_bf16(v));
  if (DTYPE == a2a::kFloat16) return Bits(shim::to_f16(v));
  return Bits(shim::bits(v));
}

// Numbers of different size, so that another order of the terms shows; any bits where they are only copied or are integers.
Bits term(std::uint64_t key, std::uint32_t rank, std::uint64_t i) {
  const std::uint64_t random = shim::mix(key, rank, i);
  if (!kFloats || !kReduces) return Bits(random);
  if (random % 97 == 0) return DTYPE == a2a::kFloat64 ? Bits(shim::bits(double(NAN))) : of_float(NAN);
  if (random % 89 == 0) return DTYPE == a2a::kFloat64 ? Bits(shim::bits(-0.0)) : of_float(-0.0f);
  const double v = std::ldexp(double(random >> 40) / (1 << 24) - 0.5, int(random >> 8 & 31) - 20);
  return DTYPE == a2a::kFloat64 ? Bits(shim::bits(v)) : of_float(float(v));
}

Bits reduced(std::uint64_t key, std::uint64_t i) {
  Bits best = term(key, 0, i);
  if (REDUCE == a2a::kMax || REDUCE == a2a::kMin) {
    for (std::uint32_t r = 1; r < kWorld; r++) {
      const Bits other = term(key, r, i);
      const bool better = REDUCE == a2a::kMax ? value(other) > value(best) : value(other) < value(best);
      if (!std::isnan(value(best)) && (better || std::isnan(value(other)))) best = other;
    }
    return best;
  }
  if (!kFloats) {
    for (std::uint32_t r = 1; r < kWorld; r++) best = Bits(best + term(key, r, i));
    return best;
  }
  if (DTYPE == a2a::kFloat64) {
    double sum = value(best);
    for (std::uint32_t r = 1; r < kWorld; r++) sum += value(term(key, r, i));
    return Bits(shim::bits(REDUCE == a2a::kAvg ? sum / kWorld : sum));
  }
  float sum = float(value(best));
  for (std::uint32_t r = 1; r < kWorld; r++) sum += float(value(term(key, r, i)));
  return of_float(REDUCE == a2a::kAvg ? sum / float(kWorld) : sum);
}

bool same(Bits a, Bits b) { return a == b || (kFloats && kReduces && std::isnan(value(a)) && std::isnan(value(b))); }

// ---- a rank's calls

struct Arena {
  std::uint8_t *begin, *at, *end;
  Arena(std::uint8_t* p, std::size_t bytes) : begin(p), at(p), end(p + bytes) {}
  void reset() { at = begin; }
  std::uint8_t* take(std::uint64_t bytes, bool aligned, shim::Random& random) {
    at += (16 - reinterpret_cast<std::uintptr_t>(at) % 16) % 16 + kGuard;
    if (!aligned) at += random.below(16 / kElementBytes) * kElementBytes;
    std::uint8_t* p = at;
    at += bytes + kGuard;
    if (at > end) wrong(shim::kMisuse, "an arena is full");
    return p;
  }
};

struct Call {
  std::uint64_t key, count;  // elements of a share, or of an all-reduce's tensor
  bool flags;
  std::uint8_t *in, *out;

  std::uint64_t in_count() const { return COLLECTIVE == a2a::kReduceScatter ? count * kWorld : count; }
  std::uint64_t out_count() const { return COLLECTIVE == a2a::kAllGather ? count * kWorld : count; }
  std::uint64_t in_bytes() const { return in_count() * kElementBytes; }
  std::uint64_t out_bytes() const { return out_count() * kElementBytes; }
  a2a::Shares shares() const {
    if (COLLECTIVE != a2a::kAllReduce) return {count * kElementBytes * kWorld, count * kElementBytes};
    return {count * kElementBytes, a2a::align_up(a2a::ceil_div(count * kElementBytes, kWorld), 128)};
  }
  bool alike() const { return in == out && COLLECTIVE == a2a::kAllReduce; }
};

class Rank {
 public:
  Rank(Device& device, Way way)
      : d(device),
        way_(way),
        symmetric_(d.window + kUserAt, World::kWindow - kUserAt),
        ordinary_(d.memory + 4096, World::kMemory - 4096) {}

  // Some calls back to back, with memory of their own each; then all of them are checked.
  void calls(std::uint32_t all) {
    Call batch[3];
    const std::uint32_t n = 1 + d.own.below(all < 3 ? all : 3);
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

  // Sizes lie around the ends of packets, channels and rings.
  void draw(Call& c) {
    c.key = d.plan.next();
    c.flags = way_ == Way::kFlags || (way_ == Way::kAny && d.plan.one_in(2));
    const std::uint64_t jitter = d.plan.below(3), round = 4 * CHUNK_BYTES;  // of two blocks' channels
    const std::uint64_t most = COLLECTIVE == a2a::kAllReduce && TWO_SHOT ? FLAG_BYTES / 128 * 128 * kWorld : FLAG_BYTES;
    const std::uint64_t few[5] = {jitter, 47 + jitter, d.plan.below(FLAG_BYTES), most - jitter, most};
    const std::uint64_t many[6] = {jitter,
                                   round - 16 + 8 * jitter,
                                   d.plan.below(std::uint32_t(3 * round)),
                                   5 * round + 16 * jitter,
                                   a2a::kSlots * round + 16,
                                   2 * round};
    std::uint64_t bytes = c.flags ? few[d.plan.below(5)] : many[d.plan.below(6)];
    if (!c.flags && COLLECTIVE == a2a::kAllReduce) bytes *= kWorld;
    if (d.plan.one_in(2)) bytes = bytes / 16 * 16;
    c.count = bytes / kElementBytes;
    blocks_ = 1 + d.plan.below(kBlocks);
  }

  void prepare(Call& c) {
    const bool direct = way_ == Way::kDirect || (way_ == Way::kAny && d.own.one_in(2));
    const bool aligned = way_ == Way::kDirect || d.own.one_in(2), in_place = d.own.one_in(2);
    Arena& arena = direct ? symmetric_ : ordinary_;
    Arena& other = way_ == Way::kDirect || d.own.one_in(2) ? symmetric_ : ordinary_;
    const std::uint64_t share = c.count * kElementBytes;
    if (in_place) {  // or the smaller is the own share of the other
      std::uint8_t* whole = arena.take(share * (COLLECTIVE == a2a::kAllReduce ? 1 : kWorld), aligned, d.own);
      c.in = whole + (COLLECTIVE == a2a::kAllGather ? d.rank * share : 0);
      c.out = whole + (COLLECTIVE == a2a::kReduceScatter ? d.rank * share : 0);
    } else {
      c.in = (kReduces ? arena : other).take(c.in_bytes(), aligned, d.own);
      c.out = (kReduces ? other : arena).take(c.out_bytes(), aligned, d.own);
    }
    std::memset(c.out - kGuard, 0xee, c.out_bytes() + 2 * kGuard);
    std::memset(c.in - kGuard, 0xee, kGuard);
    std::memset(c.in + c.in_bytes(), 0xee, kGuard);
    for (std::uint64_t i = 0; i < c.in_count(); i++) put(c.in, i, term(c.key, d.rank, i));
  }

  void launch(const Call& c, std::uint32_t digest) {
    a2a::Params a{};
    a.out = std::uint64_t(c.out);
    a.in = std::uint64_t(c.in);
    a.place = {std::uint64_t(d.world.base), World::kWindow, host(), kDeadlineNs, d.rank, kText};
    a.staging = kStagingAt;
    a.count = c.count;
    a.shares = c.shares();
    a.digest = digest;
#ifdef SLOT_BYTES
    const std::uint64_t buffer = kStagingAt + a2a::align_up(sizeof(a2a::Meetings), 16);  // in the others' staging
    static_assert(sizeof(a2a::Meetings) + 16 + kBlocks * SLOT_BYTES <= sizeof(Staging), "it fits");
    d.launch(reduce_multimem, {blocks_, 64}, a2a::MultimemParams{a, buffer, std::uint64_t(d.window) + buffer});
    return;
#endif
    if (c.flags)
      d.launch(reduce_flags, {1 + d.own.below(kBlocks), 32 * (1 + d.own.below(2))}, a);
    else
      d.launch(reduce_shares, {blocks_, a2a::kBlockThreads}, a);
  }

  void check(const Call& c) const {
    check_around(c);
    for (std::uint64_t i = 0; i < c.out_count(); i++) {
      const Bits expected = COLLECTIVE == a2a::kAllGather       ? term(c.key, std::uint32_t(i / c.count), i % c.count)
                            : COLLECTIVE == a2a::kReduceScatter ? reduced(c.key, d.rank * c.count + i)
                                                                : reduced(c.key, i);
      if (!same(get(c.out, i), expected))
        wrong(shim::kWrong, "element %llu of %llu is %llx, expected %llx", (unsigned long long)i,
              (unsigned long long)c.out_count(), (unsigned long long)get(c.out, i), (unsigned long long)expected);
    }
    for (std::uint64_t i = 0; i < c.in_count(); i++) {
      const std::uint8_t* at = c.in + i * kElementBytes;
      if (at >= c.out && at < c.out + c.out_bytes()) continue;
      if (get(c.in, i) != term(c.key, d.rank, i))
        wrong(shim::kWrong, "element %llu of the input was written", (unsigned long long)i);
    }
  }

  void check_around(const Call& c) const {
    const std::uint8_t* begin = c.in < c.out ? c.in : c.out;
    const std::uint8_t* end = c.in + c.in_bytes() > c.out + c.out_bytes() ? c.in + c.in_bytes() : c.out + c.out_bytes();
    for (std::uint64_t i = 0; i < kGuard; i++)
      if ((begin - kGuard)[i] != 0xee || end[i] != 0xee) wrong(shim::kWrong, "a byte beside a tensor was written");
  }

  std::uint64_t* host() const { return reinterpret_cast<std::uint64_t*>(d.memory); }
  std::uint64_t record() const { return *host(); }
  std::uint32_t cause() const { return std::uint32_t(record() >> 48); }
  std::uint32_t noticed_by() const { return std::uint32_t(record() >> 32 & 0xffff); }
  std::uint32_t peer() const { return std::uint32_t(record() >> 16 & 0xffff); }

  // A failure is on record with the host. A disagreement has two sides; who is missing is not the one to notice.
  void expect(std::uint32_t wanted, std::uint32_t who) const {
    const bool mutual = wanted == a2a::kMismatch;
    if (cause() != wanted || (peer() != who && !(mutual && noticed_by() == who)) || (record() & 0xffff) != kText)
      wrong(shim::kWrong, "the record is %llx, expected cause %u of rank %u", (unsigned long long)record(), wanted,
            who);
    if (reinterpret_cast<Control*>(d.window)->ok) wrong(shim::kWrong, "ok is still set");
  }

  Device& d;

 private:
  static Bits get(const std::uint8_t* p, std::uint64_t i) {
    Bits b;
    std::memcpy(&b, p + i * kElementBytes, sizeof b);
    return b;
  }
  static void put(std::uint8_t* p, std::uint64_t i, Bits b) { std::memcpy(p + i * kElementBytes, &b, sizeof b); }

  const Way way_;
  std::uint32_t blocks_ = 1;
  Arena symmetric_, ordinary_;
};

Control& control(World& world, std::uint32_t rank) {
  return *reinterpret_cast<Control*>(world.base + rank * World::kWindow);
}

// A communicator that has been used: its calls are about to wrap around, or not.
void begin(World& world) {
  const std::uint32_t calls = 0u - std::uint32_t(shim::mix(world.seed, 3) % 12);
  for (std::uint32_t r = 0; r < kWorld; r++) {
    control(world, r).ok = 1;
    for (std::uint32_t& epoch : control(world, r).epoch) epoch = calls;
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
    Rank rank(d, way);
    Call& call = calls[d.rank];
    rank.draw(call);
    rank.prepare(call);
    Call made = call;
    if (other)
      otherwise(rank, made);
    else
      rank.launch(call, kDigest);
    d.synchronize();
    if (!other) {
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
    Rank(d, Way::kFlags).calls(1);
    const std::uint64_t one = 1;
    for (std::uint32_t r = 0; r < kWorld && d.rank == leaver; r++)
      shim::store(control(world, r).closed + leaver, &one, sizeof one, shim::Order::kRelaxed, shim::Scope::kSystem);
  });
}

const std::vector<shim::Scenario> kScenarios = {
    {"flags", [](std::uint64_t seed) { exchanges(seed, Way::kFlags, 12); }},
    {"direct", [](std::uint64_t seed) { exchanges(seed, Way::kDirect, 3); }},
    {"rings", [](std::uint64_t seed) { exchanges(seed, Way::kRings, 3); }},
    {"any", [](std::uint64_t seed) { exchanges(seed, Way::kAny, 5); }},
    {"leaving", leaving},
    {"absent", [](std::uint64_t seed) { failure(seed, a2a::kTimeout, [](Rank&, Call&) {}); }},
    {"closed", [](std::uint64_t seed) { failure(seed, a2a::kClosed, [](Rank&, Call&) {}); }},
    {"refused",
     [](std::uint64_t seed) {
       failure(seed, a2a::kRefused, [](Rank& rank, Call& call) {
         call.count = 0;
         call.flags = true;
         rank.launch(call, a2a::kRefusal);
       });
     }},
    {"mismatch",
     [](std::uint64_t seed) {
       failure(seed, a2a::kMismatch, [](Rank& rank, Call& call) {
         call.flags ^= rank.d.own.one_in(2);  // by the other kernel, too
         call.count -= call.flags ? call.count : call.count / 2;
         rank.launch(call, kDigest + 1);
       });
     }},
};

}  // namespace

int main(int argc, char** argv) { return shim::run_scenarios(argc, argv, kScenarios); }
