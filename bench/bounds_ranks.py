"""What both ranks of `bounds.py` do: they time everything that it holds against each other, in turn."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (makes "fake" a backend)

import a2a
from a2a.cli.exchanges import POISON, a2a_contender, contender, dist_contender, memcpy_contender, mpi_contender
from a2a.cli.exchanges import Exchange as Cells
from a2a.cli.ranks import Emit, mpi_world
from a2a.errors import UnsupportedError
from a2a.kernels import cpu, prepared
from a2a.measure import Cell, Contender, Control, Timing, alternate, environment

COPIES = ("memcpy", "stream", "lines")  # kCopies in bounds.cpp
MEMCPY_MOST, STREAM_LEAST = 4 << 20, 256 << 10  # bytes of a half: beyond them, that copy is far behind the other
WORDS, SLOT, SLOTS = 256, 256 << 10, 4  # bytes of a rank's words; and as in bounds.cpp
WORD_BYTES = 16 * 2 * WORDS  # for up to 16 bounds
NOTHING, CALLING = "a2a_bench_nothing", "a2a_bench_calling"  # backends of torch.distributed
WHOLE = ("push", "slot", "read ")  # which bounds of small exchanges are also measured as whole calls from Python


@dataclass(frozen=True)
class Request:
    """What every rank is sent."""

    library: str
    sizes: tuple[int, ...]
    budget_s: float
    with_mpi: bool
    command: str


class Exchange(ctypes.Structure):
    """`Exchange` in bounds.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mine", "theirs", "peer_out", "ring", "peer_ring", "bounce")),
        *((name, ctypes.c_uint64) for name in ("own_half", "peer_half", "bytes", "peer_pid", "peer_input")),
        *((name, ctypes.c_uint32) for name in ("copy", "past_cache", "epoch", "count")),
    )


def repeats(num_bytes: int) -> int:
    """How many exchanges are one call into C, so that the call itself, half a microsecond, is lost among them."""
    return max(1, min(128, (1 << 20) // num_bytes))


@contextlib.contextmanager
def shared_memory(rank: int, num_bytes: int) -> Iterator[mmap.mmap]:
    """Memory that both ranks map, every page touched: anonymous, as a2a's."""
    fd = os.memfd_create("bounds") if rank == 0 else -1
    if rank == 0:
        os.ftruncate(fd, num_bytes)
    told: list[Any] = [None] * 2
    dist.all_gather_object(told, (os.getpid(), fd))
    if rank != 0:
        fd = os.open(f"/proc/{told[0][0]}/fd/{told[0][1]}", os.O_RDWR)
    memory = mmap.mmap(fd, num_bytes)
    memory[:: mmap.PAGESIZE] = bytes(-(-num_bytes // mmap.PAGESIZE))
    dist.barrier()
    os.close(fd)
    yield memory


def bounds(exchange: Cells, library: ctypes.CDLL, memory: mmap.mmap) -> tuple[list[Contender], list[Contender]]:
    """The bounds of one cell: exchanges in C, `repeats` to a call, and whole calls from Python.

    `memory` is of `memory_bytes` bytes. Each bound has buffers of its own, as all other contenders have: what one leaves in
    the caches is no help to the next.
    """
    rank, half, pages = exchange.rank, exchange.num_bytes // 2, _pages(exchange.num_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    rings = base + WORD_BYTES
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    bounce = torch.zeros(SLOT, dtype=torch.uint8)
    made: list[Contender] = []
    whole: list[Contender] = []

    def shared(place: int) -> torch.Tensor:
        at = WORD_BYTES + 2 * SLOTS * SLOT + place * pages
        return flat[at : at + exchange.num_bytes].view(exchange.dtype)

    def add(
        name: str, function: str, copy: str = "memcpy", *, symmetric: bool = False, past_cache: bool = False
    ) -> None:
        if symmetric:
            place = 4 * COPIES.index(copy)  # of two inputs and two outputs
            source, output, peer_output = shared(place + rank), shared(place + 2 + rank), shared(place + 3 - rank)
        else:
            source = torch.empty(exchange.num_bytes // exchange.dtype.itemsize, dtype=exchange.dtype)
            output = peer_output = torch.empty_like(source)
        exchange.fill(source)
        told: list[Any] = [None] * 2
        dist.all_gather_object(told, (os.getpid(), source.data_ptr()))
        words = base + len(made) * 2 * WORDS
        one = Exchange(
            mine=words + rank * WORDS,
            theirs=words + (1 - rank) * WORDS,
            peer_out=peer_output.data_ptr() + rank * half,
            ring=rings + rank * SLOTS * SLOT,
            peer_ring=rings + (1 - rank) * SLOTS * SLOT,
            bounce=bounce.data_ptr(),
            own_half=rank * half,
            peer_half=(1 - rank) * half,
            bytes=half,
            peer_pid=told[1 - rank][0],
            peer_input=told[1 - rank][1] + rank * half,
            copy=COPIES.index(copy),
            past_cache=past_cache,
        )
        run = _repeated(library, function, one, output, source, repeats(exchange.num_bytes), (bounce, memory))
        once = _repeated(library, function, one, output, source, 1)
        checked = None if function == "bound_flag" else exchange
        made.append(_contender(f"bound {name}", run, once, output, checked))
        if 2 * half <= SLOTS * SLOT and name.startswith(WHOLE):
            call = by_cpython(library, function, one) or by_ctypes(library, function, one)
            whole.append(_contender(f"whole {name}", lambda: call(output, source), once, output, checked))
            if not symmetric:
                through = through_torch(call, output, source)
                whole.append(_contender(f"torch {name}", through, once, output, checked))

    add("flag", "bound_flag")
    if half > MEMCPY_MOST:  # no bound, as it is slower: what copying several pages at a time gains
        add("line by line", "bound_copy", "lines", symmetric=True)
    for copy in COPIES[:2]:
        if (copy == "memcpy" and half > MEMCPY_MOST) or (copy == "stream" and half < STREAM_LEAST):
            continue
        add(f"copy by {copy}", "bound_copy", copy, symmetric=True)
        add(f"staged by {copy}", "bound_staged", copy)
        add(f"read and {copy}", "bound_read", copy)
        if half <= MEMCPY_MOST:  # no bounds, as they do more than exchange
            add(f"used after read and {copy}", "bound_read_used", copy)
    if 2 * half <= SLOTS * SLOT:
        add("push by memcpy", "bound_push", symmetric=True)
        add("slot by memcpy", "bound_slot")
    if half >= STREAM_LEAST:
        add("read in parts and stream", "bound_read", "stream", past_cache=True)
        if half <= MEMCPY_MOST:
            add("used after read in parts and stream", "bound_read_used", "stream", past_cache=True)
    return made, whole


def _repeated(
    library: ctypes.CDLL, function: str, what: Any, output: Any, source: Any, times: int, keep: object = None
) -> Callable[[], int]:
    repeat = library.bound_repeat
    repeat.restype, repeat.argtypes = ctypes.c_int, (*(ctypes.c_void_p,) * 4, ctypes.c_uint32)
    call = ctypes.cast(getattr(library, function), ctypes.c_void_p)
    address, to, of = ctypes.addressof(what), output.data_ptr(), source.data_ptr()

    def run(keep: object = (what, output, source, keep)) -> int:  # what the addresses point into
        result: int = repeat(call, address, to, of, times)
        return result

    return run


def _contender(
    name: str, run: Callable[[], object], once: Callable[[], int], output: torch.Tensor, exchange: Cells | None
) -> Contender:
    def check() -> int:
        output.view(torch.uint8).fill_(POISON)
        dist.barrier()  # a bound does not ask whether the peer's memory is free
        result = once()
        dist.barrier()
        if result:
            raise UnsupportedError("this rank may not read its peer's memory")
        return 0 if exchange is None else exchange.wrong(output)

    return Contender(name, run, check, algorithm=name.partition(" ")[2], optional=True)


def library_call(exchange: Cells, comm: a2a.Communicator, library: ctypes.CDLL, memory: str) -> Contender:
    """What `a2a.all_to_all_single` calls in the end, alone: the rest of its time is its checks, and Python's."""
    count = exchange.num_bytes // exchange.dtype.itemsize
    make: Callable[..., torch.Tensor] = comm.empty if memory == "symmetric" else torch.empty
    source, output = make(count, dtype=exchange.dtype), make(count, dtype=exchange.dtype)
    request = comm.require_transport("bounds").request("bounds", exchange.dtype.itemsize, "bounds")
    even = cpu.Even(comm.handle, request, exchange.num_bytes // 2)
    again = ctypes.cast(cpu.lib().a2a_all_to_all_again, ctypes.c_void_p)
    address, to, of = ctypes.addressof(even), output.data_ptr(), source.data_ptr()
    times = repeats(exchange.num_bytes)

    def run(keep: object = (even, source, output)) -> None:
        library.bound_repeat(again, ctypes.c_void_p(address), ctypes.c_void_p(to), ctypes.c_void_p(of), times)

    return contender(f"call {memory}", exchange, source, output, run, algorithm=memory)


# --------------------------------------------------------------------------------------- what Python can't do without


class Least(ctypes.Structure):
    """`Least` in bounds.cpp."""

    _fields_ = (("call", ctypes.c_void_p), ("what", ctypes.c_void_p))


def by_ctypes(library: ctypes.CDLL, function: str, what: Exchange) -> Callable[..., object]:
    """A function of (output, input) that calls one of C with `what` and their memory. Keep `what`."""
    call, address = getattr(library, function), ctypes.addressof(what)
    call.restype, call.argtypes = ctypes.c_int, (ctypes.c_void_p,) * 3
    return lambda output, source: call(address, output.data_ptr(), source.data_ptr())


def by_cpython(library: ctypes.CDLL, function: str, what: Exchange) -> Callable[..., object] | None:
    """The same as a function that CPython calls by itself; None: not with this Python or torch."""
    native = prepared.library()
    if native is None:
        return None
    what.least = Least(ctypes.cast(getattr(library, function), ctypes.c_void_p), ctypes.addressof(what))
    make = ctypes.PyDLL(library._name).bound_function
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p)
    call: Callable[..., object] = make(ctypes.addressof(native.table), ctypes.addressof(what.least))
    return call


class _Done(dist.Work):
    """A finished call."""

    def wait(self, timeout: object = None) -> bool:
        return True


class _Nothing(dist.ProcessGroup):
    """The least that a backend in Python is."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.done = _Done()

    def all_to_all_single(self, output: Any, input: Any, out_splits: Any, in_splits: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        return self.done

    alltoall_base = all_to_all_single  # type: ignore[assignment]


class _Calling(_Nothing):
    """One that makes a call; which one, is set later."""

    call: Callable[..., object]

    def all_to_all_single(self, output: Any, input: Any, out_splits: Any, in_splits: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        self.call(output, input)
        return self.done

    alltoall_base = all_to_all_single  # type: ignore[assignment]


def register_groups() -> None:
    """Make backends of both; torch has one in C++, "fake", that does nothing."""
    for name, kind in ((NOTHING, _Nothing), (CALLING, _Calling)):
        dist.Backend.register_backend(
            name, lambda options, _, kind=kind: kind(options), extended_api=True, devices=["cpu"]
        )


def through_torch(call: Callable[..., object], output: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """`call` as a backend of torch.distributed makes it."""
    group: Any = dist.new_group(backend=CALLING)
    group.call = call
    return lambda: dist.all_to_all_single(output, source, group=group)


def least(exchange: Cells, library: ctypes.CDLL) -> list[Contender]:
    """What a call takes that moves nothing: of C from Python, in two ways; of a backend of torch's; and checks."""
    source = torch.empty(exchange.num_bytes // exchange.dtype.itemsize, dtype=exchange.dtype)
    output, what = torch.empty_like(source), Exchange()
    foreign, direct = by_ctypes(library, "bound_nothing", what), by_cpython(library, "bound_nothing", what)
    dtype, shape, device = source.dtype, source.shape, source.device
    python, native = dist.new_group(backend=NOTHING), dist.new_group(backend="fake")

    def checks() -> bool:
        return (
            output.dtype is dtype is source.dtype
            and (output.shape == shape == source.shape)
            and (output.is_contiguous() and source.is_contiguous())
            and (output.device == device == source.device)
        )

    made: dict[str, Callable[[], object]] = {
        "call by ctypes": lambda: foreign(output, source),
        "checks": checks,
        "dist to Python": lambda: dist.all_to_all_single(output, source, group=python),
        "dist to C++": lambda: dist.all_to_all_single(output, source, group=native),
    }
    if direct is not None:
        made["call by CPython"] = lambda keep=what: direct(output, source)  # type: ignore[misc]

    def check(run: Callable[[], object]) -> int:
        run()
        return 0

    return [Contender(f"least {name}", run, lambda run=run: check(run), algorithm=name) for name, run in made.items()]  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------------------- all


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_bytes(num_bytes: int) -> int:
    """Words, rings, and two inputs and two outputs of so many bytes for each kind of copy."""
    return WORD_BYTES + 2 * SLOTS * SLOT + 4 * len(COPIES) * _pages(num_bytes)


def work(request: Request, emit: Emit) -> None:
    """Measure every size; on each rank."""
    control, library = Control(), ctypes.CDLL(request.library)
    register_groups()
    group = dist.new_group(backend="a2a")
    world = mpi_world(2) if request.with_mpi else None
    for size in request.sizes:
        exchange = Cells.of_bytes("all_to_all", size, torch.float32, control.rank, 2)
        with a2a.communicator() as comm, shared_memory(control.rank, memory_bytes(size)) as memory:
            exchanges, whole = bounds(exchange, library, memory)
            one_by_one = [
                dataclasses.replace(a2a_contender(exchange, comm, "symmetric"), name="a2a symmetric"),
                dataclasses.replace(a2a_contender(exchange, comm, "ordinary"), name="a2a ordinary"),
                dataclasses.replace(dist_contender("a2a", exchange, group), name="a2a dist"),
                dist_contender("gloo", exchange, None),
                *([mpi_contender(exchange, world)] if world is not None else []),
                memcpy_contender(exchange),
                *least(exchange, library),
                *whole,
            ]
            repeated = exchanges + [
                library_call(exchange, comm, library, memory) for memory in ("symmetric", "ordinary")
            ]
            timings = alternate([*one_by_one, *repeated], control, budget_s=request.budget_s)
            env = environment(comm.topology.summary(), request.command)
            for each in (*one_by_one, *repeated):
                impl, _, what = each.name.partition(" ")
                where = {
                    "memory": "ordinary" if what == "dist" else what,
                    "through": "dist" if what == "dist" else "a2a",
                }
                timing = timings[each.name]["total"]
                if each in repeated:
                    timing = _of_one(timing, repeats(size))
                cell = Cell("all_to_all_bounds", size, "float32", 2, where if impl == "a2a" else {}, env)
                emit({"line": asdict(cell.line(impl, timing, algorithm=each.algorithm))})
            del one_by_one, repeated, exchanges, whole


def _of_one(timing: Timing, times: int) -> Timing:
    samples = tuple(us / times for us in timing.samples_us)
    return dataclasses.replace(timing, samples_us=samples, calls=timing.calls * times)
