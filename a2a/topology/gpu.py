"""Which ranks' GPUs reach each other's memory, and how fast: the GPU half of detection.

A rank is on a GPU, known by its UUID: numbers of devices differ between processes (CUDA_VISIBLE_DEVICES), UUIDs don't. Each
rank asks the driver about its own GPU and about that GPU's way to every other one of the host (`GpuFacts`); all ranks then
get all facts and come to the same domains, by these rules, of which the first that fits decides:

    1  ranks on one GPU share its memory
    2  GPUs of one NVLink fabric (cluster and clique, registration completed) reach each other, on one host or on several
    3  GPUs of different hosts do not
    4  a GPU in MIG mode reaches no other
    5  else the driver is asked: peer access over NVLink counts; over PCIe alone it does not, since the kernels' stores and
       signals are not worth their latency there and NCCL does as well

Every rank of a domain reaches every other. Where NVML shows a GPU but can't say how it is reached (some virtual machines),
links of both to a switch count as a way, else CUDA's answer: whether memory can really be shared shows when it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from a2a.topology.libcuda import ACCESS_SUPPORTED, NATIVE_ATOMICS, LibCuda
from a2a.topology.model import Domain, Link, Topology
from a2a.topology.nvml import NVLINK, OK, P2P_WORDS, READ, Fabric, NvLink, Nvml, NvmlError, bare
from a2a.topology.presets import H200_NVLINK, HOPPER_NET

# Two H200 with 18 links of 25 GB/s: 388 GB/s each, both ways at once.
_NOMINAL_GBps = 18 * 25.0
_REACHED = H200_NVLINK.bandwidth_GBps / _NOMINAL_GBps
PCIE_ONLY = "peer access over PCIe only, no NVLink between them"
_UNSAID = "the driver does not say how they are connected"
_NO_ACCESS = "no peer access"
_UNKNOWN = 6  # of P2P_WORDS


@dataclass(frozen=True)
class GpuFacts:
    """One rank's view of its GPU; plain values, so that ranks can exchange them. "" means: not to be found out."""

    uuid: str
    name: str = ""
    links: int = 0  # active NVLink links
    link_GBps: float = 0.0  # of one link, nominal, one way; 0: unknown
    fabric_state: str = ""
    fabric: str = ""  # cluster and clique, if the GPU is registered in a fabric that leaves its host
    divided: bool = False  # in MIG mode
    peers: Mapping[str, str] = field(default_factory=dict)  # UUID of each GPU that it was asked about -> why not, or ""
    problem: str = ""  # why the driver could not be asked

    def to_json(self) -> str:
        """Return the facts as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> GpuFacts:
        """Read what `to_json` wrote.

        Raises:
            ValueError, TypeError: it is something else, for instance from another version of a2a.
        """
        entries = json.loads(text)
        return cls(**{**entries, "peers": {str(uuid): str(why) for uuid, why in dict(entries["peers"]).items()}})


def gpu_facts(
    uuid: str,
    open_nvml: Callable[[], Any] = Nvml,
    cuda_peers: Callable[[str], dict[str, str]] | None = None,
) -> GpuFacts:
    """Gather the facts of the GPU with that UUID. Raises nothing: what can't be asked is a fact that stays empty.

    Args:
        uuid: as torch or CUDA have it, with or without its prefix.
        open_nvml, cuda_peers: instead of the driver's libraries; for tests.
    """
    uuid = bare(uuid)
    try:
        with open_nvml() as nvml:
            facts = _asked(nvml, uuid, nvml.find(uuid))
    except NvmlError as error:
        facts = GpuFacts(uuid, problem=str(error))
    if not facts.problem and _UNSAID not in facts.peers.values():
        return facts
    try:
        told = (cuda_peers or _cuda_peers)(uuid)
    except OSError as error:
        return replace(facts, problem="; ".join(filter(None, (facts.problem, str(error)))))
    unsaid = {theirs: why for theirs, why in told.items() if facts.peers.get(theirs, _UNSAID) == _UNSAID}
    return replace(facts, peers={**facts.peers, **unsaid})


def _asked(nvml: Any, uuid: str, gpu: Any) -> GpuFacts:
    links = _or_else(lambda: nvml.links(gpu), list[NvLink]())
    fabric = _or_else(lambda: nvml.fabric(gpu), Fabric(""))
    divided = nvml.is_divided(gpu)
    peers: dict[str, str] = {}
    for other in nvml.gpus():
        try:
            theirs = nvml.uuid(other)
        except NvmlError:
            continue
        if theirs != uuid and not divided:
            peers[theirs] = _why_not(nvml, gpu, links, other)
    return GpuFacts(
        uuid=uuid,
        name=_or_else(lambda: nvml.name(gpu), ""),
        links=len(links),
        link_GBps=min((link.GBps for link in links), default=0.0),
        fabric_state=fabric.state,
        fabric=f"{fabric.cluster}/{fabric.clique}" if fabric.cluster else "",
        divided=divided,
        peers=peers,
    )


def _why_not(nvml: Any, gpu: Any, links: Sequence[NvLink], other: Any) -> str:
    """Why the GPU doesn't reach another one over NVLink, or ""."""
    over_nvlink = _or_else(lambda: nvml.p2p(gpu, other, NVLINK), _UNKNOWN)
    if over_nvlink == OK:
        return ""
    if over_nvlink == _UNKNOWN and links:
        bus = _or_else(lambda: nvml.bus(other), "")
        switched = [link.remote for link in _or_else(lambda: nvml.links(other), list[NvLink]())]
        if any(link.bus == bus != "" for link in links) or (
            "switch" in switched and any(link.remote == "switch" for link in links)
        ):
            return ""
    read = _or_else(lambda: nvml.p2p(gpu, other, READ), _UNKNOWN)
    if over_nvlink == _UNKNOWN and read in (OK, _UNKNOWN):
        return _UNSAID
    return PCIE_ONLY if read == OK else f"{_NO_ACCESS}: {P2P_WORDS.get(read, read)}"


def _or_else(ask: Callable[[], Any], default: Any) -> Any:
    try:
        return ask()
    except NvmlError:
        return default


def _cuda_peers(uuid: str) -> dict[str, str]:
    """What CUDA says about the way from that GPU to the others that this process sees; where there is no NVML.

    Raises:
        OSError: there is no CUDA driver, or it does not show that GPU.
    """
    cuda = LibCuda()
    uuids = cuda.uuids()
    if uuid not in uuids:
        raise OSError(f"libcuda.so.1 shows no GPU {uuid}")
    here, peers = uuids.index(uuid), dict[str, str]()
    for other, theirs in enumerate(uuids):
        if other != here:
            reached = cuda.p2p(ACCESS_SUPPORTED, here, other)
            peers[theirs] = _NO_ACCESS if not reached else "" if cuda.p2p(NATIVE_ATOMICS, here, other) else PCIE_ONLY
    return peers


# ---------------------------------------------------------------------------------------------- from facts to a topology


def assemble(gpus: Sequence[GpuFacts], hosts: Sequence[int], names: Sequence[str], notes: Sequence[str]) -> Topology:
    """The topology of ranks on these GPUs.

    Args:
        gpus, names: of each rank: its GPU, and the name of its host.
        hosts: of each rank: the lowest rank that it is proven to be on one host with.
        notes: about the hosts.
    """
    told = list(notes)
    groups: list[list[int]] = []
    reasons: dict[str, list[str]] = {}
    for rank in range(len(gpus)):
        for group in groups:
            against = [
                (peer, why) for peer in group if (why := apart(gpus[peer], gpus[rank], hosts[peer] == hosts[rank]))
            ]
            if not against:
                group.append(rank)
                break
            if hosts[group[0]] == hosts[rank] or (gpus[group[0]].fabric and gpus[rank].fabric):
                reasons.setdefault(against[0][1], []).append(f"{against[0][0]} and {rank}")
        else:
            groups.append([rank])
    told += [f"ranks {_some(pairs)} don't share GPU memory: {why}" for why, pairs in reasons.items()]
    told += [f"rank {r}: GPU {g.uuid}: {g.problem}" for r, g in enumerate(gpus) if g.problem]
    domains = [_domain(group, gpus, hosts, names) for group in groups]
    return Topology(tuple(domains), _scale_up(gpus, groups), HOPPER_NET, tuple(told))


def apart(a: GpuFacts, b: GpuFacts, one_host: bool = True) -> str:
    """Why ranks on these GPUs can't load and store each other's memory, or ""."""
    if a.uuid == b.uuid and one_host:
        return ""
    if a.fabric and a.fabric == b.fabric:
        return ""
    if not one_host:
        if a.fabric and b.fabric:
            return f"they are in different NVLink fabrics or cliques ({a.fabric} and {b.fabric})"
        return "they are on different hosts without a common NVLink fabric"
    if a.divided or b.divided:
        return (
            "MIG instances have no access to other GPUs; switch MIG off (nvidia-smi -mig 0), or give them one instance"
        )
    answers = [answer for answer in (a.peers.get(b.uuid), b.peers.get(a.uuid)) if answer is not None]
    if not answers:
        blind = a.problem or b.problem
        if blind:
            return f"nobody could be asked whether they are connected ({blind})"
        return (
            "their containers hide the other's GPU, without which its memory can't be mapped; give each container all GPUs "
            "of the host (--gpus all) and choose one by CUDA_VISIBLE_DEVICES"
        )
    return next(filter(None, answers), "")


def _domain(group: Sequence[int], gpus: Sequence[GpuFacts], hosts: Sequence[int], names: Sequence[str]) -> Domain:
    first = group[0]
    one_host = all(hosts[rank] == hosts[first] for rank in group)
    kinds = sorted({gpus[rank].name for rank in group} - {""})
    return Domain(
        ranks=tuple(group),
        kind="nvlink",
        host=names[first] if one_host else "",
        rack=gpus[first].fabric,
        gpu=", ".join(kinds),
    )


def _scale_up(gpus: Sequence[GpuFacts], groups: Sequence[Sequence[int]]) -> Link:
    """The slowest GPU's links: what a rank sends while all do."""
    spread = [rank for group in groups if len({gpus[r].uuid for r in group}) > 1 for rank in group]
    slowest = min((gpus[r] for r in spread), key=lambda g: g.links * g.link_GBps, default=None)
    if slowest is None or not slowest.links * slowest.link_GBps:
        source = "assumed, as the driver names no NVLink between the ranks: as two H200; " + H200_NVLINK.source
        return Link(H200_NVLINK.latency_us, H200_NVLINK.bandwidth_GBps, source)
    return Link(
        latency_us=H200_NVLINK.latency_us,
        bandwidth_GBps=round(slowest.links * slowest.link_GBps * _REACHED, 1),
        source=f"modelled: {slowest.links} NVLink links of {slowest.link_GBps:g} GB/s, times {_REACHED:.2f}, which two H200 "
        f"reached both ways at once ({H200_NVLINK.bandwidth_GBps:g} of {_NOMINAL_GBps:g} GB/s); latency measured there",
    )


def _some(pairs: Sequence[str]) -> str:
    return "; ".join(pairs[:8]) + (f"; ... ({len(pairs)} pairs in all)" if len(pairs) > 8 else "")


__all__ = ["PCIE_ONLY", "GpuFacts", "apart", "assemble", "gpu_facts"]
