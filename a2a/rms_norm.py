"""All-reduce, residual add and RMSNorm in one call: what follows a row-parallel linear layer in tensor-parallel inference.

As in reductions.py, a call that repeats an earlier one takes the fast way, and everything else is checked here: what one
rank can see by itself raises ValueError or TypeError on that rank, whose peers are told with the communicator still in step.
While compiling, the call is the op `a2a::all_reduce_rms_norm`, which names the group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from a2a.algorithms.base import Request
from a2a.algorithms.rms_norm_base import NORM_DTYPES, OP, RmsNorm, Tensors
from a2a.comm import Communicator
from a2a.moe_ops import make_effectful
from a2a.ops import _comm, _named
from a2a.plan import Plan, choose

_MOST_KEPT = 1024  # plans and prepared calls of a communicator
_NO_GRADIENT = (
    f"{OP} has no gradient: call it under torch.no_grad() or torch.inference_mode(); for training, call all_reduce and "
    f"torch.nn.functional.rms_norm"
)
_resolve: Any = torch._C._distributed_c10d._resolve_process_group
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_profiling = torch._C._autograd._profiler_enabled


def all_reduce_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    group: Any = None,
    *,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the sum of `input` over all ranks to `residual`, and norm the rows of that: (out, residual_out).

    `residual_out = residual + sum`, `out = residual_out / sqrt(mean(residual_out ** 2) + eps) * weight`. The sum is taken in
    rank order in float32 and rounded to the dtype, and so is the sum with the residual; everything after that is float32 and
    rounded once, with the squares of a row summed as a binary tree of neighbours. These bits are the same on every rank, on
    CPUs and GPUs, whatever the number of rows and the algorithm, and those of `all_reduce` followed by the same formula.

    Args:
        input: [..., hidden], bfloat16, float16 or float32, on the group's device; of equal shape on all ranks. Rows longer
            than 16384, and on GPUs rows of no multiple of 16 bytes, go to the group's own engine.
        residual: like `input`, and equal on all ranks.
        weight: [hidden], of the same dtype, equal on all ranks.
        eps: added to the mean of squares; equal on all ranks.
        group: a ProcessGroup, a Communicator, or None for the default group.
        out, residual_out: contiguous tensors like `input` to store to, new ones if None. Each may be `input` or `residual`.
    Returns: (out, residual_out).
    Raises:
        ValueError, TypeError: arguments that can't be right; peers in the same call raise MismatchError.
        RuntimeError: a gradient is asked for; there is none.
        MismatchError: ranks disagree on shape, dtype or eps.
        PeerTimeoutError: a peer died, or did not come within the communicator's deadline. Names it.
    Cost: that of an all-reduce, and one pass over the rows; `a2a plan all_reduce_rms_norm --bytes N` prints it.
    Like: torch.distributed.all_reduce, an add, and torch.nn.functional.rms_norm. Differs: one kernel; forward only.
    """
    if _is_compiling():
        return _traced(input, residual, weight, eps, group, out, residual_out)
    comm = group if type(group) is Communicator else _comm(group, OP, input)
    if type(input) in _PLAIN and type(residual) in _PLAIN and type(weight) in _PLAIN and not _profiling():
        done = _again(comm, input, residual, weight, eps, out, residual_out)
        if done is not None:
            return done
    with _named(OP):
        return _checked(comm, input, residual, weight, eps, out, residual_out)


def _again(
    comm: Communicator, input: Tensor, residual: Tensor, weight: Tensor, eps: float,
    out: Tensor | None, residual_out: Tensor | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Make the call if one like it was made before, into new tensors or in place."""
    shape, dtype = input.shape, input.dtype
    ready = comm.repeated.get((OP, eps, dtype, shape))
    if (
        ready is None
        or residual.shape != shape
        or weight.shape != shape[-1:]
        or not dtype == residual.dtype == weight.dtype
        or not (input.is_contiguous() and residual.is_contiguous() and weight.is_contiguous())
        or not ready.device == input.get_device() == residual.get_device() == weight.get_device()
        or (torch.is_grad_enabled() and (input.requires_grad or residual.requires_grad or weight.requires_grad))
        or input.is_neg() or residual.is_neg() or weight.is_neg()
    ):  # fmt: skip
        return None
    given = [tensor for tensor in (out, residual_out) if tensor is not None]
    if given and not _may_be_stored_to(given, (input, residual, weight), ready.device):
        return None
    out = torch.empty_like(input) if out is None else out
    residual_out = torch.empty_like(input) if residual_out is None else residual_out
    to, added_to, of, added, scaled = (x.data_ptr() for x in (out, residual_out, input, residual, weight))
    if (to | added_to | of | added | scaled) % ready.alignment:
        return None
    if given:
        _stored_to(*given)
    result = ready(to, added_to, of, added, scaled)
    if result:
        comm.raise_failure(result, OP)
    return out, residual_out


def _may_be_stored_to(given: list[Tensor], sources: tuple[Tensor, Tensor, Tensor], device: int) -> bool:
    """Whether the kernels may store to these, each of which is one of the first two sources or overlaps none."""
    first, second, weight = sources
    if _overlap(first, second) or (len(given) == 2 and _overlap(*given)):
        return False
    for tensor in given:
        if tensor is first or tensor is second:
            continue
        if (
            type(tensor) not in _PLAIN
            or tensor.shape != first.shape
            or tensor.dtype != first.dtype
            or tensor.get_device() != device
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or (tensor.requires_grad and torch.is_grad_enabled())
            or any(_overlap(tensor, source) for source in sources)
        ):
            return False
    return not any(_overlap(tensor, weight) for tensor in given)


# ---------------------------------------------------------------- the checked way


def _checked(
    comm: Communicator, input: Tensor, residual: Tensor, weight: Tensor, eps: float,
    out: Tensor | None, residual_out: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    comm.check_open(OP)
    try:
        _check(comm, input, residual, weight, eps, out, residual_out)
    except (ValueError, TypeError, RuntimeError) as error:
        _refuse(comm, error)
        raise
    hidden, dtype = input.shape[-1], str(input.dtype).removeprefix("torch.")
    asked = Request(OP, input.dtype, input.numel() * input.element_size(), (("hidden", hidden),))
    algorithm = _algorithm(comm, asked)
    rows = input.numel() // hidden
    request = algorithm.register(
        comm,
        f"{OP}|{dtype}|{rows}|{hidden}|{eps!r}|{algorithm.name}",
        f"{OP}({dtype}, {rows} rows of {hidden}, eps {eps:g})",
    )
    targets = [_target(tensor, input, algorithm.alignment) for tensor in (out, residual_out)]
    sources = [_source(tensor, targets, algorithm.alignment) for tensor in (input, residual, weight)]
    algorithm.run(comm, asked, request, Tensors(*targets, *sources), eps)
    results = []
    for given, target in zip((out, residual_out), targets, strict=True):
        if given is not None and target.data_ptr() != given.data_ptr():
            given.detach().copy_(target)
        results.append(target if given is None else given)
    _stored_to(out, residual_out)
    ready = algorithm.prepare(comm, asked, request, eps)
    if ready is not None:
        if len(comm.repeated) >= _MOST_KEPT:
            comm.repeated.clear()
        comm.repeated[(OP, eps, input.dtype, input.shape)] = ready
    return results[0], results[1]


def _check(
    comm: Communicator, input: Tensor, residual: Tensor, weight: Tensor, eps: float,
    out: Tensor | None, residual_out: Tensor | None,
) -> None:  # fmt: skip
    named = {"input": input, "residual": residual, "weight": weight, "out": out, "residual_out": residual_out}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{OP}: {name} must be a torch tensor; got {type(tensor)}")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{OP}: {name} must be dense; got {tensor.layout}")
        if tensor.dtype not in NORM_DTYPES or tensor.dtype != input.dtype:
            raise TypeError(
                f"{OP}: tensors must all be bfloat16, all float16 or all float32; {name} is {tensor.dtype}, input "
                f"{input.dtype}"
            )
        if tensor.device != comm.device:
            raise ValueError(f"{OP}: {name} is on {tensor.device}, but this communicator serves {comm.device} tensors")
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"{OP}: input must have rows; its shape is {list(input.shape)}")
    for name, tensor in given.items():
        wanted = input.shape[-1:] if name == "weight" else input.shape
        if tensor.shape != wanted:
            raise ValueError(
                f"{OP}: {name} has shape {list(tensor.shape)}; with an input of {list(input.shape)} it must be "
                f"{list(wanted)}"
            )
        if "out" in name and not tensor.is_contiguous():
            raise ValueError(f"{OP}: {name} must be contiguous; its strides are {tensor.stride()}")
    if out is not None and residual_out is not None and _overlap(out, residual_out):
        raise ValueError(f"{OP}: out and residual_out overlap; they are two results")
    if not isinstance(eps, float | int) or not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{OP}: eps must be a finite number that is not negative; got {eps!r}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given.values()):
        raise RuntimeError(_NO_GRADIENT)


def _target(given: Tensor | None, input: Tensor, alignment: int) -> Tensor:
    """Where the kernels store a result."""
    if given is None or given.data_ptr() % alignment:
        return torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return given.detach()


def _source(tensor: Tensor, targets: list[Tensor], alignment: int) -> Tensor:
    """What they read: a copy where it lies otherwise than they can, or where it would be stored over too early."""
    source = tensor.detach().resolve_neg().contiguous()
    for target in targets:
        same = source.data_ptr() == target.data_ptr() and source.shape == target.shape
        if _overlap(source, target) and not same:
            return source.clone()
    return source.clone() if source.data_ptr() % alignment else source


def _stored_to(*outputs: Tensor | None) -> None:
    for output in outputs:
        if output is not None and not output.is_inference():
            increment_version(output)


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _algorithm(comm: Communicator, asked: Request) -> RmsNorm:
    key = f"{asked.op}|{asked.dtype}|{asked.num_bytes}|{asked.detail}"
    plan: Plan | None = comm.plans.get(key)
    if plan is None:
        if len(comm.plans) >= _MOST_KEPT:
            comm.plans.clear()
        plan = comm.plans[key] = choose(asked, comm)
    assert isinstance(plan.algorithm, RmsNorm)
    return plan.algorithm


def _refuse(comm: Communicator, error: Exception) -> None:
    """Tell the peers, whichever algorithm they use: its first signal is the same."""
    algorithm = _algorithm(comm, Request(OP, torch.float32, 0, (("hidden", 4),)))
    request = algorithm.register(comm, f"{OP}|?", f"{OP} (refused)")
    algorithm.refuse(comm, request, f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- the op of compiled programs

_torch_library: Any = torch.library  # untyped in torch
_library = _torch_library.Library("a2a", "FRAGMENT")
_library.define(f"{OP}(Tensor input, Tensor residual, Tensor weight, float eps, str group_name) -> (Tensor, Tensor)")


def _traced(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: Any,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if isinstance(group, Communicator):
        raise TypeError(f"{OP}: while compiling, pass a ProcessGroup instead of a Communicator: the graph names groups")
    if torch.is_grad_enabled() and (input.requires_grad or residual.requires_grad or weight.requires_grad):
        raise RuntimeError(_NO_GRADIENT)
    named: Any = dist.group.WORLD if group is None else group
    made, made_residual = torch.ops.a2a.all_reduce_rms_norm(input, residual, weight, eps, named.group_name)
    if out is not None:
        made = out.copy_(made)
    if residual_out is not None:
        made_residual = residual_out.copy_(made_residual)
    return made, made_residual


def _run(input: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> tuple[Tensor, Tensor]:
    group = _resolve(group_name)
    with torch.no_grad():
        return all_reduce_rms_norm(input, residual, weight, eps, group)


def _fake(input: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input, memory_format=torch.contiguous_format), torch.empty_like(
        input, memory_format=torch.contiguous_format
    )


def _no_gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError(_NO_GRADIENT)


for _device in ("CPU", "CUDA"):
    _library.impl(OP, _run, _device)
_torch_library.register_fake(f"a2a::{OP}", _fake, lib=_library)
_torch_library.register_autograd(f"a2a::{OP}", _no_gradient, lib=_library)
make_effectful(_library, OP)
