"""A MoE layer to be measured, its tokens, and what is right for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SCALE_COLUMNS = {"fp8": 128, "mxfp8": 32}  # of a row, that share a scale on the wire
E4M3_ERROR = 2**-4  # of rounding to e4m3, relative to a value that is not very small
E4M3_LEAST = 1e-5  # the same, relative to the largest value that shares its scale, for those that are
MARGIN = 1.25  # of rows that a rank makes room for, over what uniform routing gives it


@dataclass(frozen=True)
class Outcome:
    """What one round gave on this rank."""

    rows: Tensor
    y: Tensor
    grad_x: Tensor
    grad_weights: Tensor
    padding_wrong: int = 0


@dataclass(frozen=True)
class MoeCase:
    """A layer and its tokens. Everything random comes from the seed, so that each rank knows every other's tokens.

    Attributes:
        skew: 0 routes uniformly; with s, expert e is chosen in proportion to (e + 1) ** -s.
        device: where the tokens are, and are drawn: other devices draw others.
        layout, alignment, max_rows, wire, rows, num_sms: see a2a.ExpertParallel.
    """

    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype
    ranks: int
    skew: float = 0.0
    seed: int = 0
    device: str = "cpu"
    layout: str = "expert"
    alignment: int = 1
    max_rows: int | None = None
    wire: str | None = None
    rows: str = "dtype"
    num_sms: int | None = None

    @property
    def row_bytes(self) -> int:
        """The bytes of the rows that one rank's tokens make, one for each of their experts."""
        return self.tokens * self.top_k * self.hidden * self.dtype.itemsize

    def layer_arguments(self) -> dict[str, Any]:
        """What a2a.ExpertParallel is made with."""
        return {
            "num_experts": self.experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "max_tokens": self.tokens,
            "dtype": self.dtype,
            "expert_alignment": self.alignment,
            "max_rows": self.max_rows,
            "layout": self.layout,
            "wire": self.wire,
            "rows": self.rows,
            "num_sms": self.num_sms,
        }

    def roomy_rows(self) -> int:
        """A `max_rows` that holds this case's rows: 1.25 times those of uniform routing, or all that could come; padded."""
        rows = self.tokens * self.top_k
        rows = self.ranks * rows if self.skew else int(MARGIN * rows)
        rows += max(after - first for first, after in map(self.experts_of, range(self.ranks))) * (self.alignment - 1)
        return -(-rows // 128) * 128

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(x_TH, topk_ids_TK, topk_weights_TK, grad_y_TH) of a rank."""
        device = self.device
        generator = torch.Generator(device).manual_seed(1_000_003 * self.seed + rank)
        x = torch.randn(self.tokens, self.hidden, generator=generator, device=device).to(self.dtype)
        uniform = torch.rand(self.tokens, self.experts, generator=generator, device=device).clamp_min(1e-20)
        numbers = torch.arange(1, self.experts + 1, dtype=torch.float32, device=device)
        likelihood = -self.skew * torch.log(numbers)
        ids = (
            (likelihood - torch.log(-torch.log(uniform))).topk(self.top_k, dim=1).indices
        )  # Gumbel: without replacement
        weights = torch.rand(self.tokens, self.top_k, generator=generator, device=device).softmax(dim=1)
        grad = torch.randn(self.tokens, self.hidden, generator=generator, device=device).to(self.dtype)
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

    def remote_bytes(self, rank: int) -> int:
        """What dispatch must send to other ranks at least, on the wire: each token once to each rank of its experts."""
        ids = self.inputs(rank)[1]
        bounds = [self.experts_of(peer) for peer in range(self.ranks)]
        sent = sum(
            int(((ids >= first) & (ids < after)).any(1).sum())
            for peer, (first, after) in enumerate(bounds)
            if peer != rank
        )
        if self.wire is None:
            return sent * self.hidden * self.dtype.itemsize
        scales = -(-self.hidden // SCALE_COLUMNS[self.wire]) * (4 if self.wire == "fp8" else 1)
        return sent * (self.hidden + scales)


def factor(experts: Tensor) -> Tensor:
    """What the rows of an expert are multiplied by in a check: 1, 2 or 4, which is exact in every dtype."""
    return (torch.ones_like(experts) << experts % 3).float()


def dequantised(case: MoeCase, rows: Tensor, scales: Tensor) -> Tensor:
    """Rows as they come with rows="wire", in the layer's dtype."""
    assert case.wire is not None
    scales_RH = scales.float().repeat_interleave(SCALE_COLUMNS[case.wire], dim=1)[:, : case.hidden]
    return (rows.float() * scales_RH).to(case.dtype)


def wrong(case: MoeCase, rank: int, got: Outcome) -> int:
    """Count the wrong elements of a round: rows exactly, sums within the bound of their roundings.

    What travels as e4m3 (rows, and the gradients of combine) may be off by that rounding.
    """
    expected, _ = case.expected_rows(rank)
    if got.rows.shape != expected.shape:
        return max(expected.numel(), 1)
    epsilon, tiny = torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps
    coarse = E4M3_ERROR if case.wire else 0.0

    def slack(operand: Tensor) -> Tensor:
        """What rounding to e4m3 may change in an element."""
        return coarse * operand.abs() + (E4M3_LEAST * operand.abs().amax(-1, keepdim=True) if case.wire else 0)

    count = got.padding_wrong
    if case.wire is None:
        count += int((got.rows != expected).sum())
    elif expected.numel():
        exact = expected.float()
        count += int(((got.rows.float() - exact).abs() > slack(exact) * (1 + epsilon) + epsilon * exact.abs()).sum())

    x, ids, weights, grad = (tensor.double() if tensor.is_floating_point() else tensor for tensor in case.inputs(rank))
    by_expert_TK = weights * factor(ids)
    roundings = case.top_k + case.ranks + 4
    total = by_expert_TK.sum(1, keepdim=True)
    for result, operand in ((got.y, x), (got.grad_x, grad)):
        bound = total * (roundings * epsilon * operand.abs() + 2 * slack(operand))
        count += int((~((result.double() - total * operand).abs() <= bound)).sum())
    dots = (x * grad).sum(1, keepdim=True) * factor(ids)
    sizes = (x * grad).abs().sum(1, keepdim=True) * factor(ids)
    bound = (roundings * epsilon + case.hidden * tiny + 3 * coarse) * sizes
    return count + int((~((got.grad_weights.double() - dots).abs() <= bound)).sum())
