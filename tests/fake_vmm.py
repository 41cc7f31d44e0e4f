"""The memory management of the CUDA driver, as cuda_vmm uses it, on memory of the host."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_NONE, _READ_WRITE = 0, 3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NO_RESERVE = 1, 2, 0x10, 0x20, 0x4000


class FakeDriver:
    """cuda-bindings' driver module, in one rank. `refuse`: names of calls that fail."""

    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUdeviceptr = int

    def __init__(self) -> None:
        self.refuse: set[str] = set()
        self.mapped: set[int] = set()  # pointers
        self.objects = 0  # made or imported, and not released
        self.reserved = 0  # bytes

    def CUmemAllocationProp(self) -> Any:  # noqa: N802  (the driver's name)
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name in self.refuse:
            return lambda *arguments: (2,)
        return object.__getattribute__(self, name)

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, 77

    def cuMemGetAllocationGranularity(self, properties: Any, which: int) -> tuple[int, int]:  # noqa: N802
        return 0, 4096

    def cuMemAddressReserve(self, size: int, *_: Any) -> tuple[int, int]:  # noqa: N802
        self.reserved += size
        return 0, _map(0, size, _NONE, _PRIVATE | _ANONYMOUS | _NO_RESERVE, -1)

    def cuMemAddressFree(self, pointer: int, size: int) -> tuple[int]:  # noqa: N802
        assert not self.mapped, "something is mapped there"
        self.reserved -= size
        return (_libc.munmap(ctypes.c_void_p(pointer), ctypes.c_size_t(size)),)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[int, int]:  # noqa: N802
        self.objects += 1
        memory = os.memfd_create("memory")
        os.write(memory, b"\xa5" * size)
        return 0, memory

    def cuMemExportToShareableHandle(self, memory: int, kind: int, flags: int) -> tuple[int, int]:  # noqa: N802
        return 0, os.dup(memory)

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple[int, int]:  # noqa: N802
        self.objects += 1
        return 0, os.dup(fd)

    def cuMemMap(self, pointer: int, size: int, offset: int, memory: int, flags: int) -> tuple[int]:  # noqa: N802
        assert pointer not in self.mapped and offset == 0
        assert _map(pointer, size, _READ_WRITE, _SHARED | _FIXED, memory) == pointer
        self.mapped.add(pointer)
        return (0,)

    def cuMemSetAccess(self, pointer: int, size: int, access: Any, count: int) -> tuple[int]:  # noqa: N802
        assert pointer in self.mapped
        return (0,)

    def cuMemUnmap(self, pointer: int, size: int) -> tuple[int]:  # noqa: N802
        self.mapped.remove(pointer)
        _map(pointer, size, _NONE, _PRIVATE | _ANONYMOUS | _NO_RESERVE | _FIXED, -1)
        return (0,)

    def cuMemRelease(self, memory: int) -> tuple[int]:  # noqa: N802
        self.objects -= 1
        os.close(memory)
        return (0,)


def _map(pointer: int, size: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(pointer, size, protection, flags, fd, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)
