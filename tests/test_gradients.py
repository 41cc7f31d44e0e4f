"""GradientReducer: gradients after backward are the documented sums, bit for bit, whatever the hierarchy and the buckets."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import a2a
from gradient_reference import HIERARCHIES, Planted, Reference, topology, values
from pool import World

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
COUNTS = (3, 1000, 1, 257, 4096)
MIXED = (F32, BF16, F32, F64, BF16)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def planted(
    rank: int, salt: int, counts: Sequence[int] = COUNTS, dtypes: Sequence[torch.dtype] = MIXED
) -> list[Tensor]:
    return [values(rank, count, dtype, salt) for count, dtype in zip(counts, dtypes, strict=True)]


def averaged(
    sizes: tuple[int, ...], salt: int, average: bool = True, dtypes: Sequence[torch.dtype] = MIXED
) -> list[Tensor]:
    """By the reference; without a lossy format it does not matter how gradients lie in buckets."""
    everyone = [planted(rank, salt, COUNTS, dtypes) for rank in range(sum(sizes))]
    return [
        Reference(sizes, count, dtype, None, average=average).step([one[n] for one in everyone])
        for n, (count, dtype) in enumerate(zip(COUNTS, dtypes, strict=True))
    ]


def reduces(sizes: tuple[int, ...], bucket_mb: float, average: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    """Five steps, each bitwise as the reference; the buckets' order is learnt in the first."""
    rank = dist.get_rank()
    model = Planted(COUNTS, dtypes)
    with a2a.GradientReducer(model, topology=topology(*sizes), bucket_mb=bucket_mb, average=average) as reducer:
        for step in range(5):
            model.zero_grad(set_to_none=step % 2 == 0)
            model.loss(planted(rank, step, COUNTS, dtypes)).backward()
            for got, expected in zip(model.gradients(), averaged(sizes, step, average, dtypes), strict=True):
                same(got, expected)
        told = reducer.stats()
        assert told["steps"] == 5
        assert sum(bucket["parameters"] for bucket in told["buckets"]) == len(COUNTS)
        if len(sizes) > 1:
            assert told["bytes_sent"] > 0
            assert set(told["buckets"][0]["legs"]) >= {"rail_reduce", "rail_gather"}


def reduces_in_every_hierarchy() -> None:
    for sizes in HIERARCHIES[dist.get_world_size()]:
        for bucket_mb in (1e-6, 0.01, 25):
            reduces(sizes, bucket_mb, True, MIXED)


@pytest.mark.ranks(1, 2, 4, 5)
def test_gradients_are_the_documented_mean_bit_for_bit(world: World) -> None:
    world.run(reduces_in_every_hierarchy)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("average", [True, False])
def test_float16_and_sums(world: World, sizes: tuple[int, ...], average: bool) -> None:
    world.run(reduces, sizes=sizes, bucket_mb=25, average=average, dtypes=(F16, F16, F32, F16, F32))


def float16_does_not_overflow() -> None:
    model = Planted([256], [F16])
    with a2a.GradientReducer(model, topology=topology(2, 2)):
        model.loss([torch.full((256,), 60000.0, dtype=F16)]).backward()
        same(model.weights[0].grad, torch.full((256,), 60000.0, dtype=F16))


@pytest.mark.ranks(4)
def test_float16_gradients_near_the_largest_number_stay_finite(world: World) -> None:
    world.run(float16_does_not_overflow)


# ------------------------------------------------------------------------------------------------ a step in all its forms


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 16, generator=generator)
    return x, x[:, :4].sin()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return (model(x) - y).square().mean()


def reference_gradients(model: nn.Module, steps: Sequence[int]) -> list[Tensor]:
    """The mean over ranks of the sum over micro-steps, in one process, in float64."""
    double = network().double()
    double.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    for rank in range(dist.get_world_size()):
        for step in steps:
            x, y = batch(rank, step)
            ((double(x.double()) - y.double()).square().mean() / dist.get_world_size()).backward()
    return [p.grad.float() for p in double.parameters()]


def close(model: nn.Module, steps: Sequence[int], scale: float = 1.0) -> None:
    for param, expected in zip(model.parameters(), reference_gradients(model, steps), strict=True):
        torch.testing.assert_close(param.grad, expected * scale, rtol=1e-5, atol=1e-7)


def accumulates(sizes: tuple[int, ...]) -> None:
    rank, model = dist.get_rank(), network()
    with a2a.GradientReducer(model, topology=topology(*sizes), bucket_mb=0.002) as reducer:
        for round in range(3):
            model.zero_grad(set_to_none=round != 1)
            sent = reducer.stats()["bytes_sent"]
            with reducer.no_sync():
                loss_of(model, rank, 10 * round).backward()
                loss_of(model, rank, 10 * round + 1).backward()
            assert reducer.stats()["bytes_sent"] == sent  # nothing on the way there
            own = [p.grad.clone() for p in model.parameters()]
            loss_of(model, rank, 10 * round + 2).backward()
            close(model, [10 * round, 10 * round + 1, 10 * round + 2])
            assert dist.get_world_size() == 1 or not all(
                torch.equal(a, p.grad) for a, p in zip(own, model.parameters(), strict=True)
            )
        loss_of(model, rank, 40).backward()  # on top of what is reduced, as in DDP
        close(model, [20, 21, 22, 40])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_gradients_accumulate_and_no_sync_sends_nothing(world: World, sizes: tuple[int, ...]) -> None:
    world.run(accumulates, sizes=sizes)


def leaves_out(sizes: tuple[int, ...]) -> None:
    """Parameter 1 is used on rank 0 alone, parameter 2 nowhere, in every other step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Planted([100, 200, 300], [F32] * 3)
    with a2a.GradientReducer(model, topology=topology(*sizes), bucket_mb=0.0003):
        for step in range(4):
            model.zero_grad()
            given = [torch.full((count,), float(rank + 1)) for count in (100, 200, 300)]
            odd = step % 2 == 0
            model.loss([given[0], given[1] if rank == 0 or not odd else None, None if odd else given[2]]).backward()
            total = size * (size + 1) / 2
            expected = [total / size, 1.0 / size if odd else total / size, 0.0 if odd else total / size]
            for weight, value in zip(model.weights, expected, strict=True):
                same(weight.grad, torch.full_like(weight.grad, value))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_an_unused_parameter_counts_as_zeros(world: World, sizes: tuple[int, ...]) -> None:
    world.run(leaves_out, sizes=sizes)


def one_rank_has_no_batch() -> None:
    rank, model = dist.get_rank(), network()
    with a2a.GradientReducer(model, topology=topology(1, 1)) as reducer:
        for step in range(3):
            model.zero_grad()
            if rank != step % 2:
                loss_of(model, rank, step).backward()
            reducer.finish()
            double = network()
            (loss_of(double, 1 - step % 2, step) / 2).backward()
            for param, other in zip(model.parameters(), double.parameters(), strict=True):
                same(param.grad, other.grad)


@pytest.mark.ranks(2)
def test_a_rank_without_a_backward_pass_takes_part_by_finish(world: World) -> None:
    world.run(one_rank_has_no_batch)


def clips(sizes: tuple[int, ...]) -> None:
    rank, model = dist.get_rank(), network()
    with a2a.GradientReducer(model, topology=topology(*sizes)):
        loss_of(model, rank, 0).backward()
        expected = torch.cat([g.flatten() for g in reference_gradients(model, [0])]).norm()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        torch.testing.assert_close(norm, expected)
        close(model, [0], float(1e-3 / (expected + 1e-6)))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_gradients_are_clipped_by_the_norm_of_the_mean(world: World, sizes: tuple[int, ...]) -> None:
    world.run(clips, sizes=sizes)


def begins_with_rank_0s() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Conv1d(5, 5, 1).to(memory_format=torch.channels_last))
    model.register_buffer("odd", torch.full((2, 3), dist.get_rank(), dtype=torch.int16))
    with a2a.GradientReducer(model):
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {name: value.clone() for name, value in model.state_dict().items()})
        for other in everyone:
            for name, value in other.items():
                same(value, everyone[0][name])
    torch.manual_seed(dist.get_rank())
    own = nn.Linear(3, 5)
    weight = own.weight.detach().clone()
    with a2a.GradientReducer(own, broadcast=False):
        same(own.weight.detach(), weight)


@pytest.mark.ranks(2)
def test_all_ranks_begin_with_rank_0s_parameters(world: World) -> None:
    world.run(begins_with_rank_0s)


def is_repeatable(sizes: tuple[int, ...]) -> list[Tensor]:
    """The same losses and parameters in each of two runs with other buckets, and on all ranks."""
    runs = []
    for bucket_mb in (0.001, 25):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with a2a.GradientReducer(model, topology=topology(*sizes), bucket_mb=bucket_mb):
            for step in range(20):
                optimizer.zero_grad()
                loss_of(model, dist.get_rank(), step).backward()
                optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*runs, strict=True):
        same(one, other)
    return runs[0]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 1)], ids=str)
def test_training_has_the_same_bits_in_every_run_and_on_every_rank(world: World, sizes: tuple[int, ...]) -> None:
    first, *others = world.run(is_repeatable, sizes=sizes)
    for other in others:
        for a, b in zip(first, other, strict=True):
            same(a, b)


def is_the_same_in_every_hierarchy() -> None:
    """Where sums are exact, the number of domains makes no difference."""
    rank, found = dist.get_rank(), []
    for sizes in ((4,), (2, 2), (1, 1, 1, 1), (3, 1)):
        model = Planted([5000], [F32])
        with a2a.GradientReducer(model, topology=topology(*sizes)):
            model.loss([(torch.arange(5000) * 7 + rank * 13).remainder(97).float()]).backward()
        found.append(model.weights[0].grad.clone())
    for other in found[1:]:
        same(found[0], other)


@pytest.mark.ranks(4)
def test_exact_sums_are_the_same_in_one_domain_and_in_several(world: World) -> None:
    world.run(is_the_same_in_every_hierarchy)


def overlaps() -> None:
    """Buckets are on their way while the backward pass goes on, and their legs beside each other."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    with a2a.GradientReducer(model, topology=topology(1, 1), bucket_mb=0.25) as reducer:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(512, 256)).square().mean().backward()
        told = reducer.stats()
    buckets = told["buckets"]
    assert len(buckets) > 6
    assert [bucket["ready_us"] for bucket in buckets] == sorted(bucket["ready_us"] for bucket in buckets)
    assert buckets[0]["ready_us"] < told["backward_us"]
    assert buckets[0]["hidden_us"] > 0
    assert all(bucket["legs"]["rail_reduce"] > 0 for bucket in buckets)
    assert told["hidden_us"] > 0
    assert told["exposed_us"] >= 0


@pytest.mark.ranks(2)
def test_buckets_travel_while_the_backward_pass_goes_on(world: World) -> None:
    world.run(overlaps)


def shares(names: bool) -> None:
    """A tied weight, a frozen one, an empty one, odd strides, and parameters given by name."""
    torch.manual_seed(0)
    model = nn.Module()
    model.a = nn.Linear(4, 4, bias=False)
    model.b = nn.Linear(4, 4)
    model.b.weight = model.a.weight
    model.c = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model.empty = nn.Parameter(torch.empty(0))
    left_out = nn.Parameter(torch.ones(2))
    model.left_out = left_out
    pairs = [(name, param) for name, param in model.named_parameters() if name != "left_out"]
    rank = dist.get_rank()
    with a2a.GradientReducer(pairs if names else model, topology=topology(1, 1)):
        for _ in range(2):
            model.zero_grad()
            x = torch.full((1, 4), float(rank + 1))
            image = torch.full((1, 3, 3, 3), float(rank + 1)).to(memory_format=torch.channels_last)
            loss = model.b(model.a(x)).sum() + model.c(image).sum() + (left_out * (rank + 1)).sum()
            loss.backward()
            same(model.c.weight.grad, torch.full((2, 3, 3, 3), 1.5))
            assert model.c.weight.grad.stride() == model.c.weight.stride()
            same(model.b.bias.grad, torch.ones(4))
            same(left_out.grad, torch.full((2,), rank + 1.0 if names else 1.5))
            assert model.frozen.grad is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("names", [False, True])
def test_parameters_of_every_kind(world: World, names: bool) -> None:
    world.run(shares, names=names)


def checkpointed() -> None:
    model = network()
    rank = dist.get_rank()
    with a2a.GradientReducer(model, topology=topology(1, 1), bucket_mb=0.002):
        for step in range(2):
            model.zero_grad()
            x, y = batch(rank, step)
            hidden = torch.utils.checkpoint.checkpoint(model[:3], x, use_reentrant=False)
            (model[3:](hidden) - y).square().mean().backward()
            close(model, [step])
        model.zero_grad()
        loss = loss_of(model, rank, 5)
        loss.backward(retain_graph=True)
        loss.backward()  # twice: once more on top
        close(model, [5, 5])


@pytest.mark.ranks(2)
def test_checkpointed_parts_and_a_second_backward_pass(world: World) -> None:
    world.run(checkpointed)


def goes_on_and_on(sizes: tuple[int, ...]) -> None:
    """Steps back to back with random pauses while gradients come: ranks are at different buckets all the time."""
    rank, rng = dist.get_rank(), random.Random(dist.get_rank())
    counts = [64 * n for n in range(1, 13)]
    model = Planted(counts, [F32] * len(counts))
    for weight in model.weights:
        weight.register_post_accumulate_grad_hook(lambda _: time.sleep(rng.choice([0, 0, 0, 0.001, 0.004])))
    references = [Reference(sizes, count, F32, None) for count in counts]
    with a2a.GradientReducer(model, topology=topology(*sizes), bucket_mb=0.001):
        for step in range(25):
            model.zero_grad(set_to_none=rng.random() < 0.5)
            given = [[values(r, count, F32, step) for count in counts] for r in range(sum(sizes))]
            model.loss(given[rank]).backward()
            for n, (weight, reference) in enumerate(zip(model.weights, references, strict=True)):
                same(weight.grad, reference.step([one[n] for one in given]))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 1, 1, 1)], ids=str)
def test_steps_back_to_back_with_pauses(world: World, sizes: tuple[int, ...]) -> None:
    world.run(goes_on_and_on, sizes=sizes)


def checkpointed_within_the_pass(bucket_mb: float) -> None:
    """A reentrant checkpoint runs a backward pass inside the backward pass."""
    model, rank = network(), dist.get_rank()
    with a2a.GradientReducer(model, topology=topology(1, 1), bucket_mb=bucket_mb):
        for step in range(3):
            model.zero_grad()
            x, y = batch(rank, step)
            hidden = torch.utils.checkpoint.checkpoint(model[:3], x.requires_grad_(), use_reentrant=True)
            (model[3:](hidden) - y).square().mean().backward()
            close(model, [step])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_mb", [0.001, 25])
def test_a_pass_inside_a_pass(world: World, bucket_mb: float) -> None:
    world.run(checkpointed_within_the_pass, bucket_mb=bucket_mb)


def takes_the_topology_of_the_environment() -> None:
    os.environ["A2A_TOPOLOGY"] = "cpu:2x2"
    try:
        model = network()
        with a2a.GradientReducer(model) as reducer:
            assert [domain.ranks for domain in reducer.topology.domains] == [(0, 1), (2, 3)]
            loss_of(model, dist.get_rank(), 0).backward()
            close(model, [0])
            assert reducer.stats()["bytes_sent"] > 0
    finally:
        del os.environ["A2A_TOPOLOGY"]


@pytest.mark.ranks(4)
def test_the_environment_names_a_topology(world: World) -> None:
    world.run(takes_the_topology_of_the_environment)


def several_at_once() -> None:
    """Two reducers on two groups, interleaved, and one that the collector takes."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    world, small = network(), Planted([64], [F32])
    with contextlib.ExitStack() as stack:
        stack.enter_context(a2a.GradientReducer(world, topology=topology(2, 1)))
        if rank < 2:
            stack.enter_context(a2a.GradientReducer(small, pair, topology(1, 1)))
        for step in range(3):
            world.zero_grad()
            small.zero_grad()
            loss_of(world, rank, step).backward()
            if rank < 2:
                small.loss([torch.full((64,), float(rank))]).backward()
                same(small.weights[0].grad, torch.full((64,), 0.5))
            close(world, [step])
    for _ in range(3):
        dropped = a2a.GradientReducer(small, topology=topology(2, 1))
        small.zero_grad()
        small.loss([torch.full((64,), float(rank))]).backward()
        same(small.weights[0].grad, torch.full((64,), 1.0))
        del dropped


@pytest.mark.ranks(3)
def test_reducers_of_several_groups(world: World) -> None:
    world.run(several_at_once)
