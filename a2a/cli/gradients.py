"""`a2a bench gradients`: a training step's forward and backward pass with and without the reduction of its gradients.

A sample is one whole step of a stack of linear layers with real matrix products, the same on every rank but for its
inputs:

    compute     no gradient is sent
    a2a         a2a.GradientReducer, across domains in the gradients' own dtype; a2a_bf16 and a2a_fp8 by those formats
    gloo, nccl  DistributedDataParallel, whose buckets are as large, with one flat all-reduce each

What a step takes beyond `compute` is what its reduction costs. `alone_us` is the reduction of the same buckets with
nothing beside it; `exposed_us`, how long it is waited for after the backward pass; `hidden_us`, what is left of
`alone_us`; `slowdown`, how many times longer the passes take because of what runs beside them; `cpu_us`, the CPU time that
the reduction alone takes of all ranks on this machine, spread over its cores: what no overlap can hide on a busy machine.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from a2a.cli import parse
from a2a.measure import TOTAL, Cell, Contender, Control, alternate, environment, percentile

if TYPE_CHECKING:
    import a2a
    from a2a.cli.bench import Request
    from a2a.cli.devices import Site
    from a2a.cli.ranks import Emit

COMPUTE = "compute"
EXTRA_STEPS = 9  # that are asked where their time went
# What a gradient may differ by: of the mean of its terms' magnitudes, and of the largest such mean in its tensor.
_BOUNDS = {None: (1e-5, 1e-6), "bf16": (2.0**-6, 2.0**-9), "fp8": (2.0**-2, 2.0**-5)}
_OWN_BOUNDS = {torch.float32: (1e-5, 1e-6)}
_COARSE = (2.0**-5, 2.0**-8)  # of bfloat16 and float16 gradients


@dataclass(frozen=True)
class GradientCase:
    """The model and how its gradients are reduced.

    Attributes:
        tokens: rows of a rank's batch.
        hidden, layers: of the model: square weights and a non-linearity.
    """

    tokens: int
    hidden: int
    layers: int
    bucket_mb: float

    def model(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(self.hidden, self.hidden), nn.GELU()) for _ in range(self.layers)]
        return nn.Sequential(*blocks).to(device, dtype)

    def batch(self, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.randn(self.tokens, self.hidden, generator=torch.Generator().manual_seed(rank)).to(device, dtype)

    @property
    def elements(self) -> int:
        return self.layers * self.hidden * (self.hidden + 1)


def cells(request: Request, control: Control, here: Site, emit: Emit) -> None:
    """Measure every cell that is asked for; on each rank."""
    for name in request.dtypes:
        for tokens in request.tokens:
            emit({"begin": f"gradients {name}, {tokens} tokens"})
            case = GradientCase(tokens, request.hidden, request.layers, request.bucket_mb)
            _cell(request, case, name, control, here, emit)


def _cell(request: Request, case: GradientCase, name: str, control: Control, here: Site, emit: Emit) -> None:
    import a2a

    dtype = parse.dtype(name)
    topology = None if request.topology is None else a2a.Topology.load(request.topology)
    steps = [_Step(case, dtype, control, here, None)]
    steps += [_Reduced(case, dtype, control, here, wire, topology) for wire in (None, *request.wires)]
    if (engine := "gloo" if request.device == "cpu" else "nccl") in request.against:
        steps.append(_Flat(case, dtype, control, here, engine))
    contenders = [step.contender() for step in steps]
    contenders += [step.alone() for step in steps if isinstance(step, _Reduced)]
    timings = alternate(contenders, control, budget_s=request.cell_s, repeat=request.repeat, clock=here.clock)
    of = {step.name: timings[step.name][TOTAL] for step in steps}
    shape = next(step for step in steps if isinstance(step, _Reduced)).shape()
    cell = Cell(
        op="gradients",
        num_bytes=case.elements * dtype.itemsize,
        dtype=name,
        ranks=control.world_size,
        case={**asdict(case), "hosts": request.hosts, "mbit": request.mbit_per_s if request.hosts > 1 else None},
        env=environment(shape, request.command, here.device),
    )
    for step in steps:
        extra = step.told(steps[0], timings)
        baselines = {other: timing for other, timing in of.items() if not other.startswith("a2a")}
        line = cell.line(step.name, of[step.name], algorithm=step.algorithm, case=extra,
                         baselines=baselines if step.name.startswith("a2a") else None)  # fmt: skip
        emit({"line": asdict(line)})
    for step in steps:
        step.close()


class _Step:
    """A step without reduction, and what all have in common."""

    algorithm = "-"

    def __init__(self, case: GradientCase, dtype: torch.dtype, control: Control, here: Site, wire: str | None) -> None:
        self.name = COMPUTE
        self.model = case.model(dtype, here.device)
        self.call: Callable[[Tensor], Tensor] = self.model
        self.x = case.batch(control.rank, dtype, here.device)
        self.wire, self.dtype, self.control, self.here = wire, dtype, control, here

    def run(self) -> None:
        """One step, but for the optimizer."""
        self.model.zero_grad()
        self.call(self.x).square().mean().backward()  # type: ignore[no-untyped-call]

    def contender(self) -> Contender:
        return Contender(self.name, self.run, self.check, algorithm=self.algorithm)

    def check(self) -> int:
        self.run()
        return 0

    def wrong(self) -> int:
        """How many elements of the gradients are not the mean over the ranks, as the model alone has them."""
        reduced = [p.grad.detach().clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        with self.unreduced():
            self.call(self.x).square().mean().backward()  # type: ignore[no-untyped-call]
        relative, absolute = _BOUNDS[self.wire] if self.wire else _OWN_BOUNDS.get(self.dtype, _COARSE)
        wrong = 0
        for got, param in zip(reduced, self.model.parameters(), strict=True):
            assert param.grad is not None
            mean, magnitude = param.grad.to("cpu", torch.float64), param.grad.to("cpu", torch.float64).abs()
            for tensor in (mean, magnitude):
                dist.all_reduce(tensor.div_(self.control.world_size))  # of the control group: gloo's
            bound = relative * magnitude + absolute * magnitude.max()
            wrong += int(((got.to("cpu", torch.float64) - mean).abs() > bound).sum())
        return wrong

    def unreduced(self) -> Any:
        """A context in which a step sends nothing."""
        raise NotImplementedError

    def told(self, compute: _Step, timings: Any) -> dict[str, Any]:
        """What goes into `case` of its line; `compute` is a step without reduction. Collective."""
        return {}

    def close(self) -> None:
        """Let go of everything."""


class _Reduced(_Step):
    """A step with a2a's GradientReducer."""

    algorithm = "hierarchy"

    def __init__(
        self,
        case: GradientCase,
        dtype: torch.dtype,
        control: Control,
        here: Site,
        wire: str | None,
        topology: a2a.Topology | None,
    ) -> None:
        import a2a

        super().__init__(case, dtype, control, here, wire)
        self.name = "a2a" if wire is None else f"a2a_{wire}"
        self.reducer = a2a.GradientReducer(self.model, here.group, topology, wire, case.bucket_mb)
        if self.reducer.topology.is_single_domain:
            self.algorithm = "all_reduce"

    def unreduced(self) -> Any:
        return self.reducer.no_sync()

    def check(self) -> int:
        self.run()
        return self.wrong()

    def alone(self) -> Contender:
        """The reduction of gradients that are there."""
        return Contender(f"{self.name} alone", self.reducer.finish, self.check)

    def run(self) -> None:
        super().run()
        self.reducer.finish()  # does nothing after a backward pass; without one, in `alone`, it reduces

    def shape(self) -> str:
        return self.reducer.topology.summary()

    def cpu_us(self) -> float:
        """CPU time of the reduction of gradients that are there, of all ranks, by the number of cores. Collective."""
        samples = []
        for _ in range(EXTRA_STEPS):
            self.here.clock.align()
            before = time.process_time()
            self.reducer.finish()
            samples.append((time.process_time() - before) * 1e6)
        total = torch.tensor(percentile(samples, 50), dtype=torch.float64)
        dist.all_reduce(total)  # of the control group: gloo's
        return float(total) / len(os.sched_getaffinity(0))

    def told(self, compute: _Step, timings: Any) -> dict[str, Any]:
        clock, control = self.here.clock, self.control
        rows = clock.row(compute.run, 1), clock.row(self.run, 1)
        samples = []
        for _ in range(EXTRA_STEPS):
            clock.align()
            (alone,) = rows[0].time()
            before = self.reducer.stats()["bytes_sent"]
            clock.align()
            (whole,) = rows[1].time()
            stats = self.reducer.stats()
            samples.append([alone, whole - stats["exposed_us"], stats["exposed_us"], stats["bytes_sent"] - before])
        worst = control.maximum([value for sample in samples for value in sample])
        compute_us, passes_us, exposed_us, sent = (percentile(worst[index::4], 50) for index in range(4))
        alone_us = timings[f"{self.name} alone"][TOTAL].p50_us
        return {
            "wire": self.wire,
            "buckets": len(stats["buckets"]),
            "bytes_sent": int(sent),
            "alone_us": round(alone_us, 1),
            "exposed_us": round(exposed_us, 1),
            "hidden_us": round(max(0.0, alone_us - exposed_us), 1),
            "slowdown": round(passes_us / compute_us, 4),
            "cpu_us": round(self.cpu_us(), 1),
        }

    def close(self) -> None:
        self.reducer.close()


class _Flat(_Step):
    """A step with DDP, whose buckets are all-reduced over all ranks at once."""

    algorithm = "ddp"

    def __init__(self, case: GradientCase, dtype: torch.dtype, control: Control, here: Site, engine: str) -> None:
        super().__init__(case, dtype, control, here, None)
        self.name = engine
        self.ddp = DistributedDataParallel(
            self.model, process_group=here.group, bucket_cap_mb=case.bucket_mb, gradient_as_bucket_view=True
        )
        self.call = functools.partial(self.ddp)

    def unreduced(self) -> Any:
        return self.ddp.no_sync()

    def check(self) -> int:
        self.run()
        return self.wrong()


# ----------------------------------------------------------------------------------------------------------- the table


def show_lines(out: Any, lines: Sequence[Any]) -> None:
    """One table for each dtype and number of tokens."""
    from a2a.cli import bench_tables, show

    for _, cell in bench_tables.by(lines, lambda line: (line.dtype, line.case["tokens"])):
        compute = next(line for line in cell if line.impl == COMPUTE)
        flat = next((line for line in cell if line.impl in ("gloo", "nccl")), None)
        rows = []
        for line in cell:
            case = line.case
            rows.append([
                line.impl,
                show.us_text(line.p50_us),
                show.us_text(line.p99_us),
                show.us_text(line.p50_us - compute.p50_us if line.p50_us and compute.p50_us else None),
                *(show.us_text(case.get(key)) for key in ("alone_us", "hidden_us", "exposed_us")),
                f"{case['slowdown']:.3f}x" if "slowdown" in case else "-",
                f"{case['bytes_sent']:,}" if "bytes_sent" in case else "-",
                "-" if flat is None else f"[bold]{show.ratio_text(line.ratio.get(flat.impl))}[/bold]",
                f"[bold red]{line.wrong}[/bold red]" if line.wrong else "0",
            ])  # fmt: skip
        columns = [
            "",
            "step us",
            "p99 us",
            "beyond compute",
            "alone us",
            "hidden us",
            "exposed us",
            "passes",
            "sent across",
        ]
        columns += ["flat / a2a" if flat is None else f"{flat.impl} / a2a", "wrong"]
        case = cell[0].case
        where = f", {case['hosts']} hosts at {case['mbit']:g} Mbit/s" if case["mbit"] else ""
        title = (
            f"gradients, {cell[0].ranks} ranks{where}, {case['layers']} layers of {case['hidden']}, {case['tokens']} "
            f"tokens each, {cell[0].dtype}, buckets of {case['bucket_mb']:g} MiB: p50 of the slowest rank"
        )
        show.print_table(out, columns, rows, title=title)
    bench_tables.footnotes(out, lines)
