"""What GradientReducer's wire formats make of gradients: the documented bits, error feedback, training that ends as well."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import a2a
import moe_reference
from a2a.gradients.wire import CpuFp8Wire, Fp8Wire
from gradient_reference import HIERARCHIES, Planted, Reference, topology, values
from pool import World

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64)
COUNTS = (5, 1000, 4096, 700)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def follows_the_reference(sizes: tuple[int, ...], wire: str | None) -> None:
    """Six steps of gradients that are alone in their buckets; what is owed from one shows in the next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    references = [Reference(sizes, count, dtype, wire) for count, dtype in zip(COUNTS, DTYPES, strict=True)]
    model = Planted(COUNTS, DTYPES)
    with a2a.GradientReducer(model, topology=topology(*sizes), wire=wire, bucket_mb=1e-6):
        for step in range(6):
            model.zero_grad(set_to_none=step % 2 == 0)
            given = [
                [values(r, count, dtype, step) for count, dtype in zip(COUNTS, DTYPES, strict=True)]
                for r in range(size)
            ]
            model.loss(given[rank]).backward()
            for n, (got, reference) in enumerate(zip(model.gradients(), references, strict=True)):
                same(got, reference.step([one[n] for one in given]))


def follows_it_in_every_hierarchy() -> None:
    for sizes in HIERARCHIES[dist.get_world_size()]:
        for wire in ("bf16", "fp8"):
            follows_the_reference(sizes, wire)


@pytest.mark.ranks(2, 4, 5)
def test_the_documented_bits_with_error_feedback(world: World) -> None:
    world.run(follows_it_in_every_hierarchy)


@pytest.mark.parametrize("wire", [CpuFp8Wire(), Fp8Wire()], ids=lambda wire: type(wire).__name__)
def test_fp8_is_the_format_of_expert_parallel(wire: Fp8Wire) -> None:
    """By the CPU's kernels, and by torch's functions, which serve GPUs."""
    x = torch.cat([values(1, 1024, F32), torch.zeros(128), torch.full((128,), 1e-44), torch.full((128,), 3e38)])
    payload = wire.empty(x.numel(), x.device)
    wire.encode(payload, x)
    q, scales = moe_reference.quantise(x[None], "fp8")
    same(payload[: x.numel()], q[0].view(torch.uint8))
    same(payload[x.numel() :].view(F32), scales[0])
    same(wire.decode(payload, x.numel()), moe_reference.dequantise(q, scales, "fp8", F32)[0])


def sends_fewer_bytes() -> list[int]:
    sent = []
    for wire in (None, "bf16", "fp8"):
        model = Planted([1 << 16], [F32])
        with a2a.GradientReducer(model, topology=topology(1, 1), wire=wire) as reducer:
            model.loss([torch.ones(1 << 16)]).backward()  # the order of buckets crosses too
            before = reducer.stats()["bytes_sent"]
            model.loss([torch.ones(1 << 16)]).backward()
            sent.append(reducer.stats()["bytes_sent"] - before)
    return sent


@pytest.mark.ranks(2)
def test_a_format_sends_fewer_bytes(world: World) -> None:
    for sent in world.run(sends_fewer_bytes):
        assert sent == [4 << 16, 2 << 16, (1 << 16) + (1 << 16) // 128 * 4]


def forgets_what_is_not_finite(wire: str) -> None:
    """Infinities and NaN reach everybody in their step, so that it is skipped, and no later one."""
    model = Planted([2048], [F32])
    with a2a.GradientReducer(model, topology=topology(1, 1), wire=wire):
        for step, odd in enumerate((1.0, math.inf, 1.0, math.nan, 1.0)):
            model.zero_grad()
            gradient = torch.ones(2048)
            if dist.get_rank() == 0:
                gradient[1], gradient[1500] = odd, odd
            model.loss([gradient]).backward()
            grad = model.weights[0].grad
            assert bool(torch.isfinite(grad).all()) == (step % 2 == 0)
            if step % 2 == 0:
                same(grad, torch.ones(2048))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_what_is_not_finite_is_seen_once(world: World, wire: str) -> None:
    world.run(forgets_what_is_not_finite, wire=wire)


def what_is_lost_comes_later(wire: str) -> None:
    """A gradient so small beside its neighbours that the format drops it arrives in time, on average."""
    steps, small = 64, 1e-4
    model, total = Planted([1024], [F32]), torch.zeros(1024)
    gradient = torch.full((1024,), small)
    gradient[::128] = 1.0
    with a2a.GradientReducer(model, topology=topology(1, 1), wire=wire):
        for _ in range(steps):
            model.zero_grad()
            model.loss([gradient]).backward()
            total += model.weights[0].grad
    torch.testing.assert_close(total / steps, gradient, rtol=0, atol=2 * (1.0 / 448 if wire == "fp8" else 1e-6) / steps)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_what_a_payload_loses_a_later_one_brings(world: World, wire: str) -> None:
    world.run(what_is_lost_comes_later, wire=wire)


def goes_on_from_a_checkpoint(wire: str | None, scatter: bool) -> None:
    """Four steps, against two and two more by a reducer that was given the first one's state."""
    counts, sizes, rank = [3000, 70, 512], (1, 1), dist.get_rank()
    options = {"topology": topology(*sizes), "wire": wire, "bucket_mb": 0.004, "scatter": scatter}

    def step(model: Planted, reducer: a2a.GradientReducer, number: int) -> list[Tensor]:
        parts = reducer.shards if scatter else list(model.weights)
        for part in parts:
            part.grad = None
        model.loss([values(rank, count, F32, number) for count in counts]).backward()
        return [part.grad.clone() for part in parts if part.grad is not None]

    whole, halves = Planted(counts, [F32] * 3), [Planted(counts, [F32] * 3) for _ in range(2)]
    with a2a.GradientReducer(whole, **options) as reducer:
        assert reducer.state_dict()["order"] == [] or scatter
        expected = [step(whole, reducer, number) for number in range(4)]
    with a2a.GradientReducer(halves[0], **options) as reducer:
        for number in range(2):
            step(halves[0], reducer, number)
        state = reducer.state_dict()
    with a2a.GradientReducer(halves[1], **options) as reducer:
        reducer.load_state_dict(state)
        for number in range(2, 4):
            for got, wanted in zip(step(halves[1], reducer, number), expected[number], strict=True):
                same(got, wanted)
    for model, other, says in (
        (Planted(counts[:2], [F32] * 2), {}, "another model"),
        (halves[1], {"bucket_mb": 0.0001}, "other buckets"),
    ):
        with a2a.GradientReducer(model, **(options | other)) as reducer, pytest.raises(ValueError, match=says):
            reducer.load_state_dict(state)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("wire", "scatter"), [("fp8", False), ("bf16", True), (None, False)])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(world: World, wire: str | None, scatter: bool) -> None:
    world.run(goes_on_from_a_checkpoint, wire=wire, scatter=scatter)


def trains() -> dict[str, float]:
    """The loss after 200 steps of a small classifier with each format."""
    losses = {}
    for wire in (None, "bf16", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        held_out = torch.randn(2048, 20, generator=torch.Generator().manual_seed(9))
        with a2a.GradientReducer(model, topology=topology(2, 2), wire=wire):
            for step in range(200):
                x = torch.randn(32, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), teacher(x).detach().mul(4).softmax(-1)).backward()
                optimizer.step()
        with torch.no_grad():
            target = teacher(held_out).mul(4).softmax(-1)
            losses[str(wire)] = nn.functional.cross_entropy(model(held_out), target).item()
    return losses


@pytest.mark.ranks(4)
def test_training_ends_within_one_per_cent_of_float32(world: World) -> None:
    for losses in world.run(trains):
        for wire in ("bf16", "fp8"):
            assert abs(losses[wire] - losses["None"]) < 0.01 * losses["None"], losses


def unknown() -> None:
    with pytest.raises(ValueError, match=r"wire='fp4'; expected one of None, 'bf16', 'fp8'"):
        a2a.GradientReducer(nn.Linear(2, 2), wire="fp4")


@pytest.mark.ranks(2)
def test_an_unknown_format_is_named(world: World) -> None:
    world.run(unknown)
