// Layout arithmetic shared by the CPU kernels, the CUDA kernels and the tests. No memory is touched here.
#pragma once
#include <cstddef>
#include <cstdint>

namespace a2a {

constexpr std::size_t kLine = 64;  // bytes that one core hands to another at a time
constexpr std::size_t kPage = 4096;

constexpr std::size_t align_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }
constexpr std::size_t ceil_div(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

// Epochs and ring counters are 32 bits wide, only grow, and wrap. Two of them that are in use at the same time are less
// than 2^31 apart, so that the sign of their difference orders them.
constexpr bool reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

// How a matrix of `tokens` x `columns` elements is cut into units that fit a slot of `slot_bytes`: whole tokens where a row
// fits, else one token a unit and the row in tiles. Every rank computes the same cut from the same numbers.
//   fixed_bytes    in front of the payload, once a unit
//   token_bytes    beside the payload, once a token of the unit
//   column_bytes   bytes of one element on the wire, as a fraction column_num / column_den (scales are not whole bytes)
struct Cut {
  std::uint32_t tokens_per_unit;
  std::uint32_t tile_columns;
  std::uint32_t tiles;

  std::uint32_t units(std::size_t tokens) const {
    return static_cast<std::uint32_t>(ceil_div(tokens, tokens_per_unit) * tiles);
  }
};

// What one unit of a cut holds: tokens [first, first + tokens), columns [at, at + columns).
struct Unit {
  std::uint32_t tile, first, tokens, at, columns;

  Unit(const Cut& cut, std::uint32_t all_columns, std::size_t all_tokens, std::uint32_t number)
      : tile(number % cut.tiles), first(number / cut.tiles * cut.tokens_per_unit), at(tile * cut.tile_columns) {
    const std::uint32_t left = static_cast<std::uint32_t>(all_tokens) - first;
    tokens = left < cut.tokens_per_unit ? left : cut.tokens_per_unit;
    columns = all_columns - at < cut.tile_columns ? all_columns - at : cut.tile_columns;
  }
};

constexpr std::uint32_t kTileColumns =
    256;  // tiles are multiples of this, so that lanes and scale blocks never straddle one

inline Cut make_cut(std::size_t columns, std::size_t slot_bytes, std::size_t fixed_bytes, std::size_t token_bytes,
                    std::size_t column_num, std::size_t column_den, std::uint32_t most_tokens) {
  const std::size_t room = slot_bytes - fixed_bytes;
  const std::size_t row = align_up(ceil_div(columns * column_num, column_den), 64);
  if (token_bytes + row <= room) {
    std::size_t tokens = room / (token_bytes + row);
    if (tokens > most_tokens) tokens = most_tokens;
    return {static_cast<std::uint32_t>(tokens), static_cast<std::uint32_t>(columns), 1};
  }
  std::size_t tile = (room - token_bytes - 64) * column_den / column_num / kTileColumns * kTileColumns;
  return {1, static_cast<std::uint32_t>(tile), static_cast<std::uint32_t>(ceil_div(columns, tile))};
}

}  // namespace a2a
