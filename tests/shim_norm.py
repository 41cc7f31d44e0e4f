"""csrc/cuda/norm_*.cu on the CPU: made small, and their mutants. cuda_shim/norm.cpp has the scenarios."""

from __future__ import annotations

from shim_build import Kernel, Mutant, Replacement

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


def mutant(name: str, argument: str, old: str, new: str, *scenarios: str, file: str = ROWS) -> Mutant:
    return Mutant(name, argument, Replacement(file, old, new), scenarios)


ARRIVED = "        ptx::store_release_sys(&staging(p).arrived[rank][epoch % 2][blockIdx.x][g], epoch);\n"
MADE = "      if (p != rank) ptx::store_release_sys(&staging(p).made[rank][blockIdx.x][g], epoch);\n"
PEERS = "    for (std::uint32_t p = threadIdx.x; p < kWorld; p += kThreads)\n"
CHECKED = "w[0].w != epoch || w[1].w != epoch || w[2].w != epoch || w[3].w != epoch"
PUSHED = "      if (p != rank && (!kTwoShot || owner(g) == p))\n" + ARRIVED
BARRIER = "    __syncthreads();\n"
PARTS = BARRIER + "    for (std::uint32_t g = t / 32;"
HEADERS = "    if (blockIdx.x == 0) await_headers(a, wait, epoch);\n"


def volatile(store: str) -> str:
    """The store of a signal without its order."""
    return store.replace("ptx::store_release_sys(&", "const_cast<volatile std::uint32_t&>(").replace(
        ", epoch);", ") = epoch;"
    )


# Of the one-shot, and of packets.
ONE_SHOT_MUTANTS = (
    mutant("relaxed_arrived", "VISIBLE", ARRIVED, volatile(ARRIVED), "rows"),
    mutant("no_acquire", "VISIBLE", "    ptx::load_acquire_sys(word);", "    ", "rows"),
    mutant("arrived_before_copy", "VISIBLE", BARRIER + PEERS + PUSHED, PEERS + PUSHED, "rows"),
    mutant("groups_not_awaited", "VISIBLE", "    barrier();\n    const float scale", "    const float scale", "rows"),
    mutant("one_packet_unchecked", "VISIBLE", CHECKED, CHECKED.replace(" || w[2].w != epoch", ""), "flags", file=FLAGS),
    mutant("parts_not_awaited", "VISIBLE", PARTS, PARTS.removeprefix(BARRIER), "flags", file=FLAGS),
    mutant("one_slab", "REUSE", "packets[from][epoch % 2]", "packets[from][0]", "flags", file=FLAGS),
    mutant("one_of_terms", "REUSE", "terms[from][epoch % 2]", "terms[from][0]", "rows"),
    mutant("one_of_groups", "REUSE", "groups[turn++ % 2]", "groups[0]", "rows"),
    mutant("headers_unchecked", "REUSE", HEADERS, "", "rows"),
    mutant("one_word_arrived", "PROGRESS", ARRIVED, ARRIVED.replace("epoch % 2", "0"), "rows"),
)  # fmt: skip
TWO_SHOT_MUTANTS = (
    mutant("relaxed_made", "VISIBLE", MADE, volatile(MADE), "rows"),
    mutant("made_before_stored", "VISIBLE", BARRIER + PEERS + MADE, PEERS + MADE, "rows"),
    mutant("results_in_one_place", "REUSE", "g / kPerOwner) * bytes", "0) * bytes", "rows"),
    mutant("waiting_is_blamed", "FAILURE", "wait.again_behind(p, epoch)", "wait.again(p)", "absent"),
)  # fmt: skip
