"""comm.empty: what all ranks ask for alike they get, what differs is told, what all let go of is used again."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from deadlines import soon
from exchange_cases import Exchange, assert_same_bits, even_splits, exchange_once, shared_mappings
from pool import World


def tensors_outlive() -> None:
    before = shared_mappings()
    rank = dist.get_rank()
    comm = a2a.communicator()
    tensor = comm.empty((3, 1000), torch.float64).fill_(rank)
    view = tensor[1]
    peer = comm.empty((7,), torch.int8).fill_(5)
    ok = comm.ok
    comm.close()
    assert shared_mappings() > before
    del comm, tensor
    gc.collect()
    dist.barrier()
    view += 1
    assert view.eq(rank + 1).all()
    assert peer.eq(5).all()
    assert int(ok) in (0, 1)
    with a2a.communicator() as comm:  # plain memory by now, for any communicator to exchange
        out = torch.empty(1000, dtype=torch.float64)
        a2a.all_to_all_single(out, view, group=comm)
        assert out[:500].eq(1).all()
        assert out[500:].eq(2).all()
    dist.barrier()
    del view, peer, ok, out, comm
    assert shared_mappings() == before


def empty_agrees(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with a2a.communicator() as comm:
        for tensor in (comm.empty(shape, dtype), comm.empty(*shape, dtype=dtype), comm.empty(list(shape), dtype=dtype)):
            assert tuple(tensor.shape) == shape
            assert tensor.dtype is dtype
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            tensor.zero_()


# What rank 1 asks for while the others ask for (8, 2) of float32; and what the error must quote.
OTHER_EMPTY: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "another shape": (lambda comm: comm.empty((8, 3), torch.float32), ["[8, 2]", "[8, 3]"]),
    "another shape of equal size": (lambda comm: comm.empty((2, 8), torch.float32), ["[8, 2]", "[2, 8]"]),
    "another dtype": (lambda comm: comm.empty((8, 2), torch.int32), ["float32", "int32"]),
    "an exchange": (lambda comm: exchange_once(comm), ["comm.empty", "all_to_all_single"]),
}


def empty_disagrees(name: str) -> None:
    call, quoted = OTHER_EMPTY[name]
    comm = a2a.communicator(timeout=20)
    with soon(2.0), pytest.raises(a2a.MismatchError) as caught:
        call(comm) if dist.get_rank() == 1 else comm.empty((8, 2), torch.float32)
    for text in quoted:
        assert text in str(caught.value)
    assert "rank 1" in str(caught.value)
    comm.close()
    with a2a.communicator() as comm:
        exchange_once(comm)


EMPTY_MISTAKES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "a negative size": (lambda comm: comm.empty((8, -2), torch.float32), ValueError),
    "a fractional size": (lambda comm: comm.empty((8, 2.5), torch.float32), (TypeError, ValueError)),
    "a dtype that is none": (lambda comm: comm.empty((8, 2), dtype="float32"), (TypeError, ValueError)),
    "more memory than there is": (lambda comm: comm.empty((1 << 60,), torch.float32), a2a.A2AError),
}


def empty_mistaken(name: str, by_all: bool) -> str:
    """A rank whose own call makes no sense says so, and its peers in `empty` hear of it."""
    call, error = EMPTY_MISTAKES[name]
    text = ""
    with a2a.communicator(timeout=20) as comm:
        if by_all or dist.get_rank() == 1:
            with soon(2.0), pytest.raises(error) as caught:
                call(comm)
            text = str(caught.value)
        else:
            with soon(2.0), pytest.raises(a2a.A2AError, match="rank 1"):
                comm.empty((8, 2), torch.float32)
        if by_all:
            exchange_once(comm)
            comm.empty((8, 2), torch.float32)
        dist.barrier()
    return text


def reused(rounds: int) -> tuple[int, int]:
    """Ranks let go of tensors at different times: memory is used again, but never while any rank still needs it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shapes, drops = random.Random(1), random.Random(rank)
    exchange = Exchange(even_splits(world_size, 50), (64,), torch.int32)
    most = 0
    with a2a.communicator() as comm:
        held: list[tuple[torch.Tensor, int]] = []
        for round_ in range(rounds):
            tensor = comm.empty((world_size * 50 * shapes.randint(1, 60), 64), torch.int32).fill_(round_)
            held.append((tensor, round_))
            dist.barrier()
            output, input = held[0][0][: world_size * 50], tensor[: world_size * 50]
            if min(gathered(len(held))) > 1:  # else the two are one on some rank
                input.copy_(exchange.input(rank))
                a2a.all_to_all_single(output, input, group=comm)
                assert_same_bits(output, exchange.expected(rank))
                output.fill_(held[0][1])
                input.fill_(round_)
            for tensor, value in held:
                assert tensor.eq(value).all(), "another tensor was put over it"
            while len(held) > 3 or (held and drops.random() < 0.4):
                held.pop(drops.randrange(len(held)))
            del tensor, output, input
            if round_ == rounds // 4:
                most = shared_mappings()
        return most, shared_mappings()


def gathered(number: int) -> list[int]:
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor([number]))
    return [int(one) for one in everyone]


def test_symmetric_tensors_outlive_their_communicator_and_free_its_memory(world: World) -> None:
    world.run(tensors_outlive)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_symmetric_tensors_have_the_shape_and_dtype_asked_for(
    world: World, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    world.run(empty_agrees, shape=shape, dtype=dtype)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", OTHER_EMPTY)
def test_ranks_that_ask_for_different_memory_are_told_so(world: World, name: str) -> None:
    world.run(empty_disagrees, name=name)


@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by one"])
@pytest.mark.parametrize("name", EMPTY_MISTAKES)
def test_a_senseless_request_for_memory_is_refused_and_peers_are_told(world: World, name: str, by_all: bool) -> None:
    for text in filter(None, world.run(empty_mistaken, name=name, by_all=by_all)):
        assert "comm.empty" in text or "symmetric memory" in text


@pytest.mark.ranks(2, 4)
def test_memory_that_all_ranks_let_go_of_is_used_again(world: World) -> None:
    for most, last in world.run(reused, rounds=60):
        assert last <= most + 1
