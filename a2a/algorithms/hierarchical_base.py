"""What collectives across domains have in common: fast inside each domain, and as little as possible between them.

Every rank carries its share of the domain's data over its own rail, so all links between hosts are used at once and
nothing crosses twice. The data is cut into chunks, which follow each other through the stages of a collective: while
one crosses, the next is reduced in shared memory.

    stage       what runs                         on
    inside      a collective of the domain        the calling thread (or that of asynchronous calls) and its kernels
    cross       messages over the rails           the engine's own threads
    combine     sums of what has come, messages   both
    finish      a collective of the domain        the calling thread

Where a domain is smaller than the largest, its ranks serve several rails each: rail i belongs to rank i mod m of a
domain of m ranks. Slots of memory are therefore kept in rail order and go through the domain in rounds of m of them.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from a2a import algorithms
from a2a.algorithms.base import Algorithm, Cost, Part, Request
from a2a.algorithms.reduction_base import Reduction
from a2a.domains import Agreement, Asked, views
from a2a.work import Work

if TYPE_CHECKING:
    from a2a.comm import Communicator
    from a2a.domains import Domains

CHUNK_BYTES = 4 << 20  # of a domain's data: some stages of these are under way at once
SMALL_BYTES = 64 << 10  # up to here a tensor goes as one chunk, padded
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Across(Algorithm):
    """An algorithm for communicators of several domains."""

    inside: ClassVar[tuple[str, ...]] = ()  # the ops that it has the domains do
    rail_steps: ClassVar[int] = 2  # messages that follow one another, the agreement among them

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if comm.topology.is_single_domain:
            return "the group is one domain, whose ranks reach each other's memory"
        if comm.store is None:
            return (
                "the group has no key-value store that can be reached, and rails between domains are made through one"
            )
        if self.device_type and comm.device_type != self.device_type:
            return f"it serves {self.device_type} tensors; this communicator's are on {comm.device_type}"
        for view in views(comm):
            if view.transport is None:
                reasons = "; ".join(f"{name}: {why}" for name, why in view.why_no_transport.items())
                return f"the domain of ranks {_ranks(view.members)} has no transport ({reasons})"
            for op in self.inside:
                asked = part_of(request, op, request.num_bytes)
                if best(asked, view) is None:
                    why = "; ".join(f"{a.name}: {a.unsupported(asked, view)}" for a in _of(op))
                    return f"inside a domain, no algorithm does its part ({op}: {why})"
        return None

    def cost(self, request: Request, comm: Communicator) -> Cost:
        """That of the domain which takes longest, and of the rails."""
        each = [self._cost(request, comm, view) for view in views(comm)]
        return max(each, key=lambda cost: cost.time_us(comm))

    def _cost(self, request: Request, comm: Communicator, view: Any) -> Cost:
        parts = [best(part_of(request, op, num_bytes), view) for op, num_bytes in self.parts(request, comm, view)]
        costs = [cost for _, cost in filter(None, parts)]
        crossing = self.crossing(request, comm, view)
        return Cost(
            steps=sum(cost.steps for cost in costs),
            scale_up_bytes=sum(cost.scale_up_bytes for cost in costs),
            scale_out_bytes=crossing,
            copied_bytes=sum(cost.copied_bytes for cost in costs) + 3 * crossing,  # as the engine's own ops
            rail_steps=self.rail_steps,
            parts=with_copies([part for cost in costs for part in cost.parts], crossing)
            if all(cost.parts for cost in costs)
            else (),
        )

    @abstractmethod
    def parts(self, request: Request, comm: Communicator, view: Any) -> list[tuple[str, int]]:
        """The domain's collectives: (op, bytes of a rank's input)."""

    @abstractmethod
    def crossing(self, request: Request, comm: Communicator, view: Any) -> int:
        """Bytes that a rank of the domain sends over its rails."""


def with_copies(parts: Iterable[Part], crossing: int) -> tuple[Part, ...]:
    """A domain's parts, and what the rails' bytes are copied: packed, received and merged."""
    return (*parts, Part("copy", crossing, times=3.0))


def best(request: Request, inner: Any) -> tuple[Algorithm, Cost] | None:
    """The algorithm of least modelled time that supports `request` inside a domain, with its cost."""
    able = [(a, a.cost(request, inner)) for a in _of(request.op) if a.unsupported(request, inner) is None]
    return min(able, key=lambda pair: pair[1].time_us(inner), default=None)


def _of(op: str) -> list[Algorithm]:
    return [a for a in algorithms.candidates() if a.op == op and not isinstance(a, Across)]


def part_of(request: Request, op: str, num_bytes: int) -> Request:
    """What a domain is asked for in the course of `request`."""
    reduces = request.get("reduce_op")
    detail = (("reduce_op", "sum" if reduces == "avg" else reduces),) if op == "reduce_scatter" else ()
    return Request(op, request.dtype if op == "reduce_scatter" else torch.uint8, num_bytes, detail)


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


# ---------------------------------------------------------------- inside a domain


class Inside:
    """The domain's collectives in the course of one call."""

    def __init__(self, domains: Domains, request: Request, asked: Asked) -> None:
        self.domains, self._request, self._asked = domains, request, asked
        self.size, self.rank = len(domains.members), domains.rank
        self._known: dict[tuple[str, int], tuple[Reduction, Request]] = {}

    def reduce(self, region: torch.Tensor) -> torch.Tensor:
        """Reduce the `size` slots of a flat tensor; returns this rank's, in its place in `region`."""
        mine = region.view(self.size, region.numel() // self.size)[self.rank]
        self._run("reduce_scatter", mine, region, region.nbytes)
        return mine

    def gather(self, region: torch.Tensor) -> None:
        """Fill the `size` slots of a flat tensor with each rank's own, which lies in its place."""
        region = region.view(torch.uint8) if region.numel() else region
        mine = region.view(self.size, region.numel() // self.size)[self.rank]
        self._run("all_gather", region, mine, mine.nbytes)

    def refuse(self, why: str) -> None:
        """Tell the domain's ranks, which wait in a `reduce` or `gather`, that this rank can't make its call."""
        algorithm, _ = self._algorithm("all_gather", 0)
        request = algorithm.register(self.domains.inner, f"{self._asked.op}|?", f"{self._asked.op} (refused)")
        algorithm.refuse(self.domains.inner, request, self._asked.op, why, False)

    def _run(self, op: str, output: torch.Tensor, input: torch.Tensor, num_bytes: int) -> None:
        algorithm, part = self._algorithm(op, num_bytes)
        inner, asked = self.domains.inner, self._asked
        request = algorithm.register(inner, f"{asked.agree}|{op}|{num_bytes}|{algorithm.name}", asked.text)
        algorithm.run(inner, part, request, output, input, _OPS[part.get("reduce_op", "sum")])

    def _algorithm(self, op: str, num_bytes: int) -> tuple[Reduction, Request]:
        known = self._known.get((op, num_bytes))
        if known is None:
            part = part_of(self._request, op, num_bytes)
            found = best(part, self.domains.inner)
            assert found is not None and isinstance(found[0], Reduction), "the planner asked before"
            known = self._known[op, num_bytes] = found[0], part
        return known


class Combine:
    """Sums of the domains' parts, in domain order: float16 and bfloat16 in float32, rounded once."""

    def __init__(self, reduce_op: str, world_size: int, like: torch.Tensor) -> None:
        self._op = reduce_op
        narrow = like.dtype in (torch.float16, torch.bfloat16)
        self._wide = torch.float32 if narrow else like.dtype
        # A tensor of the device: a division by a number may become a product there.
        self._divisor = torch.full((), world_size, dtype=self._wide, device=like.device) if reduce_op == "avg" else None

    def __call__(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Store the result in `out`, which may be one of the terms."""
        if self._op in ("max", "min"):
            pick = torch.maximum if self._op == "max" else torch.minimum
            total = terms[0]
            for term in terms[1:]:
                total = pick(total, term)
        elif len(terms) == 2 and self._divisor is None:  # torch's own sum of two is taken so
            torch.add(terms[0], terms[1], out=out)
            return
        else:
            total = terms[0].to(self._wide, copy=True)
            for term in terms[1:]:
                total.add_(term)
            if self._divisor is not None:
                total.div_(self._divisor)
        out.copy_(total)


def pipelined(count: int, *stages: Callable[[int], None]) -> None:
    """Call every stage for each of `count` chunks in order, each stage one chunk behind the stage before it."""
    for turn in range(count + len(stages) - 1):
        for behind, stage in enumerate(stages):
            if 0 <= turn - behind < count:
                stage(turn - behind)


def chunks_of(length: int, unit: int, most: int) -> list[tuple[int, int]]:
    """Cut `length` elements, a multiple of `unit`, into ranges of multiples of `unit`, of about `most` elements."""
    units = length // unit
    pieces = max(1, math.ceil(length / max(unit, most)))
    edges = [units * piece // pieces * unit for piece in range(pieces + 1)]
    return list(itertools.pairwise(edges))


class HierarchicalReduction(Across, Reduction):
    """What the all-reduce, reduce-scatter and all-gather across domains share."""

    def register(self, comm: Communicator, agree: str, text: str) -> int:
        return comm.domains.request(Asked(self.op, agree, text))

    def refuse(self, comm: Communicator, request: int, op: str, why: str, async_op: bool) -> None:
        domains = comm.domains
        asked = domains.asked(request)
        told = f"rank {domains.parent_rank} refused its own call, so nothing was exchanged: {why}"

        def call() -> None:
            with domains.guarded(op):
                agreement = Agreement(domains, asked)
                Inside(domains, Request("all_gather", torch.uint8), asked).refuse(why)
                agreement.tell(told, domains.parent_rank)
                agreement.hear()

        domains.lane.run(call) if not async_op else domains.lane.submit(call, [], op)

    def run(
        self, comm: Communicator, asked: Request, request: int, output: torch.Tensor, input: torch.Tensor, op: Any
    ) -> None:
        call = self._call(comm, asked, request, output, input)
        comm.domains.lane.run(call)

    def submit(
        self,
        comm: Communicator,
        asked: Request,
        request: int,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any,
        result: list[torch.Tensor],
        finish: Callable[[], None],
    ) -> Work:
        call = self._call(comm, asked, request, output, input)

        def all_of_it() -> None:
            call()
            finish()

        return comm.domains.aside.run(all_of_it, result, (output, input, *result))

    def _call(
        self, comm: Communicator, asked: Request, request: int, output: torch.Tensor, input: torch.Tensor
    ) -> Callable[[], None]:
        domains, world_size = comm.domains, comm.world_size
        what = domains.asked(request)

        def call() -> None:
            with domains.guarded(what.op):
                inside, agreement = Inside(domains, asked, what), Agreement(domains, what)
                combine = Combine(asked.get("reduce_op", ""), world_size, input)
                self.across(domains, inside, agreement, combine, output.view(-1), input.view(-1))

        return call

    @abstractmethod
    def across(
        self,
        domains: Domains,
        inside: Inside,
        agreement: Agreement,
        combine: Combine,
        output: torch.Tensor,
        input: torch.Tensor,
    ) -> None:
        """Do it, with flat tensors."""
