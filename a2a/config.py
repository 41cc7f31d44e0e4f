"""The environment, read in one place.

Nothing else in a2a touches `os.environ`. Values are read when asked for, never at import, so that a launcher or a test may
set them late. `describe()` is what `a2a doctor` prints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """The `A2A_*` variables, parsed. None means that the variable is unset and the library decides."""

    topology: str | None = None
    timeout_s: float | None = None
    algorithm: str | None = None
    transport: str | None = None
    spin_us: float | None = None
    staging_kb: int | None = None
    cache_dir: str | None = None
    software_switch: bool = False


@dataclass(frozen=True)
class Launch:
    """Who this process is, as its launcher says. `launcher` is None when it was started alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str | None = None
    master_addr: str | None = None
    master_port: int | None = None


_MEANING = {
    "A2A_TOPOLOGY": "topology to use instead of the detected one: a JSON file or a preset such as cpu:2x2",
    "A2A_TIMEOUT_S": "seconds that a rank waits for a peer (default: the process group's own timeout)",
    "A2A_ALGORITHM": "algorithms to use instead of the planner's choice: op=name,op=name",
    "A2A_TRANSPORT": "transport to use for its kind of device instead of the first that works: cpu_shm, cuda_vmm, nvshmem",
    "A2A_SPIN_US": "microseconds that a CPU rank spins before it yields (default: 30 with a core a rank, else 0)",
    "A2A_STAGING_KB": "KiB of staging between each pair of CPU ranks (default: 1024, less with many ranks)",
    "A2A_SOFTWARE_SWITCH": "1: in-switch reductions that A2A_ALGORITHM names (op=multimem) loop over memory; for tests",
    "A2A_CACHE_DIR": "folder for measured costs and compiled kernels (default: ~/.cache/a2a)",
}

# Variables of others that keep NVLink multicast from being used, and the value with which they do.
_MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # in a step: see launch()
)


def config(env: Mapping[str, str] | None = None) -> Config:
    """Read the `A2A_*` variables.

    Raises:
        ValueError: a number can't be read or is out of range; names the variable.
    """
    env = os.environ if env is None else env

    def number(name: str, low: float) -> float | None:
        text = env.get(name, "").strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} is not a number; {_MEANING[name]}") from None
        if not value >= low:
            raise ValueError(f"{name}={text!r} is below {low:g}; {_MEANING[name]}")
        return value

    staging_kb = number("A2A_STAGING_KB", 16)
    return Config(
        topology=env.get("A2A_TOPOLOGY") or None,
        timeout_s=number("A2A_TIMEOUT_S", 0.001),
        algorithm=env.get("A2A_ALGORITHM") or None,
        transport=env.get("A2A_TRANSPORT") or None,
        spin_us=number("A2A_SPIN_US", 0),
        staging_kb=None if staging_kb is None else int(staging_kb),
        cache_dir=env.get("A2A_CACHE_DIR") or None,
        software_switch=env.get("A2A_SOFTWARE_SWITCH") == "1",
    )


def python_path(*first: str, env: Mapping[str, str] | None = None) -> str:
    """A PYTHONPATH for another process: these folders, then this process's own."""
    env = os.environ if env is None else env
    return os.pathsep.join([*first, *filter(None, [env.get("PYTHONPATH", "")])])


def launch(env: Mapping[str, str] | None = None) -> Launch:
    """Say which rank this process is, from torchrun's, MPI's (Open MPI, MPICH) or Slurm's variables, in that order."""
    env = os.environ if env is None else env
    for launcher, rank, size, local in _LAUNCHERS:
        if launcher == "slurm" and "SLURM_STEP_ID" not in env:
            continue  # the batch script's own shell, which has a SLURM_PROCID but is no rank
        if rank in env and size in env:
            port = env.get("MASTER_PORT")
            return Launch(
                rank=int(env[rank]),
                world_size=int(env[size]),
                local_rank=int(env.get(local, env[rank])),
                launcher=launcher,
                master_addr=env.get("MASTER_ADDR"),
                master_port=int(port) if port else None,
            )
    return Launch()


def use_network_interface(name: str) -> None:
    """Have gloo and NCCL connect over this interface in this process; for ranks that are started on a made-up host."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def prepare_nvshmem() -> None:
    """What NVSHMEM shall know before it starts in this process, where the user has said nothing.

    a2a takes addresses of peers' memory from it and nothing else: no multicast object, which it would make for each team,
    and no network.
    """
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")


def nvshmem_heap_grows(env: Mapping[str, str] | None = None) -> bool:
    """Whether NVSHMEM takes memory from the GPU as it is asked for some, not all at its start."""
    env = os.environ if env is None else env
    return env.get("NVSHMEM_DISABLE_CUDA_VMM", "0").lower() in ("", "0", "n", "no", "false", "f", "off")


def multicast_variables(env: Mapping[str, str] | None = None) -> list[tuple[str, str, bool]]:
    """List (variable, value or "unset", whether it forbids NVLink multicast) for those that can."""
    env = os.environ if env is None else env
    return [(name, env.get(name, "unset"), env.get(name) == off) for name, off in _MULTICAST_OFF.items()]


def describe(env: Mapping[str, str] | None = None) -> list[tuple[str, str, str]]:
    """List (variable, value or "unset", meaning) for every `A2A_*` variable."""
    env = os.environ if env is None else env
    return [(name, env.get(name, "unset"), meaning) for name, meaning in _MEANING.items()]
