"""What the NVIDIA driver's management library (NVML) says about the GPUs of this host, through ctypes.

NVML sees GPUs that CUDA_VISIBLE_DEVICES hides, so the ranks of a host can ask about each other's; it does not see those that
a container was not given. It is opened when somebody asks, needs no package and starts no CUDA. Old drivers lack functions
and virtual machines refuse some: every question may be answered by `NvmlError`, and no answer is taken for a no.

Layouts and numbers are those of the driver's public header nvml.h.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_char, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
READ, WRITE, NVLINK = 0, 1, 2  # what `p2p` may be asked for
OK = 0
P2P_WORDS = {
    0: "works",
    1: "not supported by the chipset",
    2: "not supported by these GPUs",
    3: "not supported between their PCIe root ports",
    4: "disabled by a registry key of the driver",
    5: "not supported",
    6: "unknown",
}
FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_COMPLETED = 3
_FUNCTION_NOT_FOUND = 13
_SPEED_FIELD = 164  # NVML_FI_DEV_NVLINK_GET_SPEED, in MB/s, of the link that the scope names
_MOST_LINKS = 36
_REMOTE = {0: "gpu", 2: "switch"}
_NOMINAL_GBps = (
    20.0,
    25.0,
    50.0,
    100.0,
)  # of a link, one way; what NVML calls its speed has the line code's share on top


class NvmlError(RuntimeError):
    """NVML is not there, or has no answer to a question; says why."""


@dataclass(frozen=True)
class NvLink:
    """An active link of a GPU."""

    remote: str  # "gpu", "switch" or "" where the driver does not say
    bus: str  # PCI address of the GPU at the other end
    GBps: float  # nominal, one way; 0: unknown


@dataclass(frozen=True)
class Fabric:
    """A GPU's place in an NVLink fabric. GPUs of one cluster and clique reach each other's memory, on whichever host."""

    state: str
    cluster: str = ""  # "" where the fabric does not leave its host
    clique: int = 0


class _Pci(Structure):
    _fields_ = (
        *(("legacy", c_char * 16), ("domain", c_uint), ("bus", c_uint), ("device", c_uint)),
        *(("device_id", c_uint), ("subsystem", c_uint), ("bus_id", c_char * 32)),
    )


class _FabricInfo(Structure):
    _fields_ = (
        *(("version", c_uint), ("cluster", ctypes.c_ubyte * 16), ("status", c_uint), ("clique", c_uint)),
        *(("state", ctypes.c_ubyte), ("health", c_uint)),
    )


class _Field(Structure):
    _fields_ = (
        *(("field", c_uint), ("scope", c_uint), ("timestamp", c_longlong), ("latency", c_longlong)),
        *(("type", c_uint), ("result", c_int), ("value", c_ulonglong)),
    )


class Nvml:
    """The library, opened and initialised; a context manager.

    Raises:
        NvmlError: it is not here or finds no driver.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"can't open {error}") from None
        self._call("nvmlInit_v2")

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.nvmlShutdown()

    def driver(self) -> str:
        """The driver's version, such as "580.95.05"."""
        return self._text("nvmlSystemGetDriverVersion")

    def cuda(self) -> str:
        """The newest CUDA that the driver runs, such as "13.0"."""
        version = self._number("nvmlSystemGetCudaDriverVersion_v2")
        return f"{version // 1000}.{version % 1000 // 10}"

    def gpus(self) -> list[Any]:
        """A handle of every GPU that this process may ask about. One that can't be opened is left out."""
        found = []
        for index in range(self._number("nvmlDeviceGetCount_v2")):
            handle = c_void_p()
            try:
                self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
            except NvmlError:  # in a container that was given others
                continue
            found.append(handle)
        return found

    def find(self, uuid: str) -> Any:
        """The handle of the GPU, or of the MIG instance, with that UUID (without the prefix)."""
        handle = c_void_p()
        try:
            self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), byref(handle))
        except NvmlError:
            self._call("nvmlDeviceGetHandleByUUID", f"MIG-{uuid}".encode(), byref(handle))
        return handle

    def uuid(self, gpu: Any) -> str:
        """Without the prefix, as CUDA has it."""
        return bare(self._text("nvmlDeviceGetUUID", gpu))

    def name(self, gpu: Any) -> str:
        return self._text("nvmlDeviceGetName", gpu)

    def bus(self, gpu: Any) -> str:
        """The PCI address."""
        return self._pci("nvmlDeviceGetPciInfo_v3", gpu)

    def is_divided(self, gpu: Any) -> bool:
        """Whether it is a MIG instance, or a GPU in MIG mode; neither reaches other GPUs' memory."""
        try:
            if self._number("nvmlDeviceIsMigDeviceHandle", gpu):
                return True
            now, pending = c_uint(), c_uint()
            self._call("nvmlDeviceGetMigMode", gpu, byref(now), byref(pending))
        except NvmlError:  # GPUs that know no MIG
            return False
        return bool(now.value)

    def links(self, gpu: Any) -> list[NvLink]:
        """The active NVLink links."""
        found = []
        for link in range(_MOST_LINKS):
            try:
                if not self._number("nvmlDeviceGetNvLinkState", gpu, c_uint(link)):
                    continue
            except NvmlError:  # it has no such link
                continue
            remote, bus = "", ""
            try:
                remote = _REMOTE.get(self._number("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, c_uint(link)), "")
                bus = self._pci("nvmlDeviceGetNvLinkRemotePciInfo_v2", gpu, c_uint(link)) if remote == "gpu" else ""
            except NvmlError:
                pass
            found.append(NvLink(remote, bus, self._link_speed(gpu, link)))
        return found

    def fabric(self, gpu: Any) -> Fabric:
        info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
        self._call("nvmlDeviceGetGpuFabricInfoV", gpu, byref(info))
        state = FABRIC_STATES.get(info.state, f"state {info.state}")
        if info.state == _COMPLETED and info.status:
            return Fabric(f"failed: {self._words(info.status)}")
        there = info.state == _COMPLETED and any(info.cluster)
        return Fabric(state, bytes(info.cluster).hex() if there else "", info.clique if there else 0)

    def p2p(self, one: Any, other: Any, kind: int) -> int:
        """Whether one GPU reaches the other by that kind of access: OK, or a key of P2P_WORDS."""
        return self._number("nvmlDeviceGetP2PStatus", one, other, c_uint(kind))

    # ---- inside

    def _link_speed(self, gpu: Any, link: int) -> float:
        field = _Field(field=_SPEED_FIELD, scope=link)
        try:
            self._call("nvmlDeviceGetFieldValues", gpu, c_int(1), byref(field))
        except NvmlError:
            return 0.0
        speed = (field.value & 0xFFFFFFFF) / 1e3 if not field.result else 0.0
        return max((nominal for nominal in _NOMINAL_GBps if nominal <= speed), default=0.0)

    def _pci(self, name: str, *arguments: Any) -> str:
        info = _Pci()
        self._call(name, *arguments, byref(info))
        return str(info.bus_id.decode(errors="replace")).lower()

    def _number(self, name: str, *arguments: Any) -> int:
        value = c_uint()
        self._call(name, *arguments, byref(value))
        return value.value

    def _text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call(name, *arguments, buffer, c_uint(len(buffer)))
        return buffer.value.decode(errors="replace")

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        result = _FUNCTION_NOT_FOUND if function is None else int(function(*arguments))
        if result:
            raise NvmlError(f"{name}: {self._words(result)}")

    def _words(self, result: int) -> str:
        function = self._library.nvmlErrorString
        function.restype, function.argtypes = ctypes.c_char_p, (c_int,)
        text: bytes | None = function(result)
        return text.decode(errors="replace") if text else f"error {result}"


def bare(uuid: str) -> str:
    """A UUID without the prefix that says what it is of."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


__all__ = ["NVLINK", "OK", "P2P_WORDS", "READ", "WRITE", "Fabric", "NvLink", "Nvml", "NvmlError", "bare"]
