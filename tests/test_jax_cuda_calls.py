"""What XLA's custom calls launch on GPUs and what they refuse, with a driver that only writes down what it is asked for."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from a2a.kernels import cpu

HERE = Path(__file__).parent
SOURCES = HERE.parent / "csrc" / "cpu"


def test_calls_are_launched_or_refused_with_a_reason(tmp_path: Path) -> None:
    library = cpu.find()
    compilers = [shutil.which(name) for name in ("gcc", "g++")]
    if library is None or not all(compilers):
        pytest.skip("needs a C and a C++ compiler")
    jaxlib = importlib.util.find_spec("jaxlib")
    headers = [] if jaxlib is None else [f"-I{Path(str(jaxlib.origin)).parent / 'include'}"]
    program, driver = tmp_path / "calls", tmp_path / "libcuda.so.1"
    command("gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(driver), str(HERE / "fake_cuda.c"))
    command(
        *("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", *headers),
        *("-o", str(program), str(HERE / "jax_cuda_calls.cpp"), str(library), "-ldl"),
    )
    paths = f"{tmp_path}:{library.parent}"
    done = subprocess.run([str(program)], env={**os.environ, "LD_LIBRARY_PATH": paths}, capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def command(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stderr}"
