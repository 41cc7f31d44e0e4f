"""Ulysses: attention over ranks that each hold a part of the sequence is attention on one process."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import a2a
from a2a.integrations.context_parallel import heads_to_sequence, sequence_to_heads

BATCH, LENGTH, HEADS, WIDTH = 2, 12, 4, 8
COMPILE_S = 120.0


def whole(seed: int, heads: int = HEADS, length: int = LENGTH) -> Tensor:
    """The tensor of all ranks: [batch, sequence, heads, width]."""
    return torch.randn(BATCH, length, heads, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mine(x: Tensor, lengths: list[int] | None = None, dim: int = 1) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return x.split(lengths, dim)[rank] if lengths else x.chunk(size, dim)[rank]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, of [batch, sequence, heads, width]."""
    return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


def parallel_attention(q: Tensor, k: Tensor, v: Tensor, group: Any = None, lengths: list[int] | None = None) -> Tensor:
    q, k, v = (sequence_to_heads(t, group, lengths=lengths) for t in (q, k, v))
    return heads_to_sequence(attention(q, k, v), group, lengths=lengths)


def equals_one_process(function: Any, lengths: list[int] | None = None, **options: Any) -> None:
    length = sum(lengths) if lengths else LENGTH
    everything = [whole(seed, length=length).requires_grad_() for seed in range(3)]
    grad = whole(3, length=length)
    expected = attention(*everything)
    expected.backward(grad)
    parts = [mine(t.detach(), lengths).requires_grad_() for t in everything]
    y = function(*parts, lengths=lengths, **options) if lengths else function(*parts, **options)
    y.backward(mine(grad, lengths))
    torch.testing.assert_close(y, mine(expected, lengths), rtol=1e-12, atol=1e-12)
    for part, reference in zip(parts, everything, strict=True):
        torch.testing.assert_close(part.grad, mine(reference.grad, lengths), rtol=1e-12, atol=1e-12)


def attention_on_a_group() -> int:
    equals_one_process(parallel_attention)
    with a2a.communicator() as comm:
        equals_one_process(parallel_attention, group=comm)
        return int(comm.stats()["collectives"])


@pytest.mark.ranks(1, 2, 4)
def test_attention_and_its_gradients_are_those_of_one_process(world: Any) -> None:
    """q, k, v and the result, forward and backward, are a2a's to move."""
    assert world.run(attention_on_a_group) == [8] * world.size


def attention_of_unequal_parts(lengths: list[int]) -> None:
    equals_one_process(parallel_attention, lengths=lengths)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("lengths", [[3, 1, 6, 2], [0, 5, 0, 7]], ids=str)
def test_parts_of_the_sequence_may_differ_down_to_nothing(world: Any, lengths: list[int]) -> None:
    world.run(attention_of_unequal_parts, lengths=lengths)


def every_layout() -> None:
    """Small integers: every element is where it should be, whatever the order of dimensions and the strides."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(BATCH * LENGTH * HEADS * 3.0).view(BATCH, LENGTH, HEADS, 3)
    every_other = numbers.repeat_interleave(2, 3)[..., ::2]  # the same numbers, elsewhere in memory
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 3, 2), (3, 2, 0, 1), (2, 3, 1, 0)):
        dims = {"sequence_dim": order.index(1), "head_dim": order.index(2) - 4}  # counted from the end, too
        for x in (
            mine(numbers).permute(order),
            mine(numbers).permute(order).contiguous(),
            mine(every_other).permute(order),
        ):
            heads = sequence_to_heads(x, **dims)
            assert torch.equal(heads, mine(numbers.permute(order), dim=order.index(2))), (rank, order)
            assert torch.equal(heads_to_sequence(heads, **dims), x), (rank, order)
    tokens_HSD = mine(numbers)[0].transpose(0, 1).bfloat16()  # no batch, heads first
    assert torch.equal(
        sequence_to_heads(tokens_HSD, sequence_dim=1, head_dim=0),
        numbers[0].transpose(0, 1).bfloat16().chunk(size)[rank],
    )


@pytest.mark.ranks(4)
def test_any_order_of_dimensions_and_any_strides(world: Any) -> None:
    world.run(every_layout)


def second_derivative() -> None:
    x = mine(whole(0)).requires_grad_()
    (grad,) = torch.autograd.grad((sequence_to_heads(x) ** 3).sum(), x, create_graph=True)
    grad.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_the_second_derivative(world: Any) -> None:
    world.run(second_derivative)


def compiled(backend: str, lengths: list[int] | None) -> None:
    torch._dynamo.reset()
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
        equals_one_process(torch.compile(parallel_attention, backend=backend, fullgraph=True), lengths=lengths)
    torch._dynamo.reset()


@pytest.mark.parametrize("lengths", [None, [7, 5]], ids=["even", "uneven"])
def test_compiled_with_fullgraph(world: Any, lengths: list[int] | None) -> None:
    backend = "aot_eager" if lengths or shutil.which("g++") is None else "inductor"
    world.run(compiled, backend=backend, lengths=lengths, deadline_s=COMPILE_S)


def impossible_arguments() -> None:
    x = torch.zeros(1, 4, 3, 2)
    with pytest.raises(ValueError, match=r"3 heads, which 2 ranks can't share evenly.*repeat_interleave"):
        sequence_to_heads(x)
    with pytest.raises(ValueError, match="same dimension"):
        sequence_to_heads(x, head_dim=-3)
    with pytest.raises(ValueError, match="head_dim=4, but x has 4 dimensions"):
        sequence_to_heads(x, head_dim=4)
    with pytest.raises(ValueError, match="3 positions, which 2 ranks can't share evenly; pass lengths"):
        heads_to_sequence(x, sequence_dim=2, head_dim=1)
    with pytest.raises(ValueError, match="add up to 5; x has 4"):
        heads_to_sequence(x, lengths=[2, 3])
    with pytest.raises(ValueError, match="has 3 entries; the group has 2 ranks"):
        sequence_to_heads(x, head_dim=3, lengths=[4, 4, 4])
    with pytest.raises(ValueError, match=f"4 positions on rank {dist.get_rank()}, where lengths says 5"):
        sequence_to_heads(x, head_dim=3, lengths=[5, 5])


def test_impossible_arguments_are_refused_before_anything_moves(world: Any) -> None:
    world.run(impossible_arguments)


def shared_keys() -> None:
    """Two key heads for four query heads, on four ranks: repeated, as the error advises, and the gradient sums up."""
    size, repeats = dist.get_world_size(), HEADS // 2
    q, k = whole(0), whole(1, heads=2)
    k_here = mine(k).requires_grad_()
    scores = sequence_to_heads(mine(q)) * sequence_to_heads(k_here.repeat_interleave(repeats, 2))
    scores.sum().backward()
    expected = q.unflatten(2, (2, repeats)).sum(3)
    torch.testing.assert_close(k_here.grad, mine(expected), rtol=1e-12, atol=1e-12)
    assert scores.shape == (BATCH, LENGTH, HEADS // size, WIDTH)


@pytest.mark.ranks(4)
def test_shared_key_heads_are_repeated(world: Any) -> None:
    world.run(shared_keys)
