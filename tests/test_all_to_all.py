"""all_to_all_single and all_to_all give every rank exactly the bytes that were sent to it."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import a2a
from exchange_cases import (
    DTYPES,
    Exchange,
    allocate,
    assert_same_bits,
    even_splits,
    pattern,
    random_splits,
)
from pool import World

KIB = 1024


def run_single(exchange: Exchange, group: Any = None) -> None:
    rank = dist.get_rank()
    output = torch.empty((sum(exchange.received(rank)), *exchange.row_shape), dtype=exchange.dtype)
    a2a.all_to_all_single(output, exchange.input(rank), exchange.received(rank), exchange.sent(rank), group)
    assert_same_bits(output, exchange.expected(rank))


def even(row_shape: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    exchange = Exchange(even_splits(dist.get_world_size(), rows), row_shape, dtype)
    output = torch.empty_like(exchange.input(dist.get_rank()))
    assert a2a.all_to_all_single(output, exchange.input(dist.get_rank())) is None
    assert_same_bits(output, exchange.expected(dist.get_rank()))


def uneven(seeds: list[int], row_shape: tuple[int, ...], nothing: float = 0.3) -> None:
    for seed in seeds:
        splits = random_splits(dist.get_world_size(), seed, nothing=nothing)
        run_single(Exchange(splits, row_shape, salt=seed))


def given_splits(splits: tuple[tuple[int, ...], ...], row_shape: tuple[int, ...] = (2,)) -> None:
    run_single(Exchange(splits, row_shape))


def lists(exchange: Exchange) -> None:
    rank, world = dist.get_rank(), range(dist.get_world_size())
    outputs = [torch.empty((rows, *exchange.row_shape), dtype=exchange.dtype) for rows in exchange.received(rank)]
    assert a2a.all_to_all(outputs, [exchange.block(rank, target) for target in world]) is None
    for source in world:
        assert_same_bits(outputs[source], exchange.block(source, rank))


def lists_of_any_shape() -> None:
    rank = dist.get_rank()
    scalars = [torch.empty(()) for _ in range(2)]
    a2a.all_to_all(scalars, [torch.tensor(10.0 * rank + target) for target in range(2)])
    assert [scalar.item() for scalar in scalars] == [rank, 10.0 + rank]
    shapes = [(2, 3), (5,)]  # of what rank 0 and rank 1 send, whoever receives it
    outputs = [torch.empty(shape).t() if len(shape) > 1 else torch.empty((5, 2))[:, 1] for shape in shapes]
    a2a.all_to_all(outputs, [torch.full(shapes[rank], 10.0 * rank + target).t() for target in range(2)])
    assert [output.unique().tolist() for output in outputs] == [[rank], [10.0 + rank]]


def splits_of_type(make: str) -> None:
    convert: Any = {
        "list": list,
        "tuple": tuple,
        "torch.Size": torch.Size,
        "numpy int64": np.array,
        "numpy int32": lambda splits: np.array(splits, dtype=np.int32),
        "tensor": torch.tensor,
        "int32 tensor": lambda splits: torch.tensor(splits, dtype=torch.int32),
        "numpy scalars": lambda splits: [np.int64(rows) for rows in splits],
        "scalar tensors": lambda splits: list(torch.tensor(splits)),
    }[make]
    rank = dist.get_rank()
    exchange = Exchange(((0, 2), (3, 1)))
    output = torch.empty_like(exchange.expected(rank))
    a2a.all_to_all_single(output, exchange.input(rank), convert(exchange.received(rank)), convert(exchange.sent(rank)))
    assert_same_bits(output, exchange.expected(rank))


def splits_on_one_side(side: str) -> None:
    rank = dist.get_rank()
    exchange = Exchange(even_splits(2, 3))
    for other in (None, [], ()):
        output = torch.empty_like(exchange.expected(rank))
        ins, outs = ([3, 3], other) if side == "input" else (other, [3, 3])
        a2a.all_to_all_single(output, exchange.input(rank), outs, ins)
        assert_same_bits(output, exchange.expected(rank))
    # rank 0 gives one side alone and rank 1 the other
    output = torch.empty_like(exchange.expected(rank))
    ins, outs = ([3, 3], None) if (side == "input") == (rank == 0) else (None, [3, 3])
    a2a.all_to_all_single(output, exchange.input(rank), outs, ins)
    assert_same_bits(output, exchange.expected(rank))


def sizes_around(sizes: list[int], memory: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with a2a.communicator() as comm:
        most = Exchange(even_splits(world_size, max(sizes)), (), torch.uint8)
        whole_input = allocate(memory, max(sizes) * world_size, most, comm)
        whole_output = allocate(memory, max(sizes) * world_size, most, comm)
        for salt, size in enumerate(sizes):
            input = whole_input[: size * world_size]
            output = whole_output[: size * world_size].fill_(252)
            for target in range(world_size):
                input[target * size : (target + 1) * size] = pattern(rank, target, size, salt)
            dist.barrier()  # the output is filled on every rank before anyone may store into it
            a2a.all_to_all_single(output, input, group=comm)
            for source in range(world_size):
                got = output[source * size : (source + 1) * size]
                assert_same_bits(got, pattern(source, rank, size, salt))


def again(calls: int, jitter_ms: float, symmetric: bool) -> None:
    """New data and new splits in every call, in the same memory; with random sleeps, differently on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(rank)
    with a2a.communicator() as comm:
        rows = 9 * world_size
        make: Any = comm.empty if symmetric else lambda shape, dtype: torch.empty(shape, dtype=dtype)
        whole_input, whole_output = make((rows, 70), torch.int32), make((rows, 70), torch.int32)
        for call in range(calls):
            splits = random_splits(world_size, call)
            sent, received = list(splits[rank]), [row[rank] for row in splits]
            values = [torch.full((n, 70), call * 100 + rank * 10 + to) for to, n in enumerate(sent)]
            expected = torch.cat([torch.full((n, 70), call * 100 + of * 10 + rank) for of, n in enumerate(received)])
            input, output = whole_input[: sum(sent)], whole_output[: sum(received)]
            input.copy_(torch.cat(values))
            if jitter_ms and rng.random() < 0.5:
                time.sleep(rng.random() * jitter_ms / 1000)
            a2a.all_to_all_single(output, input, received, sent, comm)
            input.fill_(-1)  # what was sent is sent: the input is the caller's again
            if jitter_ms and rng.random() < 0.5:
                time.sleep(rng.random() * jitter_ms / 1000)
            assert torch.equal(output, expected.to(torch.int32)), f"call {call}"


def like_gloo(dtype: torch.dtype) -> None:
    torch.manual_seed(dist.get_rank())
    splits = random_splits(dist.get_world_size(), 7)
    sent, received = list(splits[dist.get_rank()]), [row[dist.get_rank()] for row in splits]
    input = torch.randn(sum(sent), 17).to(dtype)
    ours, theirs = torch.empty(sum(received), 17, dtype=dtype), torch.empty(sum(received), 17, dtype=dtype)
    dist.all_to_all_single(theirs, input, received, sent)
    a2a.all_to_all_single(ours, input, received, sent)
    assert_same_bits(ours, theirs)


def in_subgroups() -> None:
    """Two halves at once, each a group whose first collective this is; splits and results count group ranks."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = halves[dist.get_rank() % 2]
    rank = dist.get_rank(mine)
    exchange = Exchange(((0, 3), (2, 1)), salt=dist.get_rank() % 2)
    for group in (mine, a2a.communicator(mine)):
        output = torch.empty_like(exchange.expected(rank))
        a2a.all_to_all_single(output, exchange.input(rank), exchange.received(rank), exchange.sent(rank), group)
        assert_same_bits(output, exchange.expected(rank))
    group.close()


def in_two_domains() -> None:
    """Ranks 0, 1 and 2, 3 as if on two hosts."""
    topology = a2a.topology.presets.get("cpu:2x2")
    with a2a.communicator(topology=topology) as comm:
        assert comm.topology == topology
        for seed in range(5):
            run_single(Exchange(random_splits(4, seed)), comm)


def with_gradients_and_modes() -> None:
    exchange = Exchange(((2, 1), (1, 2)))
    rank = dist.get_rank()
    input = exchange.input(rank).requires_grad_()
    output = torch.empty_like(exchange.expected(rank))
    a2a.all_to_all_single(output, input, exchange.received(rank), exchange.sent(rank))
    assert not output.requires_grad
    assert_same_bits(output, exchange.expected(rank))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        run_single(exchange)


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("row_shape", [(), (7,), (3, 5, 2)], ids=str)
def test_even_exchange(world: World, row_shape: tuple[int, ...]) -> None:
    for rows in (0, 1, 5):
        world.run(even, row_shape=row_shape, rows=rows, dtype=torch.float32)


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_uneven_exchange(world: World) -> None:
    world.run(uneven, seeds=list(range(12)), row_shape=(6,))
    world.run(uneven, seeds=list(range(4)), row_shape=())
    world.run(uneven, seeds=list(range(8)), row_shape=(2, 3), nothing=0.9)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "splits",
    [
        ((0, 0, 0), (1, 2, 3), (4, 0, 1)),
        ((1, 0, 2), (3, 0, 0), (2, 0, 0)),
        ((0, 0, 0), (0, 0, 0), (5, 5, 5)),
        ((0, 0, 0), (0, 0, 0), (0, 0, 0)),
        ((9, 0, 0), (0, 0, 9), (0, 9, 0)),
    ],
    ids=["one sends nothing", "one receives nothing", "one sends all", "nobody sends", "a permutation"],
)
def test_ranks_without_rows_take_part(world: World, splits: tuple[tuple[int, ...], ...]) -> None:
    world.run(given_splits, splits=splits)
    world.run(given_splits, splits=splits, row_shape=(0,))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_arrives_bit_for_bit(world: World, dtype: torch.dtype) -> None:
    world.run(even, row_shape=(5,), rows=3, dtype=dtype)
    exchange = Exchange(((0, 2), (3, 1)), (5,), dtype)
    world.run(run_single, exchange=exchange)
    world.run(lists, exchange=exchange)


@pytest.mark.ranks(1, 2, 4, 5)
def test_lists_may_be_uneven(world: World) -> None:
    for seed in range(6):
        world.run(lists, exchange=Exchange(random_splits(world.size, seed), (4,)))


def test_lists_hold_tensors_of_any_shape_and_stride(world: World) -> None:
    world.run(lists_of_any_shape)


@pytest.mark.parametrize(
    "make",
    [
        "list",
        "tuple",
        "torch.Size",
        "numpy int64",
        "numpy int32",
        "tensor",
        "int32 tensor",
        "numpy scalars",
        "scalar tensors",
    ],
)
def test_splits_come_as_any_sequence(world: World, make: str) -> None:
    world.run(splits_of_type, make=make)


@pytest.mark.parametrize("side", ["input", "output"])
def test_splits_may_be_given_on_one_side_alone(world: World, side: str) -> None:
    world.run(splits_on_one_side, side=side)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("memory", ["ordinary", "symmetric"])
def test_sizes_around_every_power_of_two(world: World, memory: str) -> None:
    powers = [1 << exponent for exponent in range(22)]
    sizes = sorted({max(0, power + offset) for power in powers for offset in (-1, 0, 1)})
    world.run(sizes_around, sizes=[*sizes, 3 * KIB * KIB + 5], memory=memory)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("jitter_ms", [0.0, 1.0], ids=["again", "jitter"])
def test_calls_follow_each_other_with_new_data(world: World, symmetric: bool, jitter_ms: float) -> None:
    world.run(again, calls=150, jitter_ms=jitter_ms, symmetric=symmetric)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_results_are_those_of_gloo(world: World, dtype: torch.dtype) -> None:
    world.run(like_gloo, dtype=dtype)


@pytest.mark.ranks(4)
def test_subgroups_exchange_at_once_as_their_first_collective(world: World) -> None:
    world.run(in_subgroups)


@pytest.mark.ranks(4)
def test_two_domains_of_two_ranks(world: World) -> None:
    world.run(in_two_domains)


def test_gradients_are_not_recorded_and_modes_do_not_matter(world: World) -> None:
    world.run(with_gradients_and_modes)


@pytest.mark.ranks(3)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(
    splits=st.tuples(*[st.tuples(*[st.integers(0, 40)] * 3)] * 3),
    row_shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
)
def test_any_splits_and_shapes(
    world: World, splits: tuple[tuple[int, ...], ...], row_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    world.run(run_single, exchange=Exchange(splits, row_shape, dtype))
