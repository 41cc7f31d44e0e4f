// reduce_one_shot: every rank publishes its whole input once; every rank takes what it needs of all of them.
//   all-reduce      out[i] = in_0[i] op in_1[i] op ...                      rank order, from the first term
//   reduce-scatter  the same for the rank's own share of the inputs
//   all-gather      out[r] = in_r                                           bytes
//   With a Norm, the all-reduce's rows go on to it.
//   Sums of bfloat16 and float16 are taken in float32 and rounded once: the same bits on every rank and as two-shot's.
// Cost     1 step; input bytes stored once, loaded by every rank
// Buffers  in and out private, out may be in; inputs cross in the ranks' input slots, two a rank
// VISIBLE  S stores its input slot, then every peer's entry.epoch (seq_cst); R loads epoch (acquire), then the slot.
// REUSE    two slots, by parity: S stores slot e + 2 after it saw every R's entry e + 1, which R posts after it is done with e.
// PROGRESS entries are posted before they are waited for, and nothing else is.
// FAILURE  as in signal.h; out is as it was.
#include <cstring>

#include "a2a.h"
#include "norm.h"
#include "queue.h"
#include "signal.h"
#include "simd.h"

namespace a2a {

int reduce_one_shot(Context& c, const Request& request, const a2a_reduction& call, void* out, const void* in,
                    bool inline_call, const Norm* norm) {
  const std::uint32_t P = c.world, me = c.rank;
  const std::size_t element = call.kind == A2A_ALL_GATHER ? 1 : dtype_bytes(call.dtype);
  const std::size_t share = call.count * element, bytes = call.kind == A2A_REDUCE_SCATTER ? share * P : share;
  if (bytes > kOneShotBytes) return kInvalid;
  if (int rc = begin_op(c, request.text, inline_call)) return rc;
  const std::uint32_t e = c.epoch;
  if (bytes) std::memcpy(c.input(me, e), in, bytes);
  for (std::uint32_t i = 1; i < P; i++) {
    const std::uint32_t p = (me + i) % P;
    Entry& entry = c.entry(p, me, e);
    entry.digest = request.digest;
    entry.row_bytes = request.row_bytes;
    entry.text = request.text;
    post_entry(c, p, e);
  }
  if (int rc = await_entries(c, request, inline_call)) return rc;
  if (call.kind == A2A_ALL_GATHER) {
    for (std::uint32_t p = 0; p < P && bytes; p++)
      std::memcpy(static_cast<std::uint8_t*>(out) + p * share, c.input(p, e), share);
  } else if (bytes) {
    const void** terms = static_cast<const void**>(__builtin_alloca(P * sizeof(void*)));
    for (std::uint32_t p = 0; p < P; p++) {
      const std::uint8_t* whole = p == me ? static_cast<const std::uint8_t*>(in) : c.input(p, e);
      terms[p] = whole + (call.kind == A2A_REDUCE_SCATTER ? me * share : 0);
    }
    if (!norm) simd().reduce(call.dtype, call.reduce, out, terms, P, call.count, false);
    for (std::size_t at = 0; norm && at < bytes; at += norm->row_bytes()) norm->reduce(terms, at, at);
  }
  c.bytes_eager += bytes * (P - 1);
  return kOk;
}

int run_reduction(Context& c, const Request& request, const a2a_reduction& call, void* out, const void* in,
                  bool inline_call, const Norm* norm) {
  if (call.kind > A2A_ALL_GATHER || call.dtype >= kDtypes || call.reduce >= kReduceOps) return kInvalid;
  return (call.two_shot ? reduce_two_shot : reduce_one_shot)(c, request, call, out, in, inline_call, norm);
}

}  // namespace a2a

using namespace a2a;

size_t a2a_one_shot_bytes(void) { return kOneShotBytes; }
size_t a2a_two_shot_row_bytes(a2a_context* h) { return two_shot_row_bytes(*reinterpret_cast<Context*>(h)); }

int a2a_reduce_norm(const a2a_norm* call, void* out, void* residual_out, const void* in, const void* residual,
                    const void* weight) {
  const a2a_reduction& reduction = call->reduction;
  Context& c = *reinterpret_cast<Context*>(reduction.context);
  if (reduction.kind != A2A_ALL_REDUCE || reduction.reduce != kSum || reduction.dtype > kFloat16 || !call->columns ||
      call->columns > kNormColumns || reduction.count % call->columns)
    return kInvalid;
  const void** terms = static_cast<const void**>(__builtin_alloca(c.world * sizeof(void*)));
  const Norm norm{*call,
                  static_cast<std::uint8_t*>(out),
                  static_cast<std::uint8_t*>(residual_out),
                  static_cast<const std::uint8_t*>(residual),
                  weight,
                  c.world,
                  terms};
  if (reduction.two_shot && norm.row_bytes() > two_shot_row_bytes(c)) return kInvalid;
  lock(c, true);
  const int rc = run_reduction(c, c.requests[reduction.request % kTexts], reduction, residual_out, in, true, &norm);
  unlock(c);
  return rc;
}

int a2a_reduce(const a2a_reduction* call, void* out, const void* in) {
  Context& c = *reinterpret_cast<Context*>(call->context);
  lock(c, true);
  const int rc = run_reduction(c, c.requests[call->request % kTexts], *call, out, in, true);
  unlock(c);
  return rc;
}
