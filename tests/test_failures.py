"""When a rank dies, is late, leaves or is interrupted, every other rank is told who and how, soon; nobody hangs.

A broken communicator keeps saying why. It is closed and made anew in the same process.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from deadlines import Stalls, soon
from exchange_cases import exchange_once
from failure_cases import NOTICED_S, finished, raises_on_and_on
from pool import World


def survivors_go_on(dead: int) -> None:
    """Those who are left make a group and a communicator among themselves."""
    left = [rank for rank in range(dist.get_world_size()) if rank != dead]
    group = dist.new_group(left, use_local_synchronization=True)
    with a2a.communicator(group) as comm:
        exchange_once(comm)
    dist.destroy_process_group(group)


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
def test_an_interrupted_rank_leaves_at_once_and_the_others_hear_of_it(world: World) -> None:
    assert world.run(interrupted) == ["", "InterruptedRankError", "InterruptedRankError"]
