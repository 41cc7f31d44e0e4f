"""Topologies by name, for planning and simulation without the machine, and for `A2A_TOPOLOGY`.

    cpu:N          one CPU host of N ranks
    cpu:AxB        A CPU hosts of B ranks
    h100:AxB       A hosts of B H100 GPUs (at most 8), NVLink 4 inside, 400 Gb/s InfiniBand per GPU between; h200 the same
    b200:AxB       the same with B200 GPUs and NVLink 5
    gb200:nvl72xA  A racks of 72 GPUs, NVLink 5 inside, 400 Gb/s per GPU between; gb300 the same with 800 Gb/s
    gb200:AxB      A racks of which a job uses B GPUs (at most 72); gb300 the same

Ranks fill one domain after the other. Every number carries its source in `Link.source`. They are for comparing shapes: what
an algorithm takes on the machine at hand is measured there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from a2a.topology.model import Domain, Kind, Link, Topology

_MAX_RANKS = 1_000_000  # a mistyped name should be an error, not an exhausted memory

CPU_SCALE_UP = Link(
    latency_us=3.0,
    bandwidth_GBps=6.7,
    source="measured: all_to_all by one copy into the peer's buffer, 2 ranks on 2 cores: 4 KiB 3.0 us, 64 MiB 10,056 us "
    "(own slice counted)",
)
CPU_SCALE_OUT = Link(
    latency_us=289.0,
    bandwidth_GBps=0.71,
    source="measured: gloo all_to_all, 2 ranks over loopback TCP: 4 KiB 289 us, 64 MiB (half of it to the peer) 47,019 us; "
    "a real network differs: 1 Gbit/s is 0.125 GB/s",
)
H200_NVLINK = Link(
    latency_us=2.1,
    bandwidth_GBps=388.0,
    source="measured: two H200, 18 NVLink 4 links: copy engines both ways at once 388 GB/s each (394 one way alone); 2 KiB "
    "to the peer with its flag in the data 2.1 us in a CUDA graph",
)
H100_NVLINK = Link(
    latency_us=H200_NVLINK.latency_us,
    bandwidth_GBps=H200_NVLINK.bandwidth_GBps,
    source="as H200, which has the same 18 NVLink 4 links; " + H200_NVLINK.source,
)
NVL72_NVLINK = Link(
    latency_us=H200_NVLINK.latency_us,
    bandwidth_GBps=900.0,
    source="quoted: NVLink 5, 1.8 TB/s per GPU both ways together, "
    "https://docs.nvidia.com/dgx/dgxgb200-user-guide/networking.html; latency modelled: as measured on NVLink 4",
)
_NET_LATENCY_US = 14.0  # NCCL's cost model: src/graph/tuning.cc, hwLat[NET], ring with the Simple protocol
_NET_LATENCY_SOURCE = "latency quoted: NCCL's cost model, src/graph/tuning.cc (network, ring, Simple)"
HOPPER_NET = Link(
    latency_us=_NET_LATENCY_US,
    bandwidth_GBps=50.0,
    source="quoted: line rate of one 400 Gb/s ConnectX-7 per GPU, https://docs.nvidia.com/dgx-basepod/"
    "reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html; "
    + _NET_LATENCY_SOURCE,
)
GB200_NET = Link(
    latency_us=_NET_LATENCY_US,
    bandwidth_GBps=50.0,
    source="quoted: line rate of one 400 Gb/s ConnectX-7 per GPU, https://docs.nvidia.com/dgx-superpod/"
    "reference-architecture-scalable-infrastructure-gb200/latest/; " + _NET_LATENCY_SOURCE,
)
GB300_NET = Link(
    latency_us=_NET_LATENCY_US,
    bandwidth_GBps=100.0,
    source="quoted: line rate of one 800 Gb/s ConnectX-8 per GPU (four in a tray of four GPUs), https://docs.nvidia.com/"
    "enterprise-reference-architectures/nvl72-ai-factory/latest/components.html; " + _NET_LATENCY_SOURCE,
)


@dataclass(frozen=True)
class Hardware:
    """A kind of machine as its maker specifies it: peaks, which no job reaches (`a2a.simulate` takes a fraction of each)."""

    name: str
    domain_size: int  # GPUs in a scale-up domain
    job_size: int  # of which jobs usually take: a power of two, so that groups don't straddle domains
    bf16_TFLOPS: float  # dense, a GPU
    fp8_TFLOPS: float  # dense, a GPU
    hbm_GBps: float
    scale_up: Link  # the link's peak, a GPU, one way
    scale_out: Link  # line rate, a GPU, one way
    source: str


def _nvlink(generation: int, bandwidth_GBps: float, source: str) -> Link:
    return Link(
        H200_NVLINK.latency_us,
        bandwidth_GBps,
        f"quoted: NVLink {generation}, {2 * bandwidth_GBps:g} GB/s per GPU both ways together, {source}; latency as "
        "measured on two H200",
    )


_HOPPER = "989.4 TFLOP/s BF16 and 1,979 FP8 dense (half of what is quoted with sparsity)"
_H100_PAGE = "https://www.nvidia.com/en-us/data-center/h100/"
_H200_PAGE = "https://www.nvidia.com/en-us/data-center/h200/"
_B200_PAGE = "https://www.nvidia.com/en-us/data-center/dgx-b200/"
_GB200_PAGE = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
_GB300_PAGE = "https://www.nvidia.com/en-us/data-center/gb300-nvl72/"
_HGX = {
    "h100": (989.4, 1979.0, 3350.0, _nvlink(4, 450.0, _H100_PAGE), f"{_HOPPER}, HBM3 3.35 TB/s: {_H100_PAGE}"),
    "h200": (989.4, 1979.0, 4800.0, _nvlink(4, 450.0, _H200_PAGE), f"{_HOPPER}, HBM3e 4.8 TB/s: {_H200_PAGE}"),
    "b200": (
        2250.0, 4500.0, 8000.0, _nvlink(5, 900.0, _B200_PAGE),
        f"a host of eight: 72 PFLOP/s FP8 with sparsity, so 4.5 a GPU dense, half of it BF16; HBM3e 64 TB/s: {_B200_PAGE}",
    ),
}  # fmt: skip
_NVL72 = "a rack of 72: 720 PFLOP/s FP8 with sparsity, so 5 a GPU dense and half of it BF16; HBM3e 576 TB/s"

# Hosts of eight by GPU and NIC ("h200-800": one 800 Gb/s NIC per GPU), and racks.
HARDWARE = {
    **{
        f"{gpu}-{rate}": Hardware(f"{gpu}-{rate}", 8, 8, bf16, fp8, hbm, up, out, source)
        for gpu, (bf16, fp8, hbm, up, source) in _HGX.items()
        for rate, out in ((400, HOPPER_NET), (800, GB300_NET))
    },
    "gb200": Hardware("gb200", 72, 64, 2500.0, 5000.0, 8000.0, _nvlink(5, 900.0, _GB200_PAGE), GB200_NET,
                      f"{_NVL72}: {_GB200_PAGE}"),
    "gb300": Hardware("gb300", 72, 64, 2500.0, 5000.0, 8000.0, _nvlink(5, 900.0, _GB300_PAGE), GB300_NET,
                      f"{_NVL72}: {_GB300_PAGE}"),
}  # fmt: skip


@dataclass(frozen=True)
class _Family:
    kind: Kind
    domain: str  # what a domain is called: "host" or "rack"
    max_ranks: int  # in a domain
    scale_up: Link
    scale_out: Link


_FAMILIES = {
    "cpu": _Family("cpu_host", "host", _MAX_RANKS, CPU_SCALE_UP, CPU_SCALE_OUT),
    "h100": _Family("nvlink", "host", 8, H100_NVLINK, HOPPER_NET),
    "h200": _Family("nvlink", "host", 8, H200_NVLINK, HOPPER_NET),
    "b200": _Family("nvlink", "host", 8, NVL72_NVLINK, HOPPER_NET),
    "gb200": _Family("nvlink", "rack", 72, NVL72_NVLINK, GB200_NET),
    "gb300": _Family("nvlink", "rack", 72, NVL72_NVLINK, GB300_NET),
}

# What `get` understands; A and B are whole numbers from 1.
PATTERNS = (
    *("cpu:N", "cpu:AxB", "h100:AxB", "h200:AxB", "b200:AxB"),
    *("gb200:nvl72xA", "gb200:AxB", "gb300:nvl72xA", "gb300:AxB"),
)


def names() -> tuple[str, ...]:
    """List presets worth trying, each valid for `get`; `PATTERNS` says what other sizes exist."""
    return (
        *("cpu:1", "cpu:2", "cpu:4", "cpu:8", "cpu:2x2", "cpu:4x8"),
        *("h100:1x8", "h100:4x8", "h200:1x2", "h200:1x8", "h200:4x8", "b200:4x8"),
        *("gb200:nvl72x1", "gb200:nvl72x4", "gb200:4x64", "gb300:nvl72x1", "gb300:nvl72x4", "gb300:16x64"),
    )


def is_preset(name: str) -> bool:
    """Say whether `name` means a preset rather than a file: it begins with a family, such as "cpu", and a colon."""
    return name.partition(":")[1] == ":" and name.partition(":")[0] in _FAMILIES


def get(name: str) -> Topology:
    """Build the topology called `name`.

    Raises:
        ValueError: there is no such preset, or a domain would be larger than that machine allows.
    """
    head, _, shape = name.partition(":")
    family = _FAMILIES.get(head)
    match = re.fullmatch(r"(?:(?P<racks>nvl72x)|(?P<a>[1-9][0-9]{0,6})x)?(?P<b>[1-9][0-9]{0,6})", shape, re.ASCII)
    if family is None or match is None or (match["racks"] and head not in ("gb200", "gb300")):
        raise ValueError(
            f"there is no topology preset {name!r}; presets are {', '.join(PATTERNS)}, with numbers from 1"
        )
    if match["racks"]:
        num_domains, num_ranks = int(match["b"]), 72
    elif match["a"]:
        num_domains, num_ranks = int(match["a"]), int(match["b"])
    elif head == "cpu":
        num_domains, num_ranks = 1, int(match["b"])
    else:
        raise ValueError(f"topology preset {name!r} lacks its shape; write {head}:AxB, A {family.domain}s of B GPUs")
    if num_ranks > family.max_ranks or num_domains * num_ranks > _MAX_RANKS:
        raise ValueError(
            f"topology preset {name!r} has {num_domains} x {num_ranks} ranks; a {head} {family.domain} has at most "
            f"{family.max_ranks}, and all together at most {_MAX_RANKS}"
        )
    domains = []
    for index in range(num_domains):
        ranks = tuple(range(index * num_ranks, (index + 1) * num_ranks))
        label = f"{family.domain}{index}"
        # A rack's domain spans many hosts, so it has a rack's name alone; a host's rack is not known.
        host, rack = (label, "") if family.domain == "host" else ("", label)
        domains.append(Domain(ranks, family.kind, host, rack))
    return Topology(tuple(domains), family.scale_up, family.scale_out)
