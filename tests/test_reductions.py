"""all_reduce, reduce_scatter_tensor and all_gather_into_tensor: exact, in rank order, the same bits on every rank."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.kernels import cpu
from deadlines import soon
from exchange_cases import DTYPES, as_dtype, assert_same_bits, pattern
from failure_cases import NOTICED_S, finished
from pool import World

SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
# Elements: none, fewer than ranks, of no vector's width, around the switch between algorithms, and many units.
COUNTS = [0, 1, 2, 3, 7, 257, 16383, 16384, 16385, 32769, 70001, 1_200_003]
MEMORIES = ["ordinary", "symmetric", "mixed"]


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What a rank contributes: floats of very different size, so that another order shows; or any integers."""
    rng = np.random.default_rng([rank, count, salt])
    if not dtype.is_floating_point:
        return torch.from_numpy(rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)).view(dtype)
    spread = rng.standard_normal(count) * np.exp2(rng.integers(-12, 3, count))
    return torch.empty(count, dtype=dtype).copy_(torch.from_numpy(spread))


def in_rank_order(terms: list[torch.Tensor], op: Any) -> torch.Tensor:
    """The result, one NumPy operation after the other, rounded once."""
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    arrays = [term.to(wide).numpy() for term in terms]
    total = arrays[0]
    combine: Any = {MAX: np.maximum, MIN: np.minimum}.get(op, np.add)
    for array in arrays[1:]:
        total = combine(total, array)
    if op == AVG:
        total = total / total.dtype.type(len(arrays))
    return torch.empty(len(total), dtype=dtype).copy_(torch.from_numpy(total))


def memory(kind: str, count: int, dtype: torch.dtype, comm: Any) -> torch.Tensor:
    symmetric = kind == "symmetric" or (kind == "mixed" and comm.rank % 2 == 0)
    shared: torch.Tensor = comm.empty(count, dtype=dtype)  # collective
    return shared if symmetric else torch.empty(count, dtype=dtype)


def reduced(comm: Any, count: int, dtype: torch.dtype, op: Any, kind: str, async_op: bool = False) -> None:
    """An all-reduce, and a reduce-scatter of the same, checked."""
    rank, world_size = comm.rank, comm.world_size
    expected = in_rank_order([values(r, count, dtype) for r in range(world_size)], op)
    tensor = memory(kind, count, dtype, comm).copy_(values(rank, count, dtype))
    finished(a2a.all_reduce(tensor, op, comm, async_op))
    assert_same_bits(tensor, expected)
    whole = [values(r, count * world_size, dtype) for r in range(world_size)]
    input = memory(kind, count * world_size, dtype, comm).copy_(whole[rank])
    output = torch.empty(count, dtype=dtype)
    finished(a2a.reduce_scatter_tensor(output, input, op, comm, async_op))
    assert_same_bits(input, whole[rank])  # it is only read
    expected = in_rank_order([part[rank * count : (rank + 1) * count] for part in whole], op)
    assert_same_bits(output, expected)
    mine = input[rank * count : (rank + 1) * count]  # in place
    finished(a2a.reduce_scatter_tensor(mine, input, op, comm, async_op))
    assert_same_bits(mine, expected)


def sizes(counts: list[int], dtype: torch.dtype, op: Any, kind: str) -> None:
    with a2a.communicator() as comm:
        for count in counts:
            reduced(comm, count, dtype, op, kind)
        assert comm.stats()["handed_over"] == {}


def gathered(counts: list[int], dtype: torch.dtype, kind: str, async_op: bool = False) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with a2a.communicator() as comm:
        for count in counts:
            parts = [as_dtype(pattern(r, 0, count * dtype.itemsize), dtype, (count,)) for r in range(world_size)]
            expected = torch.cat(parts)
            output = memory(kind, count * world_size, dtype, comm)
            finished(a2a.all_gather_into_tensor(output, parts[rank], comm, async_op))
            assert_same_bits(output, expected)
            output.view(torch.uint8).fill_(0)
            mine = output[rank * count : (rank + 1) * count].copy_(parts[rank])  # in place
            dist.barrier()  # zeros are not stored over what a peer has sent
            finished(a2a.all_gather_into_tensor(output, mine, comm, async_op))
            assert_same_bits(output, expected)
        assert comm.stats()["handed_over"] == {}


def both_algorithms_agree(counts: list[int]) -> None:
    """One-shot and two-shot of the same tensors; the second comes with a request that is too large for the first."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with a2a.communicator() as comm:
        for dtype in FLOATS:
            for count in counts:
                small = values(rank, count, dtype)
                large = torch.cat([small, torch.ones((70 << 10) // dtype.itemsize, dtype=dtype)])
                a2a.all_reduce(small, group=comm)
                a2a.all_reduce(large, group=comm)
                assert_same_bits(small, large[:count])
        names = {plan.algorithm.name for plan in comm.plans.values()}
        assert names == {"one_shot", "two_shot"}
        assert world_size == comm.world_size


def with_isa(name: str) -> None:
    before = cpu.isa()
    assert cpu.lib().a2a_select_isa(name.encode())
    try:
        with a2a.communicator() as comm:
            for dtype in FLOATS + INTEGERS:
                for op in (SUM, MAX) if dtype in INTEGERS else (SUM, AVG, MAX, MIN):
                    reduced(comm, 1003, dtype, op, "ordinary")
    finally:
        cpu.lib().a2a_select_isa(before.encode())


def with_nans(dtype: torch.dtype, op: Any) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(300).to(dtype) + rank
    tensor[rank] = float("nan")
    tensor[100 + rank] = float("inf")
    a2a.all_reduce(tensor, op)
    assert tensor[:world_size].isnan().all()
    assert not tensor[world_size:].isnan().any()
    if op == MAX:
        assert tensor[100 : 100 + world_size].isinf().all()


def again(calls: int, jitter_ms: float, kind: str) -> None:
    """New data in the same memory, small and large, all three ops, without anything between the calls."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng, sizes_rng = random.Random(rank), random.Random(7)
    total = world_size * (world_size - 1) // 2
    with a2a.communicator() as comm:
        most = 40_000
        whole = memory(kind, most * world_size, torch.float32, comm)
        share = memory(kind, most, torch.float32, comm)
        for call in range(calls):
            count = sizes_rng.choice([1, 100, 5000, most])
            part, rest = share[:count], whole[: count * world_size]
            if jitter_ms and rng.random() < 0.5:
                time.sleep(rng.random() * jitter_ms / 1000)
            part.fill_(float(rank + call))
            a2a.all_reduce(part, group=comm)
            assert torch.equal(part, torch.full_like(part, float(total + call * world_size))), f"call {call}"
            part.fill_(float(rank + call))
            a2a.all_gather_into_tensor(rest, part, comm)
            part.fill_(-1)
            expected = (torch.arange(world_size) + call).repeat_interleave(count).float()
            assert torch.equal(rest, expected), f"call {call}"
            if jitter_ms and rng.random() < 0.5:
                time.sleep(rng.random() * jitter_ms / 1000)
            a2a.reduce_scatter_tensor(part, rest, group=comm)
            rest.fill_(-1)
            assert torch.equal(part, torch.full_like(part, float(rank + call) * world_size)), f"call {call}"


def many_at_once(calls: int) -> None:
    """Asynchronous calls, small and large, under way together and in order with synchronous ones and all-to-alls."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = world_size * (world_size - 1) // 2
    with a2a.communicator() as comm:
        under_way = []
        for call in range(calls):
            tensor = torch.full((30_000 if call % 3 == 0 else 11,), float(rank + call))
            under_way.append((tensor, call, a2a.all_reduce(tensor, group=comm, async_op=True)))
            if call % 5 == 4:
                received = torch.empty(world_size)
                a2a.all_to_all_single(received, torch.full((world_size,), float(rank)), group=comm)
                assert torch.equal(received, torch.arange(world_size).float())
        future = under_way[-1][2].get_future()
        for tensor, call, work in under_way:
            assert work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, float(total + call * world_size)))
        assert future.wait()[0] is under_way[-1][0]


def strided_and_other_shapes() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = torch.full((6, 8), -1.0)
    view = whole[:, ::2]
    view.copy_(torch.arange(24.0).reshape(6, 4) + rank)
    a2a.all_reduce(view)
    assert torch.equal(view, torch.arange(24.0).reshape(6, 4) * world_size + sum(range(world_size)))
    assert (whole[:, 1::2] == -1).all()
    output = torch.empty(world_size * 3, 2).t()
    a2a.all_gather_into_tensor(output, torch.full((2, 3), float(rank)).t())
    assert torch.equal(output.contiguous().view(-1), torch.arange(world_size).repeat_interleave(6).float())
    pieces = torch.arange(world_size * 6.0).reshape(2, 3, world_size)
    share = torch.empty(3, 2)
    a2a.reduce_scatter_tensor(share, pieces)
    assert torch.equal(share.view(-1), pieces.view(-1)[rank * 6 : rank * 6 + 6] * world_size)
    array = np.full(5, rank, dtype=np.int32)
    a2a.all_reduce(array, MAX)
    assert array.tolist() == [world_size - 1] * 5
    overlapping = torch.arange(float(world_size * 4))
    a2a.reduce_scatter_tensor(overlapping[1:5], overlapping.clone())
    before = torch.arange(float(world_size * 4))
    a2a.all_gather_into_tensor(before, before[3:7])  # what it sends is stored over
    assert torch.equal(before, torch.arange(3.0, 7.0).repeat(world_size))
    scalar = torch.tensor(float(rank))
    version = scalar._version
    a2a.all_reduce(scalar)
    assert scalar._version > version
    assert scalar.item() == sum(range(world_size))


def handed_over(case: str) -> dict[str, int]:
    rank = dist.get_rank()
    with a2a.communicator() as comm:
        if case == "band":
            tensor = torch.tensor([7, 5 + rank])
            a2a.all_reduce(tensor, dist.ReduceOp.BAND, comm)
            assert tensor.tolist() == [7, 4]
        elif case == "product":
            tensor = torch.tensor([2.0, 3.0])
            finished(a2a.all_reduce(tensor, dist.ReduceOp.PRODUCT, comm, async_op=True))
            assert tensor.tolist() == [4.0, 9.0]
        else:
            pair = torch.tensor([1 + 2j, 3j])
            a2a.all_reduce(pair, group=comm)
            assert pair.tolist() == [2 + 4j, 6j]
        return dict(comm.stats()["handed_over"])


MISTAKES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "average of integers": (lambda c: a2a.all_reduce(torch.ones(3).int(), AVG, c), TypeError, "AVG"),
    "no op": (lambda c: a2a.all_reduce(torch.ones(3), "sum", c), TypeError, "ReduceOp"),
    "dtypes": (lambda c: a2a.reduce_scatter_tensor(torch.ones(3), torch.ones(6).int(), SUM, c), TypeError, "type"),
    "scatter size": (lambda c: a2a.reduce_scatter_tensor(torch.ones(3), torch.ones(7), SUM, c), ValueError, "7 elem"),
    "gather size": (lambda c: a2a.all_gather_into_tensor(torch.ones(5), torch.ones(3), c), ValueError, "5 elements"),
    "expanded": (lambda c: a2a.all_reduce(torch.ones(1).expand(4), SUM, c), ValueError, "expanded"),
}


def a_mistake(name: str) -> None:
    call, error, says = MISTAKES[name]
    with a2a.communicator(timeout=20) as comm:
        if comm.rank == 1:
            with pytest.raises(error, match=says):
                call(comm)
        else:
            with pytest.raises(a2a.MismatchError, match="rank 1 refused"):
                a2a.all_reduce(torch.ones(3), group=comm)
        tensor = torch.ones(3)
        a2a.all_reduce(tensor, group=comm)  # nothing is broken
        assert tensor.tolist() == [comm.world_size] * 3


DIFFERENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another op": (lambda c: a2a.all_reduce(torch.ones(40_000), MAX, c), "max"),
    "another count": (lambda c: a2a.all_reduce(torch.ones(40_001), SUM, c), "40001 elements"),
    "a small count": (lambda c: a2a.all_reduce(torch.ones(4), SUM, c), "4 elements"),
    "another dtype": (lambda c: a2a.all_reduce(torch.ones(40_000).double(), SUM, c), "float64"),
    "another collective": (
        lambda c: a2a.all_gather_into_tensor(torch.ones(120_000), torch.ones(40_000), c),
        "all_gather_into_tensor",
    ),
    "an all-to-all": (lambda c: a2a.all_to_all_single(torch.ones(3), torch.ones(3), group=c), "all_to_all_single"),
}


def different(name: str, async_op: bool) -> None:
    call, says = DIFFERENT[name]
    comm = a2a.communicator(timeout=20)

    def asks() -> None:
        if comm.rank == 2:
            call(comm)
        else:
            finished(a2a.all_reduce(torch.ones(40_000), SUM, comm, async_op))

    with soon(NOTICED_S), pytest.raises(a2a.MismatchError, match=says):
        asks()
    with soon(1.0), pytest.raises(a2a.MismatchError, match=says):  # it stays broken
        a2a.all_reduce(torch.ones(4), group=comm)
    comm.close()


def absent(count: int, how: str) -> None:
    comm = a2a.communicator(timeout=1.5 if how == "late" else 60)
    a2a.all_reduce(torch.ones(count), group=comm)
    if comm.rank == 1:
        if how == "dead":
            raise SystemExit(0)
        dist.barrier()
        with pytest.raises(a2a.PeerTimeoutError, match="rank 1"):
            a2a.all_reduce(torch.ones(count), group=comm)
        return
    with soon(NOTICED_S + 1), pytest.raises(a2a.PeerTimeoutError) as caught:
        a2a.all_reduce(torch.ones(count), group=comm)
    assert caught.value.peer == 1
    if how == "late":
        dist.barrier()
    with pytest.raises(a2a.PeerTimeoutError, match="rank 1"):
        a2a.all_gather_into_tensor(torch.ones(2 * comm.world_size), torch.ones(2), comm)
    comm.close()


def killed_in_the_middle(kind: str, delay_s: float) -> None:
    """Rank 1 is killed while it reduces; until then every result is right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(1)  # the same sizes on all ranks
    comm = a2a.communicator(timeout=60)
    whole = memory(kind, 400_000, torch.float32, comm)
    if rank == 1:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def until_it_fails() -> None:
        while True:
            tensor = whole[: rng.choice([10, 20_000, 400_000])].fill_(float(rank))
            a2a.all_reduce(tensor, group=comm)
            assert torch.equal(tensor, torch.full_like(tensor, float(sum(range(world_size)))))

    with soon(delay_s + NOTICED_S), pytest.raises(a2a.PeerTimeoutError, match="rank 1 died") as caught:
        until_it_fails()
    assert caught.value.peer == 1
    assert int(comm.ok) == 0
    comm.close()


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("kind", MEMORIES)
def test_sums_are_taken_in_rank_order_at_every_size(world: World, kind: str) -> None:
    world.run(sizes, counts=COUNTS, dtype=torch.float32, op=SUM, kind=kind)
    world.run(sizes, counts=[5, 33_000, 300_001], dtype=torch.bfloat16, op=SUM, kind=kind)


@pytest.mark.ranks(2, 5)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_every_dtype_and_op(world: World, dtype: torch.dtype) -> None:
    for op in (SUM, MAX, MIN) if dtype in INTEGERS else (SUM, AVG, MAX, MIN):
        world.run(sizes, counts=[1, 300, 10_007, 90_001], dtype=dtype, op=op, kind="mixed")


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("kind", MEMORIES)
def test_gathered_bytes_are_those_that_were_sent(world: World, kind: str) -> None:
    world.run(gathered, counts=[0, 1, 3, 1021, 65_535, 65_536, 65_537, 1_300_001], dtype=torch.uint8, kind=kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_gathered(world: World, dtype: torch.dtype) -> None:
    world.run(gathered, counts=[16], dtype=dtype, kind="ordinary", async_op=True)


@pytest.mark.ranks(2, 3)
def test_both_algorithms_give_the_same_bits(world: World) -> None:
    world.run(both_algorithms_agree, counts=[1, 77, 8000])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(world: World, isa: str) -> None:
    before = cpu.isa()
    if not cpu.lib().a2a_select_isa(isa.encode()):
        pytest.skip(f"this processor or build has no {isa}")
    cpu.lib().a2a_select_isa(before.encode())
    world.run(with_isa, name=isa)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [SUM, MAX, MIN], ids=str)
def test_a_nan_of_any_rank_is_the_result(world: World, dtype: torch.dtype, op: Any) -> None:
    world.run(with_nans, dtype=dtype, op=op)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("jitter_ms", [0.0, 1.0], ids=["again", "jitter"])
def test_calls_follow_each_other_with_new_data(world: World, kind: str, jitter_ms: float) -> None:
    world.run(again, calls=100, jitter_ms=jitter_ms, kind=kind)


@pytest.mark.ranks(1, 2, 3)
def test_asynchronous_calls_run_in_order(world: World) -> None:
    world.run(many_at_once, calls=40)


@pytest.mark.ranks(2, 3)
def test_tensors_of_any_stride_and_shape(world: World) -> None:
    world.run(strided_and_other_shapes)


@pytest.mark.parametrize("case", ["band", "product", "complex"])
def test_what_no_algorithm_supports_goes_to_torch_and_is_counted(world: World, case: str) -> None:
    assert world.run(handed_over, case=case) == [{"all_reduce": 1}] * world.size


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_reaches_the_others_and_breaks_nothing(world: World, name: str) -> None:
    world.run(a_mistake, name=name)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_rank_that_asks_for_something_else_is_found_out_by_all(world: World, name: str, async_op: bool) -> None:
    world.run(different, name=name, async_op=async_op)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("count", [4, 500_000])
@pytest.mark.parametrize("how", ["dead", "late"])
def test_an_absent_rank_is_named(world: World, count: int, how: str) -> None:
    world.run(absent, expect_dead=(1,) if how == "dead" else (), count=count, how=how)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", MEMORIES)
def test_a_rank_that_is_killed_while_it_reduces_is_named(world: World, kind: str) -> None:
    for delay_s in (0.05, 0.2):
        world.run(killed_in_the_middle, expect_dead=(1,), kind=kind, delay_s=delay_s)
