// Copies past the cache, and into it with many requests in flight. A part of simd.cpp; see simd_types.h.
#pragma once
#include "simd_types.h"

namespace a2a {
namespace A2A_ISA {

#if A2A_LEVEL >= 2
inline void stream_line(u8* out, const u8* in) {
  for (std::size_t k = 0; k < 64; k += sizeof(Vec)) stream(out + k, load(in + k));
}
inline void copy_line(u8* out, const u8* in) { std::memcpy(out, in, 64); }

// Four pages at a time, their lines interleaved and the next four prefetched: one page after the other leaves the memory
// controller with too few requests in flight (bench/results/cpu_bounds.jsonl: "copy by stream", "line by line").
template <void (*kLine)(u8*, const u8*)>
void copy_pages(u8* out, const u8* in, std::size_t bytes) {
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(out)) & 63;
  if (bytes < head + 64) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  constexpr std::size_t kPages = 4, kPageBytes = 4096;
  while (bytes >= kPages * kPageBytes) {
    const bool more = bytes >= 2 * kPages * kPageBytes;
    for (std::size_t i = 0; i < kPageBytes; i += 128) {
      for (std::size_t w = 0; w < kPages; w++) {
        const std::size_t o = w * kPageBytes + i;
        if (more) {
          _mm_prefetch(reinterpret_cast<const char*>(in + o + kPages * kPageBytes), _MM_HINT_T1);
          _mm_prefetch(reinterpret_cast<const char*>(in + o + kPages * kPageBytes + 64), _MM_HINT_T1);
        }
        kLine(out + o, in + o);
        kLine(out + o + 64, in + o + 64);
      }
    }
    out += kPages * kPageBytes, in += kPages * kPageBytes, bytes -= kPages * kPageBytes;
  }
  while (bytes >= 64) {
    kLine(out, in);
    out += 64, in += 64, bytes -= 64;
  }
  std::memcpy(out, in, bytes);
}

void copy_stream(u8* out, const u8* in, std::size_t bytes) {
  copy_pages<stream_line>(out, in, bytes);
  _mm_sfence();  // streamed stores are weakly ordered; the signal that follows is not allowed to overtake them
}
void copy_fetch(u8* out, const u8* in, std::size_t bytes) { copy_pages<copy_line>(out, in, bytes); }

void copy_row_stream(u8* out, const u8* in, std::size_t bytes) {
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(out)) & 63;
  if (bytes < head + 64) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  for (; bytes >= 64; out += 64, in += 64, bytes -= 64) stream_line(out, in);
  std::memcpy(out, in, bytes);
}

void fence() { _mm_sfence(); }
#else
void copy_stream(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
void copy_fetch(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
void copy_row_stream(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
void fence() {}
#endif

}  // namespace A2A_ISA
}  // namespace a2a
