"""When a rank dies, is late, leaves or asks for something else, every other rank is told who and what, soon; nobody hangs.

A broken communicator keeps saying why. It is closed and made anew in the same process.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from deadlines import Stalls, soon
from exchange_cases import Exchange, assert_same_bits, random_splits
from pool import World

NOTICED_S = 2.0  # how soon after a death every survivor must have raised


def exchange_once(comm: Any, seed: int = 5) -> None:
    rank = dist.get_rank(comm.group)
    exchange = Exchange(random_splits(comm.world_size, seed))
    output = torch.empty_like(exchange.expected(rank))
    a2a.all_to_all_single(output, exchange.input(rank), exchange.received(rank), exchange.sent(rank), comm)
    assert_same_bits(output, exchange.expected(rank))


def finished(work: Any) -> None:
    """Wait for an asynchronous call; a synchronous one gave None."""
    if work is not None:
        work.wait()


def heard(comm: Any) -> None:
    """Raise the failure of other ranks as soon as it is known here."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        comm.check()
        time.sleep(0.001)


def raises_on_and_on(comm: Any, error: type[Exception], says: str) -> None:
    """The communicator is broken: whatever is called raises the first cause again."""
    assert int(comm.ok) == 0
    calls: list[Callable[[], Any]] = [
        lambda: a2a.all_to_all_single(torch.empty(comm.world_size), torch.empty(comm.world_size), group=comm),
        lambda: a2a.all_to_all_single(
            torch.empty(comm.world_size), torch.empty(comm.world_size), group=comm, async_op=True
        ).wait(),
        lambda: comm.empty((4,), torch.float32),
        comm.check,
    ]
    for call in calls:
        with soon(1.0), pytest.raises(error, match=says):  # the cause is known: nothing to wait for
            call()


def survivors_go_on(dead: int) -> None:
    """Those who are left make a group and a communicator among themselves."""
    left = [rank for rank in range(dist.get_world_size()) if rank != dead]
    with a2a.communicator(dist.new_group(left, use_local_synchronization=True)) as comm:
        exchange_once(comm)


def die_after(delay_s: float, note: str) -> None:
    """Kill this process in a moment, whatever it is doing then; the file `note` tells when."""

    def die() -> None:
        time.sleep(delay_s)
        Path(note).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def killed_in_the_middle(victim: int, delay_s: float, note: str, mode: str) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(1)  # the same sizes on all ranks
    comm = a2a.communicator(timeout=60)
    memory = comm.empty((2, world_size << 20), torch.uint8)
    if rank == victim:
        die_after(delay_s, note)

    def exchange_until_it_fails() -> None:
        works = []
        while True:
            size = world_size * rng.choice([1, 1000, 1 << 16, 1 << 20])
            symmetric = mode == "symmetric" or (mode == "mixed" and rng.random() < 0.5)
            output, input = memory[:, :size] if symmetric else torch.zeros(2, size, dtype=torch.uint8)
            works.append(a2a.all_to_all_single(output, input, group=comm, async_op=mode == "async"))
            if mode == "async" and len(works) == 4:
                works.pop(0).wait()

    with pytest.raises(a2a.PeerTimeoutError) as caught:
        exchange_until_it_fails()
    raised_at = time.monotonic()
    error = caught.value
    raises_on_and_on(comm, a2a.PeerTimeoutError, f"rank {victim} died")
    comm.close()
    if world_size > 2:
        survivors_go_on(victim)
    return {"raised_at": raised_at, "peer": error.peer, "rank": error.rank, "cause": error.cause, "text": str(error)}


def killed_while_its_child_lives(note: str) -> float:
    """Rank 1 has a forked child, which inherited all its descriptors, when it is killed."""
    with a2a.communicator() as comm:
        exchange_once(comm)
        if dist.get_rank() == 1:
            if os.fork() == 0:
                time.sleep(4)
                os._exit(0)
            die_after(0.1, note)
        with pytest.raises(a2a.PeerTimeoutError, match="rank 1 died"):
            any(exchange_once(comm) for _ in itertools.repeat(None))
        return time.monotonic()


def leaves(how: str) -> str:
    """Rank 1 goes before the others call; they have a long time limit, and need none of it."""
    comm = a2a.communicator(timeout=60)
    exchange_once(comm)
    if dist.get_rank() == 1:
        if how == "exit":
            sys.exit(0)
        comm.close()
        dist.barrier()
        return ""
    with soon(NOTICED_S), pytest.raises(a2a.PeerTimeoutError) as caught:
        exchange_once(comm)
    assert caught.value.peer == 1
    assert caught.value.rank == dist.get_rank()
    raises_on_and_on(comm, a2a.PeerTimeoutError, "rank 1")
    comm.close()
    if how != "exit":
        dist.barrier()
    return caught.value.cause


def late(async_op: bool) -> dict[str, Any]:
    """Rank 1 comes when the others have given up, and finds the communicator broken."""
    comm = a2a.communicator(timeout=0.4)
    exchange_once(comm)
    if dist.get_rank() == 1:
        dist.barrier()
    begin = time.monotonic()
    with soon(2.5), pytest.raises(a2a.PeerTimeoutError) as caught:
        finished(a2a.all_to_all_single(torch.empty(3), torch.empty(3), group=comm, async_op=async_op))
    waited = time.monotonic() - begin
    if dist.get_rank() != 1:
        dist.barrier()
    raises_on_and_on(comm, a2a.PeerTimeoutError, "rank 1")
    comm.close()
    with a2a.communicator() as comm:
        exchange_once(comm)
    error = caught.value
    return {"waited": waited, "peer": error.peer, "cause": error.cause, "op": error.op, "text": str(error)}


def does_not_make_its_communicator() -> None:
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() in (2, 3):
        return
    with soon(3.0), pytest.raises(a2a.PeerTimeoutError, match="rank 2") as caught:
        a2a.communicator(group, timeout=0.5)
    assert caught.value.peer == 2


# What rank 2 calls while ranks 0 and 1 exchange two float32 rows of 4 with everybody; and what the error must say of it.
DIFFERENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another op": (
        lambda comm: a2a.all_to_all([torch.empty(2, 4)] * 3, [torch.empty(2, 4)] * 3, comm),
        r"all_to_all\(",
    ),
    "another dtype": (
        lambda comm: a2a.all_to_all_single(torch.empty(6, 4).int(), torch.empty(6, 4).int(), group=comm),
        "int32",
    ),
    "another row size": (
        lambda comm: a2a.all_to_all_single(torch.empty(6, 5), torch.empty(6, 5), group=comm),
        r"\[5\]",
    ),
    "another number of rows": (
        lambda comm: a2a.all_to_all_single(torch.empty(9, 4), torch.empty(9, 4), group=comm),
        "rank 2",
    ),
    "other output splits": (
        lambda comm: a2a.all_to_all_single(torch.empty(6, 4), torch.empty(6, 4), [1, 3, 2], group=comm),
        "rank 2",
    ),
    "other input splits": (
        lambda comm: a2a.all_to_all_single(torch.empty(6, 4), torch.empty(6, 4), None, [2, 0, 4], comm),
        "rank 2",
    ),
    "no rows": (
        lambda comm: a2a.all_to_all_single(torch.empty(0, 4), torch.empty(0, 4), group=comm),
        "rank 2",
    ),
    "symmetric memory": (lambda comm: comm.empty((8,), torch.float32), r"comm\.empty"),
}


def different(name: str, memory: str) -> tuple[int, str]:
    rank = dist.get_rank()
    comm = a2a.communicator(timeout=20)
    exchange_once(comm)
    tensors = comm.empty((2, 6, 4), torch.float32) if memory == "symmetric" else torch.empty(2, 6, 4)
    tensors.fill_(-1.0)
    dist.barrier()
    different_call, says = DIFFERENT[name]

    def call() -> None:
        if rank == 2:
            different_call(comm)
        else:
            a2a.all_to_all_single(tensors[0], tensors[1], group=comm)
        if says == "rank 2":  # one wrong split is seen by two ranks only; the others hear of it
            heard(comm)

    with soon(NOTICED_S), pytest.raises(a2a.MismatchError) as caught:
        call()
    text = str(caught.value)
    raises_on_and_on(comm, a2a.MismatchError, says)
    comm.close()
    with a2a.communicator() as comm:
        exchange_once(comm)
    return caught.value.peer, text


def one_pair_disagrees(op: str) -> str:
    """What rank 0 sends to rank 1 is larger than what rank 1 expects; rank 2, who has no part in it, hears of it too."""
    rank = dist.get_rank()
    with a2a.communicator(timeout=20) as comm:
        sent = [3 if (rank, target) == (0, 1) else 2 for target in range(3)]

        def exchange_and_check() -> None:
            if op == "lists":
                a2a.all_to_all([torch.empty(2) for _ in range(3)], [torch.empty(rows) for rows in sent], comm)
            else:
                a2a.all_to_all_single(torch.empty(6), torch.empty(sum(sent)), None, sent, comm)
            if rank == 2:
                heard(comm)

        with soon(NOTICED_S), pytest.raises(a2a.MismatchError) as caught:
            exchange_and_check()
        dist.barrier()
        return str(caught.value)


def mistakes_of_some(seed: int, calls: int, async_op: bool) -> tuple[int, int]:
    """At random, some ranks make a mistake of their own: they raise ValueError, their peers hear of it, nothing breaks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(seed)
    outcomes = [0, 0]
    with a2a.communicator(timeout=20) as comm:
        for call in range(calls):
            wrong = [peer for peer in range(world_size) if rng.random() < 0.3]
            exchange = Exchange(random_splits(world_size, call), salt=call)
            output = torch.empty_like(exchange.expected(rank))
            input, splits = exchange.input(rank), exchange.sent(rank)
            if rank in wrong:
                splits = [*splits, 0]
                with pytest.raises(ValueError, match="number of tensor splits not equal to group size"):
                    a2a.all_to_all_single(output, input, exchange.received(rank), splits, comm, async_op)
            elif wrong:
                with pytest.raises(a2a.MismatchError, match="number of tensor splits") as caught:
                    finished(a2a.all_to_all_single(output, input, exchange.received(rank), splits, comm, async_op))
                assert caught.value.peer in wrong
                assert f"rank {caught.value.peer} refused" in str(caught.value)
            else:
                finished(a2a.all_to_all_single(output, input, exchange.received(rank), splits, comm, async_op))
                assert_same_bits(output, exchange.expected(rank))
            outcomes[bool(wrong)] += 1
        dist.barrier()
        assert int(comm.ok) == 1
        comm.check()
    return outcomes[0], outcomes[1]


def interrupted() -> str:
    """Ctrl-C in a rank that waits: it leaves at once, and the others don't wait for it."""
    comm = a2a.communicator(timeout=20)
    exchange_once(comm)
    name = ""
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with soon(NOTICED_S), pytest.raises(KeyboardInterrupt):
            exchange_once(comm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(a2a.A2AError, match="rank 0") as caught:
            exchange_once(comm)
        name = type(caught.value).__name__
    comm.close()
    with a2a.communicator() as comm:
        exchange_once(comm)
    return name


def cycle(failing: bool) -> None:
    rank = dist.get_rank()
    comm = a2a.communicator(timeout=20)
    tensor = comm.empty((1000,), torch.float32)
    exchange_once(comm)
    a2a.all_to_all_single(
        tensor[: 2 * comm.world_size], torch.empty(2 * comm.world_size), group=comm, async_op=True
    ).wait()
    if failing:
        with pytest.raises(a2a.MismatchError):
            a2a.all_to_all_single(*torch.empty(2, 2, rank + 1), group=comm)
    comm.close()


def holdings() -> dict[str, int]:
    """What this process holds: descriptors, threads, mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": sum("memfd" in line for line in maps),
    }


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def made_and_closed(cycles: int, failing: bool) -> tuple[dict[str, int], dict[str, int], int]:
    for _ in range(5):
        cycle(failing)
    before, kib = holdings(), resident_kib()
    for _ in range(cycles):
        cycle(failing)
    return before, holdings(), resident_kib() - kib


def many_calls(calls: int, mode: str) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    input = torch.arange(world_size * 100, dtype=torch.float32) + rank
    output = torch.empty_like(input)
    splits = [100] * world_size
    kib = 0
    with a2a.communicator() as comm:
        for call in range(calls):
            if call == calls // 5:
                kib = resident_kib()
            work = a2a.all_to_all_single(
                output, input, splits if mode == "splits" else None, None, comm, async_op=mode == "async"
            )
            if mode == "async" and call % 8 == 7:
                work.wait()
            if mode == "mistakes":
                with pytest.raises(ValueError, match="divide"):
                    a2a.all_to_all_single(output[1:], input[1:], group=comm)
        if mode == "async":
            work.wait()
        return resident_kib() - kib


def shared_memory_names() -> list[str]:
    """The files in /dev/shm that this process has open or mapped while a communicator lives."""
    with a2a.communicator() as comm:
        tensor = comm.empty((5000,), torch.float32)
        exchange_once(comm)
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        ]
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert any("memfd" in line for line in maps), "the memory is not where this test looks for it"
        del tensor
        return [name for name in links + maps if "/dev/shm" in name]


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("mode", ["ordinary", "symmetric", "mixed", "async"])
@pytest.mark.parametrize("delay_ms", [0.0, 37.0])
def test_a_killed_peer_is_named_by_all_within_two_seconds(
    world: World, delay_ms: float, mode: str, tmp_path: Path
) -> None:
    rng = random.Random(f"{world.size} {mode} {delay_ms}")
    victim, delay_s, note = rng.randrange(world.size), (delay_ms + rng.random() * 5) / 1000, tmp_path / "died_at"
    with Stalls() as stalls:
        results = world.run(
            killed_in_the_middle, victim=victim, delay_s=delay_s, note=str(note), mode=mode, expect_dead={victim}
        )
    died_at = float(note.read_text())
    for rank, result in enumerate(results):
        if rank != victim:
            assert result["raised_at"] - died_at < NOTICED_S + stalls.seconds
            assert (result["rank"], result["peer"], result["cause"]) == (rank, victim, "died")
            assert f"rank {victim} died" in result["text"]
            assert "all_to_all" in result["text"]


@pytest.mark.ranks(2)
def test_a_killed_peer_is_noticed_though_its_forked_child_lives(world: World, tmp_path: Path) -> None:
    note = tmp_path / "died_at"
    with Stalls() as stalls:
        raised_at, _ = world.run(killed_while_its_child_lives, note=str(note), expect_dead={1})
    assert raised_at - float(note.read_text()) < NOTICED_S + stalls.seconds


@pytest.mark.ranks(3)
def test_a_peer_that_exits_is_named_at_once(world: World) -> None:
    causes = world.run(leaves, how="exit", expect_dead={1})
    assert {causes[0], causes[2]} <= {"died", "closed"}


@pytest.mark.ranks(3)
def test_a_peer_that_closed_its_communicator_is_named_at_once(world: World) -> None:
    assert world.run(leaves, how="close") == ["closed", "", "closed"]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_late_peer_is_named_after_the_deadline_with_what_to_do(world: World, async_op: bool) -> None:
    results = world.run(late, async_op=async_op)
    for rank in (0, 2):
        assert results[rank]["waited"] > 0.3
        assert (results[rank]["peer"], results[rank]["cause"]) == (1, "timeout")
        assert "all_to_all_single" in results[rank]["op"]
        for part in ("waited 0.4 s for rank 1", "all_to_all_single", "epoch", "A2A_TIMEOUT_S"):
            assert part in results[rank]["text"]


@pytest.mark.ranks(4)
def test_a_rank_that_does_not_make_its_communicator_is_named(world: World) -> None:
    world.run(does_not_make_its_communicator)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("memory", ["ordinary", "symmetric"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_rank_that_asks_for_something_else_is_found_out_by_all(world: World, name: str, memory: str) -> None:
    results = world.run(different, name=name, memory=memory)
    _, says = DIFFERENT[name]
    for rank, (peer, text) in enumerate(results):
        assert peer != rank
        assert "rank 2" in text
        assert "rank 0" in text or "rank 1" in text
        assert re.search(says, text)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", ["single", "lists"])
def test_two_ranks_that_disagree_are_named_on_all(world: World, op: str) -> None:
    for text in world.run(one_pair_disagrees, op=op):
        assert "rank 0" in text
        assert "rank 1" in text


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_mistake_of_one_rank_reaches_the_others_and_breaks_nothing(world: World, async_op: bool) -> None:
    for good, bad in world.run(mistakes_of_some, seed=world.size, calls=60, async_op=async_op):
        assert good > 5
        assert bad > 5


@pytest.mark.ranks(3)
def test_an_interrupted_rank_leaves_at_once_and_the_others_hear_of_it(world: World) -> None:
    assert world.run(interrupted) == ["", "InterruptedRankError", "InterruptedRankError"]


@pytest.mark.parametrize("failing", [False, True], ids=["well", "after a failure"])
def test_closed_communicators_leave_nothing_open(world: World, failing: bool) -> None:
    for before, after, grown_kib in world.run(made_and_closed, cycles=20, failing=failing):
        assert after == before
        assert grown_kib < 1500, f"{grown_kib} KiB in 20 communicators"


@pytest.mark.parametrize("mode", ["even", "splits", "async", "mistakes"])
def test_memory_stays_flat_over_many_calls(world: World, mode: str) -> None:
    for grown_kib in world.run(many_calls, calls=5000 if mode == "even" else 2000, mode=mode):
        assert grown_kib < 600, f"{grown_kib} KiB"


def test_shared_memory_has_no_name_that_could_be_left_behind(world: World) -> None:
    assert world.run(shared_memory_names) == [[], []]
