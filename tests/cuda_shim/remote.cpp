// The emulated machine as a library: a program elsewhere (tests/shim_host.py) is every rank's host. It gives each rank things to
// do, in order; `shim_run` lets all ranks go on until one of them has done all that it was given.
#include <deque>
#include <vector>

#include "machine.h"

#include "fibers.h"

namespace {

using shim::Device;
using shim::World;

struct Rank {
  std::deque<std::function<void(Device&)>> todo;
  std::vector<std::shared_ptr<shim::Event>> events;
  bool asks = false, leaves = false, skips = false;
  std::int32_t result = 0;
};

World* world = nullptr;
std::vector<Rank> ranks;

void host(Device& d) {
  Rank& rank = ranks[d.rank];
  for (;;) {
    if (!rank.todo.empty()) {
      const auto next = std::move(rank.todo.front());
      rank.todo.pop_front();
      next(d);
      continue;
    }
    if (rank.leaves) return;
    rank.asks = true;
    if (shim::outside.waits) shim::make_ready(&shim::outside);
    shim::wait_for("its program");
  }
}

void add(std::uint32_t rank, std::function<void(Device&)> work) {
  ranks[rank].todo.push_back([work = std::move(work), rank](Device& d) {
    if (!ranks[rank].skips) work(d);
  });
}

std::uint64_t load(const std::uint64_t* word, shim::Order order) {
  std::uint64_t value;
  shim::load(word, &value, sizeof value, order, shim::Scope::kSystem);
  return value;
}

}  // namespace

extern "C" {

std::uint8_t* shim_begin(const char* name, std::uint64_t seed, std::uint32_t count) {
  static std::string kept;
  kept = name;
  shim::announce(kept.c_str(), seed);
  world = new World(seed, count);
  ranks.clear();
  ranks.resize(count);
  world->start(host);
  return world->base;
}

void shim_end() {
  world->finish();
  delete world;
  world = nullptr;
}

std::uint64_t shim_window_bytes() { return World::kWindow; }
std::uint64_t shim_memory_bytes() { return World::kMemory; }
std::uint8_t* shim_memory(std::uint32_t rank) { return world->device(rank).memory; }

// Bits of the ranks that ask what to do now.
std::uint32_t shim_run() {
  for (;;) {
    std::uint32_t bits = 0;
    for (std::size_t r = 0; r < ranks.size(); r++) {
      bits |= ranks[r].asks ? 1u << r : 0;
      ranks[r].asks = false;
    }
    if (bits) return bits;
    shim::wait_for("a rank that asks");
  }
}

// After what it was given to do, a rank goes on with this or leaves.
void shim_go_on(std::uint32_t rank, std::int32_t leaves) {
  ranks[rank].leaves = leaves != 0;
  shim::make_ready(world->device(rank).host());
}

// What `shim_await` gave last: 0, -1 for a failure, -2 for a deadline; of `shim_sequence` -1 for a failure.
std::int32_t shim_result(std::uint32_t rank) { return ranks[rank].result; }

void shim_launch(std::uint32_t rank, const shim::Shape* shape, void (*kernel)(const void*), const void* params,
                 std::uint64_t bytes) {
  const auto* first = static_cast<const std::uint64_t*>(params);
  std::vector<std::uint64_t> copy(first, first + (bytes + 7) / 8);
  add(rank, [shape = *shape, kernel, copy](Device& d) { d.enqueue(shape, [kernel, copy] { kernel(copy.data()); }); });
}

void shim_record(std::uint32_t rank, std::uint32_t stream, std::uint32_t event) {
  add(rank, [=](Device& d) {
    auto& events = ranks[d.rank].events;
    if (events.size() <= event) events.resize(event + 1);
    events[event] = d.record(stream);
  });
}

void shim_wait(std::uint32_t rank, std::uint32_t stream, std::uint32_t event) {
  add(rank, [=](Device& d) { d.wait(stream, ranks[d.rank].events.at(event)); });
}

// What follows, up to the next of these, is done only if there is no failure.
void shim_sequence(std::uint32_t rank, const std::uint64_t* failure) {
  ranks[rank].todo.push_back([=](Device& d) {
    Rank& r = ranks[d.rank];
    r.skips = failure && load(failure, shim::Order::kRelaxed);
    r.result = r.skips ? -1 : 0;
  });
}

void shim_await(std::uint32_t rank, const std::uint64_t* word, std::uint64_t wanted, const std::uint64_t* failure,
                std::uint64_t timeout_ns) {
  ranks[rank].todo.push_back([=](Device& d) {
    Rank& r = ranks[d.rank];
    const std::uint64_t start = shim::timer_ns();
    r.skips = false;
    r.result = 0;
    while (!r.result && load(word, shim::Order::kAcquire) != wanted)
      if (load(failure, shim::Order::kRelaxed))
        r.result = -1;
      else if (shim::timer_ns() - start > timeout_ns)
        r.result = -2;
  });
}

void shim_synchronize(std::uint32_t rank) {
  ranks[rank].todo.push_back([=](Device& d) {
    ranks[d.rank].skips = false;
    d.synchronize();
  });
}

void shim_be_late(std::uint32_t rank, std::uint32_t steps) {
  add(rank, [=](Device&) { shim::be_late(steps); });
}

void shim_store(std::uint32_t rank, std::uint64_t* word, std::uint64_t value) {
  add(rank, [=](Device&) { shim::store(word, &value, sizeof value, shim::Order::kRelaxed, shim::Scope::kSystem); });
}

}  // extern "C"
