"""`a2a bench --beside gemm`: what a matrix product loses to calls that run beside it, and these to the product.

A product of two bfloat16 matrices of 8192 x 8192 runs again and again on a stream of its own, alone in one sample and in the
next with the measured calls back to back on theirs. There are twice as many calls as the product alone would take time
for, so that they cover it although it is slowed; calls count only where they ended before the product did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from a2a.clocks import CudaClock, Row
from a2a.measure import TOTAL, Contender, Control, Timing, percentile

KINDS = ("gemm",)
SIZE = 8192
PRODUCTS = 8  # in a sample
ROUNDS = 9
COVER = 2.0  # calls for so many times as long as the products take alone
MOST_ROWS = 200


class Gemm:
    """The product, and the stream that it runs on."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.a, self.b, self.c = (torch.randn(SIZE, SIZE, device=device).to(torch.bfloat16) for _ in range(3))

    def run(self) -> tuple[Any, Any]:
        """Queue a sample's products; the events before and after them."""
        first, last = CudaClock.event(), CudaClock.event()
        with torch.cuda.stream(self.stream):
            first.record(self.stream)
            for _ in range(PRODUCTS):
                torch.mm(self.a, self.b, out=self.c)
            last.record(self.stream)
        return first, last


def measure(
    contenders: Sequence[Contender], timings: Mapping[str, Mapping[str, Timing]], control: Control, clock: CudaClock
) -> dict[tuple[str, str], dict[str, Any]]:
    """What goes into `case` of each contender's lines, by contender and part. Collective.

    `timings` are those of the calls alone.
    """
    found = {}
    gemm = Gemm(clock.stream.device)
    gemm.stream.wait_stream(clock.stream)
    for contender in contenders:
        for name, run in (*contender.phases.items(), (TOTAL, contender.run)):
            timing = timings[contender.name][name]
            if timing.samples_us:
                row = clock.row(run, timing.calls)
                found[contender.name, name] = _beside(gemm, row, timing.p50_us, control, clock)
    return found


def _beside(gemm: Gemm, row: Row, call_us: float, control: Control, clock: CudaClock) -> dict[str, Any]:
    samples: list[list[float]] = []
    rows = 1
    for turn in range(-1, ROUNDS):
        alone_us = _alone(gemm, clock)
        if turn < 0:  # warms up, and says how many calls are needed
            (longest,) = control.maximum([alone_us])
            rows = max(1, min(MOST_ROWS, math.ceil(COVER * PRODUCTS * longest / (call_us * row.calls))))
            continue
        samples.append([alone_us, *_together(gemm, row, rows, clock)])
    worst = control.maximum([value for sample in samples for value in sample])
    alone, beside, calls = (percentile(worst[index::3], 50) for index in range(3))
    return {
        "beside": f"gemm {SIZE}x{SIZE}x{SIZE} bfloat16",
        "gemm_us": round(alone, 2),
        "gemm_beside_us": round(beside, 2),
        "gemm_slowdown": round(beside / alone, 4),
        "beside_p50_us": round(calls, 3),
    }


def _alone(gemm: Gemm, clock: CudaClock) -> float:
    clock.align()
    clock.stream.synchronize()
    first, last = gemm.run()
    last.synchronize()
    us: float = first.elapsed_time(last) * 1e3 / PRODUCTS
    return us


def _together(gemm: Gemm, row: Row, rows: int, clock: CudaClock) -> tuple[float, float]:
    """us of a product, and of a call, while both run."""
    clock.align()
    row.begin()
    clock.stream.synchronize()
    marks = [CudaClock.event() for _ in range(rows + 1)]
    first, last = gemm.run()
    marks[0].record(clock.stream)
    for mark in marks[1:]:
        row.make()
        mark.record(clock.stream)
    marks[-1].synchronize()
    last.synchronize()
    within = [mark for mark in marks[1:] if mark.elapsed_time(last) >= 0] or marks[1:2]
    us = marks[0].elapsed_time(within[-1]) * 1e3 / (len(within) * row.calls)
    return first.elapsed_time(last) * 1e3 / PRODUCTS, us
