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
from exchange_cases import Exchange, assert_same_bits, even_splits, random_splits
from pool import World
from pool_rank import GROUP_TIMEOUT_S


def exchange_once(group: Any = None, seed: int = 5) -> None:
    world_size = group.world_size if isinstance(group, a2a.Communicator) else dist.get_world_size(group)
    rank = group.rank if isinstance(group, a2a.Communicator) else dist.get_rank(group)
    exchange = Exchange(random_splits(world_size, seed))
    output = torch.empty_like(exchange.expected(rank))
    a2a.all_to_all_single(output, exchange.input(rank), exchange.received(rank), exchange.sent(rank), group)
    assert_same_bits(output, exchange.expected(rank))


def shared_mappings() -> int:
    """How many segments of shared memory are mapped here."""
    gc.collect()
    return sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())


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


def tensors_outlive() -> None:
    before = shared_mappings()
    rank = dist.get_rank()
    comm = a2a.communicator()
    tensor = comm.empty((3, 1000), torch.float64).fill_(rank)
    view = tensor[1]
    peer = comm.empty((7,), torch.int8).fill_(5)
    ok = comm.ok
    comm.close()
    assert shared_mappings() > before
    del comm, tensor
    gc.collect()
    dist.barrier()
    view += 1
    assert view.eq(rank + 1).all()
    assert peer.eq(5).all()
    assert int(ok) in (0, 1)
    with a2a.communicator() as comm:  # plain memory by now, for any communicator to exchange
        out = torch.empty(1000, dtype=torch.float64)
        a2a.all_to_all_single(out, view, group=comm)
        assert out[:500].eq(1).all()
        assert out[500:].eq(2).all()
    dist.barrier()
    del view, peer, ok, out, comm
    assert shared_mappings() == before


def empty_agrees(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with a2a.communicator() as comm:
        for tensor in (comm.empty(shape, dtype), comm.empty(*shape, dtype=dtype), comm.empty(list(shape), dtype=dtype)):
            assert tuple(tensor.shape) == shape
            assert tensor.dtype is dtype
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            tensor.zero_()


# What rank 1 asks for while the others ask for (8, 2) of float32; and what the error must quote.
OTHER_EMPTY: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "another shape": (lambda comm: comm.empty((8, 3), torch.float32), ["[8, 2]", "[8, 3]"]),
    "another shape of equal size": (lambda comm: comm.empty((2, 8), torch.float32), ["[8, 2]", "[2, 8]"]),
    "another dtype": (lambda comm: comm.empty((8, 2), torch.int32), ["float32", "int32"]),
    "an exchange": (lambda comm: exchange_once(comm), ["comm.empty", "all_to_all_single"]),
}


def empty_disagrees(name: str) -> None:
    call, quoted = OTHER_EMPTY[name]
    comm = a2a.communicator(timeout=20)
    with soon(2.0), pytest.raises(a2a.MismatchError) as caught:
        call(comm) if dist.get_rank() == 1 else comm.empty((8, 2), torch.float32)
    for text in quoted:
        assert text in str(caught.value)
    assert "rank 1" in str(caught.value)
    comm.close()
    with a2a.communicator() as comm:
        exchange_once(comm)


EMPTY_MISTAKES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "a negative size": (lambda comm: comm.empty((8, -2), torch.float32), ValueError),
    "a fractional size": (lambda comm: comm.empty((8, 2.5), torch.float32), (TypeError, ValueError)),
    "a dtype that is none": (lambda comm: comm.empty((8, 2), dtype="float32"), (TypeError, ValueError)),
    "more memory than there is": (lambda comm: comm.empty((1 << 60,), torch.float32), a2a.A2AError),
}


def empty_mistaken(name: str, by_all: bool) -> str:
    """A rank whose own call makes no sense says so, and its peers in `empty` hear of it."""
    call, error = EMPTY_MISTAKES[name]
    text = ""
    with a2a.communicator(timeout=20) as comm:
        if by_all or dist.get_rank() == 1:
            with soon(2.0), pytest.raises(error) as caught:
                call(comm)
            text = str(caught.value)
        else:
            with soon(2.0), pytest.raises(a2a.A2AError, match="rank 1"):
                comm.empty((8, 2), torch.float32)
        if by_all:
            exchange_once(comm)
            comm.empty((8, 2), torch.float32)
        dist.barrier()
    return text


def reused(rounds: int) -> tuple[int, int]:
    """Ranks let go of tensors at different times: memory is used again, but never while any rank still needs it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shapes, drops = random.Random(1), random.Random(rank)
    exchange = Exchange(even_splits(world_size, 50), (64,), torch.int32)
    most = 0
    with a2a.communicator() as comm:
        held: list[tuple[torch.Tensor, int]] = []
        for round_ in range(rounds):
            tensor = comm.empty((world_size * 50 * shapes.randint(1, 60), 64), torch.int32).fill_(round_)
            held.append((tensor, round_))
            dist.barrier()
            output, input = held[0][0][: world_size * 50], tensor[: world_size * 50]
            if min(gathered(len(held))) > 1:  # else the two are one on some rank
                input.copy_(exchange.input(rank))
                a2a.all_to_all_single(output, input, group=comm)
                assert_same_bits(output, exchange.expected(rank))
                output.fill_(held[0][1])
                input.fill_(round_)
            for tensor, value in held:
                assert tensor.eq(value).all(), "another tensor was put over it"
            while len(held) > 3 or (held and drops.random() < 0.4):
                held.pop(drops.randrange(len(held)))
            del tensor, output, input
            if round_ == rounds // 4:
                most = shared_mappings()
        return most, shared_mappings()


def gathered(number: int) -> list[int]:
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor([number]))
    return [int(one) for one in everyone]


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
            with pytest.raises(a2a.A2AError, match="fork"):
                a2a.all_to_all_single(torch.empty(2), torch.empty(2), group=comm, async_op=True).wait()
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


def test_symmetric_tensors_outlive_their_communicator_and_free_its_memory(world: World) -> None:
    world.run(tensors_outlive)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_symmetric_tensors_have_the_shape_and_dtype_asked_for(
    world: World, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    world.run(empty_agrees, shape=shape, dtype=dtype)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", OTHER_EMPTY)
def test_ranks_that_ask_for_different_memory_are_told_so(world: World, name: str) -> None:
    world.run(empty_disagrees, name=name)


@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by one"])
@pytest.mark.parametrize("name", EMPTY_MISTAKES)
def test_a_senseless_request_for_memory_is_refused_and_peers_are_told(world: World, name: str, by_all: bool) -> None:
    for text in filter(None, world.run(empty_mistaken, name=name, by_all=by_all)):
        assert "comm.empty" in text or "symmetric memory" in text


@pytest.mark.ranks(2, 4)
def test_memory_that_all_ranks_let_go_of_is_used_again(world: World) -> None:
    for most, last in world.run(reused, rounds=60):
        assert last <= most + 1


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
