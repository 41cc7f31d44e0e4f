"""Domains of GPUs, from what a driver says: hosts with and without NVLink, racks, MIG, containers, and no driver at all."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from a2a.topology import Topology, local_facts
from a2a.topology.detect import detect
from a2a.topology.gpu import GpuFacts, assemble, gpu_facts
from a2a.topology.nvml import Fabric, NvLink, Nvml, NvmlError
from fake_nvml import NOT_SUPPORTED, SWITCHED, UNKNOWN, FakeGpu, FakeNvml, no_nvml


def domains(topology: Topology) -> list[tuple[int, ...]]:
    return [domain.ranks for domain in topology.domains]


def host_of(gpus: Sequence[FakeGpu]) -> Topology:
    """One rank on each GPU of one host."""
    facts = [gpu_facts(gpu.uuid, FakeNvml(gpus)) for gpu in gpus]
    return assemble(facts, [0] * len(gpus), ["alpha"] * len(gpus), [])


# ---------------------------------------------------------------------------------------------------------- one host


def test_eight_gpus_on_switches_are_one_domain() -> None:
    topology = host_of([FakeGpu(f"g{i}") for i in range(8)])
    assert domains(topology) == [tuple(range(8))]
    domain = topology.domains[0]
    assert (domain.kind, domain.host, domain.rack, domain.gpu) == ("nvlink", "alpha", "", "NVIDIA H200")
    assert topology.scale_up.bandwidth_GBps == 388.0
    assert "18 NVLink links of 25 GB/s" in topology.scale_up.source
    assert topology.notes == ()


def test_fewer_active_links_are_slower() -> None:
    gpus = [FakeGpu("g0"), FakeGpu("g1", links=SWITCHED[:9])]
    assert host_of(gpus).scale_up.bandwidth_GBps == 194.0  # the slower one's


def test_gpus_on_pcie_alone_are_apart_and_named() -> None:
    topology = host_of([FakeGpu(f"g{i}", links=(), default=NOT_SUPPORTED) for i in range(3)])
    assert domains(topology) == [(0,), (1,), (2,)]
    (note,) = topology.notes
    assert "ranks 0 and 1; 0 and 2; 1 and 2 don't share GPU memory: peer access over PCIe only" in note


def test_no_peer_access_says_what_the_driver_says() -> None:
    topology = host_of([FakeGpu(f"g{i}", links=(), default=NOT_SUPPORTED, pcie=1) for i in range(2)])
    assert domains(topology) == [(0,), (1,)]
    assert "no peer access: not supported by the chipset" in topology.notes[0]


def test_bridged_pairs_are_domains_of_two() -> None:
    def bridged(me: int) -> FakeGpu:
        other = me ^ 1
        links = (NvLink("gpu", f"bus{other}", 25.0),) * 12
        return FakeGpu(f"g{me}", bus=f"bus{me}", links=links, nvlink={f"g{other}": 0}, default=NOT_SUPPORTED)

    topology = host_of([bridged(i) for i in range(4)])
    assert domains(topology) == [(0, 1), (2, 3)]
    assert topology.scale_up.bandwidth_GBps == round(12 * 25 * 388 / 450, 1)


def test_every_pair_of_a_domain_is_connected() -> None:
    """A ring of four: neighbours reach each other, opposite ones don't."""
    gpus = [FakeGpu(f"g{i}", nvlink={f"g{(i + 2) % 4}": NOT_SUPPORTED}) for i in range(4)]
    assert domains(host_of(gpus)) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("status", [UNKNOWN, -1], ids=["unknown", "refused"])
def test_links_decide_where_the_driver_does_not_say(status: int) -> None:
    switched = [FakeGpu(f"g{i}", default=status) for i in range(2)]
    assert domains(host_of(switched)) == [(0, 1)]
    direct = [FakeGpu(f"g{i}", bus=f"b{i}", links=(NvLink("gpu", f"b{1 - i}", 25.0),), default=status) for i in (0, 1)]
    assert domains(host_of(direct)) == [(0, 1)]
    elsewhere = [FakeGpu(f"g{i}", bus=f"b{i}", links=(NvLink("gpu", "b7", 25.0),), default=status) for i in (0, 1)]
    assert domains(host_of(elsewhere)) == [(0,), (1,)]


def test_ranks_on_one_gpu_are_one_domain() -> None:
    driver = FakeNvml([FakeGpu("g0", links=(), default=NOT_SUPPORTED), FakeGpu("g1", links=(), default=NOT_SUPPORTED)])
    facts = [gpu_facts(uuid, driver) for uuid in ("g0", "g1", "g0", "g0")]
    assert domains(assemble(facts, [0] * 4, ["alpha"] * 4, [])) == [(0, 2, 3), (1,)]


def test_mig_instances_are_apart() -> None:
    topology = host_of([FakeGpu("m0", divided=True), FakeGpu("m1", divided=True)])
    assert domains(topology) == [(0,), (1,)]
    assert "MIG" in topology.notes[0]


# ------------------------------------------------------------------------------------- views that differ between ranks


def test_prefixes_and_capitals_of_uuids_do_not_matter() -> None:
    driver = FakeNvml([FakeGpu("ab-0"), FakeGpu("ab-1")])
    facts = [gpu_facts("GPU-AB-0", driver), gpu_facts("ab-1", driver)]
    assert domains(assemble(facts, [0, 0], ["alpha"] * 2, [])) == [(0, 1)]


def test_one_container_that_sees_both_is_enough() -> None:
    gpus = [FakeGpu("g0"), FakeGpu("g1")]
    facts = [gpu_facts("g0", FakeNvml(gpus)), gpu_facts("g1", FakeNvml(gpus[1:]))]
    assert domains(assemble(facts, [0, 0], ["alpha"] * 2, [])) == [(0, 1)]


def test_containers_that_hide_each_others_gpus_are_apart_and_the_fix_is_named() -> None:
    facts = [gpu_facts(f"g{i}", FakeNvml([FakeGpu(f"g{i}")])) for i in range(2)]
    topology = assemble(facts, [0, 0], ["alpha"] * 2, [])
    assert domains(topology) == [(0,), (1,)]
    assert "hide the other's GPU" in topology.notes[0]
    assert "CUDA_VISIBLE_DEVICES" in topology.notes[0]


def test_a_no_of_either_side_counts() -> None:
    gpus = [FakeGpu("g0"), FakeGpu("g1", default=NOT_SUPPORTED)]
    assert domains(host_of(gpus)) == [(0,), (1,)]


def test_without_nvml_cuda_is_asked() -> None:
    ways = {"g0": {"g1": "", "g2": "peer access over PCIe only"}, "g1": {"g0": "", "g2": "no"}, "g2": {}}
    facts = [gpu_facts(uuid, no_nvml, lambda uuid: ways[uuid]) for uuid in ways]
    topology = assemble(facts, [0] * 3, ["alpha"] * 3, [])
    assert domains(topology) == [(0, 1), (2,)]
    assert "can't open libnvidia-ml.so.1" in " ".join(topology.notes)
    assert "assumed" in topology.scale_up.source


def test_cuda_is_asked_where_nvml_does_not_know() -> None:
    driver = FakeNvml([FakeGpu(f"g{i}", links=(), default=UNKNOWN) for i in range(3)])
    ways = {"g0": {"g1": ""}, "g1": {"g0": ""}, "g2": {}}
    facts = [gpu_facts(uuid, driver, lambda uuid: ways[uuid]) for uuid in ways]
    topology = assemble(facts, [0] * 3, ["alpha"] * 3, [])
    assert domains(topology) == [(0, 1), (2,)]
    assert "the driver does not say how they are connected" in topology.notes[0]


def test_without_any_driver_nothing_is_claimed() -> None:
    def no_cuda(_: str) -> dict[str, str]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    facts = [gpu_facts(uuid, no_nvml, no_cuda) for uuid in ("g0", "g1")]
    topology = assemble(facts, [0, 0], ["alpha"] * 2, [])
    assert domains(topology) == [(0,), (1,)]
    assert any("nobody could be asked" in note and "libcuda.so.1" in note for note in topology.notes)


def test_a_machine_without_a_driver_raises_nothing() -> None:
    facts = gpu_facts("g0", lambda: Nvml("libnvidia-ml-that-is-not-there.so.1"))
    assert facts.uuid == "g0"
    assert "can't open libnvidia-ml-that-is-not-there.so.1" in facts.problem


# ---------------------------------------------------------------------------------------------------- several hosts


def rack(cluster: str, hosts: int, clique: int = 1, state: str = "completed") -> list[list[FakeGpu]]:
    links = (NvLink("switch", "", 50.0),) * 18
    fabric = Fabric(state, cluster if state == "completed" else "", clique)
    return [
        [FakeGpu(f"{cluster}{host}-{gpu}", "NVIDIA GB300", links=links, fabric=fabric) for gpu in range(4)]
        for host in range(hosts)
    ]


def cluster_of(hosts: Sequence[Sequence[FakeGpu]]) -> Topology:
    facts = [gpu_facts(gpu.uuid, FakeNvml(gpus)) for gpus in hosts for gpu in gpus]
    first, names = [], []
    for number, gpus in enumerate(hosts):
        first += [len(first)] * len(gpus)
        names += [f"tray{number}"] * len(gpus)
    return assemble(facts, first, names, [])


def test_two_racks_of_72_are_two_domains() -> None:
    topology = cluster_of(rack("a", 18) + rack("b", 18))
    assert domains(topology) == [tuple(range(72)), tuple(range(72, 144))]
    assert [(d.host, d.rack) for d in topology.domains] == [("", "a/1"), ("", "b/1")]
    assert topology.scale_up.bandwidth_GBps == round(900 * 388 / 450, 1)
    assert any("different NVLink fabrics or cliques" in note for note in topology.notes)


def test_two_cliques_of_one_cluster_are_apart() -> None:
    assert len(domains(cluster_of(rack("a", 2) + rack("a", 2, clique=2)))) == 2


def test_a_fabric_that_is_not_ready_joins_no_hosts() -> None:
    assert domains(cluster_of(rack("a", 2, state="in progress"))) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_hosts_without_a_fabric_are_apart_each_a_domain() -> None:
    hosts = [[FakeGpu(f"h{h}g{g}", fabric=None) for g in range(2)] for h in range(2)]
    topology = cluster_of(hosts)
    assert domains(topology) == [(0, 1), (2, 3)]
    assert [domain.host for domain in topology.domains] == ["tray0", "tray1"]


# ------------------------------------------------------------------------------------------------- among several ranks


def run_ranks(mains: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """Call `mains[rank](exchange)` in one thread each."""
    barrier, board = threading.Barrier(len(mains)), dict[tuple[str, int], bytes]()

    def run(rank: int) -> Any:
        def exchange(tag: str, payload: bytes) -> list[bytes]:
            board[tag, rank] = payload
            barrier.wait(20)
            everyone = [board[tag, peer] for peer in range(len(mains))]
            barrier.wait(20)
            return everyone

        return mains[rank](exchange)

    with ThreadPoolExecutor(len(mains)) as threads:
        return list(threads.map(run, range(len(mains))))


def test_all_ranks_find_the_same_topology() -> None:
    driver = FakeNvml([FakeGpu("g0"), FakeGpu("g1")])

    def rank(number: int) -> Callable[[Any], Topology]:
        return lambda exchange: detect(exchange, number, 3, gpu=gpu_facts(f"g{number % 2}", driver))

    found = run_ranks([rank(i) for i in range(3)])
    assert found[0] == found[1] == found[2]
    assert domains(found[0]) == [(0, 1, 2)]
    assert found[0].domains[0].host == local_facts().hostname
    assert Topology.from_json(found[0].to_json()) == found[0]


def test_facts_travel_as_json() -> None:
    facts = gpu_facts("g0", FakeNvml([FakeGpu("g0"), FakeGpu("g1", nvlink={"g0": 0})]))
    assert GpuFacts.from_json(facts.to_json()) == facts
    with pytest.raises((ValueError, TypeError, KeyError)):
        GpuFacts.from_json('{"uuid": "g0", "peers": {}, "unheard": 1}')


# ------------------------------------------------------------------------------------------------------ the C interface


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder: Path = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvml.so", source], check=True)
    return str(folder / "libnvml.so")


def test_the_drivers_structures_are_read_as_its_header_has_them(library: str) -> None:
    with Nvml(library) as nvml:
        assert (nvml.driver(), nvml.cuda()) == ("580.95.05", "13.2")
        first, second = nvml.gpus()  # the third can't be opened
        assert (nvml.uuid(first), nvml.uuid(second)) == ("a0", "b1")
        assert nvml.name(first) == "NVIDIA H200"
        assert nvml.uuid(nvml.find("b1")) == "b1"
        assert nvml.links(first) == [
            NvLink("gpu", "00000000:0b:00.0", 25.0),
            NvLink("switch", "", 50.0),
            NvLink("", "", 0.0),
        ]
        assert nvml.bus(second) == "00000000:0b:00.0"
        assert (nvml.is_divided(first), nvml.is_divided(second)) == (False, True)
        assert nvml.fabric(first) == Fabric("completed")
        assert nvml.fabric(second) == Fabric("completed", "ab" * 16, 7)
        assert [nvml.p2p(first, second, kind) for kind in range(3)] == [5, 5, 0]


def test_a_function_that_an_old_driver_lacks_is_named(library: str) -> None:
    with Nvml(library) as nvml, pytest.raises(NvmlError, match="nvmlDeviceGetSerial: Other"):
        nvml._text("nvmlDeviceGetSerial")
