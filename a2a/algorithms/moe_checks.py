"""What the arguments of an ExpertParallel may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from a2a.algorithms.moe_base import MoeSpec

ROW_MULTIPLE = 16  # bytes


def owners_of(
    expert_to_rank: Sequence[int] | torch.Tensor | None, num_experts: int, world_size: int
) -> tuple[int, ...]:
    """The rank of each expert."""
    if expert_to_rank is None:
        each, more = divmod(max(num_experts, 0), world_size)
        return tuple(r for r in range(world_size) for _ in range(each + (r < more)))
    values = expert_to_rank.tolist() if hasattr(expert_to_rank, "tolist") else expert_to_rank
    owners = tuple(int(r) for r in values)
    if len(owners) != num_experts:
        raise ValueError(f"ExpertParallel: expert_to_rank has {len(owners)} entries; num_experts is {num_experts}")
    for expert, rank in enumerate(owners):
        if not 0 <= rank < world_size:
            raise ValueError(
                f"ExpertParallel: expert_to_rank[{expert}] is {rank}; the group has ranks 0 to {world_size - 1}"
            )
    return owners


def checked(spec: MoeSpec) -> MoeSpec:
    """The same, if it is possible.

    Raises:
        ValueError, TypeError: it is not.
    """

    def one_of(name: str, allowed: tuple[Any, ...]) -> None:
        if getattr(spec, name) not in allowed:
            raise ValueError(f"ExpertParallel: {name}={getattr(spec, name)!r}; expected one of {list(allowed)}")

    for name, low, high in (
        ("num_experts", 1, 2**20),
        ("top_k", 1, 32),
        ("hidden", 1, 2**24),
        ("max_tokens", 0, 2**30),
        ("expert_alignment", 1, 2**20),
    ):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"ExpertParallel: {name} must be an integer; got {value!r}")
        if not low <= value <= high:
            raise ValueError(f"ExpertParallel: {name}={value}; expected {low} to {high}")
    if spec.num_sms is not None and (
        isinstance(spec.num_sms, bool) or not isinstance(spec.num_sms, int) or spec.num_sms < 2
    ):
        raise ValueError(f"ExpertParallel: num_sms={spec.num_sms!r}; expected None or at least 2")
    if spec.ready_rows is not None and (
        isinstance(spec.ready_rows, bool) or not isinstance(spec.ready_rows, int) or not 1 <= spec.ready_rows <= 2**20
    ):
        raise ValueError(f"ExpertParallel: ready_rows={spec.ready_rows!r}; expected None or 1 to {2**20}")
    if not isinstance(spec.dtype, torch.dtype) or spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"ExpertParallel: dtype={spec.dtype}; expected torch.bfloat16, float16 or float32")
    if spec.row_bytes % ROW_MULTIPLE:
        each = ROW_MULTIPLE // spec.dtype.itemsize
        raise ValueError(
            f"ExpertParallel: a row of hidden={spec.hidden} {spec.dtype} has {spec.row_bytes} bytes; it must be a "
            f"multiple of {ROW_MULTIPLE} bytes, so pad hidden to {-(-spec.hidden // each) * each}"
        )
    if spec.max_rows is not None and (
        isinstance(spec.max_rows, bool) or not isinstance(spec.max_rows, int) or spec.max_rows < 0
    ):
        raise ValueError(f"ExpertParallel: max_rows={spec.max_rows!r}; expected None or a number of rows")
    one_of("overflow", ("raise", "drop"))
    one_of("wire", (None, "fp8", "mxfp8"))
    one_of("rows", ("dtype", "wire"))
    one_of("layout", ("expert", "compact"))
    one_of("wire_combine", (None, "float32"))
    if spec.rows == "wire" and spec.wire is None:
        raise ValueError("ExpertParallel: rows='wire' hands out what travelled; it needs wire='fp8' or wire='mxfp8'")
    return spec


__all__ = ["ROW_MULTIPLE", "checked", "owners_of"]
