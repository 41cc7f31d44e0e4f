"""The ready flags of `push`, in one tensor: csrc/cuda/moe_push_ready.cuh says what lies where."""

from __future__ import annotations

from ctypes import c_void_p
from typing import TYPE_CHECKING, Any

import torch

from a2a.algorithms.moe_base import MoeSpec
from a2a.algorithms.moe_ready import ReadyFlags
from a2a.kernels import cuda, cuda_params

if TYPE_CHECKING:
    from a2a.comm import Communicator

_RESERVED_SMS = 24  # what is left to a2a beside kernels that wait, unless `num_sms` says


class PushReady(ReadyFlags):
    """Words of a GPU.

    Attributes:
        memory: arrived, sendable and parts, [words] each; what a2a counts; the epoch of the last dispatch.
        place: where failures are noted, of the calls' parameters.
        event: a dispatch has counted its rows; 0 when the instance is closed.
    """

    place: Any

    def __init__(self, spec: MoeSpec, comm: Communicator) -> None:
        self.words = words = spec.ready_words(comm.rank, comm.world_size)
        self.memory = torch.zeros(4 * words + 1, dtype=torch.int32, device=comm.device)
        super().__init__(spec, self.memory[:words], self.memory[words : 2 * words])
        self.reserved_sms = spec.num_sms or _RESERVED_SMS
        self.defines = dict(comm.require_transport("ExpertParallel").place.defines)
        self._world_size, self._device, self.event = comm.world_size, comm.device, cuda.event()

    def epoch(self, routing: Any) -> torch.Tensor:
        plan: torch.Tensor = routing.plan
        return plan[:1]

    def start(self, stream: torch.cuda.Stream | None = None) -> None:
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if not self.event:
            raise ValueError("ReadyFlags.start: this ExpertParallel is closed")
        steps = (cuda.Step * 1)(cuda.Step(cuda.Step.WAIT, 0, self.event))
        result = cuda.lib().a2a_cuda_run(steps, 1, (c_void_p * 1)(stream.cuda_stream))
        cuda.check(result, "ReadyFlags.start: a stream that waits for a dispatch")

    def close(self) -> int:
        """Give the event up."""
        event, self.event = self.event, 0
        return event

    def params(self, routing: Any) -> cuda_params.ReadyFlags:
        at = self.memory.data_ptr()
        return cuda_params.ReadyFlags(
            place=self.place, arrived=at, sendable=at + 4 * self.words, parts=at + 8 * self.words,
            epoch=routing.plan.data_ptr(), world=self._world_size, rows=self.rows,
        )  # fmt: skip


__all__ = ["PushReady"]
