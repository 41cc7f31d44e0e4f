"""all_reduce, reduce_scatter_tensor and all_gather_into_tensor on GPUs: any number of ranks on any number of them.

torchrun --nproc-per-node 4 -m pytest -m gpu tests/test_cuda_reductions.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from exchange_cases import assert_same_bits
from test_cuda_all_to_all import communicator
from test_reductions import AVG, FLOATS, INTEGERS, MAX, MIN, SUM, in_rank_order, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(2, 3, 4, 8),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

# Elements: none, fewer than ranks, of no vector's width, around packets, and many chunks.
COUNTS = [0, 1, 2, 3, 7, 24, 257, 4096, 16385, 70_001, 262_144, 1_200_003, 3 << 20]
MEMORIES = ["ordinary", "symmetric", "mixed", "unaligned"]


def memory(kind: str, count: int, dtype: torch.dtype, comm: Any) -> torch.Tensor:
    shared: torch.Tensor = comm.empty(count + 16, dtype=dtype)  # collective
    if kind == "symmetric" or (kind == "mixed" and comm.rank % 2 == 0):
        return shared[:count]
    start = 1 if kind == "unaligned" else 0
    return (shared if comm.rank % 3 == 2 and start else torch.empty_like(shared))[start : start + count]


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert_same_bits(got.cpu(), expected)


def reduced(comm: Any, count: int, dtype: torch.dtype, op: Any, kind: str) -> None:
    """An all-reduce, and reduce-scatters of the same, checked."""
    rank, ranks = comm.rank, comm.world_size
    terms = [values(r, count, dtype) for r in range(ranks)]
    tensor = memory(kind, count, dtype, comm).copy_(terms[rank])
    a2a.all_reduce(tensor, op, comm)
    same(tensor, in_rank_order(terms, op))
    share = -(-count // ranks)
    whole = [values(r, share * ranks, dtype) for r in range(ranks)]
    input = memory(kind, share * ranks, dtype, comm).copy_(whole[rank])
    output = torch.empty(share, dtype=dtype, device="cuda")
    a2a.reduce_scatter_tensor(output, input, op, comm)
    same(input, whole[rank])  # it is only read
    expected = in_rank_order([part[rank * share : (rank + 1) * share] for part in whole], op)
    same(output, expected)
    mine = input[rank * share : (rank + 1) * share]  # in place
    a2a.reduce_scatter_tensor(mine, input, op, comm)
    same(mine, expected)


def sizes(counts: list[int], dtype: torch.dtype, op: Any, kind: str) -> None:
    with communicator() as comm:
        for count in counts:
            reduced(comm, count, dtype, op, kind)
        comm.check()
        assert comm.stats()["handed_over"] == {}


@pytest.mark.parametrize("kind", MEMORIES)
def test_sums_are_taken_in_rank_order_at_every_size(world: Any, kind: str) -> None:
    world.run(sizes, counts=COUNTS, dtype=torch.bfloat16, op=SUM, kind=kind, deadline_s=600)
    world.run(sizes, counts=[5, 33_000, 1_300_001], dtype=torch.float32, op=SUM, kind=kind, deadline_s=300)


def every_op(dtype: torch.dtype) -> None:
    with communicator() as comm:
        for op in (SUM, MAX, MIN) if dtype in INTEGERS else (SUM, AVG, MAX, MIN):
            for count in (1, 301, 90_001, 2_600_002):
                reduced(comm, count, dtype, op, "mixed")
        comm.check()


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_every_dtype_and_op(world: Any, dtype: torch.dtype) -> None:
    world.run(every_op, dtype=dtype, deadline_s=600)


def gathered(kind: str) -> None:
    with communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        for dtype in (torch.uint8, torch.bfloat16, torch.complex64):
            for count in COUNTS:
                random = [torch.Generator().manual_seed(r * 1000 + count) for r in range(ranks)]
                num_bytes = count * dtype.itemsize
                parts = [
                    torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=g).view(dtype) for g in random
                ]
                output = memory(kind, count * ranks, dtype, comm)
                a2a.all_gather_into_tensor(output, parts[rank].cuda(), comm)
                same(output, torch.cat(parts))
                dist.barrier()
                output.view(torch.uint8).zero_()
                mine = output[rank * count : (rank + 1) * count].copy_(parts[rank])  # in place
                torch.cuda.synchronize()
                dist.barrier()  # zeros are not stored over what a peer has sent
                a2a.all_gather_into_tensor(output, mine, comm)
                same(output, torch.cat(parts))
        comm.check()
        assert comm.stats()["handed_over"] == {}


@pytest.mark.parametrize("kind", MEMORIES)
def test_gathered_bits_are_those_that_were_sent(world: Any, kind: str) -> None:
    world.run(gathered, kind=kind, deadline_s=300)


def with_nans(dtype: torch.dtype) -> None:
    with communicator() as comm:
        for op in (SUM, MAX, MIN):
            for count in (1000, 3 << 20):
                tensor = torch.arange(count, device="cuda").remainder(50).to(dtype) + comm.rank
                tensor[comm.rank] = float("nan")
                a2a.all_reduce(tensor, op, comm)
                assert bool(tensor[: comm.world_size].isnan().all())
                assert not bool(tensor[comm.world_size :].isnan().any())
        comm.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_nan_of_any_rank_is_the_result(world: Any, dtype: torch.dtype) -> None:
    world.run(with_nans, dtype=dtype)


def again(rounds: int, symmetric: bool) -> None:
    """New data in the same memory, by every algorithm, between all-to-alls, without a wait of the host."""
    with communicator() as comm:
        ranks, rank = comm.world_size, comm.rank
        total, errors = ranks * (ranks - 1) // 2, torch.zeros((), dtype=torch.int64, device="cuda")
        for count in (1000, 300_000, 2_500_000):
            whole = comm.empty(ranks * count) if symmetric else torch.empty(ranks * count, device="cuda")
            share = comm.empty(count) if symmetric else torch.empty(count, device="cuda")
            numbers = torch.arange(ranks, device="cuda").repeat_interleave(count).float()
            exchanged = torch.empty(ranks, device="cuda")
            for step in range(rounds):
                share.fill_(float(rank + step))
                a2a.all_reduce(share, group=comm)
                errors += (share != total + step * ranks).sum()
                share.fill_(float(rank + step))
                a2a.all_gather_into_tensor(whole, share, comm)
                errors += (whole != numbers + step).sum()
                a2a.all_to_all_single(exchanged, torch.full((ranks,), float(rank), device="cuda"), group=comm)
                a2a.reduce_scatter_tensor(share, whole, group=comm)
                errors += (share != float(rank + step) * ranks).sum()
        assert int(errors) == 0
        comm.check()


@pytest.mark.parametrize("symmetric", [False, True], ids=["ordinary", "symmetric"])
def test_calls_back_to_back_never_mix(world: Any, symmetric: bool) -> None:
    world.run(again, rounds=25, symmetric=symmetric, deadline_s=300)


def captured() -> None:
    with communicator() as comm:
        ranks, rank = comm.world_size, comm.rank
        small, large = torch.empty(1000, device="cuda"), comm.empty(3 << 20)
        whole, share = torch.empty(ranks, 700_000, device="cuda"), torch.empty(700_000, device="cuda")
        steps = torch.zeros((), device="cuda")

        def step() -> None:
            steps.add_(1)
            for tensor in (small, large, share):
                tensor.copy_((steps + rank).expand_as(tensor))
            a2a.all_reduce(small, group=comm)
            a2a.all_reduce(large, MAX, group=comm)
            a2a.all_gather_into_tensor(whole, share, comm)
            a2a.reduce_scatter_tensor(share, whole, group=comm)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
            step()
        for _ in range(20):
            graph.replay()
            assert bool((small == steps * ranks + ranks * (ranks - 1) // 2).all())
            assert bool((large == steps + ranks - 1).all())
            assert bool((whole == steps + torch.arange(ranks, device="cuda")[:, None]).all())
            assert bool((share == (steps + rank) * ranks).all())
        comm.check()
        assert int(steps) == 41


def test_a_cuda_graph_replays_it(world: Any) -> None:
    world.run(captured, deadline_s=120)


def many_at_once() -> None:
    """Asynchronous calls, and synchronous ones of another communicator on another stream."""
    with communicator() as one, communicator() as two:
        ranks, rank = one.world_size, one.rank
        total, side = ranks * (ranks - 1) // 2, torch.cuda.Stream()
        for count in (1000, 2_500_000):  # kernels are loaded before there is anything to wait for
            for comm in (one, two):
                a2a.all_reduce(torch.ones(count, device="cuda"), group=comm)
        torch.cuda.synchronize()
        tensors = [torch.empty(2_500_000 if call % 3 == 0 else 1000, device="cuda") for call in range(12)]
        others = [torch.empty_like(tensor) for tensor in tensors]
        torch.cuda.synchronize()
        under_way = []
        for call, (tensor, other) in enumerate(zip(tensors, others, strict=True)):
            tensor.fill_(float(rank + call))
            under_way.append(a2a.all_reduce(tensor, group=one, async_op=True))
            with torch.cuda.stream(side):
                other.fill_(float(rank - call))
                a2a.all_reduce(other, group=two)
        torch.cuda.current_stream().wait_stream(side)
        for call, (tensor, other, work) in enumerate(zip(tensors, others, under_way, strict=True)):
            assert work is not None
            work.wait()
            assert bool((tensor == total + call * ranks).all())
            assert bool((other == total - call * ranks).all())
        future = under_way[-1].get_future()
        assert future.wait()[0] is tensors[-1]
        one.check()
        two.check()


def test_asynchronous_calls_and_two_communicators_do_not_meet(world: Any) -> None:
    world.run(many_at_once, deadline_s=120)


def through_torch() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    total = ranks * (ranks - 1) // 2
    tensor = torch.full((5,), float(rank), device="cuda")
    with a2a.patched():
        dist.all_reduce(tensor)
        gathered = torch.empty(ranks * 5, device="cuda")
        dist.all_gather_into_tensor(gathered, torch.full((5,), float(rank), device="cuda"))
        scattered = torch.empty(5, device="cuda")
        dist.reduce_scatter_tensor(scattered, gathered)
    assert tensor.tolist() == [total] * 5
    assert gathered.tolist() == [float(r) for r in range(ranks) for _ in range(5)]
    assert scattered.tolist() == [float(rank * ranks)] * 5


def test_a_patched_program_reduces_cuda_tensors(world: Any) -> None:
    world.run(through_torch)


DIFFERENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another op": (lambda c: a2a.all_reduce(torch.ones(40_000, device="cuda"), MAX, c), "max"),
    "another count": (lambda c: a2a.all_reduce(torch.ones(40_001, device="cuda"), SUM, c), "40001 elements"),
    "a large count": (lambda c: a2a.all_reduce(torch.ones(4 << 20, device="cuda"), SUM, c), "4194304 elements"),
    "another dtype": (lambda c: a2a.all_reduce(torch.ones(40_000, device="cuda").half(), SUM, c), "float16"),
    "another collective": (
        lambda c: a2a.all_gather_into_tensor(
            torch.ones(40_000 * c.world_size, device="cuda"), torch.ones(40_000, device="cuda"), c
        ),
        "all_gather_into_tensor",
    ),
    "an all-to-all": (
        lambda c: a2a.all_to_all_single(
            torch.ones(c.world_size, device="cuda"), torch.ones(c.world_size, device="cuda"), group=c
        ),
        "all_to_all_single",
    ),
}


def different(name: str) -> None:
    call, says = DIFFERENT[name]
    with communicator() as comm:
        tensor = torch.ones(40_000, device="cuda")
        if comm.rank == 1:
            call(comm)
        else:
            a2a.all_reduce(tensor, group=comm)
        start = time.monotonic()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 10  # long before the deadline
        dist.barrier()
        with pytest.raises(a2a.MismatchError, match=says):
            comm.check()
        with pytest.raises(a2a.MismatchError):  # it stays broken
            a2a.all_reduce(tensor, group=comm)
        dist.barrier()


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_rank_that_asks_for_something_else_is_found_out_by_all(world: Any, name: str) -> None:
    world.run(different, name=name)


def refused() -> None:
    with communicator() as comm:
        if comm.rank == 1:
            with pytest.raises(TypeError, match="AVG"):
                a2a.all_reduce(torch.ones(3, device="cuda").int(), AVG, comm)
        else:
            a2a.all_reduce(torch.ones(3, device="cuda"), group=comm)
        torch.cuda.synchronize()
        dist.barrier()
        if comm.rank == 0:
            with pytest.raises(a2a.MismatchError, match="rank 1 refused"):
                comm.check()
        dist.barrier()


def test_a_mistake_of_one_rank_reaches_the_others(world: Any) -> None:
    world.run(refused)


def missing(count: int) -> None:
    with communicator(timeout=2.0) as comm:
        tensor = torch.ones(count, device="cuda")
        a2a.all_reduce(tensor, group=comm)
        torch.cuda.synchronize()
        last = comm.world_size - 1
        if comm.rank != last:
            a2a.all_reduce(tensor, group=comm)
            start = time.monotonic()
            torch.cuda.synchronize()  # the kernel ends by itself
            assert time.monotonic() - start < 20
            with pytest.raises(a2a.PeerTimeoutError, match=f"for rank {last}") as raised:
                comm.check()
            assert raised.value.peer == last
            assert int(comm.ok) == 0
        dist.barrier()
    with communicator() as comm:  # the context is as good as new
        reduced(comm, 300_000, torch.float32, SUM, "ordinary")


@pytest.mark.parametrize("count", [4, 4 << 20])
def test_a_missing_peer_is_named_and_the_context_lives_on(world: Any, count: int) -> None:
    world.run(missing, count=count, deadline_s=120)
