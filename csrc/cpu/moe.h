// What the MoE kernels share: who owns which expert, where each row goes, and the rows of each token.
#pragma once
#include <cstdlib>
#include <cstring>

#include "a2a.h"
#include "publication.h"
#include "queue.h"
#include "signal.h"
#include "simd.h"

// wire_combine: what the sums of ranks travel as, and what comes out of them.
enum WireCombine : std::uint32_t { kRowSums = 0, kFloat32Sums = 1, kWideSums = 2 };  // the last: y is float32, too

struct a2a_moe {
  a2a::Context* c;
  std::uint32_t experts, top_k, hidden, max_tokens, dtype, alignment, wire, wire_combine;
  std::uint64_t counts_address;   // symmetric: two parities of uint32 [experts + world], see moe_count.cpp
  std::int32_t *owner, *local;    // [experts]: the rank that holds it; its index there
  std::int32_t *of_rank, *first;  // experts by (rank, id); first[r] .. first[r + 1]
  std::uint32_t my_experts;
  // What a rank brings to a dispatch lies in parts, one for each rank whose tokens it brings: its own first, then those that
  // came to it over rails. Rows are ordered by these sources, not by who brings them.
  std::uint32_t parts, sources;  // parts of every rank; how many of all ranks' parts have a source
  std::int32_t* source;          // [world * parts]: the source of part i of rank r at r * parts + i, or -1
  std::uint32_t* order;          // [sources]: places in `source`, by source
  const a2a_moe_part* brought;   // [parts] of this rank, in the dispatch that comes; null: one part, of the arguments
  // Between count and dispatch, and during a dispatch:
  std::int64_t* next;              // [my_experts][world * parts] the next row of (expert, source)
  std::int64_t* remote;            // [parts][experts] the next row of mine at that expert's owner
  std::uint32_t* first_of_part;    // [world][parts + 1] where each part of a rank's tokens begins
  std::uint64_t *tokens, *direct;  // [world]
  std::int64_t rows_padded, rows_true;
  std::int64_t distinct;  // tokens received, each counted once
  std::uint32_t text;
  // Growable scratch
  void* buffer[8];
  std::size_t buffer_bytes[8];

  std::size_t element() const { return a2a::dtype_bytes(dtype); }
  std::size_t row_bytes() const { return hidden * element(); }
  std::size_t scale_row_bytes() const { return a2a::ceil_div(hidden, a2a::wire_block(wire)) * a2a::scale_bytes(wire); }
  std::size_t part_counts() const { return experts + c->world + 1; }
  std::size_t counts_bytes() const { return parts * part_counts() * sizeof(std::uint32_t); }
  std::uint32_t* counts(std::uint32_t rank) {
    const std::uint64_t parity = a2a::mutant(a2a::kOneCounts) ? 0 : (c->epoch & 1);
    return reinterpret_cast<std::uint32_t*>(
        c->at(rank, counts_address + parity * a2a::align_up(counts_bytes(), a2a::kLine)));
  }
  template <class T>
  T* scratch(int which, std::size_t count) {
    const std::size_t bytes = count * sizeof(T) + 64;
    if (buffer_bytes[which] < bytes) {
      std::free(buffer[which]);
      buffer_bytes[which] = bytes + bytes / 4;
      buffer[which] = std::malloc(buffer_bytes[which]);
    }
    return static_cast<T*>(buffer[which]);
  }
  std::int64_t pad(std::int64_t rows) const { return (rows + alignment - 1) / alignment * alignment; }
};

namespace a2a {

// The rows that each source's tokens have on this rank, in row order (which is expert order): rows[start[i] .. start[i + 1])
// with i = first_token[source] + token.
struct TokenRows {
  std::int64_t* first_token;  // [world + 1]
  std::int32_t* start;
  std::int32_t* rows;
};

// kOk, or kInvalid with the row that points nowhere in *bad.
int token_rows(a2a_moe& m, std::int64_t num_rows, const std::int32_t* row_rank, const std::int32_t* row_token,
               TokenRows* out, std::int64_t* bad);

// Post {request, number of tokens, direct base} to every peer and wait for theirs. The lock is held.
int exchange_tokens(a2a_moe& m, std::uint32_t request, std::uint32_t tokens, std::uint64_t direct_base);

// One token row, or a tile of it, as it lies in a publication: elements, or e4m3 bytes followed by their scales.
struct WireRow {
  std::size_t stride;  // bytes from one token's to the next
  Cut cut;
  std::size_t ids_at, weights_at, numbers_at, rows_at;  // numbers: of tokens at their sources, where there are parts
  WireRow(const a2a_moe& m, bool with_ids);
};

// What a rank brings, found token by token; going back starts over.
struct Brought {
  const a2a_moe_part* parts;
  std::uint32_t at = 0, first = 0;  // the part that is looked at, and its first token
  const a2a_moe_part& part(std::uint32_t t) {
    if (t < first) at = first = 0;
    while (t - first >= parts[at].tokens) first += parts[at++].tokens;
    return parts[at];
  }
  const std::uint8_t* row(std::uint32_t t, std::size_t bytes) {
    const a2a_moe_part& p = part(t);
    return static_cast<const std::uint8_t*>(p.rows) + std::size_t(t - first) * bytes;
  }
  const std::uint8_t* scales(std::uint32_t t, std::size_t bytes) {
    const a2a_moe_part& p = part(t);
    return static_cast<const std::uint8_t*>(p.scales) + std::size_t(t - first) * bytes;
  }
  std::int32_t number(std::uint32_t t) {
    const a2a_moe_part& p = part(t);
    return p.number ? p.number[t - first] : std::int32_t(t - first);
  }
};

// Columns [at, at + columns) of a row that was quantised before, as they lie in a publication.
inline void copy_quantized(const a2a_moe& m, std::uint8_t* to, const std::uint8_t* row, const std::uint8_t* scales,
                           std::uint32_t at, std::uint32_t columns) {
  const std::size_t block = wire_block(m.wire), sb = scale_bytes(m.wire);
  std::memcpy(to, row + at, columns);
  std::memcpy(to + columns, scales + at / block * sb, ceil_div(columns, block) * sb);
}

// Ask for a row that is read next. Rows are scattered, and the processor's own prefetcher starts anew with each page.
inline void prefetch(const std::uint8_t* row, std::size_t bytes) {
  if (bytes > kPage) bytes = kPage;
  for (std::size_t k = 0; k < bytes; k += kLine) __builtin_prefetch(row + k, 0, 2);
}

inline void copy_row(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes, bool stream) {
  if (stream)
    simd().copy_row_stream(out, in, bytes);
  else
    __builtin_memcpy(out, in, bytes);
}

// Every rank publishes its tokens unit by unit, and every rank sees every unit of every rank, its own first.
//   fill(unit, slot)             store this rank's unit, and whatever else must be stored before it is announced
//   consume(source, unit, slot)  take what is this rank's; units of one source come in order
// PROGRESS units are published and taken in turns; a full ring only stops publishing. Readers take all units of every
//          source, so a ring empties whatever its owner does.
template <class Fill, class Consume>
int circulate(a2a_moe& m, const Cut& cut, const Fill& fill, const Consume& consume) {
  Context& c = *m.c;
  const std::uint32_t P = c.world, me = c.rank;
  std::uint32_t* done = m.scratch<std::uint32_t>(3, P);  // units taken from each source
  std::memset(done, 0, P * sizeof *done);
  Publication ring(c, c.scratch);
  Wait wait(c, m.text, true);
  auto units_of = [&](std::uint32_t s) { return cut.units(std::size_t(m.tokens[s])); };
  auto missing = [&](std::uint32_t p) {
    return p != me && (done[p] < units_of(p) || (done[me] < units_of(me) && ring.full_for(p)));
  };
  for (;;) {
    bool moved = false, left = false;
    if (done[me] < units_of(me)) {
      left = true;
      if (ring.has_space()) {
        std::uint8_t* slot = ring.slot();
        if (mutant(kEarlyPublish) && P > 1) ring.publish();
        fill(done[me], slot);
        if (!mutant(kEarlyPublish) && P > 1) ring.publish();
        consume(me, done[me]++, slot);
        moved = true;
      }
    }
    for (std::uint32_t i = 1; i < P; i++) {
      const std::uint32_t s = (me + i) % P;
      if (done[s] >= units_of(s)) continue;
      left = true;
      const std::uint8_t* slot = ring.next(s);
      if (!slot) continue;
      if (mutant(kEarlyTake)) ring.take(s);
      consume(s, done[s]++, slot);
      if (!mutant(kEarlyTake)) ring.take(s);
      moved = true;
    }
    if (!left) return kOk;
    if (moved)
      wait.progressed();
    else if (int rc = wait.idle(missing))
      return rc;
  }
}

}  // namespace a2a
