"""GradientReducer(scatter=True): each rank has its part of the reduced gradients and parameters, and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import a2a
from gradient_reference import HIERARCHIES, topology
from pool import World
from test_gradients import loss_of, network, same


def trains_as_replicated(sizes: tuple[int, ...], wire: str | None, accumulate: bool) -> None:
    """A distributed AdamW ends with the parameters that a replicated one has; without a lossy format bit for bit."""
    rank, ends = dist.get_rank(), []
    for scatter in (False, True):
        model = network()
        with a2a.GradientReducer(
            model, topology=topology(*sizes), wire=wire, bucket_mb=0.004, scatter=scatter
        ) as reducer:
            mine = reducer.shards if scatter else list(model.parameters())
            optimizer = torch.optim.AdamW(mine, lr=1e-2)
            for step in range(6):
                optimizer.zero_grad()
                if accumulate:
                    with reducer.no_sync():
                        loss_of(model, rank, 100 + step).backward()
                loss_of(model, rank, step).backward()
                if scatter:
                    assert all(p.grad is None for p in model.parameters())
                optimizer.step()
                if scatter:
                    reducer.gather_parameters()
                model.zero_grad()
            elements = sum(p.numel() for p in mine)
        ends.append([p.detach().clone() for p in model.parameters()])
        counted = torch.tensor(elements)
        dist.all_reduce(counted)
        whole = sum(p.numel() for p in model.parameters())
        if scatter:
            assert elements < whole or dist.get_world_size() == 1
            assert whole <= counted < whole + 16 * 64  # gaps between parameters
    for one, other in zip(*ends, strict=True):
        if wire is None:
            same(one, other)
        else:  # scattered gradients cross the rails once less
            torch.testing.assert_close(one, other, rtol=0, atol=0.02)


def trains_in_every_hierarchy() -> None:
    for sizes in HIERARCHIES[dist.get_world_size()]:
        for wire, accumulate in ((None, False), (None, True), ("fp8", False)):
            trains_as_replicated(sizes, wire, accumulate)


@pytest.mark.ranks(1, 2, 4, 5)
def test_a_distributed_optimizer_ends_with_the_same_parameters(world: World) -> None:
    world.run(trains_in_every_hierarchy)


def clips() -> None:
    rank, norms = dist.get_rank(), []
    replicated, scattered = network(), network()
    with a2a.GradientReducer(replicated, topology=topology(2, 2)):
        loss_of(replicated, rank, 0).backward()
        norms.append(nn.utils.clip_grad_norm_(replicated.parameters(), 0.01))
    with a2a.GradientReducer(scattered, topology=topology(2, 2), scatter=True) as reducer:
        loss_of(scattered, rank, 0).backward()
        norms.append(reducer.clip_grad_norm_(0.01))
        squares = torch.stack([part.grad.square().sum() for part in reducer.shards]).sum()
    torch.testing.assert_close(*norms)
    dist.all_reduce(squares)
    torch.testing.assert_close(squares.sqrt(), torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.ranks(4)
def test_shards_are_clipped_by_the_norm_of_all_of_them(world: World) -> None:
    world.run(clips)


def has_no_shards() -> None:
    with a2a.GradientReducer(network()) as reducer:
        with pytest.raises(ValueError, match="scatter=True"):
            _ = reducer.shards
        with pytest.raises(ValueError, match="scatter=True"):
            reducer.gather_parameters()


@pytest.mark.ranks(2)
def test_a_replicating_reducer_has_no_shards(world: World) -> None:
    world.run(has_no_shards)
