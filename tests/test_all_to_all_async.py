"""Asynchronous exchanges: they return before any peer has come, run in order, and keep what they need."""

from __future__ import annotations

import datetime
import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from deadlines import soon
from exchange_cases import Exchange, assert_same_bits, even_splits, fill_freed_memory, random_splits
from pool import World


def start(exchange: Exchange, group: Any = None) -> tuple[torch.Tensor, Any]:
    rank = dist.get_rank()
    output = torch.empty_like(exchange.expected(rank))
    work = a2a.all_to_all_single(
        output, exchange.input(rank), exchange.received(rank), exchange.sent(rank), group, async_op=True
    )
    return output, work


def returns_first(op: str) -> None:
    """Rank 1 comes only after rank 0's call has returned: if the call waited for its peer, rank 0 would never get there."""
    rank = dist.get_rank()
    exchange = Exchange(((1, 2), (3, 4)))
    a2a.all_to_all_single(torch.empty(2), torch.empty(2))  # so that no set-up is measured
    if rank == 1:
        dist.barrier()
    if op == "single":
        output, work = start(exchange)
        outputs, expected = [output], [exchange.expected(rank)]
    else:
        outputs = [torch.empty((rows, 3)) for rows in exchange.received(rank)]
        expected = [exchange.block(source, rank) for source in range(2)]
        work = a2a.all_to_all(outputs, [exchange.block(rank, target) for target in range(2)], async_op=True)
    if rank == 0:
        assert not work.is_completed()
        dist.barrier()
    assert work.wait() is True
    assert work.is_completed()
    for got, wanted in zip(outputs, expected, strict=True):
        assert_same_bits(got, wanted)
    assert work.wait() is True  # a second time


def many_in_flight(calls: int, order: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchanges = [Exchange(random_splits(world_size, call), (50,), salt=call) for call in range(calls)]
    started = [start(exchange) for exchange in exchanges]
    waits = list(range(calls))
    if order == "last first":
        waits.reverse()
    elif order == "shuffled":
        random.Random(rank).shuffle(waits)
    for call in waits:
        output, work = started[call]
        work.wait()
        assert_same_bits(output, exchanges[call].expected(rank))
        if order == "last first":  # first in, first out: when the last is there, all are
            assert all(work.is_completed() for _, work in started)


def refused_in_a_row(first_awaited: int) -> None:
    """Rank 1 makes three different mistakes; rank 0 hears of each in the call that it was made in."""
    mistakes = ([1], [1, -1], [1, 2])
    texts = ("not equal to group size", "negative entry", "add up to 3")
    with a2a.communicator(timeout=20) as comm:
        output, input = torch.empty(2, 3), torch.ones(2, 3)
        works = []
        for splits, text in zip(mistakes, texts, strict=True):
            if comm.rank == 1:
                with pytest.raises(ValueError, match=text):
                    a2a.all_to_all_single(output, input, None, splits, comm, async_op=True)
            else:
                works.append(a2a.all_to_all_single(output, input, None, [1, 1], comm, async_op=True))
        dist.barrier()
        while works and not works[-1].is_completed():  # all three have ended, none was asked why
            time.sleep(0.001)
        for call in range(first_awaited, first_awaited + len(works)):
            with pytest.raises(a2a.MismatchError, match=f"rank 1 refused its own call.*{texts[call % 3]}"):
                works[call % 3].wait()
        dist.barrier()


def mixed_with_synchronous(calls: int) -> None:
    """Ranks choose for themselves which calls to make asynchronously; the order of calls is what counts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(rank)
    pending = []
    for call in range(calls):
        exchange = Exchange(random_splits(world_size, call), (4,), salt=call)
        if rng.random() < 0.5:
            pending.append((exchange, *start(exchange)))
        else:
            output = torch.empty_like(exchange.expected(rank))
            a2a.all_to_all_single(output, exchange.input(rank), exchange.received(rank), exchange.sent(rank))
            assert_same_bits(output, exchange.expected(rank))
            assert all(work.is_completed() for _, _, work in pending)
    for exchange, output, work in pending:
        work.wait()
        assert_same_bits(output, exchange.expected(rank))


def keeps_tensors_alive(dropped: str) -> None:
    """Rank 0 lets go of what it has, and freed memory is written over, before rank 1 has even come."""
    rank = dist.get_rank()
    exchange = Exchange(even_splits(2, 1000), (64,))
    a2a.all_to_all_single(torch.empty(2), torch.empty(2))
    if rank == 1:
        dist.barrier()
    output, work = start(exchange)  # its input is a temporary
    if rank == 0:
        num_bytes = output.nbytes
        if dropped == "all":
            del output, work
        fill_freed_memory(num_bytes)
        dist.barrier()
    if rank == 1 or dropped == "input":
        work.wait()
        assert_same_bits(output, exchange.expected(rank))
    after = torch.empty(2)  # nobody waited for it, and the next one comes after it all the same
    a2a.all_to_all_single(after, torch.tensor([1.0, 2.0]) + 10 * rank)
    assert after.tolist() == [1.0 + rank, 11.0 + rank]


def future() -> None:
    rank = dist.get_rank()
    exchange = Exchange(((1, 2), (3, 4)))
    output, work = start(exchange)
    sums = work.get_future().then(lambda done: [float(tensor.sum()) for tensor in done.value()])
    assert sums.wait() == [float(exchange.expected(rank).sum())]
    assert_same_bits(work.get_future().wait()[0], exchange.expected(rank))
    assert work.is_completed()
    assert [tensor.data_ptr() for tensor in work.result()] == [output.data_ptr()]


def wait_with_a_limit(as_timedelta: bool) -> float:
    """Rank 1 is late; rank 0's wait gives up before, and may wait again."""
    rank = dist.get_rank()
    exchange = Exchange(((1, 2), (3, 4)))
    a2a.all_to_all_single(torch.empty(2), torch.empty(2))
    waited = 0.0
    if rank == 1:
        dist.barrier()
    output, work = start(exchange)
    if rank == 0:
        begin = time.monotonic()
        with soon(3.0), pytest.raises(a2a.PeerTimeoutError, match="all_to_all_single"):
            work.wait(datetime.timedelta(seconds=0.3) if as_timedelta else 0.3)
        waited = time.monotonic() - begin
        dist.barrier()
    work.wait()
    assert_same_bits(output, exchange.expected(rank))
    return waited


def error_at_wait() -> str:
    """The splits of the two ranks disagree: the calls return, the waits raise."""
    rank = dist.get_rank()
    with a2a.communicator() as comm:
        output, input = torch.empty(4), torch.empty(4)
        work = a2a.all_to_all_single(output, input, [2, 2], [2, 2] if rank else [1, 3], comm, async_op=True)
        after = a2a.all_to_all_single(output, input, group=comm, async_op=True)
        with pytest.raises(a2a.MismatchError) as caught:
            work.wait()
        with pytest.raises(a2a.MismatchError):
            after.wait()
        with pytest.raises(a2a.MismatchError):
            work.get_future().wait()
        assert work.is_completed()
        return str(caught.value)


def mistakes_at_once() -> None:
    """What the rank sees by itself it raises from the call, not from wait()."""
    with pytest.raises(ValueError, match="does not divide equally across group size"):
        a2a.all_to_all_single(torch.empty(3), torch.empty(3), async_op=True)
    even = Exchange(even_splits(2, 2))
    output, work = start(even)
    work.wait()
    assert_same_bits(output, even.expected(dist.get_rank()))


def two_communicators(calls: int, async_op: bool) -> None:
    """Two threads, each with its own communicator; their calls meet in any order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    comms = [a2a.communicator(), a2a.communicator()]
    errors: list[BaseException] = []

    def exchange_all(which: int) -> None:
        rng = random.Random(rank * 2 + which)
        try:
            for call in range(calls):
                exchange = Exchange(random_splits(world_size, call + which), (300,), salt=call * 2 + which)
                if rng.random() < 0.2:
                    time.sleep(rng.random() / 1000)
                output = torch.empty_like(exchange.expected(rank))
                work = a2a.all_to_all_single(
                    output, exchange.input(rank), exchange.received(rank), exchange.sent(rank), comms[which], async_op
                )
                if async_op:
                    work.wait()
                assert_same_bits(output, exchange.expected(rank))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=exchange_all, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    for comm in comms:
        comm.close()


def closed_in_flight(peer_comes: bool) -> None:
    rank = dist.get_rank()
    exchanges = [Exchange(random_splits(2, call), (100,), salt=call) for call in range(10)]
    comm = a2a.communicator()
    started = [start(exchange, comm) for exchange in exchanges] if peer_comes or rank == 0 else []
    with soon(3.0):
        comm.close()
    for exchange, (output, work) in zip(exchanges, started, strict=False):
        assert work.is_completed()
        if work.is_success():
            assert_same_bits(output, exchange.expected(rank))
        else:
            with pytest.raises(a2a.A2AError, match="closed"):
                work.wait()
    dist.barrier()


def random_program(seed: int, steps: int) -> dict[str, int]:
    """Everything in any order. The ranks agree on the steps; how to make a step (asynchronously, from which memory, when
    to wait for it, what to let go of) each rank chooses for itself."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    agreed, own = random.Random(seed), random.Random(seed * 10 + rank)
    made: dict[str, int] = {}
    pending: list[tuple[Any, list[torch.Tensor], list[torch.Tensor]]] = []
    with a2a.communicator() as comm:
        symmetric = [comm.empty((world_size * 9, 600), torch.int16) for _ in range(2)]
        for step in range(steps):
            kind = agreed.choice(["even", "even", "uneven", "uneven", "lists", "empty", "mistake"])
            made[kind] = made.get(kind, 0) + 1
            rows = agreed.choice([1, 9])
            splits = (
                even_splits(world_size, rows) if kind == "even" else random_splits(world_size, agreed.randrange(99))
            )
            exchange = Exchange(splits, (agreed.choice([1, 30, 600]),), torch.int16, salt=step)
            async_op = own.random() < 0.5
            if kind == "empty":
                new = comm.empty((world_size * 9, 600), torch.int16)
                if not pending:  # nothing is on its way to the old one
                    symmetric[own.randrange(2)] = new
                continue
            if kind == "mistake":
                with pytest.raises(ValueError, match=f"has 0 tensors; a group of {world_size}"):
                    a2a.all_to_all([], [], comm, async_op)
                continue
            if kind == "lists":
                outputs = [torch.empty_like(exchange.block(source, rank)) for source in range(world_size)]
                inputs = [exchange.block(rank, target) for target in range(world_size)]
                work = a2a.all_to_all(outputs, inputs, comm, async_op)
                expected = [exchange.block(source, rank) for source in range(world_size)]
            else:
                expected = [exchange.expected(rank)]
                input = exchange.input(rank)
                outputs = [torch.empty_like(expected[0])]
                if own.random() < 0.5 and not pending:  # the symmetric tensors are free
                    symmetric_input = symmetric[0].view(-1)[: input.numel()].view(input.shape)
                    input = symmetric_input.copy_(input)
                    outputs = [symmetric[1].view(-1)[: expected[0].numel()].view(expected[0].shape)]
                splits_given: list[Any] = [exchange.received(rank), exchange.sent(rank)]
                if kind == "even" and own.random() < 0.7:
                    splits_given = [None, None]
                work = a2a.all_to_all_single(outputs[0], input, *splits_given, comm, async_op)
            pending.append((work, outputs, expected))
            while pending and (own.random() < 0.4 or pending[0][0] is None):
                check_finished(*pending.pop(own.randrange(len(pending))))
        for unfinished in pending:
            check_finished(*unfinished)
        dist.barrier()
    return made


def check_finished(work: Any, outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    if work is not None:
        work.wait()
    for got, wanted in zip(outputs, expected, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("first_awaited", [0, 1, 2])
def test_refusals_are_told_by_the_calls_they_belong_to(world: World, first_awaited: int) -> None:
    world.run(refused_in_a_row, first_awaited=first_awaited)


@pytest.mark.parametrize("op", ["single", "lists"])
def test_the_call_returns_before_any_peer_has_come(world: World, op: str) -> None:
    world.run(returns_first, op=op)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("order", ["first first", "last first", "shuffled"])
def test_many_are_in_flight_and_finish_first_in_first_out(world: World, order: str) -> None:
    world.run(many_in_flight, calls=60, order=order)


@pytest.mark.ranks(3)
def test_synchronous_calls_wait_their_turn_behind_asynchronous_ones(world: World) -> None:
    world.run(mixed_with_synchronous, calls=80)


@pytest.mark.parametrize("dropped", ["input", "all"])
def test_what_an_exchange_needs_stays_alive_until_it_is_done(world: World, dropped: str) -> None:
    world.run(keeps_tensors_alive, dropped=dropped)


def test_the_future_gives_the_outputs(world: World) -> None:
    world.run(future)


@pytest.mark.parametrize("as_timedelta", [True, False])
def test_waiting_may_be_limited_and_repeated(world: World, as_timedelta: bool) -> None:
    waited, _ = world.run(wait_with_a_limit, as_timedelta=as_timedelta)
    assert waited > 0.25


def test_an_error_between_ranks_is_raised_by_wait(world: World) -> None:
    first, second = world.run(error_at_wait)
    assert "rank 1" in first
    assert "rank 0" in second


def test_a_ranks_own_mistake_is_raised_by_the_call(world: World) -> None:
    world.run(mistakes_at_once)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("async_op", [False, True])
def test_two_communicators_work_at_once_from_two_threads(world: World, async_op: bool) -> None:
    world.run(two_communicators, calls=60, async_op=async_op)


@pytest.mark.parametrize("peer_comes", [True, False])
def test_closing_ends_what_is_in_flight_with_its_result_or_an_error(world: World, peer_comes: bool) -> None:
    world.run(closed_in_flight, peer_comes=peer_comes)


@pytest.mark.ranks(1, 2, 3, 5)
def test_random_programs_exchange_right(world: World) -> None:
    for seed in range(4):
        made = world.run(random_program, seed=seed, steps=80)
        assert all(ranks == made[0] for ranks in made)
        assert min(made[0].values()) > 3
