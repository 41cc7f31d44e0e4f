"""Calls that were made before, and other threads: which run, make calls of their own, or close the communicator."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
import torch.distributed as dist

import a2a
from deadlines import soon
from pool import World
from test_prepared import WAYS, communicator
from test_prepared_reductions import KINDS, Call


def python_runs_meanwhile(kind: str) -> None:
    """Rank 1 comes when another thread of rank 0 says so, which it can while the first waits for rank 1."""
    store = dist.distributed_c10d._get_default_store()
    with a2a.communicator(timeout=10) as comm:
        call = Call(comm, kind, 48)
        call.make(*call.tensors())
        if comm.rank == 0:
            said = threading.Timer(0.05, store.set, (f"come {kind}", ""))
            said.start()
            assert call.again(*call.tensors())
            said.join()
        else:
            store.wait([f"come {kind}"])
            assert call.again(*call.tensors())
        store.delete_key(f"come {kind}") if comm.rank == 0 else None


def closed_by_another_thread(way: str, kind: str) -> None:
    """The call ends at once, with an error; and the memory that it was in stays until then."""
    with communicator(way) as comm:
        call = Call(comm, kind, 48)
        call.make(*call.tensors())
        dist.barrier()
        if comm.rank == 0:
            closes = threading.Timer(0.2, comm.close)
            closes.start()
            with soon(3.0), pytest.raises(a2a.A2AError, match="closed on rank 0"):
                call.make(*call.tensors())
            closes.join()
            with pytest.raises(a2a.A2AError, match="closed on rank 0"):
                call.make(*call.tensors())
        dist.barrier()
        if comm.rank == 1:
            with soon(3.0), pytest.raises(a2a.A2AError, match="rank 0"):
                call.make(*call.tensors())


def closed_by_a_signal_handler(way: str) -> None:
    """It runs inside the call, which it can't wait for: the memory stays, and the call ends after it."""
    with communicator(way) as comm:
        call = Call(comm, "all_reduce", 48)
        call.make(*call.tensors())
        dist.barrier()
        if comm.rank == 0:
            earlier = signal.signal(signal.SIGALRM, lambda *_: comm.close())
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            try:
                with soon(4.0), pytest.raises(a2a.A2AError, match="closed on rank 0"):
                    call.make(*call.tensors())
            finally:
                signal.signal(signal.SIGALRM, earlier)
        dist.barrier()


def two_threads(way: str, shared: bool) -> None:
    """They interleave in any order, on their own communicators or on one, and give the right sums."""
    first = communicator(way)
    comms = [first, first if shared else communicator(way)]
    wrong: list[object] = []

    def reduce_many(comm: a2a.Communicator) -> None:
        try:
            for round_ in range(300):
                count, add = (5, 0) if shared else (round_ % 7 + 1, round_)  # all calls alike: any may meet any
                tensor = torch.full((count,), float(comm.rank + add))
                a2a.all_reduce(tensor, group=comm)
                assert tensor.eq(sum(rank + add for rank in range(comm.world_size))).all()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=reduce_many, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert first.stats()["collectives"] == (600 if shared else 300)
    for comm in set(comms):
        comm.close()


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_run_while_a_call_waits(world: World, kind: str) -> None:
    world.run(python_runs_meanwhile, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_ends_when_another_thread_closes_its_communicator(world: World, kind: str) -> None:
    world.run(closed_by_another_thread, way="native", kind=kind)


def test_a_call_ends_when_a_signal_handler_closes_its_communicator(world: World) -> None:
    world.run(closed_by_a_signal_handler, way="native")


@pytest.mark.parametrize("shared", [False, True], ids=["a communicator each", "one communicator"])
@pytest.mark.parametrize("way", WAYS)
def test_two_threads(world: World, way: str, shared: bool) -> None:
    world.run(two_threads, way=way, shared=shared)
