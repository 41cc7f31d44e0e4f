"""The implementations that `a2a bench all_reduce`, `reduce_scatter` and `all_gather` time against each other.

Rank r contributes small whole numbers that each rank can compute for every other, so that results are compared exactly in
every dtype. Sizes are nccl-tests': of the whole tensor, which a reduce-scatter reads and an all-gather fills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from a2a.cli.exchanges import CALL, POISON
from a2a.measure import Contender
from a2a.plan import Request, choose

if TYPE_CHECKING:
    from a2a.comm import Communicator

OPS = ("all_reduce", "reduce_scatter", "all_gather")
_PERIOD = 7  # values are below it: sums of a few ranks are exact in every dtype


@dataclass(frozen=True)
class Reduction:
    """One all-reduce (of sums), reduce-scatter (of sums) or all-gather.

    Attributes:
        share: elements of a rank's share of the whole tensor.
        rank: whose side this is.
    """

    op: str
    share: int
    dtype: torch.dtype
    rank: int
    world_size: int

    @staticmethod
    def of_bytes(op: str, num_bytes: int, dtype: torch.dtype, rank: int, world_size: int) -> Reduction:
        """With a whole tensor of `num_bytes`, rounded down to equal shares as nccl-tests does."""
        share = num_bytes // dtype.itemsize // world_size
        if share == 0:
            raise ValueError(f"--bytes {num_bytes}: less than one {dtype} for each of {world_size} ranks")
        return Reduction(op, share, dtype, rank, world_size)

    @property
    def whole(self) -> int:
        return self.share * self.world_size

    @property
    def num_bytes(self) -> int:
        return self.whole * self.dtype.itemsize

    @property
    def sends(self) -> int:
        """Elements of a rank's input."""
        return self.share if self.op == "all_gather" else self.whole

    def request(self, memory: str) -> Request:
        """What the planner is asked for tensors of that kind of memory."""
        detail = () if self.op == "all_gather" else (("reduce_op", "sum"),)
        return Request(self.op, self.dtype, self.sends * self.dtype.itemsize, (("memory", memory), *detail))

    def pattern(self, rank: int) -> Tensor:
        return ((torch.arange(self.sends) + 3 * rank) % _PERIOD).to(self.dtype)

    def wrong(self, output: Tensor) -> int:
        """How many elements of `output` are not what this rank should have received."""
        inputs = [self.pattern(rank) for rank in range(self.world_size)]
        if self.op == "all_gather":
            expected = torch.cat(inputs)
        else:
            expected = torch.stack(inputs).sum(0, dtype=self.dtype)
        if self.op == "reduce_scatter":
            expected = expected[self.rank * self.share : (self.rank + 1) * self.share]
        return int((output != expected).sum())


def a2a_contender(reduction: Reduction, comm: Communicator, memory: str) -> Contender:
    """a2a's function on tensors from `comm.empty` (memory "symmetric") or from torch ("ordinary")."""
    import a2a

    def make(count: int) -> Tensor:
        if memory == "symmetric":
            return comm.empty((count,), reduction.dtype)
        return torch.empty(count, dtype=reduction.dtype)

    call = _torch_call((a2a.all_reduce, a2a.reduce_scatter_tensor, a2a.all_gather_into_tensor), comm)
    plan = choose(reduction.request(memory), comm)
    made = _contender("a2a", reduction, make, call, barrier=True)
    return replace(made, algorithm=plan.algorithm.name, predicted_us=plan.time_us)


def dist_contender(name: str, reduction: Reduction, group: dist.ProcessGroup | None) -> Contender:
    """torch.distributed's function on a group: gloo's, or one of backend "a2a"."""

    def make(count: int) -> Tensor:
        return torch.empty(count, dtype=reduction.dtype)

    call = _torch_call((dist.all_reduce, dist.reduce_scatter_tensor, dist.all_gather_into_tensor), group)
    return replace(_contender(name, reduction, make, call), optional=name != "a2a")


def mpi_contender(reduction: Reduction, world: Any) -> Contender:
    """mpi4py's `Allreduce`, in place, `Reduce_scatter_block` or `Allgather` on NumPy arrays of the tensors' memory."""
    from mpi4py import MPI

    gathers = reduction.op == "all_gather"  # which moves bytes, of whatever they are
    if not gathers and reduction.dtype is torch.bfloat16:
        return Contender("mpi", lambda: None, lambda: 0, optional=True, why_not="MPI has no bfloat16")

    def make(count: int) -> Tensor:
        return torch.empty(count, dtype=reduction.dtype)

    def array(tensor: Tensor) -> Any:
        return tensor.view(torch.uint8).numpy() if gathers else tensor.numpy()

    def bind(op: str, output: Tensor, source: Tensor) -> CALL:
        if op == "all_reduce":
            whole = array(source)
            return lambda: world.Allreduce(MPI.IN_PLACE, whole)
        to, of = array(output), array(source)
        call = world.Allgather if gathers else world.Reduce_scatter_block
        return lambda: call(of, to)

    return replace(_contender("mpi", reduction, make, bind), optional=True)


def memcpy_contender(reduction: Reduction) -> Contender:
    """torch's copy of a whole tensor on every rank at once: what moving these bytes costs without any ranks to talk to."""
    source = torch.empty(reduction.whole, dtype=reduction.dtype).view(torch.uint8).fill_(POISON)
    output = torch.empty_like(source)

    def call() -> object:
        return output.copy_(source)

    def check() -> int:
        output.zero_()
        call()
        return int((output != source).sum())

    return Contender("memcpy", call, check)


# Of an op, output and source: what makes the call.
_Bind = Callable[[str, Tensor, Tensor], CALL]


def _torch_call(functions: tuple[Any, Any, Any], group: Any) -> _Bind:
    """Calls of three functions with torch.distributed's arguments."""
    all_reduce, reduce_scatter, all_gather = functions

    def bind(op: str, output: Tensor, source: Tensor) -> CALL:
        if op == "all_reduce":
            return lambda: all_reduce(source, group=group)
        if op == "reduce_scatter":
            return lambda: reduce_scatter(output, source, group=group)
        return lambda: all_gather(output, source, group=group)

    return bind


def _contender(
    name: str, reduction: Reduction, make: Callable[[int], Tensor], bind: _Bind, *, barrier: bool = False
) -> Contender:
    """`barrier`: peers store into this rank's output, so that nobody may poison it late."""
    source = make(reduction.sends)
    if reduction.op == "all_reduce":
        output = source  # sums grow from call to call, which takes no longer
    else:
        output = make(reduction.share if reduction.op == "reduce_scatter" else reduction.whole)
    call = bind(reduction.op, output, source)

    def check() -> int:
        output.view(torch.uint8).fill_(POISON)
        source.copy_(reduction.pattern(reduction.rank))
        if barrier:
            dist.barrier()
        call()
        return reduction.wrong(output)

    return Contender(name, call, check)
