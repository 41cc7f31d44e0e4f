"""What a transport owes: memory that every rank of one domain can address, and the state of the ranks in it.

It knows nothing of collectives. Algorithms reach its kernels through `handle`, whose meaning `device_type` and `name` fix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from a2a.kernels.cpu import Cause
from a2a.topology import Topology

Exchange = Callable[[str, bytes], list[bytes]]


@dataclass(frozen=True)
class SymmetricBuffer:
    """Memory of the same size on every rank of the domain.

    Attributes:
        address: what peers know it by, equal on all ranks.
        pointer: where it is mapped in this process.
        num_bytes: its size on each rank.
    """

    address: int
    pointer: int
    num_bytes: int


@dataclass(frozen=True)
class Wiring:
    """What a transport needs to come up: who is there, how to reach them before memory is shared, and how long to wait."""

    exchange: Exchange
    rank: int
    topology: Topology
    timeout_s: float
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def world_size(self) -> int:
        return self.topology.world_size


def not_one_domain(topology: Topology) -> str | None:
    """Why the ranks can't all address each other's memory, or None."""
    if topology.is_single_domain:
        return None
    return f"the group spans {len(topology.domains)} domains, whose ranks can't address each other's memory"


class Transport(ABC):
    """Base class of the transports. Made collectively by all ranks of a domain, closed by each on its own."""

    name: ClassVar[str] = ""
    device_type: ClassVar[str] = ""
    only_by_name: ClassVar[bool] = False  # taken only where A2A_TRANSPORT names it

    rank: int
    world_size: int
    handle: int

    @classmethod
    @abstractmethod
    def unavailable(cls, topology: Topology, device_type: str) -> str | None:
        """Why this transport can't serve `topology` on this machine, or None. Asks the machine; takes nothing."""

    @classmethod
    @abstractmethod
    def open(cls, wiring: Wiring) -> Transport:
        """Bring it up. Collective.

        Raises:
            PeerTimeoutError: a rank did not come within the limit; names it.
            UnsupportedError: the machine refused (memory, permissions); says which call and what to do.
        """

    @abstractmethod
    def alloc(self, num_bytes: int, what: str, *, touch: bool = True) -> SymmetricBuffer:
        """Allocate symmetric memory. Collective: ranks that disagree on `what` or `num_bytes` raise MismatchError.

        With `touch`, its pages are there before anybody uses them; without, they come as they are written.
        """

    @abstractmethod
    def refuse_alloc(self, why: str) -> None:
        """Tell the peers that this rank can't make its call of `alloc`."""

    @abstractmethod
    def tensor(self, buffer: SymmetricBuffer) -> torch.Tensor:
        """This rank's part as a flat uint8 tensor. The memory stays until the tensor is gone, whatever is closed before."""

    @abstractmethod
    def release(self, buffer: SymmetricBuffer) -> None:
        """Give back a buffer that `tensor` was not called on. It is used again once every rank has given it back."""

    @abstractmethod
    def raise_failure(self, result: int, op: str, refusal: tuple[int, str] | None = None) -> None:
        """Raise the error behind a kernel's result; `refusal`: (peer, why), where it isn't the last one of a peer."""

    @abstractmethod
    def failed(self) -> bool:
        """Whether this rank's last call knew of a failure, on whichever rank."""

    def told(self) -> bool:
        """Whether a failure has happened, known to this rank's calls or not. May take some microseconds."""
        return self.failed()

    def fail(self, cause: Cause, message: str) -> None:
        """Break the communicator on purpose, with a reason that reaches every rank, if the transport can carry one."""
        self.close()

    @abstractmethod
    def ok_word(self) -> torch.Tensor:
        """A 0-dimensional int32 tensor on the device, 1 until the first failure, then 0."""

    @abstractmethod
    def stats(self) -> dict[str, object]:
        """Counters since the start: waits per peer, bytes per way."""

    def on_renewal(self, callback: Callable[[], None]) -> None:  # noqa: B027  most transports never renew
        """Have `callback` called when the numbers that kernels know requests by become void."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Idempotent, local; peers that still wait for this rank are told."""

    @abstractmethod
    def free(self) -> None:
        """Free the handle. After close(), when nothing of this process refers to its kernels any more."""
