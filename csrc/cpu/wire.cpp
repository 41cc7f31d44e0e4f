// Wire formats by themselves, for what travels by other ways than these kernels' own: gradients between domains.
#include "a2a.h"
#include "simd.h"

using namespace a2a;

A2A_API void a2a_quantize(uint32_t dtype, uint32_t wire, void* q, void* scales, const void* x, size_t count) {
  simd().quantize(dtype, wire, static_cast<uint8_t*>(q), static_cast<uint8_t*>(scales), x, count);
}

A2A_API void a2a_dequantize(uint32_t dtype, uint32_t wire, void* x, const void* q, const void* scales, size_t count) {
  simd().dequantize(dtype, wire, x, static_cast<const uint8_t*>(q), static_cast<const uint8_t*>(scales), count);
}
