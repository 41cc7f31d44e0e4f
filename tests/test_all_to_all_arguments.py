"""Wrong arguments are refused before data moves, by an error that says what was got and what was expected.

Every rank makes the same mistake here, and the same communicator goes on working; what happens to the peers of a rank that
is alone with its mistake is in test_failures.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import a2a
from exchange_cases import Exchange, assert_same_bits, random_splits
from pool import World

SINGLE = "all_to_all_single"
LIST = "all_to_all"


def rows(count: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros((count, *shape), dtype=dtype, device=device)


def read_only() -> np.ndarray:
    array = np.zeros(4, dtype=np.float32)
    array.flags.writeable = False
    return array


def expanded() -> torch.Tensor:
    """Four rows that are all the same memory: fine to send, senseless to receive into."""
    return torch.zeros(1).expand(4)


# name: (the call on 2 ranks, the type of error, what its text must hold)
MISTAKES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "odd input": (
        lambda: a2a.all_to_all_single(rows(4), rows(3)),
        ValueError,
        r"input.*does not divide equally across group size.*3 rows, 2 ranks",
    ),
    "odd output": (
        lambda: a2a.all_to_all_single(rows(5), rows(4)),
        ValueError,
        r"output.*does not divide equally across group size.*5 rows, 2 ranks",
    ),
    "too few input splits": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), None, [4]),
        ValueError,
        r"number of tensor splits not equal to group size.*input_split_sizes",
    ),
    "too many output splits": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), [2, 1, 1]),
        ValueError,
        r"number of tensor splits not equal to group size.*output_split_sizes",
    ),
    "input splits above the rows": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), None, [2, 3]),
        ValueError,
        r"split sizes doesn't match total dim 0 size.*input_split_sizes",
    ),
    "output splits below the rows": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), [2, 1]),
        ValueError,
        r"split sizes doesn't match total dim 0 size.*output_split_sizes",
    ),
    "a negative split": (lambda: a2a.all_to_all_single(rows(4), rows(4), [5, -1]), ValueError, r"-1"),
    "negative splits that add up": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), None, [-2, 6]),
        ValueError,
        r"-2",
    ),
    "a fractional split": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), [1.5, 2.5]),
        TypeError,
        r"output_split_sizes",
    ),
    "a floating-point split tensor": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), torch.tensor([2.0, 2.0])),
        TypeError,
        r"output_split_sizes",
    ),
    "splits in two dimensions": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), np.array([[2, 2]])),
        (TypeError, ValueError),
        r"output_split_sizes",
    ),
    "a split beyond 64 bits": (lambda: a2a.all_to_all_single(rows(4), rows(4), [2**64, 4 - 2**64]), ValueError, r""),
    "splits as one number": (
        lambda: a2a.all_to_all_single(rows(4), rows(4), 2),
        TypeError,
        r"output_split_sizes",
    ),
    "splits as text": (lambda: a2a.all_to_all_single(rows(4), rows(4), "22"), TypeError, r"output_split_sizes"),
    "dtypes that differ": (
        lambda: a2a.all_to_all_single(rows(4), rows(4, dtype=torch.int32)),
        (TypeError, ValueError),
        r"float32.*int32|int32.*float32",
    ),
    "row shapes that differ": (
        lambda: a2a.all_to_all_single(rows(4, 3), rows(4, 2)),
        ValueError,
        r"row",
    ),
    "a tensor without rows": (lambda: a2a.all_to_all_single(torch.zeros(()), torch.zeros(())), ValueError, r"0-d|dim"),
    "a meta output": (lambda: a2a.all_to_all_single(rows(4, device="meta"), rows(4)), ValueError, r"output.*meta"),
    "a meta input": (lambda: a2a.all_to_all_single(rows(4), rows(4, device="meta")), ValueError, r"input.*meta"),
    "a sparse input": (lambda: a2a.all_to_all_single(rows(4), rows(4).to_sparse()), ValueError, r"input.*sparse"),
    "a list as output": (lambda: a2a.all_to_all_single([0.0] * 4, rows(4)), TypeError, r"output.*list"),
    "text as input": (lambda: a2a.all_to_all_single(rows(4), "rows"), TypeError, r"input.*str"),
    "nothing as input": (lambda: a2a.all_to_all_single(rows(4), None), TypeError, r"input.*None"),
    "an output nobody may write": (
        lambda: a2a.all_to_all_single(read_only(), rows(4)),
        ValueError,
        r"output.*read-only",
    ),
    "an output that is one row": (lambda: a2a.all_to_all_single(expanded(), rows(4)), ValueError, r"output.*one place"),
    "a group that is none": (lambda: a2a.all_to_all_single(rows(4), rows(4), group="world"), TypeError, r"group.*str"),
    "too few outputs": (lambda: a2a.all_to_all([rows(1)], [rows(1)] * 2), ValueError, r"output.*1.*2"),
    "too many inputs": (
        lambda: a2a.all_to_all([rows(1), rows(1)], [rows(1)] * 3),
        ValueError,
        r"input.*3.*2",
    ),
    "a list with two dtypes": (
        lambda: a2a.all_to_all([rows(1), rows(1)], [rows(1), rows(1, dtype=torch.int8)]),
        (TypeError, ValueError),
        r"int8",
    ),
    "a list with a hole": (lambda: a2a.all_to_all([rows(1), None], [rows(1), rows(1)]), TypeError, r"output.*None"),
    "a list with a meta tensor": (
        lambda: a2a.all_to_all([rows(1), rows(1, device="meta")], [rows(1), rows(1)]),
        ValueError,
        r"output.*meta",
    ),
    "a tensor for a list": (lambda: a2a.all_to_all(rows(2), [rows(1), rows(1)]), TypeError, r"output_tensor_list"),
}


def works() -> None:
    rank = dist.get_rank()
    exchange = Exchange(random_splits(dist.get_world_size(), 3))
    output = torch.empty_like(exchange.expected(rank))
    a2a.all_to_all_single(output, exchange.input(rank), exchange.received(rank), exchange.sent(rank))
    assert_same_bits(output, exchange.expected(rank))


def mistake(name: str) -> str:
    call, error, text = MISTAKES[name]
    with pytest.raises(error, match=f"(?si){text}") as caught:
        call()
    works()
    return str(caught.value)


def outside_of_the_group() -> None:
    """Only ranks 0 and 2 are in the group; the others can't call on it and are told so, at once."""
    group = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        output = torch.empty(2)
        a2a.all_to_all_single(output, torch.full((2,), float(dist.get_rank())), group=group)
        assert output.tolist() == [0.0, 2.0]
    else:
        with pytest.raises(ValueError, match="not in the group"):
            a2a.all_to_all_single(torch.empty(2), torch.empty(2), group=group)


def without_a_group() -> str:
    dist.destroy_process_group()
    with pytest.raises((RuntimeError, ValueError), match="init_process_group") as caught:
        a2a.all_to_all_single(torch.empty(2), torch.empty(2))
    return str(caught.value)


def sent_once_received_wide() -> None:
    """Rows that are all the same memory may be sent."""
    output = torch.empty(4)
    a2a.all_to_all_single(output, torch.full((1,), 1.0 + dist.get_rank()).expand(4))
    assert output.tolist() == [1.0, 1.0, 2.0, 2.0]


def verdict(shapes: list[tuple[int, ...]], same_dtype: bool, splits: list[list[int] | None], world_size: int) -> str:
    """What must come of a call that all ranks make with the same output and input shapes and splits."""
    if not (same_dtype and all(shapes)):  # a shape without dimensions has no rows
        return "refused"
    row_sizes = [math.prod(shape[1:]) for shape in shapes]
    if row_sizes[0] != row_sizes[1] and all(math.prod(shape) for shape in shapes):
        return "refused"
    elements = []
    for shape, given, row_size in zip(shapes, splits, row_sizes, strict=True):
        if not given and shape[0] % world_size:
            return "refused"
        counts = given or [shape[0] // world_size] * world_size
        if len(counts) != world_size or min(counts) < 0 or sum(counts) != shape[0]:
            return "refused"
        elements += [count * row_size for count in counts]
    return "exchanged" if len(set(elements)) == 1 else "mismatch"


def fuzz(seed: int, calls: int) -> dict[str, int]:
    rng = random.Random(seed)  # the same on all ranks
    world_size = dist.get_world_size()
    seen = {"refused": 0, "exchanged": 0, "mismatch": 0}
    comm = a2a.communicator()
    for _ in range(calls):
        columns = rng.choice([(), (), (3,), (0,)])
        shapes = [(rng.choice([0, 1, 2, 4, world_size, 2 * world_size]), *columns) for _ in range(2)]
        splits = [rng.choice([None, None, [], random_counts(rng, world_size)]) for _ in range(2)]
        if rng.random() < 0.5:  # splits that add up
            shapes = [
                (sum(given) if given else shape[0], *columns) for shape, given in zip(shapes, splits, strict=True)
            ]
            shapes = [(max(0, shape[0]), *columns) for shape in shapes]
        if rng.random() < 0.1:
            shapes[rng.randrange(2)] = rng.choice([(), (4, 2)])
        dtypes = [torch.float32, rng.choice([torch.float32] * 9 + [torch.int64])]
        output, input = torch.full(shapes[0], -7, dtype=dtypes[0]), torch.ones(shapes[1], dtype=dtypes[1])
        expected = verdict(shapes, dtypes[0] == dtypes[1], splits, world_size)
        try:
            a2a.all_to_all_single(output, input, *splits, comm)
            got = "exchanged"
            assert output.eq(1).all()
        except (ValueError, TypeError) as error:
            got = "refused" if str(error).startswith(SINGLE) and output.eq(-7).all() else repr(error)
        except a2a.MismatchError:
            got = "mismatch"
            comm.close()
            comm = a2a.communicator()
        assert got == expected, f"output and input {shapes}, {dtypes}, splits {splits}"
        seen[got] += 1
    comm.close()
    return seen


def random_counts(rng: random.Random, world_size: int) -> list[int]:
    if rng.random() < 0.4:
        return [rng.randint(0, 2)] * world_size
    return [rng.randint(-1, 3) for _ in range(rng.choice([world_size, world_size, world_size - 1, world_size + 1]))]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_leaves_the_communicator_usable(world: World, name: str) -> None:
    for text in world.run(mistake, name=name):
        assert text.startswith((SINGLE, LIST)), f"which function refused? {text}"


@pytest.mark.ranks(4)
def test_a_rank_outside_of_the_group_is_told_so(world: World) -> None:
    world.run(outside_of_the_group)


def test_without_a_process_group_the_error_says_how_to_make_one(world: World) -> None:
    world.run(without_a_group, destroys_group=True)


@pytest.mark.ranks(2, 3)
def test_random_arguments_are_refused_exchanged_or_found_to_mismatch(world: World) -> None:
    for seed in range(3):
        seen = world.run(fuzz, seed=seed, calls=100)
        assert all(ranks == seen[0] for ranks in seen)
        assert min(seen[0].values()) >= 3, seen[0]


def test_rows_that_share_memory_may_be_sent(world: World) -> None:
    world.run(sent_once_received_wide)
