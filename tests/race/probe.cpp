// What the tests do to a context that its interface has no call for. Compiled with the kernels, mutants included.
#include "harness.h"

namespace race {

void skip_epochs(a2a_context* context, std::uint32_t count) {
  a2a::Context& c = *reinterpret_cast<a2a::Context*>(context);
  c.epoch += count;
  for (std::uint32_t from = 0; from < c.world; from++)
    for (std::uint32_t parity = 0; parity < 2; parity++) c.entry(c.rank, from, parity).epoch.fetch_add(count);
}

}  // namespace race
