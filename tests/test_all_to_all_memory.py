"""Exchanges between all kinds of memory: symmetric, ordinary, strided, unaligned, of other libraries, or the input's own."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import a2a
from exchange_cases import (
    MEMORIES,
    Exchange,
    allocate,
    assert_same_bits,
    even_splits,
    fill_freed_memory,
    random_splits,
)
from pool import World

GIB = 1024**3


class OnlyDLPack:
    """An array of some other library: it speaks DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def every_memory(dtype: torch.dtype, row_shape: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with a2a.communicator() as comm:
        for round_ in range(6):
            exchange = Exchange(random_splits(world_size, rng.randrange(1000)), row_shape, dtype, salt=round_)
            kinds = [(rng.choice(MEMORIES), rng.choice(MEMORIES)) for _ in range(world_size)]
            in_memory, out_memory = kinds[rank]
            input = allocate(in_memory, sum(exchange.sent(rank)), exchange, comm)
            input.copy_(exchange.input(rank))
            output = allocate(out_memory, sum(exchange.received(rank)), exchange, comm)
            a2a.all_to_all_single(output, input, exchange.received(rank), exchange.sent(rank), comm)
            assert_same_bits(output, exchange.expected(rank))
            assert_same_bits(input, exchange.input(rank))


def one_pair_of_memories(in_memory: str, out_memory: str, rows: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(even_splits(world_size, rows), (33,), torch.int16)
    with a2a.communicator() as comm:
        input = allocate(in_memory, rows * world_size, exchange, comm).copy_(exchange.input(rank))
        output = allocate(out_memory, rows * world_size, exchange, comm)
        a2a.all_to_all_single(output, input, group=comm)
        assert_same_bits(output, exchange.expected(rank))


def nothing_beside_the_output_is_touched(symmetric: bool) -> None:
    rank = dist.get_rank()
    exchange = Exchange(((1, 4), (3, 0)), (5,), torch.uint8)
    with a2a.communicator() as comm:
        around = comm.empty((64, 5), torch.uint8) if symmetric else torch.empty((64, 5), dtype=torch.uint8)
        around.fill_(252)
        rows = sum(exchange.received(rank))
        output = around[7 : 7 + rows]
        dist.barrier()
        a2a.all_to_all_single(output, exchange.input(rank), exchange.received(rank), exchange.sent(rank), comm)
        dist.barrier()
        assert_same_bits(output, exchange.expected(rank))
        assert around[:7].eq(252).all()
        assert around[7 + rows :].eq(252).all()


def past_two_gib(symmetric: bool) -> None:
    """Rank 0 sends rank 1 a little more than 2^31 bytes: zeros, and marks at the places that could go wrong."""
    rank = dist.get_rank()
    large = 2**31 + 4097
    marks = [0, 2**30, 2**31 - 1, 2**31, 2**31 + 1, large - 1]
    with a2a.communicator() as comm:
        if symmetric:
            memory = comm.empty((large,), torch.uint8)
        else:
            memory = torch.zeros(large, dtype=torch.uint8)
        small = torch.full((16,), 5, dtype=torch.uint8)
        if rank == 0:
            memory.zero_() if symmetric else None
            for value, mark in enumerate(marks, start=1):
                memory[mark] = value
            output = torch.empty_like(small)
            a2a.all_to_all_single(output, memory, [0, 16], [0, large], comm)
            assert output.eq(5).all()
        else:
            memory[-1] = 77
            a2a.all_to_all_single(memory, small, [large, 0], [16, 0], comm)
            assert [int(memory[mark]) for mark in marks] == list(range(1, len(marks) + 1))
            assert sum(int(part.count_nonzero()) for part in memory.split(2**28)) == len(marks)


def arrays_of(library: str) -> None:
    rank = dist.get_rank()
    exchange = Exchange(((1, 2), (0, 3)), (4,), torch.float64)
    input, output = exchange.input(rank), torch.full_like(exchange.expected(rank), -1.0)
    if library == "numpy":
        theirs: Any = output.numpy()
        a2a.all_to_all_single(theirs, input.numpy(), exchange.received(rank), exchange.sent(rank))
    elif library == "strided numpy":
        theirs = np.full((len(output), 4, 2), -1.0)
        read_only = np.asfortranarray(input.numpy())
        read_only.flags.writeable = False
        torch.set_warn_always(True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an input is only read: nothing to warn of
            a2a.all_to_all_single(theirs[..., 1], read_only, exchange.received(rank), exchange.sent(rank))
        torch.set_warn_always(False)
        assert (theirs[..., 0] == -1.0).all()
        output = torch.from_numpy(theirs[..., 1].copy())
    elif library == "dlpack":
        a2a.all_to_all_single(OnlyDLPack(output), OnlyDLPack(input), exchange.received(rank), exchange.sent(rank))
    elif library == "asynchronous":
        sent, received = exchange.sent(rank), exchange.received(rank)
        work = a2a.all_to_all_single(OnlyDLPack(output), OnlyDLPack(input.clone()), received, sent, async_op=True)
        fill_freed_memory(input.numel() * 8)  # the arrays are gone; what they share with torch must not be
        work.wait()
    elif library == "lists":
        outputs = [np.full((rows, 4), -1.0) for rows in exchange.received(rank)]
        a2a.all_to_all(outputs, [OnlyDLPack(exchange.block(rank, target)) for target in range(2)])
        output = torch.from_numpy(np.concatenate(outputs))
    assert_same_bits(output, exchange.expected(rank))


def in_place(offset: int) -> None:
    """Output and input share memory; `offset` elements apart."""
    rank = dist.get_rank()
    exchange = Exchange(even_splits(2, 1000), (), torch.int32)
    with a2a.communicator() as comm:
        for memory in (torch.empty(4000, dtype=torch.int32), comm.empty((4000,), torch.int32)):
            input, output = memory[:2000], memory[offset : 2000 + offset]
            input.copy_(exchange.input(rank))
            dist.barrier()
            a2a.all_to_all_single(output, input, group=comm)
            assert_same_bits(output, exchange.expected(rank))
            dist.barrier()


def conjugated() -> None:
    rank = dist.get_rank()
    input = torch.complex(torch.arange(4.0), torch.arange(4.0) + 10 * rank).conj()
    assert input.is_conj()
    output = torch.empty(4, dtype=torch.complex64)
    a2a.all_to_all_single(output, input)
    own = torch.arange(4.0)[rank * 2 : rank * 2 + 2]
    assert torch.equal(output, torch.cat([torch.complex(own, -own - 10 * source) for source in range(2)]))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128], ids=str)
def test_ranks_mix_symmetric_ordinary_and_strided_memory_freely(world: World, dtype: torch.dtype) -> None:
    world.run(every_memory, dtype=dtype, row_shape=(7,), seed=1)
    world.run(every_memory, dtype=dtype, row_shape=(400, 9), seed=2)


@pytest.mark.parametrize("in_memory", MEMORIES)
@pytest.mark.parametrize("out_memory", MEMORIES)
def test_every_pair_of_memories(world: World, in_memory: str, out_memory: str) -> None:
    world.run(one_pair_of_memories, in_memory=in_memory, out_memory=out_memory, rows=11)


@pytest.mark.parametrize("symmetric", [True, False])
def test_nothing_beside_the_output_is_touched(world: World, symmetric: bool) -> None:
    world.run(nothing_beside_the_output_is_touched, symmetric=symmetric)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_more_than_two_gib_to_one_rank(world: World, symmetric: bool) -> None:
    world.run(past_two_gib, symmetric=symmetric)


@pytest.mark.parametrize("library", ["numpy", "strided numpy", "dlpack", "asynchronous", "lists"])
def test_arrays_of_other_libraries_are_read_and_written_in_place(world: World, library: str) -> None:
    world.run(arrays_of, library=library)


@pytest.mark.parametrize("offset", [0, 1, 1000, 1999, 2000])
def test_output_and_input_may_share_memory(world: World, offset: int) -> None:
    world.run(in_place, offset=offset)


def test_lazily_conjugated_input_arrives_conjugated(world: World) -> None:
    world.run(conjugated)
