"""GPU memory without GPUs: threads are ranks, and NVSHMEM's heaps are shared memory that each maps at addresses of its own.

What NVSHMEM would do to a job that is out of step, hang or worse, is an error here: every collective call meets the other
PEs', which must have made the same one.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from a2a.comm import store_exchange
from a2a.transport import cuda_base, cuda_memory, cuda_vmm, nvshmem
from a2a.transport.base import Wiring
from a2a.transport.cuda_base import CudaTransport
from fake_vmm import FakeDriver

HEAP_BYTES = 64 << 20
HANG_S = 5.0
_local = threading.local()


class HungError(BaseException):
    """NVSHMEM would wait for good."""


class _Job:
    """PEs that were started together."""

    def __init__(self, size: int) -> None:
        self.size, self.heaps = size, [os.memfd_create("heap") for _ in range(size)]
        for heap in self.heaps:
            os.ftruncate(heap, HEAP_BYTES)
        self.calls: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def meet(self, pe: int, call: tuple[Any, ...]) -> None:
        """As all PEs together, with the same call."""
        self.calls[pe] = call
        try:
            self.barrier.wait(HANG_S)
            seen = list(self.calls)
            self.barrier.wait(HANG_S)
        except threading.BrokenBarrierError:
            raise HungError(f"PE {pe} waits for good in {call}") from None
        assert len(set(seen)) == 1, f"PEs make different calls: {seen}"


class Machine:
    """The jobs of one test, by unique id."""

    def __init__(self) -> None:
        self.jobs: dict[bytes, _Job] = {}
        self.maps: list[mmap.mmap] = []  # of all ranks, until all of their communicators are gone
        self.lock = threading.Lock()

    def job(self, uid: bytes, size: int) -> _Job:
        with self.lock:
            return self.jobs.setdefault(uid, _Job(size))


class _Struct:
    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(128)
        self.ptr = ctypes.addressof(self.buffer)


class FakeNvshmem:
    """The bindings, in one rank. `log`: the calls that were made, less those that only ask."""

    uniqueid_dtype = SimpleNamespace(itemsize=128)
    Flags = SimpleNamespace(INIT_WITH_UNIQUEID=8)
    uniqueid = InitAttr = _Struct

    def __init__(self, machine: Machine) -> None:
        self.machine, self.log, self.bases = machine, list[tuple[Any, ...]](), list[int]()
        self.status, self.pe, self.size, self.started_as = 0, -1, 0, 2
        self.refuse_init = self.no_memory = self.shifted = False
        self.unreachable: set[int] = set()
        self._blocks: dict[int, int] = {16: 48}  # offset -> bytes; something of NVSHMEM's own

    # ---- start

    def init_status(self) -> int:
        return self.status

    def get_uniqueid(self, ptr: int) -> None:
        ctypes.memmove(ptr, secrets.token_bytes(128), 128)

    def set_attr_uniqueid_args(self, rank: int, size: int, uid: int, attributes: int) -> None:
        ctypes.memmove(attributes, (ctypes.c_uint64 * 3)(rank, size, uid), 24)

    def hostlib_init_attr(self, flags: int, attributes: int) -> None:
        assert flags == 8 and self.status == 0, "NVSHMEM starts once"
        if self.refuse_init:
            raise RuntimeError("Status code 7")
        rank, size, uid = (ctypes.c_uint64 * 3).from_address(attributes)
        self.start(ctypes.string_at(uid, 128), rank, size)

    def start(self, uid: bytes, pe: int, size: int) -> None:
        """Become a PE; by itself: as somebody else would have made it before."""
        self.log.append(("init", pe, size))
        self.job, self.pe, self.size = self.machine.job(uid, size), pe, size
        for other, heap in enumerate(self.job.heaps):
            # At no regular distance: behind memory that is too large for gaps left elsewhere, and that nobody touches.
            apart = mmap.mmap(-1, (1 + other * (2 + pe)) * HEAP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            maps = [apart, mmap.mmap(heap, HEAP_BYTES)]
            self.bases.append(ctypes.addressof(ctypes.c_char.from_buffer(maps[1])))
            self.machine.maps += maps
        self.status = self.started_as

    def my_pe(self) -> int:
        return self.pe

    def n_pes(self) -> int:
        return self.size

    # ---- memory

    def malloc(self, num_bytes: int) -> int:
        self.log.append(("malloc", num_bytes))
        self.job.meet(self.pe, ("malloc", num_bytes))
        if self.no_memory:
            return 0
        at = 16
        for start in sorted(self._blocks):
            if start - at >= num_bytes:
                break
            at = start + self._blocks[start] + 16
        at += 8192 * self.shifted
        assert at + num_bytes <= HEAP_BYTES, "the heap is full"
        self._blocks[at] = num_bytes
        ctypes.memset(self.bases[self.pe] + at, 0xA5, num_bytes)
        return self.bases[self.pe] + at

    def free(self, pointer: int) -> None:
        offset = pointer - self.bases[self.pe]
        self.log.append(("free", offset))
        self.job.meet(self.pe, ("free", offset))
        num_bytes = self._blocks.pop(offset)
        ctypes.memset(pointer, 0xEE, num_bytes)

    def ptr(self, address: int, pe: int) -> int:
        offset = address - self.bases[self.pe]
        if not 0 <= offset < HEAP_BYTES or pe in self.unreachable:
            return 0
        return self.bases[pe] + offset

    @property
    def used(self) -> int:
        """Bytes that a2a has."""
        return sum(self._blocks.values()) - 48


class _Torch:
    """torch, with a GPU whose memory is the host's."""

    free_bytes = 1 << 40

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*shape, **options)

    def tensor(self, data: Any, dtype: Any, device: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype)

    def as_tensor(self, view: Any, device: Any) -> torch.Tensor:
        pointer, (num_bytes,) = view.__cuda_array_interface__["data"][0], view.__cuda_array_interface__["shape"]
        buffer = type("Buffer", (ctypes.c_uint8 * num_bytes,), {}).from_address(pointer)
        buffer.view = view  # the tensor keeps it
        return torch.frombuffer(buffer, dtype=torch.uint8)

    @property
    def cuda(self) -> Any:
        return SimpleNamespace(
            synchronize=lambda device=None: None,
            device=lambda device: contextlib.nullcontext(),
            current_device=lambda: 0,
            get_device_properties=lambda device: SimpleNamespace(major=9, minor=0, total_memory=HEAP_BYTES),
            mem_get_info=lambda device: (self.free_bytes, 1 << 40),
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Ranks of `run` have a GPU and NVSHMEM."""
    for module in (cuda_base, cuda_memory, cuda_vmm, nvshmem):
        monkeypatch.setattr(module, "torch", _Torch())
    for name in ("STAGING", "REDUCTION", "NORM"):
        monkeypatch.setattr(cuda_base, f"_{name}_BYTES_A_RANK", 64 << 10)
    monkeypatch.setattr(cuda_base.cuda, "driver", lambda: _local.rank.driver)
    monkeypatch.setattr(nvshmem, "library", lambda: _local.rank.nvshmem)
    monkeypatch.setattr(nvshmem, "heap", lambda: _local.rank.heap)
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "none")
    made = Machine()
    yield made
    gc.collect()
    for job in made.jobs.values():
        for heap in job.heaps:
            os.close(heap)


class Rank:
    """One process's part."""

    def __init__(self, machine: Machine, rank: int, stores: dict[Any, Any]) -> None:
        self.rank, self.nvshmem, self.heap, self._stores = rank, FakeNvshmem(machine), nvshmem._Heap(), stores
        self.driver = FakeDriver()
        self._serials = collections.Counter[Any]()

    def wiring(self, *ranks: int, timeout_s: float = 10.0, device: int = 0) -> Wiring:
        """Of a group of these ranks, which has this one's number by its place."""
        store, me = self._stores.setdefault(ranks, dist.HashStore()), ranks.index(self.rank)
        exchange = store_exchange(store, me, len(ranks), timeout_s, f"a2a/{self._serials[ranks]}")
        self._serials[ranks] += 1
        topology: Any = SimpleNamespace(world_size=len(ranks))
        return Wiring(exchange, me, topology, timeout_s, torch.device("cuda", device))

    def open(self, *ranks: int, kind: type[CudaTransport] = nvshmem.Nvshmem, **options: Any) -> CudaTransport:
        return kind.open(self.wiring(*ranks, **options))


def run(machine: Machine, world_size: int, program: Callable[[Rank], Any]) -> list[Any]:
    """The program on every rank; what they return. Raises what the first rank raised."""
    results: list[Any] = [None] * world_size
    stores: dict[Any, Any] = {}

    def body(rank: int) -> None:
        _local.rank = Rank(machine, rank, stores)
        try:
            results[rank] = program(_local.rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
