"""What `a2a doctor` says of GPUs: one line a question, whatever the machine lacks, with what would change it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from a2a.cli import doctor, doctor_gpu, topo
from a2a.cli.doctor_gpu import CHANNELS, QUESTIONS, Machine
from a2a.cli.facts import Fact
from a2a.topology.libcuda import FABRIC_HANDLES, FILE_DESCRIPTORS, MULTICAST
from fake_nvml import NOT_SUPPORTED, FakeGpu, FakeNvml, no_nvml

GOOD = [FakeGpu("g0"), FakeGpu("g1")]


class FakeCuda:
    def __init__(self, uuids: Sequence[str], **lacking: int) -> None:
        self._uuids, self._lacking = list(uuids), set(lacking.values())

    def __call__(self) -> FakeCuda:
        return self

    def uuids(self) -> list[str]:
        return self._uuids

    def attribute(self, attribute: int, index: int) -> int:
        assert 0 <= index < len(self._uuids)
        return int(attribute not in self._lacking)


def machine(gpus: Sequence[FakeGpu] = GOOD, root: Path = Path("/"), **lacking: int) -> Machine:
    return Machine(FakeNvml(gpus), FakeCuda([gpu.uuid for gpu in gpus], **lacking), root)


def told(where: Machine, name: str) -> list[Fact]:
    return [fact for fact in doctor_gpu.facts(where) if fact.name.split()[0] == name]


def test_every_question_is_answered_on_a_good_machine() -> None:
    facts = list(doctor_gpu.facts(machine()))
    assert {fact.name.split()[0] for fact in facts} == set(QUESTIONS)
    assert [fact.text for fact in facts if fact.name == "driver"] == ["580.95.05, for CUDA up to 13.0"]
    (peers,) = told(machine(), "peers")
    assert (peers.state, peers.text) == ("ok", "all 2 GPUs reach each other over NVLink")
    assert "18 NVLink links of 25 GB/s" in told(machine(), "gpu")[1].text


def test_gpus_on_pcie_are_named_as_pairs_with_what_serves_them() -> None:
    gpus = [FakeGpu(f"g{i}", links=(), default=NOT_SUPPORTED) for i in range(3)]
    (peers,) = told(machine(gpus), "peers")
    assert peers.state == "off"
    assert "GPUs 0 and 1; 0 and 2; 1 and 2: peer access over PCIe only" in peers.text
    assert "through NCCL" in peers.text
    assert "nvidia-smi topo -m" in peers.fix


def test_gpus_without_peer_access_are_told_why() -> None:
    gpus = [FakeGpu(f"g{i}", links=(), default=NOT_SUPPORTED, pcie=1) for i in range(2)]
    (peers,) = told(machine(gpus), "peers")
    assert "GPUs 0 and 1: no peer access: not supported by the chipset" in peers.text
    assert "IOMMU" in peers.fix


def test_a_driver_that_shares_no_memory_is_told() -> None:
    (memory,) = told(machine(lacks=FILE_DESCRIPTORS), "memory")
    assert memory.state == "off"
    assert f"attribute {FILE_DESCRIPTORS} is 0" in memory.text
    assert told(machine(), "memory")[0].state == "ok"


def test_the_permission_that_fabric_handles_lack_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fabric,) = told(machine(root=tmp_path), "fabric")
    assert "no IMEX channel" in fabric.text
    assert f"--device /{CHANNELS}/channel0" in fabric.fix
    channel = tmp_path / CHANNELS / "channel0"
    channel.parent.mkdir(parents=True)
    channel.touch()
    assert told(machine(root=tmp_path), "fabric")[0].state == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: path != channel)
    (fabric,) = told(machine(root=tmp_path), "fabric")
    assert f"no permission to open IMEX channel {channel}" in fabric.text
    assert "chmod" in fabric.fix
    (fabric,) = told(machine(root=tmp_path, lacks=FABRIC_HANDLES), "fabric")
    assert (fabric.state, fabric.fix) == ("off", "")


def test_multicast_is_told_from_the_attribute_and_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.delenv(name, raising=False)
    (fact,) = told(machine(), "multicast")
    assert (fact.state, "not switched off" in fact.text) == ("ok", True)
    assert "in-switch reductions are possible" in fact.text
    assert "never a real one" in fact.text
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    (fact,) = told(machine(), "multicast")
    assert (fact.state, "switched off by NCCL_NVLS_ENABLE" in fact.text) == ("off", True)
    assert "no in-switch reductions" in fact.text
    assert "lacks it" in told(machine(lacks=MULTICAST), "multicast")[0].text


def test_kept_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_CACHE_DIR", str(tmp_path))
    assert "none compiled yet" in told(machine(), "kernels")[0].text
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "x-sm_90-0.cubin").write_bytes(b"x" * (1 << 20))
    assert "1 compiled ones (1.0 MiB) kept" in told(machine(), "kernels")[0].text
    monkeypatch.setattr(os, "access", lambda *_: False)
    (fact,) = told(machine(), "kernels")
    assert (fact.state, "A2A_CACHE_DIR" in fact.fix) == ("off", True)


def no_cuda() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


def broken() -> Any:
    raise RuntimeError("the driver is upside down")


@pytest.mark.parametrize(
    "where",
    [Machine(FakeNvml(GOOD), no_cuda), Machine(no_nvml, FakeCuda(["g0", "g1"])), Machine(broken, broken)],
    ids=["no CUDA", "no NVML", "a broken driver"],
)
def test_whatever_is_missing_each_question_has_its_line(where: Machine) -> None:
    facts = list(doctor_gpu.facts(where))
    assert {fact.name.split()[0] for fact in facts} >= set(QUESTIONS) - {"gpu", "peers"}
    assert all(fact.text for fact in facts)


def test_a_machine_without_gpus_has_one_line() -> None:
    (fact,) = doctor_gpu.facts(Machine(no_nvml, no_cuda))
    assert fact.state == "off"
    assert "can't open libnvidia-ml.so.1" in fact.text
    assert "a2a uses the CPU" in fact.text


def test_topo_lists_the_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(topo, "Machine", machine)
    monkeypatch.setattr(topo, "LibCuda", FakeCuda(["g0", "g1"]))
    assert topo.run(None, 1, None, None, "cuda") == 0
    out = capsys.readouterr().out
    assert "1 rank: 1 x 1 nvlink" in out
    assert "18 x 25 GB/s" in out and "g1" in out


def test_the_permission_that_reading_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    (tmp_path / "proc/self/status").write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    fact = doctor._reading(tmp_path)
    assert (fact.state, "ptrace_scope=1" in fact.text, "CAP_SYS_PTRACE" in fact.fix) == ("off", True, True)
    (tmp_path / "proc/self/status").write_text("Name:\tx\nCapEff:\t0000000000080000\n")
    assert doctor._reading(tmp_path).state == "ok"
