"""Groups on backend "a2a" come and go: several at once, in any order, again in the same processes."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist

from a2a_world import A2AWorld, exchange, received, same, sent


def check_any_order(seed: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    works = []
    for i, group in enumerate(groups):  # all at once, each with its own communicator
        output = torch.empty_like(received())
        works.append((dist.all_to_all_single(output, sent() + i, group=group, async_op=True), output, i))
    for work, output, i in reversed(works):
        work.wait()
        same(output, received() + i)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed + dist.get_rank())).tolist()
    for i in order:
        dist.destroy_process_group(groups[i])
    exchange()


@pytest.mark.parametrize("seed", range(3))
def test_several_groups_at_once_leave_in_any_order(two: A2AWorld, seed: int) -> None:
    two.run(check_any_order, seed=seed)


def check_subgroups() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3], [1, 2])]
    exchange()
    for members, group in zip(([0, 1], [2, 3], [1, 2]), pairs, strict=True):
        output = torch.full((2,), -1)
        if rank in members:
            dist.all_to_all_single(output, torch.full((2,), rank), group=group)
            same(output, torch.tensor(members))
        else:
            with pytest.warns(UserWarning, match="does not belong"):
                assert dist.all_to_all_single(output, torch.full((2,), rank), group=group) is None
            same(output, torch.full((2,), -1))


def test_overlapping_groups_and_ranks_outside_them(four: A2AWorld) -> None:
    four.run(check_subgroups)


def check_destroyed() -> None:
    group = dist.new_group()
    exchange(group)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="was destroyed"):
        group.all_to_all_single(torch.empty(2), torch.empty(2), [], [])


def test_a_destroyed_group_says_so(two: A2AWorld) -> None:
    two.run(check_destroyed)


def check_dropped() -> int:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    exchange()
    dist.barrier()
    counts = []
    for _ in range(4):
        group = dist.new_group()
        exchange(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(open_files())
    assert counts[-1] <= counts[0], counts
    return len(counts)


def test_destroyed_groups_leave_no_open_files(two: A2AWorld) -> None:
    two.run(check_dropped)


def check_elastic(port: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for again in range(3):
        exchange()
        dist.destroy_process_group()
        store = dist.PrefixStore(f"again{again}", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("a2a", store=store, rank=rank, world_size=size)
    exchange()


def test_a_world_is_made_again_in_the_same_processes(two: A2AWorld) -> None:
    two.run(check_elastic, port=two.port)
