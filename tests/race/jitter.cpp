// Random delays inside the kernels, and sleep without looking around. The linker sends every memcpy and syscall of this
// program here (--wrap), so that the kernels are compiled from their sources as they are.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "harness.h"

extern "C" {
void* __real_memcpy(void* to, const void* from, std::size_t bytes);
long __real_syscall(long number, ...);
}

namespace race {
namespace {

constexpr long kTickNs = 20'000'000;
constexpr std::uint32_t kDeadlyTicks = 10;  // that nobody rang for a rank

std::atomic<std::uint64_t> threads{0};
thread_local Random jitter{mix(threads.fetch_add(1, std::memory_order_relaxed))};

void sleep_ns(long ns) {
  const timespec t{0, ns};
  nanosleep(&t, nullptr);
}

// Who sleeps, and for how many ticks nobody has rung. All ranks asleep is a lost wake-up if it stays so for a while: a rank may
// have been rung for already that has had no time on a processor. Relaxed, all of it: see harness.h.
constexpr int kMost = 16;
struct Sleeper {
  std::atomic<std::uint32_t> taken{0}, ticks{0};
} sleepers[kMost];
std::atomic<int> strict{0};

Sleeper& find_place() {
  for (;;)
    for (auto& s : sleepers) {
      std::uint32_t free = 0;
      if (s.taken.compare_exchange_strong(free, 1, std::memory_order_relaxed)) return s;
    }
}

bool all_asleep() {
  int asleep = 0;
  for (auto& s : sleepers) asleep += s.ticks.load(std::memory_order_relaxed) >= kDeadlyTicks;
  return asleep > 0 && asleep >= strict.load(std::memory_order_relaxed);
}

[[noreturn]] void lost_wake_up() {
  static const char text[] = "LOST WAKE-UP: every rank sleeps, and nobody is left to ring\n";
  (void)!write(2, text, sizeof text - 1);
  _exit(3);
}

long wait_until_rung(void* word, std::uint32_t value) {
  Sleeper& me = find_place();
  const timespec tick{0, kTickNs};
  std::uint32_t in_a_row = 0;
  long rc;
  for (;;) {
    rc = __real_syscall(SYS_futex, word, FUTEX_WAIT, value, &tick, nullptr, 0);
    if (rc == 0 || errno != ETIMEDOUT || strict.load(std::memory_order_relaxed) == 0) break;
    me.ticks.fetch_add(1, std::memory_order_relaxed);
    in_a_row = all_asleep() ? in_a_row + 1 : 0;
    if (in_a_row >= kDeadlyTicks) lost_wake_up();
  }
  me.ticks.store(0, std::memory_order_relaxed);
  me.taken.store(0, std::memory_order_relaxed);
  return rc;
}

void maybe_pause(std::uint32_t yield_in, std::uint32_t sleep_in) {
  if (jitter.one_in(sleep_in))
    sleep_ns(
        long(jitter.below(jitter.one_in(16) ? 4'000'000 : 200'000)));  // now and then, others get far ahead meanwhile
  else if (jitter.one_in(yield_in))
    sched_yield();
}

}  // namespace

void pause_a_moment(Random& random) {
  const std::uint32_t n = random.below(8);
  if (n == 0) sleep_ns(long(random.below(500'000)));
  if (n == 1) sched_yield();
}

void sleep_until_rung(int ranks) { strict.store(ranks, std::memory_order_relaxed); }
void one_rank_less() {
  if (strict.load(std::memory_order_relaxed)) strict.fetch_sub(1, std::memory_order_relaxed);
}

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

Stalls::Stalls() {
  thread_ = std::thread([this] {
    double last = now_s();
    while (!end_.load(std::memory_order_relaxed)) {
      sleep_ns(10'000'000);
      const double now = now_s();
      if (now - last > 0.06) ns_.fetch_add(std::uint64_t((now - last) * 1e9), std::memory_order_relaxed);
      last = now;
    }
  });
}

Stalls::~Stalls() {
  end_.store(true, std::memory_order_relaxed);
  thread_.join();
}

}  // namespace race

extern "C" {

void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  bytes < 65536 ? race::maybe_pause(24, 160) : race::maybe_pause(3, 6);
  return __real_memcpy(to, from, bytes);
}

long __wrap_syscall(long number, ...) {
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (long& value : a) value = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_process_vm_readv) {  // the other rank is a thread here: the sanitizers shall see what is read
    const auto *to = reinterpret_cast<const iovec*>(a[1]), *from = reinterpret_cast<const iovec*>(a[3]);
    __wrap_memcpy(to->iov_base, from->iov_base, from->iov_len);
    return long(from->iov_len);
  }
  if (number != SYS_futex) return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  race::maybe_pause(4, 8);  // between a rank's last look and its sleep, and before a bell is rung
  if (int(a[1]) == FUTEX_WAIT && race::strict.load(std::memory_order_relaxed))
    return race::wait_until_rung(reinterpret_cast<void*>(a[0]), std::uint32_t(a[2]));
  return __real_syscall(number, a[0], int(a[1]), int(a[2]), a[3], nullptr, 0);
}
}
