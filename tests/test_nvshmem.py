"""The nvshmem transport on an emulated NVSHMEM: who may share a heap, and that no rank is alone in a collective call."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import a2a
from a2a import transport as transports
from a2a.config import config, nvshmem_heap_grows
from a2a.transport import nvshmem
from a2a.transport.cpu_shm import CpuShm
from a2a.transport.cuda_vmm import CudaVmm
from fake_nvshmem import Machine, Rank, machine, run

assert machine  # the fixture

# ---------------------------------------------------------------- one heap


def bytes_at(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def test_heaps_may_lie_anywhere(machine: Machine) -> None:
    def program(rank: Rank) -> Any:
        transport = rank.open(0, 1, 2)
        buffer = transport.alloc(1000, "a buffer")
        assert transport.tensor(buffer).tolist() == [0] * 1000, "zeroed, though NVSHMEM does not"
        assert list(transport.place.bases) == rank.nvshmem.bases
        return buffer.address, transport.place.window, transport.place.bases

    answers = run(machine, 3, program)
    assert len({answer[:2] for answer in answers}) == 1 and answers[0][0] % 4096 == 0
    assert answers[0][1] == 64 << 20, "the heap, from its beginning to its end"
    assert len({b - a for _, _, bases in answers for a, b in itertools.pairwise(bases)}) > 1, "no stride serves"


def test_kernels_find_memory_and_control_blocks_in_a_table(machine: Machine) -> None:
    def program(rank: Rank) -> Any:
        one, two = rank.open(0, 1), rank.open(0, 1)
        controls = []
        for transport in (one, two):
            place = transport.place
            assert place.defines == (("PEER_TABLE", 1),)
            rows = list((ctypes.c_uint64 * 4).from_address(place.base))
            assert tuple(rows[::2]) == place.bases
            offsets = {control - base for base, control in zip(rows[::2], rows[1::2], strict=True)}
            assert len(offsets) == 1
            controls.append(offsets.pop())
            transport.agree("before", "")
            assert bytes_at(rows[2 * (1 - rank.rank) + 1] + 8, 4) == b"\1\0\0\0", "the peer's `ok`"
            assert int(transport.ok_word()) == 1
        assert controls[0] != controls[1]
        return [call for call in rank.nvshmem.log if call[0] == "init"]

    assert run(machine, 2, program) == [[("init", 0, 2)], [("init", 1, 2)]]


# ---------------------------------------------------------------- who may


def test_only_all_pes_together_make_communicators(machine: Machine) -> None:
    def program(rank: Rank) -> Any:
        me = rank.rank
        if me < 2:
            first = rank.open(0, 1)
        refused = []
        for ranks in ((0, 1, 2), (0, 2), (0,), (2, 1)):
            if me in ranks:
                with pytest.raises(a2a.UnsupportedError, match="one set of PEs for good") as raised:
                    rank.open(*ranks)
                refused.append(str(raised.value))
        if me == 2:
            rank.open(2)
            return refused
        first.alloc(10, "as before")
        other = rank.open(1, 0)
        assert other.rank == 1 - me and other.place.bases == first.place.bases[::-1]
        return refused

    answers = run(machine, 3, program)
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert "rank 0 is PE 0 of 2, rank 1 is PE 1 of 2, rank 2 has none" in answers[0][0]
    assert "leave A2A_TRANSPORT unset" in answers[0][0]
    assert len(answers[0]) == 3


def test_two_jobs_with_fitting_numbers_are_told_apart(machine: Machine) -> None:
    def program(rank: Rank) -> None:
        rank.open(*((0, 1) if rank.rank < 2 else (2, 3)))
        if rank.rank in (0, 3):  # PE 0 of one and PE 1 of the other
            with pytest.raises(a2a.UnsupportedError, match="one set of PEs"):
                rank.open(0, 3)

    run(machine, 4, program)


def test_somebody_elses_pes_are_taken_as_they_are(machine: Machine) -> None:
    def program(rank: Rank) -> Any:
        rank.nvshmem.start(b"theirs", (rank.rank + 1) % 3, 3)
        transport = rank.open(0, 1, 2)
        pes = [rank.nvshmem.bases.index(base) for base in transport.place.bases]
        return pes, [call for call in rank.nvshmem.log if call[0] == "init"]

    assert run(machine, 3, program) == [([1, 2, 0], [("init", (r + 1) % 3, 3)]) for r in range(3)]


def test_two_jobs_of_somebody_elses_are_told_apart_by_their_numbers(machine: Machine) -> None:
    def program(rank: Rank) -> None:
        rank.nvshmem.start(b"one" if rank.rank < 2 else b"two", rank.rank % 2, 2)
        if rank.rank in (0, 2):
            with pytest.raises(a2a.UnsupportedError, match="rank 0 is PE 0 of 2, rank 1 is PE 0 of 2"):
                rank.open(0, 2)

    run(machine, 4, program)


def test_another_device_is_refused_on_all_ranks(machine: Machine) -> None:
    def program(rank: Rank) -> str:
        rank.open(0, 1, device=rank.rank)
        with pytest.raises(a2a.UnsupportedError) as raised:
            rank.open(0, 1, device=0)
        return str(raised.value)

    told = run(machine, 2, program)
    assert (
        told[0]
        == told[1]
        == "nvshmem: rank 1: NVSHMEM's memory is on cuda:1 in this process, the communicator's on cuda:0"
    )


def test_nvshmem_that_was_finalised_is_not_started_again(machine: Machine) -> None:
    def program(rank: Rank) -> None:
        rank.open(0)
        rank.nvshmem.status = 0
        with pytest.raises(a2a.UnsupportedError, match="finalised in this process, and starts once"):
            rank.open(0)

    run(machine, 1, program)


# ---------------------------------------------------------------- lifetimes


def test_memory_comes_back_whatever_the_order_of_closing(machine: Machine) -> None:
    def program(rank: Rank) -> Any:
        used = []
        for _ in range(3):
            comms = [rank.open(0, 1) for _ in range(2)]
            used.append(rank.nvshmem.used)
            for transport in comms[:: 1 - 2 * rank.rank]:
                transport.close()
                transport.free()
            del comms, transport
        assert used[1] == used[2] < 3 * used[0] // 2 + (1 << 20)
        return [call for call in rank.nvshmem.log if call[0] == "free"]

    one, other = run(machine, 2, program)
    assert one == other and len(one) >= 6


def test_a_tensor_keeps_its_memory_until_it_is_gone_on_all_ranks(machine: Machine) -> None:
    def program(rank: Rank) -> Any:
        transport, other = rank.open(0, 1), rank.open(0, 1)
        tensor = transport.tensor(transport.alloc(5000, "kept"))
        ok = transport.ok_word()
        tensor.fill_(7)
        transport.close()
        transport.free()
        del transport
        other.alloc(1, "a chance to free")
        assert tensor.tolist() == [7] * 5000 and int(ok) == 1
        if rank.rank == 0:
            del tensor, ok
        other.alloc(2, "rank 1 has it still")
        freed = [call for call in rank.nvshmem.log if call[0] == "free"]
        if rank.rank == 1:
            assert tensor.tolist() == [7] * 5000 and int(ok) == 1
            del tensor, ok
        other.alloc(3, "now")
        return len(freed), len([call for call in rank.nvshmem.log if call[0] == "free"])

    assert run(machine, 2, program) == [(1, 3)] * 2  # the staging; then the tensor's and the control block


# ---------------------------------------------------------------- failures


def test_a_rank_that_does_not_come_leaves_nobody_in_nvshmem(machine: Machine) -> None:
    def program(rank: Rank) -> Any:
        transport = rank.open(0, 1, timeout_s=0.5)
        tensor = transport.tensor(transport.alloc(100, "a tensor"))
        before = len(rank.nvshmem.log)
        if rank.rank == 1:
            return None  # it has died
        del tensor
        with pytest.raises(a2a.PeerTimeoutError, match="for rank 1"):
            transport.alloc(200, "another")
        transport.close()
        transport.free()
        with pytest.raises(a2a.PeerTimeoutError, match="for rank 1"):
            rank.open(0, 1, timeout_s=0.5)
        assert len(rank.nvshmem.log) == before
        return rank.nvshmem.used

    assert run(machine, 2, program)[0] > 0  # it stays


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("no_memory", True, "rank 1: nvshmem_malloc gave nothing; raise NVSHMEM_MAX_MEMORY_PER_GPU"),
        ("shifted", True, "it lies at different offsets"),
        ("unreachable", {0}, r"rank 1: UnsupportedError: nvshmem_ptr has no address for rank 0 \(PE 0\)"),
    ],
)
def test_a_failing_call_is_named_and_the_heap_is_left_alone(
    machine: Machine, attribute: str, value: Any, says: str
) -> None:
    def program(rank: Rank) -> None:
        transport = rank.open(0, 1)
        counts = transport.alloc(50, "counts")
        if rank.rank == 1:
            setattr(rank.nvshmem, attribute, value)
        with pytest.raises(a2a.UnsupportedError, match=f"8192 bytes a rank for a buffer: {says}"):
            transport.alloc(100, "a buffer")
        if rank.rank == 1:
            setattr(rank.nvshmem, attribute, type(value)())
        transport.release(counts)
        before = len(rank.nvshmem.log)
        for make in (lambda: transport.alloc(100, "a buffer"), lambda: rank.open(0, 1)):
            with pytest.raises(
                a2a.UnsupportedError, match=r"out of step since a buffer .* start all ranks' processes anew"
            ):
                make()
        assert len(rank.nvshmem.log) == before

    run(machine, 2, program)


def test_no_memory_on_one_gpu_is_told_before_nvshmem_is_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(rank: Rank) -> None:
        transport = rank.open(0, 1)
        before = len(rank.nvshmem.log)
        transport.agree("all there", "")
        monkeypatch.setattr(nvshmem.torch, "free_bytes", (512 << 20) - 1)
        with pytest.raises(
            a2a.UnsupportedError, match=r"rank 0: cuda:0 has 536870911 bytes free, .* grow by 536870912"
        ):
            transport.alloc(100, "a buffer")
        assert len(rank.nvshmem.log) == before
        transport.agree("all told", "")
        monkeypatch.setattr(nvshmem.torch, "free_bytes", 512 << 20)
        transport.alloc(100, "a buffer")  # nothing is lost

    run(machine, 2, program)


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("refuse_init", True, "nvshmemx_hostlib_init_attr failed: Status code 7"),
        ("started_as", 1, "nvshmemx_init_status is 1"),
    ],
)
def test_a_start_that_fails_is_told_on_all_ranks(machine: Machine, attribute: str, value: Any, says: str) -> None:
    def program(rank: Rank) -> None:
        if rank.rank == 1:
            setattr(rank.nvshmem, attribute, value)
        with pytest.raises(a2a.UnsupportedError, match=f"rank 1: .*{says}.*NVSHMEM_DEBUG=INFO"):
            rank.open(0, 1)
        with pytest.raises(a2a.UnsupportedError, match="NVSHMEM did not start"):
            rank.open(0, 1)

    run(machine, 2, program)


# ---------------------------------------------------------------- when it is taken

TOPOLOGY: Any = SimpleNamespace(is_single_domain=True, domains=[SimpleNamespace(host="here", rack="")])


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in (nvshmem.Nvshmem, CudaVmm, CpuShm):
        monkeypatch.setattr(transport, "unavailable", classmethod(lambda cls, topology, device_type: None))


def taken(device_type: str) -> list[str]:
    known = [t for t in transports.candidates() if t.device_type == device_type]
    return [t.name for t in known if transports.why_not(t, TOPOLOGY, device_type) is None]


@pytest.mark.usefixtures("usable")
def test_it_is_taken_where_it_is_named_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A2A_TRANSPORT", raising=False)
    assert taken("cuda") == ["cuda_vmm"]
    assert "A2A_TRANSPORT=nvshmem names it" in str(transports.why_not(nvshmem.Nvshmem, TOPOLOGY, "cuda"))
    monkeypatch.setenv("A2A_TRANSPORT", "nvshmem")
    assert taken("cuda") == ["nvshmem"] and taken("cpu") == ["cpu_shm"]
    assert transports.why_not(CudaVmm, TOPOLOGY, "cuda") == "A2A_TRANSPORT=nvshmem names another"
    monkeypatch.setenv("A2A_TRANSPORT", "cuda_vmm")
    assert taken("cuda") == ["cuda_vmm"]
    monkeypatch.setenv("A2A_TRANSPORT", "nvshem")
    with pytest.raises(ValueError, match=r"A2A_TRANSPORT='nvshem'.* cpu_shm, cuda_vmm, nvshmem"):
        taken("cuda")


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem.CudaTransport, "unavailable", classmethod(lambda cls, topology, device_type: None))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    reason = nvshmem.Nvshmem.unavailable(TOPOLOGY, "cuda")
    assert reason is not None and "pip install 'a2a[cu13]'" in reason


def test_the_environment_is_prepared_and_never_overruled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ibrc")
    run(machine, 1, lambda rank: rank.open(0))
    assert (os.environ["NVSHMEM_DISABLE_NVLS"], os.environ["NVSHMEM_REMOTE_TRANSPORT"]) == ("1", "ibrc")
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS")
    monkeypatch.delenv("NVSHMEM_REMOTE_TRANSPORT")
    run(machine, 1, lambda rank: rank.open(0))
    assert (os.environ["NVSHMEM_DISABLE_NVLS"], os.environ["NVSHMEM_REMOTE_TRANSPORT"]) == ("1", "none")
    assert config({"A2A_TRANSPORT": "nvshmem"}).transport == "nvshmem"
    assert nvshmem_heap_grows({}) and nvshmem_heap_grows({"NVSHMEM_DISABLE_CUDA_VMM": "0"})
    assert not nvshmem_heap_grows({"NVSHMEM_DISABLE_CUDA_VMM": "1"})
