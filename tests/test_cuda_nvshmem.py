"""What is the nvshmem transport's own, on GPUs. A rank takes GPU (rank mod their number); several PEs may share one.

Everything else that runs on GPU memory runs on this transport, too:

    A2A_TRANSPORT=nvshmem pytest -m gpu -k "1ranks or 2ranks" tests/test_cuda_all_to_all.py tests/test_cuda_reductions.py ...
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.kernels import cuda
from exchange_cases import even_splits
from pool import Pool, World
from test_cuda_all_to_all import exchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="no nvshmem4py here"),
]


@pytest.fixture(scope="module", params=[1, 2], ids=["1ranks", "2ranks"])
def own(request: pytest.FixtureRequest, pool: Pool | None) -> Iterator[World]:
    """Processes of their own: each has one set of PEs for good."""
    if pool is None:
        pytest.skip("starts its ranks itself, for each number of them")
    with Pool() as ranks:
        yield ranks.world(request.param)


def opened(group: Any = None, timeout: float = 20.0) -> a2a.Communicator:
    os.environ["A2A_TRANSPORT"] = "nvshmem"
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return a2a.communicator(group, device="cuda", timeout=timeout)


def copies_and_kernels() -> dict[str, Any]:
    with opened() as comm:
        rank, ranks = comm.rank, comm.world_size
        stats = comm.stats()
        assert stats["transport"] == "nvshmem", comm.why_no_transport
        place = comm.require_transport("test").place
        tensor = comm.empty(ranks, 1 << 20, dtype=torch.uint8)
        assert not tensor.any()
        offset = place.offset_of(tensor.data_ptr())
        source = torch.full((1 << 20,), rank + 1, dtype=torch.uint8, device="cuda")
        dist.barrier()
        for peer in range(ranks):
            to, stream = place.at(peer, offset) + (rank << 20), torch.cuda.current_stream().cuda_stream
            cuda.check(int(cuda.driver().cuMemcpyDtoDAsync(to, source.data_ptr(), 1 << 20, stream)[0]), "copy")
        torch.cuda.synchronize()
        dist.barrier()
        assert tensor.float().mean(1).tolist() == [peer + 1.0 for peer in range(ranks)]
        symmetric = comm.empty((ranks << 20) + 64, dtype=torch.uint8)
        for size in (1, 4099, 1 << 20):
            exchange(comm, even_splits(ranks, size))
            exchange(comm, even_splits(ranks, size), symmetric)
        sums = comm.empty(100_003, dtype=torch.float32).fill_(rank + 1)
        a2a.all_reduce(sums, group=comm)
        assert sums.unique().tolist() == [ranks * (ranks + 1) / 2]
        comm.check()
        assert int(comm.ok) == 1
        return {"window": place.window, "defines": place.defines, "bases": len(set(place.bases))}


def test_copies_and_kernels_reach_every_rank(own: World) -> None:
    for told in own.run(copies_and_kernels, deadline_s=180):
        assert told == {"window": told["window"], "defines": (("PEER_TABLE", 1),), "bases": own.size}
        assert told["window"] >= 1 << 30


def open_and_close() -> list[int]:
    free, rank = [], dist.get_rank()
    for _ in range(4):
        one, two = opened(), opened()
        kept = one.empty(1 << 20, dtype=torch.uint8).fill_(5)
        exchange(one, even_splits(one.world_size, 70_000))
        exchange(two, even_splits(two.world_size, 70_000))
        for comm in (one, two) if rank % 2 else (two, one):  # in different orders
            comm.close()
        assert int(kept.sum()) == 5 << 20
        del kept, one, two, comm
        free.append(torch.cuda.mem_get_info()[0])
    return free


def test_memory_of_closed_communicators_is_used_again(own: World) -> None:
    for free in own.run(open_and_close, deadline_s=180):
        assert free[3] > free[1] - (256 << 20), "the heap, which grows by 512 MiB, does not grow any more"


def subgroups() -> None:
    comm = opened()
    alone = dist.new_group([0])
    if comm.rank == 0 and comm.world_size > 1:
        with pytest.raises(a2a.UnsupportedError, match="one set of PEs for good"):
            opened(alone)
        output = torch.zeros(4, device="cuda")
        nccl = dist.new_group([0], backend="nccl", use_local_synchronization=True)
        a2a.all_to_all_single(output, torch.ones(4, device="cuda"), group=nccl)
        assert output.tolist() == [1.0] * 4, "torch serves it"
    dist.barrier()
    exchange(comm, even_splits(comm.world_size, 5000))
    comm.close()


def test_groups_of_some_pes_are_refused_and_served_by_torch(own: World) -> None:
    own.run(subgroups, deadline_s=120)


def dying() -> None:
    comm = opened(timeout=3.0)
    output = torch.zeros(comm.world_size, 1000, device="cuda")
    a2a.all_to_all_single(output, torch.ones_like(output), group=comm)
    torch.cuda.synchronize()
    dist.barrier()
    if comm.rank == 1:
        os._exit(3)
    start = time.monotonic()
    a2a.all_to_all_single(output, torch.ones_like(output), group=comm)
    torch.cuda.synchronize()
    with pytest.raises(a2a.PeerTimeoutError, match="for rank 1"):
        comm.check()
    comm.close()
    with pytest.raises(a2a.PeerTimeoutError, match="for rank 1"):
        opened(timeout=3.0)
    assert time.monotonic() - start < 30


def test_a_dead_pe_keeps_nobody(own: World) -> None:
    if own.size == 1:
        pytest.skip("takes two ranks")
    own.run(dying, expect_dead={1}, deadline_s=120)
