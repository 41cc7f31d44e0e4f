"""`a2a.patched()`: a program that calls `torch.distributed` runs on a2a, unchanged, on the groups that it has.

    with a2a.patched():
        train()                               # its dist.all_to_all_single(...) is a2a.all_to_all_single(...)

Decisions:

* **Names are rebound in `torch.distributed` and `torch.distributed.distributed_c10d`**, and nowhere else: what a module took
  before, by `from torch.distributed import all_to_all_single`, is torch's and stays so.
* **Those of the five functions that a2a has are patched**, under torch's newer names too (`NAMES`).
* **The original is called** while `torch.compile` or `torch.export` traces (they know torch's functions by identity and turn
  them into functional collectives), inside a coalescing manager (which collects calls), for tensor subclasses, on a
  rank outside the group, and where a2a itself calls torch: the baseline never comes back to a2a.
* **The patch belongs to the process, not to a thread**: the names are those of modules. While any thread is in a `patched()`
  block all threads see a2a; the first to enter binds, the last to leave restores, and a call that another thread has in
  flight ends as it began.
* **A wrapper that outlives the patch is torch's function again**, for whoever took the name inside the block or put a
  wrapper of his own on top of it and left that there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # maps torch's functions by identity: must not first see a patch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import a2a

# a2a's function -> what it stands for in torch.distributed. A name that this torch lacks is passed over.
NAMES: dict[str, tuple[str, ...]] = {
    "all_to_all_single": ("all_to_all_single",),
    "all_to_all": ("all_to_all",),
    "all_reduce": ("all_reduce",),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", "reduce_scatter_single"),
    "all_gather_into_tensor": ("all_gather_into_tensor", "all_gather_single"),
}
MODULES: tuple[ModuleType, ...] = (dist, c10d)
_PLAIN = (Tensor, torch.nn.Parameter)


class _Patch:
    """The state of the patch in this process: how often it was entered, and what the names were before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.before: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, what was there, what was put there
        self.thread = threading.local()

    def enter(self) -> None:
        with self.lock:
            self.depth += 1
            if self.depth == 1:
                self.bind()

    def leave(self) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                for module, name, before, bound in reversed(self.before):
                    if getattr(module, name) is bound:
                        setattr(module, name, before)
                self.before = []

    def bind(self) -> None:
        wrappers: dict[Any, Any] = {}  # the same for both modules: torch compares its functions by identity
        for own, names in NAMES.items():
            serve = getattr(a2a, own, None)
            if serve is None:
                continue
            for module, name in itertools.product(MODULES, names):
                original = getattr(module, name, None)
                if original is None:
                    continue
                if original not in wrappers:
                    wrappers[original] = self.wrap(original, serve)
                self.before.append((module, name, original, wrappers[original]))
                setattr(module, name, wrappers[original])

    def wrap(self, original: Callable[..., Any], serve: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.is_torchs(*args, *kwargs.values()):
                return original(*args, **kwargs)
            self.thread.inside = True
            try:
                return serve(*args, **kwargs)
            finally:
                self.thread.inside = False

        return call

    def is_torchs(self, *values: Any) -> bool:
        """True for a call that only torch's own function can answer."""
        if self.depth == 0 or getattr(self.thread, "inside", False) or c10d._world.pg_coalesce_state:
            return True
        for value in values:
            if type(value) in (list, tuple):
                value = value[0] if value else None
            kind = type(value)
            if kind is int and value == dist.GroupMember.NON_GROUP_MEMBER:
                return True
            if kind not in _PLAIN and isinstance(value, Tensor):
                return True
        return False


_PATCH = _Patch()


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Let `torch.distributed`'s collectives be a2a's inside the block.

    Rebinds `all_to_all_single` and `all_to_all`, and those of `all_reduce`, `reduce_scatter_tensor` and
    `all_gather_into_tensor` that this version of a2a has, together with torch's newer names for them. Nests, may be
    used as a decorator, and restores the names however the block ends.

    The patch holds for all threads of the process until the last `patched()` block is left. Names imported with `from
    torch.distributed import ...` before the block are not reached; use backend "a2a" for a group that C++ code (DDP)
    or such a module shall use.

    Every rank of a group must be inside or outside alike when it calls a collective.

    Cost: about a microsecond a call beyond a2a's own.
    """
    _PATCH.enter()
    try:
        yield
    finally:
        _PATCH.leave()
