"""Mutants of csrc/cuda/moe_push_*.cu, and of the order in which moe_push.py launches them: see shim_moe_push.py.

A line broken, the argument of the kernel's head that it breaks, and the layer and scenario that must notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from shim_build import Replacement


@dataclass(frozen=True)
class MoeMutant:
    """A line broken, the argument that it breaks, and the layer and scenario that must notice."""

    name: str
    argument: str
    replacement: Replacement
    layer: str
    scenario: str = "exchanges"


def mutant(
    name: str, argument: str, file: str, old: str, new: str, layer: str, scenario: str = "exchanges"
) -> MoeMutant:
    return MoeMutant(name, argument, Replacement(file, old, new), layer, scenario)


SEND, EXPAND, DOTS, SUM, SHARED, EXPANDS, SUMS, COUNTED, FLAGS, HOST = (
    "moe_push_send.cu",
    "moe_push_expand.cu",
    "moe_push_dots.cu",
    "moe_push_sum.cu",
    "moe_push.cuh",
    "moe_push_expand.cuh",
    "moe_push_sum.cuh",
    "moe_push_ready.cuh",
    "ready.cuh",
    "moe_push_order.py",
)
FAILED = "  if (has_failed(a.m)) return;\n  const Rows e(a);\n  e.dispatch_tiles("
MUTANTS = (
    # what is read has been published, and was seen to be
    mutant(
        "signal_before_all_have_stored",
        "VISIBLE",
        SEND,
        "      barrier();\n      for (std::uint32_t r = t; r < kWorld",
        "      for (std::uint32_t r = t; r < kWorld",
        "two_warps",
    ),
    mutant("no_meeting", "VISIBLE", SEND, "      meet();\n", "", "ranges"),
    mutant("no_acquire_at_gates", "VISIBLE", EXPAND, "  ptx::load_acquire_sys(word);\n", "", "chunks"),
    mutant(
        "own_plan_not_awaited",
        "VISIBLE",
        EXPAND,
        "progress[m.rank()][b], mark(epoch, 0), m.rank());",
        "progress[m.rank()][b], mark(epoch - 1, 0), m.rank());",
        "ranges",
    ),
    mutant("expand_before_gate", "VISIBLE", EXPAND, "  ptx::await_previous();\n" + FAILED, FAILED, "max_rows"),
    mutant("finish_before_gate", "VISIBLE", SUM, "  ptx::await_previous();\n", "", "one_chunk"),
    mutant("tile_not_awaited", "VISIBLE", SHARED, "    ptx::bulk_await(barrier, phase);\n", "", "one_chunk"),
    mutant("tiles_not_arrived", "VISIBLE", EXPAND, "    ptx::bulk_wait();\n", "", "one_chunk"),
    mutant(
        "piece_not_awaited",
        "VISIBLE",
        SUM,
        "        ptx::bulk_await(barriers + at, phases >> at & 1);\n",
        "",
        "one_chunk",
    ),
    mutant(
        "dots_not_awaited",
        "VISIBLE",
        DOTS,
        "      ptx::bulk_await(barriers + step % kStages, step / kStages & 1);\n",
        "",
        "one_chunk",
    ),
    mutant("every_warp_signals", "VISIBLE", SUM, "      if (before + 1 != kWarps) continue;\n", "", "chunks"),
    mutant("older_counts_pass", "VISIBLE", EXPAND, "seen >> 32 != epoch && again", "seen == 0 && again", "chunks"),
    mutant(
        "work_not_behind_gates",
        "VISIBLE",
        HOST,
        "self._wait(2 + number, 2), worker(first, end)",
        "worker(first, end)",
        "chunks",
    ),
    mutant(
        "caller_goes_on_too_early",
        "VISIBLE",
        HOST,
        "return [*steps, self._record(1, 2), self._wait(1, 0)]",
        "return steps",
        "chunks",
    ),
    mutant(
        "streams_do_not_follow", "VISIBLE", HOST, "self._wait(0, 1), self._wait(0, 2)]", "self._wait(0, 1)]", "chunks"
    ),
    # ready flags
    mutant(
        "arrived_before_it_is_stored",
        "VISIBLE",
        EXPAND,
        "    if constexpr (kReadyFlags) ptx::bulk_wait();\n",
        "",
        "ready",
    ),
    mutant(
        "another_rows_flag",
        "VISIBLE",
        EXPAND,
        "count_arrivals<kTiles>(m, stored, 1);",
        "count_arrivals<kTiles>(m, stored ^ 4, 1);",
        "ready",
    ),
    mutant(
        "arrived_relaxed",
        "VISIBLE",
        COUNTED,
        "    ptx::store_release_gpu(ReadyAt::arrived(m) + word, ready_epoch(m));\n  }\n}\n\n// Words",
        "    *const_cast<volatile std::uint32_t*>(ReadyAt::arrived(m) + word) = ready_epoch(m);\n  }\n}\n\n// Words",
        "ready",
    ),
    mutant(
        "counted_relaxed",
        "VISIBLE",
        COUNTED,
        "ptx::add_acq_rel_gpu(counted, pieces)",
        "atomicAdd(counted, pieces)",
        "ready",
    ),
    mutant(
        "an_older_epoch",
        "VISIBLE",
        COUNTED,
        "std::int32_t(++*ReadyAt::serial(m))",
        "std::int32_t((*ReadyAt::serial(m))++)",
        "ready",
    ),
    mutant(
        "epochs_are_not_signed",
        "VISIBLE",
        FLAGS,
        "while (!reached(ptx::load_acquire_gpu(flags.arrived + word), epoch))",
        "while (ptx::load_acquire_gpu(flags.arrived + word) < epoch)",
        "ready",
    ),
    mutant(
        "counts_not_awaited",
        "VISIBLE",
        HOST,
        "RECORD, stream, self.ready.event",
        "RECORD, 0, self.ready.event",
        "ready",
    ),
    mutant(
        "padding_is_not_counted",
        "PROGRESS",
        EXPANDS,
        "count_arrivals<kPieces>(m, lane == 0",
        "count_arrivals<kPieces>(m, lane == 33",
        "ready",
    ),
    mutant("nothing_beyond", "PROGRESS", EXPANDS, "    if (kDispatch && kReadyFlags) arrive_beyond(m);\n", "", "ready"),
    mutant(
        "summed_before_it_is_marked",
        "VISIBLE",
        EXPAND,
        "while (!reached(ptx::load_acquire_gpu(ReadyAt::sendable(m) + word), ready_epoch(m)) && wait",
        "while (false && wait",
        "ready",
    ),
    mutant("first_row_decides", "VISIBLE", SUMS, "rows ? 31 - __clz(rows) : 0", "rows ? __ffs(rows) - 1 : 0", "ready"),
    mutant(
        "every_pass_signals",
        "VISIBLE",
        SUM,
        "const bool last_pass = !kReadyFlags || a.pass + 1 >= a.passes;",
        "const bool last_pass = true;",
        "ready",
    ),
    mutant(
        "passes_over_a_short_ring",
        "PROGRESS",
        HOST,
        "return 1 if self._geometry.chunks == 1 or self._credits else READY_PASSES",
        "return READY_PASSES",
        "ready_ring",
    ),
    mutant(
        "waits_past_failures",
        "FAILURE",
        FLAGS,
        "if (!wait.again_for_own()) return false;",
        "wait.again_for_own();",
        "ready",
        "missing",
    ),
    mutant(
        "unmarked_for_ever",
        "FAILURE",
        EXPAND,
        "ready_epoch(m)) && wait.again_for_own()) {",
        "ready_epoch(m))) {",
        "ready",
        "unmarked",
    ),
    # what is overwritten has been read
    mutant("ring_overrun", "REUSE", SEND, "mark(epoch, c - depth + 1)", "mark(epoch, c - depth)", "short_ring"),
    mutant("ring_of_sums_overrun", "REUSE", SUM, "mark(epoch, c - depth + 1)", "mark(epoch, c - depth)", "short_ring"),
    mutant(
        "room_for_one_lane",
        "REUSE",
        SUM,
        "    __syncwarp();  // what one lane has acquired holds for all: a vote orders no memory\n",
        "",
        "short_ring",
    ),
    mutant("one_half", "REUSE", SHARED, "data + epoch % 2 * half + number", "data + number", "max_rows"),
    mutant("consumed_by_any_block", "REUSE", SHARED, "  if (!is_last_block(m)) return;\n", "", "short_ring"),
    mutant("tile_filled_too_early", "REUSE", SHARED, "    ptx::bulk_wait_read();\n", "", "one_chunk"),
    mutant(
        "more_pieces_than_spots",
        "REUSE",
        SUM,
        "used + next.pieces() <= kSpots",
        "used + next.pieces() <= 2 * kSpots",
        "top_8",
    ),
    mutant(
        "sends_after_a_failure",
        "REUSE",
        SUM,
        "  if (__syncthreads_or(failed)) return;",
        "  __syncthreads();",
        "chunks",
        "out_of_range",
    ),
    # everybody gets what he waits for
    mutant(
        "peer_a_call_ahead",
        "PROGRESS",
        SHARED,
        "return at == next_epoch(call) || (at == call",
        "return (at == call",
        "chunks",
    ),
    mutant("no_credits", "PROGRESS", HOST, "return int(g.ring // g.chunk_tokens < g.chunks)", "return 0", "short_ring"),
    mutant(
        "last_chunk_unannounced",
        "PROGRESS",
        SUM,
        "signal(done, kChunks, arrived)",
        "signal(done, kChunks - 1, arrived)",
        "chunks",
    ),
    # a failure ends the call everywhere and names who is to blame
    mutant(
        "waiting_is_blamed",
        "FAILURE",
        SHARED,
        "        return r;\n    return blamed;",
        "        return blamed;\n    return blamed;",
        "short_ring",
        "absent",
    ),
    mutant("header_unchecked", "FAILURE", EXPAND, "  if (a.headers)\n", "  if (false)\n", "chunks", "mismatch"),
    mutant(
        "lanes_part",
        "FAILURE",
        SHARED,
        "return __syncthreads_or(threadIdx.x == 0 && record_is_set(m));",
        "return record_is_set(m);",
        "chunks",
        "closed",
    ),
    mutant(
        "ids_unchecked",
        "FAILURE",
        SEND,
        "if (e == kNone && id(i) != -1) wait.fail",
        "if (false) wait.fail",
        "max_rows",
        "out_of_range",
    ),
)
