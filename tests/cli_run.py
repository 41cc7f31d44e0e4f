"""Runs the command line: as a user does, in a process of its own, or in this one."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import a2a
from a2a.cli import main
from a2a.cli.ranks import find_mpi
from a2a.errors import UnsupportedError
from pool import PRELOADED

A2A = (sys.executable, "-m", "a2a")
FOLDER = Path(a2a.__file__).parent.parent  # the a2a that is tested here
PNG = b"\x89PNG\r\n\x1a\n"
TINY = ("--device", "cpu", "--bytes", "4K", "--repeat", "3")
TINY_MOE = ("--device", "cpu", "--tokens", "16", "--hidden", "16", "--experts", "4", "--top-k", "2", "--repeat", "3")


def run(*words: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words],
        env={**clean_environment(), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@dataclass(frozen=True)
class Told:
    returncode: object
    stdout: str
    stderr: str


Here = Callable[..., Told]


def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """What runs a command in this process (fixture `here`): seconds less than in one of its own, which must import torch.

    Ranks are forked from the server that the other tests' pool uses, with that pool's modules.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in PRELOADED if importlib.util.find_spec(name)])
    monkeypatch.setattr(type(context), "set_forkserver_preload", lambda *_: None)

    def call(*words: str | Path, environment: dict[str, str] | None = None) -> Told:
        monkeypatch.setattr(sys, "argv", ["a2a", *map(str, words)])
        for name in set(os.environ) - set(clean_environment()):
            monkeypatch.delenv(name)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            main()
        return Told(left.value.code, *capsys.readouterr())

    return call


def clean_environment() -> dict[str, str]:
    """This process's, without what launchers and users set, and with the tested a2a first."""
    prefixes = ("A2A_", "OMPI_", "PMI_", "SLURM_", "COLUMNS")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes) and name not in names}
    return {**kept, "PYTHONPATH": str(FOLDER)}


def mpi_available() -> bool:
    try:
        find_mpi()
    except UnsupportedError:
        return False
    return True


needs_mpi = pytest.mark.skipif(not mpi_available(), reason="needs mpi4py and an mpiexec: pip install 'a2a[mpi]' mpich")
needs_plot = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs Matplotlib: pip install 'a2a[plot]'"
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
