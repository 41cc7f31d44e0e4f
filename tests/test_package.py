"""The package as it is installed: what it needs and brings, and that its compiled library is found and asks for little."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import a2a
from a2a.kernels import cpu

ROOT = Path(__file__).resolve().parents[1]
CORE = {"torch", "numpy", "rich", "typer"}
EXTRAS = {"dev", "mpi", "plot", "cu12", "cu13", "jax", "trainers"}
OPTIONAL = {"cuda", "cupy", "jax", "matplotlib", "megatron", "mpi4py", "nvshmem", "torchtitan"}


def requirements() -> list[tuple[str, str]]:
    """(package, extra or "") of everything the installed metadata asks for."""
    found = []
    for line in importlib.metadata.requires("a2a") or []:
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        found.append((re.split(r"[^\w.-]", line)[0], extra[1] if extra else ""))
    return found


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("a2a") == a2a.__version__


def test_every_public_name_exists() -> None:
    assert [name for name in a2a.__all__ if not hasattr(a2a, name)] == []


def test_the_package_is_typed() -> None:
    assert importlib.resources.files("a2a").joinpath("py.typed").is_file()


def test_the_command_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="a2a")
    assert entry.value == "a2a.cli:main"
    assert callable(entry.load())


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    """As torch 2.14 does when a name is asked for: it loads what is registered there and calls it."""
    (entry,) = importlib.metadata.entry_points(group="torch.distributed.backends", name="a2a")
    code = f"""
import importlib, torch.distributed as dist
assert "A2A" not in dist.Backend._plugins
module, _, name = {entry.value!r}.partition(":")
for _ in range(2):
    getattr(importlib.import_module(module), name)()
assert dist.Backend("a2a") == "a2a" and "A2A" in dist.Backend._plugins
"""
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_the_core_needs_few_packages() -> None:
    assert {package for package, extra in requirements() if not extra} == CORE


def test_the_extras_are_the_documented_ones() -> None:
    assert set(importlib.metadata.metadata("a2a").get_all("Provides-Extra") or []) == EXTRAS
    assert {extra for _, extra in requirements() if extra} == EXTRAS


@pytest.mark.parametrize("place", ["checkout", "elsewhere"])
def test_importing_a2a_finds_its_library_and_loads_no_optional_package(place: str, tmp_path: Path) -> None:
    """In the checkout, the sources there come before the installed package on sys.path."""
    code = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        "import a2a\n"
        "from a2a.kernels import cpu\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps([str(cpu.find()), cpu.lib().a2a_abi(), sorted(new)]))\n"
    )
    done = run(sys.executable, "-c", code, cwd=ROOT if place == "checkout" else tmp_path)
    assert done.returncode == 0, done.stderr
    path, abi, new = json.loads(done.stdout)
    assert Path(path).samefile(cpu.find() or "")
    assert abi == cpu.ABI
    assert OPTIONAL & set(new) == set()


def check_library(path: Path | None, architecture: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("elftools", reason="pyelftools reads libraries")
    assert path is not None
    return run(sys.executable, ROOT / ".ci" / "check-library", path, architecture)


def test_the_library_asks_little_of_the_machine_that_loads_it() -> None:
    """No libstdc++, no torch, no glibc newer than 2.17; it exports a2a_* alone."""
    done = check_library(cpu.find(), platform.machine())
    assert done.returncode == 0, done.stderr


def test_a_library_that_asks_for_more_is_found_out() -> None:
    """Python itself serves as a bad example, and so does the right library for the wrong machine."""
    done = check_library(Path(sys.executable).resolve(), platform.machine())
    assert done.returncode == 1
    assert re.search(r"exports \w+; only a2a_\* is its interface", done.stderr)
    done = check_library(cpu.find(), "aarch64" if platform.machine() == "x86_64" else "x86_64")
    assert done.returncode == 1
    assert "not a shared library for" in done.stderr


def test_the_library_exports_what_its_header_declares() -> None:
    elftools = pytest.importorskip("elftools.elf.elffile", reason="pyelftools reads libraries")
    header = re.sub(r"//[^\n]*|/\*.*?\*/", "", (ROOT / "csrc" / "cpu" / "a2a.h").read_text(), flags=re.DOTALL)
    declared = set(re.findall(r"\b(a2a_\w+)\s*\(", header))
    path = cpu.find()
    assert path is not None
    with path.open("rb") as file:
        symbols = elftools.ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        exported = {symbol.name for symbol in symbols if symbol.name.startswith("a2a_")}
    assert declared == exported


@pytest.mark.parametrize("name", ["demo-command", "test-command"])
def test_the_readme_gives_the_command(name: str) -> None:
    done = run(ROOT / ".ci" / "readme-command", name)
    assert done.returncode == 0, done.stderr
    assert "python3 -m venv .venv" in done.stdout


def test_a_command_that_the_readme_lacks_is_an_error() -> None:
    done = run(ROOT / ".ci" / "readme-command", "no-such-command")
    assert done.returncode == 1
    assert "no fenced block" in done.stderr
