"""What all-reduces, reduce-scatters and all-gathers have in common, and their two ways through shared memory.

One-shot: every rank publishes its whole input with the first signal, and everybody takes what it needs. Two-shot: each rank
reduces its share of everybody's input and publishes it. The kernels, csrc/cpu/reduce_one_shot.cpp and reduce_two_shot.cpp,
have the protocols. An all-gather is the second half of an all-reduce, a reduce-scatter the first.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Algorithm, Cost, Request
from a2a.kernels import cpu
from a2a.work import Work

if TYPE_CHECKING:
    from a2a.comm import Communicator

ONE_SHOT_BYTES = 64 << 10  # kOneShotBytes in csrc/cpu/signal.h: of a rank's input
# ReduceOp and Dtype in csrc/cpu/simd.h.
REDUCE_OPS = {"sum": 0, "avg": 1, "max": 2, "min": 3}
DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.uint8: 4,
    torch.int8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}
_KINDS = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2}


class Reduction(Algorithm):
    """An all-reduce, reduce-scatter or all-gather of contiguous tensors.

    Its requests give the bytes of a rank's input and, in `detail`, "reduce_op": "sum", "avg", "max", "min" or another
    name of torch's. Output and input are one tensor in an all-reduce; the smaller of the two may be the rank's own share
    of the other.
    """

    @abstractmethod
    def run(
        self, comm: Communicator, asked: Request, request: int, output: torch.Tensor, input: torch.Tensor, op: Any
    ) -> None:
        """Do it; `request` is what `register` gave, `op` torch's ReduceOp. Blocks until done."""

    @abstractmethod
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
        """Start it and return Work, which calls `finish` when done."""

    def prepare(self, comm: Communicator, asked: Request, request: int, output: torch.Tensor) -> Any:
        """What the ops' fast way may call for tensors of this size; None: nothing.

        It has `call(address, output, input)`, which returns 0 or a failure, `address` and `device`.
        """
        return None

    @abstractmethod
    def register(self, comm: Communicator, agree: str, text: str) -> int:
        """Make a request known, so that peers that ask for something else can be told."""

    @abstractmethod
    def refuse(self, comm: Communicator, request: int, op: str, why: str, async_op: bool) -> None:
        """Tell the peers that this rank can't make its call."""


class _Prepared:
    """A call whose tensors may change."""

    __slots__ = ("address", "call", "struct")
    device: ClassVar[int] = -1  # torch's number for a CPU

    def __init__(self, struct: cpu.Reduction) -> None:
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self.call = cpu.lib().a2a_reduce


class CpuReduction(Reduction):
    """What the one-shot and two-shot algorithms share."""

    device_type: ClassVar[str] = "cpu"
    two_shot: ClassVar[bool] = False

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if (reason := self.no_memory(comm)) is not None:
            return reason
        if self.op != "all_gather":
            reduce_op = request.get("reduce_op", "sum")
            if reduce_op not in REDUCE_OPS:
                return f"it reduces by {', '.join(REDUCE_OPS)}; asked for {reduce_op}"
            if request.dtype not in DTYPES:
                return f"it reduces float16 to float64, bfloat16, uint8 and int8 to int64; asked for {request.dtype}"
        if not self.two_shot and request.num_bytes > ONE_SHOT_BYTES:
            return f"a rank's input has {request.num_bytes} bytes; its slot takes {ONE_SHOT_BYTES}"
        return None

    def cost(self, request: Request, comm: Communicator) -> Cost:
        size, n = request.num_bytes, comm.world_size
        if self.op == "all_gather":
            written, steps = size * (n - 1), 2  # everybody's share, after one copy of the own
            return Cost(1 if not self.two_shot else steps, scale_up_bytes=written, copied_bytes=size + written)
        remote = size * (n - 1) // n
        if not self.two_shot:
            # Every rank reads all inputs, half as dear as to write them.
            read = size * (n - 1) if self.op == "all_reduce" else remote
            return Cost(steps=1, scale_up_bytes=read, copied_bytes=size + read // 2 + size // n)
        if self.op == "reduce_scatter":
            return Cost(steps=2, scale_up_bytes=remote, copied_bytes=remote + remote // 2 + size // n)
        return Cost(steps=3, scale_up_bytes=2 * remote, copied_bytes=2 * remote + remote // 2 + size // n)

    def register(self, comm: Communicator, agree: str, text: str) -> int:
        index: int = comm.require_transport(self.op).request(agree, 0, text)
        return index

    def refuse(self, comm: Communicator, request: int, op: str, why: str, async_op: bool) -> None:
        if async_op:
            ticket = cpu.lib().a2a_submit_refusal(comm.handle, request, why.encode()[:1000])
            comm.keep(Work(comm, ticket, op, [], None, None))
        else:
            cpu.lib().a2a_refuse(comm.handle, request, why.encode()[:1000])

    def _struct(self, comm: Communicator, asked: Request, request: int, output: torch.Tensor) -> cpu.Reduction:
        gathers = self.op == "all_gather"
        return cpu.Reduction(
            context=comm.handle,
            request=request,
            kind=_KINDS[self.op],
            dtype=0 if gathers else DTYPES[output.dtype],
            reduce=0 if gathers else REDUCE_OPS[asked.get("reduce_op")],
            two_shot=self.two_shot,
            count=asked.num_bytes if gathers else output.numel(),
        )

    def prepare(self, comm: Communicator, asked: Request, request: int, output: torch.Tensor) -> _Prepared:
        return _Prepared(self._struct(comm, asked, request, output))

    def run(
        self, comm: Communicator, asked: Request, request: int, output: torch.Tensor, input: torch.Tensor, op: Any
    ) -> None:
        struct = self._struct(comm, asked, request, output)
        result = cpu.lib().a2a_reduce(ctypes.byref(struct), output.data_ptr(), input.data_ptr())
        if result:
            comm.raise_failure(result, self.op)

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
        struct = self._struct(comm, asked, request, output)  # copied before the call returns
        ticket = cpu.lib().a2a_submit_reduction(ctypes.byref(struct), output.data_ptr(), input.data_ptr())
        work = Work(comm, ticket, self.op, result, (output, input), finish)
        comm.keep(work)
        return work
