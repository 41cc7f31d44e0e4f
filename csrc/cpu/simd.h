// The inner loops that want wide registers. simd.cpp is compiled once per instruction set and chosen at run time.
#pragma once
#include <cstddef>
#include <cstdint>

namespace a2a {

enum Dtype : std::uint32_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
  kFloat64 = 3,  // from here on for reductions only
  kUint8 = 4,
  kInt8 = 5,
  kInt16 = 6,
  kInt32 = 7,
  kInt64 = 8,
  kDtypes = 9
};
enum ReduceOp : std::uint32_t { kSum = 0, kAvg = 1, kMax = 2, kMin = 3, kReduceOps = 4 };
enum Wire : std::uint32_t { kNoWire = 0, kFp8 = 1, kMxfp8 = 2 };
constexpr std::size_t dtype_bytes(std::uint32_t d) {
  constexpr std::uint8_t bytes[kDtypes] = {4, 2, 2, 8, 1, 1, 2, 4, 8};
  return bytes[d];
}
constexpr std::size_t kNormColumns = 16384;  // the longest row that add_norm takes
constexpr std::size_t wire_block(std::uint32_t w) { return w == kFp8 ? 128 : 32; }
constexpr std::size_t scale_bytes(std::uint32_t w) { return w == kFp8 ? 4 : 1; }

struct Simd {
  const char* name;
  // Copy past the cache: for buffers larger than what the reader's cache holds.
  void (*copy_stream)(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes);
  // Copy into the cache what lies in memory, many requests in flight.
  void (*copy_fetch)(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes);
  // Past the cache for one row, without the fence at the end: fence() before the signal.
  void (*copy_row_stream)(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes);
  void (*fence)();
  // out = round(w[0] * in[0] + w[1] * in[1] + ...): float32, each product rounded, then added, from the first term.
  // weights null: plain sum. in and out are of the given dtypes.
  void (*weighted_sum)(std::uint32_t in_dtype, std::uint32_t out_dtype, void* out, const void* const* in,
                       const float* weights, std::size_t n, std::size_t columns);
  // Past the cache, a fence() is owed before the signal. out = round(w * g); lanes[c % 256] += rows[c] * g[c] in order, starting from the first product when `first`.
  void (*scale_dot)(std::uint32_t dtype, void* out, const void* g, const void* rows, float w, float* lanes, bool first,
                    std::size_t columns, bool past_cache);
  // The lanes' sum: lane[c] += lane[c + 128], then 64, 32, ... 1.
  float (*fold)(std::uint32_t dtype, const float* lanes);
  void (*quantize)(std::uint32_t dtype, std::uint32_t wire, std::uint8_t* q, std::uint8_t* scales, const void* x,
                   std::size_t columns);
  void (*dequantize)(std::uint32_t dtype, std::uint32_t wire, void* x, const std::uint8_t* q,
                     const std::uint8_t* scales, std::size_t columns);
  // out = in[0] op in[1] op ...: from the first term; bfloat16 and float16 in float32, rounded once. out may be one of in.
  // past_cache: nobody reads out soon; sums of few terms then go past the cache, fence included.
  void (*reduce)(std::uint32_t dtype, std::uint32_t op, void* out, const void* const* in, std::size_t n,
                 std::size_t count, bool past_cache);
  // A row of float32, bfloat16 or float16: r = residual + (terms[0] + terms[1] + ...), and the scale that `normalise` takes; r may
  // be residual or one of the terms. out = r * scale * weight; out may be r. simd_norm.h has the order.
  float (*add_norm)(std::uint32_t dtype, void* r, const void* const* terms, std::size_t n, const void* residual,
                    float eps, std::size_t columns);
  void (*normalise)(std::uint32_t dtype, void* out, const void* r, float scale, const void* weight,
                    std::size_t columns);
};

const Simd& simd();
extern const Simd kSimdPlain;
#if defined(__x86_64__)
extern const Simd kSimdAvx2;
extern const Simd kSimdAvx512;
#endif

}  // namespace a2a
