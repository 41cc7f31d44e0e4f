"""`Maker` of cuda_shim/make_rows.cu: a kernel that takes rows as they arrive and marks rows as it makes them."""

from __future__ import annotations

from ctypes import Structure, c_uint32, c_uint64
from typing import Any

import torch

from a2a.kernels import cuda_params

_POINTERS = "rows scales weights rank index offsets made seen_rows seen_scales seen_weights out"


class Maker(Structure):
    _fields_ = (
        ("flags", cuda_params.ReadyFlags),
        *((name, c_uint64) for name in _POINTERS.split()),
        *((name, c_uint32) for name in ("experts", "row_bytes", "scale_bytes", "out_bytes", "marks", "unused")),
    )


def pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or not tensor.numel() else tensor.data_ptr()


def row_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.dim() < 2 else tensor.shape[1] * tensor.itemsize


def maker_of(flags: Any, tensors: dict[str, torch.Tensor | None], marks: bool = True) -> Maker:
    """With tensors by the names of its pointers."""
    offsets = tensors["offsets"]
    assert offsets is not None
    return Maker(
        flags=flags, **{name: pointer(tensors.get(name)) for name in _POINTERS.split()}, experts=offsets.numel(),
        row_bytes=row_bytes(tensors["rows"]), scale_bytes=row_bytes(tensors.get("scales")),
        out_bytes=row_bytes(tensors.get("out")), marks=int(marks),
    )  # fmt: skip
