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

from a2a.algorithms.base import Algorithm, Cost, Part, Request, own_copy
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
        symmetric = request.get("memory") == "symmetric"
        if self.op == "all_gather":
            others = size * (n - 1)
            way = "push" if self.two_shot and symmetric else "gather"
            parts = [Part(way, others), own_copy(size, size * n)]
            return self._cost(2 if self.two_shot else 1, others, size + others, parts)
        share = -(-size // n)
        others = share * (n - 1)  # what a rank sums of others for its share
        if not self.two_shot:
            if self.op == "all_reduce":
                parts = [Part("one_shot", size * (n - 1))]
                return self._cost(1, size * (n - 1), 2 * size, parts + self._dtype_parts(request, size * n))
            parts = [Part("copy", size - share), Part("one_shot", others)]
            return self._cost(1, others, size + share, parts + self._dtype_parts(request, size))
        more = self._dtype_parts(request, share * n)
        if self.op == "reduce_scatter":
            way = "reduce_loaded" if symmetric else "reduce_staged"
            return self._cost(2, others, others + share, [Part(way, others), *more])
        way = "reduce_push" if symmetric else "reduce_gather"
        return self._cost(3, 2 * others, 2 * others + 2 * share, [Part(way, others), *more])

    def _cost(self, steps: int, scale_up_bytes: int, copied_bytes: int, parts: list[Part]) -> Cost:
        rounds = (Part(f"call_{self.op}"), Part("signal", times=steps - 1))
        return Cost(steps, scale_up_bytes=scale_up_bytes, copied_bytes=copied_bytes, parts=(*rounds, *parts))

    def _dtype_parts(self, request: Request, term_bytes: int) -> list[Part]:
        """What sums of this dtype take beyond those of float32, of which the other parts are."""
        if request.dtype is torch.float32:
            return []
        name = str(request.dtype).removeprefix("torch.")
        return [Part(f"reduce_{name}", term_bytes), Part("reduce_float32", term_bytes, times=-1)]

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
