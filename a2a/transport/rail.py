"""Rails: the ways between domains. Rail i joins one rank of each domain through an engine that exists already.

A rail has three calls, `all_to_all`, `all_gather` and `close`, and two adapters: torch's process groups (gloo for CPU
tensors, NCCL for CUDA tensors), which are here, and mpi4py, in rail_mpi.py. A rank's place on a rail is the index of
its domain, so what a rail delivers is in domain order by itself. `torch_rails` makes those of a topology.

Decisions:

* **Every call is a set of messages between pairs of ranks.** gloo's own collectives run on two worker threads, one
  after the other, and its list all-to-all refuses uneven pieces; its sends and receives are driven by its one I/O
  thread, overlap with each other, and go straight from and to the caller's memory. With few domains a direct all-gather
  sends what a ring sends.
* **Messages are numbered.** Each call takes the next number of its rail, the same on all its ranks, so several calls
  may be under way at once as long as all ranks issue them in one order.
* **Everything crosses as bytes**: engines differ in the dtypes that they take.
* **Who fails says so before it goes.** Each gloo rail keeps a receive for one last word from each peer, so that ranks
  which only see a connection close learn whose failure was the first.
* **Groups of their own**, made of the parent group's store under a prefix: nothing of torch's is registered, no other
  rank has to take part, and a rail that broke takes nothing else with it.
* A rank of a small domain may be on several rails, each with a group of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from a2a.errors import A2AError, PeerTimeoutError, UnsupportedError
from a2a.topology import Topology

LEG = "rail"  # what errors call this part of a collective's way
WORD_BYTES = 1024
_LAST_TAG = 0x40000000  # of last words; calls count below it
_LAST_WORD_S = 0.2  # to say it, and to hear it


class RailWork(ABC):
    """A call of a rail that is under way."""

    @abstractmethod
    def wait(self, longer_s: float = 0.0) -> None:
        """Until the outputs are there and the inputs may change: on a CPU the caller waits, on a GPU its current stream.

        `longer_s`: than the rail's limit, where waiting is the caller's. The limit counts from when the call was made.

        Raises:
            PeerTimeoutError: a rank of the rail did not come within the rail's limit, or its connection broke; names it.
        """


class Rail(ABC):
    """One rank of each domain. Made by all of them together; each closes its own.

    Attributes:
        rank: this rank's place: the index of its domain.
        size: the number of domains.
        ranks: who is on it, by domain, as the group counts its ranks.
        timeout_s: how long a call waits for a peer.
        bytes_sent: to other ranks so far.
    """

    engine: ClassVar[str] = ""

    def __init__(self, ranks: Sequence[int], place: int, timeout_s: float, name: str = "rail") -> None:
        self.ranks, self.rank, self.size = tuple(ranks), place, len(ranks)
        self.timeout_s, self.name = timeout_s, name
        self.bytes_sent = 0
        self.closed = False

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool = False
    ) -> RailWork:
        """Send `inputs[d]` to domain d and receive `outputs[d]` from it.

        Args:
            outputs, inputs: `size` contiguous tensors each, of any dtype, on the rail's device. Pieces may be empty and
                of any size, as long as the sender's has as many bytes as the receiver's (gloo ends the process
                otherwise). They may not change until the work is done.
            async_op: return at once; `wait()` the work.
        Raises:
            ValueError: not `size` pieces, or one that isn't contiguous.
            PeerTimeoutError: as `RailWork.wait`.
        """
        self._check_open("all_to_all")
        if len(outputs) != self.size or len(inputs) != self.size:
            raise ValueError(
                f"{self.name}: all_to_all takes one piece for each of {self.size} domains; got {len(outputs)} outputs and "
                f"{len(inputs)} inputs"
            )
        send, receive = [_bytes(t) for t in inputs], [_bytes(t) for t in outputs]
        mine = self.rank
        if send[mine].numel() != receive[mine].numel():
            raise ValueError(
                f"{self.name}: all_to_all: rank {self.ranks[mine]} sends its own domain {send[mine].numel()} bytes, but "
                f"expects {receive[mine].numel()}"
            )
        if send[mine].data_ptr() != receive[mine].data_ptr():
            receive[mine].copy_(send[mine])
        return self._start("all_to_all", receive, send, async_op)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> RailWork:
        """Fill `output`, contiguous and `size` times as large, with every domain's `input`, in domain order.

        `input` may be this rank's part of `output`. Else as `all_to_all`, where all pieces have one size.
        """
        self._check_open("all_gather")
        whole, part = _bytes(output), _bytes(input)
        if whole.numel() != part.numel() * self.size:
            raise ValueError(
                f"{self.name}: all_gather: the output has {whole.numel()} bytes, the input {part.numel()}; expected "
                f"{self.size} times as many, one part for each domain"
            )
        receive = list(torch.split(whole, part.numel())) if part.numel() else [whole] * self.size
        if receive[self.rank].data_ptr() != part.data_ptr():
            receive[self.rank].copy_(part)
        return self._start("all_gather", receive, [part] * self.size, async_op)

    @abstractmethod
    def tell(self, word: bytes, longer_s: float = 0.0) -> Callable[[], list[bytes]]:
        """Send a short word to every domain, of at most WORD_BYTES; the result waits and gives everybody's, by domain.

        A rail whose messages are ordered by a GPU tells nothing, since its host does not wait: the result is empty.
        """

    @abstractmethod
    def close(self, last_word: bytes = b"") -> None:
        """Leave the rail. Local and idempotent; peers that still wait for this rank find its connection closed.

        `last_word`: why, of at most WORD_BYTES, for those who then ask `last_words`, where the engine can carry it.
        """

    def last_words(self) -> list[bytes]:
        """What peers have said on leaving. Asked after a call has failed; the rail is of no further use."""
        return []

    @abstractmethod
    def _post(self, op: str, receive: list[torch.Tensor], send: list[torch.Tensor]) -> RailWork:
        """Start the messages of one call; the own piece is in its place already."""

    def _start(self, op: str, receive: list[torch.Tensor], send: list[torch.Tensor], async_op: bool) -> RailWork:
        work = self._post(op, receive, send)
        self.bytes_sent += sum(piece.numel() for place, piece in enumerate(send) if place != self.rank)
        if not async_op:
            work.wait()
        return work

    def _check_open(self, op: str) -> None:
        if self.closed:
            raise A2AError(f"{op}: {self.name} is closed on rank {self.ranks[self.rank]}; make a new communicator")

    def lost(self, place: int, op: str, waited_s: float | None, why: str) -> PeerTimeoutError:
        """The error of a peer that did not come in time, or, with `waited_s=None`, whose connection broke."""
        me, peer = self.ranks[self.rank], self.ranks[place]
        where = f"in {op} on leg {LEG} ({self.name}: ranks {', '.join(map(str, self.ranks))}; {self.engine})"
        if waited_s is None:
            told, cause = f"rank {me} lost rank {peer} {where}: {why}. Rank {peer} may have been killed", "died"
        else:
            told = (
                f"rank {me} waited {waited_s:.1f} s for rank {peer} {where}. Rank {peer} may have died or taken another"
            )
            told, cause = f"{told} branch, or the network between them is down", "timeout"
        return PeerTimeoutError(told, rank=me, peer=peer, op=op, cause=cause)


def tell_through(rail: Rail, word: bytes, longer_s: float) -> Callable[[], list[bytes]]:
    """`Rail.tell`, over a rail's own all-gather of CPU tensors."""
    everyone = torch.empty(rail.size * WORD_BYTES, dtype=torch.uint8)
    work = rail.all_gather(everyone, _padded(word), async_op=True)

    def heard() -> list[bytes]:
        work.wait(longer_s)
        return [_unpadded(part) for part in torch.split(everyone, WORD_BYTES)]

    return heard


def _padded(word: bytes) -> torch.Tensor:
    if len(word) > WORD_BYTES:
        raise ValueError(f"{LEG}: a word of {len(word)} bytes; at most {WORD_BYTES}")
    return torch.frombuffer(bytearray(word.ljust(WORD_BYTES, b"\0")), dtype=torch.uint8)


def _unpadded(word: torch.Tensor) -> bytes:
    return word.numpy().tobytes().rstrip(b"\0")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{LEG}: a piece of shape {list(tensor.shape)} is not contiguous; pass tensor.contiguous()")
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.detach().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------- torch


class GlooRail(Rail):
    """Over a gloo group's sends and receives; CPU tensors."""

    engine: ClassVar[str] = "gloo"

    def __init__(self, group: Any, ranks: Sequence[int], timeout_s: float, name: str = "rail") -> None:
        """`group`: a gloo backend or a ProcessGroup with one, whose rank d is `ranks[d]`. The rail owns it."""
        super().__init__(ranks, group.rank(), timeout_s, name)
        self._group = group
        self._calls = 0
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._heard = {d: torch.zeros(WORD_BYTES, dtype=torch.uint8) for d in self._others}
        self._hearing = [(d, group.recv([self._heard[d]], d, _LAST_TAG)) for d in self._others]
        self._never = [group.recv([torch.zeros(1)], d, _LAST_TAG + 1) for d in self._others]

    def tell(self, word: bytes, longer_s: float = 0.0) -> Callable[[], list[bytes]]:
        return tell_through(self, word, longer_s)

    def _post(self, op: str, receive: list[torch.Tensor], send: list[torch.Tensor]) -> RailWork:
        self._calls += 1
        tag, others = self._calls % _LAST_TAG, self._others
        messages: list[tuple[int, Any]] = []
        place = self.rank
        try:  # receives first: a message that is waited for goes without asking
            for post, pieces in ((self._group.recv, receive), (self._group.send, send)):
                for place in others:
                    if pieces[place].numel():
                        messages.append((place, post([pieces[place]], place, tag)))
        except RuntimeError as error:
            raise self.lost(place, op, None, _first_line(error)) from error
        return _GlooWork(self, op, messages, (receive, send))

    def last_words(self) -> list[bytes]:
        words = []
        for place, work in self._hearing:
            if self._heard[place][0]:  # it has come, or is coming; before the connection closed
                with contextlib.suppress(RuntimeError):
                    work.wait(datetime.timedelta(seconds=_LAST_WORD_S))
                    words.append(_unpadded(self._heard[place]))
        return words

    def close(self, last_word: bytes = b"") -> None:
        if self.closed:
            return
        self.closed = True
        if last_word:
            padded, said = _padded(last_word), []
            for place in self._others:
                with contextlib.suppress(RuntimeError):
                    said.append(self._group.send([padded], place, _LAST_TAG))
            for work in said:
                with contextlib.suppress(RuntimeError):
                    work.wait(datetime.timedelta(seconds=_LAST_WORD_S))
        # gloo's own ways to abort leave connections open as long as anything refers to them, and who waits waiting. A wait
        # that runs out of time closes all of them and wakes everybody; one for a peer that is gone does not run out.
        for work in self._never:
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(milliseconds=1))


class _GlooWork(RailWork):
    def __init__(self, rail: GlooRail, op: str, messages: list[tuple[int, Any]], keep: object) -> None:
        self._rail, self._op, self._messages, self._keep = rail, op, messages, keep
        self._start = time.monotonic()

    def wait(self, longer_s: float = 0.0) -> None:
        rail, limit_s = self._rail, self._rail.timeout_s + longer_s
        while self._messages:
            place, work = self._messages[0]
            left = max(0.001, limit_s - (time.monotonic() - self._start))
            try:
                work.wait(datetime.timedelta(seconds=left))
            except RuntimeError as error:
                rail._check_open(self._op)
                waited = time.monotonic() - self._start
                late = "imed out" in str(error) or waited >= limit_s
                raise rail.lost(place, self._op, waited if late else None, _first_line(error)) from error
            self._messages.pop(0)
        self._keep = None


class NcclRail(Rail):
    """Over an NCCL group; CUDA tensors, in the order of the current stream. Its watchdog applies the limit."""

    engine: ClassVar[str] = "nccl"

    def __init__(self, group: Any, ranks: Sequence[int], timeout_s: float, name: str = "rail") -> None:
        """`group`: an NCCL backend or a ProcessGroup with one, whose rank d is `ranks[d]`. The rail owns it."""
        super().__init__(ranks, group.rank(), timeout_s, name)
        self._group = group

    def _post(self, op: str, receive: list[torch.Tensor], send: list[torch.Tensor]) -> RailWork:
        nothing = receive[0].new_empty(0)
        outputs, inputs = list(receive), list(send)
        outputs[self.rank] = inputs[self.rank] = nothing  # it is in its place
        try:
            return _NcclWork(self, op, self._group.alltoall(outputs, inputs), (receive, send))
        except RuntimeError as error:
            raise self.lost((self.rank + 1) % self.size, op, None, _first_line(error)) from error

    def tell(self, word: bytes, longer_s: float = 0.0) -> Callable[[], list[bytes]]:
        return list

    def close(self, last_word: bytes = b"") -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(RuntimeError):
                self._group.abort()


class _NcclWork(RailWork):
    def __init__(self, rail: NcclRail, op: str, work: Any, keep: object) -> None:
        self._rail, self._op, self._work, self._keep = rail, op, work, keep

    def wait(self, longer_s: float = 0.0) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._rail.lost(
                (self._rail.rank + 1) % self._rail.size, self._op, None, _first_line(error)
            ) from error
        self._keep = None


def torch_rails(
    store: Any, topology: Topology, rank: int, device: torch.device, timeout_s: float, prefix: str = "a2a/rails"
) -> dict[int, Rail]:
    """Make this rank's rails over gloo or NCCL, by rail index. Collective over the ranks of the topology.

    Args:
        store: the group's key-value store.
        topology, rank: of the group.
        device: where the tensors are.
        timeout_s: how long to wait for a peer, now and in every call.
        prefix: of the keys in the store; a new one for each set of rails.
    Raises:
        PeerTimeoutError: a rank of the rail did not come; names it.
        UnsupportedError: this torch has no engine for the device.
    """
    rails: dict[int, Rail] = {}
    for index, ranks in enumerate(topology.rails()):
        if rank not in ranks:
            continue
        name, own = f"rail {index}", c10d.PrefixStore(f"{prefix}/{index}", store)
        own.set(f"here/{rank}", "")
        deadline = time.monotonic() + timeout_s
        for peer in ranks:
            try:
                own.wait([f"here/{peer}"], datetime.timedelta(seconds=max(0.01, deadline - time.monotonic())))
            except (RuntimeError, ValueError) as error:
                raise PeerTimeoutError(
                    f"rank {rank} waited {timeout_s:.1f} s for rank {peer} to make {name} (leg {LEG}). Rank {peer} may have "
                    f"died, or not have come to the first operation across domains",
                    rank=rank,
                    peer=peer,
                    op=LEG,
                ) from error
        rails[index] = _torch_rail(own, ranks, ranks.index(rank), device, timeout_s, name)
    return rails


def _torch_rail(
    store: Any, ranks: Sequence[int], place: int, device: torch.device, timeout_s: float, name: str
) -> Rail:
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        if device.type == "cpu":
            if not dist.is_gloo_available():
                raise UnsupportedError(f"{name}: this torch was built without gloo, which joins domains of CPU tensors")
            group: Any = dist.ProcessGroupGloo(store, place, len(ranks), limit)
            return GlooRail(group, ranks, timeout_s, name)
        if device.type != "cuda" or not dist.is_nccl_available():
            raise UnsupportedError(f"{name}: this torch was built without NCCL, which joins domains of CUDA tensors")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        options.global_ranks_in_group = list(ranks)
        with torch.cuda.device(device):
            group = dist.ProcessGroupNCCL(store, place, len(ranks), options)
        return NcclRail(group, ranks, timeout_s, name)
    except RuntimeError as error:
        if isinstance(error, A2AError):
            raise
        others = ", ".join(str(r) for at, r in enumerate(ranks) if at != place)
        raise A2AError(
            f"rank {ranks[place]} could not connect {name} (leg {LEG}) to rank {others}: {_first_line(error)}. Can their "
            f"hosts reach each other? GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the network interface to use"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "").strip().rstrip(".") or type(error).__name__


__all__ = ["LEG", "WORD_BYTES", "GlooRail", "NcclRail", "Rail", "RailWork", "torch_rails"]
