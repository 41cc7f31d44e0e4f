// Which instruction set this CPU runs, asked once.
#include <atomic>
#include <cstring>

#include "a2a.h"
#include "simd.h"

namespace a2a {
namespace {

const Simd* best() {
#if defined(__x86_64__) && !defined(A2A_PLAIN_ONLY)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return &kSimdAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return &kSimdAvx2;
#endif
  return &kSimdPlain;
}

std::atomic<const Simd*> chosen{nullptr};

}  // namespace

const Simd& simd() {
  const Simd* simd = chosen.load(std::memory_order_relaxed);
  if (!simd) chosen.store(simd = best(), std::memory_order_relaxed);
  return *simd;
}

}  // namespace a2a

using namespace a2a;

const char* a2a_isa(void) { return simd().name; }

int a2a_select_isa(const char* name) {
  const Simd* have[3] = {&kSimdPlain, nullptr, nullptr};
#if defined(__x86_64__) && !defined(A2A_PLAIN_ONLY)
  if (best() != &kSimdPlain) have[1] = &kSimdAvx2;
  if (best() == &kSimdAvx512) have[2] = &kSimdAvx512;
#endif
  for (const Simd* s : have)
    if (s && std::strcmp(s->name, name) == 0) {
      chosen.store(s, std::memory_order_relaxed);
      return 1;
    }
  return 0;
}
