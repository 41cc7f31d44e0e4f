"""Ready flags of ExpertParallel: which rows of a dispatch have arrived, and which rows of a combine may be sent.

Who stores which word when, on a GPU (csrc/cuda/ready.cuh; `n` is the dispatch's epoch, as its routing has it):

    the caller's stream                              a stream of yours
    dispatch   tokens leave
               counts have come, epoch(routing) = n  --start()-->  your kernel begins
               rows 0 .. C-1 stored, arrived[0] = n  ----------->  waits for arrived[0] to reach n, works on rows 0 .. C-1
               rows C .. 2C-1,       arrived[1] = n  ----------->  and so on, in any order
    combine    waits for a quarter of sendable       <-----------  out_rows 0 .. C-1 stored, sendable[0] = n
               sums and sends those tokens           <-----------  ...
               all sendable: the rest, and results

On a CPU a dispatch returns when all rows are there, and a combine is called when all rows are made: the words are there, and
say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from a2a.algorithms.moe_base import MoeSpec
from a2a.errors import UnsupportedError


class ReadyFlags:
    """The ready flags of an ExpertParallel made with `ready_rows`: words of its device, for kernels that work on its rows.

    Row r of a dispatch belongs to word r // rows: those of expert e to the words from offsets_E[e - 1] // rows up to
    (offsets_E[e] - 1) // rows. With an `expert_alignment` that is a multiple of `ready_rows` no word has two experts.

    A word is true of a routing when `word - epoch(routing)`, as a signed 32-bit number, is not negative. Read it with
    acquire, store it with release, both of GPU scope; `wait_ready` and `mark_ready` of csrc/cuda/ready.cuh do. Words of one
    instance serve all its routings, so mark these in the order of their dispatches.

    Attributes:
        rows: of a word: `ready_rows`.
        arrived: int32 [W]. The rows of the word, padding included, and all that the routing says of them are here. Words
            behind the last row become true too. With layout="compact": the tokens that `row_index_R` names for rows that
            are no padding.
        sendable: int32 [W], stored by the kernel that makes `out_rows`, for `combine(..., ready=True)`.
        reserved_sms: a kernel that waits for `arrived` must have at most (SMs of the GPU - reserved_sms) blocks, so that
            those which bring rows find room; and it is launched before `combine(..., ready=True)` is called.
        defines: macros that a kernel which includes csrc/cuda/ready.cuh is compiled with.
    """

    reserved_sms: int = 0
    defines: Mapping[str, int] = MappingProxyType({})

    def __init__(self, spec: MoeSpec, arrived: torch.Tensor, sendable: torch.Tensor) -> None:
        assert spec.ready_rows is not None
        self.rows, self.arrived, self.sendable = spec.ready_rows, arrived, sendable

    @staticmethod
    def of_cpu(spec: MoeSpec, rank: int, world_size: int) -> ReadyFlags:
        """Words that are true of every routing."""
        return ReadyFlags(spec, *torch.zeros(2, spec.ready_words(rank, world_size), dtype=torch.int32))

    def epoch(self, routing: Any) -> torch.Tensor:
        """int32 [1]: what the words of a routing must reach. On the device, since every replay of a graph has another."""
        return torch.zeros(1, dtype=torch.int32)

    def start(self, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream (None: the current one) go on when the last dispatch knows how many rows of which expert come.

        From there on `offsets_E`, `rows_per_expert` and `epoch(routing)` hold, and a kernel may wait for `arrived`. It runs
        beside the dispatch, so make the tensors that it writes under its own stream, or before the dispatch; and have the
        caller's stream wait for it before tensors of the dispatch are dropped.
        """

    def params(self, routing: Any) -> Any:
        """A ctypes structure to pass to a CUDA kernel by value, which takes it as `a2a::ReadyFlags` (csrc/cuda/ready.cuh).

        Raises:
            UnsupportedError: on a CPU.
        """
        raise UnsupportedError(
            "ReadyFlags.params: there are no CUDA kernels on a CPU; the words are in .arrived, .sendable"
        )


__all__ = ["ReadyFlags"]
