// Worlds in which everything goes well.
#include "harness.h"

namespace race {
namespace {

std::uint32_t ranks_of(std::uint64_t seed) { return 2 + std::uint32_t(seed % 3); }

void exchanges(std::uint64_t seed, Way way, int steps, bool async = false, bool refusals = false) {
  World world(seed, ranks_of(seed), Sleep::kUntilRung, way == Way::kRead || (way == Way::kAny && mix(seed) % 2));
  world.run([&](Rank& rank) {
    Exchanges exchanges(rank, way, async, refusals);
    for (int i = 0; i < steps; i++) exchanges.step();
  });
}

void layers(std::uint64_t seed, Layers::Part part, int steps) {
  World world(seed, ranks_of(seed), Sleep::kUntilRung);
  world.run([&](Rank& rank) {
    Layers layers(rank);
    for (int i = 0; i < steps; i++) layers.step(part);
  });
}

void reductions(std::uint64_t seed, bool two_shot, Memory memory, int steps, bool async = false) {
  World world(seed, ranks_of(seed), Sleep::kUntilRung);
  world.run([&](Rank& rank) {
    Reductions reductions(rank, two_shot, memory, async);
    for (int i = 0; i < steps; i++) reductions.step();
  });
}

// All of it on one communicator, whose entries, rings and staging they share.
void mixed(std::uint64_t seed) {
  World world(seed, ranks_of(seed), Sleep::kUntilRung, mix(seed) % 2);
  world.run([&](Rank& rank) {
    Exchanges exchanges(rank, Way::kAny, true, true);
    Layers layers(rank);
    for (int i = 0; i < 40; i++) {
      if (rank.plan.one_in(3)) {
        layers.step();
      } else if (rank.plan.one_in(2)) {
        exchanges.drain();  // they share the arenas
        Reductions(rank, rank.plan.one_in(2)).step();
      } else {
        exchanges.step();
      }
    }
  });
}

void alone(std::uint64_t seed) {
  World world(seed, 1, Sleep::kUntilRung);
  world.run([&](Rank& rank) {
    Exchanges exchanges(rank, Way::kAny, true, false);
    Layers layers(rank);
    for (int i = 0; i < 10; i++) rank.plan.one_in(2) ? layers.step() : exchanges.step();
    exchanges.drain();
    for (int i = 0; i < 10; i++) Reductions(rank, rank.plan.one_in(2)).step();
  });
}

// Pushes and pulls that follow upon more than 2^31 collectives without any: words that have long been left alone must not
// pass for new ones.
void long_quiet(std::uint64_t seed) {
  for (const Way way : {Way::kPush, Way::kPull, Way::kRead, Way::kStaged}) {
    World world(seed, ranks_of(seed), Sleep::kUntilRung, way == Way::kRead);
    for (int i = 0; i < 3; i++) {
      world.run([&](Rank& rank) {
        Exchanges exchanges(rank, way);
        for (int k = 0; k < 3; k++) exchanges.step();
      });
      for (std::uint32_t r = 0; r < ranks_of(seed); r++) skip_epochs(world.context(r), (1u << 31) + 2);
    }
  }
}

}  // namespace

const std::vector<Scenario> kScenarios = {
    {"eager", [](std::uint64_t seed) { exchanges(seed, Way::kEager, 60); }},
    {"push", [](std::uint64_t seed) { exchanges(seed, Way::kPush, 30); }},
    {"pull", [](std::uint64_t seed) { exchanges(seed, Way::kPull, 30); }},
    {"read", [](std::uint64_t seed) { exchanges(seed, Way::kRead, 30); }},
    {"staged", [](std::uint64_t seed) { exchanges(seed, Way::kStaged, 30); }},
    {"all_to_all", [](std::uint64_t seed) { exchanges(seed, Way::kAny, 60); }},
    {"async", [](std::uint64_t seed) { exchanges(seed, Way::kAny, 40, true, true); }},
    {"refusals", [](std::uint64_t seed) { exchanges(seed, Way::kEager, 60, false, true); }},
    {"dispatch", [](std::uint64_t seed) { layers(seed, Layers::kDispatch, 20); }},
    {"combine", [](std::uint64_t seed) { layers(seed, Layers::kCombine, 10); }},
    {"spread", [](std::uint64_t seed) { layers(seed, Layers::kSpread, 10); }},
    {"one_shot", [](std::uint64_t seed) { reductions(seed, false, Memory::kAny, 60); }},
    {"two_shot", [](std::uint64_t seed) { reductions(seed, true, Memory::kAny, 30, true); }},
    {"reduce_staged", [](std::uint64_t seed) { reductions(seed, true, Memory::kOrdinary, 30); }},
    {"reduce_direct", [](std::uint64_t seed) { reductions(seed, true, Memory::kSymmetric, 30); }},
    {"norms",
     [](std::uint64_t seed) {
       World world(seed, ranks_of(seed), Sleep::kUntilRung);
       world.run([](Rank& rank) { norms(rank, 20); });
     }},
    {"mixed", mixed},
    {"alone", alone},
    {"long_quiet", long_quiet},
};

}  // namespace race
