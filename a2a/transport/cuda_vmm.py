"""GPU memory that the ranks of one host map for each other.

Decisions:

* **Our own exchange of the driver's memory objects** (`cuMemCreate`, exported as file descriptors, which travel over a Unix
  socket): it works with any allocator setting of torch, on groups that have done nothing yet, with one visible GPU a rank
  and with several ranks on one GPU. No multicast object is ever made.
* **One window of address space a rank**, as large as the largest GPU's memory, all windows in one row. So a kernel needs
  only two numbers to reach any peer's copy. Address space costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from a2a.errors import UnsupportedError
from a2a.kernels import cuda
from a2a.topology import Topology
from a2a.transport.base import Wiring
from a2a.transport.cuda_base import CudaTransport
from a2a.transport.cuda_memory import Agree, Block, Memory
from a2a.transport.fd_link import FdLink


class _Windows(Memory):
    """The address space of all ranks' symmetric memory, as mapped in this process."""

    def __init__(
        self, device: torch.device, rank: int, world_size: int, agree: Agree, link: FdLink, window: int
    ) -> None:
        super().__init__(CudaVmm.name, device, rank, world_size, agree)
        self.window, self._link = window, link
        self._driver = d = cuda.driver()
        self._posix = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = d.CUmemAllocationProp()
        self._properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        self._properties.requestedHandleTypes = self._posix
        self._access = d.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = self._properties.location.type, device.index
        self._access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        recommended = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granularity: int = self._do("cuMemGetAllocationGranularity", self._properties, recommended)
        self._base = int(self._do("cuMemAddressReserve", window * world_size, self._granularity, d.CUdeviceptr(0), 0))
        self._mapped: dict[int, tuple[int, Any]] = {}  # pointer -> bytes, memory object

    def _do(self, name: str, *arguments: Any) -> Any:
        """A call of the driver's; its values, or UnsupportedError."""
        result = getattr(self._driver, name)(*arguments)
        cuda.check(int(result[0]), name)
        return result[1] if len(result) == 2 else result[1:]

    def pointer(self, rank: int, offset: int) -> int:
        return self._base + rank * self.window + offset

    def find(self, control: int) -> tuple[int, tuple[tuple[str, int], ...]]:
        assert control == 0, "the control block is the first"
        return self._base, ()

    def add(self, num_bytes: int, what: str) -> int:
        size = -(-max(num_bytes, 1) // self._granularity) * self._granularity
        offset = 0
        for start in sorted(self.blocks):
            if start - offset >= size:
                break
            offset = start + self.blocks[start].num_bytes
        if offset + size > self.window:
            raise UnsupportedError(f"{self.name}: {what}: no room in a window of {self.window} bytes")
        self._share(offset, size, what)
        self.blocks[offset] = Block(size, weakref.ref(self))
        return offset

    def _share(self, offset: int, num_bytes: int, what: str) -> None:
        """Make a memory object on every rank and map all of them here, zeroed. Collective."""
        problem, memory, fd = "", None, -1
        try:
            memory, fd = self._create(num_bytes)
        except UnsupportedError as error:
            problem = str(error)
        gathered = self._link.gather(fd)
        everyone = self._link.broadcast(gathered)
        try:
            if not problem and min(everyone) < 0:
                problem = f"rank {everyone.index(-1)} has no memory to share"
            if not problem:
                for peer, theirs in enumerate(everyone):
                    self._map(peer, offset, num_bytes, memory if peer == self.rank else self._adopt(theirs))
                self.clear(offset, num_bytes)
        except (UnsupportedError, RuntimeError) as error:
            problem = str(error)
        for own in {fd, *gathered, *everyone}:
            if own >= 0:
                os.close(own)
        try:
            self.all_find("mapped", problem, f"{num_bytes} bytes a rank for {what}")
        except UnsupportedError:
            for peer in range(self.world_size):
                self._unmap(peer, offset)
            raise

    def drop(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            del self.blocks[offset]
            for peer in range(self.world_size):
                self._unmap(peer, offset)

    def close(self) -> None:
        super().close()
        self._link.close()

    def _create(self, num_bytes: int) -> tuple[Any, int]:
        """A memory object on this device, and a descriptor of it."""
        memory = self._do("cuMemCreate", num_bytes, self._properties, 0)
        return memory, int(self._do("cuMemExportToShareableHandle", memory, self._posix, 0))

    def _adopt(self, fd: int) -> Any:
        """The memory object behind another rank's descriptor."""
        return self._do("cuMemImportFromShareableHandle", fd, self._posix)

    def _map(self, rank: int, offset: int, num_bytes: int, memory: Any) -> None:
        pointer = self.pointer(rank, offset)
        self._do("cuMemMap", pointer, num_bytes, 0, memory, 0)
        self._mapped[pointer] = (num_bytes, memory)
        self._do("cuMemSetAccess", pointer, num_bytes, [self._access], 1)

    def _unmap(self, rank: int, offset: int) -> None:
        pointer = self.pointer(rank, offset)
        if pointer in self._mapped:
            num_bytes, memory = self._mapped.pop(pointer)
            self._do("cuMemUnmap", pointer, num_bytes)
            self._do("cuMemRelease", memory)

    def __del__(self) -> None:  # after the last tensor and the transport
        if not sys.is_finalizing() and self.pid == os.getpid() and hasattr(self, "_mapped"):
            with contextlib.suppress(Exception):
                torch.cuda.synchronize(self.device)
                for pointer in list(self._mapped):
                    num_bytes, memory = self._mapped.pop(pointer)
                    self._do("cuMemUnmap", pointer, num_bytes)
                    self._do("cuMemRelease", memory)
                self._do("cuMemAddressFree", self._base, self.window * self.world_size)


class CudaVmm(CudaTransport):
    """See the module's docstring."""

    name: ClassVar[str] = "cuda_vmm"

    @classmethod
    def unavailable(cls, topology: Topology, device_type: str) -> str | None:
        domain = topology.domains[0]
        if device_type == "cuda" and topology.is_single_domain and domain.rack and not domain.host:
            return "the group spans several hosts of one NVLink fabric; so far memory is exchanged within one host only"
        return super().unavailable(topology, device_type)

    def _open(self, wiring: Wiring) -> Memory:
        facts = torch.cuda.get_device_properties(self.device)
        largest = max(int(p) for p in self.agree("start", str(facts.total_memory)))
        link = FdLink(wiring.exchange, self.rank, self.world_size, self.timeout_s, self.name)
        window, problem, windows = 1 << (largest - 1).bit_length(), "", None
        try:
            windows = _Windows(self.device, self.rank, self.world_size, self.agree, link, window)
        except UnsupportedError as error:
            problem = str(error)
        for peer, theirs in enumerate(self.agree("reserve", problem)):
            if theirs:
                raise UnsupportedError(f"{self.name}: address space: rank {peer}: {theirs}")
        assert windows is not None
        return windows


__all__ = ["CudaVmm"]
