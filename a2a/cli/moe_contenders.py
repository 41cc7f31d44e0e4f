"""The MoE layers that `a2a bench moe` and `a2a demo` time against each other, and the check that all of them must pass.

One call is a whole round: dispatch, combine, combine backward, dispatch backward, each timed by itself. The experts do
nothing in a timed round; while checking, the rows of expert e are multiplied by 1, 2 or 4, so that a row that went to the
wrong expert or came home to the wrong place shows.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import a2a
from a2a.cli.moe_gloo import GlooMoe
from a2a.measure import Contender

PARTS = ("dispatch", "combine", "combine_backward", "dispatch_backward")

# One round: (x, ids, weights, grad of y, what the experts do) -> (rows, y, grad of x, grad of weights, ns of each part)
Experts = Callable[[Tensor], Tensor]
Round = Callable[[Experts], "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What one round gave on this rank, and how long each part took."""

    rows: Tensor
    y: Tensor
    grad_x: Tensor
    grad_weights: Tensor
    ns: tuple[int, ...]


@dataclass(frozen=True)
class MoeCase:
    """A layer and its tokens. Everything random comes from the seed, so that each rank knows every other's tokens.

    Attributes:
        skew: 0 routes uniformly; with s, expert e is chosen in proportion to (e + 1) ** -s.
    """

    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype
    ranks: int
    skew: float = 0.0
    seed: int = 0

    @property
    def row_bytes(self) -> int:
        """The bytes of the rows that one rank's tokens make, one for each of their experts."""
        return self.tokens * self.top_k * self.hidden * self.dtype.itemsize

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(x_TH, topk_ids_TK, topk_weights_TK, grad_y_TH) of a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + rank)
        x = torch.randn(self.tokens, self.hidden, generator=generator).to(self.dtype)
        uniform = torch.rand(self.tokens, self.experts, generator=generator).clamp_min(1e-20)
        likelihood = -self.skew * torch.log(torch.arange(1, self.experts + 1, dtype=torch.float32))
        ids = (
            (likelihood - torch.log(-torch.log(uniform))).topk(self.top_k, dim=1).indices
        )  # Gumbel: without replacement
        weights = torch.rand(self.tokens, self.top_k, generator=generator).softmax(dim=1)
        grad = torch.randn(self.tokens, self.hidden, generator=generator).to(self.dtype)
        return x, ids, weights, grad

    def experts_of(self, rank: int) -> tuple[int, int]:
        """First expert of a rank, and the one after its last."""
        base, more = divmod(self.experts, self.ranks)
        first = rank * base + min(rank, more)
        return first, first + base + (rank < more)

    def expected_rows(self, rank: int) -> tuple[Tensor, Tensor]:
        """The expert-major rows that `rank` receives, and each one's expert."""
        first, after = self.experts_of(rank)
        everyone = [self.inputs(source) for source in range(self.ranks)]
        ids = torch.stack([inputs[1] for inputs in everyone]).flatten()  # source, token, k
        here = torch.nonzero((ids >= first) & (ids < after)).squeeze(1)
        here = here[torch.argsort(ids[here], stable=True)]
        tokens = torch.cat([inputs[0] for inputs in everyone])
        return tokens[here // self.top_k], ids[here]


def factor(experts: Tensor) -> Tensor:
    """What the rows of an expert are multiplied by in a check: 1, 2 or 4, which is exact in every dtype."""
    return torch.tensor([1.0, 2.0, 4.0])[experts % 3]


def wrong(case: MoeCase, rank: int, one_round: Round) -> int:
    """Run a round and count its wrong elements: rows exactly, sums within the bound of their roundings."""
    expected_rows, experts = case.expected_rows(rank)
    scale = factor(experts).to(case.dtype).unsqueeze(1)
    got = one_round(lambda rows: rows * scale)
    if got.rows.shape != expected_rows.shape:
        return max(expected_rows.numel(), 1)
    count = int((got.rows != expected_rows).sum())

    x, ids, weights, grad = (tensor.double() if tensor.is_floating_point() else tensor for tensor in case.inputs(rank))
    by_expert_TK = weights * factor(ids)
    epsilon = torch.finfo(case.dtype).eps
    roundings = case.top_k + case.ranks + 4
    for result, operand in ((got.y, x), (got.grad_x, grad)):
        reference = by_expert_TK.sum(1, keepdim=True) * operand
        bound = roundings * epsilon * by_expert_TK.sum(1, keepdim=True) * operand.abs()
        count += int(((result.double() - reference).abs() > bound).sum())
    dots = (x * grad).sum(1, keepdim=True) * factor(ids)
    sizes = (x * grad).abs().sum(1, keepdim=True) * factor(ids)
    bound = (roundings * epsilon + case.hidden * torch.finfo(torch.float32).eps) * sizes
    return count + int(((got.grad_weights.double() - dots).abs() > bound).sum())


def unchanged(rows: Tensor) -> Tensor:
    """Experts that do nothing."""
    return rows


def _contender(name: str, case: MoeCase, rank: int, one_round: Round, algorithm: str = "-") -> Contender:
    return Contender(
        name,
        run=lambda: one_round(unchanged).ns,
        check=lambda: wrong(case, rank, one_round),
        algorithm=algorithm,
        parts=PARTS,
    )


def a2a_contender(case: MoeCase, comm: Any) -> Contender:
    """`a2a.ExpertParallel`."""
    rank = comm.rank
    layer = a2a.ExpertParallel(
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens=case.tokens,
        dtype=case.dtype,
        comm=comm,
    )
    x, ids, weights, grad = case.inputs(rank)
    x.requires_grad_()
    weights.requires_grad_()

    def one_round(experts: Experts) -> Outcome:
        clock = [time.perf_counter_ns()]
        rows, _, routing = layer.dispatch(x, ids, weights)
        clock.append(time.perf_counter_ns())
        # Leaves between the halves, so that each half's backward can be timed by itself.
        leaf = rows.detach().requires_grad_()
        row_weights = routing.row_weights_R.detach().requires_grad_()
        processed = experts(leaf)
        begin = time.perf_counter_ns()
        y = layer.combine(processed, routing._replace(row_weights_R=row_weights))
        clock.append(time.perf_counter_ns() - begin + clock[-1])
        begin = time.perf_counter_ns()
        grad_rows, grad_row_weights = torch.autograd.grad(y, (leaf, row_weights), grad)
        clock.append(time.perf_counter_ns() - begin + clock[-1])
        begin = time.perf_counter_ns()
        grad_x, grad_weights = torch.autograd.grad(
            (rows, routing.row_weights_R), (x, weights), (grad_rows, grad_row_weights)
        )
        clock.append(time.perf_counter_ns() - begin + clock[-1])
        return Outcome(rows.detach(), y.detach(), grad_x, grad_weights, _differences(clock))

    return _contender("a2a", case, rank, one_round, algorithm=layer.plan.algorithm.name)


def gloo_contender(case: MoeCase, rank: int) -> Contender:
    """The same layer out of sort, counts and gloo's `all_to_all_single`."""
    layer = GlooMoe(case.experts)
    x, ids, weights, grad = case.inputs(rank)
    x.requires_grad_()
    weights.requires_grad_()

    def one_round(experts: Experts) -> Outcome:
        clock = [time.perf_counter_ns()]
        rows, route = layer.dispatch(x, ids)
        clock.append(time.perf_counter_ns())
        leaf = rows.detach().requires_grad_()
        processed = experts(leaf)
        begin = time.perf_counter_ns()
        y = layer.combine(processed, weights, route)
        clock.append(time.perf_counter_ns() - begin + clock[-1])
        begin = time.perf_counter_ns()
        grad_rows, grad_weights = torch.autograd.grad(y, (leaf, weights), grad)
        clock.append(time.perf_counter_ns() - begin + clock[-1])
        begin = time.perf_counter_ns()
        (grad_x,) = torch.autograd.grad(rows, x, grad_rows)
        clock.append(time.perf_counter_ns() - begin + clock[-1])
        return Outcome(rows.detach(), y.detach(), grad_x, grad_weights, _differences(clock))

    return _contender("gloo", case, rank, one_round)


def copies_contender(case: MoeCase, rank: int) -> Contender:
    """What copying this rank's rows costs with nobody to talk to: written once by dispatch, read once by combine, and back.

    A leg copies R rows in runs of T, from a tensor of T rows when writing and to one of T rows when reading, T being the
    rank's number of tokens. As in the layer, the rows and tokens of the backward are other memory than those of the forward.
    Everything is allocated and touched before.
    """
    num_rows = len(case.expected_rows(rank)[0])

    def legs() -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        rows = torch.ones(num_rows, case.hidden, dtype=case.dtype)
        source, target = (torch.ones(max(case.tokens, 1), case.hidden, dtype=case.dtype) for _ in range(2))
        pieces = torch.split(rows, max(case.tokens, 1))

        def write() -> None:
            for piece in pieces:
                piece.copy_(source[: len(piece)])

        def read() -> None:
            for piece in pieces:
                target[: len(piece)].copy_(piece)

        return rows, write, read

    rows, write, read = legs()
    grad_rows, write_grad, read_grad = legs()

    def run() -> tuple[int, ...]:
        clock = [time.perf_counter_ns()]
        for leg in (write, read, write_grad, read_grad):
            leg()
            clock.append(time.perf_counter_ns())
        return _differences(clock)

    def check() -> int:
        rows.zero_()
        grad_rows.zero_()
        write()
        write_grad()
        return int((rows != 1).sum() + (grad_rows != 1).sum())

    return Contender("copies", run, check, parts=PARTS)


def _differences(clock: list[int]) -> tuple[int, ...]:
    return tuple(later - earlier for earlier, later in itertools.pairwise(clock))
