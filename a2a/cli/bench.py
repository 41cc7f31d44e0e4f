"""`a2a bench OP`: times of a2a and its baselines, alternating in one run.

The command parses, starts ranks and shows; `work` is what every rank does. What rank 0 emits is `{"begin": text}` before a
cell and `{"line": {...}}` for each of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a2a.cli import parse, show
from a2a.cli.ranks import Emit, find_mpi, mpi_world, run_ranks

if TYPE_CHECKING:
    from a2a.measure import Contender, Control, Line, Timing

OPS = ("all_to_all", "all_to_allv", "moe")
BASELINES = ("gloo", "mpi")
CELL_S = 3.0  # how long samples of one cell are taken


@dataclass(frozen=True)
class Request:
    """What is asked for: the command line, parsed. Sent to every rank."""

    op: str
    command: str
    dtypes: tuple[str, ...]
    against: tuple[str, ...]
    repeat: int | None
    cell_s: float = CELL_S
    sizes: tuple[int, ...] = ()
    memory: str = "symmetric"
    through: str = "a2a"
    tokens: int = 0
    hidden: int = 0
    experts: int = 0
    top_k: int = 0
    skew: float = 0.0
    seed: int = 0

    @property
    def num_cells(self) -> int:
        return len(self.dtypes) * (1 if self.op == "moe" else len(self.sizes))

    def check(self) -> None:
        """Raise ValueError for what contradicts itself."""
        for name in self.dtypes:
            parse.dtype(name)
        if self.through == "dist" and self.memory == "symmetric":
            raise ValueError(
                "--through dist --memory symmetric: tensors from comm.empty belong to one communicator, and a group of "
                'backend "a2a" has its own; use --memory ordinary'
            )
        if self.op == "moe" and "mpi" in self.against:
            raise ValueError(
                "--against mpi: the MoE layer is compared with gloo; all_to_all and all_to_allv are with MPI"
            )
        if self.op == "moe" and self.top_k > self.experts:
            raise ValueError(f"--top-k {self.top_k} is more than --experts {self.experts}")


def run(request: Request, ranks: int | None, json_path: str | None, plot: Path | None) -> int:
    """Run the benchmark and show what it gives; returns the exit code: 1 if a result was wrong."""
    from a2a.measure import Line

    request.check()
    mpi = find_mpi() if "mpi" in request.against else None
    lines: list[Line] = []
    with show.json_lines(json_path) as file, show.progress(request.num_cells) as steps:

        def receive(message: dict[str, Any]) -> None:
            if "begin" in message:
                steps.begin(message["begin"])
            else:
                line = Line(**message["line"])
                lines.append(line)
                if file is not None:
                    print(line.to_json(), file=file, flush=True)

        run_ranks(work, request, ranks, receive, mpi=mpi)
    if not lines:  # a rank other than 0, under a launcher
        return 0
    out = show.console(stderr=json_path == "-")
    if request.op == "moe":
        _show_moe(out, lines)
    else:
        _show_exchanges(out, lines)
    if plot is not None:
        from a2a.cli import plots

        (plots.moe if request.op == "moe" else plots.exchanges)(lines, plot)
        out.print(f"plot: {plot}")
    if any(line.wrong for line in lines):
        out.print("[bold red]Wrong results: the times above mean nothing.[/bold red]")
        return 1
    return 0


# ----------------------------------------------------------------------------------------------------- on every rank


def work(request: Request, emit: Emit) -> None:
    """Measure every cell that is asked for; on each rank."""
    import torch

    from a2a.measure import Control

    control = Control()
    cells = _moe_cells if request.op == "moe" else _exchange_cells
    with torch.no_grad() if request.op != "moe" else torch.enable_grad():
        cells(request, control, emit)


def _exchange_cells(request: Request, control: Control, emit: Emit) -> None:
    import torch.distributed as dist

    import a2a
    from a2a.cli import exchanges
    from a2a.measure import Cell, alternate, environment

    world = mpi_world(control.world_size) if "mpi" in request.against else None
    group = dist.new_group(backend="a2a") if request.through == "dist" else None
    for name in request.dtypes:
        for size in request.sizes:
            exchange = exchanges.Exchange.of_bytes(
                request.op, size, parse.dtype(name), control.rank, control.world_size
            )
            emit({"begin": f"{request.op} {show.size_text(size)} {name}"})
            with a2a.communicator() as comm:
                contenders: list[Contender]
                if group is None:
                    contenders = [exchanges.a2a_contender(exchange, comm, request.memory)]
                else:
                    contenders = [exchanges.dist_contender("a2a", exchange, group)]
                if "gloo" in request.against:
                    contenders.append(exchanges.dist_contender("gloo", exchange, None))
                if world is not None:
                    contenders.append(exchanges.mpi_contender(exchange, world))
                contenders.append(exchanges.memcpy_contender(exchange))
                timings = alternate(contenders, control, budget_s=request.cell_s, repeat=request.repeat)
                cell = Cell(
                    op=request.op,
                    num_bytes=exchange.num_bytes,
                    dtype=name,
                    ranks=control.world_size,
                    case={"memory": request.memory, "through": request.through},
                    env=environment(comm.topology.summary(), request.command),
                )
                _emit_lines(emit, cell, contenders, timings)
                del contenders  # their tensors live in memory that the communicator takes back


def _moe_cells(request: Request, control: Control, emit: Emit) -> None:
    import a2a
    from a2a.cli import moe_contenders as moe
    from a2a.measure import Cell, alternate, environment

    for name in request.dtypes:
        case = moe.MoeCase(
            tokens=request.tokens,
            hidden=request.hidden,
            experts=request.experts,
            top_k=request.top_k,
            dtype=parse.dtype(name),
            ranks=control.world_size,
            skew=request.skew,
            seed=request.seed,
        )
        emit({"begin": f"moe {name}"})
        with a2a.communicator() as comm:
            contenders = [moe.a2a_contender(case, comm)]
            if "gloo" in request.against:
                contenders.append(moe.gloo_contender(case, control.rank))
            contenders.append(moe.copies_contender(case, control.rank))
            timings = alternate(contenders, control, budget_s=request.cell_s, repeat=request.repeat)
            cell = Cell(
                op="moe",
                num_bytes=case.row_bytes,
                dtype=name,
                ranks=control.world_size,
                case={
                    "tokens": case.tokens,
                    "hidden": case.hidden,
                    "experts": case.experts,
                    "top_k": case.top_k,
                    "skew": case.skew,
                    "seed": case.seed,
                },
                env=environment(comm.topology.summary(), request.command),
            )
            _emit_lines(emit, cell, contenders, timings)
            del contenders


def _emit_lines(emit: Emit, cell: Any, contenders: Sequence[Contender], timings: dict[str, dict[str, Timing]]) -> None:
    from dataclasses import asdict

    from a2a.measure import TOTAL

    for contender in contenders:
        for part, timing in timings[contender.name].items():
            baselines = {name: parts[part] for name, parts in timings.items() if name != "a2a"}
            line = cell.line(
                contender.name,
                timing,
                algorithm=contender.algorithm,
                case={"part": part} if len(contender.parts) else None,
                baselines=baselines if contender.name == "a2a" else None,
            )
            emit({"line": asdict(line)})
    assert all(TOTAL in parts for parts in timings.values())


# ------------------------------------------------------------------------------------------------------------ tables


def _show_exchanges(out: Any, lines: Sequence[Line]) -> None:
    names = list(dict.fromkeys(line.impl for line in lines))
    baselines = [name for name in names if name != "a2a"]
    rows = []
    for key, cell in _by(lines, lambda line: (line.dtype, line.bytes)):
        of = {line.impl: line for line in cell}
        mine = of["a2a"]
        rows.append(
            [
                show.size_text(key[1]),
                key[0],
                *(show.us_text(of[name].p50_us) for name in names),
                show.us_text(mine.p99_us),
                "-" if mine.busbw_GBps is None else f"{mine.busbw_GBps:.3g}",
                *(f"[bold]{show.ratio_text(mine.ratio.get(name))}[/bold]" for name in baselines),
                _wrong(cell),
            ]
        )
    columns = ["bytes", "dtype", *(f"{name} us" for name in names), "a2a p99 us", "a2a bus GB/s"]
    columns += [f"{name} / a2a" for name in baselines] + ["wrong"]
    first = lines[0]
    where = "" if first.case["through"] == "a2a" else ' through torch.distributed on backend "a2a"'
    title = f"{first.op}, {first.ranks} ranks, {first.case['memory']} tensors{where}: p50 of the slowest rank"
    show.print_table(out, columns, rows, title=title, left=2)
    _footnotes(out, lines)


def _show_moe(out: Any, lines: Sequence[Line]) -> None:
    for _, cell in _by(lines, lambda line: (line.dtype,)):
        names = list(dict.fromkeys(line.impl for line in cell))
        baselines = [name for name in names if name != "a2a"]
        rows = []
        for (part,), of_part in _by(cell, lambda line: (line.case["part"],)):
            of = {line.impl: line for line in of_part}
            mine = of["a2a"]
            rows.append(
                [
                    part.replace("_", " "),
                    *(show.us_text(of[name].p50_us) for name in names),
                    show.us_text(mine.p99_us),
                    *(f"[bold]{show.ratio_text(mine.ratio.get(name))}[/bold]" for name in baselines),
                    _wrong(of_part),
                ]
            )
        columns = ["phase", *(f"{name} us" for name in names), "a2a p99 us"]
        columns += [f"{name} / a2a" for name in baselines] + ["wrong"]
        case, first = cell[0].case, cell[0]
        title = (
            f"moe, {first.ranks} ranks, {case['tokens']} tokens each, hidden {case['hidden']}, {case['experts']} experts, "
            f"top-{case['top_k']}, {first.dtype}: p50 of the slowest rank"
        )
        show.print_table(out, columns, rows, title=title)
        total = next((line for line in cell if line.impl == "a2a" and line.case["part"] == "total"), None)
        if total is not None and total.ratio.get("copies"):
            out.print(
                f"Dispatch and combine, forward and backward, take {1 / total.ratio['copies']:.2f} times as long as plain "
                f"copies of the same rows."
            )
    _footnotes(out, lines)


def _footnotes(out: Any, lines: Sequence[Line]) -> None:
    for impl, why in dict.fromkeys((line.impl, line.case["why"]) for line in lines if "why" in line.case):
        out.print(f"{impl}: not measured: {why}", markup=False)
    env = lines[0].env
    commit = "no commit" if env["commit"] is None else env["commit"] + (", changed since" if env["dirty"] else "")
    out.print(f"[dim]{env['cpu']}; torch {env['torch']}; {env['topology']}; {commit}[/dim]")


def _wrong(lines: Sequence[Line]) -> str:
    count = sum(line.wrong for line in lines)
    return f"[bold red]{count}[/bold red]" if count else "0"


def _by(lines: Sequence[Line], key: Callable[[Line], tuple[Any, ...]]) -> list[tuple[tuple[Any, ...], list[Line]]]:
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return list(groups.items())
