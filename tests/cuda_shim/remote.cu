// Copies and fills on a stream, as the framework of a rank's host would make them.
#include <cstdint>

namespace shim {

struct Copy {
  std::uint8_t* to;
  const std::uint8_t* from;  // or null: `value`
  std::uint64_t bytes, value;
};

}  // namespace shim

extern "C" __global__ void copy_bytes(const __grid_constant__ shim::Copy a) {
  const auto to = reinterpret_cast<std::uintptr_t>(a.to), from = reinterpret_cast<std::uintptr_t>(a.from);
  if (!a.from)
    for (std::uint64_t i = threadIdx.x; i < a.bytes; i += blockDim.x) a.to[i] = std::uint8_t(a.value);
  else if ((to | from | a.bytes) % 16 == 0)
    for (std::uint64_t i = threadIdx.x; i < a.bytes / 16; i += blockDim.x)
      reinterpret_cast<uint4*>(a.to)[i] = reinterpret_cast<const uint4*>(a.from)[i];
  else
    for (std::uint64_t i = threadIdx.x; i < a.bytes; i += blockDim.x) a.to[i] = a.from[i];
}
