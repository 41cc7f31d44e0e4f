"""`a2a trial -- torchrun ...`: the user's own job for some steps as it is, once more as it is, and with a2a.

The job's command runs three times, unchanged but for a folder in front of PYTHONPATH, whose `sitecustomize` records losses
and times (`a2a/cli/trial_hook.py`) and ends the job after the steps. The second run as it is says how far the job repeats
itself, which is what a difference with a2a has to be held against.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a2a.cli import show
from a2a.cli.ranks import RanksFailedError
from a2a.config import python_path

RUNS = ("as it is", "as it is, again", "with a2a")
TAIL_LINES = 40
PACKAGE = Path(__file__).parents[2]  # the folder that holds this a2a
# What Python imports by itself at the start of each process of the job.
SITECUSTOMIZE = """\
import importlib.machinery, importlib.util, sys
spec = importlib.util.spec_from_file_location("a2a_trial_hook", {hook!r})
hook = sys.modules["a2a_trial_hook"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hook)
hook.install(hook.Orders(folder={folder!r}, steps={steps!r}, with_a2a={with_a2a!r}, package={package!r}))
# The sitecustomize that this one hides.
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != {folder!r}])
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


@dataclass(frozen=True)
class Request:
    """What to try.

    Attributes:
        command: the job, as the user starts it.
        steps: after how many it is ended.
        warm_up: the first steps, whose times don't count.
        tolerance: a larger relative difference of a loss is a failure; None: nothing is.
    """

    command: tuple[str, ...]
    steps: int = 20
    warm_up: int = 2
    tolerance: float | None = None


@dataclass(frozen=True)
class Difference:
    """How the losses of two runs differ; relative to the larger of the two."""

    compared: int
    same_bits: int
    largest: float
    first_step: int | None


def run(request: Request, json_path: str | None) -> int:
    """Run the trial and print what came of it; returns the exit code: 1 if a loss differs by more than the tolerance."""
    records = {}
    with show.progress(len(RUNS)) as steps:
        for name in RUNS:
            steps.begin(f"{name}: {request.steps} steps")
            records[name] = run_job(request, with_a2a=name == "with a2a")
    stock, again, ours = (losses(records[name]) for name in RUNS)
    noise, difference = compare(stock, again), compare(stock, ours)
    failed = request.tolerance is not None and not difference.largest <= request.tolerance
    with show.json_lines(json_path) as file:
        if file is not None:
            for name in RUNS:
                line = {"run": name, "command": list(request.command), **summary(records[name], request.warm_up)}
                print(json.dumps({**line, "ranks": records[name]}), file=file)
            for what, found in (("noise", noise), ("difference", difference)):
                print(json.dumps({what: found.__dict__}), file=file)
    if json_path != "-":
        _show(request, records, noise, difference)
    return int(failed)


def run_job(request: Request, with_a2a: bool) -> list[dict[str, Any]]:
    """Run the command once; the records of its ranks, in rank order.

    Raises:
        RanksFailedError: the command failed, or no process of it made a step; shows the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="a2a-trial-") as folder:
        text = SITECUSTOMIZE.format(
            hook=str(Path(__file__).with_name("trial_hook.py")),
            folder=folder,
            steps=request.steps,
            with_a2a=with_a2a,
            package=str(PACKAGE),
        )
        (Path(folder) / "sitecustomize.py").write_text(text)
        command = ["env", f"PYTHONPATH={python_path(folder)}", *request.command]
        output = Path(folder) / "output"
        with output.open("w") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        tail = "\n".join(output.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        how = "with a2a" if with_a2a else "as it is"
        if code:
            raise RanksFailedError(f"trial: the job {how} ended with exit code {code}. The end of its output:\n{tail}")
        records = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
        if not records:
            raise RanksFailedError(
                f"trial: the job {how} ended well, but no process of it made a step that could be seen: a backward pass of "
                f"torch, then `step()` of a torch.optim.Optimizer. Does its Python ignore PYTHONPATH (-I, -E)? The end of "
                f"its output:\n{tail}"
            )
        return sorted(records, key=lambda record: int(record["rank"]))


# ------------------------------------------------------------------------------------------------- what the records say


def losses(records: Sequence[dict[str, Any]]) -> dict[tuple[int, int, int], float]:
    """(step, rank, number within the step) -> loss."""
    return {
        (step, record["rank"], number): loss
        for record in records
        for step, values in enumerate(record["losses"])
        for number, loss in enumerate(values)
    }


def compare(first: dict[tuple[int, int, int], float], second: dict[tuple[int, int, int], float]) -> Difference:
    """What differs between the losses that both runs have. A loss that only one has counts as an infinite difference."""
    same_bits, largest, first_step = 0, 0.0, None
    for key in sorted(first.keys() | second.keys()):
        a, b = first.get(key, math.nan), second.get(key, math.nan)
        if key in first and key in second and (a == b or (math.isnan(a) and math.isnan(b))):
            same_bits += 1
            continue
        first_step = key[0] if first_step is None else first_step
        finite = math.isfinite(a) and math.isfinite(b)
        largest = max(largest, abs(a - b) / max(abs(a), abs(b)) if finite else math.inf)
    return Difference(len(first.keys() | second.keys()), same_bits, largest, first_step)


def summary(records: Sequence[dict[str, Any]], warm_up: int) -> dict[str, float | int]:
    """Figures of a run: those of the rank whose median step is the slowest."""
    times = [(statistics.median(steps), record) for record in records if (steps := record["step_s"][warm_up:])]
    if not times:
        return {"step_ms": math.nan, "exposed_ms": math.nan, "rank": 0}
    step_s, slowest = max(times, key=lambda timed: timed[0])
    exposed_s = statistics.median(slowest["exposed_s"][warm_up + 1 :])
    return {"step_ms": 1e3 * step_s, "exposed_ms": 1e3 * exposed_s, "rank": slowest["rank"]}


def late_peers(records: Sequence[dict[str, Any]]) -> list[tuple[int, int, float, float]]:
    """(rank, how often others waited for it, ms they waited in all, longest ms), most waited for first."""
    found: dict[int, tuple[int, float, float]] = {}
    for record in records:
        for peer in (peer for comm in record["a2a"] or () for peer in comm["peers"]):
            late, total, longest = found.get(peer["rank"], (0, 0.0, 0.0))
            found[peer["rank"]] = (
                late + int(peer.get("late", 0)),
                total + peer.get("late_us", 0.0) / 1e3,
                max(longest, peer.get("longest_us", 0.0) / 1e3),
            )
    ordered = sorted(found.items(), key=lambda entry: -entry[1][1])
    return [(rank, *figures) for rank, figures in ordered if figures[0]]


# ---------------------------------------------------------------------------------------------------------- for people


def _show(
    request: Request, records: dict[str, list[dict[str, Any]]], noise: Difference, difference: Difference
) -> None:
    out = show.console()
    ranks = len(records[RUNS[0]])
    out.print(" ".join(request.command), style="bold", markup=False)
    out.print(f"{request.steps} steps of {ranks} rank{'s' if ranks > 1 else ''}\n")
    rows = []
    for name in RUNS:
        figures = summary(records[name], request.warm_up)
        step_ms, exposed_ms = figures["step_ms"], figures["exposed_ms"]
        cells = ["-"] * 3
        if not math.isnan(step_ms):
            cells = [f"{step_ms:.2f}", f"{exposed_ms:.2f}", f"{exposed_ms / step_ms:.0%}"]
        rows.append([name, *cells])
    show.print_table(out, ["run", "step ms", "in collectives ms", "share"], rows)
    out.print(f"[dim]p50 after {request.warm_up + 1} steps, slowest rank; in collectives: the time that threads of Python "
              f"spend in them[/dim]\n")  # fmt: skip
    for line in _verdict(noise, difference):
        out.print(line)
    for line in _usage(records[RUNS[-1]]):
        out.print(line, markup=False, soft_wrap=True)
    late = late_peers(records[RUNS[-1]])
    if late:
        out.print()
        waits = [[str(rank), str(times), f"{total:.1f}", f"{longest:.1f}"] for rank, times, total, longest in late[:8]]
        show.print_table(
            out, ["late rank", "times", "waited for, ms", "longest, ms"], waits, title="Who was waited for"
        )


def _verdict(noise: Difference, difference: Difference) -> Iterator[str]:
    if not difference.compared:
        yield "[bold]No loss was seen:[/bold] no backward pass began at a tensor of one element."
    elif difference.same_bits == difference.compared:
        yield f"[bold]All {difference.compared} losses have the same bits with and without a2a.[/bold]"
    else:
        yield (
            f"[bold]With a2a, losses differ by at most {difference.largest:.1e}, relative[/bold] "
            f"({difference.same_bits} of {difference.compared} have the same bits; the first that differs is in step "
            f"{(difference.first_step or 0) + 1})."
        )
    if noise.compared and noise.same_bits == noise.compared:
        yield "The job as it is repeats itself bit for bit."
    elif noise.compared:
        yield f"The job as it is differs from itself by at most {noise.largest:.1e} between two runs."


def _usage(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    comms = [comm for record in records for comm in record["a2a"] or ()]
    collectives = sum(comm["collectives"] or 0 for comm in comms)
    applied = sorted({name for record in records for name in record["integrations"]})
    yield f"a2a ran {collectives} collectives" + (f", with {', '.join(applied)}" if applied else "")
    for reason in sorted({reason for record in records for reason in record["refused"]}):
        yield f"without {reason}"
    if not collectives:
        yield "a2a had nothing to do: no call of the five collectives that it patches, and no trainer that it knows"
    for reason in sorted({str(reason) for comm in comms if not comm["transport"] for reason in [comm["reasons"]]}):
        yield f"a group was not served: {reason}"
    handed = sorted({name for comm in comms for name in comm["handed_over"] or {}})
    if handed:
        yield f"handed over to torch.distributed: {'; '.join(handed)}"
