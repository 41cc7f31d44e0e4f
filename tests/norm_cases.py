"""Rows to reduce and norm, and what must come out: the documented order, one NumPy operation after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Rows(NamedTuple):
    """One call's tensors, of this rank, and what it must give."""

    input: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    residual_out: torch.Tensor


def spread(seed: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different size, so that another order of sums shows."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 4, shape))
    return torch.from_numpy(values).to(dtype)


def tree(squares: np.ndarray) -> np.ndarray:
    """The sum of each row, neighbours first."""
    width = 1
    while width < squares.shape[-1]:
        width *= 2
    leaves = np.zeros((*squares.shape[:-1], width), np.float32)
    leaves[..., : squares.shape[-1]] = squares
    while leaves.shape[-1] > 1:
        leaves = leaves[..., 0::2] + leaves[..., 1::2]
    return leaves[..., 0]


def rounded(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    assert values.dtype == np.float32
    return torch.from_numpy(values).to(dtype)


def reference(
    inputs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, residual_out)."""
    dtype, wide = residual.dtype, [term.float().numpy() for term in inputs]
    total = wide[0]
    for term in wide[1:]:
        total = total + term
    residual_out = rounded(residual.float().numpy() + rounded(total, dtype).float().numpy(), dtype)
    r = residual_out.float().numpy()
    mean = tree(r * r) / np.float32(r.shape[-1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    out = rounded(r * scale[..., None] * weight.float().numpy(), dtype)
    return out, residual_out


def rows(rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype, eps: float, salt: int = 0) -> Rows:
    """A call, on the CPU."""
    seed = [*shape, salt]
    inputs = [spread([*seed, r], shape, dtype) for r in range(world_size)]
    residual, weight = spread([*seed, 1000], shape, dtype), spread([*seed, 1001], shape[-1:], dtype)
    return Rows(inputs[rank], residual, weight, *reference(inputs, residual, weight, eps))
