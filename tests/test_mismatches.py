"""When ranks ask for different things, or one makes a mistake, every other rank is told who and what, soon; nobody hangs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from deadlines import soon
from exchange_cases import Exchange, assert_same_bits, exchange_once, random_splits
from failure_cases import NOTICED_S, finished, heard, raises_on_and_on
from pool import World

# What rank 2 calls while ranks 0 and 1 exchange two float32 rows of 4 with everybody; and what the error must say of it.
DIFFERENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another op": (
        lambda comm: a2a.all_to_all([torch.empty(2, 4)] * 3, [torch.empty(2, 4)] * 3, comm),
        r"all_to_all\(",
    ),
    "another dtype": (
        lambda comm: a2a.all_to_all_single(torch.empty(6, 4).int(), torch.empty(6, 4).int(), group=comm),
        "int32",
    ),
    "another row size": (
        lambda comm: a2a.all_to_all_single(torch.empty(6, 5), torch.empty(6, 5), group=comm),
        r"\[5\]",
    ),
    "another number of rows": (
        lambda comm: a2a.all_to_all_single(torch.empty(9, 4), torch.empty(9, 4), group=comm),
        "rank 2",
    ),
    "other output splits": (
        lambda comm: a2a.all_to_all_single(torch.empty(6, 4), torch.empty(6, 4), [1, 3, 2], group=comm),
        "rank 2",
    ),
    "other input splits": (
        lambda comm: a2a.all_to_all_single(torch.empty(6, 4), torch.empty(6, 4), None, [2, 0, 4], comm),
        "rank 2",
    ),
    "no rows": (
        lambda comm: a2a.all_to_all_single(torch.empty(0, 4), torch.empty(0, 4), group=comm),
        "rank 2",
    ),
    "symmetric memory": (lambda comm: comm.empty((8,), torch.float32), r"comm\.empty"),
}


def different(name: str, memory: str) -> tuple[int, str]:
    rank = dist.get_rank()
    comm = a2a.communicator(timeout=20)
    exchange_once(comm)
    tensors = comm.empty((2, 6, 4), torch.float32) if memory == "symmetric" else torch.empty(2, 6, 4)
    tensors.fill_(-1.0)
    dist.barrier()
    different_call, says = DIFFERENT[name]

    def call() -> None:
        if rank == 2:
            different_call(comm)
        else:
            a2a.all_to_all_single(tensors[0], tensors[1], group=comm)
        if says == "rank 2":  # one wrong split is seen by two ranks only; the others hear of it
            heard(comm)

    with soon(NOTICED_S), pytest.raises(a2a.MismatchError) as caught:
        call()
    text = str(caught.value)
    raises_on_and_on(comm, a2a.MismatchError, says)
    comm.close()
    with a2a.communicator() as comm:
        exchange_once(comm)
    return caught.value.peer, text


def one_pair_disagrees(op: str) -> str:
    """What rank 0 sends to rank 1 is larger than what rank 1 expects; rank 2, who has no part in it, hears of it too."""
    rank = dist.get_rank()
    with a2a.communicator(timeout=20) as comm:
        sent = [3 if (rank, target) == (0, 1) else 2 for target in range(3)]

        def exchange_and_check() -> None:
            if op == "lists":
                a2a.all_to_all([torch.empty(2) for _ in range(3)], [torch.empty(rows) for rows in sent], comm)
            else:
                a2a.all_to_all_single(torch.empty(6), torch.empty(sum(sent)), None, sent, comm)
            if rank == 2:
                heard(comm)

        with soon(NOTICED_S), pytest.raises(a2a.MismatchError) as caught:
            exchange_and_check()
        dist.barrier()
        return str(caught.value)


def mistakes_of_some(seed: int, calls: int, async_op: bool) -> tuple[int, int]:
    """At random, some ranks make a mistake of their own: they raise ValueError, their peers hear of it, nothing breaks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(seed)
    outcomes = [0, 0]
    with a2a.communicator(timeout=20) as comm:
        for call in range(calls):
            wrong = [peer for peer in range(world_size) if rng.random() < 0.3]
            exchange = Exchange(random_splits(world_size, call), salt=call)
            output = torch.empty_like(exchange.expected(rank))
            input, splits = exchange.input(rank), exchange.sent(rank)
            if rank in wrong:
                splits = [*splits, 0]
                with pytest.raises(ValueError, match="number of tensor splits not equal to group size"):
                    a2a.all_to_all_single(output, input, exchange.received(rank), splits, comm, async_op)
            elif wrong:
                with pytest.raises(a2a.MismatchError, match="number of tensor splits") as caught:
                    finished(a2a.all_to_all_single(output, input, exchange.received(rank), splits, comm, async_op))
                assert caught.value.peer in wrong
                assert f"rank {caught.value.peer} refused" in str(caught.value)
            else:
                finished(a2a.all_to_all_single(output, input, exchange.received(rank), splits, comm, async_op))
                assert_same_bits(output, exchange.expected(rank))
            outcomes[bool(wrong)] += 1
        dist.barrier()
        assert int(comm.ok) == 1
        comm.check()
    return outcomes[0], outcomes[1]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("memory", ["ordinary", "symmetric"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_rank_that_asks_for_something_else_is_found_out_by_all(world: World, name: str, memory: str) -> None:
    results = world.run(different, name=name, memory=memory)
    _, says = DIFFERENT[name]
    for rank, (peer, text) in enumerate(results):
        assert peer != rank
        assert "rank 2" in text
        assert "rank 0" in text or "rank 1" in text
        assert re.search(says, text)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", ["single", "lists"])
def test_two_ranks_that_disagree_are_named_on_all(world: World, op: str) -> None:
    for text in world.run(one_pair_disagrees, op=op):
        assert "rank 0" in text
        assert "rank 1" in text


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_mistake_of_one_rank_reaches_the_others_and_breaks_nothing(world: World, async_op: bool) -> None:
    for good, bad in world.run(mistakes_of_some, seed=world.size, calls=60, async_op=async_op):
        assert good > 5
        assert bad > 5
