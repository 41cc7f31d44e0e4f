"""All-gather of several domains: over the rails first, then in the domain.

    cross     every rank sends its input over its rail, to one rank of each other domain
    finish    the domain's all-gather of what its ranks have so got, in rail order, brought into rank order

Every byte enters a domain once. A flat all-gather sends it to each rank of the domain, or through them all in turn.

Wins wherever the links between domains are slower than those inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Request
from a2a.algorithms.hierarchical_base import CHUNK_BYTES, Combine, HierarchicalReduction, Inside, chunks_of, pipelined

if TYPE_CHECKING:
    from a2a.comm import Communicator
    from a2a.domains import Agreement, Domains, RailWork


class AllGatherHierarchical(HierarchicalReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "hierarchical"
    op: ClassVar[str] = "all_gather"
    inside: ClassVar[tuple[str, ...]] = ("all_gather",)

    def parts(self, request: Request, comm: Communicator, view: Any) -> list[tuple[str, int]]:
        rounds = -(-len(comm.topology.rails()) // view.world_size)
        return [("all_gather", rounds * request.num_bytes * len(comm.topology.domains))]

    def crossing(self, request: Request, comm: Communicator, view: Any) -> int:
        return request.num_bytes * (len(comm.topology.domains) - 1)

    def across(
        self,
        domains: Domains,
        inside: Inside,
        agreement: Agreement,
        combine: Combine,
        output: torch.Tensor,
        input: torch.Tensor,
    ) -> None:
        output, input = output.view(torch.uint8), input.view(torch.uint8)
        rows, slots = output.view(domains.world_size, input.numel()), domains.num_rails * domains.count
        ranges = chunks_of(input.numel(), 1, max(1, CHUNK_BYTES // slots))
        chunks = [_Chunk(domains, inside, input[a:b], rows[:, a:b], number) for number, (a, b) in enumerate(ranges)]
        agreement.first(lambda: inside.gather(input.new_zeros(inside.size)))  # nothing crosses before all agree
        agreement.check()
        pipelined(len(chunks), lambda n: chunks[n].cross(), lambda n: chunks[n].finish())


class _Chunk:
    """The same range of every rank's input, on its way."""

    def __init__(self, domains: Domains, inside: Inside, input: torch.Tensor, rows: torch.Tensor, number: int) -> None:
        self._domains, self._inside, self._input, self._rows = domains, inside, input, rows
        self._number = number
        self._regions: list[torch.Tensor] = []
        self._works: list[RailWork] = []

    def cross(self) -> None:
        domains, size, length = self._domains, self._inside.size, self._input.numel()
        nothing = self._input[:0]
        for turn in range(-(-domains.num_rails // size)):
            count = size * domains.count * length
            region = domains.scratch(f"all_gather {turn} {self._number % 2}", count, torch.uint8)
            self._regions.append(region)
            index = turn * size + self._inside.rank
            rail = domains.rails.get(index)
            if rail is None:
                continue
            mine = region.view(size, domains.count, length)[self._inside.rank]
            receive = [mine[d] if index < len(ranks) else nothing for d, ranks in enumerate(domains.ranks)]
            own = index == self._inside.rank  # the rail on which this rank's input goes
            send = [self._input if own else nothing] * domains.count
            self._works.append(rail.all_to_all(receive, send, async_op=True))

    def finish(self) -> None:
        domains, size, length = self._domains, self._inside.size, self._input.numel()
        for work in self._works:
            work.wait()
        for turn, region in enumerate(self._regions):
            self._inside.gather(region)
            slots = region.view(size, domains.count, length)
            for place in range(min(size, domains.num_rails - turn * size)):
                for domain, ranks in enumerate(domains.ranks):
                    if turn * size + place < len(ranks):
                        self._rows[ranks[turn * size + place]] = slots[place, domain]
