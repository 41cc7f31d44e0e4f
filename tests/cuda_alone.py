"""One rank, started as a launcher starts it: for settings that a process must have before it touches a GPU.

python cuda_alone.py CHECK RANK RANKS PORT        PORT: of a TCPStore that outlives the ranks
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import a2a
from a2a_world import received, same, sent, served

TIMEOUT_S = 60.0


def enter(
    check: str, rank: int, ranks: int, port: int, device_id: torch.device | None = None, backend: str = "a2a"
) -> None:
    store = dist.PrefixStore(check, dist.TCPStore("127.0.0.1", port, is_master=False))
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=device_id)


def exchange(group: dist.ProcessGroup | None = None) -> None:
    output = torch.empty_like(received(), device="cuda")
    dist.all_to_all_single(output, sent().cuda(), group=group)
    same(output.cpu(), received())


def the_rest() -> None:
    """What NCCL does beside it, and a second group."""
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    same(total.cpu(), torch.full((3,), float(dist.get_world_size())))
    dist.barrier()
    group = dist.new_group()
    exchange(group)
    assert served(group) == 1
    dist.destroy_process_group(group)


def visible(rank: int, ranks: int, port: int) -> None:
    assert torch.cuda.device_count() == 1
    enter("visible", rank, ranks, port)
    exchange()
    assert served() == 1
    the_rest()


def bound(rank: int, ranks: int, port: int) -> None:
    """`device_id` instead of a current device, which is another GPU's on all ranks but one."""
    device = torch.device("cuda", rank)
    enter("bound", rank, ranks, port, device, "cuda:a2a")
    output = torch.empty_like(received(), device=device)
    dist.all_to_all_single(output, sent().to(device))
    same(output.cpu(), received())
    assert served() == 1
    dist.barrier()
    torch.cuda.set_device(device)
    the_rest()


def expandable(rank: int, ranks: int, port: int) -> None:
    torch.cuda.set_device(rank)
    enter("expandable", rank, ranks, port)
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings.get("expandable_segments", True), settings
    for _ in range(3):
        exchange()
    with a2a.communicator(device="cuda") as comm:
        symmetric = comm.empty(ranks, 1 << 20, dtype=torch.int32)
        source = (torch.arange(ranks, device="cuda", dtype=torch.int32)[:, None] + 10 * rank).expand(-1, 1 << 20)
        a2a.all_to_all_single(symmetric, source.contiguous(), group=comm)
        expected = torch.arange(ranks, device="cuda", dtype=torch.int32)[:, None] * 10 + rank
        assert bool((symmetric == expected).all())
    the_rest()


if __name__ == "__main__":
    check, rank, ranks, port = sys.argv[1], *map(int, sys.argv[2:])
    {"visible": visible, "bound": bound, "expandable": expandable}[check](rank, ranks, port)
    dist.destroy_process_group()
