"""Nothing is left behind: not by communicators that were closed, well or broken, and not by thousands of calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import a2a
from exchange_cases import exchange_once
from pool import World


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
    kib = 0
    with a2a.communicator() as comm:
        for call in range(calls):
            if call == calls // 5:
                kib = resident_kib()
            rows = 100 - call % 50 if mode == "splits" else 100
            splits = [rows] * world_size if mode == "splits" else None
            work = a2a.all_to_all_single(
                output[: rows * world_size], input[: rows * world_size], splits, None, comm, async_op=mode == "async"
            )
            if mode == "reductions":
                a2a.all_reduce(output, group=comm)
                a2a.reduce_scatter_tensor(output[:100], input, group=comm)
                a2a.all_gather_into_tensor(output, input[:100], comm)
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


@pytest.mark.parametrize("failing", [False, True], ids=["well", "after a failure"])
def test_closed_communicators_leave_nothing_open(world: World, failing: bool) -> None:
    for before, after, grown_kib in world.run(made_and_closed, cycles=20, failing=failing):
        assert after == before
        assert grown_kib < 1500, f"{grown_kib} KiB in 20 communicators"


@pytest.mark.parametrize("mode", ["even", "splits", "async", "mistakes", "reductions"])
def test_memory_stays_flat_over_many_calls(world: World, mode: str) -> None:
    for grown_kib in world.run(many_calls, calls=5000 if mode == "even" else 2000, mode=mode):
        assert grown_kib < 600, f"{grown_kib} KiB"


def test_shared_memory_has_no_name_that_could_be_left_behind(world: World) -> None:
    assert world.run(shared_memory_names) == [[], []]
