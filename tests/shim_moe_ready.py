"""Ready flags of csrc/cuda/moe_push_*.cu on the emulated machine, with somebody's kernel (cuda_shim/make_rows.cu) between a
dispatch and its combine, on a stream of its own. See shim_moe_push.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import shim_moe_push
from a2a.algorithms.moe_base import Dispatched, Origins
from ready_maker import maker_of
from shim_host import OK_AT, FailedError, Machine, Rank, _Shape
from shim_moe_rounds import Layer, Round, compare, make_round

STREAM = 3  # of the kernel
ARRIVED = {"seen_rows": "rows", "seen_scales": "scales", "seen_weights": "weights"}


class ReadyCalls(shim_moe_push.Calls):
    """Calls with that kernel. `marks`: it marks what it makes."""

    def __init__(self, rank: Rank, layer: Layer) -> None:
        super().__init__(rank, layer)
        assert self.exchange.ready is not None
        self.ready, self.marks = self.exchange.ready, True
        self._put_epoch(-rank.random.randint(0, 3))  # it wraps around soon

    def _put_epoch(self, epoch: int) -> None:
        """As if so many dispatches were behind."""
        words = torch.full_like(self.ready.memory, epoch)
        words[2 * self.ready.words : 4 * self.ready.words] = 0
        self.rank._kept.append(words)
        self.rank._copy(self.ready.memory, words)

    def round(self, made: Round) -> dict[str, Tensor]:
        self.made_rows = self.rank.put(made.out_rows[self.rank.rank])
        got = super().round(made)
        self.join()
        for name, tensor in self.seen.items():
            got[name] = self.rank.get(tensor)
        return got

    def begun(self, made: Round, out: Dispatched, given: list[Tensor | None]) -> None:
        rank, layer, height = self.rank, self.layer, len(out.row_rank_R)
        self.held = given, out  # the kernel runs beside the dispatch: what that reads is not its memory yet
        assert self.made_rows is not None
        self.out = rank.empty(self.made_rows.shape, self.made_rows.dtype)
        self.seen = {"seen_rows": rank.empty((height, out.rows.shape[1]), out.rows.dtype),
                     "seen_weights": rank.empty(height, torch.float32)}  # fmt: skip
        if layer.rows == "wire":
            self.seen["seen_scales"] = rank.empty((height, out.scales.shape[1]), out.scales.dtype)
        tensors = {"rows": out.rows, "scales": out.scales if layer.rows == "wire" else None, "weights": out.row_weights_R,
                   "rank": out.row_rank_R, "index": out.row_index_R, "offsets": out.offsets_L, "made": self.made_rows,
                   "out": self.out, **self.seen}  # fmt: skip
        params = maker_of(self.ready.params(out), tensors, self.marks)
        self.ready.start(SimpleNamespace(cuda_stream=STREAM))  # type: ignore[arg-type]
        kernel = ctypes.cast(rank._lib.run_make_rows, ctypes.c_void_p)
        shape = _Shape((rank.random.randint(1, 4), 1, 1), (32 * rank.random.randint(1, 2), 1, 1), stream=STREAM)
        rank._lib.shim_launch(rank.rank, ctypes.byref(shape), kernel, ctypes.addressof(params), ctypes.sizeof(params))

    def combine(self, made: Round, weights: Tensor | None, origins: Origins) -> Tensor:
        if self.rank.random.random() < 0.7:
            return self.exchange.combine_marked(self.out, weights, origins)
        self.join()
        return self.exchange.combine(self.out, weights, origins)

    def join(self) -> None:
        """What follows on the rank's stream follows the kernel."""
        event = self.rank.event()
        self.rank._lib.shim_record(self.rank.rank, STREAM, event)
        self.rank._lib.shim_wait(self.rank.rank, 0, event)


def exchanges(layer: Layer, path: Path, seed: int) -> None:
    """The kernel must see the rows of each round."""
    for number, (made, answers) in enumerate(shim_moe_push.rounds_of(layer, path, seed, "ready", ReadyCalls)):
        for rank, got in enumerate(answers):
            expect_seen(made.expected[rank], got)
            compare(made, rank, got, f"seed {seed}, round {number}")


def expect_seen(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """What the kernel saw are the rows as they are described, but for compact ones that nobody has asked for."""
    valid = expected["rank"] >= 0
    for name in ARRIVED.keys() & got.keys():
        rows = expected[ARRIVED[name]]
        if "index" in expected and name != "seen_weights":
            rows = rows[expected["index"].long()] if len(rows) else rows.new_zeros(len(valid), *rows.shape[1:])
            rows = rows.clone()
            rows[~valid] = 0
            got[name].view(torch.uint8)[: len(valid)][~valid] = 0
        expected[name] = rows


class Failing:
    """A round that goes well, and one in which a rank, the culprit, does not mark what it makes ("unmarked"), or does not
    come ("missing").
    """

    def __init__(self, layer: Layer, how: str, seed: int) -> None:
        self.layer, self.how, self.culprit = layer, how, seed % layer.world_size
        rounds = (make_round(layer, seed + i) for i in itertools.count())
        self.made = next(m for m in rounds if all(len(e["rank"]) and not e["overflow"] for e in m.expected))
        self.made.calls = ("combine",)

    def program(self, rank: Rank) -> None:
        calls = ReadyCalls(rank, self.layer)
        calls.round(self.made)
        rank.synchronize()
        assert not rank.record, f"{rank.record:x}"
        if rank.rank == self.culprit and self.how == "missing":
            return
        calls.marks = rank.rank != self.culprit
        calls.combine = lambda made, weights, origins: calls.exchange.combine_marked(calls.out, weights, origins)  # type: ignore[method-assign]
        with contextlib.suppress(FailedError):
            calls.round(self.made)
        rank.synchronize()
        cause, who = rank.record >> 48, rank.record >> 16 & 0xFFFF
        assert who == self.culprit and cause in ((1,) if self.how == "missing" else (1, 11)), f"{rank.record:x}"
        assert rank.word(OK_AT, ctypes.c_uint32).value == 0, "ok is still set"


def failures(layer: Layer, path: Path, seed: int, how: str) -> None:
    Machine(path, how, seed, layer.world_size).run(Failing(layer, how, seed).program)
