"""csrc/cuda/reduce_*.cu on the CPU: made small, and their mutants. cuda_shim/reduce.cpp has the scenarios."""

from __future__ import annotations

from shim_build import Kernel, Replacement

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
        "FLAG_BYTES": 960, "CHUNK_BYTES": 512, "COLLECTIVE": collective, "DTYPE": dtype, "REDUCE": reduce_op,
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
