"""Reductions and all-gathers that were made before take the short way of tests/test_prepared.py, too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.kernels import prepared
from a2a.work import Work
from exchange_cases import assert_same_bits
from pool import World
from test_prepared import WAYS, communicator
from test_reductions import values

SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN
SIZES = (6, 40_000)  # elements for a one-shot and for a two-shot


class Call:
    """One collective of a communicator, by its ordinary name and by the short way alone."""

    def __init__(self, comm: a2a.Communicator, kind: str, count: int, dtype: torch.dtype = torch.float32) -> None:
        world_size = comm.world_size
        self.comm, self.kind = comm, kind
        self.count = count - count % world_size
        self.sizes = {
            "all_reduce": (self.count, self.count),
            "reduce_scatter": (self.count // world_size, self.count),
            "all_gather": (self.count, self.count // world_size),
        }[kind]
        self.dtype = dtype

    def tensors(self, salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, input), which are the same in an all-reduce."""
        input = values(self.comm.rank, self.sizes[1], self.dtype, salt)
        return (input, input) if self.kind == "all_reduce" else (input.new_zeros(self.sizes[0]), input)

    def start(self, output: torch.Tensor, input: torch.Tensor, op: Any = SUM, async_op: bool = True) -> Any:
        return {
            "all_reduce": lambda: a2a.all_reduce(input, op, self.comm, async_op),
            "reduce_scatter": lambda: a2a.reduce_scatter_tensor(output, input, op, self.comm, async_op),
            "all_gather": lambda: a2a.all_gather_into_tensor(output, input, self.comm, async_op),
        }[self.kind]()

    def make(self, output: torch.Tensor, input: torch.Tensor, op: Any = SUM, async_op: bool = False) -> None:
        work = self.start(output, input, op, async_op)
        assert (work is None) != async_op
        if work is not None:
            work.wait()

    def again(self, output: torch.Tensor, input: torch.Tensor, op: Any = SUM) -> bool:
        """Whether the short way made the call."""
        table = self.comm.prepared
        result = {
            "all_reduce": lambda: table.all_reduce(input, op),
            "reduce_scatter": lambda: table.reduce_scatter(output, input, op),
            "all_gather": lambda: table.all_gather(output, input),
        }[self.kind]()
        assert result in (0, prepared.UNKNOWN)
        return result == 0


def the_same_bits(way: str, kind: str) -> None:
    """As a call that goes the long way: on a communicator that has made none before."""
    with communicator(way) as comm, communicator(way) as new:
        for count in SIZES:
            for dtype, op in ((torch.float32, SUM), (torch.bfloat16, AVG), (torch.float64, MAX), (torch.int16, MIN)):
                call = Call(comm, kind, count, dtype)
                output, input = call.tensors()
                assert not call.again(output, input, op)
                call.make(output, input, op)
                for salt in range(1, 4):
                    long, short = call.tensors(salt), call.tensors(salt)
                    new.prepared.clear()
                    Call(new, kind, count, dtype).make(*long, op)
                    assert call.again(*short, op)
                    assert_same_bits(short[0], long[0])
                    later = call.tensors(salt)
                    call.make(*later, op, async_op=True)
                    assert_same_bits(later[0], long[0])
                output, input = call.tensors(1)
                assert call.again(output.requires_grad_() if op != MIN else output, input, op)
        comm.prepared.clear()
        assert not call.again(output, input, op)


def asynchronous_calls(way: str, kind: str) -> None:
    """They are known, too, run in the order of all calls, and tell autograd when they are done."""
    with communicator(way) as comm:
        first, call = Call(comm, kind, 96), Call(comm, kind, 48)
        first.make(*first.tensors(), async_op=True)
        assert first.again(*first.tensors()) == (way == "native")  # one call is as good as another
        results, expected = [], []
        for salt in range(20):
            output, input = call.tensors(salt)
            call.make(output, input)
            expected.append(output)
        submit = getattr(comm.prepared, f"submit_{kind}")
        before, version = comm.stats()["collectives"], call.tensors()[0]._version
        for salt in range(20):
            output, input = call.tensors(salt)
            arguments = [input] if kind == "all_reduce" else [output, input]
            ticket = submit(*arguments, *([] if kind == "all_gather" else [SUM]))
            assert (ticket != prepared.UNKNOWN) == (way == "native")
            if ticket == prepared.UNKNOWN:
                call.make(output, input, async_op=True)
            else:
                Work(comm, ticket, kind, [output], (output, input), None).wait()
            results.append(output)
        started = [(call.tensors(salt), salt) for salt in range(20)]
        works = [call.start(output, input) for (output, input), _ in started]
        call.make(*call.tensors())  # after all of them
        assert all(work.is_completed() for work in works)
        for (output, _), salt in started:
            assert output._version > version
            assert_same_bits(output, expected[salt])
            assert_same_bits(results[salt], expected[salt])
        assert comm.stats()["collectives"] == before + 41


def other_calls(way: str, kind: str) -> None:
    with communicator(way) as comm:
        call = Call(comm, kind, 48)
        output, input = call.tensors()
        call.make(output, input)
        call.make(*Call(comm, kind, 48, torch.int32).tensors())
        assert call.again(output, input)
        if kind != "all_gather":
            for op in (MAX, MIN, AVG, dist.ReduceOp.PRODUCT, None, "sum", 0, dist.ReduceOp(SUM)):
                assert not call.again(output, input, op)
        assert not call.again(*Call(comm, kind, 96).tensors())
        assert not call.again(*Call(comm, kind, 48, torch.float16).tensors())
        assert not call.again(output, input.to_sparse())
        assert not call.again(output, input.to("meta"))
        assert not call.again(torch._neg_view(output), torch._neg_view(input))
        spread = torch.zeros(2 * output.numel())[::2], torch.zeros(2 * input.numel())[::2]
        assert not call.again(*spread)
        assert call.again(output.view(2, -1), input.view(2, -1)) == (way == "native")
        if kind != "all_reduce":
            assert not call.again(output.to(torch.int32), input)
            assert not call.again(output, input.to(torch.int32))
            assert not call.again(output[1:], input)
            assert not call.again(output, input[1:])
            assert not call.again(output, spread[1])
            assert not call.again(spread[0], input)
            assert not call.again(torch._neg_view(output), input)


def shares_in_place(way: str, kind: str) -> None:
    """A rank's own share of the other tensor may be where it belongs, and nowhere else."""
    with communicator(way) as comm:
        call = Call(comm, kind, 48)
        output, input = call.tensors()
        call.make(output, input)
        expected = output.clone()
        whole, share = (output, input) if kind == "all_gather" else (input, output)
        for at in range(whole.numel() - share.numel() + 1):
            in_place = whole.clone()
            mine = in_place[at : at + share.numel()]
            if kind == "all_gather":
                mine.copy_(share)
            result = in_place if kind == "all_gather" else mine
            known = call.again(*((in_place, mine) if kind == "all_gather" else (mine, in_place)))
            assert known == (at == comm.rank * share.numel()), at
            if known:
                assert_same_bits(result, expected)
            else:  # the rank whose share belongs there has made the call
                call.make(*call.tensors())


def complex_numbers(way: str) -> None:
    with communicator(way) as comm:
        call = Call(comm, "all_gather", 8, torch.complex64)
        source = torch.complex(*values(comm.rank, 2 * call.sizes[1], torch.float32).view(2, -1))
        plain, output = torch.zeros(call.count, dtype=source.dtype), torch.zeros(call.count, dtype=source.dtype)
        for _ in range(3):
            a2a.all_gather_into_tensor(plain, source, comm)
            a2a.all_gather_into_tensor(output, source.conj(), comm)
            assert torch.equal(output, plain.conj())
        assert call.again(output, source)
        assert not call.again(output, source.conj())
        assert not call.again(output.conj(), source)


def the_planned_algorithm(way: str, algorithm: str) -> None:
    """What the plan says, each time; and each call is counted."""
    os.environ["A2A_ALGORITHM"] = ",".join(f"{kind}={algorithm}" for kind in ("all_reduce", "all_gather"))
    try:
        with communicator(way) as comm:
            for kind in ("all_reduce", "all_gather"):
                call = Call(comm, kind, 48)
                output, input = call.tensors()
                call.make(output, input)
                before = comm.stats()
                for _ in range(10):
                    known = call.again(output, input)
                    assert known == (algorithm != "c10d")
                    call.make(output, input)
                after = comm.stats()
                counted = after["collectives"] - before["collectives"]
                eager = after["bytes"]["eager"] - before["bytes"]["eager"]
                assert counted == {"one_shot": 20, "two_shot": 20, "c10d": 0}[algorithm]
                assert (eager > 0) == (algorithm == "one_shot")
            assert after["handed_over"] == ({"all_reduce": 11, "all_gather": 11} if algorithm == "c10d" else {})
    finally:
        del os.environ["A2A_ALGORITHM"]


def in_the_profiler() -> list[str]:
    with a2a.communicator() as comm:
        calls = [Call(comm, kind, 48) for kind in ("all_reduce", "reduce_scatter", "all_gather")]
        source = torch.ones(comm.world_size)

        def everything() -> None:
            for call in calls:
                call.make(*call.tensors())
            a2a.all_to_all_single(torch.empty_like(source), source, [1] * comm.world_size, None, comm)

        everything()
        with torch.profiler.profile() as profile:
            everything()
        return [event.key for event in profile.key_averages() if event.key.startswith("a2a::")]


class Kind(torch.Tensor):
    """A kind of its own, whose owner may want to know what is done with it."""


def modes_and_kinds(way: str, kind: str) -> None:
    """Modes of torch change nothing, and tensors of a kind of their own go the long way."""
    with communicator(way) as comm:
        call = Call(comm, kind, 48)
        expected, input = call.tensors()
        call.make(expected, input)
        for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
            with mode:
                for async_op in (False, True):
                    output, input = call.tensors()
                    call.make(output, input, async_op=async_op)
                    assert_same_bits(output, expected)
                assert call.again(*call.tensors())

        def refuse(*arguments: Any) -> int:
            raise AssertionError("the short way was asked")

        for name in (kind, f"submit_{kind}"):
            setattr(comm.prepared, name, refuse)
        for own in (lambda tensor: tensor.as_subclass(Kind), torch.nn.Parameter):
            for async_op in (False, True):
                output, input = call.tensors()
                same = output is input
                input = own(input)
                call.make(input if same else output, input, async_op=async_op)
                assert_same_bits((input if same else output).detach().as_subclass(torch.Tensor), expected)
        with pytest.raises(AssertionError, match="was asked"):
            call.make(*call.tensors())


def nothing_is_counted_too_often(way: str, kind: str) -> None:
    with communicator(way) as comm:
        call = Call(comm, kind, 48)
        output, input = call.tensors()
        call.make(output, input)
        sparse, objects = input.to_sparse(), (output, input, SUM, MAX, getattr(comm.prepared, kind))
        before = [sys.getrefcount(x) for x in objects]
        for _ in range(100):
            assert call.again(output, input)
            call.again(output, sparse)
            call.again(output, input[1:], MAX)
        after = [sys.getrefcount(x) for x in objects]
        assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), (before, after)


KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "check", [the_same_bits, asynchronous_calls, other_calls, modes_and_kinds, nothing_is_counted_too_often]
)
def test_a_reduction_made_before(world: World, check: Callable[..., None], way: str, kind: str) -> None:
    world.run(check, way=way, kind=kind)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("way", WAYS)
def test_only_the_own_share_may_overlap(world: World, way: str, kind: str) -> None:
    world.run(shares_in_place, way=way, kind=kind)


@pytest.mark.parametrize("way", WAYS)
def test_gathered_conjugates(world: World, way: str) -> None:
    world.run(complex_numbers, way=way)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "c10d"])
@pytest.mark.parametrize("way", WAYS)
def test_the_algorithm_is_the_plans(world: World, way: str, algorithm: str) -> None:
    world.run(the_planned_algorithm, way=way, algorithm=algorithm)


def test_calls_made_before_have_their_names_in_the_profiler(world: World) -> None:
    names = {"all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"}
    for found in world.run(in_the_profiler):
        assert set(found) == {f"a2a::{name}" for name in names}
