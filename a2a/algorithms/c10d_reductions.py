"""The baseline of all-reduce, reduce-scatter and all-gather: what torch.distributed does with the group's own engine.

It takes what nothing else here can: other reductions (BAND, PREMUL_SUM, ...), complex and 8-bit floating point numbers,
groups that span domains, devices without a transport. Its sums are the engine's, in the engine's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Cost, Request
from a2a.algorithms.c10d import Baseline, originals
from a2a.algorithms.reduction_base import Reduction
from a2a.topology import Topology
from a2a.work import Work

if TYPE_CHECKING:
    from a2a.comm import Communicator


class _C10d(Baseline, Reduction):
    deterministic: ClassVar[bool] = False

    def cost(self, request: Request, comm: Communicator) -> Cost:
        size, n = request.num_bytes, comm.world_size
        remote = size * (n - 1) if self.op == "all_gather" else size * (n - 1) // n
        remote *= 2 if self.op == "all_reduce" else 1
        steps = (n - 1) * (2 if self.op == "all_reduce" else 1)  # of a ring in rank order
        return self.engine_cost(request, comm, remote, int(remote * _crossings(comm.topology)), steps)

    def register(self, comm: Communicator, agree: str, text: str) -> int:
        return 0

    def refuse(self, comm: Communicator, request: int, op: str, why: str, async_op: bool) -> None:
        """The engine has no way to say so; its own deadline must do."""

    def run(
        self, comm: Communicator, asked: Request, request: int, output: torch.Tensor, input: torch.Tensor, op: Any
    ) -> None:
        if self.op == "all_reduce":
            originals["all_reduce"](output, op, group=comm.group)
        elif self.op == "reduce_scatter":
            _original("reduce_scatter_single", "reduce_scatter_tensor")(output, input, op, group=comm.group)
        else:
            _original("all_gather_single", "all_gather_into_tensor")(output, input, group=comm.group)
        self.count(comm, self.op)

    def submit(
        self,
        comm: Communicator,
        asked: Request,
        request: int,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any,
        result: list[torch.Tensor],
        finish: Callable[[], None],
    ) -> Work:
        def call() -> None:
            self.run(comm, asked, request, output, input, op)
            finish()

        return self.aside(comm, call, result, (output, input, *result))


def _crossings(topology: Topology) -> float:
    """Of the ranks of a domain, the part whose next rank is in another domain; the largest such part."""
    ranks = range(topology.world_size)
    crosses = [not topology.same_domain(rank, (rank + 1) % topology.world_size) for rank in ranks]
    return max(sum(crosses[rank] for rank in domain.ranks) / len(domain.ranks) for domain in topology.domains)


def _original(*names: str) -> Callable[..., Any]:
    """torch's function, under the newest name that this torch has."""
    found: Callable[..., Any] = next(originals[name] for name in names if name in originals)
    return found


class AllReduceC10d(_C10d):
    """See the module's docstring."""

    name: ClassVar[str] = "c10d"
    op: ClassVar[str] = "all_reduce"


class ReduceScatterC10d(_C10d):
    """See the module's docstring."""

    name: ClassVar[str] = "c10d"
    op: ClassVar[str] = "reduce_scatter"


class AllGatherC10d(_C10d):
    """See the module's docstring."""

    deterministic: ClassVar[bool] = True  # nothing is summed
    name: ClassVar[str] = "c10d"
    op: ClassVar[str] = "all_gather"
