"""Times that may be held against each other: several implementations of one thing, alternating in one run.

A `Contender` is one implementation: a call to be timed and a check of its result. `alternate()` checks every contender, then
times them in turn, over and over, so that whatever else happens on the machine happens to all of them. `Line` is a result as
`a2a bench --json` writes it.

Decisions:

* **A sample is the slowest rank's time.** Every rank keeps its own times; the maxima are taken after the last sample, so
  that nothing is sent while the clock runs. Which clock: `a2a/clocks.py`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from a2a.clocks import Clock, HostClock, Row
from a2a.topology import local_facts
from a2a.topology.host import cpu_model

MIN_SAMPLES, MAX_SAMPLES = 9, 200
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
        sms: how many streaming multiprocessors it takes, where that is known.
        parts: names of the phases of one call.
        phases: instead of `parts`, calls that can each be made any number of times in a row, and are timed so.
        check_call: as `check`, for a call made in another way: the replay of a graph.
        optional: a baseline that cannot do the request (gloo has no int16) is left out with its reason.
        why_not: the reason, where it is known before.
        predicted_us: what the planner expects of a call, where it was asked.
    """

    name: str
    run: Callable[[], Any]
    check: Callable[[], int]
    algorithm: str = "-"
    sms: int | None = None
    parts: tuple[str, ...] = ()
    phases: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    check_call: Callable[[Callable[[], object]], int] | None = None
    optional: bool = False
    why_not: str = ""
    predicted_us: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is timed of it."""
        return (*self.parts, *self.phases, TOTAL)


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
    clock: Clock | None = None,
) -> dict[str, dict[str, Timing]]:
    """Check the contenders and time them in alternation. Collective: every rank calls it with the same contenders.

    Args:
        contenders: in the same order on every rank.
        control: what the ranks agree through.
        budget_s: about how long to take samples.
        repeat: how many samples to take instead of what fits the budget.
        clock: None: the host's.
    Returns:
        For each contender's name, the timing of each of its parts or phases and of `"total"`; the same on every rank.
    Raises:
        RuntimeError: a contender failed on some ranks only. What one that is not optional raises is passed on.
    Cost: `budget_s` and a few calls of each for warming up; never fewer than 9 samples.
    """
    clock = HostClock(control.barrier) if clock is None else clock
    wrong: dict[str, int] = {}
    refused = {contender.name: contender.why_not for contender in contenders if contender.why_not}
    jobs: list[_Job] = []
    for contender in contenders:
        if contender.name in refused:
            continue
        wrong[contender.name], reason = _agreed(contender, control, contender.check)
        new: list[_Job] = []
        if not reason:
            _, reason = _agreed(contender, control, lambda c=contender, new=new: _prepare(c, control, clock, new))  # type: ignore[misc]
        if reason:
            refused[contender.name] = reason
        else:
            jobs += new
    cost_us = sum(clock.align_us + job.us * (job.row.calls + 1) for job in jobs)
    wanted = int(budget_s * 1e6 / cost_us) if cost_us else 0
    rounds = max(MIN_SAMPLES, min(MAX_SAMPLES, wanted)) if repeat is None else max(1, repeat)
    with _no_garbage_collection():
        for turn in range(rounds):
            for place in range(len(jobs)):
                job = jobs[(turn + place) % len(jobs)]
                clock.align()
                job.row.begin()
                job.samples.append(job.row.time())
    timings: dict[str, dict[str, Timing]] = {}
    for contender in contenders:
        if contender.name in refused:
            timings[contender.name] = {part: Timing(why=refused[contender.name]) for part in contender.names}
            continue
        own = [job for job in jobs if job.contender is contender]
        after, _ = _agreed(contender, control, _check_after(contender, own[-1].row))
        timings[contender.name] = {
            name: Timing(samples, job.row.calls, wrong[contender.name] + after)
            for job in own
            for name, samples in job.timings(control).items()
        }
    return timings


@dataclass
class _Job:
    """What is timed at once: a contender's whole call with its parts, or one of its phases."""

    contender: Contender
    names: tuple[str, ...]
    row: Row
    us: float  # a call, roughly
    samples: list[list[float]] = field(default_factory=list)

    def timings(self, control: Control) -> dict[str, tuple[float, ...]]:
        worst = control.maximum([value for sample in self.samples for value in sample])
        return {name: tuple(worst[index :: len(self.names)]) for index, name in enumerate(self.names)}


def _prepare(contender: Contender, control: Control, clock: Clock, jobs: list[_Job]) -> int:
    """Warm up, and add what is to be timed of the contender to `jobs`."""
    for name, run in contender.phases.items():
        count, us = _calls(run, (), control, clock)
        jobs.append(_Job(contender, (name,), clock.row(run, count), us))
    names = (*contender.parts, TOTAL)
    count, us = _calls(contender.run, contender.parts, control, clock)
    jobs.append(_Job(contender, names, clock.row(contender.run, count, contender.parts), us))
    return 0


def _check_after(contender: Contender, row: Row) -> Callable[[], int]:
    """A check of what was timed: the row's graph, if there is one."""
    check_call = contender.check_call
    return contender.check if check_call is None or not row.is_graph else lambda: check_call(row.make)


def _agreed(contender: Contender, control: Control, count: Callable[[], int]) -> tuple[int, str]:
    """The sum of `count()` over the ranks, and why an optional contender can't do it at all ("" if it can)."""
    error: Exception | None = None
    mine = 0
    try:
        mine = count()
    except Exception as caught:
        if not contender.optional:
            raise
        error = caught
    failed, elements = control.total([float(error is not None), float(mine)])
    if 0 < failed < control.world_size:
        raise RuntimeError(
            f"{contender.name} failed on {failed:.0f} of {control.world_size} ranks; here it said: {error or 'nothing'}"
        ) from error
    return int(elements), f"{type(error).__name__}: {error}" if error is not None else ""


def _calls(run: Callable[[], Any], parts: Sequence[str], control: Control, clock: Clock) -> tuple[int, float]:
    """How many calls make a sample, and about how long one takes; warms up on the way."""
    clock.align()
    for _ in range(WARM_UP_CALLS):
        run()
    calls = 1
    for _ in range(2):  # the second time with as many calls as the first suggests: single calls measure the clock
        row = clock.trial(run, calls, parts)
        clock.align()
        row.begin()
        (us,) = control.maximum([row.time()[-1]])
        calls = clock.calls(us)
        if calls == 1:
            break
    return calls, us


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
        sms: int | None = None,
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
            sms=sms,
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
    if op == "moe":
        return None
    return (2 if op.startswith("all_reduce") else 1) * (ranks - 1) / ranks


def environment(topology: str, command: str, device: torch.device | None = None) -> dict[str, Any]:
    """What a number depends on beside its request: commit, versions, machine, command. Asks a GPU only for its own name."""
    commit, dirty = _commit(Path(__file__).resolve().parent)
    gpu = nccl = None
    if device is not None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "commit": commit,
        "dirty": dirty,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "gpu": gpu,
        "cpu": cpu_name(),
        "topology": topology,
        "command": command,
    }


def cpu_name() -> str:
    """The processor's name and how many of its cores this process may use."""
    return f"{cpu_model()}, {local_facts().cores} cores"


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
