"""Times that may be held against each other: several implementations of one thing, alternating in one run.

A `Contender` is one implementation: a call to be timed and a check of its result. `alternate()` checks every contender, then
times them in turn, over and over, so that whatever else happens on the machine happens to all of them. `Line` is a result as
`a2a bench --json` writes it.

Decisions:

* **A sample is the slowest rank's time.** Every rank keeps its own times; the maxima are taken after the last sample, so
  that nothing is sent while the clock runs.
* **Short calls are timed in rows.** A sample is as many back-to-back calls as fill about a millisecond, divided by their
  number: a clock and a barrier are coarser than one 3 us call. So a percentile of short calls is one of such means.
* **The start favours nobody.** Before each sample all ranks meet in a barrier of the control group (gloo, whoever is
  measured), then make one call of the same contender that is not timed: it brings the contender's memory into the caches
  again and aligns the ranks as closely as that contender's own calls do.
* **Numbers of calls and samples are agreed**, from maxima over the ranks: one call more on one rank would hang.
* **The order turns by one each round**, so that no contender always follows the same other one.
* **Checked before it is timed**, on poisoned memory, and once more afterwards: a number for a wrong result is no number.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from a2a.topology import local_facts

SAMPLE_US = 1000.0  # what the calls of one sample should fill
MAX_CALLS = 1000
MIN_SAMPLES, MAX_SAMPLES = 9, 200
BARRIER_US = 500.0  # what a barrier is reckoned at when samples are counted; nothing is derived from it
WARM_UP_CALLS = 3
TOTAL = "total"


@dataclass(frozen=True)
class Contender:
    """One implementation of the thing that is measured.

    Attributes:
        name: how it is called in tables and JSON.
        run: one call. Where `parts` is not empty it returns how many ns each part took.
        check: one call on poisoned memory; returns how many elements of this rank's result are wrong.
        algorithm: which algorithm runs, where that is known.
        parts: names of the phases of one call.
        optional: a baseline that cannot do the request (gloo has no int16) is left out with its reason.
    """

    name: str
    run: Callable[[], Sequence[int] | None]
    check: Callable[[], int]
    algorithm: str = "-"
    parts: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Timing:
    """The samples of one contender, or of one part of it; `why` says why there are none."""

    samples_us: tuple[float, ...] = ()
    calls: int = 0
    wrong: int = 0
    why: str = ""

    @property
    def p50_us(self) -> float:
        return percentile(self.samples_us, 50)

    @property
    def p99_us(self) -> float:
        return percentile(self.samples_us, 99)

    @property
    def min_us(self) -> float:
        return min(self.samples_us, default=math.nan)


class Control:
    """What ranks agree through between samples: the default process group, or nothing where this rank is alone."""

    def __init__(self) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def maximum(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(tensor, op=op)
        result: list[float] = tensor.tolist()
        return result


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile, the mean of the two middle ones for an even median; NaN of nothing."""
    ordered = sorted(samples)
    if not ordered:
        return math.nan
    if percent == 50:
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def alternate(
    contenders: Sequence[Contender],
    control: Control,
    *,
    budget_s: float = 3.0,
    repeat: int | None = None,
) -> dict[str, dict[str, Timing]]:
    """Check the contenders and time them in alternation. Collective: every rank calls it with the same contenders.

    Args:
        contenders: in the same order on every rank.
        control: what the ranks agree through.
        budget_s: about how long to take samples.
        repeat: how many samples to take instead of what fits the budget.
    Returns:
        For each contender's name, the timing of each of its parts and of `"total"`; the same on every rank.
    Raises:
        RuntimeError: a contender failed on some ranks only. What one that is not optional raises is passed on.
    Cost: `budget_s` and a few calls of each for warming up; never fewer than 9 samples.
    """
    wrong: dict[str, int] = {}
    refused: dict[str, str] = {}
    for contender in contenders:
        wrong[contender.name], reason = _checked(contender, control)
        if reason:
            refused[contender.name] = reason
    able = [contender for contender in contenders if contender.name not in refused]
    calls = {contender.name: _calls(contender, control) for contender in able}
    cost_us = sum(BARRIER_US + us * (count + 1) for count, us in calls.values())
    wanted = int(budget_s * 1e6 / cost_us) if cost_us else 0
    rounds = max(MIN_SAMPLES, min(MAX_SAMPLES, wanted)) if repeat is None else max(1, repeat)

    mine: dict[str, list[list[float]]] = {contender.name: [] for contender in able}
    with _no_garbage_collection():
        for turn in range(rounds):
            for place in range(len(able)):
                contender = able[(turn + place) % len(able)]
                control.barrier()
                contender.run()
                mine[contender.name].append(_sample(contender, calls[contender.name][0]))
    timings: dict[str, dict[str, Timing]] = {}
    for contender in contenders:
        name = contender.name
        if name in refused:
            timings[name] = {part: Timing(why=refused[name]) for part in (*contender.parts, TOTAL)}
            continue
        after, _ = _checked(contender, control)
        names = (*contender.parts, TOTAL)
        worst = control.maximum([value for sample in mine[name] for value in sample])
        timings[name] = {
            part: Timing(tuple(worst[index :: len(names)]), calls[name][0], wrong[name] + after)
            for index, part in enumerate(names)
        }
    return timings


def _checked(contender: Contender, control: Control) -> tuple[int, str]:
    """How many elements are wrong over all ranks, and why an optional contender can't do it at all ("" if it can)."""
    error: Exception | None = None
    count = 0
    try:
        count = contender.check()
    except Exception as caught:
        if not contender.optional:
            raise
        error = caught
    failed, elements = control.total([float(error is not None), float(count)])
    if 0 < failed < control.world_size:
        raise RuntimeError(
            f"{contender.name} failed on {failed:.0f} of {control.world_size} ranks; here it said: {error or 'nothing'}"
        ) from error
    return int(elements), f"{type(error).__name__}: {error}" if error is not None else ""


def _calls(contender: Contender, control: Control) -> tuple[int, float]:
    """How many calls make a sample, and about how long one takes; warms up on the way."""
    control.barrier()
    for _ in range(WARM_UP_CALLS):
        contender.run()
    calls = 1
    for _ in range(
        2
    ):  # the second time with as many calls as the first time suggests, as single calls measure the clock
        control.barrier()
        contender.run()
        (us,) = control.maximum([_sample(contender, calls)[-1]])
        calls = max(1, min(MAX_CALLS, math.ceil(SAMPLE_US / max(us, 0.1))))
        if calls == 1:
            break
    return calls, us


def _sample(contender: Contender, calls: int) -> list[float]:
    """Time so many calls; us a call for each part and in total, on this rank."""
    run = contender.run
    if not contender.parts:
        begin = time.perf_counter_ns()
        for _ in range(calls):
            run()
        return [(time.perf_counter_ns() - begin) / calls / 1e3]
    sums = [0] * len(contender.parts)
    begin = time.perf_counter_ns()
    for _ in range(calls):
        parts = run()
        assert parts is not None, f"{contender.name} has parts, so its run() returns their times"
        sums = [total + ns for total, ns in zip(sums, parts, strict=True)]
    whole = time.perf_counter_ns() - begin
    return [ns / calls / 1e3 for ns in (*sums, whole)]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ------------------------------------------------------------------------------------------------------- JSON lines


@dataclass(frozen=True)
class Line:
    """One measured cell, as `a2a bench --json` writes it; bench/README.md tells what each field means."""

    op: str
    impl: str
    algorithm: str
    bytes: int
    dtype: str
    ranks: int
    p50_us: float | None = None
    p99_us: float | None = None
    min_us: float | None = None
    algbw_GBps: float | None = None
    busbw_GBps: float | None = None
    sms: int | None = None
    wrong: int = 0
    n: int = 0
    ratio: Mapping[str, float] = field(default_factory=dict)
    case: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Line:
        return Line(**json.loads(text))


@dataclass(frozen=True)
class Cell:
    """What is measured: every contender's line of one cell shares this."""

    op: str
    num_bytes: int
    dtype: str
    ranks: int
    case: Mapping[str, Any]
    env: Mapping[str, Any]

    def line(
        self,
        impl: str,
        timing: Timing,
        *,
        algorithm: str = "-",
        case: Mapping[str, Any] | None = None,
        baselines: Mapping[str, Timing] | None = None,
    ) -> Line:
        """The line of one contender; its ratios are `baselines`' p50 by its own."""
        details = {**self.case, **(case or {}), "calls": timing.calls, **({"why": timing.why} if timing.why else {})}
        line = Line(
            op=self.op,
            impl=impl,
            algorithm=algorithm,
            bytes=self.num_bytes,
            dtype=self.dtype,
            ranks=self.ranks,
            wrong=timing.wrong,
            n=len(timing.samples_us),
            case=details,
            env=self.env,
        )
        if not timing.samples_us:
            return line
        algbw = self.num_bytes / timing.p50_us / 1e3
        factor = bus_factor(self.op, self.ranks)
        return replace(
            line,
            p50_us=_digits(timing.p50_us),
            p99_us=_digits(timing.p99_us),
            min_us=_digits(timing.min_us),
            algbw_GBps=_digits(algbw),
            busbw_GBps=None if factor is None else _digits(algbw * factor),
            ratio={
                name: _digits(baseline.p50_us / timing.p50_us)
                for name, baseline in (baselines or {}).items()
                if baseline.samples_us
            },
        )


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def bus_factor(op: str, ranks: int) -> float | None:
    """nccl-tests' factor from algorithm to bus bandwidth (all-to-all keeps 1/ranks of its buffer at home); None for MoE."""
    return (ranks - 1) / ranks if op in ("all_to_all", "all_to_allv") else None


def environment(topology: str, command: str) -> dict[str, Any]:
    """What a number depends on beside its request: commit, versions, machine, command. Asks no GPU."""
    commit, dirty = _commit(Path(__file__).resolve().parent)
    return {
        "commit": commit,
        "dirty": dirty,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None,
        "gpu": None,
        "cpu": cpu_name(),
        "topology": topology,
        "command": command,
    }


def cpu_name() -> str:
    """The processor's name and how many of its cores this process may use."""
    name = "unknown CPU"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {local_facts().cores} cores"


def _commit(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout that `folder` is in and whether it was changed since; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", "--", "measure.py"):  # a checkout of something else that a2a is installed inside
            return None, None
        return git("rev-parse", "--short=12", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None
