// Random rows through both kernels of an all-reduce with a residual add and RMSNorm. Every rank draws the same kernels, rows and
// cuts and, for itself, where its tensors lie; every element of both results is compared with one made column by column, and
// every byte around them, and of inputs that are no results, with what it was.
#include <cmath>

#include "machine.h"

#include "cuda/norm_flags.cu"
#include "cuda/norm_rows.cu"

namespace {

using a2a::Control;
using a2a::kBlocks;
using a2a::kColumns;
using a2a::kWorld;
using a2a::Staging;
using shim::Device;
using shim::World;
using shim::wrong;

constexpr std::uint32_t kDigest = 0x1234567, kText = 7;
constexpr std::uint64_t kStagingAt = a2a::align_up(sizeof(Control), 4096),
                        kUserAt = a2a::align_up(kStagingAt + sizeof(Staging), 4096);
constexpr std::uint64_t kDeadlineNs = 5'000'000'000, kGuard = 16, kBytes = a2a::element_bytes(DTYPE);
constexpr std::uint64_t kRow = kColumns * kBytes;
constexpr float kEps = 0.125f;
static_assert(kUserAt < World::kWindow / 2, "staging fits the window");

enum class Way { kFlags, kRows, kAny };

// ---- elements and rows, without any of the kernels' code

float value(std::uint32_t b) {
  if (DTYPE == a2a::kFloat32) return shim::of_bits<float>(b);
  if (DTYPE == a2a::kBfloat16) return shim::of_bits<float>(std::uint64_t(b) << 16);
  return shim::of_f16(std::uint16_t(b));
}
std::uint32_t bits(float v) {
  if (DTYPE == a2a::kFloat32) return std::uint32_t(shim::bits(v));
  return DTYPE == a2a::kBfloat16 ? shim::to_bf16(v) : shim::to_f16(v);
}
float rounded(float v) { return value(bits(v)); }

// Numbers of different size, so that another order of the terms shows. `who`: a rank, or one of these.
constexpr std::uint32_t kResidual = 100, kWeight = 101;
float element(std::uint64_t key, std::uint32_t who, std::uint64_t i) {
  const std::uint64_t random = shim::mix(key, who, i);
  return rounded(float(std::ldexp(double(random >> 40) / (1 << 24) - 0.5, int(random >> 8 & 7) - 4)));
}

float tree(const float* squares, std::uint64_t count, std::uint64_t leaves) {
  if (count == 0) return 0;
  if (leaves == 1) return squares[0];
  const std::uint64_t half = leaves / 2, left = count < half ? count : half;
  const float a = tree(squares, left, half), b = tree(squares + left, count - left, half);
  return a + b;
}

struct Row {
  float out[kColumns], residual_out[kColumns];
  Row(std::uint64_t key, std::uint64_t row) {
    float squares[kColumns];
    std::uint64_t leaves = 1;
    while (leaves < kColumns) leaves *= 2;
    for (std::uint32_t c = 0; c < kColumns; c++) {
      const std::uint64_t i = row * kColumns + c;
      float sum = element(key, 0, i);
      for (std::uint32_t p = 1; p < kWorld; p++) sum += element(key, p, i);
      residual_out[c] = rounded(element(key, kResidual, i) + rounded(sum));
      squares[c] = residual_out[c] * residual_out[c];
    }
    const float scale = 1.0f / std::sqrt(tree(squares, kColumns, leaves) / float(kColumns) + kEps);
    for (std::uint32_t c = 0; c < kColumns; c++) out[c] = rounded((residual_out[c] * scale) * element(key, kWeight, c));
  }
};

// ---- a rank's calls

struct Arena {
  std::uint8_t *begin, *at, *end;
  Arena(std::uint8_t* p, std::size_t bytes) : begin(p), at(p), end(p + bytes) {}
  void reset() { at = begin; }
  std::uint8_t* take(std::uint64_t bytes) {
    at += (16 - reinterpret_cast<std::uintptr_t>(at) % 16) % 16 + kGuard;
    std::uint8_t* p = at;
    at += bytes + kGuard;
    if (at > end) wrong(shim::kMisuse, "an arena is full");
    std::memset(p - kGuard, 0xee, bytes + 2 * kGuard);
    return p;
  }
};

struct Call {
  std::uint64_t key;
  std::uint32_t rows, grid, batch_rows;
  bool flags;
  std::uint8_t *in, *residual, *weight, *out, *residual_out;
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

  // Up to what the staging takes.
  void draw(Call& c) {
    c.key = d.plan.next();
    c.flags = !TWO_SHOT && (way_ == Way::kFlags || (way_ == Way::kAny && d.plan.one_in(2)));
    c.grid = 1 + d.plan.below(kBlocks);
    c.batch_rows = 1 + d.plan.below(3);
    std::uint32_t most = std::uint32_t(PACKET_BYTES / (a2a::Flags::kUnits * 64));
    if (!c.flags) {
      const std::uint64_t slot = a2a::align_up(c.batch_rows * (kRow + 4), 16);
      std::uint64_t batches = ROW_BYTES / (c.grid * slot) * (TWO_SHOT ? kWorld : 1);
      if (batches > a2a::kMostBatches) batches = a2a::kMostBatches;
      most = std::uint32_t(batches * c.grid * c.batch_rows);
      if (most > 12) most = 12;
    }
    c.rows = d.plan.one_in(4) ? most : d.plan.below(most + 1);
  }

  void prepare(Call& c) {
    Arena& arena = d.own.one_in(2) ? symmetric_ : ordinary_;
    c.in = arena.take(c.rows * kRow);
    c.residual = (d.own.one_in(2) ? symmetric_ : ordinary_).take(c.rows * kRow);
    c.weight = ordinary_.take(kRow);
    const std::uint32_t way = d.own.below(4);
    c.out = way == 0 ? c.in : way == 1 ? c.residual : ordinary_.take(c.rows * kRow);
    c.residual_out = way == 0 ? c.residual : way == 1 ? c.in : way == 2 ? c.residual : ordinary_.take(c.rows * kRow);
    for (std::uint64_t i = 0; i < c.rows * kColumns; i++) {
      put(c.in, i, element(c.key, d.rank, i));
      put(c.residual, i, element(c.key, kResidual, i));
    }
    for (std::uint64_t i = 0; i < kColumns; i++) put(c.weight, i, element(c.key, kWeight, i));
  }

  void launch(const Call& c, std::uint32_t digest) {
    a2a::Params a{};
    a.out = std::uint64_t(c.out), a.residual_out = std::uint64_t(c.residual_out);
    a.input = std::uint64_t(c.in), a.residual = std::uint64_t(c.residual), a.weight = std::uint64_t(c.weight);
    a.place = {std::uint64_t(d.world.base), World::kWindow, host(), kDeadlineNs, d.rank, kText};
    a.staging = kStagingAt;
    a.digest = digest;
    a.eps = kEps;
    a.rows = c.rows;
    a.batch_rows = c.batch_rows;
    if (c.flags)
      d.launch(norm_flags, {c.grid, std::uint32_t(norm_flags_threads)}, a);
    else
      d.launch(norm_rows, {c.grid, std::uint32_t(norm_rows_threads)}, a);
  }

  void check(const Call& c) const {
    check_around(c);
    for (std::uint64_t r = 0; r < c.rows; r++) {
      const Row wanted(c.key, r);
      for (std::uint32_t k = 0; k < kColumns; k++) {
        const std::uint64_t i = r * kColumns + k;
        compare("residual_out", c.residual_out, i, wanted.residual_out[k]);
        compare("out", c.out, i, wanted.out[k]);
        if (c.in != c.out && c.in != c.residual_out) compare("the input", c.in, i, element(c.key, d.rank, i));
        if (c.residual != c.out && c.residual != c.residual_out)
          compare("the residual", c.residual, i, element(c.key, kResidual, i));
      }
    }
  }

  void check_around(const Call& c) const {
    for (const std::uint8_t* p : {c.in, c.residual, c.out, c.residual_out})
      for (std::uint64_t i = 0; i < kGuard; i++)
        if ((p - kGuard)[i] != 0xee || (p + c.rows * kRow)[i] != 0xee)
          wrong(shim::kWrong, "a byte beside a tensor was written");
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
  static void put(std::uint8_t* p, std::uint64_t i, float v) {
    const std::uint32_t b = bits(v);
    std::memcpy(p + i * kBytes, &b, kBytes);
  }
  static void compare(const char* what, const std::uint8_t* p, std::uint64_t i, float wanted) {
    std::uint32_t b = 0;
    std::memcpy(&b, p + i * kBytes, kBytes);
    if (b != bits(wanted))
      wrong(shim::kWrong, "element %llu of %s is %x, expected %x", (unsigned long long)i, what, b, bits(wanted));
  }

  const Way way_;
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
  std::uint64_t records[kWorld] = {};
  world.run([&](Device& d) { Rank(d, Way::kAny).calls(2); });
  if (cause == a2a::kClosed)
    for (std::uint32_t r = 0; r < kWorld; r++) (&control(world, r).closed[0])[culprit] = 1;
  Call calls[kWorld];
  auto one_call = [&](Device& d, int round) {
    const bool other = round == 0 && d.rank == culprit;
    Rank rank(d, Way::kAny);
    Call& call = calls[d.rank];
    rank.draw(call);
    rank.prepare(call);
    if (other)
      otherwise(rank, call);
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
    world.run([&](Device& d) { Rank(d, Way::kAny).check_around(calls[d.rank]); });  // when nobody writes any more
  }
}

const std::vector<shim::Scenario> kScenarios = {
    {"flags", [](std::uint64_t seed) { exchanges(seed, Way::kFlags, 6); }},
    {"rows", [](std::uint64_t seed) { exchanges(seed, Way::kRows, 4); }},
    {"any", [](std::uint64_t seed) { exchanges(seed, Way::kAny, 4); }},
    {"absent", [](std::uint64_t seed) { failure(seed, a2a::kTimeout, [](Rank&, Call&) {}); }},
    {"closed", [](std::uint64_t seed) { failure(seed, a2a::kClosed, [](Rank&, Call&) {}); }},
    {"refused",
     [](std::uint64_t seed) {
       failure(seed, a2a::kRefused, [](Rank& rank, Call& call) { rank.launch(call, a2a::kRefusal); });
     }},
    {"mismatch",
     [](std::uint64_t seed) {
       failure(seed, a2a::kMismatch, [](Rank& rank, Call& call) { rank.launch(call, kDigest + 1); });
     }},
};

}  // namespace

int main(int argc, char** argv) { return shim::run_scenarios(argc, argv, kScenarios); }
