"""The collectives of tensors, with torch.distributed's names, arguments and meaning.

A call that repeats an earlier one (same dtype and bytes of a row; its splits may be new) takes the fast way: one call into
C, which knows it again (`a2a/kernels/prepared.py`). Everything else is checked here, in this order: what one rank can see by
itself raises ValueError or TypeError on that rank, whose peers are told with the communicator still in step; what only shows
between ranks is found by the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.dlpack
from torch.autograd.graph import increment_version
from torch.distributed import distributed_c10d as c10d

from a2a.algorithms.base import AllToAll, Request
from a2a.algorithms.c10d import originals
from a2a.comm import Communicator, _implicit, implicit, implicit_key
from a2a.kernels.prepared import UNKNOWN
from a2a.plan import Plan, choose
from a2a.work import Work

# Sizes may differ between ranks and the algorithm may not: one plan, at this size, serves every all-to-all of a
# communicator.
_PLANNED_BYTES = 1 << 20
_CPU = torch.device("cpu")
_DLPACK_CUDA = 2  # DLPack's number for CUDA memory
_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_profiling = torch._C._autograd._profiler_enabled


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """Send a part of `input` to every rank and fill `output` with the parts that they send here.

    Args:
        output, input: any dtype (the same), any strides, at least one dimension, on the group's device; torch tensors, NumPy
            arrays, CuPy arrays or anything else with `__dlpack__` or `__cuda_array_interface__`. `output` is overwritten.
            Tensors of `Communicator.empty` are stored to and loaded from directly; others are staged. On a GPU the call is
            part of torch's current stream, which first waits for the stream that an array says it is made on; let its
            library use that stream too (`cupy.cuda.ExternalStream`) or wait for it before it touches the arrays again.
        output_split_sizes, input_split_sizes: rows of dimension 0 from and to each rank; a sequence, NumPy array or
            tensor; None or empty: even. Zeros are fine, and either may be given without the other.
        group: a ProcessGroup, a Communicator, or None for the default group.
        async_op: return at once, before any peer has come.
    Returns: Work if `async_op`, else None.
    Raises:
        ValueError, TypeError: arguments that can't be right; peers in the same call raise MismatchError.
        MismatchError: ranks disagree on op, dtype, row size or splits.
        PeerTimeoutError: a peer died, or did not come within the communicator's deadline. Names it.
    Cost: `a2a plan all_to_all --bytes N` prints it.
    Like: torch.distributed.all_to_all_single. Differs: every dtype and stride; errors instead of hangs.
    """
    if _is_compiling():
        return _traced("all_to_all_single", output, input, output_split_sizes, input_split_sizes, group, async_op)
    comm = group if type(group) is Communicator else _comm(group, "all_to_all_single", input)
    if type(input) is type(output) is _Tensor and not _profiling():
        if async_op:
            ticket = comm.prepared.submit_all_to_all(output, input, output_split_sizes, input_split_sizes)
            if ticket != UNKNOWN:
                return _submitted(comm, ticket, "all_to_all_single", output, input)
        else:
            result = comm.prepared.all_to_all(output, input, output_split_sizes, input_split_sizes)
            if result == 0:
                return None
            if result > 0:
                comm.raise_failure(result, "all_to_all_single")
    with _named("all_to_all_single"):
        return _all_to_all_single(comm, output, input, output_split_sizes, input_split_sizes, async_op)


def all_to_all(
    output_tensor_list: Sequence[Any], input_tensor_list: Sequence[Any], group: Any = None, async_op: bool = False
) -> Work | None:
    """Send `input_tensor_list[r]` to rank r; `output_tensor_list[r]` becomes what rank r sends here.

    Args:
        output_tensor_list, input_tensor_list: one tensor a rank, of any shapes and strides, all of one dtype; the piece from
            rank r has as many bytes here as there. Overwritten and read, respectively.
        group, async_op: as in `all_to_all_single`.
    Returns, Raises, Cost: as in `all_to_all_single`.
    Like: torch.distributed.all_to_all. Differs: sizes may differ on every engine.
    """
    if _is_compiling():
        return _traced("all_to_all", output_tensor_list, input_tensor_list, group, async_op)
    first = input_tensor_list[0] if isinstance(input_tensor_list, Sequence) and input_tensor_list else None
    comm = group if type(group) is Communicator else _comm(group, "all_to_all", first)
    with _named("all_to_all"):
        return _all_to_all_list(comm, output_tensor_list, input_tensor_list, async_op)


def _comm(group: Any, op: str, tensor: Any) -> Communicator:
    world = c10d._world.default_pg if group is None else group
    if isinstance(tensor, torch.Tensor):
        device = tensor.device if tensor.is_cuda else _CPU
    else:
        device = _device_of(tensor)
    known = _implicit.get(id(world) if device is _CPU else implicit_key(world, device.type))
    if known is not None and known[0]() is world and not known[1]._closed:
        return known[1]
    return implicit(world, op, device.type, device)


def _submitted(comm: Communicator, ticket: int, op: str, output: torch.Tensor, input: torch.Tensor) -> Work:
    """A call of `comm.prepared` that is on its way."""
    work = Work(comm, ticket, op, [output], (output, input), functools.partial(_stored, output))
    comm.keep(work)
    return work


def _stored(output: torch.Tensor) -> None:
    """Have autograd know that memory has other contents."""
    if not output.is_inference():
        increment_version(output)


def _traced(name: str, *args: Any) -> Work | None:
    if any(isinstance(a, Communicator) for a in args):
        raise TypeError(
            f"{name}: while compiling, pass a ProcessGroup instead of a Communicator: the graph names groups"
        )
    work: Work | None = originals[name](*args)
    return work


def _named(op: str) -> contextlib.AbstractContextManager[Any]:
    return torch.profiler.record_function(f"a2a::{op}") if _profiling() else contextlib.nullcontext()


# ---------------------------------------------------------------- the checked way


def _all_to_all_single(
    comm: Communicator, output: Any, input: Any, output_splits: Any, input_splits: Any, async_op: bool
) -> Work | None:
    op = "all_to_all_single"
    comm.check_open(op)
    algorithm = _algorithm(comm)
    try:
        out, inp = _tensor(output, f"{op}: output", comm.device), _tensor(input, f"{op}: input", comm.device)
        _check_pair(op, comm, out, inp)
        for which, tensor in (("output", out), ("input", inp)):
            if tensor.dim() == 0:
                raise ValueError(f"{op}: {which} has no dimension 0 to split; use view(1)")
        out_rows = _splits(op, "output", output_splits, out.shape[0], comm.world_size)
        in_rows = _splits(op, "input", input_splits, inp.shape[0], comm.world_size)
        row_shape = _row_shape(op, out, inp)
    except (ValueError, TypeError) as error:
        _refuse(comm, algorithm, op, error, async_op)
        raise
    row_bytes = row_shape.numel() * inp.element_size()
    if inp.numel() == 0 and out.numel() == 0:
        row_bytes = 0  # this rank has nothing to say about rows
    dtype = str(inp.dtype).removeprefix("torch.")
    text = f"{op}({dtype}, rows of {list(row_shape)})" if row_shape else f"{op}({dtype})"
    request = algorithm.register(comm, f"{op}|{dtype}", row_bytes, text)
    source, target, finish = _contiguous(out, inp)
    even = not async_op and len(set(in_rows)) == 1 and len(set(out_rows)) == 1 and source.numel() == target.numel()
    work = None
    if even:
        algorithm.run_even(comm, request, target, source, op)
    else:
        outputs, inputs = list(torch.split(target, out_rows)), list(torch.split(source, in_rows))
        if async_op:
            work = algorithm.submit(comm, request, outputs, inputs, op, [out], finish)
        else:
            algorithm.run(comm, request, outputs, inputs, op)
    if comm.prepared.native or (even and output_splits is None and input_splits is None):
        prepared = algorithm.prepare_even(comm, request, source.numel() * source.element_size())
        if prepared is not None:
            comm.prepared.add("all_to_all", None, out, inp, prepared)
    if work is None:
        finish()
    elif not (out is output and inp is input):
        work = work.holding(comm, [out, inp])
    return work


def _all_to_all_list(
    comm: Communicator, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool
) -> Work | None:
    op = "all_to_all"
    comm.check_open(op)
    algorithm = _algorithm(comm)
    try:
        outputs = _tensors(op, "output_tensor_list", output_list, comm)
        inputs = _tensors(op, "input_tensor_list", input_list, comm)
        for rank, (out, inp) in enumerate(zip(outputs, inputs, strict=True)):
            _check_pair(f"{op}: piece {rank}", comm, out, inp)
            if inp.dtype != inputs[0].dtype:
                raise TypeError(
                    f"{op}: input {rank} is {inp.dtype}, input 0 is {inputs[0].dtype}; all must have one dtype"
                )
        mine = comm.rank
        if outputs[mine].numel() != inputs[mine].numel():
            raise ValueError(
                f"{op}: rank {mine} sends itself {inputs[mine].numel()} elements but expects {outputs[mine].numel()}"
            )
    except (ValueError, TypeError) as error:
        _refuse(comm, algorithm, op, error, async_op)
        raise
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    request = algorithm.register(comm, f"{op}|{dtype}", 0, f"{op}({dtype})")
    pairs = [_contiguous(out, inp) for out, inp in zip(outputs, inputs, strict=True)]
    sources, targets = [p[0] for p in pairs], [p[1] for p in pairs]

    def finish() -> None:
        for pair in pairs:
            pair[2]()

    if async_op:
        work = algorithm.submit(comm, request, targets, sources, op, outputs, finish)
        own = all(isinstance(value, torch.Tensor) for value in (*output_list, *input_list))
        return work if own else work.holding(comm, [*outputs, *inputs])
    algorithm.run(comm, request, targets, sources, op)
    finish()
    return None


def _algorithm(comm: Communicator) -> AllToAll:
    plan: Plan | None = comm.plans.get("all_to_all")
    if plan is None:
        plan = comm.plans["all_to_all"] = choose(Request("all_to_all", torch.uint8, _PLANNED_BYTES), comm)
    assert isinstance(plan.algorithm, AllToAll)
    return plan.algorithm


def _refuse(comm: Communicator, algorithm: AllToAll, op: str, error: Exception, async_op: bool) -> None:
    request = algorithm.register(comm, f"{op}|?", 0, f"{op} (refused)")
    algorithm.refuse(comm, request, f"{type(error).__name__}: {error}", async_op)


def _device_of(array: Any) -> torch.device:
    """Where an array of another library lies; what does not say so is taken for memory of the CPU."""
    if hasattr(array, "__dlpack_device__"):
        kind, index = array.__dlpack_device__()
        return torch.device("cuda", index) if int(kind) == _DLPACK_CUDA else _CPU
    return torch.device("cuda") if hasattr(array, "__cuda_array_interface__") else _CPU


def _tensor(value: Any, what: str, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        if value.flags.writeable:
            return torch.from_numpy(value)
        if "output" in what:
            raise ValueError(f"{what} is a read-only NumPy array")
        with warnings.catch_warnings():  # torch warns that nobody may write to the tensor; nobody does
            warnings.simplefilter("ignore")
            return torch.from_numpy(value)
    if hasattr(value, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(value)  # which has the array's stream waited for
    if hasattr(value, "__cuda_array_interface__") and device.type == "cuda":
        return _from_cuda_array_interface(value, what, device)
    raise TypeError(
        f"{what} must be a torch tensor, a NumPy array or an object with __dlpack__ or, on GPUs, __cuda_array_interface__; "
        f"got {type(value)}"
    )


def _from_cuda_array_interface(array: Any, what: str, device: torch.device) -> torch.Tensor:
    told = array.__cuda_array_interface__
    if "output" in what and told["data"][1]:
        raise ValueError(f"{what} is a read-only array")
    tensor = torch.as_tensor(array, device=device)
    if tensor.numel() and tensor.data_ptr() != told["data"][0]:
        raise ValueError(f"{what} is on another GPU than this communicator's {device}")
    stream = told.get("stream")
    if stream is not None:  # torch does not look at it; 1 is the default stream, 2 a thread's own
        made_on = torch.cuda.default_stream(device) if stream == 1 else torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(device).wait_stream(made_on)
    return tensor


def _tensors(op: str, name: str, values: Any, comm: Communicator) -> list[torch.Tensor]:
    world_size = comm.world_size
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"{op}: {name} must be a list of tensors; got {type(values)}")
    if len(values) != world_size:
        raise ValueError(f"{op}: {name} has {len(values)} tensors; a group of {world_size} ranks needs {world_size}")
    return [_tensor(value, f"{op}: {name}[{rank}]", comm.device) for rank, value in enumerate(values)]


def _check_pair(op: str, comm: Communicator, out: torch.Tensor, inp: torch.Tensor) -> None:
    if out.dtype != inp.dtype:
        raise TypeError(f"{op}: output tensor must have the same type as input tensor; got {out.dtype} and {inp.dtype}")
    for which, tensor in (("output", out), ("input", inp)):
        if tensor.device != comm.device:
            raise ValueError(f"{op}: {which} is on {tensor.device}, but this communicator serves {comm.device} tensors")
        if tensor.layout != torch.strided:
            raise ValueError(f"{op}: {which} is {tensor.layout}; only strided (dense) tensors can be exchanged")
        if tensor.is_quantized:
            raise TypeError(f"{op}: {which} is quantized; exchange its int_repr()")
    if out.numel() and any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"{op}: output has several elements in one place (expanded, stride 0); pass output.contiguous()"
        )


def _splits(op: str, which: str, splits: Any, rows: int, world_size: int) -> list[int]:
    if splits is not None and not hasattr(splits, "__len__"):
        raise TypeError(f"{op}: {which}_split_sizes must be a sequence of integers; got {splits!r} of {type(splits)}")
    if splits is None or len(splits) == 0:
        if rows % world_size:
            raise ValueError(
                f"{op}: {which} tensor's dim 0 does not divide equally across group size: {rows} rows, {world_size} ranks; "
                f"pass {which}_split_sizes"
            )
        return [rows // world_size] * world_size
    sizes = list(splits.tolist() if hasattr(splits, "tolist") else splits)
    if set(map(type, sizes)) != {int}:
        sizes = [_index(op, which, n) for n in sizes]
    if len(sizes) != world_size:
        raise ValueError(
            f"{op}: number of tensor splits not equal to group size: {which}_split_sizes has {len(sizes)} entries, "
            f"the group {world_size} ranks"
        )
    if min(sizes) < 0:
        raise ValueError(f"{op}: {which}_split_sizes has a negative entry: {sizes}")
    if sum(sizes) != rows:
        raise ValueError(
            f"{op}: split sizes doesn't match total dim 0 size: {which}_split_sizes {sizes} add up to {sum(sizes)}, "
            f"but the {which} tensor has {rows} rows"
        )
    return sizes


def _index(op: str, which: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{op}: {which}_split_sizes must hold integers; got {value!r} of {type(value)}")
    return int(value.__index__())


def _row_shape(op: str, out: torch.Tensor, inp: torch.Tensor) -> torch.Size:
    if out.numel() and inp.numel() and out.shape[1:].numel() != inp.shape[1:].numel():
        raise ValueError(
            f"{op}: rows differ: output has rows of shape {list(out.shape[1:])}, input of {list(inp.shape[1:])}; "
            f"split sizes count rows, so both need the same number of elements in a row"
        )
    return inp.shape[1:] if inp.numel() else out.shape[1:]


def _contiguous(out: torch.Tensor, inp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
    """(what to send, where to receive, what to do afterwards)."""
    source, target = inp.detach().resolve_conj().resolve_neg().contiguous(), out.detach()
    if not target.is_contiguous() or target.is_conj() or target.is_neg():
        target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    size = target.numel() * target.element_size()
    if (
        size
        and source.numel()
        and -source.numel() * source.element_size() < source.data_ptr() - target.data_ptr() < size
    ):
        source = source.clone()  # pieces arrive while others are still to be sent

    def finish() -> None:
        if target.data_ptr() != out.data_ptr():
            with torch.no_grad():
                out.copy_(target)
        else:
            _stored(out)

    return source, target, finish
