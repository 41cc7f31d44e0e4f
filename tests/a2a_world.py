"""Ranks whose default process group has backend "a2a", for the tests of what torch.distributed does on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from a2a.integrations.c10d_backend import A2AProcessGroup
from pool import Pool

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


_made: dict[
    str, int
] = {}  # on a rank: the port of the store that its default group hangs on, which goes with its A2AWorld


def enter_world(backend: str, port: int, key: str) -> None:
    """Have a default group of that backend: the one at hand, or a new one, made as a user makes it."""
    if dist.get_backend() == backend and _made.get("port") == port:
        return
    _made["port"] = port
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.PrefixStore(key, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))


# ------------------------------------------------------------------------------------------------- for use in checks


def default_group() -> A2AProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, A2AProcessGroup)
    return group


def served(group: dist.ProcessGroup | None = None) -> int:
    """How many calls a2a has run for this group; also asserts that none was handed over."""
    stats = (group or default_group()).stats()
    assert stats["handed_over"] == {}
    for comm in stats["communicators"].values():
        assert comm["handed_over"] == {}
        assert comm["transport"] is not None
    return sum(stats["calls"].values())


def sent(dtype: torch.dtype = torch.float32, rows: int = 2) -> torch.Tensor:
    """What this rank sends: `rows` to each rank, filled with 10 x own rank + receiver."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return (10 * rank + torch.arange(size)).repeat_interleave(rows).to(dtype)


def received(dtype: torch.dtype = torch.float32, rows: int = 2) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (10 * torch.arange(size) + rank).repeat_interleave(rows).to(dtype)


def exchange(group: dist.ProcessGroup | None = None) -> None:
    """One all-to-all on a group of all ranks, checked."""
    output = torch.empty_like(received())
    dist.all_to_all_single(output, sent(), group=group)
    same(output, received())


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
