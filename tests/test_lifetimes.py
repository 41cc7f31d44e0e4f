"""Communicators, their memory and their groups end in any order, and what a user still holds stays good."""

from __future__ import annotations

import datetime
import gc
import os
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from deadlines import soon
from exchange_cases import exchange_once, shared_mappings
from pool import World
from pool_rank import GROUP_TIMEOUT_S

# Each ends what it was given in its own order; rank 1 may do it in another.
ENDS: dict[str, Callable[[Any], None]] = {
    "close, destroy": lambda held: (held.pop("comm").close(), dist.destroy_process_group()),
    "destroy, close": lambda held: (dist.destroy_process_group(), held.pop("comm").close()),
    "destroy, drop": lambda held: (dist.destroy_process_group(), held.clear()),
    "drop, destroy": lambda held: (held.clear(), dist.destroy_process_group()),
    "drop the tensor last": lambda held: (held.pop("comm").close(), held.pop("work"), dist.destroy_process_group()),
    "close twice": lambda held: (held["comm"].close(), held["comm"].close(), dist.destroy_process_group()),
    "wait after close": lambda held: (held["comm"].close(), held["work"].wait(), dist.destroy_process_group()),
}


def ends(ways: list[str]) -> int:
    before = shared_mappings()
    rank = dist.get_rank()
    comm = a2a.communicator()
    tensor = comm.empty((2, 96), torch.float32)
    exchange_once(comm)
    exchange_once()  # the implicit one
    work = a2a.all_to_all_single(tensor[0], tensor[1], group=comm, async_op=True)
    work.wait()
    held = {"comm": comm, "tensor": tensor, "work": work}
    del comm, tensor, work
    dist.barrier()
    with soon(3.0):
        ENDS[ways[rank % len(ways)]](held)
        held.clear()
    return max(0, shared_mappings() - before)  # fewer: what an earlier test left was collected meanwhile


def repeated_after_close(symmetric: bool) -> None:
    """Calls that were made before take a shorter way, which must end with the communicator, too."""
    comm = a2a.communicator(timeout=20)
    source = comm.empty(4, 3) if symmetric else torch.empty(4, 3)
    output = comm.empty(4, 3) if symmetric else torch.empty(4, 3)
    source.fill_(comm.rank)
    for _ in range(3):
        a2a.all_to_all_single(output, source, group=comm)
    assert comm.prepared, "no call was prepared: this would test the ordinary way alone"
    a2a.all_to_all_single(output, source, group=comm, async_op=True).wait()
    dist.barrier()
    comm.close()
    output.fill_(-7)
    for async_op in (False, True):
        with pytest.raises(a2a.A2AError, match=f"all_to_all_single.* closed on rank {comm.rank}"):
            a2a.all_to_all_single(output, source, group=comm, async_op=async_op)
    assert output.eq(-7).all()


def destroy_in_flight(keep_work: bool) -> None:
    """The group goes while rank 0 still has an exchange in flight, to which rank 1 never comes."""
    comm = a2a.communicator()
    exchange_once(comm)
    exchange_once()
    works = []
    if dist.get_rank() == 0:
        works.append(a2a.all_to_all_single(torch.empty(2), torch.empty(2), group=comm, async_op=True))
        works.append(a2a.all_to_all_single(torch.empty(2), torch.empty(2), async_op=True))
    if not keep_work:
        works.clear()
    with soon(3.0):
        dist.destroy_process_group()
        comm.close()
        del comm
        gc.collect()
    for work in works:
        with soon(3.0), pytest.raises(a2a.A2AError):
            work.wait()


def implicit() -> None:
    """A group's implicit communicator is made by its first call, is used again, and goes with the group."""
    dist.barrier()
    before = shared_mappings()
    group = dist.new_group(list(range(dist.get_world_size())))
    exchange_once(group)
    one = shared_mappings()
    assert one > before
    for seed in range(5):
        exchange_once(group, seed)
    assert shared_mappings() == one
    other = dist.new_group(list(range(dist.get_world_size())))
    exchange_once(other)
    two = shared_mappings()
    assert two > one
    dist.destroy_process_group(group)
    watched = weakref.ref(group)
    del group
    gc.collect()
    assert watched() is None, "the communicator keeps its group"
    assert shared_mappings() == one
    exchange_once(other)
    dist.destroy_process_group(other)
    del other
    assert shared_mappings() == before


def explicit() -> None:
    """Explicit communicators are always new; each is closed for itself, in another order on every rank."""
    before = shared_mappings()
    comms = [a2a.communicator() for _ in range(4)]
    assert len({id(comm) for comm in comms}) == 4
    for seed, comm in enumerate(comms):
        exchange_once(comm, seed)
    exchange_once()
    kept = comms.pop(1)
    dist.barrier()
    random.Random(dist.get_rank()).shuffle(comms)
    for comm in comms:
        comm.close()
    exchange_once(kept)
    exchange_once()
    with a2a.communicator() as new:
        exchange_once(new)
        exchange_once(kept)
    kept.close()
    del comms, comm, kept, new
    assert shared_mappings() <= before + 1  # the implicit one, if this was its first use


def dropped_without_closing() -> tuple[int, int, int, int]:
    counts = []
    for _ in range(6):
        comm = a2a.communicator()
        comm.empty((10,), torch.float32)
        exchange_once(comm)
        del comm
        counts += [shared_mappings(), len(os.listdir("/proc/self/task"))]
    return counts[2], counts[3], counts[-2], counts[-1]


def closed_is_closed() -> None:
    with a2a.communicator() as comm:
        exchange_once(comm)
        assert "closed" not in repr(comm)
    comm.close()
    assert "closed" in repr(comm)
    calls: list[Callable[[], Any]] = [
        lambda: exchange_once(comm),
        lambda: a2a.all_to_all_single(torch.empty(2), torch.empty(2), group=comm, async_op=True),
        lambda: a2a.all_to_all([torch.empty(1)] * 2, [torch.empty(1)] * 2, comm),
        lambda: comm.empty((4,), torch.float32),
        comm.check,
        comm.stats,
    ]
    for call in calls:
        with pytest.raises(a2a.A2AError, match="closed"):
            call()


def closed_by_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), a2a.communicator() as comm:
        divmod(1, 0)
    with pytest.raises(a2a.A2AError, match="closed"):
        comm.check()


def close_right_after_the_last_exchange(rounds: int) -> None:
    """A rank that is done may close at once; that must not disturb those who are still in the exchange."""
    rank = dist.get_rank()
    rng = random.Random(rank)
    for round_ in range(rounds):
        size = [1, 100, 1 << 14, 1 << 18][round_ % 4]
        with a2a.communicator() as comm:
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.003)
            output = torch.empty(comm.world_size * size)
            a2a.all_to_all_single(output, torch.full((comm.world_size * size,), float(rank)), group=comm)
        assert output.view(comm.world_size, size).eq(torch.arange(comm.world_size).view(-1, 1)).all()


def forked_child_owns_nothing(child_does: str) -> None:
    rank = dist.get_rank()
    comm = a2a.communicator()
    tensor = comm.empty((100,), torch.float32).fill_(rank)
    exchange_once(comm)
    exchange_once()
    a2a.all_reduce(torch.ones(4), group=comm)
    dist.barrier()
    if rank == 0:
        child = os.fork()
        if child == 0:
            os._exit(in_the_child(comm, tensor, child_does))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "see the child's output"
    dist.barrier()
    for seed in range(3):  # neither the child's calls nor its end did anything to this communicator
        exchange_once(comm, seed)
        exchange_once(None, seed)
    assert tensor.eq(rank).all()
    assert int(comm.ok) == 1
    comm.close()


def in_the_child(comm: Any, tensor: torch.Tensor, does: str) -> int:
    """Returns the child's exit code."""
    try:
        if does == "calls":
            for call in (lambda: exchange_once(comm), lambda: comm.empty((4,), torch.float32)):
                with soon(2.0), pytest.raises(a2a.A2AError, match="fork"):
                    call()
            assert len(comm.prepared)
            with soon(2.0), pytest.raises(a2a.A2AError, match="fork"):
                a2a.all_reduce(torch.ones(4), group=comm)
            for call in (
                lambda: a2a.all_to_all_single(torch.empty(2), torch.empty(2), group=comm, async_op=True),
                lambda: a2a.all_reduce(torch.ones(4), group=comm, async_op=True),
            ):
                with pytest.raises(a2a.A2AError, match="fork"):
                    call().wait()
        elif does == "closes":
            with soon(2.0):
                comm.close()
        elif does == "drops":
            del comm, tensor
            gc.collect()
    except BaseException as error:
        print("in the forked child:", repr(error), flush=True)
        return 1
    return 0


def time_limits() -> None:
    with a2a.communicator() as comm:
        assert comm.timeout_s == GROUP_TIMEOUT_S
    with a2a.communicator(timeout=datetime.timedelta(seconds=7)) as comm:
        assert comm.timeout_s == 7.0
    with a2a.communicator(dist.group.WORLD, timeout=1.5) as comm:
        assert comm.timeout_s == 1.5
    os.environ["A2A_TIMEOUT_S"] = "12"
    try:
        with a2a.communicator() as comm:
            assert comm.timeout_s == 12.0
    finally:
        del os.environ["A2A_TIMEOUT_S"]
    for nonsense in (0, -1.0, datetime.timedelta(0)):
        with pytest.raises(ValueError, match="timeout"):
            a2a.communicator(timeout=nonsense)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_repeated_call_on_a_closed_communicator_says_so(world: World, symmetric: bool) -> None:
    world.run(repeated_after_close, symmetric=symmetric)


@pytest.mark.parametrize("way", ENDS)
def test_teardown_works_in_any_order(world: World, way: str) -> None:
    assert world.run(ends, ways=[way], destroys_group=True) == [0, 0]


@pytest.mark.ranks(3)
def test_teardown_may_differ_between_ranks(world: World) -> None:
    for first in range(0, len(ENDS), 3):
        assert world.run(ends, ways=[*ENDS, *ENDS][first : first + 3], destroys_group=True) == [0, 0, 0]


@pytest.mark.parametrize("keep_work", [False, True])
def test_a_group_may_go_while_an_exchange_is_in_flight(world: World, keep_work: bool) -> None:
    world.run(destroy_in_flight, keep_work=keep_work, destroys_group=True)


def test_the_implicit_communicator_lives_as_long_as_its_group(world: World) -> None:
    world.run(implicit)


@pytest.mark.ranks(1, 3)
def test_explicit_communicators_are_always_new_and_close_in_any_order(world: World) -> None:
    world.run(explicit)


def test_a_communicator_that_is_dropped_frees_what_it_had(world: World) -> None:
    for mappings, threads, mappings_later, threads_later in world.run(dropped_without_closing):
        assert (mappings_later, threads_later) == (mappings, threads)


def test_a_closed_communicator_says_that_it_is_closed(world: World) -> None:
    world.run(closed_is_closed)


def test_an_exception_closes_the_communicator_of_a_with_block(world: World) -> None:
    world.run(closed_by_an_exception)


@pytest.mark.ranks(2, 4)
def test_closing_right_after_an_exchange_does_not_disturb_the_others(world: World) -> None:
    world.run(close_right_after_the_last_exchange, rounds=12)


@pytest.mark.parametrize("child_does", ["calls", "closes", "drops", "nothing"])
def test_a_forked_child_owns_nothing(world: World, child_does: str) -> None:
    world.run(forked_child_owns_nothing, child_does=child_does)


def test_the_time_limit_is_the_groups_unless_given(world: World) -> None:
    world.run(time_limits)


LEAVES_EVERYTHING_OPEN = """
import sys
import torch
import torch.distributed as dist
import a2a

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
comm = a2a.communicator()
tensor = comm.empty((1000,), torch.float32).fill_(rank)
output = torch.empty(1000)
a2a.all_to_all_single(output, tensor, group=comm)
a2a.all_to_all_single(output, tensor)
finished = a2a.all_to_all_single(output, tensor, group=comm, async_op=True)
finished.get_future().wait()
ok = comm.ok
print("exchanged", output.sum().item(), flush=True)
if rank == 0:
    unfinished = a2a.all_to_all_single(output, tensor, group=comm, async_op=True)
if len(sys.argv) > 3:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("destroys", [True, False])
def test_a_process_may_exit_with_everything_open(pool: Any, tmp_path: Path, destroys: bool) -> None:
    if pool is None:
        pytest.skip("starts processes of its own")
    command = [sys.executable, "-c", LEAVES_EVERYTHING_OPEN]
    last = ["destroy"] if destroys else []
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), *last],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(a2a.__file__).parent.parent,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == "exchanged 500.0\n"
        for noise in ("Traceback", "Exception ignored", "terminate called", "leaked", "a2a"):
            assert noise not in err, err
