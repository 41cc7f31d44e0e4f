"""The implementations that `a2a bench all_reduce_rms_norm` times against each other.

* `a2a`: the fused call, into tensors that are there.
* `gloo` or `nccl`: the unfused sequence: torch.distributed's all_reduce, then an add and torch's rms_norm.

The bytes are those of the input: whole rows, of --hidden elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from a2a.algorithms.rms_norm_base import OP, rms_norm
from a2a.cli.devices import NCCL_REFUSES
from a2a.measure import Contender
from a2a.plan import Request, choose

if TYPE_CHECKING:
    from a2a.comm import Communicator

EPS = 1e-6
_PERIOD = 7  # values are below it: sums of a few ranks are exact in every dtype


@dataclass(frozen=True)
class Norm:
    """One call: rows of `hidden` elements, whose input every rank can compute for every other."""

    rows: int
    hidden: int
    dtype: torch.dtype
    rank: int
    world_size: int

    @staticmethod
    def of_bytes(num_bytes: int, hidden: int, dtype: torch.dtype, rank: int, world_size: int) -> Norm:
        """With an input of `num_bytes`, rounded down to whole rows."""
        rows = num_bytes // (hidden * dtype.itemsize)
        if not rows:
            raise ValueError(f"--bytes {num_bytes}: less than one row of {hidden} {dtype}; see --hidden")
        return Norm(rows, hidden, dtype, rank, world_size)

    @property
    def num_bytes(self) -> int:
        return self.rows * self.hidden * self.dtype.itemsize

    def input(self, rank: int) -> Tensor:
        whole = torch.arange(self.rows * self.hidden).view(self.rows, self.hidden)
        return ((whole + 3 * rank) % _PERIOD - 2).to(self.dtype)

    def weight(self) -> Tensor:
        return (torch.arange(self.hidden) % 5 + 1).to(self.dtype)

    def expected(self) -> list[Tensor]:
        """[out, residual_out], for a residual of this rank 0's input."""
        summed = torch.stack([self.input(rank) for rank in range(self.world_size)]).sum(0, dtype=self.dtype)
        return rms_norm(summed, self.input(0), self.weight(), EPS)

    def wrong(self, out: Tensor, residual_out: Tensor, exact: bool) -> int:
        """How many elements are not what they must be; `exact`: to the bit, else as near as two roundings."""
        wanted, wanted_residual = self.expected()
        slack = 0.0 if exact else 4 * torch.finfo(self.dtype).eps
        far = (out.cpu().float() - wanted.float()).abs() > slack * wanted.float().abs()
        return int(far.sum()) + int((residual_out.cpu() != wanted_residual).sum())


def a2a_contender(norm: Norm, comm: Communicator, memory: str) -> Contender:
    """The fused call, on an input from `comm.empty` (memory "symmetric") or from torch ("ordinary")."""
    import a2a

    shape = norm.rows, norm.hidden
    source = (
        comm.empty(shape, norm.dtype)
        if memory == "symmetric"
        else torch.empty(shape, dtype=norm.dtype, device=comm.device)
    )
    residual, weight = norm.input(0).to(comm.device), norm.weight().to(comm.device)
    out, residual_out = torch.empty_like(residual), torch.empty_like(residual)
    source.copy_(norm.input(norm.rank))
    plan = choose(Request(OP, norm.dtype, norm.num_bytes, (("hidden", norm.hidden),)), comm)

    def call() -> object:
        return a2a.all_reduce_rms_norm(source, residual, weight, EPS, comm, out=out, residual_out=residual_out)

    def check(made: Callable[[], object] = call) -> int:
        out.zero_()
        residual_out.zero_()
        made()
        return norm.wrong(out, residual_out, exact=True)

    return Contender("a2a", call, check, algorithm=plan.algorithm.name, sms=plan.cost.sms or None, check_call=check)


def unfused_contender(name: str, norm: Norm, group: Any, device: torch.device, *, why_not: str = "") -> Contender:
    """torch.distributed's all_reduce on a group, then torch's add and rms_norm."""
    if why_not:
        return Contender(name, lambda: None, lambda: 0, optional=True, why_not=why_not)
    source, residual, weight = (t.to(device) for t in (norm.input(norm.rank), norm.input(0), norm.weight()))
    summed, residual_out = torch.empty_like(source), torch.empty_like(source)
    made: list[Tensor] = []

    def call() -> object:
        summed.copy_(source)  # its all_reduce is in place
        dist.all_reduce(summed, group=group)
        torch.add(residual, summed, out=residual_out)
        made[:] = [torch.nn.functional.rms_norm(residual_out, (norm.hidden,), weight, EPS)]
        return made

    def check(again: Callable[[], object] = call) -> int:
        again()
        return norm.wrong(made[0], residual_out, exact=False)

    return Contender(name, call, check, optional=True, check_call=check)


def refusal(group: Any) -> str:
    """Why NCCL has no part in it, or nothing."""
    return NCCL_REFUSES if group is None else ""
