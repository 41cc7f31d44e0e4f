"""What the floors of `run_cpu.py` leave room for on this machine: bench/results/cpu_bounds.jsonl.

    python bench/bounds.py [--out bench/results/cpu_bounds.jsonl] [--only 4K,64M] [--budget SECONDS]
    python bench/bounds.py --table bench/results/cpu_bounds.jsonl

Two ranks time gloo, MPI, a2a and the least that such an exchange takes, alternating in one run (`bounds_ranks.py`). A floor
asks for a time: the baseline's p50 divided by it. A bound longer than that forbids the floor here; a shorter one leaves the
difference to a2a as work to do. What is timed for bounds:

* **exchanges** in C (`bounds.cpp`), many to a call:
  `copy`, `push`   symmetric tensors: each half of the send buffer is copied once, and a word is stored each way, after both
                   copies or between them;
  `staged`, `slot` all tensors: the remote half through shared memory, so twice; a ring of slots, or one piece at once;
  `read`           all tensors: the remote half through `process_vm_readv`, the own half by a copy, then a word;
* **a call**: what Python takes to bring two tensors to a C function that returns at once: `data_ptr()` of both and a call
  through ctypes, or a function that CPython calls by itself and that asks DLPack's exchange table. Whichever is cheaper;
* **torch**: `dist.all_to_all_single` on the smallest backend in Python, which does nothing; and, to compare, in C++;
* **used**: `read` and then one pass over the output. An exchange that stores past the cache may take less and cost whoever
  reads the output next more than that: where both together take longer than the other way, it is no bound;
* up to 1M, **whole** calls: `push`, `slot` and `read` called from Python in the cheaper way, and **through torch** by the
  smallest backend. They may take more than their parts: caches are colder, and the ranks wait for each other's Python.

The bound of a floor is the fastest whole call, or of larger sizes the sum of the parts.

`flag` is an exchange of which nothing is left but the words. `checks` is what Python takes to compare dtype, shape,
contiguity and device of two tensors: no safe call does without them, but they need not be made in Python, so they are in no
bound.

Copies are libc's memcpy or, past the cache, the library's own (`stream`); what is faster counts. So these are bounds for the
ways that are known here, not proofs that no other way exists.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bounds_ranks import Request, work
from run_cpu import FLOORS, SIZES, Floor

from a2a.cli import parse, show
from a2a.cli.ranks import find_mpi, run_ranks
from a2a.errors import UnsupportedError
from a2a.kernels import cpu
from a2a.measure import Line

FOLDER = Path(__file__).resolve().parent
ISA_FLAGS = {  # as in csrc/CMakeLists.txt
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
}
EXCHANGES = ("staged", "slot", "read")  # of any tensors; of symmetric ones also
SYMMETRIC = ("copy", "push")
USED = "used after "


def compile_library(folder: Path) -> Path:
    """Build bounds.cpp for the instructions that a2a uses here."""
    isa, target = cpu.isa(), folder / "bounds.so"
    flags = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w", f"-DA2A_ISA={isa}", *ISA_FLAGS[isa])
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, str(FOLDER / "bounds.cpp"), "-o", str(target)], check=True)
    return target


# ------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Row:
    """One floor, held against one run; times are in us."""

    case: dict[str, object]
    baseline: str
    bytes: int
    floor: float
    baseline_us: float
    a2a_us: float
    library_us: float  # of which in C
    bound_us: float
    by: str
    exchange_us: float
    call_us: float
    torch_us: float  # 0 where the call doesn't go through it

    @property
    def reached(self) -> float:
        return self.baseline_us / self.a2a_us

    @property
    def needed_us(self) -> float:
        """What the floor asks for."""
        return self.baseline_us / self.floor

    @property
    def verdict(self) -> str:
        if self.reached >= self.floor:
            return "met"
        if self.bound_us > self.needed_us:
            return f"**forbidden** by {show.us_text(self.bound_us - self.needed_us)} us"
        return "not reached, not forbidden"


def rows(lines: Sequence[Line], floors: Sequence[Floor] = FLOORS) -> Iterator[Row]:
    """Every floor of two ranks' all_to_all that these lines speak of."""
    for floor in floors:
        if (floor.op, floor.ranks) != ("all_to_all", 2):
            continue
        case = dict(floor.case)
        memory = case.get("memory", "ordinary")
        kinds = (*EXCHANGES, *SYMMETRIC) if memory == "symmetric" else EXCHANGES
        for size, ratio in floor.by_bytes:
            cell = worthwhile([line for line in lines if line.bytes == size and line.p50_us])
            mine = [x for x in cell if x.impl == "a2a" and all(x.case.get(k) == v for k, v in case.items())]
            baseline = [x for x in cell if x.impl == floor.baseline]
            if not (mine and baseline):
                continue
            through_torch = case.get("through") == "dist"
            exchange = _best(cell, "bound", kinds)
            call_us = _us(_best(cell, "least", ("call",)))
            torch_us = _us(_best(cell, "least", ("dist to Python",))) if through_torch else 0.0
            impl = "torch" if through_torch else "whole"
            whole = _best(cell, impl, kinds) if any(x.impl == impl for x in cell) else None
            yield Row(
                case,
                floor.baseline,
                size,
                ratio,
                _us(baseline[0]),
                _us(mine[0]),
                library_us=_us(_best(cell, "call", (str(memory),))),
                bound_us=_us(whole) if whole else _us(exchange) + call_us + torch_us,
                by=(whole or exchange).algorithm,
                exchange_us=_us(exchange),
                call_us=call_us,
                torch_us=torch_us,
            )


def worthwhile(cell: Sequence[Line]) -> list[Line]:
    """Without exchanges that take longer than another together with the pass over the output that follows them."""
    used = {x.algorithm.removeprefix(USED): _us(x) for x in cell if x.algorithm.startswith(USED)}
    costly = {way for way, us in used.items() if us > min(used.values())}
    return [x for x in cell if x.impl not in ("bound", "whole", "torch") or x.algorithm not in costly]


def _best(cell: Sequence[Line], impl: str, kinds: tuple[str, ...]) -> Line:
    return min((x for x in cell if x.impl == impl and x.algorithm.startswith(kinds)), key=_us)


def _us(line: Line) -> float:
    return line.p50_us or 0.0


def markdown(lines: Sequence[Line], *, met: bool) -> str:
    """The table of bench/README.md: of the floors that this run misses, or (`met`) of all."""
    out = [
        "| tensors | bytes | against | floor | reached | bound allows | floor needs, us | a2a | in C | bound | by "
        "| its exchange | call | torch | verdict |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows(lines):
        if row.reached >= row.floor and not met:
            continue
        cells = (
            str(row.case.get("memory", "through torch.distributed")),
            show.size_text(row.bytes),
            row.baseline,
            f"{row.floor:g}",
            f"{row.reached:.3g}",
            f"{row.baseline_us / row.bound_us:.3g}",
            *(show.us_text(us) for us in (row.needed_us, row.a2a_us, row.library_us, row.bound_us)),
            row.by,
            *(show.us_text(us) for us in (row.exchange_us, row.call_us)),
            show.us_text(row.torch_us) if row.torch_us else "-",
            row.verdict,
        )
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "cpu_bounds.jsonl")
    parser.add_argument(
        "--only", default=SIZES, help="sizes, as a2a bench takes them; the file keeps its lines of others"
    )
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of samples a size")
    parser.add_argument("--table", type=Path, help="measure nothing; print this file as bench/README.md's table")
    arguments = parser.parse_args()
    if arguments.table:
        print(markdown([Line.from_json(text) for text in arguments.table.read_text().splitlines()], met=False))
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH")])
    )
    mpi = None
    with contextlib.suppress(UnsupportedError):
        mpi = find_mpi()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        request = Request(
            str(compile_library(Path(folder))),
            tuple(parse.sizes(arguments.only)),
            arguments.budget,
            mpi is not None,
            f"python bench/bounds.py --only {arguments.only} --budget {arguments.budget:g}",
        )
        run_ranks(work, request, 2, lambda message: lines.append(Line(**message["line"])), mpi=mpi)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.out.exists():
        old = [Line.from_json(text) for text in arguments.out.read_text().splitlines()]
        lines = sorted([x for x in old if x.bytes not in request.sizes] + lines, key=lambda line: line.bytes)
    arguments.out.write_text("".join(line.to_json() + "\n" for line in lines))
    print(markdown(lines, met=True))
    return 1 if any(line.wrong for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
