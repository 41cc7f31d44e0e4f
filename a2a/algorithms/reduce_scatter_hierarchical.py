"""Reduce-scatter of several domains: first in the domain, then over the rails, where each part goes to its owner.

    inside    slots of (rail, domain) shares, brought into rail order; a reduce-scatter of the domain sums each rail's
    cross     over its rail, each domain's share goes to the rank there that owns it
    combine   the owner sums what has come, in domain order

Rails carry (D - 1) / D of what a rank's slot holds, once. The rounding, and so the bits, are those of the all-reduce
across domains: once for the domain's sum, once for the sum of the domains' sums.

Wins wherever the links between domains are slower than those inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Request
from a2a.algorithms.hierarchical_base import CHUNK_BYTES, Combine, HierarchicalReduction, Inside, chunks_of, pipelined

if TYPE_CHECKING:
    from a2a.comm import Communicator
    from a2a.domains import Agreement, Domains, Rail, RailWork


class ReduceScatterHierarchical(HierarchicalReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "hierarchical"
    op: ClassVar[str] = "reduce_scatter"
    inside: ClassVar[tuple[str, ...]] = ("reduce_scatter",)

    def parts(self, request: Request, comm: Communicator, view: Any) -> list[tuple[str, int]]:
        return [("reduce_scatter", request.num_bytes)]

    def crossing(self, request: Request, comm: Communicator, view: Any) -> int:
        others = [domain.ranks for domain in comm.topology.domains if domain.ranks != view.members]
        first = range(0, len(comm.topology.rails()), view.world_size)  # the rails of the domain's first rank
        shares = sum(rail < len(ranks) for rail in first for ranks in others)
        return shares * request.num_bytes // comm.world_size

    def across(
        self,
        domains: Domains,
        inside: Inside,
        agreement: Agreement,
        combine: Combine,
        output: torch.Tensor,
        input: torch.Tensor,
    ) -> None:
        shares, slots = input.view(domains.world_size, output.numel()), domains.num_rails * domains.count
        ranges = chunks_of(output.numel(), 1, max(1, CHUNK_BYTES // (slots * input.itemsize)))
        chunks = [
            _Chunk(domains, inside, combine, shares[:, a:b], output[a:b], number)
            for number, (a, b) in enumerate(ranges)
        ]

        def reduce(number: int) -> None:
            if number == 0:
                agreement.first(chunks[0].reduce)
            else:
                chunks[number].reduce()

        def cross(number: int) -> None:
            agreement.check()
            chunks[number].cross()

        pipelined(len(chunks), reduce, cross, lambda n: chunks[n].combine())


class _Chunk:
    """The same range of every rank's share, on its way."""

    def __init__(
        self,
        domains: Domains,
        inside: Inside,
        combine: Combine,
        shares: torch.Tensor,
        output: torch.Tensor,
        number: int,
    ) -> None:
        self._domains, self._inside, self._combine = domains, inside, combine
        self._shares, self._output, self._number = shares, output, number
        self._mine: list[torch.Tensor] = []
        self._come: list[torch.Tensor] = []
        self._works: list[RailWork] = []

    def _memory(self, what: str, count: int) -> torch.Tensor:
        return self._domains.scratch(f"reduce_scatter {what} {self._number % 3}", count, self._output.dtype)

    def reduce(self) -> None:
        """Bring the shares into rail order, a round of the domain after the other, and reduce them."""
        domains, size, length = self._domains, self._inside.size, self._output.numel()
        for turn in range(-(-domains.num_rails // size)):
            region = self._memory(f"region {turn}", size * domains.count * length)
            slots = region.view(size, domains.count, length)
            for place in range(size):
                for domain, ranks in enumerate(domains.ranks):
                    rail = turn * size + place
                    if rail < len(ranks):
                        slots[place, domain] = self._shares[ranks[rail]]
                    else:
                        slots[place, domain] = 0  # nobody's
            self._mine.append(self._inside.reduce(region).view(domains.count, length))

    def cross(self) -> None:
        domains, size, length = self._domains, self._inside.size, self._output.numel()
        nothing = self._output[:0]
        for turn, mine in enumerate(self._mine):
            index = turn * size + self._inside.rank
            rail: Rail | None = domains.rails.get(index)
            if rail is None:
                continue
            send = [mine[d] if index < len(ranks) else nothing for d, ranks in enumerate(domains.ranks)]
            receive = [nothing] * domains.count
            if index == self._inside.rank:  # the rail on which this rank's own share comes
                memory = self._memory("come", domains.count * length).view(domains.count, length)
                receive = [*memory]
                receive[rail.rank] = send[rail.rank]
                self._come = receive
            else:
                send[rail.rank] = nothing
            self._works.append(rail.all_to_all(receive, send, async_op=True))

    def combine(self) -> None:
        for work in self._works:
            work.wait()
        self._combine(self._come, self._output)
