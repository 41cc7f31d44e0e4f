"""The clocks that `measure.alternate` reads: the host's, or events on a GPU's stream.

A clock makes a `Row`: so many calls of one thing, ready to be made and timed again and again.

Decisions for GPUs:

* **Events, not the host's clock**: two of them on the stream around a row of back-to-back calls.
* **The start is aligned on the device**: hosts meet first, then the GPUs in a one-element all-reduce of NCCL's, then
  comes one row (of a graph) or call that is not timed; the host has queued the timed ones by the time it ends.
* **Graphs**: the row is one CUDA graph of 10 to 50 calls, about a millisecond, and a sample one replay of it.
* **One stream for everything**, of high priority, as trainers give to communication; NCCL's groups here get one, too.
* **Buffers are not rotated.** Those that fit the L2 cache are found in it, by every implementation alike, as data that a
  kernel has just written would be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

SAMPLE_US = 1000.0  # what the calls of one sample should fill

Run = Callable[[], Any]  # one call; of a contender with parts: returns how many ns each part took


@dataclass(frozen=True)
class Row:
    """A number of calls.

    Attributes:
        calls: how many.
        begin: makes what precedes the timing.
        make: makes them.
        time: makes them and gives us a call, of each part and in total.
        is_graph: whether `make` replays a CUDA graph of them.
    """

    calls: int
    begin: Callable[[], object]
    make: Callable[[], object]
    time: Callable[[], list[float]]
    is_graph: bool = False


class Clock(Protocol):
    """What `measure.alternate` needs."""

    align_us: float  # what `align` is reckoned at when samples are counted; nothing is derived from it

    def align(self) -> None:
        """Bring the ranks together."""

    def calls(self, us: float) -> int:
        """How many calls of so many us make a row."""

    def trial(self, run: Run, calls: int, parts: Sequence[str] = ()) -> Row:
        """A row to find out how long calls take."""

    def row(self, run: Run, calls: int, parts: Sequence[str] = ()) -> Row:
        """The row that is measured."""

    def perform(self, step: Callable[[], None]) -> None:
        """Make `step` the way that rows are made, for a check: once, or in a graph that is replayed."""


class HostClock:
    """The host's clock, for calls that have done their work when they return."""

    align_us: float = 500.0
    most_calls: ClassVar[int] = 1000

    def __init__(self, barrier: Callable[[], None]) -> None:
        self.align = barrier

    def calls(self, us: float) -> int:
        return max(1, min(self.most_calls, math.ceil(SAMPLE_US / max(us, 0.1))))

    def row(self, run: Run, calls: int, parts: Sequence[str] = ()) -> Row:
        def make() -> None:
            for _ in range(calls):
                run()

        def timed() -> list[float]:
            begin = time.perf_counter_ns()
            make()
            return [(time.perf_counter_ns() - begin) / calls / 1e3]

        def timed_in_parts() -> list[float]:
            sums = [0] * len(parts)
            begin = time.perf_counter_ns()
            for _ in range(calls):
                sums = [total + ns for total, ns in zip(sums, run(), strict=True)]
            whole = time.perf_counter_ns() - begin
            return [ns / calls / 1e3 for ns in (*sums, whole)]

        return Row(calls, run, make, timed_in_parts if parts else timed)

    trial = row

    def perform(self, step: Callable[[], None]) -> None:
        step()


class CudaClock:
    """Events on a stream of `device`.

    Args:
        device: a CUDA device with its index.
        barrier: brings the hosts together.
        meet: queues something on the stream that ends on no GPU before all have come to it.
        graph: rows are CUDA graphs.
    """

    align_us: float = 200.0
    graph_calls: ClassVar[tuple[int, int]] = (10, 50)
    most_calls: ClassVar[int] = 1000

    def __init__(
        self, device: torch.device, barrier: Callable[[], None], meet: Callable[[], object], *, graph: bool = False
    ) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.graph = graph
        self._barrier, self._meet = barrier, meet

    def in_graphs(self) -> CudaClock:
        """The same, with rows that are CUDA graphs, on a stream of its own."""
        return CudaClock(self.stream.device, self._barrier, self._meet, graph=True)

    def align(self) -> None:
        self.stream.synchronize()
        self._barrier()
        self._meet()

    def calls(self, us: float) -> int:
        least, most = self.graph_calls if self.graph else (1, self.most_calls)
        return max(least, min(most, math.ceil(SAMPLE_US / max(us, 0.1))))

    def trial(self, run: Run, calls: int, parts: Sequence[str] = ()) -> Row:
        assert not parts, "on a GPU, phases are timed each by itself"

        def make() -> None:
            for _ in range(calls):
                run()

        return Row(calls, run, make, self._timed(make, calls))

    def row(self, run: Run, calls: int, parts: Sequence[str] = ()) -> Row:
        if not self.graph:
            return self.trial(run, calls, parts)
        replay = self.captured(run, calls)
        return Row(calls, replay, replay, self._timed(replay, calls), is_graph=True)

    def _timed(self, make: Callable[[], object], calls: int) -> Callable[[], list[float]]:
        first, last = self.event(), self.event()

        def time_us() -> list[float]:
            first.record(self.stream)
            make()
            last.record(self.stream)
            last.synchronize()
            return [first.elapsed_time(last) * 1e3 / calls]

        return time_us

    def captured(self, run: Run, calls: int) -> Callable[[], None]:
        """Capture so many calls in a CUDA graph and replay it once, so that what the calls return holds values.

        The calls must have been made once before. Returns the replay.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        self._barrier()
        # Other threads (NCCL's watchdog) may go on asking for events while this one captures.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                run()
        graph.replay()
        return graph.replay

    def perform(self, step: Callable[[], None]) -> None:
        step()
        if self.graph:
            self.captured(step, 1)()

    @staticmethod
    def event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
