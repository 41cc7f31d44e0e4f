"""What ExpertParallel says over rails: who brings whose tokens, and what goes ahead of them.

**Who meets whom.** Rank i of a domain sends its tokens over rail i, so to rank i (mod their number) of every other
domain, which *brings* them to that domain's exchange beside its own. Sums and gradients come back the same way. A rank
of a small domain may be on several rails: it sends on its *home* rail, and receives on all of them.

**Heads.** Each collective begins, on every rail, with a head to every domain: a digest of what all ranks must agree on,
how many rows and (token, expert) pairs follow, and whether the rank refuses its call. So a rank that calls something
else, or can't make its call, is found out before data moves, the sizes of what follows are known to both sides, and a
refusal leaves all ranks in step. (A failure breaks the communicator for all, see a2a/domains.py.)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from a2a.algorithms.moe_base import MoeSpec, Sources
from a2a.errors import MismatchError

if TYPE_CHECKING:
    from a2a.domains import Domains, RailWork
    from a2a.topology import Topology

HEAD_BYTES = 256
_TEXT_BYTES = 200
_HEAD = struct.Struct(f"<QII4qI{_TEXT_BYTES}s")  # digest, rank, refused, rows and pairs: sent, expected; weighted, text
_UNKNOWN = -1
_COUNTS = ("send_rows", "send_pairs", "expect_rows", "expect_pairs", "weighted")

Key = tuple[int, int]  # (rail, domain): a rank that this one meets


class Arrival(NamedTuple):
    """Tokens of a rank of another domain, which this one brings to its own: part number, where from, whose."""

    part: int
    rail: int
    domain: int
    source: int


@dataclass(frozen=True)
class Places:
    """Where a rank stands among domains.

    Attributes:
        domain: the index of its own.
        ranks: of its domain.
        home: the rail that its own tokens take.
        others: the other domains.
        arrivals: whose tokens come to it, by part.
        sources: what every rank of the domain brings.
    """

    domain: int
    ranks: tuple[int, ...]
    home: int
    others: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    sources: Sources

    @classmethod
    def of(cls, topology: Topology, rank: int) -> Places:
        mine = topology.domain_index(rank)
        ranks = topology.domains[mine].ranks
        arriving = [_arrivals(topology, mine, place) for place in range(len(ranks))]
        parts = 1 + max(map(len, arriving))
        table = tuple(
            (own, *(a.source for a in arrivals), *[-1] * (parts - 1 - len(arrivals)))
            for own, arrivals in zip(ranks, arriving, strict=True)
        )
        home = ranks.index(rank)
        others = tuple(d for d in range(len(topology.domains)) if d != mine)
        return cls(mine, ranks, home, others, arriving[home], Sources(table))


def _arrivals(topology: Topology, domain: int, place: int) -> tuple[Arrival, ...]:
    """Whose tokens come to rank number `place` of a domain: on each rail i that it is on, every other domain's rank i's."""
    size = len(topology.domains[domain].ranks)
    found: list[Arrival] = []
    for rail in range(place, len(topology.rails()), size):
        for other, there in enumerate(topology.domains):
            if other != domain and rail < len(there.ranks):
                found.append(Arrival(len(found) + 1, rail, other, there.ranks[rail]))
    return tuple(found)


@dataclass(frozen=True)
class Head:
    """What goes ahead of a collective to one rank of a rail.

    Attributes:
        send_rows, send_pairs: what follows.
        expect_rows, expect_pairs: what must come back in this collective; -1: that is not known yet.
        weighted: weights go with the pairs.
        refused: whether the rank does not make this call.
        text: why not; or what it calls.
    """

    digest: int = 0
    rank: int = 0
    send_rows: int = 0
    send_pairs: int = 0
    expect_rows: int = _UNKNOWN
    expect_pairs: int = _UNKNOWN
    weighted: bool = False
    refused: bool = False
    text: str = ""

    def pack(self) -> bytes:
        counts = (self.send_rows, self.send_pairs, self.expect_rows, self.expect_pairs)
        text = self.text.encode()[:_TEXT_BYTES]
        return _HEAD.pack(self.digest, self.rank, self.refused, *counts, self.weighted, text).ljust(HEAD_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> Head:
        digest, rank, refused, rows, pairs, back, pairs_back, weighted, text = _HEAD.unpack(packed[: _HEAD.size])
        told = text.rstrip(b"\0").decode(errors="replace")
        return cls(digest, rank, rows, pairs, back, pairs_back, bool(weighted), bool(refused), told)

    def filled(self, mine: Head) -> Head:
        """With who and what from `mine`."""
        return replace(mine, **{name: getattr(self, name) for name in _COUNTS})

    def fits(self, theirs: Head) -> bool:
        """Whether what each sends is what the other expects."""
        return all(
            expected in (_UNKNOWN, sent)
            for expected, sent in (
                (self.expect_rows, theirs.send_rows),
                (self.expect_pairs, theirs.send_pairs),
                (theirs.expect_rows, self.send_rows),
                (theirs.expect_pairs, self.send_pairs),
            )
        )


class Legs:
    """The rails of one rank, as an ExpertParallel uses them."""

    def __init__(self, domains: Domains, places: Places, spec: MoeSpec) -> None:
        self.domains, self.places = domains, places
        self._asks = {**spec.asks(), "open": (f"open|{spec.identity()}", spec.identity())}

    def begin(self, op: str, heads: Mapping[Key, Head], refused: str | None = None) -> Meeting:
        """Send a head to everybody on every rail.

        Args:
            heads: those that announce something; the others say that this rank is there.
            refused: why this rank does not make its call, if so.
        """
        rank, (agree, text) = self.domains.parent_rank, self._asks[op]
        mine = Head(_digest(agree), rank, refused=refused is not None, text=text if refused is None else refused)
        sent, came, works = {}, {}, []
        for number, rail in self.domains.rails.items():
            there = [heads.get((number, d), Head()).filled(mine) for d in range(rail.size)]
            packed = torch.frombuffer(bytearray(b"".join(map(Head.pack, there))), dtype=torch.uint8)
            out, into = packed.view(rail.size, HEAD_BYTES), torch.empty(rail.size, HEAD_BYTES, dtype=torch.uint8)
            works.append(rail.all_to_all([*into], [*out], async_op=True))
            for d in range(rail.size):
                if d != rail.rank:
                    sent[number, d], came[number, d] = there[d], into[d]
        return Meeting(self, op, sent, came, works)

    def refuse(self, op: str, why: str) -> None:
        """Say that this rank does not make its call. Waits for the others' heads."""
        self.begin(op, {}, why).heads()

    def exchange(
        self, into: Mapping[Key, torch.Tensor], out: Mapping[Key, torch.Tensor], skip: frozenset[int] = frozenset()
    ) -> list[RailWork]:
        """Send `out` and receive `into` on every rail but those in `skip`. Returns works to wait for."""
        nothing = torch.empty(0, dtype=torch.uint8)
        return [
            rail.all_to_all(
                [into.get((number, d), nothing) for d in range(rail.size)],
                [out.get((number, d), nothing) for d in range(rail.size)],
                async_op=True,
            )
            for number, rail in self.domains.rails.items()
            if number not in skip
        ]


class Meeting:
    """Heads under way."""

    def __init__(
        self, legs: Legs, op: str, sent: dict[Key, Head], came: dict[Key, torch.Tensor], works: list[RailWork]
    ) -> None:
        self._legs, self._op, self._sent, self._came, self._works = legs, op, sent, came, works

    def heads(self) -> dict[Key, Head]:
        """Wait for everybody's."""
        for work in self._works:
            work.wait()
        return {key: Head.unpack(piece.numpy().tobytes()) for key, piece in self._came.items()}

    def wait(self) -> tuple[dict[Key, Head], frozenset[int], MismatchError | None]:
        """Returns: everybody's heads; rails on which somebody refuses, where nothing follows; the error that tells of it.

        Raises:
            MismatchError: somebody is in another collective, or has the routing of another dispatch: nobody can go on.
        """
        heads, domains = self.heads(), self._legs.domains
        for (rail, domain), head in heads.items():
            if head.refused:
                continue
            sent = self._sent[rail, domain]
            if head.digest != sent.digest:
                error = self._mismatch(
                    head,
                    f"rank {domains.parent_rank} called {sent.text}; rank {head.rank} called {head.text}",
                    rail,
                )
                raise domains.in_step(error) if self._op == "open" else error  # nothing has moved yet
            if not sent.fits(head):
                raise self._mismatch(
                    head,
                    f"{self._op}: rank {head.rank} sends {head.send_rows} rows and expects {head.expect_rows}; rank "
                    f"{domains.parent_rank} expects {sent.expect_rows} and sends {sent.send_rows}: one of them was given "
                    f"the routing of another dispatch",
                    rail,
                )
        refusing = {rail: head for (rail, _), head in heads.items() if head.refused}
        told = None
        for rail, head in refusing.items():
            text = f"rank {head.rank} refused its own call, so nothing was exchanged: {head.text}"
            told = domains.in_step(self._mismatch(head, f"{self._op}: {text}", rail))
        return heads, frozenset(refusing), told

    def _mismatch(self, head: Head, text: str, rail: int) -> MismatchError:
        rank = self._legs.domains.parent_rank
        return MismatchError(f"{text} [leg rail {rail}]", rank=rank, peer=head.rank, op=self._op)


def _digest(agree: str) -> int:
    return int.from_bytes(hashlib.sha256(agree.encode()).digest()[:8], "little")


__all__ = ["HEAD_BYTES", "Arrival", "Head", "Key", "Legs", "Meeting", "Places"]
