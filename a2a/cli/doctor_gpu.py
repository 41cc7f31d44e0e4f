"""The part of `a2a doctor` about GPUs: driver, compiler, devices, the ways between them, and what memory may be shared."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from a2a.cli.facts import Fact, ask
from a2a.config import multicast_variables
from a2a.topology.gpu import PCIE_ONLY, GpuFacts, apart, gpu_facts
from a2a.topology.libcuda import FABRIC_HANDLES, FILE_DESCRIPTORS, MEMORY_MANAGEMENT, MULTICAST, LibCuda
from a2a.topology.nvml import Nvml, NvmlError

OLDEST_ARCH = 90  # that the kernels are compiled and tested for
CHANNELS = "dev/nvidia-caps-imex-channels"


@dataclass(frozen=True)
class Machine:
    """Where the answers come from; tests have others."""

    open_nvml: Callable[[], Any] = Nvml
    open_cuda: Callable[[], Any] = LibCuda
    root: Path = Path("/")

    def gpus(self) -> list[GpuFacts]:
        """What is known of the GPUs that this process sees, in CUDA's order; of all that NVML shows, without CUDA."""
        try:
            uuids = self.open_cuda().uuids()
        except OSError:
            with self.open_nvml() as nvml:
                uuids = [nvml.uuid(gpu) for gpu in nvml.gpus()]
        return [gpu_facts(uuid, self.open_nvml) for uuid in uuids]


def facts(machine: Machine | None = None) -> Iterator[Fact]:
    """Every line of the section. Each question is asked by itself: none keeps another from being answered."""
    machine = machine or Machine()
    absent = _absent(machine)
    if absent is not None:
        yield absent
        return
    for name, question in QUESTIONS.items():
        yield from ask(name, lambda question=question: question(machine))  # type: ignore[misc]


def _absent(machine: Machine) -> Fact | None:
    """The one line of a machine without GPUs."""
    import torch

    try:
        if machine.gpus():
            return None
        why = "the driver shows none"
    except NvmlError as error:
        why = str(error)
    except Exception:  # something is there; the questions will tell
        return None
    if torch.version.cuda is None:
        return Fact("off", "gpu", f"none ({why}); torch {torch.__version__} is a build without CUDA; a2a uses the CPU")
    return Fact("off", "gpu", f"none ({why}), though torch is built for CUDA {torch.version.cuda}; a2a uses the CPU")


def _driver(machine: Machine) -> Iterator[Fact]:
    try:
        with machine.open_nvml() as nvml:
            yield Fact("ok", "driver", f"{nvml.driver()}, for CUDA up to {nvml.cuda()}")
    except NvmlError as error:
        fix = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility; without it CUDA is asked for peers"
        yield Fact("off", "driver", f"its management library does not answer: {error}", fix)


def _torch(machine: Machine) -> Iterator[Fact]:
    import torch

    if torch.version.cuda is None:
        fix = "install torch's CUDA build (https://pytorch.org/get-started/locally)"
        yield Fact("bad", "cuda", f"torch {torch.__version__} is a build without CUDA and can't use these GPUs", fix)
    elif not torch.cuda.is_available():
        fix = "see what `python -c 'import torch; torch.cuda.init()'` says; CUDA_VISIBLE_DEVICES may hide all GPUs"
        yield Fact("bad", "cuda", f"torch is built for CUDA {torch.version.cuda} and sees no GPU", fix)
    else:
        shown = torch.cuda.device_count()
        yield Fact(
            "ok", "cuda", f"torch is built for CUDA {torch.version.cuda} and sees {shown} GPU{'s' * (shown > 1)}"
        )


def _compiler(machine: Machine) -> Iterator[Fact]:
    from a2a.kernels import cuda

    try:
        version = ".".join(str(number) for number in cuda.compiler().nvrtcVersion()[1:])
        yield Fact("ok", "compiler", f"NVRTC {version}, through cuda-bindings {_version('cuda-bindings')}")
    except Exception as error:  # each call on GPUs then goes to NCCL
        yield Fact("bad", "compiler", str(error))


def _kernels(machine: Machine) -> Iterator[Fact]:
    from a2a.kernels import cuda

    sources, folder = cuda.source_folder(), cuda.cache_folder()
    kept = sorted(folder.glob("*.cubin")) if folder.is_dir() else []
    size = sum(path.stat().st_size for path in kept) / 2**20
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        text = f"{len(kept)} compiled ones in {folder}, which can't be written: every process compiles for itself"
        yield Fact("off", "kernels", text, "set A2A_CACHE_DIR to a folder that can be written")
    elif kept:
        yield Fact("ok", "kernels", f"{len(kept)} compiled ones ({size:.1f} MiB) kept in {folder}, of {sources}")
    else:
        yield Fact("ok", "kernels", f"none compiled yet; the first call does it and keeps them in {folder}")


def _devices(machine: Machine) -> Iterator[Fact]:
    import torch

    seen = torch.cuda.device_count() if torch.version.cuda else 0
    for index, gpu in enumerate(machine.gpus()):
        links = f"{gpu.links} NVLink links of {gpu.link_GBps:g} GB/s" if gpu.links else "no NVLink"
        fabric = f", fabric {gpu.fabric_state} {gpu.fabric}".rstrip() if gpu.fabric_state else ""
        name, detail, old = gpu.name or "GPU", "", False
        if index < seen:
            about = torch.cuda.get_device_properties(index)
            old = about.major * 10 + about.minor < OLDEST_ARCH
            memory = f"{about.total_memory / 2**30:.0f} GiB"
            name, detail = about.name, f", sm_{about.major}{about.minor}, {about.multi_processor_count} SMs, {memory}"
        text = f"{name}{detail}, {links}{fabric}, {gpu.uuid}" + (", in MIG mode" if gpu.divided else "")
        fix = f"a2a's kernels are made for sm_{OLDEST_ARCH} and newer; NCCL serves this one" if old else ""
        yield Fact("off" if old else "ok", f"gpu {index}", text, fix)


def _peers(machine: Machine) -> Iterator[Fact]:
    gpus = machine.gpus()
    reasons: dict[str, list[str]] = {}
    for one, other in combinations(range(len(gpus)), 2):
        why = apart(gpus[one], gpus[other])
        if why:
            reasons.setdefault(why, []).append(f"{one} and {other}")
    if len(gpus) > 1 and not reasons:
        yield Fact("ok", "peers", f"all {len(gpus)} GPUs reach each other over NVLink")
    for why, pairs in reasons.items():
        fix = (
            "`nvidia-smi topo -p2p n` and `nvidia-smi topo -m` show why; check that links are up, and the IOMMU and ACS"
        )
        if why == PCIE_ONLY:
            fix = "nothing is broken; put ranks that exchange much on GPUs with NVLink between them (`nvidia-smi topo -m`)"
        elif "MIG" in why or "--gpus" in why:
            fix = ""  # they say it themselves
        yield Fact("off", "peers", f"GPUs {'; '.join(pairs)}: {why}. Exchanges between them go through NCCL", fix)


def _memory(machine: Machine) -> Iterator[Fact]:
    cuda = machine.open_cuda()
    for attribute, what in ((MEMORY_MANAGEMENT, "map memory at chosen addresses"),
                            (FILE_DESCRIPTORS, "hand memory to other processes as file descriptors")):  # fmt: skip
        if not cuda.attribute(attribute, 0):
            fix = "a driver without this (WSL, vGPU, confidential computing) can't serve a2a; NCCL does"
            yield Fact("off", "memory", f"this driver can't {what} (CUDA device attribute {attribute} is 0)", fix)
            return
    yield Fact("ok", "memory", "can be handed to the other ranks of this host as file descriptors")


def _fabric(machine: Machine) -> Iterator[Fact]:
    if not machine.open_cuda().attribute(FABRIC_HANDLES, 0):
        yield Fact("off", "fabric", "no handles for memory of other hosts here; not needed within one host")
        return
    folder = machine.root / CHANNELS
    channels = sorted(folder.glob("channel*")) if folder.is_dir() else []
    allowed = [channel for channel in channels if os.access(channel, os.R_OK | os.W_OK)]
    if allowed:
        yield Fact(
            "ok", "fabric", f"IMEX channel {allowed[0]} may be used; so far a2a shares memory within one host only"
        )
    elif channels:
        fix = f"allow this user to read and write it: chmod 0666 {channels[0]}, or add the user to its group"
        yield Fact("off", "fabric", f"no permission to open IMEX channel {channels[0]}; needed only between hosts", fix)
    else:
        fix = (
            f"between hosts: start nvidia-imex on each; in a container, pass a channel: --device /{CHANNELS}/channel0 "
            f"(or NVIDIA_IMEX_CHANNELS=0)"
        )
        yield Fact("off", "fabric", f"there is no IMEX channel in /{CHANNELS}; needed only between hosts", fix)


def _multicast(machine: Machine) -> Iterator[Fact]:
    """From the attribute and the environment: making a multicast object to find out can upset a fabric."""
    can = machine.open_cuda().attribute(MULTICAST, 0)
    said = ", ".join(f"{name}={value}" for name, value, _ in multicast_variables())
    off = [name for name, _, off in multicast_variables() if off]
    text = "the GPU has it" if can else "the GPU or its fabric lacks it"
    chosen = f"switched off by {' and '.join(off)}" if off else "not switched off"
    possible = bool(can) and not off
    use = (
        "in-switch reductions are possible: with communicator(deterministic=False), once they have passed a self-test here"
        if possible
        else "no in-switch reductions"
    )
    yield Fact(
        "ok" if possible else "off",
        "multicast",
        f"{text}; {chosen} ({said}); {use}. a2a's have been compiled and run through a software switch, never a real one",
    )


def _nccl(machine: Machine) -> Iterator[Fact]:
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_nccl_available():
        version = ".".join(str(number) for number in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        yield Fact("ok", "nccl", f"{version}; does what a2a does not, and stands under backend a2a for CUDA tensors")
    else:
        fix = "a torch with NCCL is needed for collectives of CUDA tensors other than a2a's"
        yield Fact("off", "nccl", "this torch has none", fix)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


QUESTIONS: dict[str, Callable[[Machine], Iterator[Fact]]] = {
    "driver": _driver,
    "cuda": _torch,
    "compiler": _compiler,
    "kernels": _kernels,
    "gpu": _devices,
    "peers": _peers,
    "memory": _memory,
    "fabric": _fabric,
    "multicast": _multicast,
    "nccl": _nccl,
}
