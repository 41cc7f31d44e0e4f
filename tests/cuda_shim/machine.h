// A host with one GPU a rank, on one CPU thread. Every thread of every running kernel is a fiber, and so is every rank's host
// program; all of them are scheduled by one generator of random numbers, so that a seed gives the same run each time. A fiber
// gives way at accesses that may meet others' (atomic, volatile) and where it must wait; what it does between these, nobody can
// tell from one step, unless there is a data race, which races.cpp finds in any order.
//
// Time stands still while anything changes, and leaps when nothing does any more: a deadline passes exactly where a GPU would
// have waited in vain.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "language.h"

namespace shim {

enum Exit { kWrong = 1, kMisuse = 2, kHang = 3, kRace = 4 };
[[noreturn]] void wrong(Exit code, const char* format, ...) __attribute__((format(printf, 2, 3)));
void announce(const char* scenario, std::uint64_t seed);

std::uint64_t mix(std::uint64_t a, std::uint64_t b = 0, std::uint64_t c = 0, std::uint64_t d = 0);
struct Random {
  std::uint64_t state;
  std::uint64_t next() { return mix(state += 0x9e3779b97f4a7c15ull); }
  std::uint32_t below(std::uint32_t n) { return std::uint32_t(next() % n); }
  bool one_in(std::uint32_t n) { return below(n) == 0; }
};

std::uint32_t draw(std::uint32_t below);  // of the scheduler's numbers
void pause(std::uint32_t one_in);         // others may run now
void give_way(std::uint32_t one_in);      // others run, and at that rate they get far
void be_late(std::uint32_t steps);        // a host is busy with something else, while no time passes

struct Shape {
  Dim grid, block;
  std::size_t shared_bytes = 0;
  bool programmatic = false;  // may start when every block of the launch before has allowed it
  std::uint32_t stream = 0;
};

class World;
struct DeviceState;
struct Event;
struct Fiber;

constexpr std::uint32_t kStreams = 4;

// A rank: its host program puts kernels on streams. Those of a stream run one after the other, beside all else.
class Device {
 public:
  Device(World& world, std::uint32_t rank);
  ~Device();

  template <class... P, class... A>
  void launch(void (*kernel)(P...), const Shape& shape, const A&... parameters) {
    enqueue(shape, [kernel, parameters...] { kernel(parameters...); });
  }
  void enqueue(const Shape& shape, std::function<void()> kernel);
  std::shared_ptr<Event> record(std::uint32_t stream);
  void wait(std::uint32_t stream, std::shared_ptr<Event> event);
  Fiber* host() const;
  void synchronize();  // all streams are through, and the host sees what they did

  World& world;
  const std::uint32_t rank, ranks;
  Random plan;           // draws the same on every rank
  Random own;            // draws of this rank alone
  std::uint8_t* window;  // of symmetric memory: rank r's lies at World::base + r * World::window
  std::uint8_t* memory;  // that peers don't reach
  std::unique_ptr<DeviceState> state;
};

class World {
 public:
  World(std::uint64_t seed, std::uint32_t ranks);
  ~World();
  World(const World&) = delete;
  void run(const std::function<void(Device&)>& program);  // on every rank; until all are through
  void start(std::function<void(Device&)> program);       // the same, but
  void finish();                                          // in two parts
  Device& device(std::uint32_t rank) { return *devices_[rank]; }

  static constexpr std::size_t kWindow = 8 << 20, kMemory = 16 << 20;  // zero at first
  const std::uint64_t seed;
  const std::uint32_t ranks;
  std::uint8_t* base;

 private:
  std::vector<std::unique_ptr<Device>> devices_;
  std::function<void(Device&)> program_;
};

struct Scenario {
  const char* name;
  void (*run)(std::uint64_t seed);
};
int run_scenarios(int argc, char** argv, const std::vector<Scenario>& scenarios);

}  // namespace shim
