"""Context parallelism (Ulysses): ranks that hold parts of a sequence swap them for parts of the attention heads, and back.

    q, k, v = (sequence_to_heads(t, group) for t in (q, k, v))     # [B, S/P, H, D] -> [B, S, H/P, D]
    y = attention(q, k, v)                                         # whole sequences, some heads: as on one GPU
    y = heads_to_sequence(y, group)                                # [B, S, H/P, D] -> [B, S/P, H, D]

Rank r holds the r-th piece of the sequence outside and the r-th block of heads inside. Each function is the other's
gradient, and both may be differentiated twice, compiled with fullgraph and given tensors of any strides.

Decisions:

* **One copy each way**: what is sent has the sequence in front, so that what arrives is the whole sequence with no further
  copy; the caller's order of dimensions is a view of it.
* **Compiled code calls torch's functional collective**, since a graph holds no a2a call; on backend "a2a" that is a2a's
  again. Eager code runs on a2a whatever the group's backend is.

Source: DeepSpeed Ulysses (arXiv:2309.14509), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import a2a


def sequence_to_heads(
    x: Tensor, group: Any = None, *, sequence_dim: int = 1, head_dim: int = 2, lengths: Sequence[int] | None = None
) -> Tensor:
    """Give up all heads of a part of the sequence for the whole sequence of a part of the heads. Collective.

    Args:
        x: this rank's part of the sequence, with all heads; any dtype, strides and number of dimensions, such as
            [batch, S/P, heads, D], or [batch, heads, S/P, D] with sequence_dim=2, head_dim=1.
        group: a ProcessGroup, a DeviceMesh of one dimension, an a2a.Communicator (not while compiling), or None for the
            default group. P is its number of ranks.
        sequence_dim, head_dim: which dimensions those are.
        lengths: how long each rank's part of the sequence is, in rank order; None: all as long as this one.
    Returns: the sequence of all ranks, in rank order, with the heads divided by P; differentiable.
    Raises:
        ValueError: the heads don't divide by P, or a shape is not what the other arguments say; on every rank alike.
    Cost: one copy here and one all-to-all, of which (P - 1) / P goes to other ranks.
    """
    rank, size = _place(group)
    sequence_dim, head_dim = _dimensions("sequence_to_heads", x, sequence_dim, head_dim)
    here, heads = x.shape[sequence_dim], x.shape[head_dim]
    if heads % size:
        raise ValueError(
            f"sequence_to_heads: dimension {head_dim} has {heads} heads, which {size} ranks can't share evenly. Where they "
            f"are keys' or values' that several queries share, repeat each (repeat_interleave) until they divide; else use "
            f"a group whose size divides {heads}"
        )
    _check_lengths("sequence_to_heads", lengths, rank, size, here)
    # To each rank its block of heads: [P, S/P, ..., heads/P, ...], sequence first, without the sequence where it was.
    rows: Tensor = x.unflatten(head_dim, (size, heads // size))  # type: ignore[no-untyped-call]
    sequence_at = sequence_dim if sequence_dim < head_dim else sequence_dim + 1
    rows = rows.movedim((head_dim, sequence_at), (0, 1)).contiguous().flatten(0, 1)
    lists = None if lengths is None else (list(lengths), [here] * size)
    return _exchange(rows, lists, group).movedim(0, sequence_dim)


def heads_to_sequence(
    x: Tensor, group: Any = None, *, sequence_dim: int = 1, head_dim: int = 2, lengths: Sequence[int] | None = None
) -> Tensor:
    """Give back what `sequence_to_heads` took: the whole sequence of some heads for a part of it with all heads. Collective.

    Args:
        x: the whole sequence with this rank's heads, such as [batch, S, heads/P, D].
        group, sequence_dim, head_dim, lengths: as in `sequence_to_heads`; without `lengths` all parts are S / P long.
    Returns: this rank's part of the sequence with the heads of all ranks, in rank order; differentiable.
    Raises:
        ValueError: without `lengths`, a sequence that doesn't divide by P; or a shape is not what the other arguments say.
    Cost: as `sequence_to_heads`, and another copy here.
    """
    rank, size = _place(group)
    sequence_dim, head_dim = _dimensions("heads_to_sequence", x, sequence_dim, head_dim)
    whole = x.shape[sequence_dim]
    if lengths is None and whole % size:
        raise ValueError(
            f"heads_to_sequence: dimension {sequence_dim} has {whole} positions, which {size} ranks can't share evenly; "
            f"pass lengths, or pad the sequence"
        )
    if lengths is not None and sum(lengths) != whole:
        raise ValueError(
            f"heads_to_sequence: lengths={list(lengths)} add up to {sum(lengths)}; x has {whole} positions"
        )
    here = whole // size if lengths is None else _check_lengths("heads_to_sequence", lengths, rank, size, None)
    rows = x.movedim(sequence_dim, 0).contiguous()
    lists = None if lengths is None else ([here] * size, list(lengths))
    # [P, S/P, ...]: a block of heads a rank
    blocks: Tensor = _exchange(rows, lists, group).unflatten(0, (size, here))  # type: ignore[no-untyped-call]
    head_at = head_dim + (2 if head_dim < sequence_dim else 1)  # where the heads are, with two dimensions in front
    # The ranks' blocks lie before the heads of each, and are one dimension with them; the sequence then goes home.
    y = blocks.movedim(0, head_at - 1).flatten(head_at - 1, head_at)
    return y.movedim(0, sequence_dim)


def _exchange(rows: Tensor, splits: tuple[list[int], list[int]] | None, group: Any) -> Tensor:
    """An all-to-all of rows; `splits` are those of the output and of the input."""
    if not torch.compiler.is_compiling():
        y: Tensor = _AllToAll.apply(rows, splits, _process_group(group))  # type: ignore[no-untyped-call]
        return y
    if isinstance(group, a2a.Communicator):
        raise TypeError(
            "context parallelism: while compiling, pass a ProcessGroup or DeviceMesh: the graph names groups"
        )
    named: Any = dist.group.WORLD if group is None else group
    output_splits, input_splits = splits or (None, None)
    return funcol.all_to_all_single_autograd(rows, output_splits, input_splits, named)


class _AllToAll(torch.autograd.Function):
    """An all-to-all of rows; its gradient is the one with the splits exchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: tuple[list[int], list[int]] | None, group: Any) -> Tensor:
        ctx.splits, ctx.group = splits, group
        output_splits, input_splits = splits or (None, None)
        height = len(rows) if output_splits is None else sum(output_splits)
        output = rows.new_empty((height, *rows.shape[1:]))
        a2a.all_to_all_single(output, rows, output_splits, input_splits, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        splits = None if ctx.splits is None else ctx.splits[::-1]
        grad_rows: Tensor = _AllToAll.apply(grad.contiguous(), splits, ctx.group)  # type: ignore[no-untyped-call]
        return grad_rows, None, None


def _process_group(group: Any) -> Any:
    return group.get_group() if isinstance(group, DeviceMesh) else group


def _place(group: Any) -> tuple[int, int]:
    if isinstance(group, a2a.Communicator):
        return group.rank, group.world_size
    if isinstance(group, DeviceMesh):
        return group.get_local_rank(), group.size()
    return dist.get_rank(group), dist.get_world_size(group)


def _dimensions(op: str, x: Tensor, sequence_dim: int, head_dim: int) -> tuple[int, int]:
    found = []
    for name, dim in (("sequence_dim", sequence_dim), ("head_dim", head_dim)):
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"{op}: {name}={dim}, but x has {x.dim()} dimensions")
        found.append(dim % x.dim())
    if found[0] == found[1]:
        raise ValueError(f"{op}: sequence_dim={sequence_dim} and head_dim={head_dim} are the same dimension of x")
    return found[0], found[1]


def _check_lengths(op: str, lengths: Sequence[int] | None, rank: int, size: int, here: int | None) -> int:
    """This rank's length."""
    if lengths is None:
        return here or 0
    if len(lengths) != size:
        raise ValueError(f"{op}: lengths has {len(lengths)} entries; the group has {size} ranks")
    if here is not None and lengths[rank] != here:
        raise ValueError(f"{op}: x has {here} positions on rank {rank}, where lengths says {lengths[rank]}")
    return lengths[rank]


__all__ = ["heads_to_sequence", "sequence_to_heads"]
