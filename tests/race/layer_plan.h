// What a random Mixture-of-Experts layer is, what all ranks send through it, and where every row of it must arrive.
//
// All numbers are small integers, exact in every order and dtype; with a wire format, every scale block holds a 448, so that
// its scale is 1 and nothing is rounded.
#pragma once
#include "harness.h"

namespace race {

enum : std::uint32_t { kFloat32, kBfloat16 };
enum : std::uint32_t { kNoWire, kFp8, kMxfp8 };

float small(std::uint64_t key, std::uint32_t column);  // -3 to 4
std::uint8_t to_e4m3(float f);

struct Shape {
  std::uint32_t experts, top_k, hidden, max_tokens, dtype, alignment, wire, wire_combine;
  bool rows_wire, compact;
  std::int64_t limit;  // max_rows, or -1
  std::vector<std::int32_t> owner;
  std::uint32_t parts;               // each rank brings tokens of so many sources; 1: its own alone
  std::vector<std::int32_t> source;  // [ranks][parts], -1: none

  std::size_t element() const { return dtype == kFloat32 ? 4 : 2; }
  std::size_t row_bytes() const { return hidden * element(); }
  std::size_t block() const { return wire == kFp8 ? 128 : 32; }
  std::size_t blocks() const { return (hidden + block() - 1) / block(); }
  std::size_t scale_bytes() const { return wire == kFp8 ? 4 : 1; }
  std::int64_t pad(std::int64_t rows) const { return (rows + alignment - 1) / alignment * alignment; }

  Shape(Random& plan, std::uint32_t ranks, std::size_t number);
  // Elements of the shape's dtype, as the kernels hold them.
  void store(std::uint8_t* out, const std::vector<float>& values) const;
  std::vector<float> row(std::uint64_t key, bool travels_in_wire) const;
};

// What all ranks send in one dispatch, and where it must arrive.
struct Plan {
  std::uint64_t key;
  std::vector<std::uint32_t> tokens;                // of each rank
  std::vector<std::vector<std::int32_t>> ids;       // of each rank: [tokens, top_k]
  std::vector<std::vector<std::int64_t>> position;  // the same: row at the expert's owner; -1: none, or dropped
  std::vector<std::vector<std::int64_t>> compact;   // of the owner: [all tokens], or -1
  std::vector<std::int64_t> padded, rows, distinct, dropped;
  std::vector<std::int64_t> true_rows, end;  // of each expert
  std::vector<std::uint32_t> first;          // all tokens: where each rank's begin
  std::vector<std::uint32_t> cut;            // [ranks][parts + 1]: a rank's tokens: where each part begins

  Plan(const Shape& shape, std::uint32_t ranks, std::uint64_t key);
  std::uint32_t part_of(const Shape& shape, std::uint32_t rank, std::uint32_t token) const;
  std::int32_t number(const Shape& shape, std::uint32_t rank, std::uint32_t token) const;  // what its source calls it
};

}  // namespace race
