"""What the CUDA driver says about devices, through ctypes: for questions that must be answered without torch or any package.

Asking starts the driver in this process (cuInit) but makes no context.
"""

from __future__ import annotations

import ctypes

ACCESS_SUPPORTED, NATIVE_ATOMICS = 2, 3  # CUdevice_P2PAttribute; of the ways between GPUs only NVLink has the latter
MEMORY_MANAGEMENT, FILE_DESCRIPTORS, FABRIC_HANDLES, MULTICAST = 102, 103, 128, 132  # CUdevice_attribute


class LibCuda:
    """The driver's library, opened and initialised.

    Raises:
        OSError: it is not here or finds no device; says which.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._check(self._library.cuInit(0), "cuInit")

    def uuids(self) -> list[str]:
        """The UUIDs of the devices that this process sees, in CUDA's order."""
        count, found = ctypes.c_int(), list[str]()
        self._check(self._library.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        get = getattr(
            self._library, "cuDeviceGetUuid_v2", self._library.cuDeviceGetUuid
        )  # that tells MIG instances apart
        for index in range(count.value):
            raw = (ctypes.c_ubyte * 16)()
            self._check(get(raw, self._device(index)), "cuDeviceGetUuid")
            digits = bytes(raw).hex()
            found.append("-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))))
        return found

    def attribute(self, attribute: int, index: int) -> int:
        """A CUdevice_attribute of a device."""
        value = ctypes.c_int()
        found = self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, self._device(index))
        self._check(found, "cuDeviceGetAttribute")
        return value.value

    def p2p(self, attribute: int, index: int, other: int) -> bool:
        """A CUdevice_P2PAttribute of the way from one device to another; False where there is no answer."""
        value = ctypes.c_int()
        ends = self._device(index), self._device(other)
        failed = self._library.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, *ends)
        return not failed and bool(value.value)

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._check(self._library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        return device

    def _check(self, error: int, what: str) -> None:
        if error:
            raise OSError(f"libcuda.so.1: {what}: CUDA error {error}")
