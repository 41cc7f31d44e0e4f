"""The Python side of a2a's GPU ops on the emulated machine of cuda_shim/: one thread a rank, of which one runs at a time.

An op's own code runs as it is, but its torch makes tensors in the machine's memory, and its CUDA library puts kernels,
records and waits on the machine's streams. A program runs ahead of its kernels, as on a GPU, until it waits for something.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from ctypes import c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from a2a.kernels import cuda
from a2a.transport.base import SymmetricBuffer
from a2a.transport.cuda_memory import Place

CONTROL_BYTES, OK_AT, CLOSED_AT, EPOCHS_AT = 128 << 10, 8, 16, 16 + 8 * 1024
HOST_BYTES = 4096  # of a rank's own memory: words that its host reads
TIMEOUT_S = 5.0

_local = threading.local()


class FailedError(RuntimeError):
    """The failure record is set."""


class _Shape(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared_bytes", c_uint64),
        ("programmatic", ctypes.c_bool),
        ("stream", c_uint32),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "shim_begin": (c_uint64, (ctypes.c_char_p, c_uint64, c_uint32)),
    "shim_end": (None, ()),
    "shim_window_bytes": (c_uint64, ()),
    "shim_memory_bytes": (c_uint64, ()),
    "shim_memory": (c_uint64, (c_uint32,)),
    "shim_run": (c_uint32, ()),
    "shim_go_on": (None, (c_uint32, c_int32)),
    "shim_result": (c_int32, (c_uint32,)),
    "shim_launch": (None, (c_uint32, ctypes.POINTER(_Shape), c_void_p, c_void_p, c_uint64)),
    "shim_record": (None, (c_uint32, c_uint32, c_uint32)),
    "shim_wait": (None, (c_uint32, c_uint32, c_uint32)),
    "shim_sequence": (None, (c_uint32, c_uint64)),
    "shim_await": (None, (c_uint32, c_uint64, c_uint64, c_uint64, c_uint64)),
    "shim_synchronize": (None, (c_uint32,)),
    "shim_be_late": (None, (c_uint32, c_uint32)),
    "shim_store": (None, (c_uint32, c_uint64, c_uint64)),
}


class Machine:
    """A library of kernels, and a world of ranks on which they run."""

    def __init__(self, library: Path, name: str, seed: int, world_size: int) -> None:
        self.library = ctypes.CDLL(str(library))
        self._say_where(library)
        for function, (result, arguments) in _SIGNATURES.items():
            getattr(self.library, function).restype = result
            getattr(self.library, function).argtypes = arguments
        self.base: int = self.library.shim_begin(name.encode(), seed, world_size)
        self.window: int = self.library.shim_window_bytes()
        self.random = random.Random(seed)
        self.calls = (1 << 32) - self.random.randint(1, 12)  # so far: their number wraps around
        self.most_threads = 32 * self.random.randint(1, 2 if world_size < 5 else 1)
        self.ranks = [Rank(self, rank, world_size) for rank in range(world_size)]

    @staticmethod
    def _say_where(library: Path) -> None:
        """For reports, whose addresses are the low half of an address in memory."""
        maps = Path("/proc/self/maps").read_text()
        start = next(line.split("-")[0] for line in maps.split("\n") if line.endswith(str(library)))
        print(f"LIBRARY {library} {start}", flush=True)

    def run(self, program: Callable[[Rank], None]) -> None:
        """The program on every rank. Raises what the first rank raised."""
        for rank in self.ranks:
            rank.start(program)
        there = len(self.ranks)
        while there:
            asking = self.library.shim_run()
            for rank in self.ranks:
                if asking >> rank.rank & 1:
                    left = rank.go_on()
                    there -= left
                    self.library.shim_go_on(rank.rank, int(left))
        self.library.shim_end()
        for rank in self.ranks:
            if rank.error is not None:
                raise rank.error


class Rank:
    """A rank's program and what it sees: it is the communicator and the transport of an op, too."""

    def __init__(self, machine: Machine, rank: int, world_size: int) -> None:
        self.machine, self.rank, self.world_size, self._lib = machine, rank, world_size, machine.library
        self.device, self.timeout_s = torch.device("cpu"), TIMEOUT_S
        self.random = random.Random(machine.random.randrange(1 << 30))
        self.error: BaseException | None = None
        memory = self._lib.shim_memory(rank)
        self._host_words = memory
        self._arena = _Arena(memory + HOST_BYTES, self._lib.shim_memory_bytes() - HOST_BYTES, self.random)
        self._next_host, self._next_shared = memory + 64, CONTROL_BYTES
        self._shared: dict[str, SymmetricBuffer] = {}
        self._requests: list[tuple[str, str]] = []
        self._events = 0
        self._kept: list[torch.Tensor] = []
        bases = tuple(machine.base + r * machine.window for r in range(world_size))
        self.place = Place(
            base=machine.base, window=machine.window, host=self._host_words, context=0, device=self.device, arch="cpu",
            rank=rank, bases=bases,
        )  # fmt: skip
        self.word(OK_AT, c_uint32).value = 1
        for i in range(32):
            self.word(EPOCHS_AT + 4 * i, c_uint32).value = machine.calls
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)

    def word(self, at: int, kind: Any = c_uint64) -> Any:
        """A word of this rank's window."""
        return kind.from_address(self.machine.base + self.rank * self.machine.window + at)

    @property
    def record(self) -> int:
        """The failure that the host was told; valid after `synchronize`."""
        return int(c_uint64.from_address(self._host_words).value)

    # ---- whose turn it is

    def start(self, program: Callable[[Rank], None]) -> None:
        def body() -> None:
            self._mine.acquire()
            _local.rank = self
            try:
                program(self)
            except BaseException as error:
                self.error = error
            self._over = True
            self._theirs.release()

        self._over = False
        threading.Thread(target=body, daemon=True).start()

    def go_on(self) -> bool:
        """Let the program run until it waits for its machine. True: it has ended."""
        self._mine.release()
        self._theirs.acquire()
        return self._over

    def ask(self) -> int:
        """Everything that was asked for has been done; the result of the last."""
        self._theirs.release()
        self._mine.acquire()
        return int(self._lib.shim_result(self.rank))

    # ---- what programs do

    def synchronize(self) -> None:
        self._lib.shim_synchronize(self.rank)
        self.ask()

    def be_late(self, steps: int) -> None:
        self._lib.shim_be_late(self.rank, steps)

    def store(self, rank: int, at: int, value: int) -> None:
        """By the host, into another rank's window, in order with its launches."""
        self._lib.shim_store(self.rank, self.machine.base + rank * self.machine.window + at, value)

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._arena.tensor(shape, dtype)

    def zeros(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.empty(shape, dtype)
        self._copy(tensor, None)
        return tensor

    def pinned(self, words: int) -> torch.Tensor:
        tensor = _tensor_at(self._next_host, (words,), torch.int64)
        self._next_host += 64 * -(-8 * words // 64)
        return tensor

    def put(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A copy in the rank's memory, made on its stream."""
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        copy = self.empty(tensor.shape, tensor.dtype)
        self._copy(copy, tensor)
        return copy

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """What it is when the stream gets here, known when the program has ended."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._kept.append(copy)
        self._copy(copy, tensor)
        return copy

    def _copy(self, to: torch.Tensor, source: torch.Tensor | None) -> None:
        if not to.numel():
            return
        self._copy_bytes(to.data_ptr(), 0 if source is None else source.data_ptr(), to.numel() * to.itemsize)

    def _copy_bytes(self, to: int, source: int, num_bytes: int, stream: int = 0) -> None:
        params = (c_uint64 * 4)(to, source, num_bytes, 0)
        function = ctypes.cast(self._lib.run_copy_bytes, c_void_p)
        shape = _Shape((1, 1, 1), (32, 1, 1), stream=stream)
        self._lib.shim_launch(self.rank, ctypes.byref(shape), function, params, 32)

    # ---- the transport, as csrc/cuda sees it

    def require_transport(self, what: str) -> Rank:
        return self

    def alloc(self, num_bytes: int, what: str) -> SymmetricBuffer:
        at = self._next_shared
        self._next_shared += -(-num_bytes // 4096) * 4096
        assert self._next_shared <= self.machine.window, f"{what}: a window has {self.machine.window} bytes here"
        return SymmetricBuffer(at, self.machine.base + self.rank * self.machine.window + at, num_bytes)

    def shared(self, what: str, num_bytes: int) -> SymmetricBuffer:
        if what not in self._shared or self._shared[what].num_bytes < num_bytes:
            self._shared[what] = self.alloc(num_bytes, what)
        return self._shared[what]

    def release(self, buffer: SymmetricBuffer) -> None:
        pass

    def streams(self) -> tuple[int, int, int]:
        return 0, 1, 2

    def request(self, agree: str, row_bytes: int, text: str) -> int:
        if (agree, text) not in self._requests:
            self._requests.append((agree, text))
        return self._requests.index((agree, text))

    def digest(self, number: int) -> int:
        return int.from_bytes(hashlib.sha256(self._requests[number][0].encode()).digest()[:4], "little") or 1

    # ---- the communicator

    closed = False

    def check_open(self, op: str) -> None:
        pass

    def raise_failure(self, result: int, op: str) -> None:
        raise FailedError(f"{op} on rank {self.rank}: result {result}, record {self.record:x}")

    # ---- the CUDA library

    def event(self) -> int:
        self._events += 1
        return self._events

    def a2a_cuda_event_free(self, event: int) -> int:
        return 0

    def a2a_cuda_await(self, word: int, wanted: int, failure: int, seconds: float) -> int:
        self._lib.shim_await(self.rank, word, wanted, failure, int(seconds * 1e9))
        return self.ask()

    def a2a_cuda_run(self, steps: Any, count: int, streams: Any) -> int:
        for i in range(count):
            step = steps[i]
            stream = int(streams[step.stream] or 0)
            if step.kind == cuda.Step.LAUNCH:
                call = cuda.Call.from_address(step.what)
                if i == 0:
                    self._lib.shim_sequence(self.rank, call.failure or 0)
                self._launch(call, step, stream)
            elif step.kind == cuda.Step.RECORD:
                self._lib.shim_record(self.rank, stream, step.what)
            elif step.kind == cuda.Step.COPY:
                words = step.patch
                self._copy_bytes(step.what, words[0] | words[1] << 32, words[2] | words[3] << 32, stream)
            else:
                self._lib.shim_wait(self.rank, stream, step.what)
        return 0

    def _launch(self, call: cuda.Call, step: cuda.Step, stream: int) -> None:
        params = bytearray(ctypes.string_at(call.params, call.params_bytes))
        patch = bytes(step.patch)[: 4 * step.patch_words]
        assert step.patch_at + len(patch) <= len(params)
        params[step.patch_at : step.patch_at + len(patch)] = patch
        block = call.block if call.function in self.whole_blocks else min(call.block, self.machine.most_threads)
        shape = _Shape((call.grid, 1, 1), (block, 1, 1), call.shared_bytes, bool(call.programmatic), stream)
        buffer = (ctypes.c_char * len(params)).from_buffer(params)
        self._lib.shim_launch(self.rank, ctypes.byref(shape), call.function, ctypes.addressof(buffer), len(params))

    whole_blocks: frozenset[int] = frozenset()  # functions whose blocks have the size that the host says


class _Arena:
    """A rank's memory. What a tensor leaves is given to the next, as torch does: their uses are in the stream's order."""

    def __init__(self, begin: int, num_bytes: int, source: random.Random) -> None:
        self._at, self._end, self._random = begin, begin + num_bytes, source
        self._free: dict[int, list[int]] = {}

    def tensor(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        size = max(64, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free and (self._random.random() < 0.8 or self._at + 2 * size > self._end):
            at = free.pop(self._random.randrange(len(free)))
        else:
            at = self._at
            self._at += size + 16  # no two behind each other
            assert self._at <= self._end, "a rank's memory is full"
        return _tensor_at(at, shape, dtype, lambda: free.append(at))


def _tensor_at(
    at: int, shape: tuple[int, ...], dtype: torch.dtype, gone: Callable[[], object] | None = None
) -> torch.Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    buffer = (ctypes.c_char * num_bytes).from_address(at)
    if gone is not None:
        weakref.finalize(buffer, gone).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


class FakeTorch:
    """torch for an op: tensors with a device or in pinned memory are the running rank's."""

    def __init__(self, sms: int) -> None:
        self._sms = sms

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        shape = shape[0] if len(shape) == 1 else shape
        return torch.empty(shape, dtype=dtype) if device is None else _local.rank.empty(shape, dtype)

    def zeros(
        self, *shape: Any, dtype: torch.dtype = torch.float32, device: Any = None, pin_memory: bool = False
    ) -> torch.Tensor:
        shape = shape[0] if len(shape) == 1 else shape
        if pin_memory:
            return _local.rank.pinned(shape)
        return torch.zeros(shape, dtype=dtype) if device is None else _local.rank.zeros(shape, dtype)

    @property
    def cuda(self) -> Any:
        return SimpleNamespace(
            synchronize=lambda device: _local.rank.synchronize(),
            is_current_stream_capturing=lambda: False,
            get_device_properties=lambda device: SimpleNamespace(multi_processor_count=self._sms),
            device=lambda device: contextlib.nullcontext(),
        )


@dataclass(frozen=True)
class FakeModule:
    """A source's kernels in the library."""

    library: ctypes.CDLL

    def function(self, name: str, shared_bytes: int = 0) -> int:
        return ctypes.cast(getattr(self.library, f"run_{name}"), c_void_p).value or 0


class FakeCuda:
    """a2a.kernels.cuda for an op. `defines`: what the library was compiled with."""

    Call, Step, FAILED = cuda.Call, cuda.Step, cuda.FAILED

    def __init__(self, defines: Mapping[str, int]) -> None:
        self._defines = dict(defines)

    def lib(self) -> Any:
        return _local.rank

    def check(self, error: int, what: str) -> None:
        assert not error, what

    def event(self) -> int:
        return int(_local.rank.event())

    def module(self, name: str, target: cuda.Target, defines: Mapping[str, int]) -> Any:
        return self.modules([name], target, defines)[0]

    def modules(self, names: list[str], target: cuda.Target, defines: Mapping[str, int]) -> list[Any]:
        asked = {**defines, **dict(target.defines)}
        assert asked == self._defines, f"the library was compiled with {self._defines}; asked for {asked}"
        return [FakeModule(_local.rank.machine.library) for _ in names]
