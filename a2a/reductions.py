"""All-reduce, reduce-scatter and all-gather, with torch.distributed's names, arguments and meaning.

As in ops.py: a call that repeats an earlier one (same op, dtype and number of elements) takes the fast way, one call into C.
Everything else is checked here: what one rank can see by itself raises ValueError or TypeError on that rank, whose peers
are told with the communicator still in step; what only shows between ranks is found by the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from a2a.algorithms.base import Request
from a2a.algorithms.reduction_base import Reduction
from a2a.comm import Communicator
from a2a.kernels.prepared import UNKNOWN
from a2a.ops import _check_pair, _comm, _named, _stored, _submitted, _tensor, _traced
from a2a.plan import Plan, choose
from a2a.work import Work

_MOST_KEPT = 1024  # plans and prepared calls of a communicator
_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
_MEMBERS = {op: op for op in _NAMES}  # what equals a member, to the member itself
_BY_NUMBER = {hash(dist.ReduceOp(op)): op for op in _NAMES}
_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_profiling = torch._C._autograd._profiler_enabled


def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Work | None:
    """Reduce `tensor` over all ranks of `group`; every rank ends with the same bits.

    Args:
        tensor: any shape and strides, on the group's device; a torch tensor or an array as `all_to_all_single` takes.
            Overwritten.
        op: SUM, AVG, MAX or MIN of float16, bfloat16, float32, float64, uint8 or int8 to int64, in rank order from the first
            term. float16 and bfloat16 are summed in float32 and rounded once; integers wrap around. AVG is the sum, then one
            true division, and takes no integers. A NaN of any rank is the result of MAX and MIN. Other ops and dtypes go to
            the group's own engine. Of several domains: each domain's sum, rounded to the dtype, then the sum of those.
        group: a ProcessGroup, a Communicator, or None for the default group.
        async_op: return at once, before any peer has come.
    Returns: Work if `async_op`, else None.
    Raises:
        ValueError, TypeError: arguments that can't be right; peers in the same call raise MismatchError.
        MismatchError: ranks disagree on op, dtype or number of elements.
        PeerTimeoutError: a peer died, or did not come within the communicator's deadline. Names it.
    Cost: `a2a plan all_reduce --bytes N` prints it.
    Like: torch.distributed.all_reduce. Differs: bitwise equal on all ranks, runs and, for one topology, algorithms; AVG also
        on CPUs.
    """
    if _is_compiling():
        return _traced("all_reduce", tensor, op, group, async_op)
    comm = group if type(group) is Communicator else _comm(group, "all_reduce", tensor)
    if type(tensor) is _Tensor and not _profiling():
        if async_op:
            ticket = comm.prepared.submit_all_reduce(tensor, op)
            if ticket != UNKNOWN:
                return _submitted(comm, ticket, "all_reduce", tensor, tensor)
        else:
            result = comm.prepared.all_reduce(tensor, op)
            if result == 0:
                return None
            if result > 0:
                comm.raise_failure(result, "all_reduce")
    with _named("all_reduce"):
        return _reduction(comm, "all_reduce", "all_reduce", tensor, tensor, op, async_op)


def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Reduce `input` over all ranks of `group`; rank r's `output` is the r-th of the result's equal shares.

    Args:
        output, input: of one dtype; `input` has world_size times as many elements as `output`, whatever their shapes.
            `output` is overwritten; it may be this rank's share of `input`.
        op, group, async_op: as in `all_reduce`.
    Returns, Raises: as in `all_reduce`.
    Cost: `a2a plan reduce_scatter --bytes N` prints it.
    Like: torch.distributed.reduce_scatter_tensor. Differs: the bits are those of `all_reduce`.
    """
    if _is_compiling():
        return _traced("reduce_scatter_tensor", output, input, op, group, async_op)
    comm = group if type(group) is Communicator else _comm(group, "reduce_scatter_tensor", input)
    if type(input) is type(output) is _Tensor and not _profiling():
        if async_op:
            ticket = comm.prepared.submit_reduce_scatter(output, input, op)
            if ticket != UNKNOWN:
                return _submitted(comm, ticket, "reduce_scatter", output, input)
        else:
            result = comm.prepared.reduce_scatter(output, input, op)
            if result == 0:
                return None
            if result > 0:
                comm.raise_failure(result, "reduce_scatter_tensor")
    with _named("reduce_scatter_tensor"):
        return _reduction(comm, "reduce_scatter", "reduce_scatter_tensor", output, input, op, async_op)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
) -> Work | None:
    """Fill `output_tensor` with the `input_tensor` of every rank of `group`, in rank order.

    Args:
        output_tensor, input_tensor: of one dtype, any; `output_tensor` has world_size times as many elements, whatever their
            shapes. `output_tensor` is overwritten; `input_tensor` may be this rank's share of it. An `output_tensor` of
            `Communicator.empty` is stored to by the peers.
        group, async_op: as in `all_reduce`.
    Returns, Raises: as in `all_reduce`.
    Cost: `a2a plan all_gather --bytes N` prints it.
    Like: torch.distributed.all_gather_into_tensor. Differs: every dtype.
    """
    if _is_compiling():
        return _traced("all_gather_into_tensor", output_tensor, input_tensor, group, async_op)
    op = "all_gather_into_tensor"
    comm = group if type(group) is Communicator else _comm(group, op, input_tensor)
    if type(input_tensor) is type(output_tensor) is _Tensor and not _profiling():
        if async_op:
            ticket = comm.prepared.submit_all_gather(output_tensor, input_tensor)
            if ticket != UNKNOWN:
                return _submitted(comm, ticket, "all_gather", output_tensor, input_tensor)
        else:
            result = comm.prepared.all_gather(output_tensor, input_tensor)
            if result == 0:
                return None
            if result > 0:
                comm.raise_failure(result, op)
    with _named(op):
        return _reduction(comm, "all_gather", op, output_tensor, input_tensor, None, async_op)


_ReduceOp = type(dist.ReduceOp.SUM)


# ---------------------------------------------------------------- the checked way


def _reduction(
    comm: Communicator, kind: str, op: str, output: Any, input: Any, reduce_op: Any, async_op: bool
) -> Work | None:
    """`kind`: what the planner calls it; `op`: what the user does. `output` is `input` in an all-reduce."""
    comm.check_open(op)
    in_place = output is input
    try:
        inp = _tensor(input, f"{op}: {'output' if in_place else 'input'}", comm.device)
        out = inp if in_place else _tensor(output, f"{op}: output", comm.device)
        _check_pair(op, comm, out, inp)
        _check_sizes(op, kind, comm, out, inp)
        reduces = "" if kind == "all_gather" else _reduce_name(op, reduce_op, inp)
    except (ValueError, TypeError) as error:
        _refuse(comm, kind, op, error, async_op, input)
        raise
    dtype, count = str(inp.dtype).removeprefix("torch."), min(inp.numel(), out.numel())
    plan = _plan(comm, kind, inp.dtype, inp.numel() * inp.element_size(), reduces)
    algorithm, asked = _algorithm(plan), plan.request
    of = ", ".join(filter(None, (dtype, reduces, f"{count} elements")))
    request = algorithm.register(comm, f"{op}|{dtype}|{reduces}|{count}|{algorithm.name}", f"{op}({of})")
    source, target, finish = _memory(kind, comm, out, inp)
    work = None
    if async_op:
        work = algorithm.submit(comm, asked, request, target, source, reduce_op, [out], finish)
        if not (out is output and inp is input):
            work = work.holding(comm, [out, inp])
    else:
        algorithm.run(comm, asked, request, target, source, reduce_op)
        finish()
    ready = algorithm.prepare(comm, asked, request, target) if comm.prepared.native or not async_op else None
    if ready is not None:
        comm.prepared.add(kind, _MEMBERS[reduce_op_of(reduce_op)] if reduces else None, out, inp, ready)
    return work


def _plan(comm: Communicator, kind: str, dtype: torch.dtype, num_bytes: int, reduces: str) -> Plan:
    """`reduces`: the name of the reduction, or "" where there is none."""
    key = (kind, dtype, num_bytes, reduces)
    plan: Plan | None = comm.plans.get(key)
    if plan is None:
        if len(comm.plans) >= _MOST_KEPT:
            comm.plans.clear()
        detail = (("reduce_op", reduces),) if reduces else ()
        plan = comm.plans[key] = choose(Request(kind, dtype, num_bytes, detail), comm)
    return plan


def _algorithm(plan: Plan) -> Reduction:
    assert isinstance(plan.algorithm, Reduction)
    return plan.algorithm


def why_handed_over(comm: Communicator, kind: str, tensor: torch.Tensor, reduce_op: Any) -> str | None:
    """Why the group's own engine does a call with this input; None: a2a does it. `kind` is what the planner calls it."""
    reduces = "" if kind == "all_gather" else _NAMES.get(reduce_op, "premul_sum")
    plan = _plan(comm, kind, tensor.dtype, tensor.numel() * tensor.element_size(), reduces)
    if not plan.algorithm.baseline:
        return None
    general = "shares" if comm.device_type == "cuda" else "two_shot"
    return dict(plan.rejected).get(general, f"{plan.algorithm.name} is planned")


def reduce_op_of(given: Any) -> Any:
    """A ReduceOp object as the member of the enumeration that it equals, if it does; None: SUM."""
    if type(given) is dist.ReduceOp:
        return _BY_NUMBER.get(hash(given), given)
    return dist.ReduceOp.SUM if given is None else given


def _refuse(comm: Communicator, kind: str, op: str, error: Exception, async_op: bool, input: Any) -> None:
    """Tell the peers, whichever algorithm they use: its first signal is the same."""
    num_bytes = input.nbytes if isinstance(input, torch.Tensor) and comm.transport is None else 0
    algorithm = _algorithm(_plan(comm, kind, torch.float32, num_bytes, "sum"))
    request = algorithm.register(comm, f"{op}|?", f"{op} (refused)")
    algorithm.refuse(comm, request, op, f"{type(error).__name__}: {error}", async_op)


def _reduce_name(op: str, reduce_op: Any, tensor: torch.Tensor) -> str:
    if not isinstance(reduce_op, (dist.ReduceOp, _ReduceOp)):
        raise TypeError(f"{op}: op must be a torch.distributed.ReduceOp; got {reduce_op!r} of {type(reduce_op)}")
    name = _NAMES.get(reduce_op_of(reduce_op), "premul_sum")
    if name == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"{op}: AVG takes floating point numbers; got {tensor.dtype}. Use SUM and divide as you need")
    return name


def _check_sizes(op: str, kind: str, comm: Communicator, out: torch.Tensor, inp: torch.Tensor) -> None:
    if kind == "all_reduce":
        return
    whole, share = (("output", out), ("input", inp)) if kind == "all_gather" else (("input", inp), ("output", out))
    if whole[1].numel() != share[1].numel() * comm.world_size:
        raise ValueError(
            f"{op}: {whole[0]} tensor size must be equal to world_size times {share[0]} tensor size: {whole[0]} has "
            f"{whole[1].numel()} elements, {share[0]} {share[1].numel()}, the group {comm.world_size} ranks"
        )


def _memory(
    kind: str, comm: Communicator, out: torch.Tensor, inp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
    """(what to read, where to store, what to do afterwards)."""
    source, target = inp.detach().resolve_conj().resolve_neg().contiguous(), out.detach()
    if kind == "all_reduce":
        target = source
    elif not target.is_contiguous() or target.is_conj() or target.is_neg():
        target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    elif _overlap(source, target):
        whole, share = (target, source) if kind == "all_gather" else (source, target)
        if share.data_ptr() != whole.data_ptr() + comm.rank * share.nbytes:
            source = source.clone()  # shares arrive while others are still to be sent

    def finish() -> None:
        if target.data_ptr() != out.data_ptr():
            with torch.no_grad():
                out.copy_(target)
        else:
            _stored(out)

    return source, target, finish


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
