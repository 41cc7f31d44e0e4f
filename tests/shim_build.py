"""Executables of CUDA kernels for the CPU: csrc/cuda, with `cuda_shim/` in the place of the GPU, and perhaps a mutation."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc"
SHIM = ROOT / "tests" / "cuda_shim"

_FLAGS = ["-std=c++17", "-g1", "-Wall", "-fno-pie", "-ffp-contract=off"]
_RUNTIME = [*_FLAGS, "-O3", "-fPIC"]  # the machine: not watched
_KERNEL = [
    *_FLAGS,
    "-O1",
    "-fsanitize=thread",  # for its calls at every access; races.cpp has the functions
    "--param=tsan-distinguish-volatile=1",
    "-Wno-unknown-pragmas",
    "-include",
    "language.h",
]


@dataclass(frozen=True)
class Replacement:
    """Text of a file in csrc/cuda that must be there exactly once, and what to put in its place."""

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        found = text.count(self.old)
        assert found == 1, (
            f"csrc/cuda/{self.file}: found {found} times, expected once: {self.old!r}; adapt the replacement"
        )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Kernel:
    """A kernel and its scenarios, cuda_shim/NAME.cpp or another file. `small`: makes blocks and thresholds small."""

    name: str
    defines: Mapping[str, int] = field(default_factory=dict)
    small: tuple[Replacement, ...] = ()
    scenarios: str = ""


@dataclass(frozen=True)
class Mutant:
    """A line of a kernel broken: which of its four arguments that breaks, and which scenarios must notice, each alone."""

    name: str
    argument: str
    replacement: Replacement
    scenarios: tuple[str, ...]


def shared_variables(text: str, name: str) -> str:
    """Turn `__shared__` declarations into references to memory of the block that runs."""

    def static(found: re.Match[str]) -> str:
        lines = []
        for declarator in found["names"].split(","):
            variable, dimensions = re.fullmatch(r"\s*(\w+)((?:\[[^]]*\])*)\s*", declarator).groups()  # type: ignore[union-attr]
            lines.append(f"using shim_{variable} = {found['type']}{dimensions};")
            lines.append(f"shim_{variable}& {variable} = shim::shared<shim_{variable}>([] {{}});")
        return " ".join(lines)

    align, kind = r"(?:(?:__align__|alignas)\(\d+\) )?", r"(?P<type>[\w:<>]+(?: [\w:<>]+)*)"
    text = re.sub(
        rf"extern __shared__ {align}{kind} (?P<name>\w+)\[\];",
        r"\g<type>* const \g<name> = shim::dynamic_shared<\g<type>>();",
        text,
    )
    text = re.sub(rf"__shared__ {align}{kind} (?P<names>\w+(?:\[[^];]*\])*(?:, \w+(?:\[[^];]*\])*)*);", static, text)
    left = re.search(r".*__shared__.*", re.sub(r"//.*", "", text))
    assert left is None, f"{name}: a declaration that shim_build.py doesn't understand: {left and left[0].strip()}"
    return text


class ShimBuild:
    """Executables in a folder, each compiled once; as many at a time as there are cores."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._runtime = [self._pool.submit(self._compile_runtime, name) for name in ("fibers", "machine", "races")]
        self._built: dict[tuple[str, int, tuple[Replacement, ...]], Future[Path]] = {}

    def start(self, kernel: Kernel, world: int, *mutations: Replacement) -> Future[Path]:
        """Have it compiled."""
        key = (kernel.name, world, mutations)
        if key not in self._built:
            self._built[key] = self._pool.submit(self._build, kernel, world, mutations)
        return self._built[key]

    def executable(self, kernel: Kernel, world: int, *mutations: Replacement) -> Path:
        return self.start(kernel, world, *mutations).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _compile_runtime(self, name: str) -> Path:
        target = self._folder / f"{name}.o"
        _command(["g++", *_RUNTIME, "-c", str(SHIM / f"{name}.cpp"), "-o", str(target)])
        return target

    def _build(self, kernel: Kernel, world: int, mutations: tuple[Replacement, ...]) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"{kernel.name}-", dir=self._folder))
        _write_sources(folder, (*kernel.small, *mutations))
        target = folder / kernel.name
        options = [f"-D{k}={v}" for k, v in {**kernel.defines, "WORLD": world}.items()]
        source = SHIM / f"{kernel.scenarios or kernel.name}.cpp"
        _command(["g++", *_KERNEL, *options, f"-I{folder}", f"-I{SHIM}", "-c", str(source), "-o", f"{target}.o"])
        objects = [str(future.result()) for future in self._runtime]
        _command(["g++", "-no-pie", f"{target}.o", *objects, "-o", str(target)])
        return target


def run(
    executable: Path, scenarios: tuple[str, ...], seeds: int, first: int = 1, timeout_s: float | None = 600
) -> subprocess.CompletedProcess[str]:
    """Run scenarios; what it says has lines of the sources in the place of addresses."""
    arguments = [str(executable), "--seeds", str(first), str(seeds), *scenarios]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=False)
    done.stderr = re.sub(r"pc 0x([0-9a-f]+)", lambda m: _line_of(executable, int(m[1], 16)), done.stderr)
    return done


def located(said: str) -> str:
    """What a process with a `library` said, likewise."""
    found = re.search(r"^LIBRARY (\S+) ([0-9a-f]+)$", said, re.M)
    said = re.sub(r"^LIBRARY .*\n", "", said, flags=re.M)
    if found is None:
        return said
    path, start = Path(found[1]), int(found[2], 16)
    return re.sub(r"pc 0x([0-9a-f]+)", lambda m: _line_of(path, (int(m[1], 16) - start) % (1 << 32)), said)


def why_not() -> str:
    """Why the shim can't be used here, or nothing."""
    if shutil.which("g++") is None:
        return "there is no g++"
    version = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout
    return (
        "" if int(version.split(".")[0]) >= 11 else f"g++ {version.strip()} can't tell volatile accesses apart; 11 can"
    )


def _line_of(executable: Path, pc: int) -> str:
    if shutil.which("addr2line") is None:
        return f"pc {pc:#x}"
    arguments = ["addr2line", "-e", str(executable), "-i", "-s", f"{pc - 1:#x}"]
    lines = subprocess.run(arguments, capture_output=True, text=True, check=False).stdout.split("\n")
    kept = [line.split(" ")[0] for line in lines if line and not line.startswith(("ptx.cuh", "language.h"))]
    return "in " + " < ".join(kept[:4])


def _command(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stderr}"


def _write_sources(folder: Path, replacements: Sequence[Replacement]) -> None:
    """The folders `cuda` and `common`, with ptx.cuh's twin and with the replacements."""
    shutil.copytree(SOURCES / "common", folder / "common")
    (folder / "cuda").mkdir()
    texts = {p.name: p.read_text() for p in (*(SOURCES / "cuda").iterdir(), *SHIM.glob("*.cu"), SHIM / "ptx.cuh")}
    for replacement in replacements:
        texts[replacement.file] = replacement.apply(texts[replacement.file])
    for name, text in texts.items():
        (folder / "cuda" / name).write_text(shared_variables(text, name))


def library(
    folder: Path, names: Sequence[str], defines: Mapping[str, int], replacements: Sequence[Replacement] = ()
) -> Path:
    """Kernels and the machine in one shared library, for a program that is every rank's host (shim_host.py).

    `run_KERNEL(params)` in it is a thread of that kernel. Parts that several libraries share are compiled once a folder.
    """
    sources = Path(tempfile.mkdtemp(prefix="sources-", dir=folder))
    _write_sources(sources, replacements)
    objects = [_object(folder, SHIM / f"{name}.cpp", _RUNTIME) for name in ("fibers", "machine", "races", "remote")]
    options = [*_KERNEL, "-fPIC", "-x", "c++", *(f"-D{k}={v}" for k, v in sorted(defines.items()))]
    for name in (*names, "remote"):
        source = sources / "cuda" / f"{name}.cu"
        source.write_text(_with_entries(source.read_text()))
        objects.append(_object(folder, source, options, sources))
    target = sources / "kernels.so"
    _command(["g++", "-shared", "-Wl,-Bsymbolic", *map(str, objects), "-o", str(target)])
    return target


def _with_entries(text: str) -> str:
    """With a function run_KERNEL(params) before each kernel of one structure of parameters."""
    pattern = r'extern "C" __global__ [^;{]*?(\w+)\(const __grid_constant__ ([\w:]+) a\) \{'
    entry = r'extern "C" void \1(\2 a); extern "C" void run_\1(const void* p) { \1(*static_cast<const \2*>(p)); } \g<0>'
    return re.sub(pattern, entry, text)


def _object(folder: Path, source: Path, options: Sequence[str], headers: Path | None = None) -> Path:
    """The compiled source, from the folder if it is there. Any number of processes may ask for it at once."""
    include = [f"-I{SHIM}"] if headers is None else [f"-I{headers}", f"-I{headers / 'cuda'}", f"-I{SHIM}"]
    texts = (
        [p.read_text() for p in sorted(SHIM.glob("*.h"))]
        if headers is None
        else [p.read_text() for p in sorted(headers.glob("*/*.*h"))]
    )
    key = hashlib.sha256(repr((source.read_text(), texts, list(options))).encode()).hexdigest()[:16]
    target = folder / f"{source.stem}-{key}.o"
    with (folder / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            temporary = target.with_suffix(".tmp")
            _command(["g++", *options, *include, "-c", str(source), "-o", str(temporary)])
            temporary.rename(target)
    return target


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShimBuild]:
    if reason := why_not():
        pytest.skip(reason)
    build = ShimBuild(tmp_path_factory.mktemp("shim"))
    yield build
    build.close()
