// primitives: what the CPU algorithms are made of, for the cost model: their copies and sums in their order, over memory that
// lies where theirs does, without signals or waits. a2a/calibrate.py composes and times them, all ranks at once.
//   for each chunk k: for each step: out(k) = copy, read or sum of in(k)
// A place moves from chunk to chunk with the tensor, or goes round in a ring of slots. What peers write into a ring meanwhile is
// read torn, or twice: only the traffic matters, never the values. So these run in a race by design, and in no collective.
#include <cstring>

#include "a2a.h"
#include "signal.h"
#include "simd.h"

using namespace a2a;

static std::uint8_t* at(const a2a_place& place, std::size_t k, std::size_t chunk) {
  return static_cast<std::uint8_t*>(place.base) + (place.slots ? k % place.slots * place.stride : k * chunk);
}

static int read_peer(Context& c, std::uint32_t rank, const std::uint8_t* in, std::uint8_t* out, std::size_t bytes) {
  if (!c.pids || rank >= c.world) return kInvalid;
  return a2a_read(c.pids[rank], reinterpret_cast<std::uint64_t>(in), out, bytes);
}

static int step_once(Context& c, const a2a_step& s, std::size_t k, std::size_t chunk, std::size_t bytes) {
  std::uint8_t* out = at(s.out, k, chunk);
  const std::uint8_t* in = at(s.in[0], k, chunk);
  switch (s.kind) {
    case A2A_STEP_COPY:
      std::memcpy(out, in, bytes);
      return 0;
    case A2A_STEP_STREAM:
      simd().copy_stream(out, in, bytes);
      return 0;
    case A2A_STEP_FETCH:
      simd().copy_fetch(out, in, bytes);
      return 0;
    case A2A_STEP_READ:
      return read_peer(c, s.rank, in, out, bytes);
    case A2A_STEP_READ_STREAM:
      if (!c.bounce || bytes > kBounce) return kInvalid;
      if (int error = read_peer(c, s.rank, in, c.bounce, bytes)) return error;
      simd().copy_stream(out, c.bounce, bytes);
      return 0;
    case A2A_STEP_SUM:
    case A2A_STEP_SUM_STREAM: {
      const void* terms[A2A_STEP_TERMS];
      for (std::uint32_t i = 0; i < s.terms; i++) terms[i] = at(s.in[i], k, chunk);
      simd().reduce(s.dtype, kSum, out, terms, s.terms, bytes / dtype_bytes(s.dtype), s.kind == A2A_STEP_SUM_STREAM);
      return 0;
    }
  }
  return kInvalid;
}

int a2a_run_steps(a2a_context* context, const a2a_step* steps, uint32_t count, size_t bytes, size_t chunk,
                  uint32_t times) {
  Context& c = *reinterpret_cast<Context*>(context);
  for (std::uint32_t i = 0; i < count; i++)
    if (steps[i].terms == 0 || steps[i].terms > A2A_STEP_TERMS || steps[i].dtype >= kDtypes) return kInvalid;
  for (std::uint32_t t = 0; t < times; t++) {
    std::size_t k = 0;
    for (std::size_t from = 0; from < bytes; from += chunk, k++) {
      const std::size_t n = bytes - from < chunk ? bytes - from : chunk;
      for (std::uint32_t i = 0; i < count; i++)
        if (int error = step_once(c, steps[i], k, chunk, n)) return error;
    }
  }
  return 0;
}

void* a2a_peer_memory(a2a_context* c, uint32_t rank, uint64_t address) {
  return reinterpret_cast<Context*>(c)->at(rank, address);
}
