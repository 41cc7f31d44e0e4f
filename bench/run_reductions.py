"""Produce every number on all-reduces, reduce-scatters and all-gathers of CPU ranks: bench/results/cpu_reductions.jsonl.

    python bench/run_reductions.py [--out FILE] [--only TEXT] [--short]

As run_cpu.py, with the commands and floors below. All tensors are ordinary ones, where torch's own call has them, but for
one table that shows what symmetric ones gain. 4 ranks share 2 cores.
"""

from __future__ import annotations

import sys

from run_cpu import ORDINARY, Floor, row, run

OPS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = "64K,1M,16M,64M"
COMMANDS = (
    *(f"{op} --ranks 2 --bytes {SIZES} --against gloo,mpi --memory ordinary" for op in OPS),
    f"all_reduce --ranks 2 --bytes {SIZES} --against gloo --memory ordinary --dtype bf16",
    *(f"{op} --ranks 2 --bytes {SIZES} --against gloo,mpi --memory symmetric" for op in OPS),
    *(f"{op} --ranks 4 --bytes {SIZES} --against gloo,mpi --memory ordinary" for op in OPS),
)
SHORT = ("--bytes", "4K", "--repeat", "3")
FLOORS = (
    Floor("all_reduce", 2, ORDINARY, "gloo", row("50 25 5 5"), "float32"),
    Floor("all_reduce", 2, ORDINARY, "mpi", row("3 3 3 4"), "float32"),
    Floor("all_reduce", 2, ORDINARY, "gloo", row("40 20 5 4.5"), "bfloat16"),
    Floor("reduce_scatter", 2, ORDINARY, "gloo", row("60 35 8 10"), "float32"),
    Floor("reduce_scatter", 2, ORDINARY, "mpi", row("3 4 3 5"), "float32"),
    Floor("all_gather", 2, ORDINARY, "gloo", row("50 25 9 15"), "float32"),
    Floor("all_gather", 2, ORDINARY, "mpi", row("2.5 2.5 2.5 2.5"), "float32"),
    *(Floor(op, 4, ORDINARY, "gloo", ((0, 3.0),)) for op in OPS),
    *(Floor(op, 4, ORDINARY, "mpi", ((0, 1.2),)) for op in OPS),
)


if __name__ == "__main__":
    sys.exit(run(COMMANDS, FLOORS, SHORT, "cpu_reductions.jsonl", __doc__))
