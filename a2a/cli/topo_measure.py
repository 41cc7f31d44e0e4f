"""`a2a topo --measure`: measure what the parts of a collective cost here, show it, and keep it for the planner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from a2a.cli import parse, show
from a2a.cli.ranks import Emit, run_ranks

SHOWN = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


@dataclass(frozen=True)
class Request:
    """What is to be measured. Sent to every rank."""

    device: str
    most: int
    repeat: int | None = None


def run(request: Request, ranks: int | None, json_path: str | None, *, default_ranks: int) -> int:
    """Measure on ranks that are started for it, or that a launcher has started; returns the exit code."""
    told: dict[str, Any] = {}
    with show.progress(request.most.bit_length()) as steps:

        def receive(message: dict[str, Any]) -> None:
            if "begin" in message:
                steps.begin(message["begin"])
            else:
                told.update(message)

        run_ranks(work, request, ranks, receive, default=default_ranks)
    if not told:  # a rank other than 0, under a launcher
        return 0
    with show.json_lines(json_path) as file:
        if file is not None:
            print(json.dumps(told), file=file)
    _show(show.console(stderr=json_path == "-"), told)
    return 0


def work(request: Request, emit: Emit) -> None:
    """Measure, on each rank; the first rank of each domain keeps the table for its machine."""
    import a2a
    from a2a.calibrate import calibrate
    from a2a.cli.devices import site
    from a2a.cost_cache import path_of, save
    from a2a.measure import Control

    control = Control()
    with site(request.device, control) as here, a2a.communicator(here.group, device=here.device) as comm:
        wanted: dict[str, Any] = {"most": request.most, "repeat": request.repeat, "begin": lambda x: emit({"begin": x})}
        if request.device == "cuda":
            from a2a.calibrate_cuda import calibrate_cuda

            costs, tested = calibrate_cuda(comm, control, here.clock, **wanted)
        else:
            costs, tested = calibrate(comm, control, **wanted)
        path = path_of(comm.topology, comm.rank)
        if comm.rank == min(comm.topology.domain_of(comm.rank).ranks):
            save(costs, path)
        control.barrier()
        emit(
            {
                "source": costs.source,
                "ranks": comm.world_size,
                "path": str(path),
                "digest": costs.digest,
                "curves": {name: costs.curves[name].points for name in sorted(costs.measured)},
                "tested": [{**asdict(each), "error": each.error} for each in tested],
            }
        )


def _show(out: Any, told: dict[str, Any]) -> None:
    from a2a.topology.costs import Curve

    curves = {name: Curve(tuple(map(tuple, points))) for name, points in told["curves"].items()}
    constant = {name: curve for name, curve in curves.items() if curve.points[0][0] == 0}
    out.print(f"[bold]What a collective is made of, {told['ranks']} ranks at once[/bold]: {told['source']}")
    out.print(", ".join(f"{name} {show.us_text(curve.us(0))} us" for name, curve in constant.items()))
    rows = []
    for name, curve in curves.items():
        if name not in constant:
            low, high = curve.points[0][0], curve.points[-1][0]
            cells = [show.us_text(curve.us(size)) if low <= size <= high else "-" for size in SHOWN]
            rows.append([name, *cells, f"{high / curve.us(high) / 1e3:.3g}"])
    columns = ["us of", *map(show.size_text, SHOWN), "GB/s at most bytes"]
    show.print_table(out, columns, rows, title="Fitted curves")
    _show_tested(out, told["tested"])
    out.print(f"kept in {told['path']}: communicators of {told['ranks']} ranks plan with it", markup=False)


def _show_tested(out: Any, tested: Sequence[dict[str, Any]]) -> None:
    """How well the curves tell sizes that they were not fitted to."""
    sizes = sorted({each["num_bytes"] for each in tested})
    names = list(dict.fromkeys(each["primitive"] for each in tested))
    if not sizes:
        return
    of = {(each["primitive"], each["num_bytes"]): each["error"] for each in tested}
    rows = [
        [name, *(f"{100 * of[name, size]:+.0f}%" if (name, size) in of else "-" for size in sizes)] for name in names
    ]
    title = "Predicted against measured, at sizes that were not fitted"
    show.print_table(out, ["primitive", *map(show.size_text, sizes)], rows, title=title)


def most_bytes(text: str) -> int:
    """The size that `--most` gives."""
    (size,) = parse.sizes(text)
    return size


__all__ = ["Request", "most_bytes", "run"]
