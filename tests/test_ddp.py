"""DDP whose buckets go a2a's way: same gradients, `no_sync`, unused parameters, formats, failures."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import a2a
from a2a.integrations import ddp
from a2a_world import A2AWorld
from deadlines import soon
from gradient_reference import Planted, Reference, topology, values
from pool import World
from test_gradients import close, loss_of, network, same

F32 = torch.float32


def averages(sizes: tuple[int, ...]) -> None:
    """Several steps, so that DDP has made its buckets anew, with and without no_sync."""
    rank = dist.get_rank()
    model = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    reducer = ddp.register(model, topology(*sizes))
    for step in range(4):
        model.zero_grad()
        with model.no_sync():
            loss_of(model, rank, 10 * step).backward()
        loss_of(model, rank, 10 * step + 1).backward()
        close(model.module, [10 * step, 10 * step + 1])
    if len(sizes) > 1:
        assert reducer.stats()["bytes_sent"] > 0
    reducer.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 1)], ids=str)
def test_ddp_averages_through_the_hierarchy(world: World, sizes: tuple[int, ...]) -> None:
    world.run(averages, sizes=sizes)


def test_ddp_on_backend_a2a(two: A2AWorld) -> None:
    two.run(averages, sizes=(1, 1))


class Called(torch.nn.Module):
    """DDP wants a forward."""

    def __init__(self, inner: Planted) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, gradients: Any) -> torch.Tensor:
        return self.inner.loss(gradients)


def has_the_bits(wire: str | None) -> None:
    rank, sizes = dist.get_rank(), (2, 2)
    planted = Planted([3000], [F32])
    model = DistributedDataParallel(Called(planted))
    with ddp.register(model, topology(*sizes), wire):
        reference = Reference(sizes, 3000, F32, wire)
        for step in range(4):
            model.zero_grad()
            given = [values(r, 3000, F32, step) for r in range(4)]
            model([given[rank]]).backward()
            same(planted.weights[0].grad, reference.step(given))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wire", [None, "bf16", "fp8"])
def test_gradients_have_the_documented_bits(world: World, wire: str | None) -> None:
    world.run(has_the_bits, wire=wire)


def leaves_out() -> None:
    model = DistributedDataParallel(Called(Planted([10, 20], [F32, F32])), find_unused_parameters=True)
    rank = dist.get_rank()
    with ddp.register(model, topology(1, 1)):
        for _ in range(3):
            model.zero_grad()
            model([torch.ones(10), torch.ones(20) if rank == 0 else None]).backward()
            same(model.module.inner.weights[1].grad, torch.full((20,), 0.5))


@pytest.mark.ranks(2)
def test_unused_parameters_are_ddps_affair(world: World) -> None:
    world.run(leaves_out)


def dies() -> str:
    os.environ["A2A_TIMEOUT_S"] = "60"
    model = DistributedDataParallel(network())
    ddp.register(model, topology(2, 1))
    for step in range(3):  # DDP makes its buckets anew after the first
        loss_of(model, 0, step).backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        while True:
            loss_of(model, 0, 1).backward()

    with soon(10.0), pytest.raises(RuntimeError) as caught:
        train()
    return str(caught.value)


@pytest.mark.ranks(3)
def test_a_killed_peer_is_named(world: World) -> None:
    for text in (told for told in world.run(dies, expect_dead={1}) if told is not None):
        assert "rank 1" in text, text


def registers_twice() -> None:
    model = DistributedDataParallel(network())
    reducer = ddp.register(model)
    assert isinstance(reducer, a2a.GradientReducer)
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        ddp.register(model)
    reducer.close()


@pytest.mark.ranks(2)
def test_a_model_has_one_hook(world: World) -> None:
    world.run(registers_twice)
