// CUDA C++ as far as a2a's kernels use it, for a C++ compiler. Every source of a kernel is compiled with this included first;
// a kernel's threads are fibers of machine.cpp, and its accesses are judged by races.cpp.
//
// Not here on purpose: __threadfence and its kin. Kernels order memory through ptx.cuh, where order and scope are in the name.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace shim {

struct Dim {
  std::uint32_t x, y, z;
  constexpr Dim(std::uint32_t x_ = 1, std::uint32_t y_ = 1, std::uint32_t z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ---- machine.cpp: the thread that runs, its block and its warp

Dim thread_index(), block_index(), block_dim(), grid_dim();
std::uint64_t timer_ns();
void barrier(std::uint32_t number, std::uint32_t threads);  // orders memory
std::uint32_t votes_at_barrier(bool vote);                  // of all threads of the block
void* shared_memory(const void* variable, std::size_t bytes, std::size_t align);
void* dynamic_shared_memory();
struct BulkBarrier {
  std::int32_t awaited;           // bytes
  std::uint16_t expects, phases;  // whether somebody has said how many; phases that are over
};
// A copy by the copy engine, which is none of the thread's own accesses. With a barrier: a load, over when the barrier says so.
// Without: a store; what the thread has committed is over, or its sources have been read, when it has waited for that.
void bulk_copy(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier);
void bulk_expect(std::uint64_t* barrier, std::uint32_t bytes);
void bulk_commit();
void bulk_wait(bool arrived);
void wait_for_launch_before();  // griddepcontrol.wait
void let_next_launch_start();   // griddepcontrol.launch_dependents

// All lanes of `mask` come here with the same `operation`, one value each; then lanes[i] is lane i's. Only "syncwarp" orders
// memory: shuffles and votes do not.
struct Lanes {
  std::uint64_t value[32];
};
Lanes exchange(const char* operation, std::uint32_t mask, std::uint64_t value);
std::uint32_t lane();

// ---- races.cpp: accesses that may meet others. Each is one access, whatever its size up to 16 bytes.

enum class Order { kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Scope : std::uint32_t { kBlock = 1, kDevice = 2, kSystem = 3 };
void load(const void* p, void* value, std::uint32_t bytes, Order order, Scope scope);
void store(void* p, const void* value, std::uint32_t bytes, Order order, Scope scope);
void fence(Order order, Scope scope);
// An update is begin_update, peek, poke, without anybody between.
void begin_update(void* p, std::uint32_t bytes, Order order, Scope scope);
void peek(const void* p, void* value, std::uint32_t bytes);
void poke(void* p, const void* value, std::uint32_t bytes);

template <class T, class F>
T update(T* p, Order order, Scope scope, F next) {
  T was;
  begin_update(p, sizeof(T), order, scope);
  peek(p, &was, sizeof(T));
  const T now = next(was);
  poke(p, &now, sizeof(T));
  return was;
}

template <class T, class Tag>
T& shared(Tag) {  // a tag a declaration: every instance of a template has variables of its own
  static char variable;
  return *static_cast<T*>(
      shared_memory(&variable, sizeof(T), alignof(T) < 128 ? 128 : alignof(T)));  // if it says so or not
}
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(dynamic_shared_memory());
}

template <class T>
std::uint64_t bits(T v) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a warp exchanges up to 8 bytes");
  std::uint64_t b = 0;
  std::memcpy(&b, &v, sizeof v);
  return b;
}
template <class T>
T of_bits(std::uint64_t b) {
  T v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

}  // namespace shim

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // the C++ library says __attribute__((__noinline__))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#define threadIdx (::shim::thread_index())
#define blockIdx (::shim::block_index())
#define blockDim (::shim::block_dim())
#define gridDim (::shim::grid_dim())
constexpr int warpSize = 32;

using dim3 = ::shim::Dim;
struct alignas(8) uint2 {
  std::uint32_t x, y;
};
struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};
struct alignas(8) int2 {
  std::int32_t x, y;
};
struct alignas(16) int4 {
  std::int32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
constexpr uint2 make_uint2(std::uint32_t x, std::uint32_t y) { return {x, y}; }
constexpr uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) { return {x, y, z, w}; }
constexpr float2 make_float2(float x, float y) { return {x, y}; }
constexpr float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- barriers

inline void __syncthreads() {
  const dim3 n = blockDim;
  ::shim::barrier(0, n.x * n.y * n.z);
}

inline int __syncthreads_count(int vote) { return int(::shim::votes_at_barrier(vote != 0)); }
inline int __syncthreads_or(int vote) { return __syncthreads_count(vote) != 0; }
inline int __syncthreads_and(int vote) { return __syncthreads_count(!vote) == 0; }

// ---- warps

inline void __syncwarp(unsigned mask = ~0u) { ::shim::exchange("syncwarp", mask, 0); }

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  const int first = int(::shim::lane()) / width * width;
  return ::shim::of_bits<T>(::shim::exchange("shfl", mask, ::shim::bits(v)).value[first + (source & (width - 1))]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const int lane = int(::shim::lane()), from = lane - int(delta), first = lane / width * width;
  const ::shim::Lanes all = ::shim::exchange("shfl_up", mask, ::shim::bits(v));
  return from < first ? v : ::shim::of_bits<T>(all.value[from]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const int lane = int(::shim::lane()), from = lane + int(delta), end = lane / width * width + width;
  const ::shim::Lanes all = ::shim::exchange("shfl_down", mask, ::shim::bits(v));
  return from >= end ? v : ::shim::of_bits<T>(all.value[from]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32) {
  const int lane = int(::shim::lane()), from = lane ^ lanes, end = lane / width * width + width;
  const ::shim::Lanes all = ::shim::exchange("shfl_xor", mask, ::shim::bits(v));
  return from >= end ? v : ::shim::of_bits<T>(all.value[from]);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const ::shim::Lanes all = ::shim::exchange("ballot", mask, predicate != 0);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; i++)
    if (mask >> i & 1 && all.value[i]) votes |= 1u << i;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

template <class T>
unsigned __match_any_sync(unsigned mask, T v) {
  const ::shim::Lanes all = ::shim::exchange("match_any", mask, ::shim::bits(v));
  unsigned alike = 0;
  for (unsigned i = 0; i < 32; i++)
    if (mask >> i & 1 && all.value[i] == ::shim::bits(v)) alike |= 1u << i;
  return alike;
}

namespace shim {
template <class T, class F>
T reduce(const char* operation, std::uint32_t mask, T v, F join) {
  const Lanes all = exchange(operation, mask, bits(v));
  bool first = true;
  T sum{};
  for (std::uint32_t i = 0; i < 32; i++)
    if (mask >> i & 1) {
      const T next = of_bits<T>(all.value[i]);
      sum = first ? next : join(sum, next);
      first = false;
    }
  return sum;
}
}  // namespace shim
#define SHIM_REDUCE(NAME, TYPE, EXPRESSION)                                                     \
  inline TYPE __reduce_##NAME##_sync(unsigned mask, TYPE v) {                                   \
    return ::shim::reduce("reduce_" #NAME, mask, v, [](TYPE a, TYPE b) { return EXPRESSION; }); \
  }
SHIM_REDUCE(add, unsigned, a + b)
SHIM_REDUCE(min, unsigned, a < b ? a : b)
SHIM_REDUCE(max, unsigned, a > b ? a : b)
SHIM_REDUCE(and, unsigned, a& b)
SHIM_REDUCE(or, unsigned, a | b)
SHIM_REDUCE(xor, unsigned, a ^ b)
SHIM_REDUCE(add, int, int(unsigned(a) + unsigned(b)))
SHIM_REDUCE(min, int, a < b ? a : b)
SHIM_REDUCE(max, int, a > b ? a : b)
#undef SHIM_REDUCE

// ---- atomics: relaxed, of the device; with a suffix, of the block or the system

#define SHIM_ATOMIC(SUFFIX, SCOPE)                                                                         \
  template <class T>                                                                                       \
  T atomicAdd##SUFFIX(T* p, std::common_type_t<T> v) {                                                     \
    return ::shim::update(p, ::shim::Order::kRelaxed, SCOPE, [v](T was) { return T(was + v); });           \
  }                                                                                                        \
  template <class T>                                                                                       \
  T atomicMax##SUFFIX(T* p, std::common_type_t<T> v) {                                                     \
    return ::shim::update(p, ::shim::Order::kRelaxed, SCOPE, [v](T was) { return was < v ? v : was; });    \
  }                                                                                                        \
  template <class T>                                                                                       \
  T atomicMin##SUFFIX(T* p, std::common_type_t<T> v) {                                                     \
    return ::shim::update(p, ::shim::Order::kRelaxed, SCOPE, [v](T was) { return v < was ? v : was; });    \
  }                                                                                                        \
  template <class T>                                                                                       \
  T atomicOr##SUFFIX(T* p, std::common_type_t<T> v) {                                                      \
    return ::shim::update(p, ::shim::Order::kRelaxed, SCOPE, [v](T was) { return T(was | v); });           \
  }                                                                                                        \
  template <class T>                                                                                       \
  T atomicAnd##SUFFIX(T* p, std::common_type_t<T> v) {                                                     \
    return ::shim::update(p, ::shim::Order::kRelaxed, SCOPE, [v](T was) { return T(was & v); });           \
  }                                                                                                        \
  template <class T>                                                                                       \
  T atomicExch##SUFFIX(T* p, std::common_type_t<T> v) {                                                    \
    return ::shim::update(p, ::shim::Order::kRelaxed, SCOPE, [v](T) { return v; });                        \
  }                                                                                                        \
  template <class T>                                                                                       \
  T atomicCAS##SUFFIX(T* p, std::common_type_t<T> old, std::common_type_t<T> v) {                          \
    return ::shim::update(p, ::shim::Order::kRelaxed, SCOPE, [=](T was) { return was == old ? v : was; }); \
  }
SHIM_ATOMIC(, ::shim::Scope::kDevice)
SHIM_ATOMIC(_block, ::shim::Scope::kBlock)
SHIM_ATOMIC(_system, ::shim::Scope::kSystem)
#undef SHIM_ATOMIC

// ---- arithmetic

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline unsigned __float_as_uint(float v) { return ::shim::of_bits<unsigned>(::shim::bits(v)); }
inline float __uint_as_float(unsigned v) { return ::shim::of_bits<float>(v); }
inline int __float_as_int(float v) { return ::shim::of_bits<int>(::shim::bits(v)); }
inline float __int_as_float(int v) { return ::shim::of_bits<float>(::shim::bits(v)); }
inline double __longlong_as_double(long long v) { return ::shim::of_bits<double>(::shim::bits(v)); }
inline long long __double_as_longlong(double v) { return ::shim::of_bits<long long>(::shim::bits(v)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
template <class T>
constexpr T min(T a, std::common_type_t<T> b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, std::common_type_t<T> b) {
  return a < b ? b : a;
}
