"""csrc/cuda/reduce_multimem.cu on the CPU, through the software switch: made small, and its mutants.

cuda_shim/reduce.cpp has the scenarios.
"""

from __future__ import annotations

from shim_build import Kernel, Mutant, Replacement
from shim_reduce import (
    ALL_GATHER,
    ALL_REDUCE,
    BFLOAT16,
    COPY,
    FLOAT32,
    INT32,
    INT64,
    MAX,
    MIN,
    REDUCE_SCATTER,
    SMALL,
    SUM,
    UINT8,
)

SOURCE = "reduce_multimem.cu"


def kernel(name: str, collective: int, dtype: int, reduce_op: int) -> Kernel:
    defines = {
        "FLAG_BYTES": 960, "CHUNK_BYTES": 512, "COLLECTIVE": collective, "DTYPE": dtype, "REDUCE": reduce_op,
        "TWO_SHOT": 0, "SLOT_BYTES": 1024, "A2A_SOFTWARE_SWITCH": 1,
    }  # fmt: skip
    return Kernel(name, defines, SMALL, "reduce")


REDUCE = kernel("multimem_all_reduce_bfloat16_sum", ALL_REDUCE, BFLOAT16, SUM)
SCATTER = kernel("multimem_reduce_scatter_int32_max", REDUCE_SCATTER, INT32, MAX)
GATHER = kernel("multimem_all_gather_bytes", ALL_GATHER, UINT8, COPY)
KERNELS = (REDUCE, SCATTER, GATHER)
MORE_KERNELS = (
    kernel("multimem_all_reduce_int64_min", ALL_REDUCE, INT64, MIN),
    kernel("multimem_reduce_scatter_float32_sum", REDUCE_SCATTER, FLOAT32, SUM),
)


def mutant(kernel: Kernel, name: str, argument: str, old: str, new: str, *scenarios: str) -> tuple[Kernel, Mutant]:
    return kernel, Mutant(name, argument, Replacement(SOURCE, old, new), scenarios)


SIGNAL = "ptx::store_release_sys(met(p, rank), std::uint64_t(epoch) << 32 | count);"
VOLATILE = "*const_cast<volatile std::uint64_t*>(met(p, rank)) = std::uint64_t(epoch) << 32 | count;"
ENTER = "    ptx::fence_alias();\n    __syncthreads();\n    count++;\n"
MEET = "      if (!meet()) return false;\n"
STORED = "        all.store(slot() + 16 * v, all.load(slot() + 16 * v));\n"
TERMS = "      move(own(), in() + begin, bytes);\n"
SCATTERED = "all.load(slot() + rank * kSliceBytes + 16 * v), bytes - 16 * v);\n"
GATHERED = "move(out() + p * share + begin, own() + p * kSliceBytes, bytes);\n"
HEADERS = "        if (p != rank) wait.await_header(p, epoch, a.call.digest, true);\n"
LAST = "    __syncthreads();  // what is copied out may be stored over\n"

MUTANTS = (
    mutant(REDUCE, "relaxed_meeting", "VISIBLE", SIGNAL, VOLATILE, "any"),
    mutant(REDUCE, "no_acquire", "VISIBLE", "        ptx::load_acquire_sys(met(rank, p));\n", "", "any"),
    mutant(REDUCE, "met_before_all_have_stored", "VISIBLE", ENTER, ENTER.replace("    __syncthreads();\n", ""), "any"),
    mutant(REDUCE, "only_some_wait", "VISIBLE", "!__syncthreads_or(wait.broken)", "!wait.broken", "any"),
    mutant(REDUCE, "terms_not_awaited", "VISIBLE", TERMS + MEET, TERMS, "any"),
    mutant(REDUCE, "results_not_awaited", "VISIBLE", STORED + MEET, STORED, "any"),
    mutant(REDUCE, "copied_out_too_late", "REUSE", LAST, "", "any"),
    mutant(SCATTER, "terms_still_read", "REUSE", SCATTERED + MEET, SCATTERED, "any"),
    mutant(GATHER, "results_still_copied", "REUSE", GATHERED + MEET, GATHERED, "any"),
    mutant(REDUCE, "one_word", "PROGRESS", "met[from][epoch % 2]", "met[from][0]", "any"),
    mutant(REDUCE, "mismatch_unnoticed", "FAILURE", HEADERS, "        (void)p;\n", "mismatch"),
)  # fmt: skip
