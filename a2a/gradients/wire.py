"""What gradients look like on a rail, and the error feedback of formats that lose some of them.

A format turns a flat tensor into a payload and back. `Feedback` keeps, for one tensor that travels again and again,
what the last payload lost, and adds it to the next one: what a step rounds away, the next one sends. It begins at zero,
and forgets infinities and NaN, which an optimizer skips, so that they don't come back.

    fp8   e4m3, a float32 scale for 128 elements: amax / 448 by true division, 1 where that is 0; nearest even. The
          format of ExpertParallel's wire="fp8", bit for bit. The payload is all elements, then all scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from a2a.kernels import cpu

FORMATS = (None, "bf16", "fp8")
BLOCK = 128
_E4M3_MAX = 448.0
_FLOAT32, _FP8 = 0, 1  # Dtype and Wire in csrc/cpu/simd.h
_UNIT_BYTES = 64  # what pieces are a multiple of: a cache line


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients of this dtype are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Wire(ABC):
    """A format for tensors of one dtype; one object serves one tensor at a time.

    Attributes:
        loses: whether a payload can differ from what it was made of.
        unit: what a tensor's number of elements is a multiple of.
    """

    loses: bool = True
    unit: int = BLOCK

    @abstractmethod
    def empty(self, count: int, device: torch.device) -> Tensor:
        """Room for the payload of `count` elements."""

    @abstractmethod
    def encode(self, payload: Tensor, values: Tensor) -> None:
        """Fill `payload` from `values`, of the gradients' dtype or that of sums."""

    @abstractmethod
    def decode(self, payload: Tensor, count: int) -> Tensor:
        """The `count` elements of a payload; only to be read, and before the next call."""


class CastWire(Wire):
    """Elements of another dtype, or of the gradients' own, which loses nothing but what a sum has beyond it."""

    def __init__(self, dtype: torch.dtype, *, loses: bool) -> None:
        self.dtype, self.loses = dtype, loses
        self.unit = _UNIT_BYTES // dtype.itemsize

    def empty(self, count: int, device: torch.device) -> Tensor:
        return torch.empty(count, dtype=self.dtype, device=device)

    def encode(self, payload: Tensor, values: Tensor) -> None:
        payload.copy_(values)

    def decode(self, payload: Tensor, count: int) -> Tensor:
        return payload


class Fp8Wire(Wire):
    """e4m3 with a float32 scale for every 128 elements."""

    def empty(self, count: int, device: torch.device) -> Tensor:
        return torch.empty(count + count // BLOCK * 4, dtype=torch.uint8, device=device)

    def encode(self, payload: Tensor, values: Tensor) -> None:
        count = values.numel()
        blocks = values.to(torch.float32).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True).div_(_E4M3_MAX)
        scales = torch.where(scales == 0, 1.0, scales)
        payload[:count].view(torch.float8_e4m3fn).view(-1, BLOCK).copy_(blocks / scales)
        payload[count:].view(torch.float32).copy_(scales.view(-1))

    def decode(self, payload: Tensor, count: int) -> Tensor:
        elements = payload[:count].view(torch.float8_e4m3fn).to(torch.float32)
        scales = payload[count:].view(torch.float32)
        return elements.view(-1, BLOCK).mul_(scales.view(-1, 1)).view(-1)


class CpuFp8Wire(Fp8Wire):
    """The same, by the library's kernels."""

    def __init__(self) -> None:
        self._decoded = torch.empty(0)  # kept, since new pages are dear

    def encode(self, payload: Tensor, values: Tensor) -> None:
        values, count = values.to(torch.float32).contiguous(), values.numel()
        scales = payload.data_ptr() + count
        cpu.lib().a2a_quantize(_FLOAT32, _FP8, payload.data_ptr(), scales, values.data_ptr(), count)

    def decode(self, payload: Tensor, count: int) -> Tensor:
        if self._decoded.numel() < count:
            self._decoded = torch.empty(count, dtype=torch.float32)
        values, elements = self._decoded[:count], payload.data_ptr()
        cpu.lib().a2a_dequantize(_FLOAT32, _FP8, values.data_ptr(), elements, elements + count, count)
        return values


def make_wire(name: str | None, dtype: torch.dtype, device: torch.device) -> Wire:
    """The format called `name` for gradients of `dtype` on `device`.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in FORMATS:
        raise ValueError(f"GradientReducer: wire={name!r}; expected one of {', '.join(map(repr, FORMATS))}")
    if name == "fp8":
        return CpuFp8Wire() if device.type == "cpu" else Fp8Wire()
    if name == "bf16" and dtype != torch.bfloat16:
        return CastWire(torch.bfloat16, loses=True)
    return CastWire(dtype, loses=False)


class Feedback:
    """What payloads of one tensor have lost so far and still owe."""

    def __init__(self, wire: Wire, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._wire = wire
        self.owed = torch.zeros(count, dtype=sum_dtype(dtype), device=device) if wire.loses else None

    def encode(self, payload: Tensor, values: Tensor) -> None:
        """Fill `payload` from `values` and what is owed, and keep what it loses."""
        if self.owed is None:
            self._wire.encode(payload, values)
            return
        owed = self.owed.add_(values)
        self._wire.encode(payload, owed)
        owed.sub_(self._wire.decode(payload, owed.numel()))
        torch.nan_to_num_(owed, nan=0.0, posinf=0.0, neginf=0.0)
