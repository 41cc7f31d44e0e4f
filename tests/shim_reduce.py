"""csrc/cuda/reduce_*.cu on the CPU: made small, and their mutants. cuda_shim/reduce.cpp has the scenarios."""

from __future__ import annotations

from shim_build import Kernel, Mutant, Replacement

COMMON, FLAGS, SHARES, SIGNAL = "reduce.cuh", "reduce_flags.cu", "reduce_shares.cu", "signal.cuh"
SOURCES = ("reduce_flags", "reduce_shares")
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = range(3)
SUM, AVG, MAX, MIN, COPY = range(5)
FLOAT32, BFLOAT16, FLOAT16, FLOAT64, UINT8, INT8, INT16, INT32, INT64 = range(9)
SMALL = (
    Replacement(COMMON, "kBlocks = 24", "kBlocks = 2"),
    Replacement(SHARES, "kChannelThreads = 512", "kChannelThreads = 96"),
)


def kernel(name: str, collective: int, dtype: int, reduce_op: int, two_shot: int = 0) -> Kernel:
    defines = {
        "FLAG_BYTES": 2304, "CHUNK_BYTES": 512, "COLLECTIVE": collective, "DTYPE": dtype, "REDUCE": reduce_op,
        "TWO_SHOT": two_shot,
    }  # fmt: skip
    return Kernel(name, defines, SMALL, "reduce")


ONE_SHOT = kernel("all_reduce_bfloat16_sum", ALL_REDUCE, BFLOAT16, SUM)
TWO_SHOT = kernel("all_reduce_two_shot_int8_max", ALL_REDUCE, INT8, MAX, 1)
SCATTER = kernel("reduce_scatter_float32_avg", REDUCE_SCATTER, FLOAT32, AVG)
GATHER = kernel("all_gather_bytes", ALL_GATHER, UINT8, COPY)
# The others run in the longer form.
KERNELS = (ONE_SHOT, TWO_SHOT, SCATTER, GATHER)
MORE_KERNELS = (
    kernel("all_reduce_float16_avg", ALL_REDUCE, FLOAT16, AVG),
    kernel("all_reduce_float64_sum", ALL_REDUCE, FLOAT64, SUM, 1),
    kernel("all_reduce_uint8_sum", ALL_REDUCE, UINT8, SUM, 1),
    kernel("reduce_scatter_float16_min", REDUCE_SCATTER, FLOAT16, MIN),
    kernel("reduce_scatter_int16_sum", REDUCE_SCATTER, INT16, SUM),
    kernel("reduce_scatter_int64_min", REDUCE_SCATTER, INT64, MIN),
    kernel("all_reduce_float32_max", ALL_REDUCE, FLOAT32, MAX),
    kernel("all_reduce_float64_avg", ALL_REDUCE, FLOAT64, AVG),
    kernel("all_gather_words", ALL_GATHER, INT32, COPY),
)


def mutant(
    kernel: Kernel, name: str, argument: str, old: str, new: str, *scenarios: str, file: str = SHARES
) -> tuple[Kernel, Mutant]:
    return kernel, Mutant(name, argument, Replacement(file, old, new), scenarios)


ARRIVED = "w[0].w == epoch && w[1].w == epoch && w[2].w == epoch && w[3].w == epoch"
INPUT_SLAB, RESULT_SLAB = "staging(at).input_slabs[from][epoch % 2]", "staging(at).result_slabs[from][epoch % 2]"
LEAVE = "  __syncthreads();\n", "  if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;\n"
IDLE = (
    "  if (blockIdx.x == 0)\n"
    "    for (std::uint32_t c = gridDim.x + threadIdx.x; c < kEpochs; c += blockDim.x) epochs[c] = epoch;\n"
)
TELL = "    ptx::store_release_sys(word, counted(epoch, count));\n"
BARRIER = "        barrier();\n"
PRODUCED = "        if (team.thread == 0) tell(&staging(p).produced[rank][channel], i + 1);\n"
TAKEN = "        if (team.thread == 0) tell(&staging(p).taken[rank][channel], i + 1);\n"
COLLECTED = "        if (team.thread == 0) await(&staging(rank).progress[p][channel], i + 1, p);\n"
REDUCED = "      reduce_lines(c.bytes, team.thread, team.threads);\n      barrier();\n"
ENTERED = "ptx::store_release_sys(&a.place.at<Staging>(p, a.staging)->entered[rank], epoch);"
AWAIT_ENTERED = "while (!wait.broken && ptx::load_relaxed_sys(entered) != epoch && wait.again(p)) {"
PROGRESS = "if (p != rank && (sends(p) || collects(p))) tell(&staging(p).progress[rank][channel], i + 1);"

MUTANTS = (
    # what is read has been published, and was seen to be
    mutant(ONE_SHOT, "last_packet_unchecked", "VISIBLE", ARRIVED, ARRIVED[:-19], "flags", file=FLAGS),
    mutant(GATHER, "first_packet_unchecked", "VISIBLE", ARRIVED, ARRIVED[19:], "flags", file=FLAGS),
    mutant(ONE_SHOT, "relaxed_signal", "VISIBLE", TELL, TELL.replace("release", "relaxed"), "direct", "rings"),
    mutant(ONE_SHOT, "no_acquire", "VISIBLE", "    ptx::load_acquire_sys(word);  //", "    //", "direct", "rings"),
    mutant(SCATTER, "relaxed_entry", "VISIBLE", ENTERED, ENTERED.replace("ptx::store_release_sys(", "*(").replace(
        ", epoch);", ") = epoch;"), "direct"),
    mutant(SCATTER, "no_acquire_of_entry", "VISIBLE", "        ptx::load_acquire_sys(entered);\n", "", "direct"),
    mutant(ONE_SHOT, "entry_not_awaited", "VISIBLE", AWAIT_ENTERED, "while (false) {", "direct"),
    mutant(ONE_SHOT, "tensors_before_headers", "VISIBLE", "return !__syncthreads_or(wait.broken)", "return !wait.broken",
           "direct"),
    mutant(SCATTER, "produced_before_all_have_stored", "VISIBLE", BARRIER + PRODUCED, PRODUCED, "rings"),
    mutant(TWO_SHOT, "progress_before_all_have_reduced", "VISIBLE", REDUCED, REDUCED[:-17], "rings"),
    mutant(GATHER, "only_one_thread_waits", "VISIBLE", COLLECTED + BARRIER, COLLECTED, "rings"),
    mutant(ONE_SHOT, "done_before_all_have_stored", "VISIBLE", "    barrier();\n    for (std::uint32_t p = team.thread;",
           "    for (std::uint32_t p = team.thread;", "direct"),
    # what is overwritten has been read
    mutant(ONE_SHOT, "one_slab_of_inputs", "REUSE", INPUT_SLAB, INPUT_SLAB.replace("epoch % 2", "0"), "flags",
           file=FLAGS),
    mutant(GATHER, "one_slab_of_results", "REUSE", RESULT_SLAB, RESULT_SLAB.replace("epoch % 2", "0"), "flags",
           file=FLAGS),
    mutant(SCATTER, "input_ring_overrun", "REUSE", "progress[p][channel], i + 1 - kSlots",
           "progress[p][channel], i - kSlots", "rings"),
    mutant(GATHER, "result_ring_overrun", "REUSE", "taken[p][channel], i + 1 - kSlots", "taken[p][channel], i - kSlots",
           "rings"),
    mutant(GATHER, "taken_before_all_have_read", "REUSE", BARRIER + TAKEN, TAKEN, "rings"),
    mutant(SCATTER, "input_left_while_it_is_read", "REUSE", "    if (!reaches(rank)) return;\n", "    return;\n", "direct"),
    mutant(ONE_SHOT, "epoch_before_use", "REUSE", LEAVE[0] + LEAVE[1], LEAVE[1] + LEAVE[0], "flags", file=COMMON),
    # everybody gets what he waits for
    mutant(GATHER, "epochs_of_idle_blocks", "PROGRESS", IDLE, "", "flags", file=COMMON),
    mutant(ONE_SHOT, "progress_too_late", "PROGRESS", PROGRESS, PROGRESS.replace("i + 1", "i"), "rings"),
    mutant(GATHER, "collectors_are_not_told", "PROGRESS", PROGRESS, PROGRESS.replace(" || collects(p)", ""), "rings"),
    mutant(SCATTER, "wait_for_the_whole_ring", "PROGRESS", "progress[p][channel], i + 1 - kSlots",
           "progress[p][channel], i + 1", "rings"),
    # a failure ends the call everywhere
    mutant(ONE_SHOT, "no_look_at_headers", "FAILURE", "wait.await_header(p, epoch, a.digest, true);", "(void)0;",
           "mismatch", file=FLAGS),
    # terms come in the order of ranks
    mutant(SCATTER, "own_term_first", "ORDER", "load(lines.from[first + j]", "load(lines.from[(rank + first + j) % kTerms]",
           "direct"),
)  # fmt: skip
