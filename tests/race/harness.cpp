#include "harness.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

// There in a build for AddressSanitizer.
extern "C" __attribute__((weak)) void __asan_poison_memory_region(const volatile void*, std::size_t);
extern "C" __attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, std::size_t);

namespace race {
namespace {

const char* scenario = "?";
std::uint64_t scenario_seed = 0;
std::vector<std::pair<std::size_t, std::uint8_t*>> spare;

}  // namespace

void announce(const char* name, std::uint64_t seed) {
  scenario = name;
  scenario_seed = seed;
}

void wrong(const char* format, ...) {
  char text[2048];
  int n = std::snprintf(text, sizeof text, "WRONG in scenario %s, seed %llu: ", scenario,
                        (unsigned long long)scenario_seed);
  va_list arguments;
  va_start(arguments, format);
  n += std::vsnprintf(text + n, sizeof text - std::size_t(n), format, arguments);
  va_end(arguments);
  if (n > int(sizeof text) - 2) n = int(sizeof text) - 2;
  text[n++] = '\n';
  (void)!write(2, text, std::size_t(n));
  _exit(1);
}

std::uint64_t mix(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  std::uint64_t x = a;
  for (std::uint64_t more : {b, c, d}) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x = (x ^ (x >> 31)) + more;
  }
  return x;
}

void pattern(std::uint8_t* out, std::size_t bytes, std::uint64_t key) {
  std::uint64_t x = mix(key, 1, 2, 3) | 1;
  for (std::size_t i = 0; i < bytes; i++) {
    if (i % 8 == 0) x = x * 6364136223846793005ull + 1442695040888963407ull;
    out[i] = std::uint8_t(x >> (i % 8 * 8));
  }
}

// Pages of earlier worlds are used again: fresh ones, and the sanitizers' shadows of them, would take most of the time.
std::uint8_t* Pages::find(std::size_t bytes) {
  for (auto& [size, pages] : spare)
    if (size == bytes && pages) return std::exchange(pages, nullptr);
  void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) wrong("no memory");
  return static_cast<std::uint8_t*>(fresh);
}

Pages::~Pages() {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(data, bytes);
  spare.emplace_back(bytes, data);
}

Arena::Arena(std::uint8_t* base, std::size_t size) : base_(base), size_(size), at_(size) { reset(); }

std::uint8_t* Arena::take(std::size_t bytes, std::size_t align) {
  const std::size_t from = (at_ + align - 1) / align * align;
  if (from + bytes + 16 > size_) return nullptr;
  at_ = from + bytes;
  if (__asan_unpoison_memory_region) {
    __asan_unpoison_memory_region(base_ + from, bytes);
    at_ = (at_ + 15) / 8 * 8;  // a gap to the next piece
  }
  return base_ + from;
}

void Arena::reset() {
  if (__asan_poison_memory_region) __asan_poison_memory_region(base_, at_);
  at_ = 0;
}

void Rank::expect(const char* what, std::int64_t got, std::int64_t wanted) const {
  if (got == wanted) return;
  const std::uint64_t f = a2a_failure(c);
  wrong("rank %u: %s is %lld, expected %lld (failure: cause %u, noticed by %u, peer %u)", rank, what, (long long)got,
        (long long)wanted, unsigned(f >> 48), unsigned(f >> 32 & 0xffff), unsigned(f >> 16 & 0xffff));
}

World::World(std::uint64_t s, std::uint32_t ranks, Sleep sleep, bool reads, int (*interrupted)())
    : seed(s),
      staging((mix(s, 11) % 2 ? 16 : 32) << 10),
      geo(ranks, staging),
      sleep_(sleep),
      control_(geo.total),
      segments_{Pages(kStride * ranks), Pages(kStride * ranks), Pages(kStride * ranks)},
      ordinary_(kStride * ranks) {
  if (a2a_control_bytes(ranks, staging) != geo.total) wrong("a2a_control_bytes disagrees with Geometry");
  std::memset(control_.data, 0, control_.bytes);
  a2a_format(control_.data, ranks, staging, 0u - std::uint32_t(mix(s, 12) % 40));
  const double spin_us[4] = {0, 0, 3, 40};
  for (std::uint32_t r = 0; r < ranks; r++) {
    a2a_context* c =
        a2a_attach(control_.data, 0, r, ranks, staging, nullptr, 2, spin_us[mix(s, 13) % 4], 1000, interrupted);
    if (!c) wrong("rank %u can't attach", r);
    for (const Pages& segment : segments_)
      if (a2a_add_segment(c, segment.data, kStride) != &segment - segments_)
        wrong("a2a_add_segment gave another index");
    if (reads) a2a_enable_reads(c, std::vector<int>(ranks, getpid()).data());
    auto arena = [r](const Pages& pages) { return Arena(pages.data + r * kStride, kStride); };
    ranks_.emplace_back(new Rank{*this,
                                 c,
                                 r,
                                 ranks,
                                 {mix(s, 14)},
                                 {mix(s, 15, r + 1)},
                                 arena(segments_[0]),
                                 arena(segments_[1]),
                                 arena(ordinary_)});
  }
}

World::~World() {
  for (auto& r : ranks_) {
    a2a_close(r->c);
    a2a_destroy(r->c);
  }
}

void World::run(const std::function<void(Rank&)>& body) {
  sleep_until_rung(sleep_ == Sleep::kUntilRung ? int(ranks_.size()) : 0);
  std::vector<std::thread> threads;
  for (auto& r : ranks_)
    threads.emplace_back([&body, &rank = *r] {
      body(rank);
      one_rank_less();
    });
  for (auto& t : threads) t.join();
  sleep_until_rung(0);
}

void World::meet() {
  const auto n = std::uint32_t(ranks_.size()), all = (met_.fetch_add(1, std::memory_order_relaxed) / n + 1) * n;
  while (met_.load(std::memory_order_relaxed) < all) sched_yield();
}

}  // namespace race

int main(int argc, char** argv) {
  std::uint64_t first = 1, count = 1;
  std::vector<race::Scenario> chosen;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--seeds") == 0 && i + 2 < argc) {
      first = std::strtoull(argv[++i], nullptr, 10);
      count = std::strtoull(argv[++i], nullptr, 10);
      continue;
    }
    bool found = false;
    for (const auto* list : {&race::kScenarios, &race::kFailures})
      for (const auto& scenario : *list)
        if (std::strcmp(argv[i], scenario.name) == 0 || std::strcmp(argv[i], "all") == 0) {
          chosen.push_back(scenario);
          found = true;
        }
    if (!found) race::wrong("no scenario is called %s", argv[i]);
  }
  for (std::uint64_t seed = first; seed < first + count; seed++)
    for (const auto& scenario : chosen) {
      race::announce(scenario.name, seed);
      const double start = race::now_s();
      scenario.run(seed);
      std::printf("%-12s seed %llu  %.2f s\n", scenario.name, (unsigned long long)seed, race::now_s() - start);
      std::fflush(stdout);
    }
  return chosen.empty();
}
