// See layer_plan.h.
#include "layer_plan.h"

#include <algorithm>

namespace race {

float small(std::uint64_t key, std::uint32_t column) {
  return float(int((key ^ (column * 0x9e3779b97f4a7c15ull)) * 0xd6e8feb86659fd93ull >> 59 & 7) - 3);  // -3 to 4
}

std::uint8_t to_e4m3(float f) {
  static const std::uint8_t codes[5] = {0x00, 0x38, 0x40, 0x44, 0x48};
  if (f == 448) return 0x7e;
  return std::uint8_t((f < 0 ? 0x80 : 0) | codes[f < 0 ? int(-f) : int(f)]);
}

Shape::Shape(Random& plan, std::uint32_t ranks, std::size_t number) {
  // Many units of a few tokens; few tokens of several tiles; small ones.
  static const std::uint32_t widths[3][3] = {{120, 248, 504}, {3000, 4000, 5000}, {8, 64, 1024}};
  hidden = widths[number % 3][plan.below(3)];
  dtype = plan.below(2);
  const std::size_t fit = (number % 3 == 0 ? 192 << 10 : 64 << 10) / row_bytes();
  max_tokens = std::uint32_t(fit < 4 ? 4 : fit > 500 ? 500 : fit);
  top_k = 1u << plan.below(3);
  experts = plan.one_in(2) ? 2 * ranks + 1 : plan.one_in(2) ? ranks : 3;
  alignment = plan.one_in(2) ? 1 : 8;
  wire = plan.one_in(2) ? kNoWire : 1 + plan.below(2);
  wire_combine = plan.below(2);
  rows_wire = wire != kNoWire && plan.one_in(2);
  compact = plan.one_in(3);
  limit = !compact && plan.one_in(3) ? std::int64_t(1 + plan.below(ranks * max_tokens * top_k)) : -1;
  const bool scattered = plan.one_in(2);
  for (std::uint32_t e = 0; e < experts; e++)
    owner.push_back(std::int32_t(scattered ? plan.below(ranks) : e * ranks / experts));
  parts = plan.one_in(2) ? 1 : 1 + plan.below(3);
  for (std::uint32_t i = 0; i < ranks * parts; i++)
    source.push_back(parts == 1 ? std::int32_t(i) : std::int32_t(7 * i));
  for (std::uint32_t i = ranks * parts; parts > 1 && i-- > 1;) std::swap(source[i], source[plan.below(i + 1)]);
  for (std::uint32_t i = 0; parts > 1 && i < ranks * parts; i++)
    if (i % parts && plan.one_in(4)) source[i] = -1;
}

void Shape::store(std::uint8_t* out, const std::vector<float>& values) const {
  for (std::size_t i = 0; i < values.size(); i++) {
    if (dtype == kFloat32) {
      __builtin_memcpy(out + 4 * i, &values[i], 4);
    } else {
      std::uint32_t bits;
      __builtin_memcpy(&bits, &values[i], 4);
      out[2 * i] = std::uint8_t(bits >> 16), out[2 * i + 1] = std::uint8_t(bits >> 24);
    }
  }
}

std::vector<float> Shape::row(std::uint64_t key, bool travels_in_wire) const {
  std::vector<float> values(hidden);
  for (std::uint32_t c = 0; c < hidden; c++)
    values[c] = travels_in_wire && wire && c % block() == 0 ? 448 : small(key, c);
  return values;
}

Plan::Plan(const Shape& shape, std::uint32_t ranks, std::uint64_t k)
    : key(k),
      padded(ranks),
      rows(ranks),
      distinct(ranks),
      dropped(ranks),
      true_rows(shape.experts),
      end(shape.experts) {
  Random random{mix(key, 77)};
  const bool nobody = random.one_in(12), full = random.one_in(3), skewed = random.one_in(3);
  const std::uint32_t favourite = random.below(shape.experts);
  std::uint32_t all = 0;
  for (std::uint32_t s = 0; s < ranks; s++) {
    const std::uint32_t n = nobody || random.one_in(6) ? 0
                            : full                     ? shape.max_tokens
                                                       : random.below(shape.max_tokens + 1);
    tokens.push_back(n);
    first.push_back(all);
    all += n;
    ids.emplace_back(n * shape.top_k);
    position.emplace_back(n * shape.top_k, -1);
    for (auto& id : ids.back())
      id = random.one_in(9) ? -1 : std::int32_t(skewed && !random.one_in(4) ? favourite : random.below(shape.experts));
    std::uint32_t at = 0;
    for (std::uint32_t i = 0; i < shape.parts; i++) {  // what the last parts leave is the first one's
      cut.push_back(at);
      const std::uint32_t left = n - at, some = i == 0 ? left - left / 2 : random.below(left + 1);
      at += shape.parts == 1 ? n : shape.source[s * shape.parts + i] < 0 ? 0 : some;
    }
    for (std::uint32_t i = 1; i < shape.parts; i++) cut[cut.size() - i] += n - at;
    cut.push_back(n);
  }
  std::vector<std::uint32_t> order;  // (rank, part) by source
  for (std::uint32_t i = 0; i < ranks * shape.parts; i++)
    if (shape.source[i] >= 0) order.push_back(i);
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return shape.source[a] < shape.source[b]; });
  auto each = [&](const auto& act) {  // every (rank, token, k) in the order of sources
    for (std::uint32_t place : order) {
      const std::uint32_t s = place / shape.parts, at = s * (shape.parts + 1) + place % shape.parts;
      for (std::size_t i = std::size_t(cut[at]) * shape.top_k; i < std::size_t(cut[at + 1]) * shape.top_k; i++)
        act(s, i);
    }
  };
  for (std::uint32_t r = 0; r < ranks; r++) {
    for (std::uint32_t e = 0; e < shape.experts; e++) {
      if (shape.owner[e] != std::int32_t(r)) continue;
      std::int64_t row = padded[r];
      each([&](std::uint32_t s, std::size_t i) {
        if (ids[s][i] != std::int32_t(e)) return;
        const bool drop = shape.limit >= 0 && row >= shape.limit;
        position[s][i] = drop ? -1 : row;
        dropped[r] += drop;
        row++;
      });
      true_rows[e] = row - padded[r];
      rows[r] += true_rows[e];
      padded[r] += shape.pad(true_rows[e]);
      end[e] = padded[r];
    }
    compact.emplace_back(all, -1);
    each([&](std::uint32_t s, std::size_t i) {
      std::int64_t& at = compact[r][first[s] + i / shape.top_k];
      if (ids[s][i] >= 0 && shape.owner[std::size_t(ids[s][i])] == std::int32_t(r) && at < 0) at = distinct[r]++;
    });
  }
}

std::uint32_t Plan::part_of(const Shape& shape, std::uint32_t rank, std::uint32_t token) const {
  std::uint32_t part = 0;
  while (token >= cut[rank * (shape.parts + 1) + part + 1]) part++;
  return part;
}

std::int32_t Plan::number(const Shape& shape, std::uint32_t rank, std::uint32_t token) const {
  const std::uint32_t part = part_of(shape, rank, token);
  const auto at = std::int32_t(token - cut[rank * (shape.parts + 1) + part]);
  return part == 0 ? at : 2 * at + 1;
}

}  // namespace race
