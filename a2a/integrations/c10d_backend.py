"""Backend "a2a" of torch.distributed: a process group whose all-to-alls are a2a's, as are its all-reduces, reduce-scatters
and all-gathers of single tensors, and whose other methods are torch's.

    import a2a
    dist.init_process_group("a2a")            # or new_group(backend="a2a"), "cuda:a2a", "cpu:gloo,cuda:a2a"

"a2a" alone stands for the CPU and, where torch is built for CUDA, GPUs: each kind of tensor has its own communicator.

Decisions:

* **A subclass of `dist.ProcessGroup`, not of `Backend`**, which Python can't subclass before torch 2.14. torch puts such a
  group in the place of its own and of everything else in the backend string. So the group itself makes the other
  backends of the string, and torch's own one where the string says a2a.
* **Everything else is delegated by name** (`DELEGATED`) to `native`, a plain group on the same inner backends. A method that
  Python leaves to C++ runs with the GIL held (`WORK_OVERRIDE` in torch's PyProcessGroup.hpp) and waits for gloo's queue,
  whose thread holds its lock and waits for the GIL, to drop the last call's tensors: a deadlock within 200 calls.
* **What a2a gives back to torch arrives here a second time**, within the first call, since its baseline runs on the same
  group. That one goes to `native`, as does what a2a can't serve at all.
* **The backend string is read from torch's frame** (`_requested`): torch doesn't pass it on and files it only later.
* **A communicator is made at the first call that it serves** of its kind of tensors, in which every rank of the group takes
  part anyway. Making a group stays cheap, and one that makes no such call has no shared memory. So a group's first
  all-to-all can't be in a CUDA graph.
* **Handing over depends only on what is equal on all ranks**: the device type, the backend string, how the set-up went, and
  what the planner says of a reduction. Those that it gives to the baseline go to `native` at once: an asynchronous call of
  the baseline would block here.
* **`device_id` binds the inner backends**, not the group: torch would split the parent's NCCL communicator for a new group,
  and ranks outside the group would wait there for members that don't.
* **torch renamed its methods in 2.13** (`alltoall_base` became `all_to_all_single`). Both are defined, as one function, and
  callers in C++ find either without a detour.
* **All synchronous calls return one finished Work**, never None: C++ waits on what it gets.

Limits: `dist.monitored_barrier` insists on a backend named gloo (the method `group.monitored_barrier()` works). torch
batches `dist.batch_isend_irecv` for its own class only, so CUDA tensors that two ranks send each other there may block:
give pipelines a group on NCCL. The timeout of a single call (`opts.timeout`) is not looked at, that of `Work.wait` is.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from a2a.comm import Communicator, implicit
from a2a.integrations.c10d_inner import NAME, Setup, alltoall_in_one_call, make_inner
from a2a.integrations.c10d_reductions import PLAIN, Reductions, given, is_synchronous
from a2a.integrations.c10d_work import Done, Pending
from a2a.ops import all_to_all, all_to_all_single

_log = logging.getLogger("a2a")
# What `native` does, under the names that this torch has.
DELEGATED = (
    *("allgather", "allgather_coalesced", "broadcast", "gather", "reduce", "reduce_scatter", "scatter", "send", "recv"),
    *("recv_anysource", "_start_coalescing", "_end_coalescing"),
)


def _delegated(name: str) -> Callable[..., Work]:
    def call(self: A2AProcessGroup, *args: Any, **kwargs: Any) -> Work:
        work: Work | None = getattr(self.native, name)(*args, **kwargs)
        return self._done if work is None else work  # None answers a synchronous call

    call.__name__ = call.__qualname__ = name
    return call


class A2AProcessGroup(Reductions, dist.ProcessGroup):  # type: ignore[misc]  # one signature for each of torch's overloads
    """A process group whose all-to-alls, and whose reductions and all-gathers on CPUs, are a2a's; the rest is torch's.

    Attributes:
        native: a plain group of the same ranks and inner backends.
    """

    def __init__(self, setup: Setup) -> None:
        # The constructor that takes a store fails on a subclass; torch's stub knows only that one.
        super().__init__(setup.rank, setup.world_size)  # type: ignore[call-arg]
        self._a2a_store = PrefixStore("a2a", setup.store)  # where the ranks meet for their communicator
        self.native = dist.ProcessGroup(PrefixStore("native", setup.store), setup.rank, setup.world_size)
        if setup.device_id is not None:
            self.native.bound_device_id = setup.device_id
        self._device_id = setup.device_id
        self._inner = make_inner(setup)
        self._served = {device_type for device_type, name in setup.requested.items() if name == NAME}
        self._comms: dict[str, Communicator] = {}  # device type -> what serves it
        self._cpu: Communicator | None = None  # the CPU's, once it is made
        self._refusals: dict[str, str] = {}  # device type -> why nothing does
        self._handed_over: dict[str, int] = {}
        self._calls = dict.fromkeys(self._served, 0)  # device type -> calls that its communicator took
        self._thread = threading.local()  # .inside: a call of a2a's is running on this thread
        self._done = Done()
        self._shut = False
        for group in (self, self.native):
            for device_type, inner in self._inner.items():
                group._register_backend(torch.device(device_type), inner.kind, inner.backend)
                group._set_default_backend(inner.kind)  # the last one, as torch does with "cpu:gloo,cuda:nccl"

    def all_to_all_single(  # type: ignore[override]  # one signature for both of torch's overloads
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """As `ProcessGroup.all_to_all_single`, called `alltoall_base` before torch 2.13."""
        cpu = self._cpu
        if cpu is not None and type(input) is type(output) is Tensor and is_synchronous(opts):
            result = cpu.prepared.all_to_all(output, input, output_split_sizes, input_split_sizes)
            if result == 0:
                self._calls["cpu"] += 1
                return self._done
            if result > 0:
                cpu.raise_failure(result, "all_to_all_single")
        comm = self._serving(input)
        if comm is None:
            call = getattr(self.native, "all_to_all_single", None) or self.native.alltoall_base
            splits = (list(output_split_sizes), list(input_split_sizes))
            return self._handed_over_work("all_to_all_single", input, call(output, input, *splits, *given(opts)))
        out_splits = output_split_sizes if len(output_split_sizes) else None
        in_splits = input_split_sizes if len(input_split_sizes) else None
        self._thread.inside = True
        try:
            if getattr(opts, "asyncOp", True):
                return Pending(all_to_all_single(output, input, out_splits, in_splits, comm, True))
            all_to_all_single(output, input, out_splits, in_splits, comm)
        finally:
            self._thread.inside = False
        return self._done

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # as above

    def alltoall(  # type: ignore[override]  # as above
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """As `ProcessGroup.alltoall`. Differs: on a CPU too, the tensors may differ in size."""
        first = input_tensors[0] if input_tensors else torch.empty(0)
        comm = self._serving(first)
        if comm is None:
            inner = self._inner.get(first.device.type)
            work: Work | None = None
            if inner is None or inner.takes_lists:
                work = self.native.alltoall(output_tensors, input_tensors, *given(opts))
            else:
                alltoall_in_one_call(self.native, output_tensors, input_tensors)
            return self._handed_over_work("all_to_all", first, work)
        self._thread.inside = True
        try:
            if getattr(opts, "asyncOp", True):
                return Pending(all_to_all(output_tensors, input_tensors, comm, True))
            all_to_all(output_tensors, input_tensors, comm)
        finally:
            self._thread.inside = False
        return self._done

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]  # as above
        """As `ProcessGroup.barrier`; one on GPUs takes the `device_id` that the group was made with."""
        device = getattr(opts, "device", None)
        if self._device_id is not None and device is not None and device.type == self._device_id.type:
            opts.device = self._device_id
        work: Work | None = self.native.barrier(*given(opts))
        return self._done if work is None else work

    def stats(self) -> dict[str, Any]:
        """What this group's calls of a2a have come to so far.

        Returns:
            `calls`: how many a2a took, by device type;
            `communicators`: the figures of each device type's communicator, once it is made. Their own `handed_over` counts
            calls among these that the planner gave to the inner backend, `reasons` says why there is no transport;
            `handed_over`: calls that went to the inner backend at once, counted by operation and reason.
        """
        return {
            "calls": dict(self._calls),
            "communicators": {device_type: comm.stats() for device_type, comm in self._comms.items()},
            "handed_over": dict(self._handed_over),
        }

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return NAME

    def get_group_store(self) -> Store:
        return self._a2a_store

    def shutdown(self) -> None:
        self._close()
        self.native.shutdown()

    def abort(self) -> None:
        self._close()
        self.native.abort()

    def _close(self) -> None:
        self._shut = True
        comms, self._comms, self._cpu = self._comms, {}, None
        for comm in comms.values():
            comm.close()

    def _serving(self, tensor: Tensor) -> Communicator | None:
        """What moves `tensor`; None: the inner backend."""
        if type(tensor) not in PLAIN or getattr(self._thread, "inside", False):
            return None
        device_type = tensor.device.type
        comm = self._comms.get(device_type) or self._find(tensor.device)
        if comm is not None:
            self._calls[device_type] += 1
        return comm

    def _find(self, device: torch.device) -> Communicator | None:
        """The communicator for tensors on such a device, made at the first call; None: the inner backend serves them."""
        device_type = device.type
        if self._shut:
            raise RuntimeError(f"process group {self.group_name!r} (backend a2a) was destroyed; make a new one")
        if device_type in self._refusals:
            return None
        comm: Communicator | None = None
        if device_type in self._served:
            comm = self._comms[device_type] = implicit(self, device_type=device_type, device=device)
            if device_type == "cpu":
                self._cpu = comm
            reason = "; ".join(f"{name}: {why}" for name, why in comm.why_no_transport.items())
        else:
            reason = self._refusals[device_type] = "the backend string gives them to another backend"
        if comm is None or comm.transport is None:
            inner = self._inner.get(device_type)
            _log.info(
                "process group %r (backend a2a), rank %d: calls with %s tensors go to %s: %s",
                self.group_name,
                self.rank(),
                device_type,
                inner.name if inner else "no backend",
                reason,
            )
        return comm

    def _handed_over_work(self, op: str, tensor: Tensor, work: Work | None) -> Work:
        """Count a call that the inner backend took. None, its answer to a synchronous one, becomes a finished Work."""
        reason = self._refusals.get(tensor.device.type)
        if reason is not None:
            key = f"{op}, {tensor.device.type}: {reason}"
            self._handed_over[key] = self._handed_over.get(key, 0) + 1
        return self._done if work is None else work


for _name in DELEGATED:
    if hasattr(dist.ProcessGroup, _name):
        setattr(A2AProcessGroup, _name, _delegated(_name))


def _requested() -> tuple[dict[str, str], torch.device | None]:
    """Which backend each device type was asked to have, and `device_id`; the defaults where torch's caller isn't found."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        for value in names.values():
            if isinstance(value, dist.BackendConfig):
                devices, device_id = value.get_device_backend_map(), names.get("device_id")
                device_id = device_id if isinstance(device_id, torch.device) else None
                return {device_type: str(name) for device_type, name in devices.items()}, device_id
        frame = frame.f_back
    return dict.fromkeys(_device_types(), NAME), None


def _device_types() -> list[str]:
    """What "a2a" alone stands for. Asks how torch was built, since asking for devices would start CUDA in each importer."""
    return ["cpu"] if torch.version.cuda is None else ["cpu", "cuda"]


def _create(options: Any, backend_options: object | None) -> A2AProcessGroup:
    """What torch calls for every group with this backend."""
    requested, device_id = _requested()
    return A2AProcessGroup(
        Setup(
            store=options.store,
            rank=options.group_rank,
            world_size=options.group_size,
            timeout=options.timeout,
            requested=requested,
            group_name=options.group_id,
            global_ranks=options.global_ranks_in_group,
            options=backend_options,
            device_id=device_id,
        )
    )


def register() -> None:
    """Make "a2a" a backend name of torch.distributed. `import a2a` does it; torch's entry point may do it again."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=_device_types())
