"""One MoE step as data: run on a rank with ExpertParallel, computed by the reference, and compared bit for bit.

The "expert" of a step is a factor, `out_rows = rows * factor[expert]`: element by element, so that its bits don't depend on
how a matrix product is blocked, and different for each expert, so that a row at the wrong expert shows. Rows that no
token fills (padding, and rows past the end under `max_rows`) go into combine as NaN and their gradients into dispatch's
backward as NaN: neither may be read.

Shape suffixes: T tokens of one rank, K experts a token, H hidden, E experts of one rank, R received rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import a2a
import moe_reference as reference
from a2a.topology import Domain, Link, Topology
from moe_reference import Layer, Tokens

Answer = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and a routing. `tokens[r % len(tokens)]` is the number of tokens of rank r.

    `ids` is "distinct" (as top-k gives them), "any" (repeated ones and -1 among them), "one" (all to the last expert)
    or "none" (all -1); `weights` is the dtype of topk_weights, None for a step without. `algorithm` is forced, or None.
    `device` is where the ranks hold their tensors; answers are compared on the CPU. `domains` are those of the group.
    """

    num_experts: int = 7
    top_k: int = 3
    hidden: int = 40
    tokens: tuple[int, ...] = (5, 9, 0, 3, 7)
    dtype: torch.dtype = torch.bfloat16
    ids: str = "any"
    weights: torch.dtype | None = torch.float32
    apply_weights: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    algorithm: str | None = None
    scale: float = 1.0
    seed: int = 0
    device: str = "cpu"
    domains: tuple[tuple[int, ...], ...] | None = None

    def inputs(self, rank: int) -> tuple[Tokens, Tensor]:
        """What rank `rank` dispatches, and the gradient that comes back to its y."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        count = self.tokens[rank % len(self.tokens)]
        x_TH, grad_TH = self.scale * torch.randn(2, count, self.hidden, generator=generator)
        x_TH[torch.rand(x_TH.shape, generator=generator) < 0.05] = -0.0
        weights_TK = torch.randn(count, self.top_k, generator=generator)
        tokens = Tokens(
            x_TH.to(self.dtype),
            self._ids(count, generator),
            None if self.weights is None else weights_TK.to(self.weights),
        )
        return tokens, grad_TH.to(self.dtype)

    def _ids(self, count: int, generator: torch.Generator) -> Tensor:
        shape = (count, self.top_k)
        if self.ids == "distinct":
            return torch.rand(count, self.num_experts, generator=generator).argsort(1)[:, : self.top_k]
        if self.ids == "any":
            return torch.randint(-1, self.num_experts, shape, generator=generator)
        return torch.full(shape, self.num_experts - 1 if self.ids == "one" else -1)

    def layer(self, world_size: int) -> Layer:
        known = {field.name for field in dataclasses.fields(Layer)}
        options = {name: value for name, value in self.options if name in known}
        return Layer(world_size, self.num_experts, self.dtype, domains=self.domains, **options)

    def expert_parallel(self, **more: Any) -> a2a.ExpertParallel:
        arguments = {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "max_tokens": max(self.tokens),
            "dtype": self.dtype,
        }
        with pytest.MonkeyPatch.context() as patch:
            if self.algorithm is not None:
                patch.setenv("A2A_ALGORITHM", f"moe={self.algorithm}")
            ep = a2a.ExpertParallel(**(arguments | dict(self.options) | more))
        assert self.algorithm in (None, ep.plan.algorithm.name)
        return ep


def with_options(case: Case, **options: Any) -> Case:
    return dataclasses.replace(case, options=(*case.options, *options.items()))


def factors(case: Case, owned: list[int]) -> Tensor:
    """The factor of each of these experts, [E, 1]."""
    return torch.tensor([[0.37 * (e % 11) - 1.9] for e in owned], dtype=case.dtype).reshape(-1, 1)


def apply_experts(rows_RH: Tensor, offsets_E: Tensor, valid_R: Tensor, factors_E: Tensor) -> Tensor:
    if not len(factors_E):
        return rows_RH * float("nan")
    experts_R = torch.bucketize(torch.arange(len(rows_RH), device=rows_RH.device), offsets_E, right=True).clamp(
        max=len(factors_E) - 1
    )
    return torch.where(valid_R[:, None], rows_RH * factors_E[experts_R], float("nan"))


class Step:
    """One step on a rank: its parts, so that tests can interleave the parts of several."""

    def __init__(self, case: Case, ep: a2a.ExpertParallel, group: dist.ProcessGroup | None = None) -> None:
        self.case, self.ep = case, ep
        rank = dist.get_rank(group)
        tokens, grad_TH = case.inputs(rank)
        self.x_TH, self.ids_TK, self.weights_TK = (None if t is None else t.to(ep.comm.device) for t in tokens)
        self.grad_TH = grad_TH.to(ep.comm.device)
        self.x_TH.requires_grad_()
        if self.weights_TK is not None:
            self.weights_TK.requires_grad_()
        self.owned = reference.experts_of_ranks(case.layer(dist.get_world_size(group)))[rank]
        self.compact = dict(case.options).get("layout") == "compact"

    def dispatch(self) -> None:
        self.rows, self.rows_per_expert, self.routing = self.ep.dispatch(self.x_TH, self.ids_TK, self.weights_TK)
        rows_RH = self.rows.index_select(0, self.routing.row_index_R) if self.compact else self.rows
        self.end = end = int(self.routing.offsets_E[-1]) if len(self.owned) else 0
        self.valid_R = valid_R = (self.routing.row_rank_R >= 0) & (
            torch.arange(len(rows_RH), device=rows_RH.device) < end
        )
        if rows_RH.requires_grad:
            if not self.compact:
                rows_RH.register_hook(lambda grad: spoil(grad, valid_R))
            self.routing.row_weights_R.retain_grad()
        self.out_RH = apply_experts(
            rows_RH, self.routing.offsets_E, valid_R, factors(self.case, self.owned).to(rows_RH.device)
        )
        if self.out_RH.requires_grad:
            self.out_RH.retain_grad()

    def combine(self) -> None:
        self.y_TH = self.ep.combine(self.out_RH, self.routing, self.case.apply_weights)

    def backward(self) -> None:
        self.y_TH.backward(self.grad_TH)

    def answer(self) -> Answer:
        """Every tensor of the step, without rows past the end."""
        routing, end = self.routing, self.end
        tokens = int(routing.row_index_R[self.valid_R].max()) + 1 if self.compact and bool(self.valid_R.any()) else 0
        answer = {
            "rows": self.rows.detach()[: tokens if self.compact else end],
            "rows_per_expert": self.rows_per_expert,
            "offsets_E": routing.offsets_E,
            "row_weights_R": torch.where(self.valid_R, routing.row_weights_R.detach(), 0.0)[:end],
            "row_rank_R": routing.row_rank_R[:end],
            "row_token_R": routing.row_token_R[:end],
            "row_k_R": routing.row_k_R[:end],
            "overflow": routing.overflow,
            "topk_ids_TK": routing.topk_ids_TK,
            "row_index_R": routing.row_index_R[:end],
            "y": self.y_TH.detach(),
            "grad_out": grad_or_zeros(self.out_RH)[:end],
            "grad_row_weights_R": grad_or_zeros(routing.row_weights_R)[:end],
            "grad_x": grad_or_zeros(self.x_TH),
            "grad_weights": torch.zeros(0) if self.weights_TK is None else grad_or_zeros(self.weights_TK),
            "num_rows": torch.tensor(len(self.out_RH)),
        }
        return {name: tensor.cpu() for name, tensor in answer.items()}


def full_step(step: Step) -> Answer:
    step.dispatch()
    step.combine()
    step.backward()
    return step.answer()


def run_step(case: Case) -> Answer:
    """On a rank: forward and backward of one step; every tensor that the step makes."""
    if case.device == "cuda":
        return run_steps_on_gpus([case])[0]
    with contextlib.closing(case.expert_parallel()) as ep:
        return full_step(Step(case, ep))


def topology_of(domains: Sequence[Sequence[int]]) -> Topology:
    """CPU hosts with these ranks; the links between them are slow."""
    hosts = tuple(Domain(tuple(ranks), "cpu_host", f"host{n}") for n, ranks in enumerate(domains))
    return Topology(hosts, Link(1.0, 5.0), Link(50.0, 0.1))


def run_steps_in_domains(cases: list[Case]) -> list[Answer]:
    """On a rank: these steps, one after the other on one communicator of their domains, which are all the same."""
    answers = []
    with a2a.communicator(topology=topology_of(cases[0].domains or ()), timeout=20.0) as comm:
        for case in cases:
            with contextlib.closing(case.expert_parallel(comm=comm)) as ep:
                answers.append(full_step(Step(case, ep)))
        comm.check()
    return answers


def assert_steps_in_domains(world: Any, cases: list[Case]) -> None:
    """Every tensor of every step has the bits of the reference on every rank."""
    answers = world.run(run_steps_in_domains, cases=cases)
    for number, case in enumerate(cases):
        assert_answers([of_rank[number] for of_rank in answers], expected_step(case, world.size))


def run_steps_on_gpus(cases: list[Case]) -> list[Answer]:
    """On a rank, which takes GPU (rank mod their number): these steps, one after the other on one communicator."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    answers = []
    with a2a.communicator(device="cuda", timeout=20.0) as comm:
        for case in cases:
            with contextlib.closing(case.expert_parallel(comm=comm)) as ep:
                answers.append(full_step(Step(case, ep)))
        comm.check()
    return answers


def spoil(grad_RH: Tensor | None, valid_R: Tensor) -> Tensor | None:
    return None if grad_RH is None else torch.where(valid_R[:, None], grad_RH, float("nan"))


def grad_or_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def expected_step(case: Case, world_size: int) -> list[Answer]:
    """What `run_step` must return on every rank."""
    layer = case.layer(world_size)
    tokens, grads_y = zip(*(case.inputs(rank) for rank in range(world_size)), strict=True)
    owned = reference.experts_of_ranks(layer)
    received = reference.dispatch(layer, tokens)
    unique = reference.compact(layer, tokens, received) if dict(case.options).get("layout") == "compact" else None
    leaves = [got.rows for got in unique] if unique else [got.rows_RH.clone() for got in received]
    outs = []
    for rank, (leaf, got) in enumerate(zip(leaves, received, strict=True)):
        leaf.requires_grad_()
        rows_RH = leaf.index_select(0, unique[rank].row_index_R) if unique else leaf
        valid_R = got.origin_column("source") >= 0
        outs.append(apply_experts(rows_RH, got.offsets_E, valid_R, factors(case, owned[rank])))
    detached = [out.detach() for out in outs]
    ys = reference.combine(layer, tokens, received, detached, case.apply_weights)
    grads_out = reference.combine_backward(layer, received, detached, grads_y, case.apply_weights)
    grads_rows = [torch.autograd.grad(o, leaf, g)[0] for o, leaf, (g, _) in zip(outs, leaves, grads_out, strict=True)]
    grads_R = [g for _, g in grads_out]
    if unique:
        grads_x = reference.compact_backward(layer, tokens, unique, grads_rows)
    else:
        grads_x = reference.dispatch_backward(layer, tokens, received, grads_rows)
    grads_weights = reference.weights_backward(tokens, received, grads_R)
    answers = []
    for rank, got in enumerate(received):
        num_rows = len(got.origins) if layer.max_rows is None else layer.max_rows
        grad_weights = grads_weights[rank]
        answers.append(
            {
                "rows": leaves[rank].detach(),
                "rows_per_expert": got.rows_per_expert,
                "offsets_E": got.offsets_E,
                "row_weights_R": got.row_weights_R,
                "row_rank_R": got.origin_column("source"),
                "row_token_R": got.origin_column("token"),
                "row_k_R": got.origin_column("k"),
                "overflow": torch.tensor([got.overflow], dtype=torch.int32),
                "topk_ids_TK": tokens[rank].topk_ids_TK.int(),
                "row_index_R": unique[rank].row_index_R if unique else torch.zeros(0, dtype=torch.int32),
                "y": ys[rank],
                "grad_out": grads_out[rank][0],
                "grad_row_weights_R": grads_R[rank],
                "grad_x": grads_x[rank],
                "grad_weights": torch.zeros(0) if grad_weights is None else grad_weights,
                "num_rows": torch.tensor(num_rows),
            }
        )
    return answers


def assert_step(world: Any, case: Case) -> None:
    """Run `case` on the ranks of `world`; every tensor of every rank has the bits of the reference."""
    assert_answers(world.run(run_step, case=case), expected_step(case, world.size))


def assert_answers(answers: list[Answer], expected: list[Answer]) -> None:
    for rank, (answer, expectation) in enumerate(zip(answers, expected, strict=True)):
        assert answer.keys() == expectation.keys()
        for name in expectation:
            assert_same_bits(answer[name], expectation[name], f"{name} of rank {rank}")


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal dtype, shape and bits: signed zeros differ, and so do NaNs with different payloads."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    different = (_bits(actual) != _bits(expected)).any(-1)
    if different.any():
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {actual.numel()} elements differ, "
            f"the first at {first}: {actual[first]!r}, expected {expected[first]!r}"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)
