// Random all-reduces with a residual add and RMSNorm, of whole numbers in float32: their sums are exact, and the rest is one chain
// of operations a row. The kind of memory and what is done in place are each rank's own choice.
#include <cmath>
#include <cstring>

#include "harness.h"

namespace race {
namespace {

constexpr std::uint64_t kDigest = 0x6e6f726d;
constexpr float kEps = 0.5f;

float element(std::uint64_t key, std::uint32_t who, std::uint64_t i) { return float(mix(key, who, i) % 9) - 4; }

float tree(const std::vector<float>& leaves) {
  std::vector<float> sums = leaves;
  while (sums.size() & (sums.size() - 1)) sums.push_back(0);
  for (std::size_t n = sums.size() / 2; n; n /= 2)
    for (std::size_t i = 0; i < n; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
  return sums[0];
}

struct Call {
  std::uint64_t key;
  std::size_t rows, columns;
  float *in, *residual, *weight, *out, *residual_out;
};

void check(const Rank& r, const Call& x) {
  for (std::size_t row = 0; row < x.rows; row++) {
    std::vector<float> wanted(x.columns), squares(x.columns);
    for (std::size_t c = 0; c < x.columns; c++) {
      const std::size_t i = row * x.columns + c;
      float sum = 0;
      for (std::uint32_t p = 0; p < r.ranks; p++) sum += element(x.key, p, i);
      wanted[c] = element(x.key, 100, i) + sum;
      squares[c] = wanted[c] * wanted[c];
    }
    const float scale = 1.0f / std::sqrt(tree(squares) / float(x.columns) + kEps);
    for (std::size_t c = 0; c < x.columns; c++) {
      const std::size_t i = row * x.columns + c;
      if (x.residual_out[i] != wanted[c] || x.out[i] != wanted[c] * scale * element(x.key, 101, c))
        wrong("rank %u: row %zu of %zu, column %zu of %zu: %g and %g, expected %g and %g", r.rank, row, x.rows, c,
              x.columns, x.residual_out[i], x.out[i], wanted[c], wanted[c] * scale * element(x.key, 101, c));
    }
  }
}

}  // namespace

void norms(Rank& r, int steps) {
  const auto request = std::uint32_t(a2a_request(r.c, kDigest, 0, "norm"));
  const std::size_t widest = r.world.geo.slot_bytes / sizeof(float);
  for (int step = 0; step < steps; step++) {
    pause_a_moment(r.own);
    r.symmetric.reset(), r.other_symmetric.reset(), r.ordinary.reset();
    Call x{};
    x.key = r.plan.next();
    x.columns = r.plan.one_in(2) ? 1 + r.plan.below(20) : 256 + r.plan.below(300);
    if (widest < x.columns || (widest <= 4096 && r.plan.one_in(4))) x.columns = widest;
    const std::size_t most = 3 * r.world.geo.slot_bytes / (x.columns * sizeof(float)) + r.ranks;
    x.rows = r.plan.below(std::uint32_t(most < 300 ? most : 300) + 1);
    const std::size_t count = x.rows * x.columns, bytes = count * sizeof(float);
    const bool two_shot = bytes > a2a_one_shot_bytes() || r.plan.one_in(2);
    auto place = [&](std::size_t n) {
      Arena& arena = r.own.one_in(2) ? r.ordinary : r.own.one_in(2) ? r.symmetric : r.other_symmetric;
      std::uint8_t* piece = arena.take(n + 4, 4);
      if (!piece) wrong("rank %u: a tensor of %zu bytes fits no arena", r.rank, n);
      return reinterpret_cast<float*>(piece);
    };
    x.in = place(bytes), x.residual = place(bytes), x.weight = place(x.columns * sizeof(float));
    const std::uint32_t way = std::uint32_t(r.own.next() % 3);
    x.out = way == 0 ? x.in : way == 1 ? x.residual : place(bytes);
    x.residual_out = way == 0 ? x.residual : way == 1 ? x.in : place(bytes);
    for (std::size_t i = 0; i < count; i++) x.in[i] = element(x.key, r.rank, i);
    for (std::size_t i = 0; i < count; i++) x.residual[i] = element(x.key, 100, i);
    for (std::size_t c = 0; c < x.columns; c++) x.weight[c] = element(x.key, 101, c);
    const a2a_norm call{{r.c, request, A2A_ALL_REDUCE, 0, 0, two_shot, 0, count}, std::uint32_t(x.columns), kEps};
    r.expect("the result of a norm", a2a_reduce_norm(&call, x.out, x.residual_out, x.in, x.residual, x.weight),
             a2a::kOk);
    check(r, x);
    std::memset(x.out, 0xee, bytes);  // the caller may
    std::memset(x.in, 0xdd, bytes);
  }
}

}  // namespace race
