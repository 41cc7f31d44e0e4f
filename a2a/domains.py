"""What a communicator of several domains has instead of one transport: its own domain's communicator, and its rails.

Made by all ranks together with the first operation that crosses domains, owned and closed by the communicator it
belongs to.

Decisions:

* **A domain is a communicator** like any other, of the domain's ranks in ascending order, so whatever runs on one
  domain runs inside each of several. Its errors are told in the ranks of the whole group.
* **Ranks agree across rails before data crosses**: after the first step inside the domain each rank tells its rails
  what it was asked for, and whether its domain is in step. So a rank that refused its own call, or was asked for
  something else, becomes known in every domain.
* **One failure for all.** The first rank that fails tells the ranks of its domain (through shared memory) and those of
  its rails (a last word before it closes them); who hears of it raises the same error and does the same. A rank that
  waits, waits for one that is in its domain or on its rails, so everybody hears of it.
* **Who waits for whom decides whose error is the first.** A rank that doesn't come is found by its domain, so the
  agreement waits longer than a domain does; once all have come, a rail that carries nothing is what everybody ends up
  waiting for, so it gives up sooner.
* Calls run one after the other, in the order in which they were made, on a thread of their own where they are
  asynchronous.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from a2a.errors import A2AError, InterruptedRankError, MismatchError, PeerTimeoutError, RowOverflowError
from a2a.kernels.cpu import Cause
from a2a.topology import Topology
from a2a.transport import candidates
from a2a.transport.rail import WORD_BYTES, Rail, RailWork, torch_rails
from a2a.work import Aside, Lane

if TYPE_CHECKING:
    from a2a.comm import Communicator

_MOST_REQUESTS = 4096
_TEXT = 400  # characters of an error that fit into a word beside the rest
_SLACK_S = 2.0  # at most: how much sooner a rail gives up than a domain, see Domains
_REFUSED = "refused its own call, so nothing was exchanged: "


@dataclass(frozen=True)
class Asked:
    """What a collective across domains asks for: `agree` must be equal on all ranks, `text` is for errors."""

    op: str
    agree: str
    text: str
    row_bytes: int = 0

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.agree.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Record:
    """A failure, as ranks tell it to each other."""

    kind: str
    text: str
    rank: int  # that failed first
    peer: int
    op: str
    cause: str

    def to_json(self) -> str:
        return json.dumps({"a2a_failure": asdict(self)}, ensure_ascii=False)

    def error(self, rank: int) -> A2AError:
        """The error that `rank` raises."""
        told = self.text if rank == self.rank else f"{self.text} (told by rank {self.rank})"
        told = f"{told}. The communicator is broken since then; close it and make a new one"
        if self.kind == "PeerTimeoutError":
            return PeerTimeoutError(told, rank=rank, peer=self.peer, op=self.op, cause=self.cause)
        if self.kind == "MismatchError":
            return MismatchError(told, rank=rank, peer=self.peer, op=self.op)
        kinds = {"InterruptedRankError": InterruptedRankError, "RowOverflowError": RowOverflowError}
        return kinds.get(self.kind, A2AError)(told)


class Domains:
    """A rank's place among several domains.

    Attributes:
        index, count: of this rank's domain; how many there are.
        members: this domain's ranks, as the group counts them.
        rank: this rank's place among them.
        inner: the domain's communicator, in which this rank is `rank`.
        num_rails: how many rails there are: the size of the largest domain.
        rails: those that this rank is on, by index: `rank`, and every `len(members)`-th after it.
        of_rail: for each rail, its ranks by domain.
        ranks: of every domain, as the group counts them.
        parent_rank, world_size: this rank in the group, and the group's number of ranks.
        lane: where calls take their turn; `aside`: where asynchronous calls run.
    """

    def __init__(self, comm: Communicator, store: Any, prefix: str) -> None:
        from a2a.comm import Communicator, store_exchange  # here, since comm.py builds on this module, too

        topology = comm.topology
        self._comm = weakref.ref(comm)
        self.index, self.count = topology.domain_index(comm.rank), len(topology.domains)
        self.ranks = tuple(domain.ranks for domain in topology.domains)
        self.members, self.of_rail = self.ranks[self.index], topology.rails()
        self.rank, self.parent_rank, self.num_rails = self.members.index(comm.rank), comm.rank, len(self.of_rail)
        self.world_size = comm.world_size
        self.failure: A2AError | None = None
        self._in_step: MismatchError | None = None
        self._requests: dict[Asked, int] = {}
        self._asked: list[Asked] = []
        self._scratch: dict[str, torch.Tensor] = {}
        self._failing = threading.Lock()
        self.device = comm.device
        self.slack_s = min(_SLACK_S, comm.timeout_s / 4)
        size = len(self.members)
        exchange = store_exchange(
            store, self.rank, size, comm.timeout_s, f"{prefix}/domain{self.index}", names=self.members
        )
        self.inner = Communicator(
            exchange,
            self.rank,
            size,
            topology=topology.restrict(self.members),
            timeout_s=comm.timeout_s,
            device=comm.device,
        )
        self.rails = {}
        try:
            self.rails = torch_rails(
                store, topology, comm.rank, comm.device, comm.timeout_s - self.slack_s, f"{prefix}/rails"
            )
        except BaseException:
            self.inner.close()
            raise
        self.lane = Lane(comm, "a2a across domains")
        self.aside = Aside(comm.device, self.lane)

    @property
    def bytes_sent(self) -> int:
        """To other domains so far."""
        return sum(rail.bytes_sent for rail in self.rails.values())

    def scratch(self, what: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat memory for the length of a call; of a CPU it is kept for the next call, as new pages are dear."""
        if self.device.type != "cpu":  # torch's allocator keeps it, in the order of streams
            return torch.empty(count, dtype=dtype, device=self.device)
        known, num_bytes = self._scratch.get(what), count * dtype.itemsize
        if known is None or known.numel() < num_bytes:
            known = self._scratch[what] = torch.empty(num_bytes, dtype=torch.uint8)
        return known[:num_bytes].view(dtype)

    # ---- what is asked for

    def request(self, asked: Asked) -> int:
        """A number for what a collective asks for, good until many others were: ask again for each collective."""
        if asked not in self._requests:
            if len(self._requests) >= _MOST_REQUESTS:
                self._requests.clear()
                self._asked.clear()
            self._requests[asked] = len(self._asked)
            self._asked.append(asked)
        return self._requests[asked]

    def asked(self, request: int) -> Asked:
        return self._asked[request]

    # ---- failures

    @contextlib.contextmanager
    def guarded(self, op: str) -> Iterator[None]:
        """A collective across domains: the first failure of any rank is raised here and told to the others."""
        self.check()
        try:
            yield
        except MismatchError as error:
            if error is self._in_step:
                raise
            raise self.fail(error, op) from error
        except A2AError as error:
            raise self.fail(error, op) from error
        except KeyboardInterrupt as error:
            self.fail(error, op)
            raise

    def check(self) -> None:
        """Raise the first failure that this rank knows of. Does not wait."""
        if self.failure is None:
            try:
                self.inner.check()
            except A2AError as error:
                raise self.fail(error, "check") from error
        if self.failure is not None:
            raise _again(self.failure)

    def fail(self, error: BaseException, op: str) -> A2AError:
        """Break the communicator on all ranks; returns what to raise: the failure that was the first as far as is known."""
        with self._failing:
            if self.failure is None:
                record = self._first_cause(error, op)
                self.failure = record.error(self.parent_rank)
                comm = self._comm()
                if comm is not None:
                    comm.broken()
                word = record.to_json()
                if self.inner.transport is not None:
                    self.inner.transport.fail(Cause.MISMATCH, word)
                for rail in self.rails.values():
                    rail.close(word.encode()[:WORD_BYTES])
            return _again(self.failure)

    def _first_cause(self, error: BaseException, op: str) -> _Record:
        told = _records_in([str(error)])
        if not told and isinstance(error, PeerTimeoutError) and error.op != "alloc":
            told = _records_in(
                [word.decode(errors="replace") for rail in self.rails.values() for word in rail.last_words()]
            )
        if told:
            return told[0]
        mine = self.outer(error) if isinstance(error, A2AError) else InterruptedRankError(
            f"rank {self.parent_rank} was interrupted in {op}"
        )  # fmt: skip
        text = str(mine)
        return _Record(
            kind=type(mine).__name__,
            text=text if len(text) <= _TEXT else f"{text[:_TEXT]}...",
            rank=self.parent_rank,
            peer=getattr(mine, "peer", -1),
            op=getattr(mine, "op", "") or op,
            cause=getattr(mine, "cause", ""),
        )

    def outer(self, error: A2AError) -> A2AError:
        """An error of the domain's communicator or a rail, in the ranks of the whole group and with the leg it came from."""
        text = str(error)
        if "leg rail" in text or "leg domain" in text:
            return error
        head, mark, why = text.partition(_REFUSED)
        head = re.sub(r"\brank (\d+)", lambda found: f"rank {self._outer_rank(int(found[1]))}", head)
        head = head.split(" Raised in ")[0].rstrip(". ") if not mark else head
        leg = f"leg domain: ranks {', '.join(map(str, self.members))}"
        text = f"{head}{mark}{why} [{leg}]" if mark else f"{head} [{leg}]"
        if isinstance(error, PeerTimeoutError):
            peer = self._outer_rank(error.peer)
            return PeerTimeoutError(text, rank=self.parent_rank, peer=peer, op=error.op, cause=error.cause)
        if isinstance(error, MismatchError):
            return MismatchError(text, rank=self.parent_rank, peer=self._outer_rank(error.peer), op=error.op)
        return type(error)(text)

    def _outer_rank(self, inner: int) -> int:
        return self.members[inner] if 0 <= inner < len(self.members) else inner

    def in_step(self, error: MismatchError) -> MismatchError:
        """Mark an error after which all ranks can go on."""
        self._in_step = error
        return error

    # ---- the end

    def stats(self) -> dict[str, Any]:
        """Of the domain, and what has crossed."""
        return {
            "domain": self.index,
            "inside": self.inner.stats(),
            "rails": {
                index: {"engine": rail.engine, "ranks": list(rail.ranks), "bytes_sent": rail.bytes_sent}
                for index, rail in self.rails.items()
            },
        }

    def close(self) -> None:
        """Leave the rails and the domain; peers that wait for this rank are told."""
        word = _Record(
            "PeerTimeoutError",
            f"rank {self.parent_rank} has closed this communicator (leg rail)",
            self.parent_rank,
            self.parent_rank,
            "close",
            "closed",
        ).to_json()
        for rail in self.rails.values():
            rail.close(word.encode())
        self.inner.close()
        self.lane.close()


class Agreement:
    """The first step of a collective: whether all ranks of all domains ask for the same, and none has refused its call."""

    def __init__(self, domains: Domains, asked: Asked) -> None:
        self._domains, self._asked = domains, asked
        self._heard: list[tuple[tuple[int, ...], Callable[[], list[bytes]]]] = []
        self._done = False

    def first(self, run: Callable[[], None]) -> None:
        """Run the first step inside the domain, and tell the rails how it went, without waiting for them."""
        refusal, domains = "", self._domains
        try:
            run()
        except MismatchError as error:
            transport = domains.inner.transport
            if transport is None or transport.failed():
                raise
            refusal, peer = str(domains.outer(error)), domains.outer(error).peer  # type: ignore[attr-defined]
            self.tell(refusal, peer)
            self._done = True
            self.hear()
            raise domains.in_step(
                MismatchError(refusal, rank=domains.parent_rank, peer=peer, op=self._asked.op)
            ) from error
        self.tell()

    def tell(self, refusal: str = "", peer: int = -1) -> None:
        """Tell the rails what this rank was asked for, or that its domain refused."""
        asked, refusal = self._asked, refusal.replace("\0", "")
        while True:
            word = json.dumps(
                [asked.digest, asked.row_bytes, asked.text[:190], refusal, peer], ensure_ascii=False
            ).encode()
            if len(word) <= WORD_BYTES:
                break
            refusal = refusal[: -max(1, len(refusal) // 8)]
        longer_s = 2 * self._domains.slack_s  # than other calls of a rail
        self._heard = [(rail.ranks, rail.tell(word, longer_s)) for rail in self._domains.rails.values()]

    def check(self) -> None:
        """Wait for what the other domains were asked for. Does nothing from the second time on.

        Raises:
            MismatchError: something else, or one of their ranks refused its call.
        """
        if self._done:
            return
        self._done = True
        domains, asked = self._domains, self._asked
        everyone = self.hear()
        for _, (_, _, _, refusal, peer) in everyone:
            if refusal:
                raise domains.in_step(MismatchError(refusal, rank=domains.parent_rank, peer=peer, op=asked.op))
        for rank, (digest, row_bytes, text, _, _) in everyone:
            if digest != asked.digest or (row_bytes and asked.row_bytes and row_bytes != asked.row_bytes):
                raise MismatchError(
                    f"rank {domains.parent_rank} called {asked.text}; rank {rank} called {text} [leg rail]",
                    rank=domains.parent_rank,
                    peer=rank,
                    op=asked.op,
                )

    def hear(self) -> list[tuple[int, list[Any]]]:
        return [(rank, json.loads(w)) for ranks, heard in self._heard for rank, w in zip(ranks, heard(), strict=False)]


def views(comm: Any) -> list[Any]:
    """What the planner asks of a communicator, for each kind of domain of `comm`'s topology, without making any."""
    seen: dict[Any, Any] = {}
    for domain in comm.topology.domains:
        key = (len(domain.ranks), domain.kind, bool(domain.host), bool(domain.rack))
        if key in seen:
            continue
        inner: Topology = comm.topology.restrict(domain.ranks)
        reasons = {t.name: comm.why_not(t, inner) for t in candidates()}
        seen[key] = SimpleNamespace(
            members=domain.ranks,
            world_size=len(domain.ranks),
            topology=inner,
            device_type=comm.device_type,
            group=None,
            store=None,
            transport=next((t for t in candidates() if reasons[t.name] is None), None),
            why_no_transport=reasons,
            deterministic=getattr(comm, "deterministic", True),
            costs=comm.costs,
        )
    return list(seen.values())


def _records_in(texts: list[str]) -> list[_Record]:
    """The failures that are told in some texts."""
    found = []
    for text in texts:
        at = text.find('{"a2a_failure"')
        if at >= 0:
            with contextlib.suppress(ValueError, TypeError):
                found.append(_Record(**json.JSONDecoder().raw_decode(text[at:])[0]["a2a_failure"]))
    return found


def _again(error: A2AError) -> A2AError:
    """The same error, to be raised once more: an exception that is raised twice would gather tracebacks."""
    new: A2AError = type(error).__new__(type(error))
    new.args, new.__dict__ = error.args, dict(error.__dict__)
    return new


__all__ = ["Agreement", "Asked", "Domains", "Rail", "RailWork", "views"]
