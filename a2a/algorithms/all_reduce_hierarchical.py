"""All-reduce of several domains: reduce-scatter in the domain, exchange and sum over the rails, all-gather in the domain.

    inside    reduce-scatter: rank j of the domain has the domain's sum of slot j
    cross     slot j, cut into one piece for each domain, goes round its rail: an all-to-all
    combine   the domains' sums of the own piece are summed in domain order; an all-gather returns them over the rail
    finish    all-gather in the domain

A rail carries 2 (D - 1) / D of its slot each way, which no all-reduce of D domains can do with less. What is rounded
where: the domain's sum, in rank order, once to the tensor's dtype, in which it crosses; the sum of the domains' sums,
in domain order, once more; AVG divides before that. So the result is that of no single domain, but the same on all
ranks and runs.

Wins wherever the links between domains are slower than those inside, most where neighbouring ranks are in different
domains.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Request
from a2a.algorithms.hierarchical_base import (
    CHUNK_BYTES,
    SMALL_BYTES,
    Combine,
    HierarchicalReduction,
    Inside,
    chunks_of,
    pipelined,
)

if TYPE_CHECKING:
    from a2a.comm import Communicator
    from a2a.domains import Agreement, Domains, Rail, RailWork


class AllReduceHierarchical(HierarchicalReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "hierarchical"
    op: ClassVar[str] = "all_reduce"
    inside: ClassVar[tuple[str, ...]] = ("reduce_scatter", "all_gather")
    rail_steps: ClassVar[int] = 3

    def parts(self, request: Request, comm: Communicator, view: Any) -> list[tuple[str, int]]:
        return [("reduce_scatter", request.num_bytes), ("all_gather", request.num_bytes // view.world_size)]

    def crossing(self, request: Request, comm: Communicator, view: Any) -> int:
        rails, domains = len(comm.topology.rails()), len(comm.topology.domains)
        own_rails = math.ceil(rails / int(view.world_size))
        return 2 * own_rails * request.num_bytes * (domains - 1) // (domains * rails)

    def across(
        self,
        domains: Domains,
        inside: Inside,
        agreement: Agreement,
        combine: Combine,
        output: torch.Tensor,
        input: torch.Tensor,
    ) -> None:
        chunks, finish = _cut(domains, output)
        works = [_Chunk(domains, inside, combine, chunk, number) for number, chunk in enumerate(chunks)]

        def reduce(number: int) -> None:
            if number == 0:
                agreement.first(works[0].reduce)
            else:
                works[number].reduce()

        def cross(number: int) -> None:
            agreement.check()
            works[number].cross()

        pipelined(len(works), reduce, cross, lambda n: works[n].combine(), lambda n: works[n].finish())
        finish()


def _cut(domains: Domains, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
    """Chunks whose lengths rails and domains divide, the last one padded; and what to do with it afterwards."""
    unit, length = domains.num_rails * domains.count, tensor.numel()
    rest = length % unit
    if rest and tensor.nbytes <= SMALL_BYTES:
        rest = length
    even = length - rest
    chunks = [tensor[a:b] for a, b in chunks_of(even, unit, CHUNK_BYTES // tensor.itemsize)] if even or not rest else []
    if not rest:
        return chunks, lambda: None
    padded = tensor.new_zeros(-(-rest // unit) * unit)
    padded[:rest] = tensor[even:]
    return [*chunks, padded], lambda: tensor[even:].copy_(padded[:rest])


class _Slot:
    """A slot of a chunk, on the rail that this rank serves it on."""

    def __init__(self, domains: Domains, rail: Rail, mine: torch.Tensor, combine: Combine, key: str) -> None:
        self._rail, self._combine, self._pieces = (
            rail,
            combine,
            list(mine.view(domains.count, mine.numel() // domains.count)),
        )
        self._come = list(domains.scratch(key, mine.numel(), mine.dtype).view(domains.count, self._pieces[0].numel()))
        self._come[rail.rank] = self._pieces[rail.rank]
        self._whole = mine
        self._work: RailWork = rail.all_to_all(self._come, self._pieces, async_op=True)

    def combine(self) -> None:
        self._work.wait()
        own = self._pieces[self._rail.rank]
        self._combine(self._come, own)
        self._work = self._rail.all_gather(self._whole, own, async_op=True)

    def finish(self) -> None:
        self._work.wait()


class _Chunk:
    """One chunk on its way: the domain's rounds of `size` slots, the last of which may be short."""

    def __init__(self, domains: Domains, inside: Inside, combine: Combine, chunk: torch.Tensor, number: int) -> None:
        self._domains, self._inside, self._combine, self._number = domains, inside, combine, number
        self._slots: list[_Slot] = []
        length, size = chunk.numel() // domains.num_rails, inside.size
        self._regions, self._short = [], None
        for first in range(0, domains.num_rails, size):
            region = chunk[first * length : (first + size) * length]
            if region.numel() < size * length:
                self._short = region
                region = chunk.new_zeros(size * length)
            self._regions.append(region)
        self._mine: list[torch.Tensor] = []

    def reduce(self) -> None:
        if self._short is not None:
            self._regions[-1][: self._short.numel()] = self._short
        self._mine = [self._inside.reduce(region) for region in self._regions]

    def cross(self) -> None:
        size, rank = self._inside.size, self._inside.rank
        for turn, mine in enumerate(self._mine):
            rail = self._domains.rails.get(turn * size + rank)
            if rail is not None:
                key = f"all_reduce {turn} {self._number % 3}"  # it is summed before the third after it crosses
                self._slots.append(_Slot(self._domains, rail, mine, self._combine, key))

    def combine(self) -> None:
        for slot in self._slots:
            slot.combine()

    def finish(self) -> None:
        for slot in self._slots:
            slot.finish()
        for region in self._regions:
            self._inside.gather(region)
        if self._short is not None:
            self._short.copy_(self._regions[-1][: self._short.numel()])
