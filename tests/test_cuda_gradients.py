"""GradientReducer on GPUs: the bits of the CPU, on streams, behind the backward pass; DDP and FSDP2 on it.

Two ranks, a GPU each: one domain of both, or two of one, whose rail is NCCL's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import a2a
from a2a.integrations import ddp, fsdp2
from gradient_reference import Planted, Reference, topology, values
from pool import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(2),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs 2 CUDA GPUs; here are {torch.cuda.device_count()}"
    ),
]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES, COUNTS = (F32, BF16, F16, F64), (5, 1000, 4096, 700)
SIZES = [(2,), (1, 1)]
WIRES = [None, "bf16", "fp8"]


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def nccl_group() -> Any:
    torch.cuda.set_device(dist.get_rank())
    return dist.new_group(backend="nccl")


def has_the_bits(sizes: tuple[int, ...], wire: str | None) -> None:
    """Six steps of gradients that are alone in their buckets, with kernels queued on the current stream before and after."""
    group, rank = nccl_group(), dist.get_rank()
    references = [Reference(sizes, count, dtype, wire) for count, dtype in zip(COUNTS, DTYPES, strict=True)]
    model = Planted(COUNTS, DTYPES).cuda()
    with a2a.GradientReducer(model, group, topology(*sizes, kind="nvlink"), wire, 1e-6) as reducer:
        for step in range(6):
            model.zero_grad(set_to_none=step % 2 == 0)
            given = [[values(r, c, d, step) for c, d in zip(COUNTS, DTYPES, strict=True)] for r in range(2)]
            mine = [gradient.cuda() for gradient in given[rank]]
            torch.cuda._sleep(20_000_000)  # what the host has queued is far behind it
            model.loss(mine).backward()
            results = model.gradients()
            for n, (got, reference) in enumerate(zip(results, references, strict=True)):
                same(got, reference.step([one[n] for one in given]))
        told = reducer.stats()
        assert told["steps"] == 6
        assert len(told["buckets"]) == len(COUNTS)
        assert all(time > 0 for bucket in told["buckets"] for time in bucket["legs"].values())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_gradients_have_the_bits_of_the_cpu(world: World, sizes: tuple[int, ...], wire: str | None) -> None:
    world.run(has_the_bits, sizes=sizes, wire=wire)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).cuda()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()


def alone(step: int) -> list[Tensor]:
    model = network()
    for rank in range(2):
        (model(batch(step, rank)).square().mean() / 2).backward()
    return [p.grad for p in model.parameters()]


def trains(sizes: tuple[int, ...], how: str) -> None:
    group, rank = nccl_group(), dist.get_rank()
    model: Any = network()
    reducer: Any
    if how == "ddp":
        model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.03)
        reducer = ddp.register(model, topology(*sizes, kind="nvlink"))
    elif how == "fsdp2":
        reducer = fsdp2.Hybrid(group, topology(*sizes, kind="nvlink"), device="cuda")
        for layer in model:
            reducer.fully_shard(layer)
        reducer.fully_shard(model)
    else:
        reducer = a2a.GradientReducer(model, group, topology(*sizes, kind="nvlink"), bucket_mb=0.03)
    for step in range(4):
        model.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        for param, expected in zip(model.parameters(), alone(step), strict=True):
            got = param.grad.full_tensor() if how == "fsdp2" else param.grad
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    torch.cuda.synchronize()
    reducer.close()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("how", ["reducer", "ddp", "fsdp2"])
def test_gradients_are_the_mean(world: World, sizes: tuple[int, ...], how: str) -> None:
    world.run(trains, sizes=sizes, how=how)


def scatters(sizes: tuple[int, ...]) -> None:
    group, rank, ends = nccl_group(), dist.get_rank(), []
    for scatter in (False, True):
        model = network()
        with a2a.GradientReducer(
            model, group, topology(*sizes, kind="nvlink"), bucket_mb=0.03, scatter=scatter
        ) as reducer:
            optimizer = torch.optim.AdamW(reducer.shards if scatter else model.parameters(), lr=1e-2)
            for step in range(4):
                optimizer.zero_grad()
                model(batch(step, rank)).square().mean().backward()
                optimizer.step()
                if scatter:
                    reducer.gather_parameters()
                model.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_distributed_optimizer_ends_with_the_same_parameters(world: World, sizes: tuple[int, ...]) -> None:
    world.run(scatters, sizes=sizes)


def overlaps() -> None:
    """Legs run on streams of their own while the backward pass goes on."""
    group = nccl_group()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(12))).cuda()
    with a2a.GradientReducer(model, group, topology(1, 1, kind="nvlink"), bucket_mb=64) as reducer:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8192, 4096, device="cuda")).square().mean().backward()
        told = reducer.stats()
    first = told["buckets"][0]
    assert first["ready_us"] + sum(first["legs"].values()) < told["backward_us"]
    assert told["hidden_us"] > 0


def test_buckets_travel_while_the_backward_pass_goes_on(world: World) -> None:
    world.run(overlaps)
