"""What the floors of `run_reductions.py` leave room for on this machine: bench/results/cpu_reduction_bounds.jsonl.

    python bench/bounds_reductions.py [--out FILE] [--ops all_reduce,...] [--only 64K,64M] [--budget SECONDS]
    python bench/bounds_reductions.py --table FILE

As bounds.py: two ranks time gloo, MPI, a2a and the least that such a call takes, in turn, and a bound that is longer than
what a floor asks for forbids it here. The bound of a call on ordinary tensors is the sum of

* **ways**: the fastest program of copies and sums that makes the result (`a2a/primitives.py`), of those known here:
  through slots of shared memory, in units of several sizes, through the caches or past them, or read from the peer's
  process; without a signal, so nobody ever waits for anybody;
* **signal**: one round of signals, as both must know that the other is there;
* **call**: what Python takes to bring two tensors to a C function that returns at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bounds_reductions_ranks import Request, work
from run_reductions import FLOORS, OPS, SIZES

from a2a.cli import parse, show
from a2a.cli.ranks import find_mpi, run_ranks
from a2a.errors import UnsupportedError
from a2a.measure import Line

FOLDER = Path(__file__).resolve().parent


def rows(lines: Sequence[Line]) -> Iterator[list[str]]:
    """Every floor of two ranks and float32 that these lines speak of, as cells of a table."""
    for floor in FLOORS:
        for size, ratio in floor.by_bytes if (floor.ranks, floor.dtype) == (2, "float32") else ():
            cell = {(x.impl, x.algorithm): x.p50_us for x in lines if (x.op, x.bytes) == (f"{floor.op}_bounds", size)}
            of = {impl: us for (impl, _), us in cell.items() if us}
            found = {way: us for (impl, way), us in cell.items() if impl == "way" and us}
            if not (found and {"a2a", floor.baseline} <= of.keys()):
                continue
            way, us = min(found.items(), key=lambda item: item[1])
            bound, needed = us + of["signal"] + of["call"], of[floor.baseline] / ratio
            reached = of[floor.baseline] / of["a2a"]
            verdict = "met" if reached >= ratio else "not reached, not forbidden"
            if reached < ratio and bound > needed:
                verdict = f"**forbidden** by {show.us_text(bound - needed)} us"
            names = [floor.op.replace("_", "-"), show.size_text(size), floor.baseline]
            numbers = [f"{value:.3g}" for value in (ratio, reached, of[floor.baseline] / bound)]
            yield [*names, *numbers, *map(show.us_text, (needed, of["a2a"], bound)), way, verdict]


def markdown(lines: Sequence[Line]) -> str:
    """The table of all floors that these lines speak of."""
    head = [
        "op",
        "bytes",
        "against",
        "floor",
        "reached",
        "bound allows",
        "floor needs, us",
        "a2a",
        "bound",
        "by",
        "verdict",
    ]
    table = [head, ["---", *["---:"] * 8, "---", "---"], *rows(lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = FOLDER / "results" / "cpu_reduction_bounds.jsonl"
    parser.add_argument("--out", type=Path, default=results)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--only", default=SIZES, help="sizes")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of samples of an op and size")
    parser.add_argument("--table", type=Path, help="measure nothing; print the table of this file")
    arguments = parser.parse_args()
    if arguments.table:
        print(markdown([Line.from_json(text) for text in arguments.table.read_text().splitlines()]))
        return 0
    paths = [str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH")]  # of the ranks
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    mpi = None
    with contextlib.suppress(UnsupportedError):
        mpi = find_mpi()
    told = (
        f"python bench/bounds_reductions.py --ops {arguments.ops} --only {arguments.only} --budget {arguments.budget:g}"
    )
    ops = tuple(parse.words(arguments.ops, OPS, "--ops"))
    request = Request(ops, tuple(parse.sizes(arguments.only)), arguments.budget, mpi is not None, told)
    lines: list[Line] = []
    run_ranks(work, request, 2, lambda message: lines.append(Line(**message["line"])), mpi=mpi)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(line.to_json() + "\n" for line in lines))
    print(markdown(lines))
    return 1 if any(line.wrong for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
