"""Hosts whose driver tells what a test wants: stand-ins for `a2a.topology.nvml.Nvml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from a2a.topology.nvml import NVLINK, OK, READ, WRITE, Fabric, NvLink, NvmlError

NOT_SUPPORTED, UNKNOWN = 5, 6  # of P2P_WORDS
SWITCHED = (NvLink("switch", "", 25.0),) * 18
HOST_ONLY = Fabric("completed")


@dataclass(frozen=True)
class FakeGpu:
    uuid: str
    name: str = "NVIDIA H200"
    bus: str = ""
    links: tuple[NvLink, ...] = SWITCHED
    fabric: Fabric | None = HOST_ONLY  # None: the driver is too old to say
    divided: bool = False
    nvlink: dict[str, int] = field(default_factory=dict)  # UUID of another GPU -> P2P status; not in it: `default`
    default: int = OK
    pcie: int = OK


class FakeNvml:
    """A driver that shows these GPUs."""

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        self._gpus = list(gpus)

    def __call__(self) -> FakeNvml:
        return self

    def __enter__(self) -> FakeNvml:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def driver(self) -> str:
        return "580.95.05"

    def cuda(self) -> str:
        return "13.0"

    def gpus(self) -> list[FakeGpu]:
        return self._gpus

    def find(self, uuid: str) -> FakeGpu:
        for gpu in self._gpus:
            if gpu.uuid == uuid:
                return gpu
        raise NvmlError("nvmlDeviceGetHandleByUUID: Not Found")

    def uuid(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def name(self, gpu: FakeGpu) -> str:
        return gpu.name

    def bus(self, gpu: FakeGpu) -> str:
        return gpu.bus

    def is_divided(self, gpu: FakeGpu) -> bool:
        return gpu.divided

    def links(self, gpu: FakeGpu) -> list[NvLink]:
        return list(gpu.links)

    def fabric(self, gpu: FakeGpu) -> Fabric:
        if gpu.fabric is None:
            raise NvmlError("nvmlDeviceGetGpuFabricInfoV: Function Not Found")
        return gpu.fabric

    def p2p(self, one: FakeGpu, other: FakeGpu, kind: int) -> int:
        if kind == NVLINK:
            status = one.nvlink.get(other.uuid, one.default)
            if status < 0:
                raise NvmlError("nvmlDeviceGetP2PStatus: Not Supported")
            return status
        assert kind in (READ, WRITE)
        return one.pcie


def no_nvml() -> FakeNvml:
    """A machine without the library."""
    raise NvmlError("can't open libnvidia-ml.so.1")
