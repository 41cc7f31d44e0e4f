"""Measure what the primitives of `a2a.topology.costs` take on GPUs: as `a2a.calibrate`, with events on a stream.

Collectives are timed in CUDA graphs: what a launch from Python takes hides behind the GPU's work in a program that waits for
it, and is in no graph. `signal` and `push` are what the all-to-all kernel takes beyond a launch, and beyond its signals.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from a2a.calibrate import Begin, Tested, engine_calls, of_rank_0, sizes, timed
from a2a.clocks import Clock, CudaClock
from a2a.kernels import cuda
from a2a.measure import Control
from a2a.ops import all_to_all_single
from a2a.topology.costs import Costs, Curve

if TYPE_CHECKING:
    from a2a.comm import Communicator

KIB, MIB = 1 << 10, 1 << 20
TESTED = (64 * KIB, MIB, 16 * MIB, 64 * MIB)


def calibrate_cuda(
    comm: Communicator,
    control: Control,
    clock: Clock,
    *,
    most: int,
    repeat: int | None = None,
    begin: Begin = lambda _: None,
) -> tuple[Costs, list[Tested]]:
    """Measure the primitives on the GPUs of `comm` and fit their curves. Collective; call it on the clock's stream.

    Args, Returns: as `a2a.calibrate.calibrate`; `clock`: what orders the stream that is measured on.
    Raises:
        UnsupportedError: the GPUs share no memory.
        ValueError: there is one rank alone.
    """
    if comm.world_size < 2:
        raise ValueError("calibrate: one rank alone has nobody to measure with; start at least two")
    comm.require_transport("a2a topo --measure")
    assert isinstance(clock, CudaClock)
    graph = clock.in_graphs()
    found: dict[str, list[tuple[int, float]]] = {}
    held: list[tuple[str, int, float]] = []
    with torch.cuda.stream(graph.stream):
        begin("launches and signals")
        mark = torch.zeros(1, device=comm.device)
        small = _exchange(comm, 16 * comm.world_size)
        first = timed({"launch": lambda: mark.zero_() is None, "small": small}, control, clock=graph, repeat=repeat)
        found["launch"] = [(0, first["launch"])]
        found["signal"] = [(0, max(0.0, first["small"] - first["launch"]))]
        fitted = sizes(most)
        for size in sorted({*fitted, *(size for size in TESTED if size <= most)}):
            begin(f"{size} bytes")
            runs = _primitives(comm, size)
            times = timed(runs, control, clock=graph, repeat=repeat)
            if comm.group is not None and size in fitted:
                times |= timed(engine_calls(comm, size), control, clock=clock, repeat=repeat)
            for name, us in times.items():
                beyond = max(0.01, us - (first["small"] if name == "push" else 0.0))
                if size in fitted:
                    found.setdefault(name, []).append((size, beyond))
                else:
                    held.append((name, size, beyond))
    curves = {name: Curve.fitted(samples) for name, samples in found.items()}
    tested = [Tested(name, size, us, curves[name].us(size)) for name, size, us in held if name in curves]
    gpu = torch.cuda.get_device_name(comm.device)
    source = f"measured on {datetime.date.today().isoformat()}, {comm.topology.summary()}, {gpu}"
    return Costs(curves, of_rank_0(source, control), frozenset(curves)), tested


def _exchange(comm: Communicator, num_bytes: int) -> Callable[[], object]:
    """An all-to-all of symmetric tensors."""
    source, output = (comm.empty(num_bytes, dtype=torch.uint8) for _ in range(2))
    return lambda: all_to_all_single(output, source, group=comm)


def _primitives(comm: Communicator, size: int) -> dict[str, Callable[[], object]]:
    """`size` bytes to others by a kernel, by copy engines, and within the GPU."""
    peers = comm.world_size - 1
    piece = size // peers // 64 * 64
    source, output = (torch.empty(size, dtype=torch.uint8, device=comm.device) for _ in range(2))
    shared = comm.empty(piece * comm.world_size, dtype=torch.uint8)
    place = comm.require_transport("a2a topo --measure").place
    offset = place.offset_of(shared.data_ptr())
    driver = cuda.driver()

    def engine() -> None:
        stream = torch.cuda.current_stream(comm.device).cuda_stream
        for i in range(1, comm.world_size):
            peer = (comm.rank + i) % comm.world_size
            to = place.at(peer, offset) + comm.rank * piece
            error = int(driver.cuMemcpyDtoDAsync(to, source.data_ptr() + (i - 1) * piece, piece, stream)[0])
            cuda.check(error, "cuMemcpyDtoDAsync")

    return {
        "push": _exchange(comm, piece * comm.world_size),
        "engine": engine,
        "copy": lambda: output.copy_(source) is None,
    }


__all__ = ["calibrate_cuda"]
