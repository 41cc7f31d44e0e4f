"""Two communicators on two streams of a GPU, and NCCL on a third, called in another order on every rank: all of them finish.

NCCL wants a GPU for each rank and is left out where ranks share one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(2, 4),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
HIDDEN, EXPERTS, TOP_K, TOKENS = 1024, 16, 4, 512
ELEMENTS = 1 << 20


class Lane:
    """A stream and what is called on it, again and again; `wrong` counts elements on the device."""

    def __init__(self, call: Callable[[int], torch.Tensor]) -> None:
        self.call, self.stream = call, torch.cuda.Stream()
        self.wrong, self.number = torch.zeros((), dtype=torch.int64, device="cuda"), 0

    def again(self) -> None:
        with torch.cuda.stream(self.stream):
            self.wrong += self.call(self.number)
        self.number += 1


def layer(ep: a2a.ExpertParallel) -> Callable[[int], torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(dist.get_rank())

    def call(number: int) -> torch.Tensor:
        tokens = TOKENS if number % 4 else 1
        x = torch.randint(-8, 9, (tokens, HIDDEN), generator=generator, device="cuda").bfloat16()
        ids = torch.randint(0, EXPERTS, (tokens, TOP_K), generator=generator, device="cuda")
        rows, _, routing = ep.dispatch(x, ids)
        return (ep.combine(rows, routing) != x * TOP_K).sum()  # whole numbers: exact

    return call


def exchange(comm: a2a.Communicator) -> Callable[[int], torch.Tensor]:
    rank, world = comm.rank, comm.world_size
    expected = torch.arange(world, device="cuda", dtype=torch.int32).repeat_interleave(ELEMENTS // world)

    def call(number: int) -> torch.Tensor:
        source = torch.full((ELEMENTS // world * world,), rank + 100 * number, dtype=torch.int32, device="cuda")
        output = torch.empty_like(source)
        a2a.all_to_all_single(output, source, group=comm)
        return (output != expected + 100 * number).sum()

    return call


def reduce_by_nccl(group: Any) -> Callable[[int], torch.Tensor]:
    def call(number: int) -> torch.Tensor:
        tensor = torch.full((ELEMENTS,), number, dtype=torch.int32, device="cuda")
        dist.all_reduce(tensor, group=group)
        return (tensor != number * dist.get_world_size()).sum()

    return call


def interleaved(count: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with contextlib.ExitStack() as stack:
        comms = [stack.enter_context(a2a.communicator(device="cuda", timeout=60.0)) for _ in range(2)]
        ep = a2a.ExpertParallel(
            num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, comm=comms[0],
            max_rows=TOKENS * TOP_K * world,
        )  # fmt: skip
        stack.callback(ep.close)
        lanes = [Lane(layer(ep)), Lane(exchange(comms[1]))]
        if world <= torch.cuda.device_count():
            group = dist.new_group(backend="nccl")
            stack.callback(dist.destroy_process_group, group)
            lanes.append(Lane(reduce_by_nccl(group)))
        for lane in lanes:  # loads kernels, connects NCCL
            lane.again()
        torch.cuda.synchronize()
        order = random.Random(rank)  # unlike the others'
        for _ in range(count):
            for lane in order.sample(lanes, len(lanes)):
                lane.again()
        torch.cuda.synchronize()
        for comm in comms:
            comm.check()
        assert [int(lane.wrong) for lane in lanes] == [0] * len(lanes)


def test_streams_in_any_order_finish(world: Any) -> None:
    world.run(interleaved, count=200 if world.size <= torch.cuda.device_count() else 30, deadline_s=120)
