// Random ragged all-to-alls through csrc/cuda/all_to_all_push.cu, whose pairs come from lists in a GPU's memory. Every rank draws
// the same sizes and places; every byte of the outputs is compared, those that nobody sends to, too.
#include "machine.h"

#include "cuda/all_to_all_push.cu"

namespace {

using a2a::Control;
using a2a::kBlocks;
using a2a::kChannels;
using a2a::kWorld;
using a2a::Staging;
using shim::Device;
using shim::World;
using shim::wrong;

constexpr std::uint32_t kDigest = 0x1234567, kText = 7;
constexpr std::uint64_t kStagingAt = a2a::align_up(sizeof(Control), 4096);
constexpr std::uint64_t kDeadlineNs = 5'000'000'000, kListsAt = 64, kInAt = 4096, kOutAt = World::kMemory / 2,
                        kBehind = 2048;
static_assert(a2a::kRagged && kStagingAt + sizeof(Staging) < World::kWindow && 4 * kWorld * 4 < kInAt - kListsAt, "");

std::uint8_t pattern(std::uint64_t key, std::uint64_t i) {
  return std::uint8_t((key + i / 8 + 1) * 0x9e3779b97f4a7c15ull >> (i % 8 * 7));
}

std::uint64_t draw_size(shim::Random& random, bool few) {  // around the thresholds
  const std::uint64_t flag = FLAG_BYTES, channel = a2a::kChannelBytes;
  const std::uint64_t small[4] = {0, random.below(60), random.below(FLAG_BYTES), flag};
  const std::uint64_t large[4] = {0, flag + random.below(600), 4 * CHUNK_BYTES + random.below(2000),
                                  2 * channel + random.below(9000)};
  return (few ? small : large)[random.below(4)];
}

struct Call {
  std::uint64_t key, row;
  std::int32_t rows[kWorld][kWorld], in_at[kWorld][kWorld], out_at[kWorld][kWorld];  // [from][to]
  std::int32_t in_rows[kWorld], out_rows[kWorld];
};

class Rank {
 public:
  Rank(Device& device, bool few) : d(device), few_(few) {}

  void calls(std::uint32_t most) {
    for (std::uint32_t i = 0; i < most; i++) {
      Call c;
      draw(c);
      prepare(c);
      launch(c, kDigest);
      d.synchronize();
      if (record()) wrong(shim::kWrong, "a failure was recorded: %llx", (unsigned long long)record());
      check(c);
    }
  }

  void draw(Call& c) {
    const std::uint64_t rows[6] = {1, 4, 12, 16, 100, 512};
    c.key = d.plan.next();
    c.row = rows[d.plan.below(6)];
    for (auto& from : c.rows)
      for (std::int32_t& n : from) n = std::int32_t((draw_size(d.plan, few_) + c.row - 1) / c.row * !d.plan.one_in(5));
    for (std::uint32_t r = 0; r < kWorld; r++) {
      std::int32_t in = std::int32_t(d.plan.below(3)), out = std::int32_t(d.plan.below(3));
      const std::uint32_t first = d.plan.below(kWorld);  // not in the order of ranks
      for (std::uint32_t k = 0; k < kWorld; k++) {
        const std::uint32_t p = (first + k) % kWorld;
        c.in_at[r][p] = in;
        in += c.rows[r][p] + std::int32_t(d.plan.below(2));
        c.out_at[p][r] = out;
        out += c.rows[p][r] + std::int32_t(d.plan.below(2));
      }
      c.in_rows[r] = in;
      c.out_rows[r] = out;
    }
  }

  std::uint8_t* in() const { return d.memory + kInAt; }
  std::uint8_t* out() const { return d.memory + kOutAt; }
  std::int32_t* list(std::uint32_t i) const {
    return reinterpret_cast<std::int32_t*>(d.memory + kListsAt) + i * kWorld;
  }

  void prepare(const Call& c) {
    if (kInAt + c.in_rows[d.rank] * c.row > kOutAt || kOutAt + c.out_rows[d.rank] * c.row + kBehind > World::kMemory)
      wrong(shim::kMisuse, "memory is full");
    for (std::uint32_t p = 0; p < kWorld; p++) {
      const std::int32_t values[4] = {c.in_at[d.rank][p], c.rows[d.rank][p], c.out_at[d.rank][p], c.rows[p][d.rank]};
      for (std::uint32_t i = 0; i < 4; i++) list(i)[p] = values[i];
      for (std::uint64_t i = 0; i < c.rows[d.rank][p] * c.row; i++)
        in()[c.in_at[d.rank][p] * c.row + i] = pattern(c.key + d.rank * 64 + p, i);
    }
    std::memset(out(), 0xee, c.out_rows[d.rank] * c.row);
    std::memset(out() + c.out_rows[d.rank] * c.row, 0xdd, kBehind);
  }

  // As a2a/algorithms/all_to_all_push.py decides, except for what any value of must do.
  void launch(const Call& c, std::uint32_t digest) {
    a2a::Params a{};
    a.out = std::uint64_t(out());
    a.in = std::uint64_t(in());
    a.in_offset = list(0), a.send = list(1), a.out_offset = list(2), a.recv = list(3);
    a.place = {std::uint64_t(d.world.base), World::kWindow, host(), kDeadlineNs, d.rank, kText};
    a.staging = kStagingAt;
    a.digest = digest;
    a.row_bytes = c.row;
    a.in_rows = c.in_rows[d.rank], a.out_rows = c.out_rows[d.rank];
    const std::uint64_t most = c.row * std::uint64_t(a.in_rows > a.out_rows ? a.in_rows : a.out_rows);
    if (most <= FLAG_BYTES && !d.own.one_in(4)) {
      d.launch(all_to_all_push_small, {1 + d.own.below(kBlocks), 32 * (1 + d.own.below(2))}, a);
      return;
    }
    a.copiers = d.own.below(3);
    d.launch(all_to_all_push_large, {kBlocks + a.copiers, 2 * a2a::kTeams * a2a::kTeam}, a);
  }

  void check(const Call& c) const {
    std::vector<std::uint8_t> expected(c.out_rows[d.rank] * c.row, 0xee);
    for (std::uint32_t p = 0; p < kWorld; p++)
      for (std::uint64_t i = 0; i < c.rows[p][d.rank] * c.row; i++)
        expected[c.out_at[p][d.rank] * c.row + i] = pattern(c.key + p * 64 + d.rank, i);
    for (std::uint64_t i = 0; i < expected.size(); i++)
      if (out()[i] != expected[i])
        wrong(shim::kWrong, "byte %llu of %llu is wrong", (unsigned long long)i, (unsigned long long)expected.size());
    check_behind(c);
  }

  void check_behind(const Call& c) const {
    for (std::uint64_t i = 0; i < kBehind; i++)
      if (out()[c.out_rows[d.rank] * c.row + i] != 0xdd) wrong(shim::kWrong, "a byte behind the output was written");
  }

  std::uint64_t* host() const { return reinterpret_cast<std::uint64_t*>(d.memory); }
  std::uint64_t record() const { return *host(); }

  Device& d;

 private:
  const bool few_;
};

void begin(World& world) {  // a communicator that has been used: calls and chunks are about to wrap around, or not
  for (std::uint32_t r = 0; r < kWorld; r++) {
    auto& control = *reinterpret_cast<Control*>(world.base + r * World::kWindow);
    auto& staging = *reinterpret_cast<Staging*>(world.base + r * World::kWindow + kStagingAt);
    control.ok = 1;
    for (std::uint32_t& epoch : control.epoch) epoch = 0u - std::uint32_t(shim::mix(world.seed, 3) % 12);
    for (std::uint32_t p = 0; p < kWorld; p++)
      for (std::uint32_t c = 0; c < kChannels; c++) {
        const auto chunks = [&](std::uint32_t from, std::uint32_t to) {
          return 0u - std::uint32_t(shim::mix(world.seed, from, to, c) % 12);
        };
        staging.sent[p][c] = staging.consumed[p][c] = chunks(r, p);
        staging.received[p][c] = staging.produced[p][c] = chunks(p, r);
      }
  }
}

void exchanges(std::uint64_t seed, bool few, std::uint32_t calls) {
  World world(seed, kWorld);
  begin(world);
  world.run([&](Device& d) { Rank(d, few).calls(calls); });
}

// Who must know of a failure when its call is over; a pair is the culprit and the next rank.
enum Told { kAll, kPair, kNext, kOthers };

// One rank's lists are wrong, or it doesn't come. Nothing behind an output may be written, and every later call ends at once.
void failure(std::uint64_t seed, std::uint32_t cause, Told told, const std::function<void(Rank&, Call&)>& otherwise) {
  if (kWorld == 1) return;
  World world(seed, kWorld);
  begin(world);
  const auto culprit = std::uint32_t(shim::mix(seed, 5) % kWorld);
  const bool few = shim::mix(seed, 6) % 2;
  world.run([&](Device& d) { Rank(d, few).calls(1); });
  for (int round = 0; round < 2; round++)
    world.run([&](Device& d) {
      Rank rank(d, few);
      Call call;
      rank.draw(call);
      rank.prepare(call);
      if (round == 0 && d.rank == culprit)
        otherwise(rank, call);
      else
        rank.launch(call, kDigest);
      d.synchronize();
      const bool mine = d.rank == culprit, next = d.rank == (culprit + 1) % kWorld;
      const bool must = round || (mine ? told == kAll || told == kPair : next || told == kAll || told == kOthers);
      const std::uint64_t record = rank.record();
      if ((must || record) && record >> 48 != cause)
        wrong(shim::kWrong, "the record is %llx, expected cause %u", (unsigned long long)record, cause);
      rank.check_behind(call);
    });
}

const std::vector<shim::Scenario> kScenarios = {
    {"packets", [](std::uint64_t seed) { exchanges(seed, true, 8); }},
    {"rings", [](std::uint64_t seed) { exchanges(seed, false, 3); }},
    {"absent", [](std::uint64_t seed) { failure(seed, a2a::kTimeout, kOthers, [](Rank&, Call&) {}); }},
    {"mismatch",
     [](std::uint64_t seed) {
       failure(seed, a2a::kMismatch, kAll, [](Rank& rank, Call& call) { rank.launch(call, kDigest + 1); });
     }},
    {"splits",  // the culprit expects more or fewer rows of the next rank than that sends
     [](std::uint64_t seed) {
       failure(seed, a2a::kSplits, kPair, [](Rank& rank, Call& call) {
         std::int32_t& rows = rank.list(3)[(rank.d.rank + 1) % kWorld];
         rows += rows == call.out_rows[rank.d.rank] ? -1 : 1;
         rank.launch(call, kDigest);
       });
     }},
    {"behind_the_end",  // its rows would begin behind the end of the next rank's output
     [](std::uint64_t seed) {
       failure(seed, a2a::kSplits, kNext, [](Rank& rank, Call& call) {
         rank.list(2)[(rank.d.rank + 1) % kWorld] = call.out_rows[(rank.d.rank + 1) % kWorld] + 1;
         rank.launch(call, kDigest);
       });
     }},
    {"outside",  // it sends rows that it doesn't have
     [](std::uint64_t seed) {
       failure(seed, a2a::kSplits, kAll, [](Rank& rank, Call& call) {
         const std::int32_t values[3] = {-1, call.in_rows[rank.d.rank] + 1, 0x7fffffff};
         rank.list(0)[rank.d.own.below(kWorld)] = values[rank.d.own.below(3)];
         rank.launch(call, kDigest);
       });
     }},
};

}  // namespace

int main(int argc, char** argv) { return shim::run_scenarios(argc, argv, kScenarios); }
