"""What the CPU algorithms are made of, as programs of copies and sums that run without signals: for `a2a.calibrate`.

Each function of `PROGRAMS` says what a primitive of `a2a.topology.costs` does with pieces of so many bytes, one from
each peer: the steps of csrc/cpu's kernels, in their order, over memory that lies where theirs does. Where a kernel
changes what it copies, this changes with it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from a2a.algorithms.reduction_base import DTYPES, ONE_SHOT_BYTES
from a2a.kernels import cpu
from a2a.reductions import all_gather_into_tensor

if TYPE_CHECKING:
    from a2a.comm import Communicator

KIB, MIB = 1 << 10, 1 << 20
# As in csrc/cpu: kReadMost, kPastCache, kBounce; a context's stream_bytes; kPage, and the slots of a ring; of a two-shot.
READ_MOST, PAST_CACHE, BOUNCE = 4 * MIB, 2 * MIB, 256 * KIB
STREAM_FROM, PAGE, SLOTS = MIB, 4 * KIB, 4
LEAST_UNIT, HAND_UNIT = 16 * KIB, 32 * KIB
COPY, STREAM, FETCH, READ, READ_STREAM, SUM, SUM_STREAM = range(7)  # A2A_STEP_*
FLOAT32 = DTYPES[torch.float32]


@dataclass(frozen=True)
class Place:
    """A tensor at `base`, or `slots` slots that lie `stride` apart and are used in turn."""

    base: int
    stride: int = 0
    slots: int = 0

    def __add__(self, num_bytes: int) -> Place:
        return Place(self.base + num_bytes, self.stride, self.slots)


@dataclass(frozen=True)
class Step:
    """A copy of one place to another, a read of `rank`'s memory, or a sum of several places."""

    kind: int
    out: Place
    ins: tuple[Place, ...]
    rank: int = 0
    dtype: int = FLOAT32


@dataclass(frozen=True)
class Program:
    """All steps for each chunk of each piece."""

    steps: tuple[Step, ...]
    piece: int
    chunk: int


class Bench:
    """The memory that primitives work on, of this rank and of its peers. Collective to make; closed with the communicator.

    Args:
        most: the most bytes that come from others.
    """

    def __init__(self, comm: Communicator, most: int) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self.peers = [(comm.rank + i) % comm.world_size for i in range(1, comm.world_size)]
        transport = comm.require_transport("calibrate")
        self.reads = not transport.why_no_reads
        self.slot: int = -(-transport.staging_bytes // SLOTS // PAGE) * PAGE
        self._cores: int = transport.cores
        self.eager = min(self.slot // 8, 16 * KIB)
        tensor = most + -(-most // len(self.peers)) + PAGE  # what comes from others, and the own piece
        self.source, self.output = (torch.zeros(tensor, dtype=torch.uint8) for _ in range(2))
        sizes = {
            "tensor": tensor,
            "rings": self.world_size * SLOTS * self.slot,
            "published": SLOTS * 2 * self.slot,
            "inputs": 2 * ONE_SHOT_BYTES,
        }
        self._shared = {name: transport.alloc(num_bytes, f"calibrate: {name}") for name, num_bytes in sizes.items()}
        for buffer in self._shared.values():
            comm.own(functools.partial(transport.release, buffer))
        addresses = torch.empty(comm.world_size, dtype=torch.int64)
        all_gather_into_tensor(addresses, torch.tensor([self.source.data_ptr()]), comm)
        self._sources = addresses.tolist()

    def of(self, rank: int, name: str) -> Place:
        """Where a rank's part of shared memory is mapped here."""
        buffer = self._shared[name]
        if rank == self.rank:
            return Place(buffer.pointer)
        return Place(cpu.lib().a2a_peer_memory(self.comm.handle, rank, buffer.address))

    def slots(self, place: Place, num_bytes: int, count: int = SLOTS) -> Place:
        return Place(place.base, num_bytes, count)

    def ring(self, to: int, source: int) -> Place:
        """The ring of slots from one rank to another."""
        return self.slots(self.of(to, "rings") + source * SLOTS * self.slot, self.slot)

    def published(self, rank: int) -> Place:
        """The ring of slots that a rank publishes in."""
        return self.slots(self.of(rank, "published"), 2 * self.slot)

    def mine(self, piece: int, peer: int) -> Place:
        """The piece for a peer; the own piece lies last."""
        return Place(self.source.data_ptr()) + self._index(peer) * piece

    def theirs(self, piece: int, peer: int) -> Place:
        """Where the piece from a peer goes; the own one lies last."""
        return Place(self.output.data_ptr()) + self._index(peer) * piece

    def source_of(self, peer: int, piece: int) -> Place:
        """A peer's piece for this rank, in its own addresses."""
        index = (self.rank - peer) % self.world_size - 1
        return Place(self._sources[peer]) + index * piece

    def _index(self, peer: int) -> int:
        return len(self.peers) if peer == self.rank else self.peers.index(peer)

    def streams(self, piece: int, least: int = STREAM_FROM) -> bool:
        """Whether a collective of such pieces goes past the caches."""
        return piece * self.world_size >= least

    def unit(self, share: int) -> int:
        """What a two-shot moves at once."""
        most = min(HAND_UNIT, self.slot) if self.world_size <= self._cores else self.slot
        return min(max(-(-share // 4 // PAGE) * PAGE, LEAST_UNIT), most)

    def runner(self, program: Program, times: int) -> Callable[[], int]:
        """What runs a program so many times; returns 0 or an error."""
        steps = (cpu.Step * len(program.steps))()
        keep = []
        for struct, step in zip(steps, program.steps, strict=True):
            ins = (cpu.Place * len(step.ins))(*(cpu.Place(p.base, p.stride, p.slots, 0) for p in step.ins))
            keep.append(ins)
            struct.kind, struct.dtype, struct.terms, struct.rank = step.kind, step.dtype, len(step.ins), step.rank
            struct.out = cpu.Place(step.out.base, step.out.stride, step.out.slots, 0)
            struct.in_ = ctypes.cast(ins, ctypes.POINTER(cpu.Place))
        call, handle = cpu.lib().a2a_run_steps, self.comm.handle
        piece, chunk = program.piece, program.chunk

        def run(keep: object = (keep, self)) -> int:
            result: int = call(handle, steps, len(steps), piece, chunk, times)
            return result

        return run


def copy(bench: Bench, piece: int) -> Program | None:
    """Own memory to own memory."""
    whole = piece * len(bench.peers)
    step = Step(COPY, Place(bench.output.data_ptr()), (Place(bench.source.data_ptr()),))
    return Program((step,), whole, whole)


def stream(bench: Bench, piece: int) -> Program | None:
    """The same past the caches."""
    made = copy(bench, piece)
    assert made is not None
    (step,) = made.steps
    return Program((Step(STREAM, step.out, step.ins),), made.piece, made.chunk) if bench.streams(piece) else None


def eager(bench: Bench, piece: int) -> Program | None:
    """Small pieces of an all-to-all: beside the first signal."""
    if piece > bench.eager:
        return None
    steps = [Step(COPY, bench.ring(peer, bench.rank), (bench.mine(piece, peer),)) for peer in bench.peers]
    steps += [Step(COPY, bench.theirs(piece, peer), (bench.ring(bench.rank, peer),)) for peer in bench.peers]
    return Program(tuple(steps), piece, piece)


def push(bench: Bench, piece: int) -> Program | None:
    """Stored into peers' symmetric tensors."""
    kind = STREAM if bench.streams(piece) else COPY
    steps = [Step(kind, bench.of(p, "tensor") + bench._index(p) * piece, (bench.mine(piece, p),)) for p in bench.peers]
    return Program(tuple(steps), piece, min(piece, 16 * MIB))


def read(bench: Bench, piece: int) -> Program | None:
    """Pieces of middling size of ordinary tensors: read from the peer's process."""
    if not bench.reads or not bench.eager < piece <= READ_MOST:
        return None
    past_cache = bench.streams(piece) and piece >= PAST_CACHE
    kind, chunk = (READ_STREAM, BOUNCE) if past_cache else (READ, piece)
    steps = [Step(kind, bench.theirs(piece, p), (bench.source_of(p, piece),), rank=p) for p in bench.peers]
    return Program(tuple(steps), piece, min(piece, chunk))


def stage(bench: Bench, piece: int) -> Program | None:
    """Through the rings of pairs of ranks."""
    if piece <= bench.eager:
        return None
    into, out = (FETCH, STREAM) if bench.streams(piece) else (COPY, COPY)
    steps = []
    for peer in bench.peers:
        steps.append(Step(into, bench.ring(peer, bench.rank), (bench.mine(piece, peer),)))
        steps.append(Step(out, bench.theirs(piece, peer), (bench.ring(bench.rank, peer),)))
    return Program(tuple(steps), piece, min(piece, bench.slot))


def gather(bench: Bench, piece: int) -> Program | None:
    """A rank's share is published in its ring, from where all take it."""
    unit, kind = bench.unit(piece), STREAM if bench.streams(piece, 2 * STREAM_FROM) else COPY
    steps = [Step(COPY, bench.published(bench.rank), (bench.mine(piece, bench.rank),))]
    steps += [Step(kind, bench.theirs(piece, peer), (bench.published(peer),)) for peer in bench.peers]
    return Program(tuple(steps), piece, min(piece, unit))


def one_shot(bench: Bench, piece: int) -> Program | None:
    """Every rank's whole input in a slot that all sum."""
    if piece > ONE_SHOT_BYTES:
        return None
    ranks = range(bench.world_size)
    slots = {rank: bench.slots(bench.of(rank, "inputs"), ONE_SHOT_BYTES, 2) for rank in ranks}
    publish = Step(COPY, slots[bench.rank], (bench.mine(piece, bench.rank),))
    total = Step(SUM, bench.theirs(piece, bench.rank), _terms(bench, piece, slots))
    return Program((publish, total), piece, piece)


def reduce_staged(bench: Bench, piece: int) -> Program | None:
    """A rank's share of all inputs comes through rings and is summed."""
    kind = SUM_STREAM if bench.streams(piece, 2 * STREAM_FROM) else SUM
    total = Step(kind, bench.theirs(piece, bench.rank), _terms(bench, piece, _rings(bench)))
    sent = _send(bench, piece, FETCH if kind == SUM_STREAM else COPY)
    return Program((*sent, total), piece, bench.unit(piece))


def reduce_loaded(bench: Bench, piece: int) -> Program | None:
    """A rank's share of all inputs is summed where it lies, in peers' symmetric tensors."""
    kind = SUM_STREAM if bench.streams(piece, 2 * STREAM_FROM) else SUM
    total = Step(kind, bench.theirs(piece, bench.rank), _terms(bench, piece, _inputs(bench, piece)))
    return Program((total,), piece, bench.unit(piece))


def reduce_gather(bench: Bench, piece: int) -> Program | None:
    """The whole of a two-shot all-reduce: the sum of what came through rings is published, and all take it. In place."""
    own, mine = bench.published(bench.rank), bench.mine(piece, bench.rank)
    steps = [Step(SUM, own, _terms(bench, piece, _rings(bench))), Step(COPY, mine, (own,))]
    steps += [Step(COPY, bench.mine(piece, peer), (bench.published(peer),)) for peer in bench.peers]
    return Program((*_send(bench, piece, COPY), *steps), piece, bench.unit(piece))


def reduce_push(bench: Bench, piece: int) -> Program | None:
    """The same of symmetric tensors: peers' shares are loaded, and the sum is stored into theirs. In place."""
    inputs = _inputs(bench, piece)
    inputs[bench.rank] = bench.of(bench.rank, "tensor") + bench.rank * piece
    total = Step(SUM, inputs[bench.rank], tuple(inputs[rank] for rank in range(bench.world_size)))
    steps = [Step(COPY, inputs[peer], (inputs[bench.rank],)) for peer in bench.peers]
    return Program((total, *steps), piece, bench.unit(piece))


def _send(bench: Bench, piece: int, kind: int) -> list[Step]:
    return [Step(kind, bench.ring(peer, bench.rank), (bench.mine(piece, peer),)) for peer in bench.peers]


def _rings(bench: Bench) -> dict[int, Place]:
    return {peer: bench.ring(bench.rank, peer) for peer in bench.peers}


def _inputs(bench: Bench, piece: int) -> dict[int, Place]:
    return {peer: bench.of(peer, "tensor") + bench.rank * piece for peer in bench.peers}


def _terms(bench: Bench, piece: int, others: dict[int, Place]) -> tuple[Place, ...]:
    terms = {**others, bench.rank: bench.mine(piece, bench.rank)}
    return tuple(terms[rank] for rank in range(bench.world_size))


def local_sum(bench: Bench, piece: int, dtype: torch.dtype) -> Program:
    """As many terms as there are ranks, all of them here: what a dtype costs."""
    each = piece * len(bench.peers) // bench.world_size // 64 * 64
    terms = tuple(Place(bench.source.data_ptr() + rank * each) for rank in range(bench.world_size))
    return Program((Step(SUM, Place(bench.output.data_ptr()), terms, dtype=DTYPES[dtype]),), each, bench.slot)


PROGRAMS: dict[str, Callable[[Bench, int], Program | None]] = {
    each.__name__: each
    for each in (
        *(copy, stream, eager, push, read, stage, gather),
        *(one_shot, reduce_staged, reduce_loaded, reduce_gather, reduce_push),
    )
}
