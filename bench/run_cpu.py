"""Produce every number that README.md and bench/README.md show for CPU ranks: bench/results/cpu.jsonl.

    python bench/run_cpu.py [--out bench/results/cpu.jsonl] [--only TEXT] [--short]

Runs `a2a bench` with each line of COMMANDS, one after the other, on a machine that should do nothing else, and puts the JSON
lines into one file. Then it holds the ratios against FLOORS, what a2a promises on two cores. The exit code is 1 if a result
was wrong, and 2 if a floor was missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import runs

from a2a.measure import Line

SIZES = "4K,64K,1M,16M,64M"
MOE = "--tokens 1024 --hidden 1024 --experts 32 --top-k 4 --dtype bf16,fp32"
COMMANDS = (
    f"all_to_all --ranks 2 --bytes {SIZES} --against gloo,mpi --memory symmetric",
    f"all_to_all --ranks 2 --bytes {SIZES} --against gloo,mpi --memory ordinary",
    f"all_to_all --ranks 2 --bytes {SIZES} --against gloo,mpi --through dist",
    f"all_to_allv --ranks 2 --bytes {SIZES} --against gloo,mpi --memory symmetric",
    f"all_to_all --ranks 4 --bytes {SIZES} --against gloo,mpi --memory symmetric",
    f"all_to_all --ranks 4 --bytes {SIZES} --against gloo,mpi --memory ordinary",
    f"all_to_all --ranks 4 --bytes {SIZES} --against gloo,mpi --through dist",
    f"all_to_allv --ranks 4 --bytes {SIZES} --against gloo,mpi --memory symmetric",
    f"all_to_allv --ranks 4 --bytes {SIZES} --against gloo,mpi --memory ordinary",
    f"moe --ranks 2 {MOE}",
    f"moe --ranks 4 {MOE}",
    f"moe --ranks 4 {MOE} --skew 1",
)
SHORT = ("--bytes", "4K", "--tokens", "32", "--hidden", "32", "--experts", "8", "--repeat", "3")


@dataclass(frozen=True)
class Floor:
    """The times that a2a must at least be as fast as a baseline, for a column of cases."""

    op: str
    ranks: int
    case: tuple[tuple[str, object], ...]
    baseline: str
    by_bytes: tuple[tuple[int, float], ...]  # 0: any size
    dtype: str | None = None  # None: any

    def missed(self, line: Line) -> str | None:
        """What `line` misses, or None where it doesn't, or isn't of this kind."""
        if (
            line.impl != "a2a"
            or line.op != self.op
            or line.ranks != self.ranks
            or self.dtype not in (None, line.dtype)
            or line.ratio.get(self.baseline) is None
        ):
            return None
        if any(line.case.get(key) != value for key, value in self.case):
            return None
        floor = dict(self.by_bytes).get(line.bytes, dict(self.by_bytes).get(0))
        if floor is None or line.ratio[self.baseline] >= floor:
            return None
        return (
            f"{line.op} of {line.bytes} bytes, {line.dtype}, {line.ranks} ranks, {dict(self.case)}: "
            f"{line.ratio[self.baseline]:.3g} times {self.baseline}, expected {floor:g}"
        )


def row(values: str) -> tuple[tuple[int, float], ...]:
    """A floor for each of SIZES, or for the last ones of them."""
    floors, sizes = values.split(), (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    return tuple(zip(sizes[-len(floors) :], map(float, floors), strict=True))


_SYMMETRIC = (("memory", "symmetric"), ("through", "a2a"))
ORDINARY = (("memory", "ordinary"), ("through", "a2a"))
_DIST = (("through", "dist"),)
_MOE_TOTAL = (("part", "total"), ("skew", 0.0), ("tokens", 1024), ("hidden", 1024))
FLOORS = (
    Floor("all_to_all", 2, _SYMMETRIC, "gloo", row("40 45 14 5 4.5")),
    Floor("all_to_all", 2, _SYMMETRIC, "mpi", row("0.7 1.8 2 1.8 1.7")),
    Floor("all_to_all", 2, ORDINARY, "gloo", row("30 28 8 3.5 3.5")),
    Floor("all_to_all", 2, ORDINARY, "mpi", row("0.6 1.3 1.3 1.2 1.4")),
    Floor("all_to_all", 2, _DIST, "gloo", row("10 10 6 3.5 3.5")),
    Floor("all_to_allv", 2, (), "gloo", ((0, 1.0),)),
    Floor("all_to_all", 4, (), "gloo", ((0, 1.0),)),
    Floor("all_to_allv", 4, (), "gloo", ((0, 1.0),)),
    Floor("moe", 4, _MOE_TOTAL, "gloo", ((0, 3.0),)),
    Floor("moe", 4, _MOE_TOTAL, "copies", ((0, 0.5),)),
    Floor("moe", 4, (("part", "total"),), "gloo", ((0, 1.0),)),
)


def run(
    commands: Sequence[str], floors: Sequence[Floor], short: Sequence[str], results: str, description: str | None
) -> int:
    """Run the commands of a command line of `bench`, hold what comes out against the floors; returns the exit code.

    Args:
        commands: words of `a2a bench`.
        short: words that make any of them tiny.
        results: the file's name.
        description: for `--help`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / results)
    parser.add_argument(
        "--only", default="", help="only commands that contain this text; the file gets only their lines"
    )
    parser.add_argument(
        "--short", action="store_true", help="tiny sizes, to see that everything runs; floors mean nothing"
    )
    arguments = parser.parse_args()
    failed = 0
    lines: list[Line] = []
    for command in (command for command in commands if arguments.only in command):
        code, new = runs.measure(f"{command} --device cpu", short if arguments.short else ())
        failed += code != 0
        lines += new
        runs.write(arguments.out, lines)  # after each: hours may be lost otherwise
    missed = [text for line in lines for floor in floors if (text := floor.missed(line))]
    return runs.verdict(arguments.out, lines, failed, None if arguments.short else missed)


if __name__ == "__main__":
    sys.exit(run(COMMANDS, FLOORS, SHORT, "cpu.jsonl", __doc__))
