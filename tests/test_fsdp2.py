"""FSDP2 sharded in a domain and replicated across: trains as one process does, and reduces what it should when asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import a2a
from a2a.integrations import fsdp2
from gradient_reference import HIERARCHIES, topology
from pool import World
from test_gradients import loss_of, network, reference_gradients


def sharded(hybrid: fsdp2.Hybrid, model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            hybrid.fully_shard(layer, **options)
    hybrid.fully_shard(model, **options)
    return model


def close(model: nn.Module, steps: Sequence[int], whole: nn.Module, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-7}
    for param, expected in zip(model.parameters(), reference_gradients(whole, steps), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected, **tolerance)


def trains(sizes: tuple[int, ...], wire: str | None) -> None:
    """Five steps of SGD, beside a model in one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hybrid = fsdp2.Hybrid(topology=topology(*sizes), wire=wire)
    model, alone = sharded(hybrid, network()), network()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        (torch.stack([loss_of(alone, r, step) for r in range(size)]).sum() / size).backward()
        for optimizer in optimizers:
            optimizer.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if wire is None else {"rtol": 0, "atol": 0.01}
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected.detach(), **tolerance)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, [param.full_tensor() for param in model.parameters()])
    for other in everyone:  # the domains hold the same parameters, whatever a format loses
        for one, two in zip(everyone[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
    if sizes[0] > 1:
        assert sum(hybrid.mesh.get_group().stats()["calls"].values()) > 0  # inside the domain it is a2a's
    hybrid.close()


def trains_in_every_hierarchy() -> None:
    for sizes in HIERARCHIES[dist.get_world_size()]:
        for wire in (None, "bf16", "fp8") if len(set(sizes)) == 1 else ():
            trains(sizes, wire)


@pytest.mark.ranks(2, 4)
def test_it_trains_as_one_process_does(world: World) -> None:
    world.run(trains_in_every_hierarchy)


def reduces_when_asked(how: str) -> None:
    """Micro-steps without any reduction, or with one in the domain only; the last one brings all."""
    rank = dist.get_rank()
    hybrid = fsdp2.Hybrid(topology=topology(2, 2))
    model, whole = sharded(hybrid, network()), network()
    switch = getattr(model, how)
    for round in range(2):
        model.zero_grad()
        sent = hybrid.bytes_sent
        switch(False)
        loss_of(model, rank, 10 * round).backward()
        loss_of(model, rank, 10 * round + 1).backward()
        assert hybrid.bytes_sent == sent
        switch(True)
        loss_of(model, rank, 10 * round + 2).backward()
        assert hybrid.bytes_sent > sent
        close(model, [10 * round, 10 * round + 1, 10 * round + 2], whole)
    hybrid.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_domains_reduce_across_only_when_asked(world: World, how: str) -> None:
    world.run(reduces_when_asked, how=how)


def reduces_in_float32() -> None:
    hybrid = fsdp2.Hybrid(topology=topology(2, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(hybrid, network(), mp_policy=policy)
    loss_of(model, dist.get_rank(), 0).backward()
    close(model, [0], network(), rtol=0.05, atol=0.01)
    hybrid.close()
    loss = loss_of(model, dist.get_rank(), 1)
    with pytest.raises(a2a.A2AError, match="is closed on rank"):
        loss.backward()


@pytest.mark.ranks(4)
def test_mixed_precision(world: World) -> None:
    world.run(reduces_in_float32)


class TwoMeshes(nn.Module):
    """As a layer with experts has it: some parameters are sharded over another group."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.ones(8))
        self.experts = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.common * x).sum() + (self.experts * x).sum()


def has_two_groups() -> None:
    """Those of the domain's mesh are averaged over all ranks; the others over the ranks that shard them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    rank = dist.get_rank()
    hybrid = fsdp2.Hybrid(topology=topology(2, 2))
    everywhere = FSDPMeshInfo(DeviceMesh("cpu", list(range(4))), shard_mesh_dim=0)
    model = TwoMeshes()

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), everywhere) if param is model.experts else None

    hybrid.fully_shard(model, shard_placement_fn=place)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((8,), float(rank))).backward()
        torch.testing.assert_close(model.common.grad.full_tensor(), torch.full((8,), 1.5), rtol=0, atol=0)
        torch.testing.assert_close(model.experts.grad.full_tensor(), torch.full((8,), 1.5), rtol=0, atol=0)
    hybrid.close()


@pytest.mark.ranks(4)
def test_a_module_with_two_groups_of_parameters(world: World) -> None:
    world.run(has_two_groups)


def is_refused() -> None:
    with pytest.raises(a2a.UnsupportedError, match=r"3 ranks.*different numbers of ranks"):
        fsdp2.Hybrid(topology=topology(2, 1))
    hybrid = fsdp2.Hybrid(topology=topology(1, 1, 1))
    with pytest.raises(ValueError, match="leave mesh= out"):
        hybrid.fully_shard(network(), mesh=hybrid.mesh)
    hybrid.close()


@pytest.mark.ranks(3)
def test_what_cannot_be_is_refused(world: World) -> None:
    world.run(is_refused)
