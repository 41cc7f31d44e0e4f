"""What the floors of `run_cpu.py` leave room for on this machine: bench/results/cpu_bounds.jsonl.

    python bench/bounds.py [--out bench/results/cpu_bounds.jsonl] [--only 4K,64M] [--budget SECONDS]
    python bench/bounds.py --table bench/results/cpu_bounds.jsonl

Two ranks time gloo, MPI, a2a and the least that such an exchange takes (`bounds.cpp`), alternating in one run. A floor asks
for a time: the baseline's p50 divided by it. A bound longer than that forbids the floor here; a shorter one leaves the
difference to a2a as work to do. The table shows, for every floor of two ranks, what the bound allows: in bold where that is
less than the floor. The bounds:

* `flag`: both ranks store one word and wait for the other's, through one call of ctypes with a2a's arguments. Nothing moves.
* `copy` (symmetric tensors): each half of the send buffer is copied once, then a flag.
* `staged` (ordinary tensors): the remote half through a ring in shared memory, so twice; the own half once.
* `read` (ordinary tensors): the remote half through `process_vm_readv`, the own half by a copy, then a flag.

Copies are libc's memcpy or, past the cache, the library's own (`stream`); what is faster counts. So these are bounds for the
ways that are known here, not proofs that no other way exists.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from run_cpu import FLOORS, SIZES, Floor

from a2a.cli import parse, show
from a2a.cli.ranks import Emit, find_mpi, mpi_world, run_ranks
from a2a.errors import UnsupportedError
from a2a.kernels import cpu
from a2a.measure import Contender, Line

FOLDER = Path(__file__).resolve().parent
ISA_FLAGS = {  # as in csrc/CMakeLists.txt
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
}
COPIES = ("memcpy", "stream", "lines")  # kCopies in bounds.cpp
MEMCPY_MOST, STREAM_LEAST = 4 << 20, 256 << 10  # bytes of a half: beyond them, that copy is far behind the other
WORDS, SLOT, SLOTS = 256, 256 << 10, 4  # bytes of a rank's words; and as in bounds.cpp
WORD_BYTES = 16 * 2 * WORDS  # for up to 16 bounds


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


def compile_library(folder: Path) -> Path:
    """Build bounds.cpp for the instructions that a2a uses here."""
    isa, target = cpu.isa(), folder / "bounds.so"
    flags = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w", f"-DA2A_ISA={isa}", *ISA_FLAGS[isa])
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, str(FOLDER / "bounds.cpp"), "-o", str(target)], check=True)
    return target


# ------------------------------------------------------------------------------------------------------ on both ranks


@contextlib.contextmanager
def shared_memory(rank: int, num_bytes: int) -> Iterator[mmap.mmap]:
    """Memory that both ranks map, every page touched: anonymous, as a2a's."""
    import torch.distributed as dist

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


def bounds(exchange: Any, library: ctypes.CDLL, memory: mmap.mmap) -> list[Contender]:
    """The bounds of one cell, as contenders; `memory` is of `memory_bytes` bytes.

    Each has buffers of its own, as all other contenders have: what one leaves in the caches is no help to the next.
    """
    import torch
    import torch.distributed as dist

    rank, half, pages = exchange.rank, exchange.num_bytes // 2, _pages(exchange.num_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    rings = base + WORD_BYTES
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    bounce = torch.zeros(SLOT, dtype=torch.uint8)
    made: list[Contender] = []

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
        made.append(_contender(name, library, function, one, output, source, exchange, (source, bounce, memory)))

    add("flag", "bound_flag")
    if half > MEMCPY_MOST:  # no bound, as it is slower: what copying several pages at a time gains
        add("line by line", "bound_copy", "lines", symmetric=True)
    for copy in COPIES[:2]:
        if (copy == "memcpy" and half > MEMCPY_MOST) or (copy == "stream" and half < STREAM_LEAST):
            continue
        add(f"copy by {copy}", "bound_copy", copy, symmetric=True)
        add(f"staged by {copy}", "bound_staged", copy)
        add(f"read and {copy}", "bound_read", copy)
    if half >= STREAM_LEAST:
        add("read in parts and stream", "bound_read", "stream", past_cache=True)
    return made


def _contender(
    name: str,
    library: ctypes.CDLL,
    function: str,
    one: Exchange,
    output: Any,
    source: Any,
    exchange: Any,
    keep: tuple[Any, ...],
) -> Contender:
    import torch
    import torch.distributed as dist

    from a2a.cli.exchanges import POISON

    call: Callable[[int, int, int], int] = getattr(library, function)
    call.restype, call.argtypes = ctypes.c_int, (ctypes.c_void_p,) * 3  # type: ignore[attr-defined]
    address, to, of = ctypes.addressof(one), output.data_ptr(), source.data_ptr()

    def run() -> None:
        call(address, to, of)

    def check() -> int:
        output.view(torch.uint8).fill_(POISON)
        dist.barrier()  # a bound does not ask whether the peer's memory is free
        result = call(address, to, of)
        dist.barrier()
        if result:
            raise UnsupportedError("this rank may not read its peer's memory")
        return 0 if function == "bound_flag" else exchange.wrong(output)

    run.keep = (one, *keep)  # type: ignore[attr-defined]  # what the addresses point into
    return Contender(f"bound {name}", run, check, algorithm=name, optional=True)


def library_call(exchange: Any, comm: Any, memory: str) -> Contender:
    """What `a2a.all_to_all_single` calls in the end, alone: the rest of its time is its checks, in Python."""
    import torch

    import a2a
    from a2a.cli.exchanges import contender

    count = exchange.num_bytes // exchange.dtype.itemsize
    make = comm.empty if memory == "symmetric" else torch.empty
    source, output = make(count, dtype=exchange.dtype), make(count, dtype=exchange.dtype)
    a2a.all_to_all_single(output, source, group=comm)
    prepared = comm.prepared[source.dtype, source.shape, output.shape]
    call, address, to, of = prepared.call, prepared.address, output.data_ptr(), source.data_ptr()

    def run(keep: object = source) -> None:
        call(address, to, of)

    return contender(f"call {memory}", exchange, source, output, run, algorithm=memory)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_bytes(num_bytes: int) -> int:
    """Words, rings, and two inputs and two outputs of so many bytes for each kind of copy."""
    return WORD_BYTES + 2 * SLOTS * SLOT + 4 * len(COPIES) * _pages(num_bytes)


def work(request: Request, emit: Emit) -> None:
    """Measure every size; on each rank."""
    import torch
    import torch.distributed as dist

    import a2a
    from a2a.cli.exchanges import Exchange as Cells
    from a2a.cli.exchanges import a2a_contender, dist_contender, memcpy_contender, mpi_contender
    from a2a.measure import Cell, Control, alternate, environment

    control, library = Control(), ctypes.CDLL(request.library)
    group = dist.new_group(backend="a2a")
    world = mpi_world(2) if request.with_mpi else None
    for size in request.sizes:
        exchange = Cells.of_bytes("all_to_all", size, torch.float32, control.rank, 2)
        with a2a.communicator() as comm, shared_memory(control.rank, memory_bytes(size)) as memory:
            contenders = [
                dataclasses.replace(a2a_contender(exchange, comm, "symmetric"), name="a2a symmetric"),
                dataclasses.replace(a2a_contender(exchange, comm, "ordinary"), name="a2a ordinary"),
                dataclasses.replace(dist_contender("a2a", exchange, group), name="a2a dist"),
                library_call(exchange, comm, "symmetric"),
                library_call(exchange, comm, "ordinary"),
                dist_contender("gloo", exchange, None),
                *([mpi_contender(exchange, world)] if world is not None else []),
                memcpy_contender(exchange),
                *bounds(exchange, library, memory),
            ]
            timings = alternate(contenders, control, budget_s=request.budget_s)
            env = environment(comm.topology.summary(), request.command)
            for contender in contenders:
                impl, _, what = contender.name.partition(" ")
                case = {
                    "memory": "ordinary" if what == "dist" else what,
                    "through": "dist" if what == "dist" else "a2a",
                }
                cell = Cell("all_to_all_bounds", size, "float32", 2, case if impl == "a2a" else {}, env)
                line = cell.line(impl, timings[contender.name]["total"], algorithm=contender.algorithm)
                emit({"line": asdict(line)})
            del contenders


# ------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Row:
    """One floor, held against one run: `needed_us` is the time that it asks for."""

    case: dict[str, object]
    baseline: str
    bytes: int
    floor: float
    reached: float
    needed_us: float
    a2a_us: float
    call_us: float  # of which in the library
    bound_us: float
    bound: str

    @property
    def forbidden(self) -> bool:
        return self.bound_us > self.needed_us


def rows(lines: Sequence[Line], floors: Sequence[Floor] = FLOORS) -> Iterator[Row]:
    """Every floor of two ranks' all_to_all that these lines speak of."""
    for floor in floors:
        if (floor.op, floor.ranks) != ("all_to_all", 2):
            continue
        case = dict(floor.case)
        kinds = ("copy",) if case.get("memory") == "symmetric" else ("staged", "read")
        for size, ratio in floor.by_bytes:
            cell = [line for line in lines if line.bytes == size and line.p50_us]
            mine = [x for x in cell if x.impl == "a2a" and all(x.case.get(k) == v for k, v in case.items())]
            baseline = [x for x in cell if x.impl == floor.baseline]
            able = [x for x in cell if x.impl == "bound" and x.algorithm.startswith(kinds)]
            if not (mine and baseline and able):
                continue
            best = min(able, key=lambda line: line.p50_us or 0)
            call = next(x for x in cell if x.impl == "call" and x.algorithm == case.get("memory", "ordinary"))
            base_us, a2a_us, call_us, bound_us = (x.p50_us or 0.0 for x in (baseline[0], mine[0], call, best))
            reached, needed_us = base_us / a2a_us, base_us / ratio
            yield Row(case, floor.baseline, size, ratio, reached, needed_us, a2a_us, call_us, bound_us, best.algorithm)


def markdown(lines: Sequence[Line], *, met: bool) -> str:
    """The table of bench/README.md: of the floors that this run misses, or (`met`) of all."""
    out = [
        "| tensors | bytes | against | floor | reached | bound allows | floor needs, us | a2a | library | bound | by |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows(lines):
        if row.reached >= row.floor and not met:
            continue
        allowed = f"{row.needed_us * row.floor / row.bound_us:.3g}"
        cells = (
            str(row.case.get("memory", "through torch.distributed")),
            show.size_text(row.bytes),
            row.baseline,
            f"{row.floor:g}",
            f"{row.reached:.3g}",
            f"**{allowed}**" if row.forbidden else allowed,
            *(show.us_text(us) for us in (row.needed_us, row.a2a_us, row.call_us, row.bound_us)),
            row.bound,
        )
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "cpu_bounds.jsonl")
    parser.add_argument(
        "--only", default=SIZES, help="sizes, as a2a bench takes them; the file keeps its lines of others"
    )
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of samples a size")
    parser.add_argument("--table", type=Path, help="measure nothing; print this file as bench/README.md's table")
    arguments = parser.parse_args()
    if arguments.table:
        print(markdown([Line.from_json(text) for text in arguments.table.read_text().splitlines()], met=False))
        return 0
    from bounds import Request as Sent  # by its own name, under which ranks of any launcher can import it
    from bounds import work as sent

    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH")])
    )
    mpi = None
    with contextlib.suppress(UnsupportedError):
        mpi = find_mpi()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        request = Sent(
            str(compile_library(Path(folder))),
            tuple(parse.sizes(arguments.only)),
            arguments.budget,
            mpi is not None,
            f"python bench/bounds.py --only {arguments.only} --budget {arguments.budget:g}",
        )
        run_ranks(sent, request, 2, lambda message: lines.append(Line(**message["line"])), mpi=mpi)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.out.exists():
        old = [Line.from_json(text) for text in arguments.out.read_text().splitlines()]
        lines = sorted([x for x in old if x.bytes not in request.sizes] + lines, key=lambda line: line.bytes)
    arguments.out.write_text("".join(line.to_json() + "\n" for line in lines))
    print(markdown(lines, met=True))
    return 1 if any(line.wrong for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
