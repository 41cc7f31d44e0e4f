"""CUDA kernels: compiled at first use, kept on disk, launched through the C library.

The sources travel in the wheel (`a2a/_csrc`) or lie in the checkout (`csrc`). NVRTC compiles them through cuda-bindings;
every torch with CUDA brings both. Nothing of that is imported before a kernel is asked for, and nothing here needs a GPU
before `Module` loads one.

Cubins are kept under `A2A_CACHE_DIR`, by a digest of everything that they depend on: the sources, the options, the compiler
and the architecture. Any number of processes may compile the same one at once: each writes its own file and renames it into
place.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Protocol

from a2a.config import config
from a2a.errors import UnsupportedError
from a2a.kernels import cpu

_log = logging.getLogger("a2a")

FAILED = -cpu.FAILED  # what `launch` returns where the failure record is set
_OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--fmad=false", "-DNDEBUG")
# NVRTC has no C library. These are the parts of it that csrc/common uses.
_HEADERS = {
    "cstddef": "#pragma once\nnamespace std { using size_t = decltype(sizeof(0)); }\n",
    "cstdint": "#pragma once\nnamespace std {\nusing uint8_t = unsigned char; using uint16_t = unsigned short;\n"
    "using uint32_t = unsigned; using uint64_t = unsigned long long;\nusing int32_t = int; using int64_t = long long;\n}\n",
}


class Call(Structure):
    """`a2a_cuda_call`: a launch, prepared. `params` must stay alive as long as this."""

    _fields_ = (
        ("function", c_void_p),
        ("context", c_void_p),
        ("failure", c_void_p),
        ("params", c_void_p),
        ("params_bytes", c_uint32),
        ("grid", c_uint32),
        ("block", c_uint32),
        ("shared_bytes", c_uint32),
        ("cluster", c_uint32),
        ("programmatic", c_uint32),
    )


class Step(Structure):
    """`a2a_cuda_step`: a launch, an event that is recorded or waited for, or a copy, on one of a sequence's streams."""

    LAUNCH, RECORD, WAIT, COPY = 0, 1, 2, 3
    _fields_ = (
        ("kind", c_uint32),
        ("stream", c_uint32),
        ("what", c_void_p),
        ("patch_at", c_uint32),
        ("patch_words", c_uint32),
        ("patch", c_uint32 * 6),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "a2a_cuda_open": (),
    "a2a_cuda_load": (c_char_p, POINTER(c_void_p)),
    "a2a_cuda_unload": (c_void_p,),
    "a2a_cuda_function": (c_void_p, c_char_p, c_uint32, POINTER(c_void_p)),
    "a2a_cuda_constant": (c_void_p, c_char_p, POINTER(c_uint64)),
    "a2a_cuda_launch": (c_void_p, c_void_p, c_uint64, c_uint64),
    "a2a_cuda_run": (c_void_p, c_uint32, POINTER(c_void_p)),
    "a2a_cuda_event": (POINTER(c_void_p),),
    "a2a_cuda_event_free": (c_void_p,),
    "a2a_cuda_await": (c_void_p, c_uint64, c_void_p, c_double),
}


@functools.cache
def lib() -> ctypes.CDLL:
    """The C library, with the CUDA driver opened.

    Raises:
        UnsupportedError: no library, or no CUDA driver on this machine.
    """
    library = cpu.lib()
    library.a2a_cuda_error.restype, library.a2a_cuda_error.argtypes = c_char_p, (c_int,)
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    if library.a2a_cuda_open():
        raise UnsupportedError("a2a: this machine has no CUDA driver that a2a can use (libcuda.so.1, CUDA 12 or newer)")
    return library


def check(error: int, what: str) -> None:
    """Raise for a CUresult that is not success.

    Raises:
        UnsupportedError: with the driver's own words.
    """
    if error:
        text: bytes = lib().a2a_cuda_error(error)
        raise UnsupportedError(f"a2a: {what}: {text.decode()} (CUDA error {error})")


def driver() -> Any:
    """cuda-bindings' driver module."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise UnsupportedError(_missing("cuda-bindings", error)) from error
    return bindings


def source_folder() -> Path:
    """Where the folders `cuda` and `common` lie: in the wheel, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    folders = [package / "_csrc", package.parent / "csrc"]
    library = cpu.find()
    if library is not None:
        folders.append(library.parent.parent / "_csrc")  # an editable installation: data in site-packages
    for folder in folders:
        if (folder / "cuda" / "ptx.cuh").is_file():
            return folder
    raise UnsupportedError(
        f"a2a: the sources of its CUDA kernels are in none of {', '.join(map(str, folders))}; reinstall a2a"
    )


def compile_cubin(name: str, arch: str, defines: Mapping[str, int], source: str | None = None) -> bytes:
    """The machine code of csrc/cuda/NAME.cu for `arch` ("sm_90"), from the cache if it is there.

    `source`: another text in its place, which may include the headers there.

    Raises:
        UnsupportedError: a package or the sources are missing, or the compiler is too old; says what to do.
    """
    nvrtc = compiler()
    folder = source_folder()
    version = ".".join(str(n) for n in _ok(nvrtc.nvrtcVersion(), "nvrtcVersion"))
    options = [*_OPTIONS, f"--gpu-architecture={arch}", *(f"-D{k}={v}" for k, v in sorted(defines.items()))]
    headers = {
        f"{part}/{p.name}": p.read_text() for part in ("common", "cuda") for p in sorted((folder / part).glob("*.*h"))
    }
    if source is None:
        source = (folder / "cuda" / f"{name}.cu").read_text()
    key = hashlib.sha256(repr((version, options, source, sorted(headers.items()), _HEADERS)).encode()).hexdigest()
    cached = cache_folder() / f"{name}-{arch}-{key}.cubin"
    try:
        return cached.read_bytes()
    except OSError:
        cubin = _compile(nvrtc, name, source, headers, options)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cached.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(temporary, cached)
    except OSError as error:
        _log.warning("a2a: can't keep compiled kernels in %s (%s); set A2A_CACHE_DIR to a folder", cached.parent, error)
    return cubin


def _compile(nvrtc: Any, name: str, source: str, headers: Mapping[str, str], options: list[str]) -> bytes:
    # The sources include each other as "ptx.cuh" and "../common/layout.h"; NVRTC is given both spellings by name.
    named = {**_HEADERS, **{k.removeprefix("cuda/"): v for k, v in headers.items()}}
    named |= {f"../{k}": v for k, v in headers.items()}
    texts, names = [v.encode() for v in named.values()], [k.encode() for k in named]
    program = _ok(
        nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), len(named), texts, names), "nvrtcCreateProgram"
    )
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if int(result):
            log = bytes(_ok(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.rstrip(b"\0").decode(errors="replace")
            raise UnsupportedError(f"a2a: NVRTC can't compile {name}.cu ({' '.join(options)}):\n{text}")
        cubin = bytes(_ok(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        _ok(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def event() -> int:
    """A new event without a time, in the current context. `a2a_cuda_event_free` frees it."""
    made = c_void_p()
    check(lib().a2a_cuda_event(ctypes.byref(made)), "cuEventCreate")
    assert made.value is not None
    return made.value


class Module:
    """A cubin in the current CUDA context. Lives as long as the process: graphs may refer to its kernels at any time."""

    def __init__(self, name: str, arch: str, defines: Mapping[str, int], source: str | None = None) -> None:
        self.name = name
        self._handle = c_void_p()
        cubin = compile_cubin(name, arch, defines, source)
        check(lib().a2a_cuda_load(cubin, ctypes.byref(self._handle)), f"loading {name}.cu")

    def function(self, name: str, shared_bytes: int = 0) -> int:
        """The handle of a kernel that may use so many bytes of dynamic shared memory."""
        found = c_void_p()
        check(lib().a2a_cuda_function(self._handle, name.encode(), shared_bytes, ctypes.byref(found)), f"kernel {name}")
        assert found.value is not None
        return found.value

    def constant(self, name: str) -> int:
        """The value of a 64-bit variable. Waits for the device: for set-up only."""
        value = c_uint64()
        check(lib().a2a_cuda_constant(self._handle, name.encode(), ctypes.byref(value)), f"variable {name}")
        return value.value


class Target(Protocol):
    """What a kernel is compiled for. `defines`: how it finds memory there; `context`: the current one's handle."""

    @property
    def arch(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def defines(self) -> tuple[tuple[str, int], ...]: ...


def module(name: str, target: Target, defines: Mapping[str, int]) -> Module:
    """The module in the current context, which is the target's; loaded once.

    Loading may wait for the kernels that run: the second communicator of a process must not, while the first one's wait for
    peers that in turn wait in the second.
    """
    return _module(name, target.arch, (*defines.items(), *target.defines), target.context)


@functools.cache
def _module(name: str, arch: str, defines: tuple[tuple[str, int], ...], context: int) -> Module:
    return Module(name, arch, dict(defines))


def modules(names: list[str], target: Target, defines: Mapping[str, int]) -> list[Module]:
    """Several modules, compiled at the same time."""
    everything = {**defines, **dict(target.defines)}
    with ThreadPoolExecutor(len(names)) as pool:  # the compiler lets go of Python's lock
        list(pool.map(lambda name: compile_cubin(name, target.arch, everything), names))
    return [module(name, target, defines) for name in names]


def compiler() -> Any:
    """cuda-bindings' NVRTC module.

    Raises:
        UnsupportedError: it or the library is missing; says what to install.
    """
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # a successful import is not a capability check: this opens the library
    except Exception as error:
        raise UnsupportedError(_missing("cuda-bindings and nvidia-cuda-nvrtc", error)) from error
    return nvrtc


def _missing(packages: str, error: Exception) -> str:
    return (
        f"a2a: CUDA kernels need {packages}, which torch's CUDA wheels bring ({type(error).__name__}: {error}); "
        f"with a torch from elsewhere: pip install cuda-bindings nvidia-cuda-nvrtc, of torch.version.cuda's major version"
    )


def _ok(result: tuple[Any, ...], what: str) -> Any:
    """The values of a call of cuda-bindings, whose first value is its error."""
    if int(result[0]):
        raise UnsupportedError(f"a2a: {what}: {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    chosen = config().cache_dir
    return (Path(chosen) if chosen else Path.home() / ".cache" / "a2a") / "kernels"


__all__ = [
    *(
        "FAILED",
        "Call",
        "Module",
        "Step",
        "cache_folder",
        "check",
        "compile_cubin",
        "compiler",
        "driver",
        "lib",
        "module",
    ),
    "source_folder",
]
