"""Measure what the primitives of `a2a.topology.costs` take on this machine, on all ranks of a communicator at once.

Decisions:

* **The kernels' own copies and sums** (`a2a.primitives`), without their signals and waits. So a curve is what the bytes
  take, ranks that share a core or the memory's bandwidth included, and rounds of signals are counted beside it.
* **Fitted on some sizes, tested on others.** Curves go through 3 x 2^k bytes. Some powers of two are measured, too, and
  never fitted: how far the curves are from them is told.
* **All ranks end with the same table**: a time is the slowest rank's, agreed on sample by sample.
* **Lower quartiles**, as what else runs on the machine only ever adds.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from a2a.algorithms.c10d import originals
from a2a.algorithms.reduction_base import DTYPES
from a2a.clocks import Clock
from a2a.kernels import cpu
from a2a.measure import Contender, Control, alternate, cpu_name, percentile
from a2a.ops import all_to_all_single
from a2a.primitives import PROGRAMS, Bench, Program, local_sum
from a2a.reductions import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from a2a.topology.costs import Costs, Curve

if TYPE_CHECKING:
    from a2a.comm import Communicator

KIB, MIB = 1 << 10, 1 << 20
LEAST, MOST = 3 * KIB, 96 * MIB  # sizes that are fitted; beyond the largest, bandwidth counts as constant
MOST_C10D, MOST_LOCAL = 24 * MIB, 768 * KIB  # the engine's calls are long; a dtype's own cost shows in the caches
TESTED = (64 * KIB, MIB, 16 * MIB)
BUDGET_S = 0.2  # for the samples of one size; the least number of samples takes longer where sizes are large
AT_ONCE = 256 * KIB  # bytes that one call into C moves, at least
SIGNALS_AT_ONCE = 16

Begin = Callable[[str], None]


@dataclass(frozen=True)
class Tested:
    """A size that was measured and not fitted."""

    primitive: str
    num_bytes: int
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """By which share the prediction is off."""
        return self.predicted_us / self.measured_us - 1


def sizes(most: int = MOST) -> list[int]:
    """The sizes that curves are fitted to."""
    found = [LEAST << k for k in range(20)]
    return [size for size in found if size <= most]


def calibrate(
    comm: Communicator, control: Control, *, most: int = MOST, repeat: int | None = None, begin: Begin = lambda _: None
) -> tuple[Costs, list[Tested]]:
    """Measure the primitives on all ranks of `comm` and fit their curves. Collective.

    Args:
        comm: of one domain's CPU ranks, at least two; its group's engine is measured, too, if it has a group.
        control: what the ranks agree through.
        most: the largest size.
        repeat: samples to take of each instead of what fits a moment.
        begin: told what comes next.
    Returns: the table, the same on all ranks, and how well it tells sizes that it was not fitted to.
    Raises:
        UnsupportedError: the ranks share no memory.
        ValueError: there is one rank alone.
    Cost: half a minute for two ranks with a core each.
    """
    if comm.world_size < 2:
        raise ValueError("calibrate: one rank alone has nobody to measure with; start at least two")
    bench = Bench(comm, most)
    found: dict[str, list[tuple[int, float]]] = {}
    held: list[tuple[str, int, float]] = []
    begin("signals")
    for name, us in _signals(comm, control, repeat).items():
        found[name] = [(0, us)]
    fitted = sizes(most)
    for size in sorted({*fitted, *(size for size in TESTED if size <= most)}):
        begin(f"{size} bytes")
        times = max(1, AT_ONCE // size)  # in one call into C, so that the call itself is lost among them
        runs = {name: bench.runner(program, times) for name, program in _primitives(bench, size).items()}
        for name, us in timed(runs, control, repeat=repeat).items():
            if size in fitted:
                found.setdefault(name, []).append((size, us / times))
            else:
                held.append((name, size, us / times))
    if comm.group is not None:
        for size in (size for size in fitted[::2] if size <= min(most, MOST_C10D)):
            begin(f"the group's engine, {size} bytes")
            for name, us in timed(engine_calls(comm, size), control, repeat=repeat).items():
                found.setdefault(name, []).append((size, us))
    curves = {name: Curve.fitted(samples) for name, samples in found.items()}
    tested = [Tested(name, size, us, curves[name].us(size)) for name, size, us in held if name in curves]
    source = f"measured on {datetime.date.today().isoformat()}, {comm.topology.summary()}, {cpu_name()}"
    return Costs(curves, of_rank_0(source, control), frozenset(curves)), tested


def of_rank_0(text: str, control: Control) -> str:
    """Ranks of two days, or machines, must not differ in what they call a table."""
    length = 300
    mine = [float(byte) for byte in text.encode()[:length].ljust(length)]
    theirs = control.total(mine if control.rank == 0 else [0.0] * length)
    return bytes(int(value) for value in theirs).decode(errors="replace").rstrip()


def timed(
    runs: Mapping[str, Callable[[], object]],
    control: Control,
    *,
    clock: Clock | None = None,
    budget_s: float = BUDGET_S,
    repeat: int | None = None,
) -> dict[str, float]:
    """What a call of each takes, in turn; without those that the engine refuses."""

    def contender(name: str, run: Callable[[], object]) -> Contender:
        def check() -> int:
            if result := run():
                raise RuntimeError(f"calibrate: {name}: {result}")
            return 0

        return Contender(name, run, check, optional=name.startswith("c10d"))

    contenders = [contender(name, run) for name, run in runs.items()]
    timings = alternate(contenders, control, budget_s=budget_s, repeat=repeat, clock=clock)
    # Lower quartiles: what else runs on the machine only ever adds.
    found = {name: percentile(parts["total"].samples_us, 25) for name, parts in timings.items()}
    return {name: us for name, us in found.items() if us == us}


def _signals(comm: Communicator, control: Control, repeat: int | None) -> dict[str, float]:
    """A round of signals in C, and collectives of a few bytes from Python."""
    request = comm.require_transport("calibrate").request("calibrate", 0, "calibrate")
    library, few, share = cpu.lib(), torch.zeros(comm.world_size), torch.zeros(1)
    other = torch.zeros(comm.world_size)

    def rounds() -> None:
        for _ in range(SIGNALS_AT_ONCE):
            library.a2a_barrier(comm.handle, request)

    runs: dict[str, Callable[[], object]] = {
        "signal": rounds,
        "call_all_to_all": lambda: all_to_all_single(other, few, group=comm),
        "call_all_reduce": lambda: all_reduce(few, group=comm),
        "call_reduce_scatter": lambda: reduce_scatter_tensor(share, few, group=comm),
        "call_all_gather": lambda: all_gather_into_tensor(few, share, group=comm),
    }
    us = timed(runs, control, budget_s=8 * BUDGET_S, repeat=repeat)
    return {**us, "signal": us["signal"] / SIGNALS_AT_ONCE}


def _primitives(bench: Bench, size: int) -> dict[str, Program]:
    """Every primitive that is used for so many bytes from others."""
    piece = size // len(bench.peers) // 64 * 64
    made = {name: program(bench, piece) for name, program in PROGRAMS.items()}
    found = {name: program for name, program in made.items() if program is not None}
    for dtype in DTYPES if size <= MOST_LOCAL else ():
        found[f"reduce_{str(dtype).removeprefix('torch.')}"] = local_sum(bench, piece, dtype)
    return found


def engine_calls(comm: Communicator, size: int) -> dict[str, Callable[[], object]]:
    """What c10d's algorithms call: the group's own engine, for requests of so many bytes."""
    count, group = size // 4 // comm.world_size * comm.world_size, comm.group
    whole, other = (torch.zeros(count, device=comm.device) for _ in range(2))
    share = torch.zeros(count // comm.world_size, device=comm.device)
    gathered = torch.zeros(count * comm.world_size, device=comm.device)
    scatter = originals.get("reduce_scatter_single") or originals["reduce_scatter_tensor"]
    gather = originals.get("all_gather_single") or originals["all_gather_into_tensor"]
    return {
        "c10d_all_to_all": lambda: originals["all_to_all_single"](other, whole, group=group),
        "c10d_all_reduce": lambda: originals["all_reduce"](whole, group=group),
        "c10d_reduce_scatter": lambda: scatter(share, whole, group=group),
        "c10d_all_gather": lambda: gather(gathered, whole, group=group),
    }


__all__ = ["MOST", "Tested", "calibrate", "engine_calls", "of_rank_0", "sizes", "timed"]
