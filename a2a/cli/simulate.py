"""`a2a simulate`: a training step's communication on a cluster that need not be there. All its numbers are modelled."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from a2a.cli import show
from a2a.simulate import CATEGORIES, SOURCES, Assumptions, Job, Model, Step, simulate
from a2a.simulate.scaling import CHANGE, Swing, at, published, sensitivity, weak_scaling
from a2a.topology.presets import HARDWARE


@dataclass(frozen=True)
class Request:
    """What to simulate: a job, once or on several numbers of GPUs, the first of which is the job's own."""

    model: Model
    job: Job
    gpus: tuple[int, ...]
    vary: bool  # say what the weak scaling hangs on


@dataclass(frozen=True)
class Output:
    """Where results go beside the terminal."""

    json_path: str | None
    plot: Path | None
    trace: Path | None


def run(request: Request, output: Output) -> int:
    """Simulate and show; returns the exit code."""
    assume = Assumptions()
    jobs = [at(request.job, gpus) for gpus in request.gpus]
    for job in jobs:
        job.check(request.model)
    vary = request.vary and len(jobs) > 1
    swings: list[Swing] = []
    with show.progress(len(jobs) + (len(fields(Assumptions)) if vary else 0)) as steps_of_work:
        steps = []
        for job in jobs:
            steps_of_work.begin(f"{job.gpus} GPUs")
            steps.append(simulate(request.model, job, assume))
        if vary:
            swings = sensitivity(request.model, jobs[0], jobs[-1], assume, lambda name: steps_of_work.begin(name))
    with show.json_lines(output.json_path) as file:
        if file is not None:
            _write(file, steps, swings, assume)
    out = show.console(stderr=output.json_path == "-")
    _show(out, steps, assume)
    if len(steps) > 1:
        _show_scaling(out, steps, swings, assume)
    if output.trace is not None:
        from a2a.simulate.trace import trace

        output.trace.write_text(json.dumps(trace(steps[-1])))
        out.print(f"trace of {steps[-1].job.gpus} GPUs, modelled: {output.trace}", markup=False)
    if output.plot is not None:
        from a2a.cli import plots

        plots.simulated(steps, output.plot)
        out.print(f"plot: {output.plot}", markup=False)
    return 0


def line(step: Step, first: Step) -> dict[str, Any]:
    """A step's JSON line."""
    return {
        "what": "step", "source": "modelled", "model": step.model.name, "gpus": step.job.gpus, "job": asdict(step.job),
        "micro_batches": step.job.micro_batches, "step_ms": step.step_s * 1e3, "compute_ms": step.compute_s * 1e3,
        "exposed_ms": step.exposed_s * 1e3, "bubble_ms": step.bubble_s * 1e3, "efficiency": step.efficiency,
        "model_tflops": step.tflops, "weak_scaling": weak_scaling(first, step),
        "categories": {
            name: {"exposed_ms": share.exposed_s * 1e3, "hidden_ms": share.hidden_s * 1e3, "total_ms": share.total_s * 1e3}
            for name, share in step.shares.items()
        },
    }  # fmt: skip


def _write(file: Any, steps: Sequence[Step], swings: Sequence[Swing], assume: Assumptions) -> None:
    for step in steps:
        print(json.dumps(line(step, steps[0])), file=file)
    for name, value in asdict(assume).items():
        about = {"what": "assumption", "name": name, "value": value, "source": SOURCES[name]}
        print(json.dumps(about), file=file)
    for swing in swings:
        print(json.dumps({"what": "sensitivity", "source": "modelled", "change": CHANGE, **asdict(swing)}), file=file)


def _show(out: Any, steps: Sequence[Step], assume: Assumptions) -> None:
    first = steps[0]
    job, hardware = first.job, HARDWARE[first.job.hardware]
    out.print(
        f"{first.model.name} on {job.hardware}, {job.domain} GPUs of each domain; TP{job.tp} PP{job.pp} VP{job.vp} "
        f"EP{job.ep}, micro-batch {job.micro_batch}, {job.micro_batches} micro-batches, {job.wire} dispatch once per "
        f"{job.once_per}, {job.gradients} gradients, overlap {job.overlap}",
        markup=False,
    )
    rows = [
        [
            f"{step.job.gpus:,}", _ms(step.step_s), _ms(step.compute_s), _ms(step.exposed_s), _ms(step.bubble_s),
            _percent(step.efficiency), f"{step.tflops:,.0f}", _percent(weak_scaling(first, step)),
        ]
        for step in steps
    ]  # fmt: skip
    columns = ["GPUs", "step ms", "compute", "exposed", "bubble", "efficiency", "TFLOP/s a GPU", "weak scaling"]
    show.print_table(out, columns, rows, title="One step, modelled", left=0)
    rows = []
    for name in CATEGORIES:
        shares = [step.shares[name] for step in steps]
        if any(share.total_s for share in shares):
            rows.append([name, *(cell for s in shares for cell in (_ms(s.exposed_s), _ms(s.hidden_s), _ms(s.total_s)))])
    columns = [f"{what} {step.job.gpus:,}" for step in steps for what in ("exposed", "hidden", "total")]
    show.print_table(out, ["communication", *columns], rows, title="ms a GPU, modelled, by number of GPUs")
    for name, link in (("scale-up", hardware.scale_up), ("scale-out", hardware.scale_out)):
        out.print(f"{name}: {link.bandwidth_GBps:g} GB/s ({link.source})", markup=False)
    out.print(f"{hardware.name}: {hardware.source}", markup=False)
    for name, value in asdict(assume).items():
        out.print(f"{name} {value:g} ({SOURCES[name]})", markup=False)


def _show_scaling(out: Any, steps: Sequence[Step], swings: Sequence[Swing], assume: Assumptions) -> None:
    modelled = weak_scaling(steps[0], steps[-1])
    out.print()
    out.print(f"Weak scaling {steps[0].job.gpus:,} to {steps[-1].job.gpus:,} GPUs: {_percent(modelled, 2)}, modelled.")
    for who, value in published(steps):
        gap = (modelled - value) * 100
        out.print(f"  Published (quoted) by {who}: {_percent(value)}; modelled minus published {gap:+.2f} points.")
    if published(steps):
        out.print("  Not modelled: stragglers and jitter, uneven routing, congestion inside the network.")
    if swings:
        worst = swings[0]
        out.print(
            f"Most sensitive to {worst.name}: {CHANGE:.0%} of it moves the modelled weak scaling by "
            f"{worst.moves * 100:.3f} points."
        )
        rows = [
            [s.name, f"{getattr(assume, s.name):g}", _percent(s.less, 2), _percent(s.more, 2), f"{s.moves * 100:.3f}"]
            for s in swings
        ]
        columns = ["assumption", "value", f"{CHANGE:.0%} less", f"{CHANGE:.0%} more", "moves, points"]
        show.print_table(out, columns, rows, title="Weak scaling with one assumption changed, modelled")


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return "-" if math.isnan(ms) else f"{ms:,.1f}" if ms >= 100 else f"{ms:.3g}"


def _percent(part: float, digits: int = 1) -> str:
    return f"{part * 100:.{digits}f} %"
