// What the race tests stand on. The ranks of a world are threads of one process that share one block of memory, so that
// ThreadSanitizer sees both sides of every exchange. Every result is compared with what it must be, bit for bit.
//
// * Nothing here may order one rank's accesses before another's, or races would be hidden: what ranks share beside the kernels'
//   memory is read-only or a relaxed atomic, and every rank draws a scenario's steps for itself, from one seed.
// * Only the kernels are compiled with a sanitizer, this is not: it would take most of the time. What is written to and read
//   from memory that kernels touch goes through memcpy, memcmp and memset, which the sanitizers see in any case.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cpu/a2a.h"
#include "../../csrc/cpu/signal.h"  // for constants and geometry; mutants break its functions, so none is called here

namespace race {

// Say what is wrong, and where, and end the process. Exit codes: 1 wrong, 3 lost wake-up; the sanitizers have their own.
[[noreturn]] void wrong(const char* format, ...) __attribute__((format(printf, 1, 2)));
void announce(const char* scenario, std::uint64_t seed);

// ---- values that only their key decides

std::uint64_t mix(std::uint64_t a, std::uint64_t b = 0, std::uint64_t c = 0, std::uint64_t d = 0);

struct Random {
  std::uint64_t state;
  std::uint64_t next() { return mix(state += 0x9e3779b97f4a7c15ull); }
  std::uint32_t below(std::uint32_t n) { return std::uint32_t(next() % n); }
  bool one_in(std::uint32_t n) { return below(n) == 0; }
};

void pattern(std::uint8_t* out, std::size_t bytes, std::uint64_t key);

// ---- jitter.cpp: the kernels' copies and system calls go through here (ld --wrap)

void pause_a_moment(Random& random);  // nothing, a yield, or up to half a millisecond

// From now on a sleeping rank sleeps until it is rung for. It does not look around every 20 ms, which would hide that nobody
// rang: when all of `ranks` sleep, that is a lost wake-up. 0: they look around again.
void sleep_until_rung(int ranks);
void one_rank_less();  // one has nothing more to wait for

double now_s();

// How long this process was kept from running since the object was made.
class Stalls {
 public:
  Stalls();
  ~Stalls();
  double seconds() const { return double(ns_.load(std::memory_order_relaxed)) * 1e-9; }

 private:
  std::atomic<std::uint64_t> ns_{0};
  std::atomic<bool> end_{false};
  std::thread thread_;
};

// ---- worlds

// Page-aligned memory. What is in it is undefined.
class Pages {
 public:
  explicit Pages(std::size_t n) : data(find(n)), bytes(n) {}
  ~Pages();
  Pages(const Pages&) = delete;
  std::uint8_t* const data;
  const std::size_t bytes;

 private:
  static std::uint8_t* find(std::size_t bytes);
};

// Pieces of memory one after the other. For AddressSanitizer, what has not been taken is out of bounds.
class Arena {
 public:
  Arena(std::uint8_t* base, std::size_t size);
  std::uint8_t* take(std::size_t bytes, std::size_t align = 1);  // null when it is full
  void reset();

 private:
  std::uint8_t* base_;
  std::size_t size_, at_;
};

class World;

struct Rank {
  World& world;
  a2a_context* c;
  std::uint32_t rank, ranks;
  Random plan;  // draws the same on every rank
  Random own;   // draws of this rank alone
  Arena symmetric, other_symmetric, ordinary;

  void expect(const char* what, std::int64_t got, std::int64_t wanted) const;
};

enum class Sleep { kUntilRung, kSlices };

// As if `count` collectives had run that left nothing but their entries; even. While no rank runs. (context.cpp has no such thing.)
void skip_epochs(a2a_context* context, std::uint32_t count);

// Formatted memory, and one context a rank. The seed decides staging, spinning, and how near the epochs are to wrapping. `reads`:
// ranks may read each other's ordinary memory (process_vm_readv).
class World {
 public:
  World(std::uint64_t seed, std::uint32_t ranks, Sleep sleep, bool reads = false, int (*interrupted)() = nullptr);
  ~World();
  World(const World&) = delete;

  void run(const std::function<void(Rank&)>& body);  // on one thread a rank; all are joined
  void meet();                                       // the ranks wait for each other, without ordering any access
  a2a_context* context(std::uint32_t r) const { return ranks_[r]->c; }
  std::uint8_t* moe_memory(std::uint32_t r) const { return segments_[2].data + r * kStride; }  // symmetric, too
  static std::uint64_t moe_address(std::size_t offset) { return std::uint64_t(3) << 48 | offset; }

  static constexpr std::size_t kStride = std::size_t(12) << 20;  // of symmetric memory, once a segment
  const std::uint64_t seed;
  const std::size_t staging;
  const a2a::Geometry geo;

 private:
  const Sleep sleep_;
  std::atomic<std::uint32_t> met_{0};
  const Pages control_, segments_[3], ordinary_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// ---- exchanges.cpp: a rank's sequence of random exchanges of bytes

enum class Way { kAny, kEager, kPush, kPull, kRead, kStaged };  // as in all_to_all_pairwise.cpp

class Exchanges {
 public:
  Exchanges(Rank& rank, Way way = Way::kAny, bool async = false, bool refusals = false);
  ~Exchanges();
  void step();   // one operation, which `plan` chooses
  void drain();  // wait for what is under way, and check it

 private:
  struct Exchange;
  std::uint64_t draw_size(bool even);
  std::unique_ptr<Exchange> draw(bool even);
  void prepare(Exchange& x);
  std::uint8_t* place(std::uint64_t bytes, bool receives);
  int even(const Exchange& x);
  void call(const Exchange& x, bool alike);
  void gather();
  static std::string reason(const Exchange& x, std::uint32_t rank);
  void expect_result(int result, std::uint32_t peer, std::uint32_t refusers) const;
  void expect_reason(const Exchange& x, std::uint32_t refuser, const char* told) const;
  void check(const Exchange& x) const;
  void finish_first();

  Rank& r_;
  const Way way_;
  const bool async_, refusals_;
  std::uint32_t request_;
  std::vector<std::unique_ptr<Exchange>> under_way_;
};

// ---- reductions.cpp: a rank's sequence of random all-reduces, reduce-scatters and all-gathers

enum class Memory { kAny, kOrdinary, kSymmetric };

class Reductions {
 public:
  Reductions(Rank& rank, bool two_shot, Memory memory = Memory::kAny, bool async = false);
  ~Reductions();
  void step();
  void drain();

 private:
  struct Call;
  std::size_t draw_share(std::uint32_t shares);
  std::uint8_t* place(std::size_t bytes);
  void prepare(Call& x);
  void check(const Call& x) const;
  void finish_first();

  Rank& r_;
  const bool two_shot_, async_;
  const Memory memory_;
  const std::uint32_t request_;
  std::uint32_t calls_ = 0;
  std::vector<Call> under_way_;
};

void norms(Rank& rank, int steps);  // norms.cpp: all-reduces with a residual add and RMSNorm

// ---- layers.cpp: a rank's sequence of Mixture-of-Experts layers

class Layers {
 public:
  explicit Layers(Rank& rank);
  ~Layers();
  enum Part { kDispatch, kCombine, kSpread, kAll };
  void step(Part part = kAll);

 private:
  struct Layer;
  Rank& r_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

// ---- scenarios.cpp and failures.cpp

struct Scenario {
  const char* name;
  void (*run)(std::uint64_t seed);
};
extern const std::vector<Scenario> kScenarios, kFailures;

}  // namespace race
