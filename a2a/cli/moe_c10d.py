"""The MoE layer that a2a is compared with: sort, counts and gloo's or NCCL's all-to-all, as a careful user writes it.

Every (token, expert) pair travels by itself. Permutations are gathers in both directions (torch's own backward of a gather
is a scatter-add, which is several times slower), counts are exchanged once and serve forward and backward, and one sort on
each side makes the rows expert-major: (expert, source rank, token, k), the order that `ExpertParallel` has too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """Where the rows of one dispatch went, for the way back."""

    top_k: int
    sent_order: Tensor  # row of the send buffer -> position in [T, K]
    sent_inverse: Tensor
    expert_order: Tensor  # expert-major row -> row of the receive buffer
    expert_inverse: Tensor
    send_splits: list[int]
    receive_splits: list[int]
    rows_per_expert: Tensor


class C10dMoe:
    """Dispatch and combine over a process group; experts are owned as `a2a.ExpertParallel` has them."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        base, more = divmod(num_experts, self.world_size)
        self.experts = [base + (rank < more) for rank in range(self.world_size)]  # the first ranks own one more

    def dispatch(self, x_TH: Tensor, topk_ids_TK: Tensor) -> tuple[Tensor, Route]:
        """Send every token to the ranks of its experts; returns expert-major rows and the way back."""
        top_k = topk_ids_TK.shape[1]
        ids = topk_ids_TK.reshape(-1)
        order = torch.argsort(ids, stable=True)
        # Not bincount, which makes the host wait for a GPU.
        counts = torch.zeros(sum(self.experts), dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, ids, torch.ones_like(ids))
        theirs = counts.new_empty(self.world_size * self.experts[self.rank])
        mine = [self.experts[self.rank]] * self.world_size
        dist.all_to_all_single(theirs, counts, mine, self.experts, group=self.group)
        counts_RE = theirs.view(self.world_size, -1)
        sums = torch.stack([*(piece.sum() for piece in torch.split(counts, self.experts)), *counts_RE.sum(1)])
        splits = sums.tolist()  # the only wait of the host
        send_splits, receive_splits = splits[: self.world_size], splits[self.world_size :]
        local = torch.arange(self.experts[self.rank], device=ids.device).repeat(self.world_size)
        of_row = torch.repeat_interleave(local, theirs, output_size=sum(receive_splits))
        expert_order = torch.argsort(of_row, stable=True)
        route = Route(
            top_k,
            order,
            _inverse(order),
            expert_order,
            _inverse(expert_order),
            send_splits,
            receive_splits,
            counts_RE.sum(0),
        )
        sent = _spread(x_TH, route)
        received = _exchange(sent, send_splits, receive_splits, self.group)
        rows = _permute(received, route.expert_order, route.expert_inverse)
        return rows, route

    def combine(self, rows_RH: Tensor, topk_weights_TK: Tensor, route: Route) -> Tensor:
        """Send the experts' rows home and sum each token's, weighted."""
        returning = _permute(rows_RH, route.expert_inverse, route.expert_order)
        returned = _exchange(returning, route.receive_splits, route.send_splits, self.group)
        picked = _permute(returned, route.sent_inverse, route.sent_order)
        by_token = picked.view(-1, route.top_k, rows_RH.shape[1])
        return _weighted(by_token, topk_weights_TK)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _Exchange(torch.autograd.Function):
    """Rows to their ranks; backward is the same exchange with the splits changed over."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.splits = send, receive, group
        output = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.splits
        output = grad.new_empty((sum(send), *grad.shape[1:]))
        dist.all_to_all_single(output, grad.contiguous(), send, receive, group=group)
        return output, None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Spread(torch.autograd.Function):
    """One row for every (token, k), in the order of experts; backward sums a token's rows."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return x_TH.index_select(0, route.sent_order // route.top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        return _sum_over_k(grad.index_select(0, route.sent_inverse).view(-1, route.top_k, grad.shape[1])), None


class _WeightedSum(torch.autograd.Function):
    """y[t] = sum over k of w[t, k] rows[t, k]."""

    @staticmethod
    def forward(ctx: Any, rows_TKH: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TKH, weights_TK)
        return _weighted_sum(rows_TKH, weights_TK.to(rows_TKH.dtype))

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor]:
        rows_TKH, weights_TK = ctx.saved_tensors
        grad_rows = weights_TK.to(rows_TKH.dtype).unsqueeze(2) * grad_TH.unsqueeze(1)
        return grad_rows, _dots(rows_TKH, grad_TH).to(weights_TK.dtype)


_exchange: Callable[..., Tensor] = _Exchange.apply
_permute: Callable[..., Tensor] = _Permute.apply
_spread: Callable[..., Tensor] = _Spread.apply
_weighted: Callable[..., Tensor] = _WeightedSum.apply


# What is fastest on a CPU differs by dtype: matrix products and reductions are quick in float32, up to seven times slower
# than elementwise calls in bfloat16. A baseline has no right to be slow, so each takes its best.


def _reduces_quickly(tensor: Tensor) -> bool:
    return tensor.is_cuda or tensor.dtype is torch.float32


def _sum_over_k(rows_TKH: Tensor) -> Tensor:
    if _reduces_quickly(rows_TKH):
        return rows_TKH.sum(1)
    total = rows_TKH[:, 0].clone()
    for k in range(1, rows_TKH.shape[1]):
        total += rows_TKH[:, k]
    return total


def _weighted_sum(rows_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    if _reduces_quickly(rows_TKH):
        return torch.bmm(weights_TK.unsqueeze(1), rows_TKH).squeeze(1)
    total = rows_TKH[:, 0] * weights_TK[:, 0:1]
    for k in range(1, rows_TKH.shape[1]):
        total.addcmul_(rows_TKH[:, k], weights_TK[:, k : k + 1])
    return total


def _dots(rows_TKH: Tensor, grad_TH: Tensor) -> Tensor:
    if _reduces_quickly(rows_TKH):
        return torch.bmm(rows_TKH, grad_TH.unsqueeze(2)).squeeze(2)
    return (rows_TKH * grad_TH.unsqueeze(1)).sum(2)
