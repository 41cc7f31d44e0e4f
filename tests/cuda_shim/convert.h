// Conversions of small floating-point formats, as the instructions of ptx.cuh round: to nearest, ties to even.
#pragma once
#include <cmath>
#include <cstdint>

namespace shim {

// `mantissa` bits, least exponent of a normal number; `most`: the code that larger numbers get, and infinity; then `nan`.
inline std::uint32_t to_format(float v, int mantissa, int least, std::uint32_t most, std::uint32_t nan) {
  if (std::isnan(v)) return nan;
  const double x = std::fabs(double(v));
  if (std::isinf(x)) return most;
  if (x == 0) return 0;
  const int exponent = std::ilogb(x) < least ? least : std::ilogb(x);
  const auto steps = std::uint32_t(std::nearbyint(std::ldexp(x, mantissa - exponent)));
  const std::uint32_t code = (std::uint32_t(exponent - least) << mantissa) + steps;  // carries go to the exponent
  return code < most ? code : most;
}

inline float of_format(std::uint32_t code, int mantissa, int least) {
  const std::uint32_t exponent = code >> mantissa, fraction = code & ((1u << mantissa) - 1);
  if (exponent == 0) return float(std::ldexp(double(fraction), least - mantissa));
  return float(std::ldexp(double(fraction + (1u << mantissa)), least - mantissa + int(exponent) - 1));
}

inline std::uint32_t to_bf16(float v) { return std::signbit(v) << 15 | to_format(v, 7, -126, 0x7f80, 0x7fff); }
inline std::uint32_t to_f16(float v) { return std::signbit(v) << 15 | to_format(v, 10, -14, 0x7c00, 0x7fff); }
inline std::uint32_t to_e4m3(float v) { return std::signbit(v) << 7 | to_format(v, 3, -6, 0x7e, 0x7f); }

inline float of_f16(std::uint16_t h) {
  const std::uint32_t code = h & 0x7fff;
  const float v = code > 0x7c00 ? NAN : code == 0x7c00 ? INFINITY : of_format(code, 10, -14);
  return h >> 15 ? -v : v;
}
inline float of_e4m3(std::uint32_t q) {
  const float v = (q & 0x7f) == 0x7f ? NAN : of_format(q & 0x7f, 3, -6);
  return q & 0x80 ? -v : v;
}

}  // namespace shim
