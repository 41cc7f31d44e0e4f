"""All-to-all by loads and stores in shared memory; each pair of ranks takes the shortest way it has.

Small pieces travel beside the first signal (eager). Larger ones are stored by the sender into a receiver's symmetric tensor
(push), or else loaded by the receiver from a sender's symmetric tensor (pull): one copy. Two ordinary tensors meet
in a ring of slots whose two copies overlap (staged). The kernel, csrc/cpu/all_to_all_pairwise.cpp, has the protocol.

Wins wherever ranks share a host.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import AllToAll, Cost, Part, Request, own_copy
from a2a.kernels import cpu
from a2a.work import Work

if TYPE_CHECKING:
    from a2a.comm import Communicator


_EAGER_BYTES, _READ_BYTES = 16 << 10, 4 << 20  # of a pair: as in csrc/cpu, with the usual staging


class _Prepared:
    """A call whose tensors may change; see `AllToAll.prepare_even`."""

    __slots__ = ("address", "call", "device", "num_bytes", "struct")

    def __init__(self, comm: Communicator, request: int, num_bytes: int) -> None:
        self.struct = cpu.Even(comm.handle, request, num_bytes // comm.world_size)
        self.address = ctypes.addressof(self.struct)
        self.call = cpu.lib().a2a_all_to_all_again
        self.device = -1  # what get_device() says of CPU tensors
        self.num_bytes = num_bytes


class AllToAllPairwise(AllToAll):
    """See the module's docstring."""

    name: ClassVar[str] = "pairwise"
    device_type: ClassVar[str] = "cpu"

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        return self.no_memory(comm)

    def cost(self, request: Request, comm: Communicator) -> Cost:
        piece = request.num_bytes // comm.world_size
        remote = request.num_bytes - piece
        # Which way a pair takes depends on both ranks' memory: a plan counts with ordinary tensors, unless told otherwise.
        if piece <= _EAGER_BYTES:
            way, steps = "eager", 1
        elif request.get("memory") == "symmetric":
            way, steps = "push", 2
        else:
            reads = piece <= _READ_BYTES and not getattr(comm.transport, "why_no_reads", "")
            way, steps = "read" if reads else "stage", 2
        parts = (
            Part("call_all_to_all"),
            Part("signal", times=steps - 1),
            own_copy(piece, request.num_bytes),
            Part(way, remote),
        )
        copied = request.num_bytes + (0 if way in ("push", "read") else remote)
        return Cost(steps=steps, scale_up_bytes=remote, copied_bytes=copied, parts=parts)

    def register(self, comm: Communicator, agree: str, row_bytes: int, text: str) -> int:
        index: int = comm.require_transport("all_to_all").request(agree, row_bytes, text)
        return index

    def refuse(self, comm: Communicator, request: int, why: str, async_op: bool) -> None:
        if async_op:
            ticket = cpu.lib().a2a_submit_refusal(comm.handle, request, why.encode()[:1000])
            comm.keep(Work(comm, ticket, "all_to_all", [], None, None))
        else:
            cpu.lib().a2a_refuse(comm.handle, request, why.encode()[:1000])

    def prepare_even(self, comm: Communicator, request: int, num_bytes: int) -> _Prepared:
        return _Prepared(comm, request, num_bytes)

    def run_even(self, comm: Communicator, request: int, output: torch.Tensor, input: torch.Tensor, op: str) -> None:
        each = input.numel() * input.element_size() // comm.world_size
        result = cpu.lib().a2a_all_to_all_even(comm.handle, request, output.data_ptr(), input.data_ptr(), each)
        if result:
            comm.raise_failure(result, op)

    def run(
        self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: str
    ) -> None:
        result = cpu.lib().a2a_all_to_all(comm.handle, request, *_arrays(outputs, inputs))
        if result:
            comm.raise_failure(result, op)

    def submit(
        self,
        comm: Communicator,
        request: int,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        op: str,
        result: list[torch.Tensor],
        finish: Any,
    ) -> Work:
        ticket = cpu.lib().a2a_submit(comm.handle, request, *_arrays(outputs, inputs))
        work = Work(comm, ticket, op, result, (outputs, inputs), finish)
        comm.keep(work)
        return work


def _arrays(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> tuple[Any, Any, Any, Any]:
    return (
        cpu.pointers([t.data_ptr() for t in outputs]),
        cpu.sizes([t.numel() * t.element_size() for t in outputs]),
        cpu.pointers([t.data_ptr() for t in inputs]),
        cpu.sizes([t.numel() * t.element_size() for t in inputs]),
    )
