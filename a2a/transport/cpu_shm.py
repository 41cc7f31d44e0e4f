"""Shared memory between the processes of one CPU host.

Decisions:

* **Anonymous memory** (`memfd_create`), handed over as descriptors. It has no name, so nothing is left behind when every
  process is killed, no other user can open it, and neither the size nor the mount options of /dev/shm matter.
* **One segment for all ranks**, made by rank 0: rank r's part begins at r times the stride. The first segment holds
  signals and staging; further ones are arenas for `alloc`, cut deterministically, so that every rank finds the same
  offsets.
* **A freed block is used again only when every rank has let go of it**: `alloc` is where ranks tell each other what they
  have let go of. Garbage collection alone never changes what the ranks agree on.
* **Deaths are seen through pidfds**, which a process opens on itself and hands to its peers: they work between process-id
  namespaces and, unlike a socket that a forked child keeps open, tell of the process itself.
* **Ranks read each other's ordinary memory** (`process_vm_readv`) where the system lets every one of them: tried once,
  with a secret, when the communicator is made. It saves ordinary tensors of middling size a copy. Nothing is done to get
  the permission; without it they are staged, and `stats()` says why.
* The mapping of a segment outlives `close()` for as long as a tensor needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import struct
import sys
from collections.abc import Callable, Iterator
from ctypes import c_int, c_uint64
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.utils.dlpack

from a2a.config import config
from a2a.errors import A2AError, MismatchError, UnsupportedError
from a2a.kernels import cpu
from a2a.kernels.cpu import Cause
from a2a.topology import HostFacts, Topology, local_facts
from a2a.topology.host import cores_together
from a2a.transport.base import SymmetricBuffer, Transport, Wiring, not_one_domain
from a2a.transport.cpu_failures import error_of
from a2a.transport.cpu_peers import exchange_pidfds, try_reads
from a2a.transport.fd_link import FdLink
from a2a.transport.tensor_pool import TensorPool, tensor_of

_log = logging.getLogger("a2a")

_PAGE = 4096
_ARENA_BYTES = 64 << 20  # a rank; address space, not memory: pages come with the first touch
_STAGING_KB = 1024  # between each pair, up to 4 ranks
_POPULATE_BYTES = 64 << 20  # staging up to this size is touched when the communicator is made
_AGREE = struct.Struct("<QQ160sI60I")


@dataclass
class _Arena:
    """A segment that `alloc` cuts blocks from. `blocks` (offset -> bytes) is the same on every rank."""

    segment: int
    stride: int
    mine: int
    base: int
    pool: int
    blocks: dict[int, int] = field(default_factory=dict)

    def fit(self, num_bytes: int) -> int | None:
        at = 0
        for offset in sorted(self.blocks):
            if offset - at >= num_bytes:
                return at
            at = offset + self.blocks[offset]
        return at if self.stride - at >= num_bytes else None


class CpuShm(Transport):
    """See the module's docstring."""

    name: ClassVar[str] = "cpu_shm"
    device_type: ClassVar[str] = "cpu"

    @classmethod
    def unavailable(cls, topology: Topology, device_type: str) -> str | None:
        if device_type != "cpu":
            return f"it serves CPU tensors; this group's are on {device_type}"
        if reason := not_one_domain(topology):
            return reason
        if topology.domains[0].kind != "cpu_host":
            return f"the topology's domain is of kind {topology.domains[0].kind}, not cpu_host"
        try:
            cpu.lib()
        except UnsupportedError as error:
            return str(error)
        if not hasattr(os, "memfd_create"):
            return "this Python has no os.memfd_create"
        return None

    @classmethod
    def open(cls, wiring: Wiring) -> CpuShm:
        return cls(wiring)

    def __init__(self, wiring: Wiring) -> None:
        self._lib = cpu.lib()
        self.rank, self.world_size, self.timeout_s = wiring.rank, wiring.world_size, wiring.timeout_s
        self._interrupt: BaseException | None = None
        checks = self._interrupt_checks()
        next(checks)  # to where signal handlers are caught
        self._callback = cpu.InterruptedCallback(checks.__next__)
        self._pid = os.getpid()
        self._closed = False
        self._arenas: list[_Arena] = []
        self._requests: dict[tuple[str, int], int] = {}
        self._renewed: list[Callable[[], None]] = []
        staging = (config().staging_kb or max(64, min(_STAGING_KB, _STAGING_KB * 4 // self.world_size))) * 1024
        facts = local_facts()
        mine = json.dumps([staging, facts.to_json()]).encode()
        everyone = [json.loads(p) for p in wiring.exchange("cpu_shm/start", mine)]
        self.staging_bytes, self.cores = everyone[0][0], cores_together([HostFacts.from_json(f) for _, f in everyone])
        self._link = FdLink(wiring.exchange, self.rank, self.world_size, self.timeout_s)
        num_bytes: int = self._lib.a2a_control_bytes(self.world_size, self.staging_bytes)
        problem = ""
        try:
            base = self._share(num_bytes, format_with=self.staging_bytes)
            pidfds = exchange_pidfds(self._link)
        except (OSError, A2AError) as error:
            problem = str(error)
        for peer, theirs in enumerate(wiring.exchange("cpu_shm/status", problem.encode())):
            if theirs:
                self._link.close()
                raise UnsupportedError(f"cpu_shm: rank {peer} can't share memory: {theirs.decode()}")
        spin_us = config().spin_us
        handle = self._lib.a2a_attach(
            base,
            0,
            self.rank,
            self.world_size,
            self.staging_bytes,
            (c_int * self.world_size)(*pidfds),
            self.cores,
            -1.0 if spin_us is None else spin_us,
            self.timeout_s,
            self._callback,
        )
        if handle is None:
            raise UnsupportedError("cpu_shm: the ranks run different versions of a2a's compiled library")
        self.handle = handle
        self._control = (base, num_bytes, self._lib.a2a_pool_create(base, num_bytes, base, num_bytes))
        # Its exchange is a barrier, too: nobody signals before all have attached.
        self.why_no_reads, pids = try_reads(wiring, pidfds)
        if not self.why_no_reads:
            self._lib.a2a_enable_reads(self.handle, (c_int * self.world_size)(*pids))

    # ---- bringing memory up

    def _share(self, num_bytes: int, format_with: int | None = None) -> int:
        """Make a segment on rank 0 and map it on all. Returns where it lies here."""
        fd, made = -1, ""
        if self.rank == 0:
            try:
                fd = os.memfd_create("a2a", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(fd, num_bytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            except (OSError, OverflowError) as error:
                made = f"memfd_create of {num_bytes} bytes: {error}"
                if fd >= 0:
                    os.close(fd)
                fd = -1
        base = self._map(fd, num_bytes) if fd >= 0 else None
        if self.rank == 0 and base is not None and format_with is not None:
            self._lib.a2a_format(base, self.world_size, format_with, 0)
        (mine,) = self._link.broadcast([fd])
        if fd >= 0:
            os.close(fd)
        if mine < 0:
            raise UnsupportedError(made or "rank 0 could not make the memory")
        if base is None:
            base = self._map(mine, num_bytes)
        os.close(mine)
        if base is None:
            raise UnsupportedError(
                f"mmap of {num_bytes} bytes failed; see `ulimit -v` and the container's memory limit"
            )
        if format_with is not None and num_bytes <= _POPULATE_BYTES:
            self._lib.a2a_populate(base, num_bytes)
        return base

    def _map(self, fd: int, num_bytes: int) -> int | None:
        base: int | None = self._lib.a2a_map(fd, num_bytes)
        return base

    # ---- memory

    def alloc(self, num_bytes: int, what: str, *, touch: bool = True) -> SymmetricBuffer:
        num_bytes = -(-max(num_bytes, 1) // _PAGE) * _PAGE
        self._agree(num_bytes, what)
        for arena in self._arenas:
            offset = arena.fit(num_bytes)
            if offset is not None:
                break
        else:
            arena, offset = self._add_arena(max(_ARENA_BYTES, num_bytes)), 0
        arena.blocks[offset] = num_bytes
        pointer: int | None = self._lib.a2a_pool_take_at(arena.pool, offset, num_bytes)
        assert pointer is not None, "the ranks agreed on a block that is in use here"
        if touch:
            self._lib.a2a_populate(pointer, num_bytes)
        self._barrier("alloc")
        for peer in range(self.world_size if touch else 0):
            if peer != self.rank:  # page tables only: the pages are there
                self._lib.a2a_populate(arena.base + peer * arena.stride + offset, num_bytes)
        return SymmetricBuffer((arena.segment + 1) << 48 | offset, pointer, num_bytes)

    def refuse_alloc(self, why: str) -> None:
        self._lib.a2a_refuse(self.handle, self._alloc_request, why.encode()[:1000])

    def _agree(self, num_bytes: int, what: str) -> None:
        """All ranks want the same block; blocks that all have let go of become free."""
        gone = [
            n << 24 | offset // _PAGE
            for n, arena in enumerate(self._arenas)
            for offset in sorted(arena.blocks)
            if not self._lib.a2a_pool_holds(arena.pool, offset)
        ][:60]
        digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little")
        mine = _AGREE.pack(digest, num_bytes, what.encode()[:159], len(gone), *gone, *[0] * (60 - len(gone)))
        theirs = self._all_gather(mine, "alloc")
        records = [_AGREE.unpack(record) for record in theirs]
        for peer, record in enumerate(records):
            if record[:2] != (digest, num_bytes):
                text = record[2].rstrip(b"\0").decode(errors="replace")
                raise MismatchError(
                    f"rank {self.rank} asked for {what}; rank {peer} asked for {text}. Symmetric memory is made by all "
                    f"ranks alike: call with equal arguments everywhere",
                    rank=self.rank,
                    peer=peer,
                    op="alloc",
                )
        for block in set.intersection(*(set(record[4 : 4 + record[3]]) for record in records)):
            del self._arenas[block >> 24].blocks[(block & 0xFFFFFF) * _PAGE]

    def _add_arena(self, stride: int) -> _Arena:
        stride = -(-stride // (2 << 20)) * (2 << 20)
        problem, base = b"", 0
        try:
            base = self._share(stride * self.world_size)
        except (OSError, OverflowError, A2AError) as error:
            problem = str(error).encode()[:200]
        for peer, theirs in enumerate(self._all_gather(problem.ljust(200, b"\0"), "alloc")):
            if text := theirs.rstrip(b"\0").decode(errors="replace"):
                if base:
                    self._lib.a2a_unmap(base, stride * self.world_size)
                raise UnsupportedError(f"cpu_shm: {stride} bytes a rank of symmetric memory: rank {peer}: {text}")
        segment: int = self._lib.a2a_add_segment(self.handle, base, stride)
        mine = base + self.rank * stride
        pool = self._lib.a2a_pool_create(base, stride * self.world_size, mine, stride)
        self._arenas.append(_Arena(segment, stride, mine, base, pool))
        return self._arenas[-1]

    def tensor(self, buffer: SymmetricBuffer) -> torch.Tensor:
        return tensor_of(self._pool_of(buffer), buffer.pointer, buffer.num_bytes)

    def _pool_of(self, buffer: SymmetricBuffer) -> int:
        return next(a.pool for a in self._arenas if a.segment == (buffer.address >> 48) - 1)

    def release(self, buffer: SymmetricBuffer) -> None:
        if not self._closed:
            self._lib.a2a_pool_give(self._pool_of(buffer), buffer.pointer)

    def pool(self, buffer: SymmetricBuffer) -> TensorPool:
        """Hand `buffer` out piece by piece, as tensors; instead of `tensor` and `release`."""
        child = self._lib.a2a_pool_child(self._pool_of(buffer), buffer.pointer, buffer.num_bytes)
        return TensorPool(buffer, child)

    def private_pool(self, num_bytes: int) -> TensorPool | None:
        """The same of this rank's own memory, in huge pages where the system grants them. None if there is no room."""
        pool: int | None = self._lib.a2a_pool_private(num_bytes)
        return None if pool is None else TensorPool(SymmetricBuffer(0, 0, num_bytes), pool)

    # ---- requests, failures, facts

    def request(self, agree: str, row_bytes: int, text: str) -> int:
        """The number of what a collective asks for, good until the next renewal: ask again for each collective.

        Args:
            agree: what must be equal on all ranks.
            row_bytes: bytes of a row; 0 where rows mean nothing. Two that are not 0 must be equal.
            text: what peers are shown when theirs differs.
        """
        key = (agree, row_bytes)
        known = self._requests.get(key)
        if known is None:
            if len(self._requests) >= cpu.TEXTS // 2:  # the library keeps the last TEXTS of them
                self._requests.clear()
                for callback in self._renewed:
                    callback()
            digest = int.from_bytes(hashlib.sha256(agree.encode()).digest()[:8], "little") >> 1
            known = self._lib.a2a_request(self.handle, digest, row_bytes, text.encode()[:190])
            self._requests[key] = known
        return known

    def on_renewal(self, callback: Callable[[], None]) -> None:
        self._renewed.append(callback)

    @property
    def _alloc_request(self) -> int:
        return self.request("alloc", 0, "comm.empty or ExpertParallel(...)")

    def _all_gather(self, payload: bytes, op: str) -> list[bytes]:
        n = len(payload)
        out = ctypes.create_string_buffer(n * self.world_size)
        result = self._lib.a2a_all_gather_small(self.handle, self._alloc_request, out, payload, n)
        if result:
            self.raise_failure(result, op)
        return [out.raw[r * n : (r + 1) * n] for r in range(self.world_size)]

    def _barrier(self, op: str) -> None:
        if result := self._lib.a2a_barrier(self.handle, self._alloc_request):
            self.raise_failure(result, op)

    def _interrupt_checks(self) -> Iterator[int]:
        """Each step is called by a kernel that waits, for Python to run signal handlers; 1: one of them raised.

        A generator, since handlers run as soon as a Python frame is entered: a function would not be in its `try` yet, while
        this frame never leaves it.
        """
        result = 0
        while True:
            try:
                while True:
                    yield result
                    result = 0
            except GeneratorExit:
                raise
            except BaseException as error:
                self._interrupt = error
                result = 1

    def failed(self) -> bool:
        return bool(self._closed or self._lib.a2a_failure(self.handle))

    def raise_failure(self, result: int, op: str, refusal: tuple[int, str] | None = None) -> None:
        if self._interrupt is not None:
            error, self._interrupt = self._interrupt, None
            raise error
        if result == cpu.FORKED:
            raise A2AError(
                f"{op}: this communicator belongs to process {self._pid}; a forked child ({os.getpid()}) owns none of it. "
                f"Make a new one after the fork, or start the child with the spawn method"
            )
        if result == cpu.NOT_OPEN or self._closed:
            raise A2AError(f"{op}: this communicator is closed on rank {self.rank}; make a new one")
        if result == cpu.PEER_REFUSED:
            if refusal is None:
                refusal = (
                    self._lib.a2a_last_peer(self.handle),
                    self._lib.a2a_refusal(self.handle).decode(errors="replace"),
                )
            who, why = refusal
            raise MismatchError(
                f"{op}: rank {who} refused its own call, so nothing was exchanged: {why}",
                rank=self.rank,
                peer=who,
                op=op,
            )
        record: int = self._lib.a2a_failure(self.handle)
        cause, by, who, text = record >> 48, record >> 32 & 0xFFFF, record >> 16 & 0xFFFF, record & 0xFFFF
        asked = self._lib.a2a_request_text(self.handle, by, text).decode(errors="replace")
        raise error_of(self, Cause(cause), by, who, asked, op)

    def fail(self, cause: Cause, message: str) -> None:
        """Break the communicator on purpose, with a reason that reaches every rank."""
        self._lib.a2a_fail(self.handle, cause, self.rank, message.encode()[:1000])

    def ok_word(self) -> torch.Tensor:
        base, _, pool = self._control
        word = ctypes.cast(self._lib.a2a_ok_word(self.handle), ctypes.c_void_p).value
        assert word is not None
        if self._lib.a2a_pool_take_at(pool, word - base, 4) is None:
            raise A2AError("comm.ok: the tensor of an earlier call is alive; keep and read that one")
        return tensor_of(pool, word, 4).view(torch.int32).squeeze(0)

    def stats(self) -> dict[str, object]:
        peers, totals = (c_uint64 * (3 * self.world_size))(), (c_uint64 * 6)()
        self._lib.a2a_stats(self.handle, peers, totals)
        return {
            "transport": self.name,
            "reads": self.why_no_reads or "allowed",
            "collectives": totals[0],
            "bytes": dict(zip(("eager", "pushed", "pulled", "read", "staged"), totals[1:], strict=True)),
            "peers": [
                {
                    "rank": p,
                    "late": peers[3 * p],
                    "late_us": peers[3 * p + 1] / 1e3,
                    "longest_us": peers[3 * p + 2] / 1e3,
                }
                for p in range(self.world_size)
                if p != self.rank
            ],
        }

    def close(self) -> None:
        if self._closed:
            return
        left = self._lib.a2a_close(self.handle)
        self._closed = True
        self._link.close()
        if not left:  # a call is still at it, to which this signal handler returns
            self.handle = 0
            return
        for arena in self._arenas:
            self._lib.a2a_pool_close(arena.pool)
        self._lib.a2a_pool_close(self._control[2])

    def free(self) -> None:
        """Free the context. After close(), when nothing of this process refers to its kernels any more."""
        if self.handle:
            self._lib.a2a_destroy(self.handle)
        self.handle = 0

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing() and self.__dict__.get("handle"):
            with contextlib.suppress(Exception):
                self.close()


__all__ = ["CpuShm"]
