"""The baseline: what torch.distributed does with the group's own engine (gloo, NCCL, MPI).

It takes what nothing else here can: groups that span domains, devices without a transport. Everything goes as bytes in one
flat call, since engines differ in the dtypes, strides and lists that they take; pieces that lie one after the other, as
those of one tensor do, are sent and received where they are. The functions are captured when a2a is imported, so that
`a2a.patched()` can't send a request round in a circle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from a2a.algorithms.base import Algorithm, AllToAll, Cost, Part, Request
from a2a.work import Aside, Work

if TYPE_CHECKING:
    from a2a.comm import Communicator

_AT_ONCE = 8  # messages to other domains that follow each other as if they were one: assumed, not measured

originals = {
    name: getattr(dist, name)
    for name in (
        "all_to_all_single",
        "all_to_all",
        "all_reduce",
        "reduce_scatter_tensor",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "all_gather_single",
    )
    if hasattr(dist, name)
}


class Baseline(Algorithm):
    """What the baselines of all ops share."""

    baseline: ClassVar[bool] = True

    def __init__(self) -> None:
        self._asides: weakref.WeakKeyDictionary[Communicator, Aside] = weakref.WeakKeyDictionary()

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        return "this communicator was made without a process group" if comm.group is None else None

    def engine_cost(self, request: Request, comm: Communicator, remote: int, crossing: int, rail_steps: int) -> Cost:
        """What the engine takes: as measured in one domain, and by the link between domains across them.

        Args:
            remote: bytes that go to other ranks.
            crossing, rail_steps: bytes that go to other domains, and the messages there that follow one another.
        """
        # Sockets or rings of the engine: at least one more copy at each end than a direct store.
        copied = request.num_bytes + 3 * remote
        if not comm.topology.is_single_domain:
            return Cost(steps=8, scale_out_bytes=crossing, copied_bytes=copied, rail_steps=rail_steps)
        return Cost(steps=8, copied_bytes=copied, parts=(Part(f"c10d_{self.op}", max(1, request.num_bytes)),))

    def count(self, comm: Communicator, op: str) -> None:
        """Note that the engine has made a call."""
        comm.handed_over[op] = comm.handed_over.get(op, 0) + 1

    def aside(
        self, comm: Communicator, call: Callable[[], None], result: list[torch.Tensor], keep: tuple[torch.Tensor, ...]
    ) -> Work:
        """Make a call beside what the caller goes on with; its tensors are kept until it is done."""
        if comm not in self._asides:
            self._asides[comm] = Aside(comm.device)
        return self._asides[comm].run(call, result, keep)


class AllToAllC10d(Baseline, AllToAll):
    """See the module's docstring."""

    name: ClassVar[str] = "c10d"

    def cost(self, request: Request, comm: Communicator) -> Cost:
        size, n = request.num_bytes, comm.world_size
        far = n - min(len(domain.ranks) for domain in comm.topology.domains)  # ranks of other domains
        return self.engine_cost(request, comm, size * (n - 1) // n, size * far // n, -(-far // _AT_ONCE))

    def register(self, comm: Communicator, agree: str, row_bytes: int, text: str) -> int:
        return 0

    def refuse(self, comm: Communicator, request: int, why: str, async_op: bool) -> None:
        """The engine has no way to say so; its own deadline must do."""

    def run_even(self, comm: Communicator, request: int, output: torch.Tensor, input: torch.Tensor, op: str) -> None:
        originals["all_to_all_single"](_bytes(output), _bytes(input), group=comm.group)
        self.count(comm, op)

    def run(
        self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: str
    ) -> None:
        send, receive = [_bytes(t) for t in inputs], [_bytes(t) for t in outputs]
        sizes, source, target = [t.numel() for t in receive], _together(send), _together(receive)
        into = torch.empty(sum(sizes), dtype=torch.uint8, device=outputs[0].device) if target is None else target
        source = torch.cat(send) if source is None else source
        originals["all_to_all_single"](into, source, sizes, [t.numel() for t in send], group=comm.group)
        if target is None:
            for part, piece in zip(receive, torch.split(into, sizes), strict=True):
                part.copy_(piece)
        self.count(comm, op)

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
        def call() -> None:
            self.run(comm, request, outputs, inputs, op)
            if finish is not None:
                finish()

        return self.aside(comm, call, result, (*outputs, *inputs, *result))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8, device=tensor.device)
    )


def _together(pieces: list[torch.Tensor]) -> torch.Tensor | None:
    """One flat tensor over pieces of bytes that lie one after the other in one storage; None: they don't."""
    there = [piece for piece in pieces if piece.numel()]
    if not there:
        return pieces[0]
    end, storage = there[0].data_ptr(), there[0].untyped_storage().data_ptr()
    for piece in there:
        if piece.data_ptr() != end or piece.untyped_storage().data_ptr() != storage:
            return None
        end += piece.numel()
    return there[0].as_strided((end - there[0].data_ptr(),), (1,))
