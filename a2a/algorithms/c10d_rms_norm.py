"""The baseline of an all-reduce with a residual add and RMSNorm: the group's own all-reduce, then the rest in torch.

It takes what no kernel can: groups that span domains, devices without a transport, very long rows. The sum over ranks is the
engine's, in the engine's order; all else has the bits of the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from a2a.algorithms.base import Cost, Part, Request
from a2a.algorithms.c10d import Baseline, originals
from a2a.algorithms.rms_norm_base import OP, RmsNorm, Tensors, hidden_of, rms_norm

if TYPE_CHECKING:
    from a2a.comm import Communicator


class AllReduceRmsNormC10d(Baseline, RmsNorm):
    """See the module's docstring."""

    name: ClassVar[str] = "c10d"
    deterministic: ClassVar[bool] = False

    def cost(self, request: Request, comm: Communicator) -> Cost:
        size, n = request.num_bytes, comm.world_size
        remote = 2 * size * (n - 1) // n
        # Sockets or rings of the engine, and passes over float32 values for what follows.
        copied = size + 3 * remote + 12 * size
        if not comm.topology.is_single_domain:
            return Cost(steps=16, scale_out_bytes=remote, copied_bytes=copied)
        parts = (Part("c10d_all_reduce", max(1, size)), Part("copy", 12 * size))
        return Cost(steps=16, copied_bytes=copied, parts=parts)

    def register(self, comm: Communicator, agree: str, text: str) -> int:
        return 0

    def refuse(self, comm: Communicator, request: int, why: str) -> None:
        """The engine has no way to say so; its own deadline must do."""

    def run(self, comm: Communicator, asked: Request, request: int, tensors: Tensors, eps: float) -> None:
        summed = tensors.input.clone()
        originals["all_reduce"](summed, group=comm.group)
        self.count(comm, OP)
        hidden = hidden_of(asked)
        rows, residual = summed.view(-1, hidden), tensors.residual.view(-1, hidden)
        out, residual_out = rms_norm(rows, residual, tensors.weight, eps)
        tensors.out.view(-1, hidden).copy_(out)
        tensors.residual_out.view(-1, hidden).copy_(residual_out)
