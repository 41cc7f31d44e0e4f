"""The collectives of megatron.core.tensor_parallel.mappings on a2a, by name, so on any process group.

Each function takes the place of one of Megatron's with the same arguments and result. Results lie on the device of their
input. Uneven all-gathers and reduce-scatters are all-to-alls of lists; sums are then taken in rank order in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import a2a


def all_gather_into_tensor(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """As torch's function: Megatron has a name of its own for it (`dist_all_gather_func`)."""
    return a2a.all_gather_into_tensor(output, input, group, async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """As torch's function: Megatron has a name of its own for it (`dist_reduce_scatter_func`)."""
    return a2a.reduce_scatter_tensor(output, input, op, group, async_op)


def reduce(input_: Tensor, group: Any) -> Tensor:
    if dist.get_world_size(group) == 1:
        return input_
    input_ = input_.contiguous()
    a2a.all_reduce(input_, group=group)
    return input_


def gather_along_last_dim(input_: Tensor, group: Any) -> Tensor:
    size = dist.get_world_size(group)
    if size == 1:
        return input_
    gathered = input_.new_empty(size, *input_.shape)
    a2a.all_gather_into_tensor(gathered, input_.contiguous(), group=group)
    return torch.cat(list(gathered), dim=-1)


class AllToAll(torch.autograd.Function):
    """Of Megatron's `_AllToAll`. Splits may be lists, tensors or NumPy arrays."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, input: Tensor, output_splits: Any, input_splits: Any, use_nccl_stream: bool = False
    ) -> Tensor:
        ctx.group, ctx.splits = group, (output_splits, input_splits)
        if dist.get_world_size(group) == 1:
            return input
        rows = len(input) if output_splits is None else int(sum(output_splits))
        output = input.new_empty(rows, *input.shape[1:])
        a2a.all_to_all_single(output, input.contiguous(), output_splits, input_splits, group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        output_splits, input_splits = ctx.splits
        exchange: Any = AllToAll.apply
        return None, exchange(ctx.group, *grads, input_splits, output_splits), None, None, None


# What Megatron calls torch's functions.
ALIASES = {"dist_all_gather_func": all_gather_into_tensor, "dist_reduce_scatter_func": reduce_scatter_tensor}


def _first_dim_functions(mappings: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(gather, reduce-scatter) along the first dimension; `use_global_buffer` asks Megatron for its buffer."""

    def new(shape: Sequence[int], like: Tensor, use_global_buffer: bool) -> Tensor:
        if use_global_buffer:
            buffer: Tensor = mappings.get_global_memory_buffer().get_tensor(list(shape), like.dtype, "mpu")
            return buffer
        return like.new_empty(shape)

    def gather_along_first_dim(
        input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Tensor:
        size = dist.get_world_size(group)
        if size == 1:
            return input_
        rows = len(input_) * size if output_split_sizes is None else sum(output_split_sizes)
        output = new([rows, *input_.shape[1:]], input_, use_global_buffer)
        if output_split_sizes is None:
            a2a.all_gather_into_tensor(output, input_.contiguous(), group=group)
        else:
            a2a.all_to_all(list(torch.split(output, list(output_split_sizes))), [input_.contiguous()] * size, group)
        return output

    def reduce_scatter_along_first_dim(
        input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Tensor:
        size = dist.get_world_size(group)
        if size == 1:
            return input_
        if input_split_sizes is None:
            if len(input_) % size:
                raise ValueError(
                    f"reduce-scatter along the first dimension: {len(input_)} rows can't be shared evenly by {size} ranks "
                    f"of tensor parallelism; pad the sequence or pass input_split_sizes"
                )
            output = new([len(input_) // size, *input_.shape[1:]], input_, use_global_buffer)
            a2a.reduce_scatter_tensor(output, input_.contiguous(), group=group)
            return output
        parts = list(torch.split(input_.contiguous(), list(input_split_sizes)))
        mine = parts[dist.get_rank(group)]
        received = [torch.empty_like(mine) for _ in range(size)]
        a2a.all_to_all(received, parts, group)
        total = received[0].float() if input_.dtype in (torch.float16, torch.bfloat16) else received[0]
        for part in received[1:]:
            total = total + part
        output = new(mine.shape, mine, use_global_buffer)
        return output.copy_(total)

    return gather_along_first_dim, reduce_scatter_along_first_dim


def functions(mappings: Any) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Of each name in Megatron's module `mappings`: the parameters that it has, and what takes its place."""
    gather, reduce_scatter = _first_dim_functions(mappings)
    exchanged = ("ctx", "group", "input", "output_split_sizes", "input_split_sizes")
    return {
        "_reduce": (("input_", "group"), reduce),
        "_gather_along_last_dim": (("input_", "group"), gather_along_last_dim),
        "_gather_along_first_dim": (("input_", "group", "output_split_sizes", "use_global_buffer"), gather),
        "_reduce_scatter_along_first_dim": (
            ("input_", "group", "input_split_sizes", "use_global_buffer"),
            reduce_scatter,
        ),
        "_AllToAll": (exchanged, AllToAll),
    }
