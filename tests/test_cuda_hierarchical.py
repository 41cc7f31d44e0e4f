"""Collectives of CUDA tensors across made-up domains: cuda_vmm inside, and NCCL between.

NCCL wants a GPU for each rank of a rail: of 4 ranks on 2 GPUs, 0 and 2 are a domain on one GPU, 1 and 3 on the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.topology import Domain, Topology, presets
from exchange_cases import assert_same_bits
from failure_cases import finished
from pool import World
from test_hierarchical import AVG, CASES, SUM, hierarchical
from test_reductions import values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(2, 4),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 CUDA GPUs here"),
]


def two_domains(world_size: int) -> Topology:
    members = [tuple(range(first, world_size, 2)) for first in (0, 1)]
    domains = tuple(Domain(ranks, "nvlink", f"host{place}") for place, ranks in enumerate(members))
    return Topology(domains, presets.H200_NVLINK, presets.HOPPER_NET)


def reduced(comm: Any, top: Topology, count: int, dtype: torch.dtype, op: Any, async_op: bool) -> None:
    rank, world_size = comm.rank, comm.world_size
    terms = [values(r, count, dtype) for r in range(world_size)]
    tensor = terms[rank].cuda()
    finished(a2a.all_reduce(tensor, op, comm, async_op))
    assert_same_bits(tensor.cpu(), hierarchical(top, terms, op))
    whole = [values(r, count * world_size, dtype, 1) for r in range(world_size)]
    input, output = whole[rank].cuda(), torch.empty(count, dtype=dtype, device="cuda")
    finished(a2a.reduce_scatter_tensor(output, input, op, comm, async_op))
    assert_same_bits(output.cpu(), hierarchical(top, [w[rank * count :][:count] for w in whole], op))
    gathered = torch.empty(count * world_size, dtype=dtype, device="cuda")
    finished(a2a.all_gather_into_tensor(gathered, tensor, comm, async_op))
    assert_same_bits(gathered.cpu(), hierarchical(top, terms, op).repeat(world_size))


def exact(async_op: bool) -> None:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    top = two_domains(dist.get_world_size())
    with a2a.communicator(topology=top, device="cuda", timeout=20) as comm:
        for number, (dtype, op) in enumerate(CASES):
            for count in ([1, 1000], [7, 70_001], [0, 16384])[number % 3]:
                reduced(comm, top, count, dtype, op, async_op)
        for dtype, op in ((torch.bfloat16, SUM), (torch.float32, AVG)):
            reduced(comm, top, 3_000_001, dtype, op, async_op)
        comm.check()
        assert comm.stats()["handed_over"] == {}
        assert {plan.algorithm.name for plan in comm.plans.values()} == {"hierarchical"}
        dist.barrier()


def one_after_the_other() -> None:
    """New data in the same memory on several streams, and nothing waits on the host between."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    top, rank, world_size = two_domains(dist.get_world_size()), dist.get_rank(), dist.get_world_size()
    with a2a.communicator(topology=top, device="cuda", timeout=20) as comm:
        tensors = [torch.empty(count, device="cuda") for count in (10, 200_000, 4_000_000)]
        results = []
        for call in range(30):
            tensor = tensors[call % 3].fill_(float(rank + call))
            work = a2a.all_reduce(tensor, group=comm, async_op=call % 2 == 0)
            finished(work)
            results.append((call, tensor[-1].clone()))
        total = world_size * (world_size - 1) // 2
        assert [float(value) for _, value in results] == [float(total + call * world_size) for call, _ in results]
        dist.barrier()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_reductions_of_cuda_tensors_are_those_of_cpu_tensors(world: World, async_op: bool) -> None:
    world.run(exact, async_op=async_op)


def test_calls_on_streams_follow_each_other(world: World) -> None:
    world.run(one_after_the_other)
