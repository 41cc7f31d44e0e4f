"""What the ways to do an all-reduce with a residual add and RMSNorm have in common, and its two ways on CPUs.

    summed       = round(input of rank 0 + input of rank 1 + ...)
    residual_out = round(residual + summed)
    scale        = 1 / sqrt(S / hidden + eps)            S: the squares of a row of residual_out, summed as a tree
    out          = round((residual_out * scale) * weight)

Everything is float32; `round` is to the tensors' dtype, and happens nowhere else. The tree adds neighbours, columns 2i and
2i + 1, then these sums in the same way, with zeros behind the row's end. `rms_norm` is the last three lines in torch.

One-shot and two-shot are those of the all-reduce (csrc/cpu/reduce_one_shot.cpp, reduce_two_shot.cpp) by whole rows. In the
two-shot, a rank hands out its rows of residual_out with their scales, and each rank multiplies for itself.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from a2a.algorithms.base import Algorithm, Cost, Part, Request, own_copy
from a2a.algorithms.reduction_base import DTYPES, ONE_SHOT_BYTES
from a2a.kernels import cpu

if TYPE_CHECKING:
    from a2a.comm import Communicator

OP = "all_reduce_rms_norm"
NORM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_COLUMNS = 16384  # kNormColumns in csrc/cpu/simd.h and csrc/cuda/norm.cuh


def hidden_of(request: Request) -> int:
    """Elements of a row; any, where a request is about the op in general."""
    hidden: int = request.get("hidden", 1024)
    return hidden


class Tensors(NamedTuple):
    """Of one call, contiguous. `out` and `residual_out` may each be `input` or `residual`, else nothing overlaps."""

    out: torch.Tensor
    residual_out: torch.Tensor
    input: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor

    @property
    def pointers(self) -> tuple[int, int, int, int, int]:
        """Of all of them, in order."""
        out, residual_out, input, residual, weight = self
        return out.data_ptr(), residual_out.data_ptr(), input.data_ptr(), residual.data_ptr(), weight.data_ptr()


class Prepared:
    """A call whose tensors may change.

    Attributes:
        device: `get_device()` of the tensors that it takes.
        alignment: that their addresses must have, in bytes.
    """

    device: int
    alignment: int = 1

    def __call__(self, out: int, residual_out: int, input: int, residual: int, weight: int) -> int:
        """Make it, with tensors at these addresses; 0 or a failure."""
        raise NotImplementedError


class RmsNorm(Algorithm):
    """An all-reduce with a residual add and RMSNorm. Its requests have the bytes of the input, and "hidden" in `detail`."""

    op: ClassVar[str] = OP
    alignment: ClassVar[int] = 1  # of all tensors' addresses, in bytes

    @abstractmethod
    def run(self, comm: Communicator, asked: Request, request: int, tensors: Tensors, eps: float) -> None:
        """Do it; `request` is what `register` gave."""

    def prepare(self, comm: Communicator, asked: Request, request: int, eps: float) -> Prepared | None:
        """What the op's fast way may call for tensors of this size; None: nothing."""
        return None

    def register(self, comm: Communicator, agree: str, text: str) -> int:
        """Make a request known, so that peers that ask for something else can be told."""
        index: int = comm.require_transport(OP).request(agree, 0, text)
        return index

    @abstractmethod
    def refuse(self, comm: Communicator, request: int, why: str) -> None:
        """Tell the peers that this rank can't make its call."""

    def no_kernel(self, request: Request) -> str | None:
        """Why no kernel takes such rows, or None."""
        if hidden_of(request) > MOST_COLUMNS:
            return f"its rows have up to {MOST_COLUMNS} columns; asked for {request.get('hidden')}"
        return None


class _CpuPrepared(Prepared):
    def __init__(self, struct: cpu.Norm) -> None:
        self.device = -1
        self._struct, self._address = struct, ctypes.addressof(struct)
        self._call = cpu.lib().a2a_reduce_norm

    def __call__(self, out: int, residual_out: int, input: int, residual: int, weight: int) -> int:
        result: int = self._call(self._address, out, residual_out, input, residual, weight)
        return result


class CpuRmsNorm(RmsNorm):
    """What the one-shot and two-shot algorithms share."""

    device_type: ClassVar[str] = "cpu"
    two_shot: ClassVar[bool] = False

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if (reason := self.no_memory(comm) or self.no_kernel(request)) is not None:
            return reason
        if not self.two_shot:
            if request.num_bytes > ONE_SHOT_BYTES:
                return f"a rank's input has {request.num_bytes} bytes; its slot takes {ONE_SHOT_BYTES}"
            return None
        if isinstance(comm.transport, type):
            return None  # planned for ranks that are not here
        row_bytes, most = hidden_of(request) * request.dtype.itemsize, self._most_row_bytes(comm)
        if row_bytes > most:
            needed = 4 * row_bytes // 1024
            return f"a row has {row_bytes} bytes, a slot of the staging {most}; set A2A_STAGING_KB to {needed}"
        return None

    @staticmethod
    def _most_row_bytes(comm: Communicator) -> int:
        most: int = cpu.lib().a2a_two_shot_row_bytes(comm.handle)
        return most

    def cost(self, request: Request, comm: Communicator) -> Cost:
        size, n = request.num_bytes, comm.world_size
        written = 2 * size  # both results
        if not self.two_shot:
            read = size * (n - 1)
            once = (Part("call_all_reduce"), Part("one_shot", read), own_copy(written, written + read))
            return Cost(steps=1, scale_up_bytes=read, copied_bytes=size + read // 2 + written, parts=once)
        remote = size * (n - 1) // n
        rounds = Part("call_all_reduce"), Part("signal", times=2)
        parts = (*rounds, Part("reduce_gather", remote), own_copy(written, written + 2 * remote))
        copied = 2 * remote + remote // 2 + written
        return Cost(steps=3, scale_up_bytes=2 * remote, copied_bytes=copied, parts=parts)

    def refuse(self, comm: Communicator, request: int, why: str) -> None:
        cpu.lib().a2a_refuse(comm.handle, request, why.encode()[:1000])

    def prepare(self, comm: Communicator, asked: Request, request: int, eps: float) -> Prepared:
        count = asked.num_bytes // asked.dtype.itemsize
        reduction = cpu.Reduction(
            context=comm.handle, request=request, dtype=DTYPES[asked.dtype], two_shot=self.two_shot, count=count
        )
        return _CpuPrepared(cpu.Norm(reduction, hidden_of(asked), eps))

    def run(self, comm: Communicator, asked: Request, request: int, tensors: Tensors, eps: float) -> None:
        result = self.prepare(comm, asked, request, eps)(*tensors.pointers)
        if result:
            comm.raise_failure(result, OP)


def rms_norm(summed: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> list[torch.Tensor]:
    """[out, residual_out] of the sum over all ranks: what the kernels do with it, bit for bit, in torch."""
    residual_out = (residual.float() + summed.float()).to(summed.dtype)
    wide = residual_out.float()
    hidden = wide.shape[-1]
    tree = torch.nn.functional.pad(wide * wide, (0, (1 << (hidden - 1).bit_length()) - hidden))
    while tree.shape[-1] > 1:
        tree = tree[..., 0::2] + tree[..., 1::2]
    mean = tree / torch.full((), float(hidden), dtype=torch.float32, device=tree.device)
    epsilon = torch.full((), eps, dtype=torch.float32, device=tree.device)
    scale = torch.ones_like(mean) / (mean + epsilon).sqrt()
    return [(wide * scale * weight.float()).to(summed.dtype), residual_out]
