"""Reductions and all-gathers of backend "a2a", under the names and in the overloads of `dist.ProcessGroup`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from a2a.comm import Communicator
from a2a.integrations.c10d_work import Done, Pending, Several
from a2a.reductions import all_gather_into_tensor, all_reduce, reduce_op_of, reduce_scatter_tensor, why_handed_over

_profiling = torch._C._autograd._profiler_enabled
PLAIN = (Tensor, torch.nn.Parameter)  # any other kind (FakeTensor, DTensor, ...) has no memory of its own to send


def is_synchronous(opts: Any) -> bool:
    """Whether a call may be one that was made before (`Communicator.prepared`)."""
    return not (getattr(opts, "asyncOp", True) or _profiling())


def given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


class Reductions:
    """Those methods of a process group: what a2a serves it takes, all else goes to the inner group.

    Attributes:
        native: the inner group.
    """

    native: Any
    _comms: dict[str, Communicator]  # device type -> what serves it
    _cpu: Communicator | None  # the CPU's, once it is made: for calls that were made before
    _refusals: dict[str, str]  # device type -> why nothing does
    _handed_over: dict[str, int]
    _calls: dict[str, int]  # device type -> calls that its communicator took
    _thread: threading.local  # .inside: a call of a2a's is running on this thread
    _done: Done

    def _find(self, device: torch.device) -> Communicator | None:
        raise NotImplementedError

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None) -> Work:
        """As `ProcessGroup.allreduce`, in each of its overloads."""
        cpu = self._cpu
        if (
            cpu is not None
            and type(tensors) is list
            and len(tensors) == 1
            and type(tensors[0]) is Tensor
            and op is None
            and is_synchronous(opts)
        ):
            result = cpu.prepared.all_reduce(tensors[0], reduce_op_of(opts.reduceOp))
            if result == 0:
                self._calls["cpu"] += 1
                return self._done
            if result > 0:
                cpu.raise_failure(result, "all_reduce")
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reduce_op = reduce_op_of(
            next((asked for asked in (op, getattr(opts, "reduceOp", opts)) if asked is not None), None)
        )
        comm = self._reducing("all_reduce", reduce_op, listed if len(listed) == 1 else [])
        if comm is None:
            if op is None and hasattr(opts, "reduceOp"):
                work: Work | None = self.native.allreduce(listed, opts)
            else:
                work = self.native.allreduce(listed, reduce_op)
            return self._done if work is None else work
        return self._run(opts, all_reduce, listed[0], reduce_op, comm)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """As `ProcessGroup.all_gather_single`, called `_allgather_base` before torch 2.13."""
        cpu = self._cpu
        if cpu is not None and type(input) is type(output) is Tensor and is_synchronous(opts):
            result = cpu.prepared.all_gather(output, input)
            if result == 0:
                self._calls["cpu"] += 1
                return self._done
            if result > 0:
                cpu.raise_failure(result, "all_gather_into_tensor")
        comm = self._reducing("all_gather", None, [input])
        if comm is None:
            call = getattr(self.native, "all_gather_single", None) or self.native._allgather_base
            work: Work | None = call(output, input, *given(opts))
            return self._done if work is None else work
        return self._run(opts, all_gather_into_tensor, output, input, comm)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:
        """As `ProcessGroup.reduce_scatter_single`, called `_reduce_scatter_base` before torch 2.13."""
        cpu = self._cpu
        if cpu is not None and type(inputTensor) is type(outputTensor) is Tensor and is_synchronous(opts):
            result = cpu.prepared.reduce_scatter(outputTensor, inputTensor, reduce_op_of(opts.reduceOp))
            if result == 0:
                self._calls["cpu"] += 1
                return self._done
            if result > 0:
                cpu.raise_failure(result, "reduce_scatter_tensor")
        reduce_op = reduce_op_of(getattr(opts, "reduceOp", None))
        comm = self._reducing("reduce_scatter", reduce_op, [inputTensor])
        if comm is None:
            call = getattr(self.native, "reduce_scatter_single", None) or self.native._reduce_scatter_base
            work: Work | None = call(outputTensor, inputTensor, *given(opts))
            return self._done if work is None else work
        return self._run(opts, reduce_scatter_tensor, outputTensor, inputTensor, reduce_op, comm)

    _reduce_scatter_base = reduce_scatter_single

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """As `ProcessGroup.allreduce_coalesced`, one tensor after the other."""
        reduce_op = reduce_op_of(getattr(opts, "reduceOp", None))
        comm = self._reducing("all_reduce", reduce_op, tensors)
        if comm is None:
            return self._native(["allreduce_coalesced"], list(tensors), *given(opts))
        return self._run_each(opts, all_reduce, [(tensor, reduce_op, comm) for tensor in tensors])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """As `ProcessGroup.all_gather_single_coalesced`, `allgather_into_tensor_coalesced` before torch 2.13.

        torch's functional all-gathers, and so DTensor's, come this way, each with one tensor.
        """
        comm = self._reducing("all_gather", None, inputs)
        if comm is None:
            names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
            return self._native(names, list(outputs), list(inputs), *given(opts))
        pairs = zip(outputs, inputs, strict=True)
        return self._run_each(opts, all_gather_into_tensor, [(output, input, comm) for output, input in pairs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """As `ProcessGroup.reduce_scatter_single_coalesced`, `reduce_scatter_tensor_coalesced` before torch 2.13."""
        reduce_op = reduce_op_of(getattr(opts, "reduceOp", None))
        comm = self._reducing("reduce_scatter", reduce_op, inputs)
        if comm is None:
            names = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
            return self._native(names, list(outputs), list(inputs), *given(opts))
        pairs = zip(outputs, inputs, strict=True)
        return self._run_each(
            opts, reduce_scatter_tensor, [(output, input, reduce_op, comm) for output, input in pairs]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _native(self, names: Sequence[str], *args: Any) -> Work:
        """Call the first method of these names that this torch has, on the inner group."""
        call = next(getattr(self.native, name) for name in names if hasattr(self.native, name))
        work: Work | None = call(*args)
        return self._done if work is None else work

    def _run_each(self, opts: Any, call: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Work:
        """`_run` of each, as one piece of work."""
        works = [self._run(opts, call, *args) for args in calls]
        return works[0] if len(works) == 1 else Several(works)

    def _run(self, opts: Any, call: Callable[..., Any], *args: Any) -> Work:
        """Make a call of a2a's, asynchronously unless `opts` says otherwise."""
        self._thread.inside = True
        try:
            if getattr(opts, "asyncOp", True):
                return Pending(call(*args, True))
            call(*args)
        finally:
            self._thread.inside = False
        return self._done

    def _reducing(self, kind: str, reduce_op: Any, tensors: Sequence[Tensor]) -> Communicator | None:
        """What reduces or gathers all of `tensors`; None: the inner backend."""
        if not tensors or any(type(tensor) not in PLAIN or tensor.layout != torch.strided for tensor in tensors):
            return None
        tensor = tensors[0]
        if getattr(self._thread, "inside", False):
            return None
        device_type = tensor.device.type
        comm = self._comms.get(device_type) or self._find(tensor.device)
        if comm is None:
            reason: str | None = self._refusals[device_type]
        else:
            reasons = (why_handed_over(comm, kind, tensor, reduce_op) for tensor in tensors)
            reason = next((why for why in reasons if why is not None), None)
        if reason is not None:
            key = f"{kind}, {device_type}: {reason}"
            self._handed_over[key] = self._handed_over.get(key, 0) + 1
            return None
        self._calls[device_type] += len(tensors)
        return comm
