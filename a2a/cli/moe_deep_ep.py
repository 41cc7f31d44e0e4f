"""DeepEP's exchange (its `Buffer`, within one host) as one of the layers that `a2a bench moe` times.

It hands out compact rows, each received token once, and its combine is a plain sum: what weighs a token's experts and sums
them on their rank is left to others there, and not in its times. Its dispatch waits for the number of rows, unless it is in
a graph: then it has room for all that could come.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from a2a.cli.moe_case import MoeCase, factor
from a2a.cli.moe_contenders import PARTS, Rounds
from a2a.clocks import Clock
from a2a.measure import Contender


class DeepEpRounds(Rounds):
    """Dispatch and combine, and each as the other's backward."""

    def __init__(self, deep_ep: Any, case: MoeCase, rank: int, group: Any, graph: bool) -> None:
        super().__init__(case, rank)
        self.ids = self.ids.to(getattr(deep_ep, "topk_idx_t", torch.int64))
        self.room = case.ranks * case.tokens if graph else 0
        if case.num_sms:
            deep_ep.Buffer.set_num_sms(case.num_sms)
        configs = deep_ep.Buffer.get_dispatch_config(case.ranks), deep_ep.Buffer.get_combine_config(case.ranks)
        row_bytes = case.hidden * case.dtype.itemsize
        room = max(config.get_nvl_buffer_size_hint(row_bytes, case.ranks) for config in configs)
        self.buffer = deep_ep.Buffer(group, room, 0)

    def dispatch(self) -> None:
        of_rank, _, of_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.ids, self.case.experts)
        self.rows, self.row_ids, self.row_weights, _, self.handle, _ = self.buffer.dispatch(
            self.x,
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_tokens_per_rank=of_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=of_expert,
            num_worst_tokens=self.room,
        )

    def experts(self) -> None:
        self.out = self.rows
        if self.scaled:
            self.factors = torch.where(self.row_ids >= 0, factor(self._experts_of_rows()), 0)
            self.total = (self.factors * self.row_weights).nan_to_num().sum(1, keepdim=True)
            self.out = (self.rows.float() * self.total).to(self.case.dtype)

    def combine(self) -> None:
        self.y, _, _ = self.buffer.combine(self.out, self.handle)

    def combine_backward(self) -> None:
        self.grad_rows = self.buffer.dispatch(self.grad, handle=self.handle, num_worst_tokens=self.room)[0]

    def experts_backward(self) -> None:
        if self.scaled:
            grad_rows = self.grad_rows.float()
            dots = (self.rows.float() * grad_rows).sum(1, keepdim=True)
            self.back = (grad_rows * self.total).to(self.case.dtype)
            self.grad_row_weights = torch.where(self.row_ids >= 0, dots * self.factors, 0)

    def dispatch_backward(self) -> None:
        grads = self.buffer.combine(self.back, self.handle, topk_weights=self.grad_row_weights)
        self.grad_x, self.grad_weights = grads[0], grads[1]

    def expert_rows(self) -> Tensor:
        row, k = torch.nonzero(self.row_ids >= 0, as_tuple=True)
        order = torch.argsort(self.row_ids[row, k], stable=True)
        rows: Tensor = self.rows[row[order]]
        return rows

    def _experts_of_rows(self) -> Tensor:
        experts: Tensor = self.row_ids.clamp(min=0) + self.case.experts_of(self.rank)[0]
        return experts


def deep_ep_contender(case: MoeCase, rank: int, clock: Clock, group: Any, *, graph: bool) -> Contender:
    """DeepEP, where it is installed and can."""
    phases = dict.fromkeys(PARTS, int)
    try:
        deep_ep = importlib.import_module("deep_ep")
        if group is None:
            raise RuntimeError("it takes one rank a GPU, and here ranks share one")
        rounds = DeepEpRounds(deep_ep, case, rank, group, graph)
    except Exception as error:  # an engine that is only compared with
        why = f"{type(error).__name__}: {error}"
        return Contender("deep_ep", lambda: None, lambda: 0, phases=phases, optional=True, why_not=why)
    return rounds.contender("deep_ep", clock, optional=True)
