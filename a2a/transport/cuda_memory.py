"""Symmetric GPU memory, as transports of it and kernels see it.

Every rank has one window of address space, and a buffer lies at the same offset in all of them: an offset is an address that
means the same to all ranks. Where a window is mapped in a process is each transport's business; kernels are told by `Place`.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from a2a.errors import UnsupportedError
from a2a.transport.base import Exchange

Agree = Callable[[str, str], list[str]]  # (step, what this rank says) -> what every rank says


def agree_over(exchange: Exchange, name: str) -> Agree:
    """Texts through an exchange of bytes. Refers to no transport, so that memory can hold it and keeps none alive."""
    return lambda step, mine: [theirs.decode() for theirs in exchange(f"{name}/{step}", mine.encode())]


def _closed(step: str, mine: str) -> list[str]:
    raise AssertionError(f"the communicator of this memory is closed, and agrees on nothing any more ({step})")


@dataclass(frozen=True)
class Place:
    """Where memory lies in this process, for kernels and for copies that the host starts.

    Attributes:
        base, window: `Place` of csrc/cuda/signal.cuh, for kernels compiled with `defines`.
        host: where a kernel leaves a failure for this process.
        rank: this one.
        bases: where each rank's window begins.
    """

    base: int
    window: int
    host: int
    context: int
    device: torch.device
    arch: str
    rank: int
    bases: tuple[int, ...]
    defines: tuple[tuple[str, int], ...] = ()

    def offset_of(self, pointer: int) -> int:
        """What peers know an address of this rank's window by; outside it, something that is no offset."""
        return pointer - self.bases[self.rank]

    def at(self, rank: int, offset: int) -> int:
        return self.bases[rank] + offset


class View:
    """Memory as torch takes it. The tensor keeps this object, and this object what the memory lives by."""

    def __init__(self, device: torch.device, pointer: int, num_bytes: int, keep: object) -> None:
        self._device, self._keep = device, keep
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device=self._device)


@dataclass
class Block:
    """A buffer, the same on every rank.

    Attributes:
        owner: the memory of the communicator that it was made for.
        start: where the library that made it has it begin, if not where it is used from.
        released: this rank has let go of it.
        views: of what `tensor` has handed out.
    """

    num_bytes: int
    owner: weakref.ref[Memory]
    start: int = 0
    released: bool = False
    views: list[weakref.ref[View]] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        """Whether nothing of this rank can use it any more."""
        if any(view() is not None for view in self.views):
            return False
        return self.released or bool(self.views) or self.owner() is None


class Memory(ABC):
    """One communicator's symmetric memory.

    Attributes:
        window: bytes of each rank's address space.
        blocks: what is there, by offset; of other communicators too, where these share their windows.
    """

    window: int

    def __init__(self, name: str, device: torch.device, rank: int, world_size: int, agree: Agree) -> None:
        self.name, self.device, self.rank, self.world_size, self.agree = name, device, rank, world_size, agree
        self.pid = os.getpid()
        self.blocks: dict[int, Block] = {}

    @abstractmethod
    def pointer(self, rank: int, offset: int) -> int:
        """Where a rank's copy is mapped in this process."""

    @abstractmethod
    def add(self, num_bytes: int, what: str) -> int:
        """Make a block, zeroed, and return its offset. Collective.

        Raises:
            UnsupportedError: on all ranks alike; says who refused, and why.
        """

    @abstractmethod
    def drop(self, offsets: Iterable[int]) -> None:
        """Give blocks back that nobody uses any more, the same on all ranks. Collective."""

    @abstractmethod
    def find(self, control: int) -> tuple[int, tuple[tuple[str, int], ...]]:
        """How kernels find windows, and each's control block at offset `control`: `base` and `defines` of a `Place`."""

    def close(self) -> None:
        """This rank makes no more blocks. What is mapped stays."""
        self.agree = _closed

    def view(self, rank: int, offset: int, num_bytes: int) -> View:
        return View(self.device, self.pointer(rank, offset), num_bytes, self)

    def tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """This rank's copy. Its block stays for as long as the tensor lives."""
        view = self.view(self.rank, offset, num_bytes)
        self.blocks[offset].views.append(weakref.ref(view))
        return view.tensor()

    def gone(self) -> list[int]:
        """Offsets of the blocks that nothing of this rank can use any more."""
        return [offset for offset, block in self.blocks.items() if block.gone]

    def own_bytes(self) -> int:
        """Of this communicator's blocks."""
        return sum(block.num_bytes for block in self.blocks.values() if block.owner() is self)

    def clear(self, offset: int, num_bytes: int) -> None:
        """Zero this rank's copy, and wait for it."""
        self.view(self.rank, offset, num_bytes).tensor().zero_()
        torch.cuda.synchronize(self.device)

    def all_find(self, step: str, problem: str, what: str) -> None:
        """Raise UnsupportedError on all ranks where one has a problem. Collective."""
        for peer, theirs in enumerate(self.agree(step, problem)):
            if theirs:
                raise UnsupportedError(f"{self.name}: {what}: rank {peer}: {theirs}")


__all__ = ["Agree", "Block", "Memory", "Place", "View", "agree_over"]
