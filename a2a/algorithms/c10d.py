"""The baseline: what torch.distributed does with the group's own engine (gloo, NCCL, MPI).

It takes what nothing else here can: groups that span domains, devices without a transport. The functions are captured when
a2a is imported, so that `a2a.patched()` can't send a request round in a circle. It promises no order of reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from a2a.algorithms.base import AllToAll, Cost, Request
from a2a.work import DoneWork, Work

if TYPE_CHECKING:
    from a2a.comm import Communicator

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


class AllToAllC10d(AllToAll):
    """See the module's docstring."""

    name: ClassVar[str] = "c10d"
    deterministic: ClassVar[bool] = True

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if comm.group is None:
            return "this communicator was made without a process group"
        return None

    def cost(self, request: Request, comm: Communicator) -> Cost:
        remote = request.num_bytes * (comm.world_size - 1) // comm.world_size
        # Sockets or rings of the engine: at least one more copy at each end than a direct store.
        return Cost(steps=8, scale_out_bytes=remote, copied_bytes=request.num_bytes + 3 * remote)

    def register(self, comm: Communicator, agree: str, row_bytes: int, text: str) -> int:
        return 0

    def refuse(self, comm: Communicator, request: int, why: str, async_op: bool) -> None:
        """The engine has no way to say so; its own deadline must do."""

    def run_even(self, comm: Communicator, request: int, output: torch.Tensor, input: torch.Tensor, op: str) -> None:
        self.run(
            comm,
            request,
            list(output.reshape(-1).chunk(comm.world_size)),
            list(input.reshape(-1).chunk(comm.world_size)),
            op,
        )

    def run(
        self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: str
    ) -> None:
        self.submit(comm, request, outputs, inputs, op, outputs, None)

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
        # As bytes, in one flat call: engines differ in the dtypes, strides and lists that they take.
        send, receive = [_bytes(t) for t in inputs], [_bytes(t) for t in outputs]
        into = torch.empty(sum(t.numel() for t in receive), dtype=torch.uint8, device=outputs[0].device)
        originals["all_to_all_single"](
            into, torch.cat(send), [t.numel() for t in receive], [t.numel() for t in send], group=comm.group
        )
        for part, piece in zip(receive, torch.split(into, [t.numel() for t in receive]), strict=True):
            part.copy_(piece)
        if finish is not None:
            finish()
        comm.handed_over[op] = comm.handed_over.get(op, 0) + 1
        return DoneWork(result)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8, device=tensor.device)
    )
