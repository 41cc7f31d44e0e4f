"""GPU memory of NVSHMEM's symmetric heap (nvshmem4py), where A2A_TRANSPORT=nvshmem asks for it.

It serves the same kernels as `cuda_vmm`, which is preferred: use it where a job has NVSHMEM anyway and shall keep its
symmetric memory in one heap. Nothing but the addresses of peers' memory is taken from NVSHMEM. It has not run across the
hosts of an NVLink fabric.

What NVSHMEM's rules mean here:

* **One set of PEs a process, for good.** They are the ranks of the first communicator that is opened with this transport,
  or of NVSHMEM as somebody has started it in the process before. Memory is made and given back by all PEs together: so
  later communicators must have exactly these ranks, in any order, on the same devices. Others are refused, on all their
  ranks alike, and torch.distributed serves them. Groups that share no rank may have PEs of their own each.
* **A dead PE can't be replaced.** Whatever is collective in NVSHMEM follows an agreement of the ranks, which has the
  communicator's time limit; NVSHMEM's own calls have none, so a rank that dies within one keeps the others there. Memory
  that not all ranks have let go of stays until the processes end. New ranks need new processes, all of them.
* **NVSHMEM is never finalised here**, which is collective, too. Who started it may do it, after the last communicator.
* **It starts without MPI**, by a unique id that goes through the group's store, and, where the environment says nothing
  else, without multicast objects and networks (`config.prepare_nvshmem`). NVSHMEM_MAX_MEMORY_PER_GPU bounds its heap, or
  NVSHMEM_SYMMETRIC_SIZE where NVSHMEM_DISABLE_CUDA_VMM=1. NVSHMEM_DEBUG=INFO shows what it does.

Offsets count from the beginning of the heap, which lies somewhere else for each PE. Kernels get a table of these addresses
(PEER_TABLE of csrc/cuda/signal.cuh).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from a2a.config import nvshmem_heap_grows, prepare_nvshmem
from a2a.errors import UnsupportedError
from a2a.topology import Topology
from a2a.transport.base import Exchange, Wiring
from a2a.transport.cuda_base import CudaTransport
from a2a.transport.cuda_memory import Agree, Block, Memory, View

_ALIGNMENT = 4096
_CHUNK_BYTES = 512 << 20  # by which the heap grows, unless NVSHMEM_CUMEM_GRANULARITY says otherwise
_ADDRESSES = 1 << 48  # more than a process has
_INITIALIZED = 2  # of nvshmemx_init_status: nothing, bootstrapped, initialized, and two more with several PEs a GPU
_LOST = "start all ranks' processes anew, or leave A2A_TRANSPORT unset"


@functools.cache
def library() -> Any:
    """nvshmem4py's bindings, with NVSHMEM opened. Not its `nvshmem.core`, which in some versions starts an MPI.

    Raises:
        UnsupportedError: it isn't there; says what to install.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvshmem_host")
        from nvshmem import bindings

        bindings.init_status()  # a successful import is not a capability check
    except Exception as error:
        raise UnsupportedError(
            f"nvshmem4py can't be used ({type(error).__name__}: {error}); pip install 'a2a[cu13]' (or cu12)"
        ) from error
    return bindings


class _Heap:
    """NVSHMEM in this process: who its PEs are, and what a2a has made in its heap.

    Attributes:
        blocks: of all communicators, by offset; the same on all PEs.
        base, size: of the heap, as far as it reaches here; found with the first block.
        token: equal on all PEs that a2a has started together, empty where another has.
        lost: why no more memory can be made, once that is so.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.base = self.size = 0
        self.device: torch.device | None = None
        self.token = self.lost = ""

    def join(self, agree: Agree, exchange: Exchange, rank: int, device: torch.device) -> tuple[int, ...]:
        """Start NVSHMEM, or see that these ranks are its PEs; returns each rank's PE. Collective.

        Raises:
            UnsupportedError: they aren't, or it doesn't start; on all ranks alike.
        """
        nvshmem, problem = library(), self.lost
        started = int(nvshmem.init_status()) > 0
        if not started and self.token:
            problem = f"NVSHMEM was finalised in this process, and starts once; {_LOST}"
        elif started and self.device not in (None, device):
            problem = f"NVSHMEM's memory is on {self.device} in this process, the communicator's on {device}"
        pe, pes = (int(nvshmem.my_pe()), int(nvshmem.n_pes())) if started else (-1, 0)
        records = [json.loads(text) for text in agree("pes", json.dumps([problem, pe, pes, self.token]))]
        for peer, (theirs, *_) in enumerate(records):
            if theirs:
                raise UnsupportedError(f"nvshmem: rank {peer}: {theirs}")
        numbers, sizes, tokens = ([record[at] for record in records] for at in (1, 2, 3))
        if not any(sizes):
            self._start(agree, exchange, rank, len(records))
            numbers = list(range(len(records)))
        elif set(sizes) != {len(records)} or sorted(numbers) != list(range(len(records))) or len(set(tokens)) > 1:
            told = ", ".join(
                f"rank {peer} is PE {number} of {size}" if size else f"rank {peer} has none"
                for peer, (number, size) in enumerate(zip(numbers, sizes, strict=True))
            )
            raise UnsupportedError(
                f"nvshmem: a process has one set of PEs for good, and memory is made by all of them together, which these "
                f"{len(records)} ranks are not: {told}. Make the first communicator over all ranks that shall use "
                f"NVSHMEM, and leave the other groups to torch.distributed; or leave A2A_TRANSPORT unset"
            )
        self.device = device
        return tuple(numbers)

    def _start(self, agree: Agree, exchange: Exchange, rank: int, world_size: int) -> None:
        nvshmem, problem = library(), ""
        prepare_nvshmem()
        uid, attributes = nvshmem.uniqueid(), nvshmem.InitAttr()
        num_bytes = int(nvshmem.uniqueid_dtype.itemsize)
        offer = b""
        if rank == 0:
            try:
                nvshmem.get_uniqueid(uid.ptr)
                offer = b"+" + ctypes.string_at(uid.ptr, num_bytes)
            except Exception as error:
                offer = b"-" + str(error).encode()
        offer = exchange("nvshmem/uid", offer)[0]
        if offer[:1] != b"+":
            raise UnsupportedError(f"nvshmem: rank 0: nvshmemx_get_uniqueid failed: {offer[1:].decode()}")
        ctypes.memmove(uid.ptr, offer[1:], num_bytes)
        self.lost = f"NVSHMEM did not start; see NVSHMEM_DEBUG=INFO, and {_LOST}"
        try:
            nvshmem.set_attr_uniqueid_args(rank, world_size, uid.ptr, attributes.ptr)
            nvshmem.hostlib_init_attr(nvshmem.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
            status = int(nvshmem.init_status())
            if status < _INITIALIZED:
                problem = f"NVSHMEM has found its peers but not set up its heap (nvshmemx_init_status is {status})"
            elif (int(nvshmem.my_pe()), int(nvshmem.n_pes())) != (rank, world_size):
                problem = f"it became PE {nvshmem.my_pe()} of {nvshmem.n_pes()}, instead of {rank} of {world_size}"
        except Exception as error:
            problem = f"nvshmemx_hostlib_init_attr failed: {error}"
        for peer, theirs in enumerate(agree("started", problem)):
            if theirs:
                raise UnsupportedError(f"nvshmem: rank {peer}: {theirs}. {self.lost}")
        self.lost = ""
        self.token = hashlib.sha256(offer).hexdigest()[:16]

    def find(self, start: int, pe: int) -> None:
        """How far the heap reaches, around a block of it: nvshmem_ptr knows addresses within, and no others."""
        ptr = library().ptr
        if int(ptr(start, pe)) != start:
            raise UnsupportedError(f"nvshmem_ptr of own memory at {start:#x} is {int(ptr(start, pe)):#x}")
        below, inside = 0, start
        while inside - below > 1:
            middle = (below + inside) // 2
            below, inside = (below, middle) if ptr(middle, pe) else (middle, inside)
        last, above = start, _ADDRESSES
        while above - last > 1:
            middle = (last + above) // 2
            last, above = (middle, above) if ptr(middle, pe) else (last, middle)
        self.base, self.size = inside, above - inside


@functools.cache
def heap() -> _Heap:
    """That of this process; makes and starts nothing."""
    return _Heap()


class _Share(Memory):
    """What one communicator has of the heap. Tensors don't hold it: their blocks stay in the heap while they live."""

    def __init__(self, device: torch.device, rank: int, world_size: int, agree: Agree, pes: tuple[int, ...]) -> None:
        super().__init__(Nvshmem.name, device, rank, world_size, agree)
        self._pes, self._heap = pes, heap()
        self.blocks = self._heap.blocks
        self._bases: tuple[int, ...] = ()

    @property
    def window(self) -> int:  # type: ignore[override]
        return self._heap.size

    def pointer(self, rank: int, offset: int) -> int:
        return self._bases[rank] + offset

    def view(self, rank: int, offset: int, num_bytes: int) -> View:
        return View(self.device, self.pointer(rank, offset), num_bytes, None)

    def find(self, control: int) -> tuple[int, tuple[tuple[str, int], ...]]:
        rows = [[base, base + control] for base in self._bases]
        self._table = torch.tensor(rows, dtype=torch.int64, device=self.device)
        return self._table.data_ptr(), (("PEER_TABLE", 1),)

    def add(self, num_bytes: int, what: str) -> int:
        size = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        asked = size + _ALIGNMENT  # NVSHMEM aligns less
        self.all_find("room", self._no_room(asked), f"{asked} bytes a rank for {what}")
        start, offset, problem = 0, -1, ""
        self._heap.lost = f"NVSHMEM's heap is out of step since {what} of {asked} bytes failed; {_LOST}"
        try:
            start = int(library().malloc(asked))
            if start:
                offset = self._placed(start, asked)
                self.clear(offset, size)
            else:
                problem = "nvshmem_malloc gave nothing; raise NVSHMEM_MAX_MEMORY_PER_GPU or NVSHMEM_SYMMETRIC_SIZE"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}" if start else f"nvshmem_malloc failed: {error}"
        records = [json.loads(text) for text in self.agree("made", json.dumps([problem, offset]))]
        problems = [f"rank {peer}: {theirs}" for peer, (theirs, _) in enumerate(records) if theirs]
        if not problems and len({at for _, at in records}) > 1:
            problems = [f"it lies at different offsets ({', '.join(str(at) for _, at in records)}): ranks called in "
                        f"different orders, perhaps from several threads"]  # fmt: skip
        if problems:  # giving it back is collective, too: what ranks have of it stays
            raise UnsupportedError(f"nvshmem: {asked} bytes a rank for {what}: {'; '.join(problems)}")
        self._heap.lost = ""
        self.blocks[offset] = Block(size, weakref.ref(self), start)
        return offset

    def _no_room(self, asked: int) -> str:
        """What speaks against asking NVSHMEM, whose heap is not usable after it has found no memory; or nothing."""
        if self._heap.lost or not nvshmem_heap_grows():
            return self._heap.lost
        free, needed = torch.cuda.mem_get_info(self.device)[0], -(-asked // _CHUNK_BYTES) * _CHUNK_BYTES
        if free < needed:
            return (
                f"{self.device} has {free} bytes free, and NVSHMEM's heap may have to grow by {needed}. Make communicators "
                f"early, or have torch give back what it keeps (torch.cuda.empty_cache())"
            )
        return ""

    def _placed(self, start: int, num_bytes: int) -> int:
        """The offset of a block that NVSHMEM made at `start`."""
        ptr, own = library().ptr, self._pes[self.rank]
        if not self._heap.size:
            self._heap.find(start, own)
        base, size = self._heap.base, self._heap.size
        if not base <= start <= base + size - num_bytes:
            raise UnsupportedError(f"nvshmem_malloc gave {start:#x}, outside its heap of {size} bytes at {base:#x}")
        bases = []
        for rank, pe in enumerate(self._pes):
            theirs = int(ptr(start, pe))
            if not theirs:
                raise UnsupportedError(
                    f"nvshmem_ptr has no address for rank {rank} (PE {pe}): NVSHMEM reaches its GPU over no NVLink. See "
                    f"NVSHMEM_DEBUG=INFO, NVSHMEM_DISABLE_P2P and CUDA_VISIBLE_DEVICES"
                )
            bases.append(theirs - (start - base))
        if self._bases not in ((), tuple(bases)):
            raise UnsupportedError(f"nvshmem_ptr: peers' heaps lay at {self._bases} and lie at {tuple(bases)} now")
        self._bases = tuple(bases)
        return -(-(start - base) // _ALIGNMENT) * _ALIGNMENT

    def gone(self) -> list[int]:
        return [] if self._heap.lost else super().gone()  # or they would be given back, collectively

    def drop(self, offsets: Iterable[int]) -> None:
        self._heap.lost = f"NVSHMEM's heap is out of step since memory could not be given back; {_LOST}"
        for offset in offsets:
            library().free(self.blocks.pop(offset).start)
        self._heap.lost = ""


class Nvshmem(CudaTransport):
    """See the module's docstring."""

    name: ClassVar[str] = "nvshmem"
    only_by_name: ClassVar[bool] = True

    @classmethod
    def unavailable(cls, topology: Topology, device_type: str) -> str | None:
        if reason := super().unavailable(topology, device_type):
            return reason
        try:
            library()
        except UnsupportedError as error:
            return str(error)
        return None

    def _open(self, wiring: Wiring) -> Memory:
        pes = heap().join(self.agree, wiring.exchange, self.rank, self.device)
        return _Share(self.device, self.rank, self.world_size, self.agree, pes)


__all__ = ["Nvshmem"]
