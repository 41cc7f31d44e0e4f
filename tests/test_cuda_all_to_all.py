"""All-to-all on GPUs: any number of ranks on any number of them. Each rank takes GPU (rank mod the number of GPUs).

torchrun --nproc-per-node 4 -m pytest -m gpu tests/test_cuda_all_to_all.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from exchange_cases import even_splits, random_splits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(2, 3, 4, 8),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

SIZES = [
    1,
    3,
    16,
    47,
    48,
    49,
    2048,
    4099,
    65536,
    100_003,
    524_288,
    2 << 20,
    (2 << 20) + 1,
    (2 << 20) + 16,
    3 << 20,
    (16 << 20) + 5,
]


@contextmanager
def communicator(timeout: float = 20.0) -> Iterator[a2a.Communicator]:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with a2a.communicator(device="cuda", timeout=timeout) as comm:
        yield comm


def content(source: int, target: int, num_bytes: int, salt: int) -> torch.Tensor:
    """The bytes that `source` sends to `target`, made where they are needed."""
    start = (source * 61 + target * 17 + salt * 101) % 251
    numbers = torch.arange(num_bytes, dtype=torch.int64, device="cuda") * 7 + start
    return (numbers % 251).to(torch.uint8)


def exchange(comm: Any, splits: tuple[tuple[int, ...], ...], symmetric: torch.Tensor | None = None, shift: int = 0,
             salt: int = 0, async_op: bool = False) -> None:  # fmt: skip
    """An all-to-all of bytes with these splits, checked. `shift`: how far both tensors lie from an aligned address."""
    rank, ranks = comm.rank, range(comm.world_size)
    sizes = [splits[source][rank] for source in ranks]
    total = sum(sizes)
    into = torch.empty(total + shift, dtype=torch.uint8, device="cuda") if symmetric is None else symmetric
    output = into[shift : shift + total].fill_(255)
    pieces = [content(rank, target, splits[rank][target], salt) for target in ranks]
    source = torch.cat([torch.empty(shift, dtype=torch.uint8, device="cuda"), *pieces])[shift:]
    work = a2a.all_to_all_single(output, source, sizes, list(splits[rank]), group=comm, async_op=async_op)
    if work is not None:
        work.wait()
    expected = torch.cat([content(source, rank, size, salt) for source, size in enumerate(sizes)])
    assert torch.equal(output, expected), wrong(output, expected, sizes)


def wrong(got: torch.Tensor, expected: torch.Tensor, sizes: list[int]) -> str:
    at = (got != expected).nonzero().flatten()
    return f"{len(at)} of {len(got)} bytes wrong, first {int(at[0])}, last {int(at[-1])}; pieces {sizes}"


def every_size() -> None:
    with communicator() as comm:
        ranks = comm.world_size
        symmetric = comm.empty(ranks * SIZES[-1] + 64, dtype=torch.uint8)
        for salt, size in enumerate(SIZES):
            for into in (None, symmetric):
                for shift in (0, 4, 1):
                    exchange(comm, even_splits(ranks, size), into, shift, salt)
        comm.check()
        assert int(comm.ok) == 1


def test_every_size_and_alignment_arrives(world: Any) -> None:
    world.run(every_size, deadline_s=300)


def uneven() -> None:
    with communicator() as comm:
        ranks = comm.world_size
        symmetric = comm.empty(ranks * 4 << 20, dtype=torch.uint8)
        for seed in range(12):
            for most in (100, 100_000, 4 << 20):
                splits = random_splits(ranks, seed, most)
                mixed = symmetric if (seed + comm.rank) % 2 else None  # each rank its own kind of memory
                exchange(comm, splits, mixed, 0, seed, async_op=seed % 3 == 0)
        comm.check()


def test_uneven_splits_and_mixed_memory_arrive(world: Any) -> None:
    world.run(uneven, deadline_s=300)


def again(rounds: int) -> None:
    with communicator() as comm:
        ranks, rank = comm.world_size, comm.rank
        for size in (1000, 40_000, 700_000):
            output = comm.empty(ranks, size, dtype=torch.int32)
            ordinary = torch.empty_like(output)
            base = torch.arange(ranks, device="cuda", dtype=torch.int32)[:, None] * 7 + rank * 1000
            expected = torch.arange(ranks, device="cuda", dtype=torch.int32)[:, None] * 1000 + rank * 7
            errors = torch.zeros((), dtype=torch.int64, device="cuda")
            for step in range(rounds):
                target = output if step % 2 else ordinary
                a2a.all_to_all_single(target, (base + step).expand(ranks, size).contiguous(), group=comm)
                errors += (target != expected + step).sum()
            assert int(errors) == 0
        comm.check()


def test_calls_back_to_back_never_mix(world: Any) -> None:
    world.run(again, rounds=60, deadline_s=300)


def captured() -> None:
    with communicator() as comm:
        ranks, rank = comm.world_size, comm.rank
        source = torch.empty(ranks, 600_000, dtype=torch.int32, device="cuda")
        large, small = (
            comm.empty(ranks, 600_000, dtype=torch.int32),
            torch.empty(ranks, 64, dtype=torch.int32, device="cuda"),
        )
        part = source[:, :64].contiguous()
        steps = torch.zeros((), dtype=torch.int32, device="cuda")
        numbers = torch.arange(ranks, device="cuda", dtype=torch.int32)[:, None]

        def step() -> None:
            steps.add_(1)
            source.copy_((numbers + rank * 10 + steps * 100).expand_as(source))
            a2a.all_to_all_single(large, source, group=comm)
            part.copy_(source[:, :64])
            a2a.all_to_all_single(small, part, group=comm)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
            step()
        for _ in range(20):
            graph.replay()
            expected = numbers * 10 + rank + steps * 100
            assert bool((large == expected).all()) and bool((small == expected).all())
        comm.check()
        assert int(steps) == 41


def by_copy_engines() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A2A_ALGORITHM", "all_to_all=copy")
        with communicator() as comm:
            ranks, rank = comm.world_size, comm.rank
            numbers = torch.arange(ranks, device="cuda", dtype=torch.int32)[:, None]
            output = comm.empty(ranks, 300_000, dtype=torch.int32)
            source = torch.empty_like(output)
            steps = torch.zeros((), dtype=torch.int32, device="cuda")

            def step() -> None:
                steps.add_(1)
                source.copy_((numbers + rank * 10 + steps * 100).expand_as(source))
                a2a.all_to_all_single(output, source, group=comm)

            for _ in range(5):
                step()
                assert bool((output == numbers * 10 + rank + steps * 100).all())
            a2a.all_to_all_single(output, source, group=comm, async_op=True).wait()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step()
            for _ in range(10):
                graph.replay()
                assert bool((output == numbers * 10 + rank + steps * 100).all())
            comm.check()
            dist.barrier()
            with pytest.raises(ValueError, match=r"not of Communicator\.empty"):
                a2a.all_to_all_single(torch.empty_like(source, device="cuda"), source, group=comm)


def test_copy_engines_move_it(world: Any) -> None:
    world.run(by_copy_engines, deadline_s=120)


def test_a_cuda_graph_replays_it(world: Any) -> None:
    world.run(captured, deadline_s=120)


def two_at_once() -> None:
    with communicator() as one, communicator() as two:
        comms, streams = (one, two), (torch.cuda.Stream(), torch.cuda.Stream())
        sizes = (300_000, 900_000)
        numbers = torch.arange(one.world_size, device="cuda")[:, None]
        outputs = [torch.empty(one.world_size, size, dtype=torch.int64, device="cuda") for size in sizes]
        inputs = [torch.empty_like(output) for output in outputs]
        wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for step in range(20):
            # Ranks issue them in different orders, once everything is allocated: cudaMalloc waits for all kernels.
            for which in [0, 1] if step < 3 or (step + one.rank) % 2 else [1, 0]:
                with torch.cuda.stream(streams[which]):
                    inputs[which].copy_((numbers + 10 * one.rank + 100 * step).expand_as(inputs[which]))
                    a2a.all_to_all_single(outputs[which], inputs[which], group=comms[which])
                    wrong[which] += (outputs[which] != 10 * numbers + one.rank + 100 * step).sum()
            if step < 3:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        assert wrong.tolist() == [0, 0]
        one.check()
        two.check()


def test_two_communicators_on_two_streams_do_not_meet(world: Any) -> None:
    world.run(two_at_once, deadline_s=120)


def implicit() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    output = torch.empty(ranks, device="cuda")
    for _ in range(3):
        a2a.all_to_all_single(output, torch.arange(ranks, device="cuda") + 10.0 * rank)
        assert output.tolist() == [10.0 * source + rank for source in range(ranks)]
    pieces = [torch.full((source + 1,), -1.0, device="cuda") for source in range(ranks)]
    a2a.all_to_all(pieces, [torch.full((rank + 1,), float(rank), device="cuda") for _ in range(ranks)])
    assert [p.tolist() for p in pieces] == [[float(source)] * (source + 1) for source in range(ranks)]


def test_cuda_tensors_need_no_communicator_of_the_users(world: Any) -> None:
    world.run(implicit)


def missing() -> None:
    with communicator(timeout=2.0) as comm:
        output = torch.zeros(comm.world_size, 1000, device="cuda")
        a2a.all_to_all_single(output, torch.ones_like(output), group=comm)
        torch.cuda.synchronize()
        last = comm.world_size - 1
        if comm.rank != last:
            a2a.all_to_all_single(output, torch.ones_like(output), group=comm)
            start = time.monotonic()
            torch.cuda.synchronize()  # the kernel ends by itself
            assert time.monotonic() - start < 20
            with pytest.raises(a2a.PeerTimeoutError, match=f"for rank {last}") as raised:
                comm.check()
            assert raised.value.peer == last
            assert int(comm.ok) == 0
            with pytest.raises(a2a.PeerTimeoutError):
                a2a.all_to_all_single(output, torch.ones_like(output), group=comm)
        dist.barrier()
    with communicator() as comm:  # the context is as good as new
        exchange(comm, even_splits(comm.world_size, 5000))


def test_a_missing_peer_is_named_and_the_context_lives_on(world: Any) -> None:
    world.run(missing, deadline_s=120)


def different(which: str) -> None:
    with communicator() as comm:
        ranks, rank = comm.world_size, comm.rank
        rows = 3 if which == "sizes" and rank == 1 else 2
        dtype = torch.int32 if which == "dtypes" and rank == 1 else torch.float32
        tensor = torch.zeros(ranks * rows, dtype=dtype, device="cuda")
        if which == "refusal" and rank == 1:
            with pytest.raises(ValueError, match="does not divide equally"):
                a2a.all_to_all_single(tensor[1:], tensor[1:], group=comm)
        else:
            a2a.all_to_all_single(tensor.clone(), tensor, group=comm)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0 or which == "dtypes":
            with pytest.raises(a2a.MismatchError):
                comm.check()
        dist.barrier()


@pytest.mark.parametrize("which", ["dtypes", "sizes", "refusal"])
def test_ranks_that_ask_for_different_things_are_told(world: Any, which: str) -> None:
    world.run(different, which=which)


def closing() -> None:
    with communicator(timeout=30.0) as comm:
        output = torch.zeros(comm.world_size, 8, device="cuda")
        a2a.all_to_all_single(output, torch.ones_like(output), group=comm)
        if comm.rank == 1:
            comm.close()
        dist.barrier()
        if comm.rank == 0:
            a2a.all_to_all_single(output, torch.ones_like(output), group=comm)
            start = time.monotonic()
            torch.cuda.synchronize()
            assert time.monotonic() - start < 10
            with pytest.raises(a2a.PeerTimeoutError, match="rank 1 has closed"):
                comm.check()
        dist.barrier()


def test_a_peer_that_has_closed_is_noticed_at_once(world: Any) -> None:
    world.run(closing)


def lifetimes() -> None:
    with communicator() as comm:
        free = torch.cuda.mem_get_info()[0]
        for _ in range(8):
            tensor = comm.empty(64 << 20, dtype=torch.uint8)
            tensor.fill_(7)
            del tensor
        last = comm.empty(64 << 20, dtype=torch.uint8)
        assert free - torch.cuda.mem_get_info()[0] < comm.world_size * 3 * (64 << 20)  # ranks may share a GPU
        last.fill_(3)
        with pytest.raises(a2a.MismatchError, match="Symmetric memory is made by all ranks alike"):
            comm.empty(100 + comm.rank)
    assert int(last[-1]) == 3  # a tensor outlives its communicator
    dist.barrier()


def test_symmetric_memory_is_given_back_and_outlives_its_communicator(world: Any) -> None:
    world.run(lifetimes)
