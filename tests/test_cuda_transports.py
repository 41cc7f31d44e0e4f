"""What every transport of GPU memory owes, on emulated GPUs: memory, agreement, lifetimes; not what kernels do with it."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import pytest

import a2a
from a2a.transport.cuda_base import CudaTransport
from a2a.transport.cuda_vmm import CudaVmm
from a2a.transport.nvshmem import Nvshmem
from fake_nvshmem import Machine, Rank, machine, run

assert machine  # the fixture
Kind = type[CudaTransport]
both = pytest.mark.parametrize("kind", [CudaVmm, Nvshmem], ids=lambda kind: kind.name)


def control_of(transport: CudaTransport, rank: int) -> int:
    """Where kernels would find a rank's control block."""
    place = transport.place
    if place.defines:
        rows = (ctypes.c_uint64 * (2 * len(place.bases))).from_address(place.base)
        return rows[2 * rank + 1]
    return place.base + rank * place.window


@both
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_reaches_every_others_memory(machine: Machine, kind: Kind, ranks: int) -> None:
    def program(rank: Rank) -> Any:
        transport = rank.open(*range(ranks), kind=kind)
        place = transport.place
        buffer = transport.alloc(1000, "a buffer")
        tensor = transport.tensor(buffer)
        assert tensor.tolist() == [0] * 1000
        assert buffer.pointer == tensor.data_ptr() == place.at(rank.rank, buffer.address)
        assert place.offset_of(tensor.data_ptr()) == buffer.address
        transport.agree("all there", "")
        for peer in range(ranks):
            ctypes.memset(place.at(peer, buffer.address) + rank.rank, 10 * rank.rank + peer + 1, 1)
        transport.agree("all written", "")
        assert tensor[:ranks].tolist() == [10 * source + rank.rank + 1 for source in range(ranks)]
        assert not any(tensor[ranks:])
        assert transport.stats()["transport"] == kind.name and transport.stats()["symmetric_bytes"] > 1000
        return buffer.address, transport.staging.address, place.window

    answers = run(machine, ranks, program)
    assert len(set(answers)) == 1, "an offset means the same to all"
    assert all(address % 4096 == 0 and address < answers[0][2] for address in answers[0][:2])


@both
def test_control_blocks_are_told_of_a_peer_that_closes(machine: Machine, kind: Kind) -> None:
    def program(rank: Rank) -> Any:
        one, two = rank.open(0, 1, kind=kind), rank.open(0, 1, kind=kind)
        one.agree("before", "")
        assert control_of(one, 0) != control_of(two, 0)
        closed = []
        for transport in (one, two):
            for peer in range(2):
                assert ctypes.string_at(control_of(transport, peer) + 8, 4) == b"\1\0\0\0", "ok"
        one.agree("looked", "")
        if rank.rank == 1:
            one.close()
            one.close()
            one.free()
        two.alloc(10, "the time to close")
        if rank.rank == 0:
            for transport in (one, two):
                words = ctypes.string_at(control_of(transport, 0) + 16, 16)
                closed.append([any(words[:8]), words[8:] == b"\1" * 8])
            one.close()
            with pytest.raises(a2a.A2AError, match="this communicator is closed"):
                one.raise_failure(0, "an op")
        two.agree("looked again", "")
        return closed

    assert run(machine, 2, program)[0] == [[False, True], [False, False]]


@both
def test_a_tensor_outlives_its_communicator(machine: Machine, kind: Kind) -> None:
    def program(rank: Rank) -> None:
        transport = rank.open(0, 1, kind=kind)
        tensor, ok = transport.tensor(transport.alloc(5000, "kept")), transport.ok_word()
        tensor.fill_(7)
        transport.close()
        transport.free()
        del transport
        other = rank.open(0, 1, kind=kind)
        other.tensor(other.alloc(5000, "others")).fill_(9)
        assert tensor.tolist() == [7] * 5000 and int(ok) == 1

    run(machine, 2, program)


@both
def test_memory_is_used_again_once_all_ranks_have_let_go(machine: Machine, kind: Kind) -> None:
    def program(rank: Rank) -> None:
        transport = rank.open(0, 1, kind=kind)
        counts = transport.alloc(100_000, "counts")
        tensor = transport.tensor(transport.alloc(100_000, "a tensor"))
        address = transport.place.offset_of(tensor.data_ptr())
        transport.release(counts)
        assert transport.alloc(100_000, "other counts").address == counts.address
        if rank.rank == 0:
            del tensor
        assert transport.alloc(100_000, "rank 1 has it still").address not in (counts.address, address)
        if rank.rank == 1:
            del tensor
        assert transport.alloc(100_000, "now").address == address
        shared = transport.shared("of an op", 5000)
        assert transport.shared("of an op", 4000) == shared != transport.shared("of an op", 6000)

    run(machine, 2, program)


@both
def test_ranks_agree_before_memory_is_made(machine: Machine, kind: Kind) -> None:
    def program(rank: Rank) -> None:
        transport = rank.open(0, 1, kind=kind)
        mine, theirs = 100 + rank.rank, 101 - rank.rank
        told = f"rank {rank.rank} asked for {mine} bytes; rank {1 - rank.rank} asked for {theirs} bytes. Symmetric memory is"
        before = len(rank.nvshmem.log), rank.driver.objects
        with pytest.raises(a2a.MismatchError, match=told):
            transport.alloc(mine, f"{mine} bytes")
        assert before == (len(rank.nvshmem.log), rank.driver.objects)

    run(machine, 2, program)


@both
def test_a_refused_call_and_an_absent_rank_are_told(machine: Machine, kind: Kind) -> None:
    def program(rank: Rank) -> None:
        transport = rank.open(0, 1, kind=kind, timeout_s=0.5)
        if rank.rank == 1:
            transport.refuse_alloc("ValueError: negative")
            return
        with pytest.raises(
            a2a.MismatchError, match="rank 1 refused its own call, so nothing was made: ValueError: negative"
        ):
            transport.alloc(100, "a tensor")
        with pytest.raises(a2a.PeerTimeoutError, match="for rank 1"):
            transport.alloc(100, "a tensor")
        transport.close()

    run(machine, 2, program)


def test_windows_are_unmapped_with_the_last_tensor(machine: Machine) -> None:
    def program(rank: Rank) -> Any:
        wiring = rank.wiring(0, 1)
        transport, exchange = CudaVmm.open(wiring), weakref.ref(wiring.exchange)
        tensor = transport.tensor(transport.alloc(5000, "kept"))
        transport.agree("all made", "")
        transport.close()
        transport.free()
        del transport, wiring
        gc.collect()
        assert exchange() is None, "a tensor keeps memory, not the group's store"
        before = len(rank.driver.mapped), rank.driver.objects, rank.driver.reserved
        tensor.fill_(1)
        del tensor
        gc.collect()
        return before, (len(rank.driver.mapped), rank.driver.objects, rank.driver.reserved)

    for before, after in run(machine, 2, program):
        assert before == (6, 6, 2 * (64 << 20)) and after == (0, 0, 0)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemImportFromShareableHandle", "cuMemMap"])
def test_a_call_of_the_driver_that_fails_is_told_to_all_and_undone(
    machine: Machine, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(rank: Rank) -> None:
        transport = rank.open(0, 1, kind=CudaVmm)
        before = len(rank.driver.mapped), rank.driver.objects
        if rank.rank == 1:
            rank.driver.refuse.add(call)
        with pytest.raises(a2a.UnsupportedError, match=r"cuda_vmm: 4096 bytes a rank for a tensor: rank \d: .*"):
            transport.alloc(100, "a tensor")
        assert len(rank.driver.mapped) == before[0]
        rank.driver.refuse.clear()
        tensor = transport.tensor(transport.alloc(100, "a tensor"))
        assert tensor.tolist() == [0] * 100

    class Text:
        def a2a_cuda_error(self, error: int) -> bytes:
            return b"out of memory"

    monkeypatch.setattr("a2a.kernels.cuda.lib", Text)
    run(machine, 2, program)
