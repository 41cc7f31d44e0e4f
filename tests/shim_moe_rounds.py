"""Random rounds of ExpertParallel's calls, and what every rank must get: see shim_moe_push.py."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch
from torch import Tensor

import moe_reference as reference
from a2a.algorithms.moe_base import MoeSpec
from moe_cases import assert_same_bits
from moe_reference import Dispatched, Tokens

OPS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


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
    team: int = 32  # threads of a sender's half
    chunks: int = 1
    ring: int | None = None  # tokens of a range that a ring holds; None: all
    planned_apart: bool = False  # also requests that are small enough for each range to plan alone
    scale: float = 1.0
    rounds: int = 3
    only_dispatch: bool = False
    ready_rows: int | None = None

    def spec(self) -> MoeSpec:
        owned = reference.experts_of_ranks(reference.Layer(self.world_size, self.num_experts, self.dtype))
        owners = [r for r, experts in enumerate(owned) for _ in experts]
        if self.scattered:
            owners = [e * 5 % self.world_size for e in range(self.num_experts)]
        return MoeSpec(self.num_experts, self.top_k, self.hidden, self.max_tokens, self.dtype, self.alignment, self.max_rows,
                       self.overflow, self.wire, self.rows, self.layout, tuple(owners), self.wire_combine, None,
                       self.ready_rows)  # fmt: skip

    def compact_rows(self) -> int:
        assert self.max_rows is not None
        return min(self.max_rows, self.world_size * self.max_tokens)

    def reference(self) -> reference.Layer:
        return reference.Layer(self.world_size, self.num_experts, self.dtype, self.alignment, self.max_rows, self.wire,
                               self.wire_combine, self.spec().expert_to_rank)  # fmt: skip


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
    calls = (
        ()
        if layer.only_dispatch
        else r.choice([(), ("combine",), OPS[1:], OPS[1:], OPS[2:], ("dispatch_backward", "combine")])
    )
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


def compare(made: Round, rank: int, got: dict[str, Tensor], what: str) -> None:
    for name, tensor in got.items():
        expected = made.expected[rank][name]
        tensor = tensor.view(torch.uint8) if expected.dtype == torch.uint8 else tensor
        if name not in ("y", "grad_x", "grad_topk_weights"):
            tensor = tensor[: len(expected)]  # what lies behind is unspecified
        assert_same_bits(tensor, expected, f"{what}: {name} of rank {rank}")
