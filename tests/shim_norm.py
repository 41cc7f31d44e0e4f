"""csrc/cuda/norm_*.cu on the CPU: made small, and their mutants. cuda_shim/norm.cpp has the scenarios."""

from __future__ import annotations

from shim_build import Kernel, Replacement

COMMON, FLAGS, ROWS = "norm.cuh", "norm_flags.cu", "norm_rows.cu"
SOURCES = ("norm_flags", "norm_rows")
FLOAT32, BFLOAT16, FLOAT16 = range(3)
SMALL = (
    Replacement(COMMON, "kBlocks = 32, kMostBatches = 64", "kBlocks = 2, kMostBatches = 6"),
    Replacement(FLAGS, "kMostThreads = 512", "kMostThreads = 32"),
    Replacement(ROWS, "kMostThreads = 1024, kMostTeams = 8", "kMostThreads = 64, kMostTeams = 2"),
)


def kernel(name: str, dtype: int, hidden: int, two_shot: int) -> Kernel:
    row_bytes = hidden * (4 if dtype == FLOAT32 else 2)
    packets = 4 * (-(-row_bytes // 48) * 64)
    rows = -(-6 * (row_bytes + 4) // 4096) * 4096
    defines = {"DTYPE": dtype, "HIDDEN": hidden, "TWO_SHOT": two_shot, "PACKET_BYTES": packets, "ROW_BYTES": rows}
    return Kernel(name, defines, SMALL, "norm")


# Rows of two groups and an odd vector; of one group, for two teams; of several vectors and units a thread.
ONE_SHOT = kernel("norm_bfloat16_one_shot", BFLOAT16, 264, 0)
TWO_SHOT = kernel("norm_float32_two_shot", FLOAT32, 28, 1)
WIDE = kernel("norm_float16_two_shot", FLOAT16, 1032, 1)
KERNELS = (ONE_SHOT, TWO_SHOT)
MORE_KERNELS = (WIDE, kernel("norm_float32_one_shot", FLOAT32, 1160, 0), kernel("norm_bfloat16_small", BFLOAT16, 8, 0))
