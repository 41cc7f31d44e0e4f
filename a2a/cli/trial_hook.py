"""What `a2a trial` adds to a process of the user's job: it notes losses, step times and time in collectives, and ends the
job after some steps.

`sitecustomize` loads this file by its path before the job's own code runs, so nothing but the standard library is imported
here at the top, and a process that never imports torch is left alone.

Decisions:

* **A step** is a backward pass followed by `Optimizer.step` of any optimizer; its losses are the one-element tensors that
  backward passes began at. Both are caught where all callers pass: torch's global optimizer hook, and the autograd engine,
  which `Tensor.backward`, `torch.autograd.backward` and Megatron's own backward call.
* **Names are wrapped as soon as torch is imported**, before any module of the job can take them.
* **Nothing waits for the GPU before the end**: losses stay tensors, times are CUDA events where CUDA is in use.
* **The process ends in the middle of its program** (`os._exit`), once all ranks have come so far: checkpoints and reports
  that the job writes at its end are not written.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import importlib
import importlib.abc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GATHER_S = 60.0  # how long a rank that is through waits for the others
KEY = "a2a trial"
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "scatter", "scatter_object_list", "send"),
)
A2A_OPS = ("all_to_all_single", "all_to_all", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
EXPERT_PARALLEL = ("_run_dispatch", "_run_combine", "_run_combine_backward", "_run_dispatch_backward")
# A trainer's module -> a2a's integration, whose `install()` is called when the module has been imported.
INTEGRATIONS = {
    "megatron.core": "a2a.integrations.megatron",
    "torchtitan.models.common.token_dispatcher": "a2a.integrations.torchtitan",
}


@dataclass(frozen=True)
class Orders:
    """What to do. Written into the `sitecustomize` of each run.

    Attributes:
        folder: where records go, `rank0.json` and so on.
        steps: after how many the job ends.
        with_a2a: whether it runs on a2a.
        package: the folder that holds the package a2a.
    """

    folder: str
    steps: int
    with_a2a: bool
    package: str


def install(orders: Orders) -> None:
    """Wait for torch to be imported, and begin then."""
    recorder = Recorder(orders)
    sys.meta_path.insert(0, AfterImport({"torch": lambda _: recorder.begin()}))


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls back when a module has been imported, once."""

    def __init__(self, callbacks: dict[str, Callable[[Any], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self._callbacks:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if (
                callback := self._callbacks.pop(name, None)
            ) is not None:  # not before: others only ask whether it is there
                callback(module)

        loader.exec_module = exec_module
        return spec


class Engine:
    """torch's autograd engine, with each backward pass announced."""

    def __init__(self, engine: Any, announce: Callable[[Any], None]) -> None:
        self._engine, self._announce = engine, announce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad", False):  # not torch.autograd.grad
            self._announce(tensors)
        return self._engine.run_backward(tensors, *args, **kwargs)


class Recorder:
    """The record of one process."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.pending: list[Any] = []  # losses since the last step
        self.backwards = 0  # passes since the last step
        self.losses: list[list[Any]] = []
        self.moments: list[tuple[float, Any]] = []  # the end of each step: host time, CUDA event
        self.exposed_s: list[float] = []  # in collectives, of each step
        self.in_collectives_s = 0.0
        self.thread = threading.local()
        self.integrations: list[str] = []
        self.refused: list[str] = []  # integrations that would not do, and why
        self.written = False

    def begin(self) -> None:
        """torch has just been imported."""
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook

        variable: Any = torch.autograd.Variable
        variable._execution_engine = Engine(variable._execution_engine, self.on_backward)
        register_optimizer_step_post_hook(self.on_step)
        if dist.is_available():
            import torch.distributed._functional_collectives as funcol  # maps functions by identity: before they change
            from torch.distributed import distributed_c10d as c10d

            if self.orders.with_a2a:
                self.use_a2a()
            for name in COLLECTIVES:
                self.wrap((dist, c10d), name)
            self.wrap((funcol,), "wait_tensor")
            self.wrap((c10d.Work,), "wait")
        atexit.register(self.write)

    def use_a2a(self) -> None:
        sys.path.append(self.orders.package)  # last: the job's own packages come first
        import a2a

        self.patched = a2a.patched()  # kept: a context manager that is collected leaves its block
        self.patched.__enter__()
        for name in A2A_OPS:
            self.wrap((a2a,), name)
        self.wrap((a2a.Work,), "wait")
        for name in EXPERT_PARALLEL:
            self.wrap((a2a.ExpertParallel,), name)
        callbacks: dict[str, Callable[[Any], None]] = {
            module: functools.partial(self.install_for, name) for module, name in INTEGRATIONS.items()
        }
        sys.meta_path.insert(0, AfterImport(callbacks))

    def install_for(self, integration: str, _: Any) -> None:
        from a2a.errors import A2AError

        try:
            importlib.import_module(integration).install()
        except (A2AError, ImportError) as error:  # the job goes on without, and the report says so
            self.refused.append(f"{integration}: {error}")
        else:
            self.integrations.append(integration)

    def wrap(self, owners: tuple[Any, ...], name: str) -> None:
        """Count the time in a function, under that name of each owner, unless it is called from one that counts already."""
        import torch

        original = getattr(owners[0], name, None)
        if original is None:
            return
        is_compiling = torch.compiler.is_compiling

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # a compiler knows the original
                return original(*args, **kwargs)
            with self.counting():
                return original(*args, **kwargs)

        for owner in owners:
            setattr(owner, name, call)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        if getattr(self.thread, "inside", False):
            yield
            return
        self.thread.inside = True
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.in_collectives_s += time.perf_counter() - begin
            self.thread.inside = False

    def on_backward(self, tensors: Any) -> None:
        import torch

        self.backwards += 1
        for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and not capturing():
                loss = tensor.detach()
                self.pending.append((loss.to_local() if hasattr(loss, "to_local") else loss).clone())

    def on_step(self, *_: Any) -> None:
        if not self.backwards or self.written:  # the second optimizer of one step
            return
        event = None
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized() and not capturing():
            event = sys.modules["torch"].cuda.Event(enable_timing=True)
            event.record()
        self.moments.append((time.perf_counter(), event))
        self.exposed_s.append(self.in_collectives_s)
        self.losses.append(self.pending)
        self.pending, self.backwards, self.in_collectives_s = [], 0, 0.0
        if len(self.losses) == self.orders.steps:
            self.write()
            self.leave()

    def write(self) -> None:
        """Write what there is, if there is any; the first time only."""
        if self.written or not self.losses:
            return
        self.written = True
        rank, size = place()
        record = {
            "rank": rank,
            "world_size": size,
            "losses": [[float(loss) for loss in step] for step in self.losses],
            "step_s": list(self.step_times()),
            "exposed_s": self.exposed_s,
            "a2a": communicators() if self.orders.with_a2a else None,
            "integrations": self.integrations,
            "refused": self.refused,
        }
        path = Path(self.orders.folder) / f"rank{rank}.json"
        path.with_suffix(".part").write_text(json.dumps(record))
        path.with_suffix(".part").rename(path)

    def step_times(self) -> Iterator[float]:
        """Seconds of each step from the second on."""
        for (before, event_before), (after, event) in itertools.pairwise(self.moments):
            if event is None or event_before is None:
                yield after - before
            else:
                event.synchronize()
                yield event_before.elapsed_time(event) / 1e3

    def leave(self) -> None:
        """End this process when all ranks have come here: one that is gone too early would break its peers' last step."""
        from torch.distributed import distributed_c10d as c10d

        _, size = place()
        if size > 1:
            with contextlib.suppress(RuntimeError, ValueError):  # the store went with a rank that is through
                store = c10d._get_default_store()
                if store.add(KEY, 1) == size:
                    store.set(f"{KEY} is over", "")
                store.wait([f"{KEY} is over"], datetime.timedelta(seconds=GATHER_S))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def capturing() -> bool:
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def place() -> tuple[int, int]:
    """(rank, number of ranks) of this process."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def communicators() -> list[dict[str, Any]]:
    """The figures of a2a's communicators in this process, with ranks as the whole job counts them."""
    from a2a.comm import open_communicators

    found = []
    for comm, ranks in open_communicators():
        stats = comm.stats()
        peers = [{**peer, "rank": ranks[peer["rank"]]} for peer in stats.get("peers", [])]
        kept = {name: stats.get(name) for name in ("transport", "reasons", "collectives", "handed_over")}
        found.append({**kept, "ranks": ranks, "device": str(comm.device), "peers": peers})
    return found
