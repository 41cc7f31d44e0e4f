"""`a2a bench OP`: times of a2a and its baselines, alternating in one run.

The command parses, starts ranks and shows; `work` is what every rank does. What rank 0 emits is `{"begin": text}` before a
cell and `{"line": {...}}` for each of its results.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a2a.cli import bench_tables, parse, show
from a2a.cli.demo_hosts import MBIT_PER_S, on_hosts
from a2a.cli.devices import NCCL_REFUSES, Site, site
from a2a.cli.ranks import Emit, find_mpi, mpi_world, run_ranks

if TYPE_CHECKING:
    from a2a import Communicator
    from a2a.cli.exchanges import Exchange
    from a2a.cli.moe_case import MoeCase
    from a2a.cli.nccl_contenders import NcclWindow
    from a2a.measure import Cell, Contender, Control, Line

    Windows = dict[str, NcclWindow]

OPS = (
    *("all_to_all", "all_to_allv", "all_reduce", "reduce_scatter", "all_gather", "all_reduce_rms_norm", "moe"),
    "gradients",
)
BASELINES = {"cpu": ("gloo", "mpi"), "cuda": ("nccl", "nccl_symm", "nccl_ce", "deep_ep")}
ALL_BASELINES = (*BASELINES["cpu"], *BASELINES["cuda"])
USUAL = {"cpu": ("gloo",), "cuda": ("nccl", "nccl_symm", "nccl_ce")}
CELL_S, CUDA_CELL_S = 3.0, 1.5  # how long samples of one cell are taken


@dataclass(frozen=True)
class Request:
    """What is asked for: the command line, parsed. Sent to every rank."""

    op: str
    command: str
    dtypes: tuple[str, ...]
    against: tuple[str, ...]
    repeat: int | None
    device: str = "cpu"
    graph: bool = False
    beside: str | None = None
    link_GBps: float | None = None
    cell_s: float = CELL_S
    sizes: tuple[int, ...] = ()
    memories: tuple[str, ...] = ("symmetric",)
    through: str = "a2a"
    tokens: tuple[int, ...] = ()
    hidden: int = 0
    experts: int = 0
    top_k: int = 0
    skew: float = 0.0
    seed: int = 0
    layout: str = "expert"
    alignment: int = 1
    max_rows: int | None = None
    wire: str | None = None
    rows: str = "dtype"
    num_sms: int | None = None
    layers: int = 0
    bucket_mb: float = 0.0
    wires: tuple[str, ...] = ()
    topology: str | None = None
    hosts: int = 1
    order: str = "blocks"
    mbit_per_s: float = MBIT_PER_S

    @property
    def num_cells(self) -> int:
        return len(self.dtypes) * (
            len(self.tokens) if self.op in ("moe", "gradients") else len(self.sizes) * len(self.memories)
        )

    def check(self) -> None:
        """Raise ValueError for what contradicts itself."""
        for name in self.dtypes:
            parse.dtype(name)
        if self.through == "dist" and "symmetric" in self.memories:
            raise ValueError(
                "--through dist --memory symmetric: tensors from comm.empty belong to one communicator, and a group of "
                'backend "a2a" has its own; use --memory ordinary'
            )
        if self.op in ("moe", "all_reduce_rms_norm") and "mpi" in self.against:
            what = "the MoE layer" if self.op == "moe" else self.op
            raise ValueError(f"--against mpi: {what} is compared with gloo; the collectives are with MPI")
        if self.op == "all_reduce_rms_norm" and self.through == "dist":
            raise ValueError("--through dist: torch.distributed has no all_reduce_rms_norm")
        others = [name for name in self.against if name not in BASELINES[self.device]]
        if others:
            raise ValueError(
                f"--against {','.join(others)}: not on {self.device}, where there are {', '.join(BASELINES[self.device])}"
            )
        if self.device == "cpu" and (self.graph or self.beside):
            raise ValueError(f"{'--graph' if self.graph else '--beside'} is for GPUs; this runs on CPU ranks")
        if self.op != "gradients" and self.topology is not None:
            raise ValueError(f"bench {self.op}: --topology is for gradients")
        if self.hosts > 1 and (self.topology is not None or self.device != "cpu"):
            raise ValueError("--hosts: ranks are on CPUs, and who shares memory is detected; leave --topology out")
        if self.op == "gradients" and (self.graph or self.beside):
            raise ValueError(
                "bench gradients: steps are eager, beside their own backward pass; no --graph, no --beside"
            )
        if self.op == "moe" and self.top_k > self.experts:
            raise ValueError(f"--top-k {self.top_k} is more than --experts {self.experts}")
        if self.hosts > 1 and (self.device != "cpu" or "mpi" in self.against):
            raise ValueError("--hosts: made-up hosts are for CPU ranks that a2a starts, against gloo")


def run(
    request: Request, ranks: int | None, json_path: str | None, plot: Path | None, *, default_ranks: int = 2
) -> int:
    """Run the benchmark and show what it gives; returns the exit code: 1 if a result was wrong."""
    from a2a.measure import Line

    request.check()
    if plot is not None and request.op == "gradients":
        raise ValueError("--plot: there is no drawing of gradients yet")
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

        if request.hosts > 1:
            on_hosts(work, request, ranks or 4, request.order, receive, request.mbit_per_s)
        else:
            run_ranks(work, request, ranks, receive, default=default_ranks, mpi=mpi)
    if not lines:  # a rank other than 0, under a launcher
        return 0
    out = show.console(stderr=json_path == "-")
    _show(request.op)(out, lines)
    if plot is not None:
        from a2a.cli import plots

        (plots.moe if request.op == "moe" else plots.exchanges)(lines, plot)
        out.print(f"plot: {plot}")
    if any(line.wrong for line in lines):
        out.print("[bold red]Wrong results: the times above mean nothing.[/bold red]")
        return 1
    return 0


def _show(op: str) -> Any:
    """What prints the lines of an op."""
    if op == "gradients":
        from a2a.cli import gradients

        return gradients.show_lines
    return bench_tables.show_moe if op == "moe" else bench_tables.show_exchanges


# ----------------------------------------------------------------------------------------------------- on every rank


def work(request: Request, emit: Emit) -> None:
    """Measure every cell that is asked for; on each rank."""
    import torch

    from a2a.measure import Control

    control = Control()
    from a2a.cli import gradients

    kinds = {
        "moe": _moe_cells,
        "gradients": gradients.cells,
        "all_to_all": _exchange_cells,
        "all_to_allv": _exchange_cells,
        "all_reduce_rms_norm": _norm_cells,
    }
    cells = kinds.get(request.op, _reduction_cells)
    with (
        torch.enable_grad() if request.op in ("moe", "gradients") else torch.no_grad(),
        site(request.device, control, graph=request.graph) as here,
    ):
        cells(request, control, here, emit)


def _exchange_cells(request: Request, control: Control, here: Site, emit: Emit) -> None:
    import torch.distributed as dist

    import a2a
    from a2a.cli import exchanges
    from a2a.measure import Cell

    world = mpi_world(control.world_size) if "mpi" in request.against else None
    group = dist.new_group(backend="a2a") if request.through == "dist" else None
    cells = [
        exchanges.Exchange.of_bytes(request.op, size, parse.dtype(name), control.rank, control.world_size, here.device)
        for name in request.dtypes
        for size in request.sizes
    ]
    largest = max(max(max(map(sum, zip(*e.counts, strict=True))) * e.dtype.itemsize, e.num_bytes) for e in cells)
    with _windows(request, largest, here) as windows:
        for memory, exchange in itertools.product(request.memories, cells):
            dtype = str(exchange.dtype).removeprefix("torch.")
            emit({"begin": f"{request.op} {show.size_text(exchange.num_bytes)} {dtype}, {memory}"})
            with a2a.communicator(here.group, device=here.device) as comm:
                contenders: list[Contender]
                if group is None:
                    contenders = [exchanges.a2a_contender(exchange, comm, memory)]
                else:
                    contenders = [exchanges.dist_contender("a2a", exchange, group)]
                if here.device.type == "cuda":
                    contenders += _cuda_baselines(request, exchange, comm, control, here, windows)
                else:
                    if "gloo" in request.against:
                        contenders.append(exchanges.dist_contender("gloo", exchange, None))
                    if world is not None:
                        contenders.append(exchanges.mpi_contender(exchange, world))
                    contenders.append(exchanges.memcpy_contender(exchange))
                cell = Cell(
                    op=request.op,
                    num_bytes=exchange.num_bytes,
                    dtype=dtype,
                    ranks=control.world_size,
                    case={"memory": memory, "through": request.through, **_place(request, comm)},
                    env=environment_of(request, comm, here),
                )
                _measure(request, cell, contenders, control, here, emit)
                del contenders  # their tensors live in memory that the communicator takes back


def _reduction_cells(request: Request, control: Control, here: Site, emit: Emit) -> None:
    import torch.distributed as dist

    import a2a
    from a2a.cli import reductions
    from a2a.measure import Cell

    if here.device.type == "cuda":
        _cuda_reduction_cells(request, control, here, emit)
        return
    world = mpi_world(control.world_size) if "mpi" in request.against else None
    group = dist.new_group(backend="a2a") if request.through == "dist" else None
    for memory, name, size in itertools.product(request.memories, request.dtypes, request.sizes):
        reduction = reductions.Reduction.of_bytes(request.op, size, parse.dtype(name), control.rank, control.world_size)
        dtype = str(reduction.dtype).removeprefix("torch.")
        emit({"begin": f"{request.op} {show.size_text(reduction.num_bytes)} {dtype}, {memory}"})
        with a2a.communicator() as comm:
            contenders: list[Contender]
            if group is None:
                contenders = [reductions.a2a_contender(reduction, comm, memory)]
            else:
                contenders = [reductions.dist_contender("a2a", reduction, group)]
            if "gloo" in request.against:
                contenders.append(reductions.dist_contender("gloo", reduction, None))
            if world is not None:
                contenders.append(reductions.mpi_contender(reduction, world))
            contenders.append(reductions.memcpy_contender(reduction))
            cell = Cell(
                op=request.op,
                num_bytes=reduction.num_bytes,
                dtype=dtype,
                ranks=control.world_size,
                case={"memory": memory, "through": request.through},
                env=environment_of(request, comm, here),
            )
            _measure(request, cell, contenders, control, here, emit)
            del contenders  # their tensors live in memory that the communicator takes back


def _cuda_reduction_cells(request: Request, control: Control, here: Site, emit: Emit) -> None:
    import torch.distributed as dist

    import a2a
    from a2a.cli import nccl_reductions
    from a2a.cli.reductions import Reduction
    from a2a.measure import Cell

    group = dist.new_group(backend="a2a") if request.through == "dist" else None
    cells = [
        Reduction.of_bytes(request.op, size, parse.dtype(name), control.rank, control.world_size)
        for name in request.dtypes
        for size in request.sizes
    ]
    with _windows(request, nccl_reductions.window_bytes(cells), here) as windows:
        for memory, reduction in itertools.product(request.memories, cells):
            dtype = str(reduction.dtype).removeprefix("torch.")
            emit({"begin": f"{request.op} {show.size_text(reduction.num_bytes)} {dtype}, {memory}"})
            with a2a.communicator(here.group, device=here.device) as comm:
                if group is None:
                    contenders = [nccl_reductions.a2a_contender(reduction, comm, memory)]
                else:
                    contenders = [nccl_reductions.dist_contender("a2a", reduction, group, here.device)]
                if "nccl" in request.against:
                    contenders.append(nccl_reductions.dist_contender("nccl", reduction, here.group, here.device))
                contenders += [nccl_reductions.window_contender(name, reduction, w) for name, w in windows.items()]
                cell = Cell(
                    op=request.op,
                    num_bytes=reduction.num_bytes,
                    dtype=dtype,
                    ranks=control.world_size,
                    case={"memory": memory, "through": request.through, **_place(request, comm)},
                    env=environment_of(request, comm, here),
                )
                _measure(request, cell, contenders, control, here, emit)
                del contenders  # their tensors live in memory that the communicator takes back


def _norm_cells(request: Request, control: Control, here: Site, emit: Emit) -> None:
    import a2a
    from a2a.cli import norm_contenders as norms
    from a2a.measure import Cell

    engine, group = ("nccl", here.group) if here.device.type == "cuda" else ("gloo", None)
    for memory, name, size in itertools.product(request.memories, request.dtypes, request.sizes):
        norm = norms.Norm.of_bytes(size, request.hidden, parse.dtype(name), control.rank, control.world_size)
        dtype = str(norm.dtype).removeprefix("torch.")
        emit({"begin": f"{request.op} {norm.rows} rows of {norm.hidden} {dtype}, {memory}"})
        with a2a.communicator(here.group, device=here.device) as comm:
            contenders = [norms.a2a_contender(norm, comm, memory)]
            if engine in request.against:
                why = norms.refusal(group) if engine == "nccl" else ""
                contenders.append(norms.unfused_contender(engine, norm, group, here.device, why_not=why))
            cell = Cell(
                op=request.op,
                num_bytes=norm.num_bytes,
                dtype=dtype,
                ranks=control.world_size,
                case={"memory": memory, "through": request.through, "hidden": norm.hidden, **_place(request, comm)},
                env=environment_of(request, comm, here),
            )
            _measure(request, cell, contenders, control, here, emit)
            del contenders  # their tensors live in memory that the communicator takes back


def _cuda_baselines(
    request: Request, exchange: Exchange, comm: Communicator, control: Control, here: Site, windows: Windows
) -> list[Contender]:
    from a2a.cli import nccl_contenders

    found = []
    if "nccl" in request.against:
        found.append(nccl_contenders.nccl_contender(exchange, here.group))
    found += [nccl_contenders.window_contender(name, exchange, window) for name, window in windows.items()]
    if comm.transport is not None:
        found.append(nccl_contenders.copy_contender(exchange, comm, control))
    return found


@contextlib.contextmanager
def _windows(request: Request, num_bytes: int, here: Site) -> Iterator[Windows]:
    """NCCL's symmetric windows, large enough for every cell: they are registered once."""
    if here.group is None:
        yield {}
        return
    from a2a.cli.nccl_contenders import NcclWindow

    windows: Windows = {
        name: NcclWindow(num_bytes, here.device, no_sms=name == "nccl_ce")
        for name in ("nccl_symm", "nccl_ce")
        if name in request.against
    }
    yield windows
    for window in windows.values():
        window.close()


def _moe_cells(request: Request, control: Control, here: Site, emit: Emit) -> None:
    import a2a
    from a2a.cli import moe_contenders as moe
    from a2a.cli.moe_deep_ep import deep_ep_contender
    from a2a.measure import Cell

    for name, tokens in itertools.product(request.dtypes, request.tokens):
        case = _moe_case(request, name, tokens, control, here)
        emit({"begin": f"moe {name}, {tokens} tokens"})
        with a2a.communicator(here.group, device=here.device) as comm:
            contenders = [moe.a2a_contender(case, comm, here.clock)]
            engine = "gloo" if request.device == "cpu" else "nccl"
            if engine in request.against:
                why = moe.WAITS if request.graph else NCCL_REFUSES if engine == "nccl" and here.group is None else ""
                contenders.append(moe.c10d_contender(engine, case, control.rank, here.clock, here.group, why_not=why))
            if "deep_ep" in request.against:
                contenders.append(deep_ep_contender(case, control.rank, here.clock, here.group, graph=request.graph))
            if here.device.type == "cpu":
                contenders.append(moe.copies_contender(case, control.rank))
            cell = Cell(
                op="moe",
                num_bytes=case.row_bytes,
                dtype=name,
                ranks=control.world_size,
                case={
                    **{field: getattr(case, field) for field in _MOE_FIELDS},
                    "remote_bytes": int(control.maximum([case.remote_bytes(control.rank)])[0]),
                    **_place(request, comm),
                },
                env=environment_of(request, comm, here),
            )
            _measure(request, cell, contenders, control, here, emit)
            del contenders


_MOE_FIELDS = (
    "tokens", "hidden", "experts", "top_k", "skew", "seed", "layout", "alignment", "max_rows", "wire", "rows", "num_sms",
)  # fmt: skip


def _moe_case(request: Request, dtype: str, tokens: int, control: Control, here: Site) -> MoeCase:
    from dataclasses import replace

    from a2a.cli.moe_case import MoeCase

    case = MoeCase(
        tokens=tokens,
        hidden=request.hidden,
        experts=request.experts,
        top_k=request.top_k,
        dtype=parse.dtype(dtype),
        ranks=control.world_size,
        skew=request.skew,
        seed=request.seed,
        device=str(here.device),
        layout=request.layout,
        alignment=request.alignment,
        max_rows=request.max_rows,
        wire=request.wire,
        rows=request.rows,
        num_sms=request.num_sms,
    )
    if request.graph and request.max_rows is None:  # a graph can't wait for the number of rows
        return replace(case, max_rows=case.roomy_rows())
    return case


def _place(request: Request, comm: Communicator) -> dict[str, Any]:
    """What `case` says of the device and of hosts; nothing on a CPU alone, as ever."""
    if request.hosts > 1:
        return {"hosts": request.hosts, "order": request.order, "mbit_per_s": request.mbit_per_s}
    if request.device == "cpu":
        return {}
    up = comm.topology.scale_up
    known = up.bandwidth_GBps if comm.topology.domains[0].kind == "nvlink" else None
    return {"device": request.device, "graph": request.graph, "link_GBps": request.link_GBps or known}


def environment_of(request: Request, comm: Communicator, here: Site) -> dict[str, Any]:
    """`measure.environment` of this run."""
    from a2a.measure import environment

    return environment(comm.topology.summary(), request.command, here.device)


def _measure(
    request: Request, cell: Cell, contenders: Sequence[Contender], control: Control, here: Site, emit: Emit
) -> None:
    """Time the contenders of a cell and emit their lines."""
    from a2a.measure import alternate

    timings = alternate(contenders, control, budget_s=request.cell_s, repeat=request.repeat, clock=here.clock)
    extra: dict[tuple[str, str], dict[str, Any]] = {}
    if request.beside:
        from a2a.cli import beside
        from a2a.clocks import CudaClock

        assert isinstance(here.clock, CudaClock)
        extra = beside.measure(contenders, timings, control, here.clock)
    for contender in contenders:
        for part, timing in timings[contender.name].items():
            baselines = {name: parts[part] for name, parts in timings.items() if name != "a2a"}
            line = cell.line(
                contender.name,
                timing,
                algorithm=contender.algorithm,
                sms=contender.sms,
                case={
                    **({"part": part} if len(contender.names) > 1 else {}),
                    **({"predicted_us": contender.predicted_us} if contender.predicted_us is not None else {}),
                    **extra.get((contender.name, part), {}),
                },
                baselines=baselines if contender.name == "a2a" else None,
            )
            emit({"line": asdict(line)})
