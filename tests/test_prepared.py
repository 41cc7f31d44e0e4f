"""Calls that were made before take a short way past the checks of the first. It must know all that is not the same."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.kernels import prepared
from exchange_cases import random_splits
from pool import World

WAYS = ("native", "python")


def communicator(way: str) -> a2a.Communicator:
    comm = a2a.communicator(timeout=20)
    if way == "python":
        comm.prepared = prepared.Prepared(comm.rank)
        comm.transport.on_renewal(comm.prepared.clear)
    else:
        assert type(comm.prepared) is not prepared.Prepared, "this Python and torch have what the native way takes"
    return comm


def again(
    comm: a2a.Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: object = None,
    input_splits: object = None,
) -> bool:
    """Whether the short way made the call, which must then have been right."""
    output.zero_()
    result = comm.prepared.all_to_all(output, input, output_splits, input_splits)
    assert result in (0, prepared.UNKNOWN)
    return result == 0


def sent(comm: a2a.Communicator, dtype: torch.dtype = torch.float32, columns: int = 3) -> torch.Tensor:
    rows = torch.arange(2 * comm.world_size * columns) + 100 * comm.rank
    return rows.view(2 * comm.world_size, columns).to(dtype)


def the_same_call(way: str) -> None:
    with communicator(way) as comm:
        source, output = sent(comm), torch.empty(2 * comm.world_size, 3)
        assert not again(comm, output, source)
        a2a.all_to_all_single(output, source, group=comm)
        expected = output.clone()
        assert expected[-1, -1] != 0
        for round_ in range(5):
            assert again(comm, output, source + round_)
            assert torch.equal(output, expected + round_)
        assert again(comm, output, source.clone().requires_grad_())
        assert len(comm.prepared) == 1
        comm.prepared.clear()
        assert not again(comm, output, source)


def other_calls(way: str) -> None:
    with communicator(way) as comm:
        world_size = comm.world_size
        for dtype in (torch.float32, torch.complex64, torch.bfloat16):
            source = sent(comm, dtype)
            a2a.all_to_all_single(torch.empty_like(source), source, group=comm)
        source, output = sent(comm), torch.empty(2 * world_size, 3)
        assert again(comm, output, source)
        for other in (torch.int32, torch.float64, torch.float16):  # of the same size, or one that was prepared as such
            assert not again(comm, output.to(other), source.to(other))
        assert not again(comm, output, source.to(torch.int32))
        assert not again(comm, output.to(torch.int32), source)
        assert not again(comm, output.view(-1), source)
        assert not again(comm, output, source.view(-1))
        assert not again(comm, output.view(world_size, 6), source.view(world_size, 6))
        assert not again(comm, output, source.t().contiguous().t())
        assert not again(comm, output.t().contiguous().t(), source)
        both = torch.zeros(2 * world_size + 1, 3)
        assert not again(comm, both[1:], both[:-1])
        assert not again(comm, source, source)
        assert not again(comm, output, torch._neg_view(source))
        assert not again(comm, torch._neg_view(output), source)
        numbers = sent(comm, torch.complex64)
        assert again(comm, torch.empty_like(numbers), numbers)
        assert not again(comm, torch.empty_like(numbers), numbers.conj())
        assert not again(comm, torch.empty_like(numbers).conj(), numbers)
        assert not again(comm, output, source.to_sparse())


def conjugates(way: str) -> None:
    """The short way of the plain tensors doesn't send the memory of their conjugates as it is."""
    with communicator(way) as comm:
        source = torch.complex(sent(comm), sent(comm) + 1)
        plain, output = torch.empty_like(source), torch.empty_like(source)
        for _ in range(3):
            a2a.all_to_all_single(plain, source, group=comm)
            a2a.all_to_all_single(output, source.conj(), group=comm)
            assert torch.equal(output, plain.conj())


def shapes_without_elements_or_with_ones(way: str) -> None:
    with communicator(way) as comm:
        for shape in ((0,), (0, 5), (comm.world_size, 1, 1), (comm.world_size,)):
            source = torch.full(shape, 1.0 + comm.rank)
            output = torch.empty(shape)
            for round_ in range(3):
                output.fill_(-1)
                a2a.all_to_all_single(output, source, group=comm)
                assert output.flatten().tolist() == [1.0 + rank for rank in range(comm.world_size)][: output.numel()], (
                    round_
                )
        assert len(comm.prepared) == (2 if comm.prepared.native else 4)


def more_shapes_than_are_kept(way: str) -> None:
    with communicator(way) as comm:
        for columns in [*range(1, 1101), *range(1, 40)]:
            source = torch.full((comm.world_size, columns), float(columns))
            output = torch.empty_like(source)
            a2a.all_to_all_single(output, source, group=comm)
            assert torch.equal(output, source)
        assert 0 < len(comm.prepared) <= 128


def a_table_outlives_its_communicator(way: str) -> None:
    comm = communicator(way)
    source, output = sent(comm), torch.empty(2 * comm.world_size, 3)
    a2a.all_to_all_single(output, source, group=comm)
    dist.barrier()
    short, gone = comm.prepared.all_to_all, weakref.ref(comm)
    comm.close()
    del comm
    gc.collect()
    assert gone() is None
    assert short(output, source, None, None) == prepared.UNKNOWN


def nothing_is_counted_too_often(way: str) -> None:
    with communicator(way) as comm:
        source, output = sent(comm), torch.empty(2 * comm.world_size, 3)
        a2a.all_to_all_single(output, source, group=comm)
        short, splits, many = comm.prepared.all_to_all, [2] * comm.world_size, 1 << 70
        of_array, too_many = np.array(splits), [many] * comm.world_size
        objects = (source, output, short, "is_neg", sys.intern("is_conj"), splits, of_array, many, too_many, list, int)
        before = [sys.getrefcount(x) for x in objects]
        for _ in range(100):
            short(output, source, None, ())
            short(output, source, splits, tuple(splits))
            short(output, source, of_array, splits)
            short(output, source, too_many, object())
            short(output, source.t(), None, None)
            short(output, source.to_sparse(), None, None)
        after = [sys.getrefcount(x) for x in objects]
        assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), (before, after)


def ragged(comm: a2a.Communicator, seed: int) -> tuple[list[int], list[int], torch.Tensor]:
    """Splits of this rank's output and input, and what an exchange by them gives it."""
    splits, me = random_splits(comm.world_size, seed), comm.rank
    splits = tuple((*row[:-1], row[-1] or 1) for row in splits)  # a rank without any row would not know the row
    parts = [torch.full((splits[rank][me], 3), 10.0 * rank + seed) for rank in range(comm.world_size)]
    return [splits[rank][me] for rank in range(comm.world_size)], list(splits[me]), torch.cat(parts)


def new_splits(way: str) -> None:
    """They are known where one call of this dtype and row was made before, in whatever form they come."""
    forms = (list, tuple, np.array, torch.tensor, lambda splits: np.array(splits, np.int32))
    with communicator(way) as comm:
        for seed in range(20):
            received, given, expected = ragged(comm, seed)
            source = torch.full((sum(given), 3), 10.0 * comm.rank + seed)
            output, form = torch.empty_like(expected), forms[seed % len(forms)]
            if seed:
                known = again(comm, output, source, form(received), form(given))
                assert known == (way == "native")
                assert not known or torch.equal(output, expected)
            for async_op in (False, True):
                work = a2a.all_to_all_single(output.zero_(), source, form(received), form(given), comm, async_op)
                assert (work is not None) == async_op
                if work is not None:
                    work.wait()
                assert torch.equal(output, expected)
        assert comm.stats()["collectives"] == (59 if way == "native" else 40)


def one_side_of_splits(way: str) -> None:
    with communicator(way) as comm:
        source, output = sent(comm), torch.empty(2 * comm.world_size, 3)
        a2a.all_to_all_single(output, source, group=comm)
        expected, even = output.clone(), [2] * comm.world_size
        for sides in ((even, None), (None, even), ([], even), (even, ()), (even, even)):
            assert again(comm, output, source, *sides) == (way == "native")
            a2a.all_to_all_single(output, source, *sides, comm)
            assert torch.equal(output, expected)
        assert again(comm, output, source, [], ())


def wrong_splits(way: str) -> None:
    """The short way knows nothing of them, and the errors are those of a first call."""
    with communicator(way) as comm, communicator(way) as new:
        world_size, rows = comm.world_size, 2 * comm.world_size
        source, output = sent(comm), torch.empty(rows, 3)
        a2a.all_to_all_single(output, source, group=comm)
        even = [2] * world_size
        wrong: list[tuple[object, object]] = [
            ([rows] + [0] * world_size, even),
            ([rows + 1, -1] + [0] * (world_size - 2), even),
            (even, [1] * world_size),
            (even, [1 << 70] * world_size),
            (even, [-(1 << 70)] * world_size),
            (even, [1 << 63] + [0] * (world_size - 1)),
            ([2.0] * world_size, even),
            (np.array([2.0] * world_size), even),
            ([True] * world_size, even),
            ("ab", even),
            (2, even),
            (np.array(2), even),
            (np.array([even]), even),
            (torch.tensor([even]), even),
        ]
        for sides in wrong:
            assert not again(comm, output, source, *sides), sides
            texts = []
            for each in (comm, new):
                with pytest.raises((ValueError, TypeError)) as told:
                    a2a.all_to_all_single(output, source, *sides, each)
                texts.append(f"{type(told.value)}: {told.value}")
            assert texts[0] == texts[1]
        for odd in (torch.empty(rows + 1, 3), torch.tensor(1.0)):
            assert not again(comm, output, odd)
            assert not again(comm, odd, source)
        a2a.all_to_all_single(output, source, group=comm)  # in step all the while


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "check",
    [
        the_same_call,
        other_calls,
        conjugates,
        shapes_without_elements_or_with_ones,
        more_shapes_than_are_kept,
        a_table_outlives_its_communicator,
        nothing_is_counted_too_often,
        new_splits,
        one_side_of_splits,
        wrong_splits,
    ],
)
def test_a_call_made_before(world: World, check: object, way: str) -> None:
    world.run(check, way=way)


def test_wrong_arguments_are_unknown_calls() -> None:
    table, tensor = prepared.prepared("cpu", 0), torch.zeros(2)
    for arguments in ((), (tensor,), (1, 2), (1, 2, 3, 4), (tensor, None, None, None), (tensor,) * 3, (tensor,) * 5):
        for name in prepared.KINDS:
            assert getattr(table, name)(*arguments) == prepared.UNKNOWN


def test_a_torch_without_an_exchange_table_is_served_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    assert prepared.library.__wrapped__() is None
