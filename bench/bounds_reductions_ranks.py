"""What both ranks of `bounds_reductions.py` do: they time everything that it holds against each other, in turn."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass, replace

import torch

import a2a
from a2a.cli import show
from a2a.cli.ranks import Emit, mpi_world
from a2a.cli.reductions import Reduction, a2a_contender, dist_contender, memcpy_contender, mpi_contender
from a2a.kernels import cpu
from a2a.measure import Cell, Contender, Control, Timing, alternate, environment
from a2a.primitives import COPY, PROGRAMS, READ, STREAM, SUM, SUM_STREAM, Bench, Program, Step

UNITS = (16 << 10, 32 << 10, 64 << 10, 256 << 10)
AT_ONCE = 256 << 10  # bytes that one call into C moves, at least
READ_MOST = 16 << 20  # of a share: beyond, other ways are ahead


@dataclass(frozen=True)
class Request:
    """What every rank is sent."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    budget_s: float
    with_mpi: bool
    command: str


def ways(op: str, bench: Bench, share: int) -> dict[str, Program]:
    """Every known way to the result of an op in float32, whose shares have so many bytes."""
    names = {
        "all_reduce": ("reduce_gather", "one_shot"),
        "reduce_scatter": ("reduce_staged",),
        "all_gather": ("gather",),
    }
    found: dict[str, Program] = {}
    for name in names[op]:
        whole = share * bench.world_size if name == "one_shot" else share
        program = PROGRAMS[name](bench, whole)
        if program is None:
            continue
        for unit in UNITS if name != "one_shot" else (whole,):
            if unit <= min(bench.slot, program.piece) or program.piece < UNITS[0] or name == "one_shot":
                for past, kinds in (
                    ("", {STREAM: COPY, SUM_STREAM: SUM}),
                    (" past the cache", {COPY: STREAM, SUM: SUM_STREAM}),
                ):
                    steps = tuple(_last(step, kinds, bench) for step in program.steps)
                    found[f"{name} by {show.size_text(unit)}{past}"] = Program(
                        steps, program.piece, min(unit, program.piece)
                    )
    if bench.reads and share <= READ_MOST:
        found |= _read_ways(op, bench, share)
    if op == "all_gather":  # its own share, too
        own = Step(COPY, bench.theirs(share, bench.rank), (bench.mine(share, bench.rank),))
        found = {name: replace(program, steps=(*program.steps, own)) for name, program in found.items()}
    return found


def _last(step: Step, kinds: dict[int, int], bench: Bench) -> Step:
    """A step that ends in a tensor of this rank, in another kind; what goes to slots is read at once, and stays."""
    return step if step.out.slots else replace(step, kind=kinds.get(step.kind, step.kind))


def _read_ways(op: str, bench: Bench, share: int) -> dict[str, Program]:
    """By reads of the peer's process: of its input into a small buffer, of its result, or both."""
    found: dict[str, Program] = {}
    for unit in UNITS[2:]:
        chunk = min(unit, share)
        bounce = {peer: bench.slots(bench.ring(bench.rank, peer), bench.slot, 1) for peer in bench.peers}
        inputs = [Step(READ, bounce[p], (bench.source_of(p, share),), rank=p) for p in bench.peers]
        terms = {**bounce, bench.rank: bench.mine(share, bench.rank)}
        places = tuple(terms[rank] for rank in range(bench.world_size))
        results = [Step(READ, bench.theirs(share, p), (bench.source_of(p, share),), rank=p) for p in bench.peers]
        for kind, past in ((SUM, ""), (SUM_STREAM, " past the cache")):
            total = Step(kind, bench.theirs(share, bench.rank), places)
            steps = {
                "all_reduce": [*inputs, total, *results],
                "reduce_scatter": [*inputs, total],
                "all_gather": results,
            }
            found[f"read by {show.size_text(unit)}{past}"] = Program(tuple(steps[op]), share, chunk)
    return found


def least(comm: a2a.Communicator) -> dict[str, Contender]:
    """A round of signals, and a call of C from Python."""
    request = comm.require_transport("bounds").request("bounds", 0, "bounds")
    library, output, source = cpu.lib(), torch.empty(1), torch.empty(1)
    nothing = ctypes.CDLL(None).abs
    nothing.argtypes = (ctypes.c_void_p,) * 3

    def signals() -> None:
        for _ in range(16):
            library.a2a_barrier(comm.handle, request)

    def call() -> None:
        nothing(0, output.data_ptr(), source.data_ptr())

    return {name: Contender(name, run, lambda: 0) for name, run in (("signal", signals), ("call", call))}


def work(request: Request, emit: Emit) -> None:
    """Measure every op and size; on each rank."""
    control = Control()
    world = mpi_world(2) if request.with_mpi else None
    for op in request.ops:
        for size in request.sizes:
            reduction = Reduction.of_bytes(op, size, torch.float32, control.rank, 2)
            share = reduction.share * 4
            with a2a.communicator() as comm:
                bench = Bench(comm, max(share, size))
                times = max(1, AT_ONCE // size)
                programs = ways(op, bench, share)
                bounds = [
                    Contender(f"way {n}", bench.runner(p, times), lambda: 0, algorithm=n) for n, p in programs.items()
                ]
                ours = [a2a_contender(reduction, comm, "ordinary"), dist_contender("gloo", reduction, None)]
                ours += [mpi_contender(reduction, world)] if world is not None else []
                every = [*ours, memcpy_contender(reduction), *least(comm).values(), *bounds]
                timings = alternate(every, control, budget_s=request.budget_s)
                env = environment(comm.topology.summary(), request.command)
                cell = Cell(f"{op}_bounds", reduction.num_bytes, "float32", 2, {"memory": "ordinary"}, env)
                for each in every:
                    timing, impl = timings[each.name]["total"], each.name.partition(" ")[0]
                    timing = _of_one(timing, times if impl == "way" else 16 if impl == "signal" else 1)
                    emit({"line": asdict(cell.line(impl, timing, algorithm=each.algorithm))})
                del every, ours, bounds


def _of_one(timing: Timing, times: int) -> Timing:
    return replace(timing, samples_us=tuple(us / times for us in timing.samples_us), calls=timing.calls * times)
