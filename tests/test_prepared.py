"""Calls that were made before take a short way past the checks of the first. It must know all that is not the same."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.kernels import prepared
from pool import World

WAYS = ("native", "python")


def communicator(way: str) -> a2a.Communicator:
    comm = a2a.communicator(timeout=20)
    if way == "python":
        comm.prepared = prepared.Prepared()
    else:
        assert type(comm.prepared) is not prepared.Prepared, "this Python and torch have what the native way takes"
    return comm


def again(comm: a2a.Communicator, output: torch.Tensor, input: torch.Tensor) -> bool:
    """Whether the short way made the call, which must then have been right."""
    output.zero_()
    result = comm.prepared.again(output, input)
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
        assert len(comm.prepared) == 4


def more_shapes_than_are_kept(way: str) -> None:
    with communicator(way) as comm:
        for columns in [*range(1, 1101), *range(1, 40)]:
            source = torch.full((comm.world_size, columns), float(columns))
            output = torch.empty_like(source)
            a2a.all_to_all_single(output, source, group=comm)
            assert torch.equal(output, source)
        assert 0 < len(comm.prepared) <= 1024


def a_table_outlives_its_communicator(way: str) -> None:
    comm = communicator(way)
    source, output = sent(comm), torch.empty(2 * comm.world_size, 3)
    a2a.all_to_all_single(output, source, group=comm)
    dist.barrier()
    short, gone = comm.prepared.again, weakref.ref(comm)
    comm.close()
    del comm
    gc.collect()
    assert gone() is None
    assert short(output, source) == prepared.UNKNOWN


def nothing_is_counted_too_often(way: str) -> None:
    with communicator(way) as comm:
        source, output = sent(comm), torch.empty(2 * comm.world_size, 3)
        a2a.all_to_all_single(output, source, group=comm)
        objects = (source, output, comm.prepared.again, "is_neg", sys.intern("is_conj"))
        before = [sys.getrefcount(x) for x in objects]
        for _ in range(1000):
            comm.prepared.again(output, source)
            comm.prepared.again(output, source.t())
            comm.prepared.again(output, source.to_sparse())
        after = [sys.getrefcount(x) for x in objects]
        assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True)), (before, after)


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
    ],
)
def test_a_call_made_before(world: World, check: object, way: str) -> None:
    world.run(check, way=way)


def test_wrong_arguments_are_unknown_calls() -> None:
    table = prepared.prepared("cpu")
    for arguments in ((), (torch.zeros(2),), (1, 2), (torch.zeros(2), None), (torch.zeros(2),) * 3):
        assert table.again(*arguments) == prepared.UNKNOWN


def test_a_torch_without_an_exchange_table_is_served_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    assert prepared.library.__wrapped__() is None
