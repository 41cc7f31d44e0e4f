"""What ranks asked for is kept in a table of the last few requests; a long-lived communicator outlives it many times."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import a2a
from a2a.kernels import cpu


def many_shapes() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with a2a.communicator(timeout=20) as comm:
        ep = a2a.ExpertParallel(comm=comm, num_experts=4, top_k=2, hidden=16, max_tokens=8, dtype=torch.float32)
        early = torch.full((world_size, 7), float(rank))
        received = torch.empty_like(early)
        a2a.all_to_all_single(received, early, group=comm)
        for columns in range(1, 2 * cpu.TEXTS + 50):
            output = torch.empty(world_size, columns)
            a2a.all_to_all_single(output, torch.full((world_size, columns), float(rank)), group=comm)
            assert torch.equal(output, torch.arange(float(world_size)).unsqueeze(1).expand_as(output))
            if columns % 61 == 0:  # everything that was asked for long ago is asked for again
                a2a.all_to_all_single(received, early, group=comm)
                rows, _, routing = ep.dispatch(torch.ones(3, 16), torch.zeros(3, 2, dtype=torch.int64))
                assert torch.equal(ep.combine(rows, routing), torch.full((3, 16), 2.0))
                comm.empty(10)


def test_more_shapes_than_the_table_keeps_are_no_mismatch(world: Any) -> None:
    world.run(many_shapes)
