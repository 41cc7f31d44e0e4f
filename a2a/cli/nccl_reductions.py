"""What `a2a bench all_reduce`, `reduce_scatter` and `all_gather` time on GPUs: a2a's functions and NCCL's, in three ways.

* `nccl`: torch.distributed's function on torch's own tensors.
* `nccl_symm`: the same on buffers in a symmetric window that is registered with NCCL's communicator.
* `nccl_ce`: the same, on a communicator that is told to use no SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from a2a.cli.devices import NCCL_REFUSES
from a2a.cli.exchanges import POISON
from a2a.cli.nccl_contenders import NcclWindow
from a2a.cli.reductions import Reduction
from a2a.measure import Contender
from a2a.plan import Request, choose

if TYPE_CHECKING:
    from a2a.comm import Communicator

_Functions = tuple[Any, Any, Any]


def a2a_contender(reduction: Reduction, comm: Communicator, memory: str) -> Contender:
    """a2a's function on tensors from `comm.empty` (memory "symmetric") or from torch ("ordinary")."""
    import a2a

    def make(count: int) -> Tensor:
        if memory == "symmetric":
            return comm.empty((count,), reduction.dtype)
        return torch.empty(count, dtype=reduction.dtype, device=comm.device)

    functions = a2a.all_reduce, a2a.reduce_scatter_tensor, a2a.all_gather_into_tensor
    num_bytes = reduction.sends * reduction.dtype.itemsize
    detail = () if reduction.op == "all_gather" else (("reduce_op", "sum"),)
    plan = choose(Request(reduction.op, reduction.dtype, num_bytes, detail), comm)
    tensors = _tensors(reduction, make)
    return _contender("a2a", reduction, lambda: (*tensors, comm), functions, plan.algorithm.name, plan.cost.sms)


def dist_contender(name: str, reduction: Reduction, group: Any, device: torch.device) -> Contender:
    """torch.distributed's function on a group: NCCL's (None where it refuses these ranks), or one of backend "a2a"."""
    if group is None:
        return Contender(name, lambda: None, lambda: 0, optional=True, why_not=NCCL_REFUSES)
    tensors = _tensors(reduction, lambda count: torch.empty(count, dtype=reduction.dtype, device=device))
    return _contender(name, reduction, lambda: (*tensors, group), _torchs())


def window_contender(name: str, reduction: Reduction, window: NcclWindow) -> Contender:
    """NCCL's function between the buffers of a window, which is made and registered at the first check."""
    made: list[tuple[Tensor, Tensor, Any]] = []

    def tensors() -> tuple[Tensor, Tensor, Any]:
        if not made:
            window.open()
            buffers = iter(window.buffers)

            def make(count: int) -> Tensor:
                return next(buffers)[: count * reduction.dtype.itemsize].view(reduction.dtype)

            made.append((*_tensors(reduction, make), window.group))
        return made[0]

    return _contender(name, reduction, tensors, _torchs())


def window_bytes(reductions: list[Reduction]) -> int:
    """How large a buffer of a window must be for all of these."""
    return max(reduction.num_bytes for reduction in reductions)


def _torchs() -> _Functions:
    return dist.all_reduce, dist.reduce_scatter_tensor, dist.all_gather_into_tensor


def _tensors(reduction: Reduction, make: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """(output, input): the same in an all-reduce."""
    source = make(reduction.sends)
    if reduction.op == "all_reduce":
        return source, source
    return make(reduction.share if reduction.op == "reduce_scatter" else reduction.whole), source


def _contender(
    name: str,
    reduction: Reduction,
    tensors: Callable[[], tuple[Tensor, Tensor, Any]],
    functions: _Functions,
    algorithm: str = "-",
    sms: int | None = None,
) -> Contender:
    all_reduce, reduce_scatter, all_gather = functions

    def call() -> object:
        output, source, group = tensors()
        if reduction.op == "all_reduce":
            return all_reduce(source, group=group)  # sums grow from call to call, which takes no longer
        if reduction.op == "reduce_scatter":
            return reduce_scatter(output, source, group=group)
        return all_gather(output, source, group=group)

    def check_call(make: Callable[[], object]) -> int:
        output, source, _ = tensors()
        output.view(torch.uint8).fill_(POISON)
        source.copy_(reduction.pattern(reduction.rank))
        torch.cuda.synchronize()
        dist.barrier()  # poison is not stored over what a peer has sent
        make()
        return reduction.wrong(output.cpu())

    return Contender(
        name,
        call,
        lambda: check_call(call),
        algorithm=algorithm,
        sms=sms,
        check_call=None if reduction.op == "all_reduce" else check_call,  # a graph of several calls adds several times
        optional=name != "a2a",
    )
