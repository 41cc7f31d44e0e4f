"""csrc/cuda/moe_push_*.cu on the emulated machine, behind their own host code: a2a/algorithms/moe_push.py as it is.

A layer is compiled small and gets rounds of random calls. Every tensor that a rank gets is compared with moe_reference, bit for
bit. `python tests/shim_moe_push.py LAYER SEEDS` runs one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_reference as reference
from a2a.algorithms import moe_push
from a2a.algorithms.moe_base import MoeSpec, Origins
from moe_cases import assert_same_bits
from moe_reference import Dispatched, Tokens
from shim_build import Replacement, library
from shim_host import CLOSED_AT, OK_AT, FailedError, FakeCuda, FakeTorch, Machine, Rank

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SOURCES = ("moe_push_send", "moe_push_expand", "moe_push_sum")
TEAM = 32
SMALL = (
    *(Replacement(f"{name}.cu", "kDeep = 8", "kDeep = 2") for name in SOURCES[:2]),
    Replacement("moe_push_sum.cu", "kDeep = 4", "kDeep = 1"),
    Replacement("moe_push_sum.cu", "kThreads = 128", "kThreads = 64"),
)


@dataclass(frozen=True)
class Layer:
    """An ExpertParallel, how many ranks it has, and how its calls are cut."""

    world_size: int = 2
    num_experts: int = 5
    top_k: int = 3
    hidden: int = 40
    max_tokens: int = 24
    dtype: torch.dtype = BF16
    alignment: int = 1
    max_rows: int | None = None
    overflow: str = "raise"
    wire: str | None = None
    rows: str = "dtype"
    layout: str = "expert"
    scattered: bool = False  # experts, over the ranks
    wire_combine: str | None = None
    senders: int = 1
    summers: int = 3
    chunks: int = 1
    ring: int | None = None  # tokens of a range that a ring holds; None: all
    planned_apart: bool = False  # also requests that are small enough for each range to plan alone
    scale: float = 1.0
    rounds: int = 3

    def replacements(self) -> tuple[Replacement, ...]:
        apart = Replacement("moe_push_send.cu", "kTopK <= 16 * kTeam", "kTopK < kTeam / 4")
        return (*SMALL, apart) if self.planned_apart else SMALL

    def spec(self) -> MoeSpec:
        owned = reference.experts_of_ranks(reference.Layer(self.world_size, self.num_experts, self.dtype))
        owners = [r for r, experts in enumerate(owned) for _ in experts]
        if self.scattered:
            owners = [e * 5 % self.world_size for e in range(self.num_experts)]
        return MoeSpec(self.num_experts, self.top_k, self.hidden, self.max_tokens, self.dtype, self.alignment, self.max_rows,
                       self.overflow, self.wire, self.rows, self.layout, tuple(owners), self.wire_combine)  # fmt: skip

    def compact_rows(self) -> int:
        assert self.max_rows is not None
        return min(self.max_rows, self.world_size * self.max_tokens)

    def reference(self) -> reference.Layer:
        return reference.Layer(self.world_size, self.num_experts, self.dtype, self.alignment, self.max_rows, self.wire,
                               self.wire_combine, self.spec().expert_to_rank)  # fmt: skip


# ---- the op, made small


def set_up(layer: Layer) -> dict[str, int]:
    """Have a2a/algorithms/moe_push.py run on the machine, with this layer's cuts. Returns what its kernels are compiled with."""
    m: Any = moe_push
    m.torch, m._TEAM, m._SENDERS, m._TILE_BYTES = FakeTorch(sms=2), TEAM, layer.senders, (64, 128)
    m._PIECE_BYTES, m._SUM_THREADS = 512, 64
    spec, world = layer.spec(), layer.world_size
    m._CHUNK_BYTES = max(1, spec.max_tokens * spec.row_bytes // layer.chunks)
    m._STAGING_BYTES = _STAGING_BYTES
    cut = _GEOMETRY_OF(spec, world)
    if layer.ring is not None:
        m._STAGING_BYTES = 2 * cut.ranges * layer.ring * (cut.slot_bytes + cut.meta_bytes)
    m.Geometry.of = staticmethod(lambda s, w: dataclasses.replace(_GEOMETRY_OF(s, w), summers=layer.summers))
    m.cuda = asks = _Asks()
    exchange: Any = object.__new__(moe_push.PushExchange)
    exchange._spec, exchange._geometry, exchange._comm = (
        spec,
        m.Geometry.of(spec, world),
        SimpleNamespace(world_size=world),
    )
    exchange._transport = SimpleNamespace(place=SimpleNamespace(device=None, arch="", context=0, host=0))
    try:
        exchange._load(0)
    except _Asked:
        pass
    m.cuda = FakeCuda(asks.defines)
    return asks.defines


_GEOMETRY_OF, _STAGING_BYTES = moe_push.Geometry.of, moe_push._STAGING_BYTES


class _Asked(Exception):
    pass


class _Asks:
    """Notes the defines of the modules that are asked for."""

    def __init__(self) -> None:
        self.defines: dict[str, int] = {}

    def modules(self, names: list[str], arch: str, defines: tuple[tuple[str, int], ...], context: int) -> None:
        assert tuple(names) == SOURCES
        self.defines = dict(defines)
        raise _Asked


# ---- rounds


@dataclass
class Round:
    """What all ranks bring to the four calls, and what each must get: `expected[rank][name]`."""

    tokens: list[Tokens]
    payloads: list[tuple[Tensor, Tensor | None]]  # x, quantised before or not
    weighted: bool
    variant: str  # of combine's backward
    out_rows: list[Tensor]
    grads_y: list[Tensor]
    grads_rows: list[Tensor]
    grads_weights: list[Tensor]
    calls: tuple[str, ...]
    lengths: list[int]  # rows that are specified
    expected: list[dict[str, Tensor]]


def draw_ids(r: random.Random, g: torch.Generator, count: int, layer: Layer) -> Tensor:
    shape, experts = (count, layer.top_k), layer.num_experts
    how = r.choice(["any", "any", "distinct", "one", "few", "none"])
    ids = torch.randint(-1, experts, shape, generator=g)
    if how == "distinct" and experts >= layer.top_k:
        ids = torch.rand(count, experts, generator=g).argsort(1)[:, : layer.top_k]
    elif how in ("one", "none"):
        ids = torch.full(shape, r.randrange(experts) if how == "one" else -1)
    elif how == "few":
        ids[torch.rand(shape, generator=g) < 0.8] = -1
    return ids.to(r.choice([torch.int32, torch.int64]))


def draw_tokens(
    r: random.Random, g: torch.Generator, layer: Layer, weights: bool, ids: torch.dtype
) -> tuple[Tokens, Tensor]:
    count = r.choice(
        [layer.max_tokens, layer.max_tokens, r.randint(0, layer.max_tokens), r.randint(0, layer.max_tokens), 0]
    )
    x, grad = layer.scale * torch.randn(2, count, layer.hidden, generator=g)
    x[torch.rand(x.shape, generator=g) < 0.05] = -0.0
    given = torch.randn(count, layer.top_k, generator=g) if weights else None
    return Tokens(x.to(layer.dtype), draw_ids(r, g, count, layer).to(ids), given), grad.to(layer.dtype)


def make_round(layer: Layer, seed: int) -> Round:
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    of, weights, ids = layer.reference(), r.random() < 0.7, r.choice([torch.int32, torch.int64])
    tokens, grads_y = (
        list(v) for v in zip(*(draw_tokens(r, g, layer, weights, ids) for _ in range(layer.world_size)), strict=True)
    )
    payloads: list[tuple[Tensor, Tensor | None]] = [(t.x_TH, None) for t in tokens]
    if layer.wire and r.random() < 0.3:
        payloads = [reference.quantise(t.x_TH, layer.wire) for t in tokens]
    received = reference.dispatch(of, tokens)
    compact = compacted(layer, tokens) if layer.layout == "compact" else None
    weighted = r.random() < 0.6
    variant = r.choice(["dots", "weighted", "plain"])
    out_rows, grads_rows, grads_weights, lengths = [], [], [], []
    for rank, got in enumerate(received):
        height = len(got.origins) if layer.max_rows is None else layer.max_rows
        lengths.append(len(got.origins))
        rows = torch.full((height, layer.hidden), float("nan"))
        valid = got.origin_column("source") >= 0
        n = int(valid.sum())
        rows[: len(valid)][valid] = torch.randn(n, layer.hidden, generator=g)
        out_rows.append(rows.to(layer.dtype))
        floats = torch.full((height,), float("nan"))
        floats[: len(valid)][valid] = torch.randn(n, generator=g)
        grads_weights.append(floats)
        if compact:
            height = len(compact[rank].rows) if layer.max_rows is None else layer.compact_rows()
            of_tokens = torch.full((height, layer.hidden), float("nan"))
            of_tokens[: len(compact[rank].rows)] = torch.randn(len(compact[rank].rows), layer.hidden, generator=g)
            grads_rows.append(of_tokens.to(layer.dtype))
        else:
            other = rows.clone()
            other[: len(valid)][valid] = torch.randn(n, layer.hidden, generator=g)
            grads_rows.append(other.to(layer.dtype))
    expected = [dispatched(layer, tokens, got, compact and compact[rank]) for rank, got in enumerate(received)]
    calls = r.choice([("combine",), ("combine", "combine_backward", "dispatch_backward"), ("combine_backward", "dispatch_backward"),
                      ("combine", "combine_backward", "dispatch_backward"), ("dispatch_backward", "combine")])  # fmt: skip
    made = Round(
        tokens, payloads, weighted, variant, out_rows, grads_y, grads_rows, grads_weights, calls, lengths, expected
    )
    _expect_calls(layer, made, received, compact)
    return made


def compacted(layer: Layer, tokens: list[Tokens]) -> list[reference.Compact]:
    """Tokens are numbered with those whose rows were dropped; as many as `max_rows` has room for are there."""
    of = dataclasses.replace(layer.reference(), max_rows=None)
    found = reference.compact(of, tokens, reference.dispatch(of, tokens))
    if layer.max_rows is None:
        return found
    n = layer.compact_rows()
    return [reference.Compact(c.rows[:n], c.row_index_R, c.origins[:n]) for c in found]


def dispatched(
    layer: Layer, tokens: list[Tokens], got: Dispatched, compact: reference.Compact | None
) -> dict[str, Tensor]:
    expected = {
        "rows": got.rows_RH if compact is None else compact.rows,
        "rows_per_expert": got.rows_per_expert,
        "offsets": got.offsets_E,
        "weights": got.row_weights_R,
        "rank": got.origin_column("source"),
        "token": got.origin_column("token"),
        "k": got.origin_column("k"),
        "overflow": torch.tensor([got.overflow], dtype=torch.int32),
    }
    if compact is not None:
        expected["index"] = compact.row_index_R[: len(got.origins)]
    if layer.rows == "wire":
        assert layer.wire is not None
        keys = [None if o is None else (o.source, o.token) for o in got.origins] if compact is None else compact.origins
        quantised = [reference.quantise(t.x_TH, layer.wire) for t in tokens]
        q, scales = reference.quantise(torch.zeros(len(keys), layer.hidden, dtype=layer.dtype), layer.wire)
        q, scales = q.view(torch.uint8), scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for row, key in enumerate(keys):
            if key is not None:
                q[row] = quantised[key[0]][0].view(torch.uint8)[key[1]]
                scales[row] = quantised[key[0]][1].contiguous().view(torch.uint8)[key[1]]
        expected |= {"rows": q, "scales": scales}
    return expected


def _expect_calls(
    layer: Layer, made: Round, received: list[Dispatched], compact: list[reference.Compact] | None
) -> None:
    of = layer.reference()
    outs, grads = (
        [rows[:n] for rows, n in zip(of_ranks, made.lengths, strict=True)]
        for of_ranks in (made.out_rows, made.grads_rows)
    )
    ys = reference.combine(of, made.tokens, received, outs, made.weighted)
    backward = reference.combine_backward(of, received, outs, made.grads_y, made.variant != "plain")
    if compact:
        grads = [rows[: len(c.rows)] for rows, c in zip(made.grads_rows, compact, strict=True)]
        grads_x = reference.compact_backward(of, made.tokens, compact, grads)
    else:
        grads_x = reference.dispatch_backward(of, made.tokens, received, grads)
    with_weights = [Tokens(t.x_TH, t.topk_ids_TK, torch.zeros(t.topk_ids_TK.shape)) for t in made.tokens]
    grads_weights = reference.weights_backward(with_weights, received, made.grads_weights)
    for rank, expected in enumerate(made.expected):
        grad_rows, grad_weights = backward[rank]
        n = made.lengths[rank]
        expected |= {
            "y": ys[rank],
            "grad_rows": grad_rows[:n],
            "grad_weights": grad_weights[:n] if made.variant == "dots" else torch.zeros(n),
            "grad_x": grads_x[rank],
            "grad_topk_weights": grads_weights[rank],
        }  # fmt: skip


# ---- on a rank


class Calls:
    """A rank's calls: `got` has what came of each round, filled when the program has ended."""

    def __init__(self, rank: Rank, layer: Layer) -> None:
        self.rank, self.layer = rank, layer
        self.exchange = moe_push.PushExchange(rank, layer.spec())  # type: ignore[arg-type]
        rank.whole_blocks = frozenset(
            call.function
            for name, (call, _) in self.exchange._calls.items()
            if name.startswith(("send", "sum", "finish"))
        )

    def round(self, made: Round) -> dict[str, Tensor]:
        rank, me = self.rank, self.rank.rank
        tokens, (x, scales) = made.tokens[me], made.payloads[me]
        out = self.exchange.dispatch(
            rank.put(x), rank.put(scales), rank.put(tokens.topk_ids_TK), rank.put(tokens.topk_weights_TK)
        )
        origins = Origins(out.row_rank_R, out.row_token_R, out.row_k_R, out.row_index_R, out.topk_ids_TK, out.plan)
        weights = out.row_weights_R
        answers = {"rows": out.rows, "rows_per_expert": out.rows_per_expert_L, "offsets": out.offsets_L,
                   "weights": weights, "rank": out.row_rank_R, "token": out.row_token_R, "k": out.row_k_R,
                   "overflow": out.overflow, "index": out.row_index_R, "scales": out.scales}  # fmt: skip
        got = {name: rank.get(tensor) for name, tensor in answers.items() if name in made.expected[me]}
        self.routing = origins, weights
        del out, answers, origins, weights
        for call in made.calls:
            self.call(made, call, got)
        return got

    def call(self, made: Round, call: str, got: dict[str, Tensor]) -> None:
        """One of those that follow a dispatch."""
        rank, me, (origins, weights) = self.rank, self.rank.rank, self.routing
        if call == "combine":
            y = self.exchange.combine(rank.put(made.out_rows[me]), weights if made.weighted else None, origins)
            got["y"] = rank.get(y)
        elif call == "combine_backward":
            rows = rank.put(made.out_rows[me]) if made.variant == "dots" else None
            used = None if made.variant == "plain" else weights
            of_rows, of_weights = self.exchange.combine_backward(rank.put(made.grads_y[me]), rows, used, origins)
            got["grad_rows"], got["grad_weights"] = rank.get(of_rows), rank.get(of_weights)
        else:
            grads, of_rows = rank.put(made.grads_rows[me]), rank.put(made.grads_weights[me])
            of_x, of_weights = self.exchange.dispatch_backward(grads, of_rows, origins)
            got["grad_x"], got["grad_topk_weights"] = rank.get(of_x), rank.get(of_weights)


def compare(made: Round, rank: int, got: dict[str, Tensor], what: str) -> None:
    for name, tensor in got.items():
        expected = made.expected[rank][name]
        tensor = tensor.view(torch.uint8) if expected.dtype == torch.uint8 else tensor
        if name not in ("y", "grad_x", "grad_topk_weights"):
            tensor = tensor[: len(expected)]  # what lies behind is unspecified
        assert_same_bits(tensor, expected, f"{what}: {name} of rank {rank}")


def exchanges(layer: Layer, path: Path, seed: int) -> None:
    """Rounds one after the other, without a wait between them unless the layer needs it."""
    rounds = [make_round(layer, 1000 * seed + i) for i in range(layer.rounds)]
    answers: list[list[dict[str, Tensor]]] = [[] for _ in range(layer.world_size)]
    machine = Machine(path, "exchanges", seed, layer.world_size)

    def program(rank: Rank) -> None:
        calls = Calls(rank, layer)
        for made in rounds:
            if rank.random.random() < 0.3:
                rank.be_late(rank.random.randrange(3000))
            answers[rank.rank].append(calls.round(made))
        rank.synchronize()
        assert not rank.record, f"rank {rank.rank}: a failure was recorded: {rank.record:x}"

    machine.run(program)
    for number, made in enumerate(rounds):
        for rank in range(layer.world_size):
            compare(made, rank, answers[rank][number], f"seed {seed}, round {number}")


# ---- failures


OPS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
CAUSES = {"absent": 1, "closed": 3, "mismatch": 4, "overflow": 6, "refused": 8, "out_of_range": 10}


class Failing:
    """A call in which one rank, the culprit, does otherwise; then one more of everybody."""

    def __init__(self, layer: Layer, how: str, seed: int) -> None:
        r = random.Random(seed)
        self.layer, self.how, self.culprit = layer, how, r.randrange(layer.world_size)
        self.op = "dispatch" if how in ("overflow", "out_of_range") else r.choice(OPS)
        self.made = dataclasses.replace(make_round(layer, seed), calls=("combine",), variant="dots")

    def program(self, rank: Rank) -> None:
        calls = Calls(rank, self.layer)
        made = self.made
        calls.round(made)  # all goes well
        rank.synchronize()
        assert not rank.record, f"{rank.record:x}"
        if rank.random.random() < 0.5:
            rank.be_late(rank.random.randrange(5000))
        if rank.rank == self.culprit and not self.otherwise(rank, calls):
            return
        with contextlib.suppress(FailedError):
            self.call(calls, self.op)
        rank.synchronize()
        record = rank.record
        self.check(rank, record)
        with contextlib.suppress(FailedError):
            self.call(calls, "combine")
        rank.synchronize()
        assert rank.record == record, "the record has changed"

    def otherwise(self, rank: Rank, calls: Calls) -> bool:
        """What the culprit does; whether it goes on with the call."""
        if self.how == "closed":
            for peer in range(rank.world_size):
                rank.store(peer, CLOSED_AT + 8 * rank.rank, 1)
        elif self.how == "refused":
            calls.exchange.refuse(self.op, "")
        elif self.how == "mismatch":
            calls.exchange._asks[self.op] = ("something else", "something else")
        return self.how in ("mismatch", "overflow", "out_of_range")

    def call(self, calls: Calls, op: str) -> None:
        rank, me, made = calls.rank, calls.rank.rank, self.made
        if op == "dispatch":
            tokens, ids = made.tokens[me], made.tokens[me].topk_ids_TK
            x, scales = made.payloads[me]
            if self.how == "out_of_range" and me == self.culprit:
                ids, x = (
                    torch.full((1, self.layer.top_k), self.layer.num_experts),
                    torch.zeros(1, self.layer.hidden, dtype=x.dtype),
                )
                tokens = Tokens(x, ids)
            elif self.how == "overflow":  # all tokens to one expert of the culprit's
                expert = self.layer.spec().expert_to_rank.index(self.culprit)
                x = torch.zeros(self.layer.max_tokens, self.layer.hidden, dtype=x.dtype)
                tokens = Tokens(x, torch.full((self.layer.max_tokens, self.layer.top_k), expert))
                ids = tokens.topk_ids_TK
            calls.exchange.dispatch(rank.put(x), rank.put(scales), rank.put(ids), rank.put(tokens.topk_weights_TK))  # type: ignore[arg-type]
        else:
            calls.call(dataclasses.replace(made, calls=(op,)), op, {})

    def check(self, rank: Rank, record: int) -> None:
        cause, by, who = record >> 48, record >> 32 & 0xFFFF, record >> 16 & 0xFFFF
        told = f"rank {rank.rank} was told cause {cause} of rank {who} by rank {by}; the culprit is {self.culprit}: {self.how}"
        mutual = self.how == "mismatch" and by == self.culprit
        assert cause == CAUSES[self.how] and (who == self.culprit or mutual), told
        assert rank.word(OK_AT, ctypes.c_uint32).value == 0, "ok is still set"


def failures(layer: Layer, path: Path, seed: int, how: str) -> None:
    machine = Machine(path, how, seed, layer.world_size)
    machine.run(Failing(layer, how, seed).program)


LAYERS = {
    "one_chunk": Layer(),
    "chunks": Layer(world_size=3, chunks=4, max_tokens=30, planned_apart=True),
    "one_rank": Layer(world_size=1, chunks=3, max_tokens=20, alignment=4),
    "eight_ranks": Layer(world_size=8, max_tokens=9, num_experts=17, top_k=4, hidden=16, summers=1, rounds=2),
    "short_ring": Layer(world_size=3, chunks=5, ring=2, max_tokens=14, num_experts=4, top_k=2, hidden=24, rounds=2),
    "ring_of_a_chunk": Layer(world_size=2, chunks=6, ring=5, max_tokens=48, hidden=16, max_rows=400, alignment=8),
    "ranges": Layer(
        world_size=2, senders=2, chunks=3, max_tokens=50, planned_apart=True, max_rows=200, overflow="drop"
    ),
    "many_ranges": Layer(world_size=2, senders=16, max_tokens=60, hidden=16, top_k=2, rounds=2, planned_apart=True),
    "pieces": Layer(world_size=3, hidden=520, max_tokens=7, max_rows=80, dtype=F16),
    "wide": Layer(
        world_size=3, hidden=264, max_tokens=9, wire_combine="float32", max_rows=25, overflow="drop", chunks=3
    ),
    "float32": Layer(world_size=2, hidden=260, max_tokens=12, dtype=F32, scattered=True, chunks=2),
    "compact": Layer(world_size=3, layout="compact", max_tokens=20, alignment=4, planned_apart=True),
    "compact_rows": Layer(world_size=2, layout="compact", max_rows=60, overflow="drop", chunks=3, num_experts=12),
    "top_1": Layer(world_size=3, top_k=1, num_experts=2, chunks=2, max_rows=100),
    "top_32": Layer(world_size=3, top_k=32, num_experts=40, max_tokens=8, hidden=8, rounds=2),
    "top_8": Layer(world_size=2, top_k=8, num_experts=3, max_tokens=20, hidden=72, chunks=7, planned_apart=True),
    "one_expert": Layer(world_size=3, num_experts=1, top_k=2, chunks=2, alignment=16),
    "fp8": Layer(world_size=2, wire="fp8", hidden=264, max_tokens=10, max_rows=200),
    "fp8_rows": Layer(
        world_size=3, wire="fp8", rows="wire", hidden=136, max_tokens=10, alignment=4, dtype=F16, scale=100.0
    ),
    "mxfp8": Layer(world_size=3, wire="mxfp8", hidden=72, max_tokens=20, chunks=3, dtype=F16, scale=0.01),
    "mxfp8_rows": Layer(
        world_size=2, wire="mxfp8", rows="wire", layout="compact", hidden=264, dtype=F32, max_tokens=12
    ),
}


def main(name: str, first: int, count: int, *scenarios: str) -> None:
    layer = LAYERS[name]
    defines = set_up(layer)
    folder = Path(tempfile.gettempdir()) / "shim"
    folder.mkdir(exist_ok=True)
    path = library(folder, SOURCES, defines, layer.replacements())
    for seed in range(first, first + count):
        for scenario in scenarios or ["exchanges"]:
            if scenario == "exchanges":
                exchanges(layer, path, seed)
            else:
                failures(layer, path, seed, scenario)
    print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
