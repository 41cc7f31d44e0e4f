"""What XLA's custom calls launch on GPUs and what they refuse, with a driver that only writes down what it is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import a2a
from a2a.algorithms import all_to_all_push
from a2a.kernels import cpu, cuda

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


class Comm(a2a.Communicator):
    """A communicator of GPUs, as far as preparing calls goes."""

    def __init__(self) -> None:
        self.world_size, self.rank, self.timeout_s, self._closed = 2, 1, 5.0, False
        self.device, self.device_type = torch.device("cpu"), "cuda"
        self.failure, self.owned, self.requests = ctypes.c_uint64(), list[Callable[[], None]](), list[tuple[str, str]]()
        host = ctypes.addressof(self.failure)
        place = SimpleNamespace(base=1 << 40, window=1 << 38, host=host, context=1, device=self.device, arch="sm_90")
        self.memory = SimpleNamespace(
            place=place, staging=SimpleNamespace(num_bytes=128 << 20, address=4096), world_size=2,
            request=self.request, digest=lambda number: 77,
        )  # fmt: skip

    def require_transport(self, op: str) -> Any:
        return self.memory

    def own(self, release: Callable[[], None]) -> None:
        self.owned.append(release)

    def request(self, agree: str, row_bytes: int, text: str) -> int:
        if (agree, text) not in self.requests:
            self.requests.append((agree, text))
        return self.requests.index((agree, text))

    def close(self) -> None:
        while self.owned:
            self.owned.pop()()


def test_a_program_for_gpus_names_launches_that_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax", reason="needs jax: pip install 'a2a[jax]', or see .ci/jax")
    from a2a.integrations import jax as a2a_jax

    loaded = []

    def module(name: str, place: Any, defines: dict[str, int]) -> Any:
        loaded.append((name, defines.get("RAGGED", 0)))
        return SimpleNamespace(function=lambda name: 7, constant=lambda name: 0)

    monkeypatch.setattr(cuda, "module", module)
    monkeypatch.setattr(cuda, "event", lambda: 1)
    nothing = SimpleNamespace(a2a_cuda_launch=None, a2a_cuda_event_free=lambda event: 0)
    monkeypatch.setattr(cuda, "lib", lambda: nothing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    comm = Comm()

    def program(x: Any, lists: Any) -> Any:
        once = a2a_jax.all_to_all(x, comm, 0, 0, tiled=True)
        again = a2a_jax.all_to_all(once * 2, comm, 0, 0, tiled=True)
        other = a2a_jax.all_to_all(again[:2], comm, 0, 0, tiled=True)
        return a2a_jax.ragged_all_to_all(again, other, *lists, axis_name=comm)

    lists = [jax.numpy.zeros(2, int)] * 4
    traced = jax.jit(program).trace(jax.numpy.ones((4, 3)), lists)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    numbers = re.findall(r"communicator = (-?\d+) .*?request = (\d+) ", text)
    assert len(numbers) == 4 and int(numbers[0][0]) < 0
    assert [request for _, request in numbers] == ["1", "1", "2", "3"]
    assert loaded == [("all_to_all_push", 0), ("all_to_all_push", 1)]
    with pytest.raises(ValueError, match="int4 has 4 bits; expected a dtype of whole bytes"):
        jax.jit(lambda x: a2a_jax.all_to_all(x, comm, 0, 0)).trace(jax.numpy.ones((2, 2), "int4"))
    comm.close()


def test_a_ragged_call_takes_the_kernel_that_its_largest_piece_may_need() -> None:
    launcher = object.__new__(all_to_all_push.Launcher)
    launcher.flag_bytes, launcher._ragged, launcher.rank, launcher._timeout_ns = 2 << 20, (3, 4), 0, 5
    launcher.place = SimpleNamespace(base=1, window=2, host=3, context=4)
    launcher.staging = SimpleNamespace(address=5)
    launcher.transport = SimpleNamespace(digest=lambda request: 6)
    few, params = launcher.prepare_ragged(9, 1, 2, 48)
    assert (few.function, few.grid, few.block, params.row_bytes, params.out_rows) == (3, 1, 128, 48, 2)
    most, _ = launcher.prepare_ragged(9, 100, 2 << 20, 1)
    assert (most.function, most.grid, most.block) == (3, 24, 512)
    large, params = launcher.prepare_ragged(9, 100, (2 << 20) + 1, 1)
    assert (large.function, large.grid, large.block, params.copiers, params.digest) == (4, 40, 1024, 16, 6)
    assert large.params_bytes == ctypes.sizeof(params) == 6 * 8 + 40 + 8 + 8 + 24  # `Params` of the kernel
