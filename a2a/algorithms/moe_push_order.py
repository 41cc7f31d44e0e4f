"""In which order `push` launches the kernels of a call, and on which streams: see a2a/algorithms/moe_push.py."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import c_uint32
from typing import Any

from a2a.algorithms.moe_push_geometry import Geometry
from a2a.algorithms.moe_push_ready import PushReady
from a2a.kernels import cuda

# How the chunks of a request are shared out among the kernels that work on them: the rest travels meanwhile.
SPREAD_GROUPS, GATHER_GROUPS = (3, 2, 2), (2, 2, 2, 1)
# Passes of a combine whose rows are marked as they are made: most sums travel beside the work on the last rows.
READY_PASSES = 4


class PushOrder:
    """Lists of steps. Streams: 0 the caller's, 1 gates, 2 what works behind them."""

    ready: PushReady | None
    _geometry: Geometry
    _calls: dict[str, tuple[cuda.Call, Any]]
    _events: list[int]

    def _launch(self, name: str, stream: int, at: str = "", *patch: int) -> cuda.Step:
        call, values = self._calls[name]
        offset = getattr(type(values), at).offset if at else 0
        return cuda.Step(cuda.Step.LAUNCH, stream, ctypes.addressof(call), offset, len(patch), (c_uint32 * 6)(*patch))

    def _record(self, event: int, stream: int) -> cuda.Step:
        return cuda.Step(cuda.Step.RECORD, stream, self._events[event])

    def _wait(self, event: int, stream: int) -> cuda.Step:
        return cuda.Step(cuda.Step.WAIT, stream, self._events[event])

    def _fork(self) -> list[cuda.Step]:
        return [self._record(0, 0), self._wait(0, 1), self._wait(0, 2)]

    def _groups(self, weights: tuple[int, ...]) -> list[tuple[int, int]]:
        """Chunks that one kernel works on: a kernel has its price, and few large ones keep up with the link."""
        g = self._geometry
        depth = g.ring // g.chunk_tokens
        if depth < g.chunks:  # a chunk may travel when the one `depth` before it has been taken
            ends = [*range(max(1, depth // 2), g.chunks, max(1, depth // 2)), g.chunks]
        else:
            ends = [-(-g.chunks * sum(weights[: i + 1]) // sum(weights)) for i in range(len(weights))]
        return [(a, b) for a, b in itertools.pairwise([0, *ends]) if b > a]

    @property
    def _credits(self) -> int:
        g = self._geometry
        return int(g.ring // g.chunk_tokens < g.chunks)

    def _behind_gates(self, worker: Any, weights: tuple[int, ...], signals: int, headers: bool) -> list[cuda.Step]:
        """Gate after gate, and behind each the work on its chunks; then the caller's stream waits for the last."""
        steps = []
        for number, (first, end) in enumerate(self._groups(weights)):
            steps.append(self._launch("gate", 1, "chunk", end - 1, signals, int(headers and number == 0)))
            steps += [self._record(2 + number, 1), self._wait(2 + number, 2), worker(first, end)]
        return [*steps, self._record(1, 2), self._wait(1, 0)]

    def _spread(self, send: str, expand: str, counts: bool) -> tuple[list[cuda.Step], list[cuda.Step]]:
        """What sends, up to the gate that knows where rows lie; and what makes rows of it."""
        g = self._geometry
        if g.chunks == 1:
            gate = (
                self._launch("gate_counts", 0, "signals", g.ranges)
                if counts
                else self._launch("gate", 0, "chunk", 0, g.ranges, 1)
            )
            return [self._launch(send, 0), gate, *self._say_started(0, counts)], [
                self._launch(expand, 0, "first_chunk", 0, 1, 0, 1, 0, 1)
            ]
        first = [*self._fork(), self._launch(send, 0)]
        if counts:
            first += [self._launch("gate_counts", 1, "signals", 0), self._record(1, 1), self._wait(1, 2)]
            first += self._say_started(1, counts)

        def peers(first: int, end: int) -> cuda.Step:
            return self._launch(expand, 2, "first_chunk", first, end, 0, 0, self._credits, int(end == g.chunks))

        own = self._launch(expand, 2, "first_chunk", 0, 0, 0, g.chunks, 0, 0)
        return first, [own, *self._behind_gates(peers, SPREAD_GROUPS, g.ranges, not counts)]

    def _say_started(self, stream: int, counts: bool) -> list[cuda.Step]:
        """For who waits with `ready.start`."""
        return [cuda.Step(cuda.Step.RECORD, stream, self.ready.event)] if self.ready and counts else []

    @property
    def _passes(self) -> int:
        """Of a combine whose rows are marked. A short ring is given back only when its chunks have been sent, in one."""
        return 1 if self._geometry.chunks == 1 or self._credits else READY_PASSES

    def _sums(self, sum_: str, marked: bool) -> list[cuda.Step]:
        if not marked:
            return [self._launch(sum_, 0, "pass", 0, 0)]
        steps = []
        for number in range(self._passes):
            which = number, self._passes
            steps += [self._launch("gate_rows", 0, "pass", *which), self._launch(sum_, 0, "pass", *which)]
        return steps

    def _gather(self, sum_: str, finish: str, marked: bool = False) -> list[cuda.Step]:
        g = self._geometry
        if g.chunks == 1:
            return [
                *self._sums(sum_, marked),
                self._launch("gate", 0, "chunk", 0, g.summers, 1),
                self._launch(finish, 0, "first_chunk", 0, 1, 0, 1),
            ]

        def peers(first: int, end: int) -> cuda.Step:
            return self._launch(finish, 2, "first_chunk", first, end, self._credits, int(end == g.chunks))

        work = self._behind_gates(peers, GATHER_GROUPS, g.summers, True)
        return [*self._fork(), *self._sums(sum_, marked), *work]


__all__ = ["GATHER_GROUPS", "READY_PASSES", "SPREAD_GROUPS", "PushOrder"]
