// moe_rail: what ExpertParallel does with tokens that cross between domains. Local work on a rank's own memory: nothing here
// waits for anybody, and the rails themselves are an engine's (a2a/transport/rail.py).
//   select   for each domain, the tokens that need it, once each, and which of their k do
//   gather   their rows, packed for the rail
//   pairs    their (expert, weight) pairs, packed;  unpair  the same back into [tokens, top_k]
//   merge    y[token] = sum over domains, in their order, of the domain's sum of the token: float32, from the first, rounded once
// Order    Tokens ascend within a list, and pairs are in the order of (token, k), so nothing but a mask of k says which is whose.
// Cost     each row that crosses is read once and written once on each side
#include <cstring>

#include "a2a.h"
#include "moe.h"

using namespace a2a;

namespace {

template <class Id>
int select(const Id* ids, std::uint32_t tokens, const a2a_moe_domains& d, std::int32_t* own_ids, std::int32_t* lists,
           std::uint32_t* masks, std::int64_t* counts) {
  const std::uint32_t K = d.top_k;
  std::memset(counts, 0, d.domains * 2 * sizeof *counts);
  for (std::uint32_t t = 0; t < tokens; t++) {
    for (std::uint32_t k = 0; k < K; k++) {
      const Id id = ids[std::size_t(t) * K + k];
      std::int32_t& own = own_ids[std::size_t(t) * K + k];
      own = -1;
      if (id == -1) continue;
      if (id < 0 || std::uint64_t(id) >= d.experts) {
        counts[0] = t, counts[1] = k, counts[2] = std::int64_t(id);
        return kInvalid;
      }
      const std::int32_t domain = d.domain[id];
      if (domain == d.mine) own = d.local[id];
      std::int64_t* count = counts + 2 * domain;
      std::int32_t* list = lists + std::size_t(domain) * tokens;
      std::uint32_t* mask = masks + std::size_t(domain) * tokens;
      if (count[0] == 0 || list[count[0] - 1] != std::int32_t(t)) {
        list[count[0]] = std::int32_t(t);
        mask[count[0]++] = 0;
      }
      mask[count[0] - 1] |= 1u << k;
      count[1]++;
    }
  }
  return kOk;
}

template <class Id, class Packed>
void pack_pairs(const Id* ids, const float* weights, const std::int32_t* list, const std::uint32_t* masks,
                std::uint32_t n, const a2a_moe_domains& d, Packed* out_ids, float* out_weights) {
  std::size_t at = 0;
  for (std::uint32_t i = 0; i < n; i++) {
    for (std::uint32_t left = masks[i]; left; left &= left - 1, at++) {
      const std::size_t pair = std::size_t(list[i]) * d.top_k + std::uint32_t(__builtin_ctz(left));
      out_ids[at] = Packed(d.local[ids[pair]]);
      if (weights) out_weights[at] = weights[pair];
    }
  }
}

template <class Packed>
int unpack_pairs(const Packed* ids, const float* weights, const std::uint32_t* masks, std::uint32_t n,
                 std::uint64_t pairs, std::uint32_t K, std::uint32_t experts, std::int32_t* ids_TK, float* weights_TK) {
  std::uint64_t at = 0;
  for (std::uint32_t i = 0; i < n; i++) {
    for (std::uint32_t k = 0; k < K; k++) {
      std::int32_t& id = ids_TK[std::size_t(i) * K + k];
      float& weight = weights_TK[std::size_t(i) * K + k];
      id = -1, weight = 0;
      if (!(masks[i] >> k & 1)) continue;
      if (at == pairs || ids[at] >= experts) return kInvalid;
      id = std::int32_t(ids[at]);
      weight = weights ? weights[at] : 1.0f;
      at++;
    }
  }
  return at == pairs ? kOk : kInvalid;
}

}  // namespace

int a2a_moe_rail_select(const a2a_moe_domains* d, const void* ids, int ids_bytes, uint32_t tokens, int32_t* own_ids,
                        int32_t* lists, uint32_t* masks, int64_t* counts) {
  return ids_bytes == 4 ? select(static_cast<const std::int32_t*>(ids), tokens, *d, own_ids, lists, masks, counts)
                        : select(static_cast<const std::int64_t*>(ids), tokens, *d, own_ids, lists, masks, counts);
}

void a2a_moe_rail_gather(void* out, const void* in, const int32_t* list, uint32_t n, size_t row_bytes) {
  auto* to = static_cast<std::uint8_t*>(out);
  const auto* from = static_cast<const std::uint8_t*>(in);
  for (std::uint32_t i = 0; i < n; i++) {
    if (i + 1 < n) prefetch(from + std::size_t(list[i + 1]) * row_bytes, row_bytes);
    std::memcpy(to + i * row_bytes, from + std::size_t(list[i]) * row_bytes, row_bytes);
  }
}

void a2a_moe_rail_quantize(uint32_t dtype, uint32_t wire, const void* x, uint32_t tokens, uint32_t hidden, void* q,
                           void* scales) {
  const std::size_t row_bytes = hidden * dtype_bytes(dtype);
  const std::size_t scale_row = ceil_div(hidden, wire_block(wire)) * scale_bytes(wire);
  for (std::size_t t = 0; t < tokens; t++)
    simd().quantize(dtype, wire, static_cast<std::uint8_t*>(q) + t * hidden,
                    static_cast<std::uint8_t*>(scales) + t * scale_row,
                    static_cast<const std::uint8_t*>(x) + t * row_bytes, hidden);
}

void a2a_moe_rail_pairs(const a2a_moe_domains* d, const void* ids, int ids_bytes, const float* weights,
                        const int32_t* list, const uint32_t* masks, uint32_t n, void* out_ids, int out_bytes,
                        float* out_weights) {
  const auto* narrow = static_cast<const std::int32_t*>(ids);
  const auto* wide = static_cast<const std::int64_t*>(ids);
  auto* out16 = static_cast<std::uint16_t*>(out_ids);
  auto* out32 = static_cast<std::uint32_t*>(out_ids);
  if (ids_bytes == 4 && out_bytes == 2) pack_pairs(narrow, weights, list, masks, n, *d, out16, out_weights);
  if (ids_bytes == 4 && out_bytes == 4) pack_pairs(narrow, weights, list, masks, n, *d, out32, out_weights);
  if (ids_bytes == 8 && out_bytes == 2) pack_pairs(wide, weights, list, masks, n, *d, out16, out_weights);
  if (ids_bytes == 8 && out_bytes == 4) pack_pairs(wide, weights, list, masks, n, *d, out32, out_weights);
}

int a2a_moe_rail_unpair(const void* ids, int ids_bytes, const float* weights, const uint32_t* masks, uint32_t n,
                        uint64_t pairs, uint32_t top_k, uint32_t experts, int32_t* ids_TK, float* weights_TK) {
  return ids_bytes == 2 ? unpack_pairs(static_cast<const std::uint16_t*>(ids), weights, masks, n, pairs, top_k, experts,
                                       ids_TK, weights_TK)
                        : unpack_pairs(static_cast<const std::uint32_t*>(ids), weights, masks, n, pairs, top_k, experts,
                                       ids_TK, weights_TK);
}

void a2a_moe_rail_grads(float* packed, float* grads_TK, const int32_t* list, const uint32_t* masks, uint32_t n,
                        uint32_t top_k, int unpack) {
  std::size_t at = 0;
  for (std::uint32_t i = 0; i < n; i++) {
    for (std::uint32_t left = masks[i]; left; left &= left - 1, at++) {
      const std::size_t row = list ? std::size_t(list[i]) : i;
      float& grad = grads_TK[row * top_k + std::uint32_t(__builtin_ctz(left))];
      if (unpack)
        grad = packed[at];
      else
        packed[at] = grad;
    }
  }
}

void a2a_moe_rail_merge(uint32_t in_dtype, uint32_t out_dtype, uint32_t hidden, uint32_t tokens, uint32_t domains,
                        const a2a_moe_sums* sums, void* y) {
  const std::size_t in_bytes = hidden * dtype_bytes(in_dtype), out_bytes = hidden * dtype_bytes(out_dtype);
  const void** in = static_cast<const void**>(__builtin_alloca(domains * sizeof(void*)));
  auto* at = static_cast<std::uint32_t*>(__builtin_alloca(domains * sizeof(std::uint32_t)));
  std::memset(at, 0, domains * sizeof *at);
  for (std::uint32_t t = 0; t < tokens; t++) {
    std::size_t terms = 0;
    for (std::uint32_t d = 0; d < domains; d++) {
      if (at[d] == sums[d].tokens || sums[d].list[at[d]] != std::int32_t(t)) continue;
      const std::size_t row = sums[d].dense ? t : at[d];
      in[terms++] = static_cast<const std::uint8_t*>(sums[d].rows) + row * in_bytes;
      at[d]++;
    }
    std::uint8_t* out = static_cast<std::uint8_t*>(y) + t * out_bytes;
    if (terms == 0)
      std::memset(out, 0, out_bytes);
    else
      simd().weighted_sum(in_dtype, out_dtype, out, in, nullptr, terms, hidden);
  }
}
