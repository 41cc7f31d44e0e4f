// A block's copy of one range: 16 bytes a thread and access where the alignments allow it, eight loads in flight.
#pragma once
#include <cstdint>

namespace a2a {

template <typename T>
__device__ __forceinline__ void copy_as(T* out, const T* in, std::uint64_t count, std::uint32_t thread,
                                        std::uint32_t threads) {
  constexpr int kDeep = 8;  // what fills the link with few SMs
  std::uint64_t i = thread;
  for (; i + (kDeep - 1) * std::uint64_t(threads) < count; i += kDeep * std::uint64_t(threads)) {
    T v[kDeep];
#pragma unroll
    for (int k = 0; k < kDeep; k++) v[k] = in[i + k * std::uint64_t(threads)];
#pragma unroll
    for (int k = 0; k < kDeep; k++) out[i + k * std::uint64_t(threads)] = v[k];
  }
  for (; i < count; i += threads) out[i] = in[i];
}

__device__ __noinline__ void copy(void* out, const void* in, std::uint64_t bytes, std::uint32_t thread,
                                  std::uint32_t threads) {
  std::uint8_t* to = static_cast<std::uint8_t*>(out);
  const std::uint8_t* from = static_cast<const std::uint8_t*>(in);
  const std::uint64_t to_at = reinterpret_cast<std::uint64_t>(out), from_at = reinterpret_cast<std::uint64_t>(in);
  if (to_at % 16 == from_at % 16) {
    std::uint64_t head = (16 - to_at % 16) % 16;
    if (head > bytes) head = bytes;
    const std::uint64_t body = (bytes - head) / 16;
    for (std::uint64_t i = thread; i < head; i += threads) to[i] = from[i];
    copy_as(reinterpret_cast<uint4*>(to + head), reinterpret_cast<const uint4*>(from + head), body, thread, threads);
    for (std::uint64_t i = head + body * 16 + thread; i < bytes; i += threads) to[i] = from[i];
  } else if ((to_at | from_at | bytes) % 4 == 0) {
    copy_as(reinterpret_cast<std::uint32_t*>(to), reinterpret_cast<const std::uint32_t*>(from), bytes / 4, thread,
            threads);
  } else if ((to_at | from_at | bytes) % 2 == 0) {
    copy_as(reinterpret_cast<std::uint16_t*>(to), reinterpret_cast<const std::uint16_t*>(from), bytes / 2, thread,
            threads);
  } else {
    copy_as(to, from, bytes, thread, threads);
  }
}

}  // namespace a2a
