"""The collectives of ExpertParallel as torch.library ops: what autograd, torch.compile and the profiler see.

Decisions:

* `Library.define` and `impl` rather than `custom_op`, which costs several times as much per call.
* The ops are **effectful** (ordered): a compiler may not remove, reorder or recompute them, since every rank counts on
  every other.
* An ExpertParallel is named by a number in their signature, since a graph can't hold the object. The registry of numbers
  is weak.
* The backward of a dispatch runs on every rank or on none: an `anchor` that requires a gradient, and never gets one, makes
  the outputs of all ranks differentiable, whatever their own inputs say (a rank without tokens may bring a fresh empty
  tensor).
* Everything is checked inside the ops, when they run: a traced program would otherwise carry guards on values.
* Row counts are unbacked symbols in a traced program, 0 and 1 included.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from a2a.algorithms.moe_base import Origins

if TYPE_CHECKING:
    from a2a.moe import ExpertParallel

_numbers = itertools.count(1)
_instances: weakref.WeakValueDictionary[int, ExpertParallel] = weakref.WeakValueDictionary()

_torch_library: Any = torch.library  # untyped in torch
_library = _torch_library.Library("a2a", "DEF")
# The outputs are those of moe_base.Dispatched, as one list: torch's inductor (2.13) loses track of unbacked sizes in an
# effectful op with several returns.
_library.define(
    "moe_dispatch(int ep, Tensor x, Tensor? scales, Tensor topk_ids, Tensor? topk_weights, Tensor? anchor) -> Tensor[]"
)
_library.define(
    "moe_combine(int ep, Tensor rows, Tensor row_weights, Tensor row_rank, Tensor row_token, Tensor row_k, "
    "Tensor row_index, Tensor ids, Tensor plan, bool apply_weights, bool ready) -> Tensor"
)
_library.define(
    "moe_combine_backward(int ep, Tensor grad, Tensor? rows, Tensor? row_weights, Tensor row_rank, Tensor row_token, "
    "Tensor row_k, Tensor row_index, Tensor ids, Tensor plan) -> (Tensor grad_rows, Tensor grad_weights)"
)
_library.define(
    "moe_dispatch_backward(int ep, Tensor grad_rows, Tensor grad_weights, Tensor row_rank, Tensor row_token, Tensor row_k, "
    "Tensor row_index, Tensor ids, Tensor plan) -> (Tensor grad, Tensor grad_topk_weights)"
)


def register(instance: ExpertParallel) -> int:
    """A number by which the ops know the instance, for as long as it lives."""
    number = next(_numbers)
    _instances[number] = instance
    return number


def _instance(number: int) -> ExpertParallel:
    instance = _instances.get(number)
    if instance is None:
        raise ValueError(
            "a2a: the ExpertParallel of this graph is gone (another process, or collected); keep it alive as long as "
            "what was made with it"
        )
    return instance


# ---------------------------------------------------------------- what runs


def _dispatch(
    number: int,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    anchor: torch.Tensor | None,
) -> list[torch.Tensor]:
    return list(_instance(number)._run_dispatch(x, scales, topk_ids, topk_weights))


def _combine(number: int, rows: torch.Tensor, row_weights: torch.Tensor, *origins_and_flags: Any) -> torch.Tensor:
    *origins, apply_weights, ready = origins_and_flags
    return _instance(number)._run_combine(rows, row_weights if apply_weights else None, Origins(*origins), ready)


def _combine_backward(
    number: int,
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    *origins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _instance(number)._run_combine_backward(grad, rows, row_weights, Origins(*origins))


def _dispatch_backward(
    number: int, grad_rows: torch.Tensor, grad_weights: torch.Tensor, *origins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _instance(number)._run_dispatch_backward(grad_rows, grad_weights, Origins(*origins))


for _name, _function in (
    ("moe_dispatch", _dispatch),
    ("moe_combine", _combine),
    ("moe_combine_backward", _combine_backward),
    ("moe_dispatch_backward", _dispatch_backward),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)


# ---------------------------------------------------------------- what a tracer sees


def _fake_dispatch(
    number: int,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    anchor: torch.Tensor | None,
) -> list[torch.Tensor]:
    from a2a.algorithms.moe_base import SCALE_DTYPE

    spec, comm = _instance(number).spec, _instance(number).comm
    plan_size: Any = _instance(number)._exchange.plan_size
    context = torch.library.get_ctx()
    capacity: Any = spec.max_rows if spec.max_rows is not None else context.new_dynamic_size()
    height: Any = capacity
    if spec.layout == "compact":
        height = spec.compact_rows(comm.world_size) if spec.max_rows is not None else context.new_dynamic_size()
    wired = spec.rows == "wire"
    rows = topk_ids.new_empty((height, spec.hidden), dtype=torch.float8_e4m3fn if wired else spec.dtype)
    row_scales = topk_ids.new_empty(0, dtype=torch.float32)
    if wired and spec.wire is not None:
        row_scales = topk_ids.new_empty((height, spec.scale_blocks), dtype=SCALE_DTYPE[spec.wire])
    local = spec.local_experts(comm.rank)
    ints = [topk_ids.new_empty(capacity, dtype=torch.int32) for _ in range(3)]
    return [
        rows,
        row_scales,
        topk_ids.new_empty(local, dtype=torch.int32),
        topk_ids.new_empty(local, dtype=torch.int32),
        topk_ids.new_empty(capacity, dtype=torch.float32),
        *ints,
        topk_ids.new_empty(capacity if spec.layout == "compact" else 0, dtype=torch.int32),
        topk_ids.new_empty(1, dtype=torch.int32),
        topk_ids.new_empty(topk_ids.shape, dtype=torch.int32),
        topk_ids.new_empty(context.new_dynamic_size() if plan_size is None else plan_size, dtype=torch.int32),
    ]


def _fake_combine(number: int, rows: torch.Tensor, row_weights: torch.Tensor, *origins_and_flags: Any) -> torch.Tensor:
    spec, origins = _instance(number).spec, Origins(*origins_and_flags[:-2])
    return rows.new_empty((origins.topk_ids_TK.shape[0], spec.hidden), dtype=spec.dtype)


def _fake_combine_backward(
    number: int,
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    *origins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    spec, num_rows = _instance(number).spec, origins[0].shape[0]
    return (
        grad.new_empty((num_rows, spec.hidden), dtype=spec.dtype),
        grad.new_empty(num_rows, dtype=torch.float32),
    )


def _fake_dispatch_backward(
    number: int, grad_rows: torch.Tensor, grad_weights: torch.Tensor, *origins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    spec, ids = _instance(number).spec, Origins(*origins).topk_ids_TK
    return (
        grad_rows.new_empty((ids.shape[0], spec.hidden), dtype=spec.dtype),
        grad_rows.new_empty((ids.shape[0], spec.top_k), dtype=torch.float32),
    )


for _name, _function in (
    ("moe_dispatch", _fake_dispatch),
    ("moe_combine", _fake_combine),
    ("moe_combine_backward", _fake_combine_backward),
    ("moe_dispatch_backward", _fake_dispatch_backward),
):
    _torch_library.register_fake(f"a2a::{_name}", _function, lib=_library)


# ---------------------------------------------------------------- gradients


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    number, _, _, _, weights, _ = inputs
    ctx.ep = number
    ctx.weights_dtype = None if weights is None else weights.dtype
    rows, scales, counts, offsets, _, rank, token, k, index, overflow, ids, plan = output
    ctx.mark_non_differentiable(counts, offsets, rank, token, k, index, overflow, ids, plan, scales)
    ctx.rows_shape = rows.shape
    ctx.save_for_backward(rank, token, k, index, ids, plan)


def _dispatch_gradient(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    grad_rows, grad_weights = grads[0], grads[4]
    origins = ctx.saved_tensors
    rank, device = origins[0], origins[0].device
    spec = _instance(ctx.ep).spec
    if spec.rows == "wire":
        raise RuntimeError(
            "dispatch with rows='wire' is not differentiable by autograd; call ExpertParallel.dispatch_backward yourself"
        )
    if grad_rows is None:
        grad_rows = torch.zeros(ctx.rows_shape, dtype=spec.dtype, device=device)
    if grad_weights is None:
        grad_weights = torch.zeros(rank.shape, dtype=torch.float32, device=device)
    grad_x, grad_topk = torch.ops.a2a.moe_dispatch_backward(ctx.ep, grad_rows, grad_weights, *origins)
    grad_weights = None if ctx.weights_dtype is None else grad_topk.to(ctx.weights_dtype)
    return None, grad_x, None, None, grad_weights, None


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    number, rows, weights, *origins, apply_weights, _ = inputs
    ctx.ep, ctx.apply_weights = number, apply_weights
    dot = apply_weights and ctx.needs_input_grad[2]
    ctx.save_for_backward(rows if dot else None, weights if apply_weights else None, *origins)


def _combine_gradient(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    rows, weights, *origins = ctx.saved_tensors
    grad_rows, grad_weights = torch.ops.a2a.moe_combine_backward(ctx.ep, grad, rows, weights, *origins)
    return None, grad_rows, grad_weights, *(None for _ in range(len(Origins._fields) + 2))


def _once(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    raise RuntimeError(
        "ExpertParallel has no second derivative: its backward can't be differentiated (create_graph=True)"
    )


def _no_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is kept: there is no second derivative."""


_torch_library.register_autograd("a2a::moe_dispatch", _dispatch_gradient, setup_context=_dispatch_context, lib=_library)
_torch_library.register_autograd("a2a::moe_combine", _combine_gradient, setup_context=_combine_context, lib=_library)
for _name in ("moe_combine_backward", "moe_dispatch_backward"):
    _torch_library.register_autograd(f"a2a::{_name}", _once, setup_context=_no_context, lib=_library)


def make_effectful(library: Any, *names: str) -> None:
    """Tell compilers that ops of `library` may not be removed, reordered or recomputed."""
    if hasattr(torch.library, "_register_effectful_op"):
        from torch._library.effects import EffectType

        for name in names:
            torch.library._register_effectful_op(f"a2a::{name}", EffectType.ORDERED, lib=library)
    else:
        from torch._higher_order_ops import effects

        for name in names:
            effects._register_effectful_op(getattr(torch.ops.a2a, name).default, effects._EffectType.ORDERED)


make_effectful(_library, "moe_dispatch", "moe_combine", "moe_combine_backward", "moe_dispatch_backward")
