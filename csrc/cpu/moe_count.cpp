// moe_count: every rank learns how many rows every rank has for every expert, and with that where each row goes.
//   counts_r[e] = rows that rank r has for expert e;  counts_r[E + d] = distinct tokens that r has for rank d;
//   counts_r[E + world] = its tokens. Where ranks bring other ranks' tokens, so for each part of them.
// Cost     1 step; parts * (experts + world + 1) * 4 bytes stored locally, read by every peer
// VISIBLE  the counts are stored before the entries are posted; a peer reads them after it saw the entry (acquire).
// REUSE    two copies, by parity of the epoch: written again two epochs later, when every peer is past this one (signal.h).
// PROGRESS the entry is posted before anything is waited for.
// FAILURE  as in signal.h; on an id out of range nothing has been posted.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "moe.h"

namespace a2a {

int exchange_tokens(a2a_moe& m, std::uint32_t request, std::uint32_t tokens, std::uint64_t direct_base) {
  Context& c = *m.c;
  const std::uint32_t e = c.epoch;
  const Request& asked = c.requests[request % kTexts];
  m.text = asked.text;
  for (std::uint32_t i = 1; i < c.world; i++) {
    const std::uint32_t p = (c.rank + i) % c.world;
    Entry& entry = c.entry(p, c.rank, e);
    entry.digest = asked.digest;
    entry.row_bytes = asked.row_bytes;
    entry.send_bytes = tokens;
    entry.out_address = direct_base;
    entry.text = m.text;
    post_entry(c, p, e);
  }
  if (int rc = await_entries(c, asked, true)) return rc;
  for (std::uint32_t p = 0; p < c.world; p++) {
    m.tokens[p] = p == c.rank ? tokens : c.entry(c.rank, p, e).send_bytes;
    m.direct[p] = p == c.rank ? 0 : c.entry(c.rank, p, e).out_address;
  }
  return kOk;
}

int token_rows(a2a_moe& m, std::int64_t num_rows, const std::int32_t* row_rank, const std::int32_t* row_token,
               TokenRows* out, std::int64_t* bad) {
  const std::uint32_t P = m.c->world;
  std::int64_t* first = m.scratch<std::int64_t>(0, P + 1);
  first[0] = 0;
  for (std::uint32_t p = 0; p < P; p++) first[p + 1] = first[p] + std::int64_t(m.tokens[p]);
  std::int32_t* start = m.scratch<std::int32_t>(1, std::size_t(first[P]) + 3);
  std::memset(start, 0, (std::size_t(first[P]) + 3) * sizeof *start);
  for (std::int64_t r = 0; r < num_rows; r++) {
    if (row_rank[r] < 0) continue;
    if (row_rank[r] >= std::int32_t(P) || row_token[r] < 0 || std::uint64_t(row_token[r]) >= m.tokens[row_rank[r]]) {
      *bad = r;
      return kInvalid;
    }
    start[first[row_rank[r]] + row_token[r] + 2]++;
  }
  for (std::int64_t i = 2; i < first[P] + 3; i++) start[i] += start[i - 1];
  std::int32_t* rows = m.scratch<std::int32_t>(2, std::size_t(num_rows));
  for (std::int64_t r = 0; r < num_rows; r++)
    if (row_rank[r] >= 0) rows[start[first[row_rank[r]] + row_token[r] + 1]++] = std::int32_t(r);
  *out = {first, start, rows};
  return kOk;
}

WireRow::WireRow(const a2a_moe& m, bool with_ids) {
  const bool with_numbers = with_ids && m.parts > 1;
  const std::size_t beside = with_ids ? m.top_k * 8 + with_numbers * 4 : 0;
  const bool wired = m.wire != kNoWire;
  cut = make_cut(m.hidden, m.c->geo.publish_bytes, 192, beside + (wired ? 64 : 0), wired ? 33 : m.element(),
                 wired ? 32 : 1, 256);
  const std::size_t blocks = wired ? ceil_div(cut.tile_columns, wire_block(m.wire)) * scale_bytes(m.wire) : 0;
  stride = align_up(cut.tile_columns * (wired ? 1 : m.element()) + blocks, 64);
  ids_at = 64;
  weights_at = ids_at + (with_ids ? cut.tokens_per_unit * m.top_k * 4 : 0);
  numbers_at = weights_at + (with_ids ? cut.tokens_per_unit * m.top_k * 4 : 0);
  rows_at = align_up(numbers_at + (with_numbers ? cut.tokens_per_unit * 4 : 0), 64);
}

}  // namespace a2a

using namespace a2a;

a2a_moe* a2a_moe_create(a2a_context* h, uint32_t experts, uint32_t top_k, uint32_t hidden, uint32_t max_tokens,
                        uint32_t dtype, uint32_t alignment, uint32_t wire, uint32_t wire_combine,
                        const int32_t* expert_to_rank, uint64_t counts_address) {
  Context& c = *reinterpret_cast<Context*>(h);
  auto* m = static_cast<a2a_moe*>(std::calloc(1, sizeof(a2a_moe)));
  m->c = &c;
  m->experts = experts, m->top_k = top_k, m->hidden = hidden, m->max_tokens = max_tokens, m->dtype = dtype;
  m->alignment = alignment, m->wire = wire, m->wire_combine = wire_combine, m->counts_address = counts_address;
  m->owner = static_cast<int32_t*>(std::malloc(experts * 4));
  m->local = static_cast<int32_t*>(std::malloc(experts * 4));
  m->of_rank = static_cast<int32_t*>(std::malloc(experts * 4));
  m->first = static_cast<int32_t*>(std::calloc(c.world + 1, 4));
  std::memcpy(m->owner, expert_to_rank, experts * 4);
  std::int32_t at = 0;
  for (std::uint32_t r = 0; r < c.world; r++) {
    m->first[r] = at;
    for (std::uint32_t e = 0; e < experts; e++)
      if (m->owner[e] == std::int32_t(r)) {
        m->local[e] = at - m->first[r];
        m->of_rank[at++] = std::int32_t(e);
      }
  }
  m->first[c.world] = at;
  m->my_experts = std::uint32_t(m->first[c.rank + 1] - m->first[c.rank]);
  m->tokens = static_cast<std::uint64_t*>(std::calloc(c.world, 8));
  m->direct = static_cast<std::uint64_t*>(std::calloc(c.world, 8));
  a2a_moe_sources(m, 1, nullptr);
  return m;
}

void a2a_moe_sources(a2a_moe* m, uint32_t parts, const int32_t* source) {
  const std::uint32_t all = m->c->world * parts;
  std::free(m->source), std::free(m->order), std::free(m->next), std::free(m->remote), std::free(m->first_of_part);
  m->parts = parts, m->sources = 0;
  m->source = static_cast<std::int32_t*>(std::malloc(all * 4));
  m->order = static_cast<std::uint32_t*>(std::malloc(all * 4));
  m->next = static_cast<std::int64_t*>(std::calloc(std::size_t(m->my_experts) * all + 1, 8));
  m->remote = static_cast<std::int64_t*>(std::calloc(std::size_t(m->experts) * parts + 1, 8));
  m->first_of_part = static_cast<std::uint32_t*>(std::calloc(all + m->c->world, 4));
  for (std::uint32_t i = 0; i < all; i++) {
    m->source[i] = source ? source[i] : std::int32_t(i);
    if (m->source[i] < 0) continue;
    std::uint32_t at = m->sources++;
    for (; at > 0 && m->source[m->order[at - 1]] > m->source[i]; at--) m->order[at] = m->order[at - 1];
    m->order[at] = i;
  }
}

void a2a_moe_bring(a2a_moe* m, const a2a_moe_part* parts) { m->brought = parts; }

void a2a_moe_destroy(a2a_moe* m) {
  for (void* b : m->buffer) std::free(b);
  std::free(m->owner), std::free(m->local), std::free(m->of_rank), std::free(m->first), std::free(m->next),
      std::free(m->remote);
  std::free(m->source), std::free(m->order), std::free(m->first_of_part);
  std::free(m->tokens), std::free(m->direct);
  std::free(m);
}

// The peers are in the middle of the dispatch and would take the units of this rank's next one for those that they miss.
void a2a_moe_abort(a2a_moe* m) {
  fail(*m->c, kRefused, m->c->rank, m->text, "it gave up a dispatch after the counts had been exchanged");
  unlock(*m->c);
}

namespace {

template <class Id>
bool histogram(a2a_moe& m, const Id* ids, std::uint32_t from, std::uint32_t to, std::uint32_t* counts,
               std::int64_t* bad) {
  std::int32_t seen[32];
  for (std::uint32_t t = from; t < to; t++) {
    std::uint32_t ranks = 0;
    for (std::uint32_t k = 0; k < m.top_k; k++) {
      const Id id = ids[std::size_t(t) * m.top_k + k];
      if (id == -1) continue;
      if (id < 0 || std::uint64_t(id) >= m.experts) {
        bad[0] = t, bad[1] = k, bad[2] = std::int64_t(id);
        return false;
      }
      counts[id]++;
      const std::int32_t rank = m.owner[id];
      bool again = false;
      for (std::uint32_t i = 0; i < ranks; i++) again |= seen[i] == rank;
      if (!again) {
        seen[ranks++] = rank;
        counts[m.experts + std::uint32_t(rank)]++;
      }
    }
  }
  counts[m.experts + m.c->world] = to - from;
  return true;
}

}  // namespace

int a2a_moe_count(a2a_moe* m, uint32_t request, const void* ids, int ids_bytes, uint32_t tokens, uint64_t direct_base,
                  int64_t* result) {
  Context& c = *m->c;
  const std::uint32_t P = c.world, E = m->experts, parts = m->parts;
  const std::size_t each = m->part_counts();
  std::uint32_t* mine = m->scratch<std::uint32_t>(7, parts * each);
  std::memset(mine, 0, m->counts_bytes());
  for (std::uint32_t i = 0, from = 0; i < parts; i++) {
    const std::uint32_t to = m->brought ? from + m->brought[i].tokens : tokens;
    const bool fine = ids_bytes == 4
                          ? histogram(*m, static_cast<const std::int32_t*>(ids), from, to, mine + i * each, result)
                          : histogram(*m, static_cast<const std::int64_t*>(ids), from, to, mine + i * each, result);
    if (!fine) return kInvalid;
    from = to;
  }
  lock(c, true);
  int rc = begin_op(c, request % kTexts, true);
  if (rc == kOk) {
    std::memcpy(m->counts(c.rank), mine, m->counts_bytes());
    rc = exchange_tokens(*m, request, tokens, direct_base);
  }
  if (rc) {
    unlock(c);
    return rc;
  }
  m->rows_padded = m->rows_true = m->distinct = 0;
  for (std::uint32_t s = 0; s < P; s++) {
    std::uint32_t* first = m->first_of_part + s * (parts + 1);
    for (std::uint32_t i = 0; i < parts; i++) {
      m->distinct += m->counts(s)[i * each + E + c.rank];
      first[i + 1] = first[i] + m->counts(s)[i * each + E + P];
    }
  }
  for (std::uint32_t r = 0; r < P; r++) {
    std::int64_t row = 0;
    for (std::int32_t i = m->first[r]; i < m->first[r + 1]; i++) {
      const std::int32_t e = m->of_rank[i];
      std::int64_t at = row;
      for (std::uint32_t n = 0; n < m->sources; n++) {
        const std::uint32_t place = m->order[n], s = place / parts, part = place % parts;
        if (s == c.rank) m->remote[std::size_t(part) * E + std::uint32_t(e)] = at;
        if (r == c.rank) m->next[std::size_t(m->local[e]) * P * parts + place] = at;
        at += m->counts(s)[part * each + std::uint32_t(e)];
      }
      if (r == c.rank) {
        result[3 + m->local[e]] = at - row;
        m->rows_true += at - row;
      }
      row += m->pad(at - row);
    }
    if (r == c.rank) m->rows_padded = row;
  }
  result[0] = m->rows_padded;
  result[1] = m->rows_true;
  result[2] = m->distinct;
  return kOk;
}
