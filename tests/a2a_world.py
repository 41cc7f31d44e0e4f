"""Ranks whose default process group has backend "a2a", for the tests of what torch.distributed does on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from pool import Pool

import a2a  # noqa: F401  (registers the backend)

TIMEOUT_S = 20.0


class A2AWorld:
    """Like `pool.World`: `run(check)` calls a module-level function on every rank, with WORLD on backend "a2a".

    Takes the ranks of a pool of its own: it leaves them in another default group than other tests expect.
    """

    def __init__(self, pool: Pool, size: int) -> None:
        self.size = size
        self._world = pool.world(size)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count()

    @property
    def port(self) -> int:
        """Where a store is that outlives the check: for default groups made in one."""
        return self._store.port

    def run(
        self, check: Callable[..., Any], /, *, backend: str = "a2a", expect_dead: Collection[int] = (), **kwargs: Any
    ) -> list[Any]:
        __tracebackhide__ = True
        self._world.run(enter_world, backend=backend, port=self.port, key=f"a2a{next(self._numbers)}")
        return self._world.run(check, expect_dead=expect_dead, **kwargs)


def enter_world(backend: str, port: int, key: str) -> None:
    """Have a default group of that backend: the one at hand, or a new one, made as a user makes it."""
    if dist.get_backend() == backend:
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.PrefixStore(key, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
