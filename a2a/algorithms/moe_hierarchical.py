"""Mixture of Experts across domains: over a rail once per token and domain, then load and store inside the domain.

    dispatch    cross    a token goes over its rank's rail to each domain that has experts of it, once, with those experts
                         and their weights; quantised at its source, if there is a wire format
                inside   each domain runs the exchange of one domain (`staged`, `direct`) over its ranks' tokens and those
                         that came, which keep their rank and number: rows have the bits and the order of one domain
    combine     inside   each domain sums what it holds of a token, wherever the token comes from
                cross    one sum per token and domain goes home
                merge    the owner sums the domains' sums
    gradients   the same ways: combine's as dispatch goes, dispatch's as combine does

Order of sums: the ranks' sums are those of one domain (a rank's rows in expert order, rounded to the dtype). Each domain,
the owner's own among them, sums its ranks' in rank order in float32, from the first, and rounds to the dtype; the owner
sums the domains' in the order of their lowest ranks, in float32, from the first, and rounds. With wire_combine="float32"
nothing is rounded but the end. A domain to which a token went counts although `overflow="drop"` has dropped its rows
there: with zero.

Wins wherever the links between domains are slower than those inside and a token has several experts in one domain: all
the copies that it would send there cross as one.

On a CPU. What a GPU needs beside is `Packing` on its memory and the heads as words of the device; with `max_rows` nothing
that crosses has a size that the host would have to wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from a2a.algorithms.base import Cost, Request
from a2a.algorithms.hierarchical_base import Across, best, with_copies
from a2a.algorithms.moe_base import Dispatched, Moe, MoeExchange, MoeSpec, Origins, Payload
from a2a.algorithms.moe_crossing import Crossers, Crossing, Packing
from a2a.algorithms.moe_rails import Head, Key, Legs, Places
from a2a.algorithms.moe_staged import MoeStaged, SharedMemoryExchange
from a2a.domains import views
from a2a.errors import A2AError, MismatchError

if TYPE_CHECKING:
    from a2a.comm import Communicator

T = TypeVar("T")
Ids = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # ids within the domain, as they were given; weights


class MoeHierarchical(Across, Moe):
    """See the module's docstring."""

    name: ClassVar[str] = "hierarchical"
    device_type: ClassVar[str] = "cpu"
    rail_steps: ClassVar[int] = 2  # heads, then what they announce

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if reason := Across.unsupported(self, request, comm):
            return reason
        for view in views(comm):
            if best(request, view) is None:
                return f"no algorithm serves the domain of ranks {', '.join(map(str, view.members))}"
        return None

    def _cost(self, request: Request, comm: Communicator, view: Any) -> Cost:
        found = best(request, view)
        assert found is not None, "the planner asks first whether it is supported"
        inside, crossing = found[1], self.crossing(request, comm, view)
        return replace(
            inside,
            scale_out_bytes=crossing,
            copied_bytes=inside.copied_bytes + 3 * crossing,  # packed, received, and merged
            rail_steps=self.rail_steps,
            parts=with_copies(inside.parts, crossing) if inside.parts else (),
        )

    def parts(self, request: Request, comm: Communicator, view: Any) -> list[tuple[str, int]]:
        return [("moe", request.num_bytes)]

    def crossing(self, request: Request, comm: Communicator, view: Any) -> int:
        """Under uniform routing, a token goes to a domain of m of n ranks unless none of its K experts is there."""
        top_k, world_size = int(request.get("top_k")), comm.world_size
        others = [len(d.ranks) for d in comm.topology.domains if d.ranks != view.members]
        tokens = sum(1 - (1 - size / world_size) ** top_k for size in others)
        return int(request.num_bytes * tokens / (request.dtype.itemsize if request.get("wire") else 1))

    def remarks(self, request: Request, comm: Communicator) -> tuple[str, ...]:
        cost = self.cost(request, comm)
        largest = max(views(comm), key=lambda view: self.crossing(request, comm, view))
        flat = request.num_bytes * int(request.get("top_k")) * (comm.world_size - largest.world_size) // comm.world_size
        time = replace(cost, scale_out_bytes=flat, rail_steps=1).time_us(comm)
        return (
            f"flat, every (token, expert) row by itself over the group's engine, would send {flat:,} bytes across rails "
            f"instead of {cost.scale_out_bytes:,} ({flat / max(cost.scale_out_bytes, 1):.1f} times), modelled {time:.1f} us",
        )

    def open(self, comm: Communicator, spec: MoeSpec) -> MoeExchange:
        return HierarchicalExchange(comm, spec)


class HierarchicalExchange(MoeExchange):
    """The exchange of this rank's domain, and its rails."""

    plan_size = None

    def __init__(self, comm: Communicator, spec: MoeSpec) -> None:
        self._comm, self._spec, self._domains = comm, spec, comm.domains
        self._longer = 2 * comm.timeout_s + 1  # than what a rank of this domain may spend on its rails
        self._places = places = Places.of(comm.topology, comm.rank)
        experts = [
            [e for e, owner in enumerate(spec.expert_to_rank) if owner in ranks] for ranks in self._domains.ranks
        ]
        here = experts[places.domain]
        self._experts = len(here)
        owners = tuple(places.ranks.index(spec.expert_to_rank[e]) for e in here)
        self._packing, self._legs = Packing(spec, experts, places.domain), Legs(self._domains, places, spec)
        inside = replace(spec, num_experts=len(here), expert_to_rank=owners)
        self._inner: SharedMemoryExchange = self._call("open", lambda: self._open(inside))

    def _open(self, inside: MoeSpec) -> SharedMemoryExchange:
        comm, sources = self._domains.inner, self._places.sources
        brought = -(-sources.count // comm.world_size)  # as many ranks' tokens come through each rank
        found = best(replace(inside, max_tokens=brought * inside.max_tokens).request(), comm)
        assert found is not None and isinstance(found[0], MoeStaged), "the planner asked before"
        algorithm = found[0]
        inner = self._inside("open", lambda: algorithm.open(comm, inside, sources), tell=True)
        assert isinstance(inner, SharedMemoryExchange)
        try:
            _, _, told = self._legs.begin("open", {}).wait()
            if told is not None:
                raise told
        except MismatchError:
            inner.close()
            raise
        inner.spare_rows = self._packing.most_spare
        return inner

    # ---- what goes out: to the domains of a token's experts

    def dispatch(
        self,
        x_TH: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
    ) -> Dispatched:
        own_TK, went = self._packing.select(topk_ids_TK)  # before anybody is told anything
        x, ids = Payload(x_TH, scales), (own_TK, topk_ids_TK, weights_TK)
        return self._call("dispatch", lambda: self._dispatch(x, ids, went))

    def _dispatch(self, x: Payload, ids: Ids, went: tuple[Crossers, ...]) -> Dispatched:
        packing, places, inner = self._packing, self._places, self._inner
        own_TK, given_TK, weights_TK = ids
        weighted = weights_TK is not None
        meeting = self._legs.begin(
            "dispatch",
            {
                (places.home, d): Head(send_rows=went[d].tokens, send_pairs=went[d].pairs, weighted=weighted)
                for d in places.others
            },
        )
        x = self._wired(x)
        rows, index = self._packed(x, went), {}
        for d in places.others:
            index[places.home, d] = out = inner.memory(packing.index_bytes(went[d].tokens, went[d].pairs, weighted))
            packing.pack_index(out, went[d], given_TK, weights_TK)
        heads, skip, told = meeting.wait()
        coming = [heads[a.rail, a.domain] for a in places.arrivals if a.rail not in skip]
        for head in coming:
            self._check_size(head)
        index_in = self._into(heads, skip, lambda h: packing.index_bytes(h.send_rows, h.send_pairs, h.weighted))
        rows_in = self._into(heads, skip, lambda h: packing.payload_bytes(h.send_rows))
        indexing, moving = self._legs.exchange(index_in, index, skip), self._legs.exchange(rows_in, rows, skip)
        _wait(indexing)
        if told is not None:
            _wait(moving)
            self._inner.refuse("dispatch", str(told))
            raise told
        came, numbers, ids_VK, weights_VK = self._union(own_TK, weights_TK, coming, index_in)
        _wait(moving)
        parts = [
            packing.rows(rows_in[a.rail, a.domain], c.tokens)._replace(numbers=n)
            for a, c, n in zip(places.arrivals, came, numbers, strict=True)
        ]
        inner.bring([x, *parts])
        with inner.waiting(self._longer):
            got = self._inside("dispatch", lambda: inner.dispatch(x.rows, x.scales, ids_VK, weights_VK))
        brought = got.plan.view(2, -1)
        plan = Crossing(brought[0], brought[1], went, tuple(came)).pack()
        return got._replace(topk_ids_TK=given_TK.to(torch.int32, copy=True), plan=plan)

    def _union(
        self,
        own_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        coming: Sequence[Head],
        index: Mapping[Key, torch.Tensor],
    ) -> tuple[list[Crossers], list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """(who came, their numbers at their sources; ids and weights of the own tokens and of those that came)."""
        own, top_k = own_TK.shape
        tokens = own + sum(head.send_rows for head in coming)
        ids_VK, weights_VK = torch.empty(tokens, top_k, dtype=torch.int32), torch.empty(tokens, top_k)
        ids_VK[:own] = own_TK
        weights_VK[:own] = 1.0 if weights_TK is None else weights_TK
        came, numbers, at = [], [], own
        for a, head in zip(self._places.arrivals, coming, strict=True):
            n = head.send_rows
            found = self._packing.unpack_index(
                index[a.rail, a.domain],
                n,
                head.send_pairs,
                head.weighted,
                self._experts,
                ids_VK[at : at + n],
                weights_VK[at : at + n],
            )
            if found is None:
                raise self._nonsense(head)
            came.append(found[0])
            numbers.append(found[1])
            at += n
        return came, numbers, ids_VK, weights_VK

    def combine_backward(
        self, grad_TH: torch.Tensor, rows_RH: torch.Tensor | None, weights_R: torch.Tensor | None, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._call("combine_backward", lambda: self._combine_backward(grad_TH, rows_RH, weights_R, origins))

    def _combine_backward(
        self, grad_TH: torch.Tensor, rows_RH: torch.Tensor | None, weights_R: torch.Tensor | None, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op, packing, places, inner = "combine_backward", self._packing, self._places, self._inner
        crossing = self._crossing(origins)
        meeting = self._legs.begin(op, self._heads(crossing, home=False))
        grad = self._wired(Payload(grad_TH))
        rows = self._packed(grad, crossing.went)
        heads, skip, told = meeting.wait()
        rows_in = self._into(heads, skip, lambda h: packing.payload_bytes(h.send_rows))
        _wait(self._legs.exchange(rows_in, rows, skip))
        if told is not None:
            inner.refuse(op, str(told))
            raise told
        parts = [
            packing.rows(rows_in[a.rail, a.domain], c.tokens)
            for a, c in zip(places.arrivals, crossing.came, strict=True)
        ]
        inner.bring([grad, *parts])
        inside = crossing.inside(origins, self._brought(origins, crossing))
        with inner.waiting(self._longer):
            return self._inside(op, lambda: inner.combine_backward(grad_TH, rows_RH, weights_R, inside))

    def _wired(self, part: Payload) -> Payload:
        """As it travels: quantised, unless it is already or nothing is."""
        if self._spec.wire is None or part.scales is not None:
            return part
        return Payload(*self._packing.quantised(part.rows))

    def _packed(self, part: Payload, went: tuple[Crossers, ...]) -> dict[Key, torch.Tensor]:
        """The rows of this rank's tokens to each other domain."""
        packed = {}
        for d in self._places.others:
            out = self._inner.memory(self._packing.payload_bytes(went[d].tokens))
            self._packing.pack_rows(out, part, went[d].list_N)
            packed[self._places.home, d] = out
        return packed

    def _into(
        self, heads: Mapping[Key, Head], skip: frozenset[int], size: Callable[[Head], int]
    ) -> dict[Key, torch.Tensor]:
        """Memory for what comes from each rank whose tokens come here."""
        keys = [(a.rail, a.domain) for a in self._places.arrivals if a.rail not in skip]
        return {key: self._inner.memory(size(heads[key])) for key in keys}

    # ---- what goes home: to the owner of a token

    def combine(self, rows_RH: torch.Tensor, weights_R: torch.Tensor | None, origins: Origins) -> torch.Tensor:
        def call() -> torch.Tensor:
            crossing = self._crossing(origins)
            inside = crossing.inside(origins, self._brought(origins, crossing))
            sums = self._inside("combine", lambda: self._inner.combine(rows_RH, weights_R, inside), tell=True)
            return self._home("combine", crossing, origins, sums)

        return self._call("combine", call)

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_weights_R: torch.Tensor, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op = "dispatch_backward"

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            crossing = self._crossing(origins)
            inside = crossing.inside(origins, self._brought(origins, crossing))
            sums, grads_VK = self._inside(
                op, lambda: self._inner.dispatch_backward(grad_rows, grad_weights_R, inside), tell=True
            )
            grad_x = self._home(op, crossing, origins, sums, grads_VK)
            return grad_x, grads_VK[: len(origins.topk_ids_TK)]

        return self._call(op, call)

    def _home(
        self,
        op: str,
        crossing: Crossing,
        origins: Origins,
        sums: torch.Tensor,
        grads_VK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send home the domain's sums of what came, and sum what comes home; the pairs' gradients go into `grads_VK`."""
        packing, places, inner, dtype = self._packing, self._places, self._inner, self._inner.sum_dtype
        _, skip, told = self._legs.begin(op, self._heads(crossing, home=True)).wait()
        out, grads_out, at = {}, {}, len(origins.topk_ids_TK)
        for a, c in zip(places.arrivals, crossing.came, strict=True):
            key, size = (a.rail, a.domain), packing.home_bytes(c.tokens, dtype)
            out[key] = sums[at : at + size // (sums.shape[1] * dtype.itemsize)]
            if grads_VK is not None:
                grads_out[key] = packed = torch.empty(packing.grads_bytes(c.pairs) // 4)
                packing.pack_grads(packed, grads_VK[at:], c)
            at += c.tokens
        home = {(places.home, d): c for d, c in enumerate(crossing.went) if d != places.domain}
        into = {key: inner.memory(packing.home_bytes(c.tokens, dtype)) for key, c in home.items()}
        works = self._legs.exchange(into, out, skip)
        if grads_VK is not None:
            grads_in = {key: torch.empty(packing.grads_bytes(c.pairs) // 4) for key, c in home.items()}
            works += self._legs.exchange(grads_in, grads_out, skip)
        _wait(works)
        if told is not None:
            raise told
        y_TH = inner.matrix(len(origins.topk_ids_TK))
        terms = [sums if d == places.domain else into[places.home, d].view(dtype) for d in range(self._domains.count)]
        packing.merge(y_TH, terms, crossing.went, places.domain)
        if grads_VK is not None:
            for key, c in home.items():
                packing.unpack_grads(grads_in[key], grads_VK, c)
        return y_TH

    # ---- what all of them do

    def _call(self, op: str, work: Callable[[], T]) -> T:
        """Do it in this communicator's order of calls; a failure is everybody's."""
        result: list[T] = []

        def call() -> None:
            with self._domains.guarded(op):
                try:
                    result.append(work())
                except Exception as error:  # such as no memory: others wait for this rank
                    if not isinstance(error, A2AError):
                        self._domains.fail(error, op)
                    raise

        self._domains.lane.run(call)
        return result[0]

    def _inside(self, op: str, call: Callable[[], T], tell: bool = False) -> T:
        """A collective of the domain. Where one of its ranks refuses, tell the other domains, if they wait for that."""
        try:
            return call()
        except MismatchError as error:
            transport = self._domains.inner.transport
            if transport is None or transport.failed():
                raise
            told = self._domains.outer(error)
            assert isinstance(told, MismatchError)
            if tell:
                self._legs.refuse(op, str(told))
            raise self._domains.in_step(told) from error

    def _heads(self, crossing: Crossing, home: bool) -> dict[Key, Head]:
        """What this rank sends and expects, of tokens that go out or, with `home`, of sums that go home."""
        places = self._places
        went = {(places.home, d): crossing.went[d].size for d in places.others}
        came = {(a.rail, a.domain): c.size for a, c in zip(places.arrivals, crossing.came, strict=True)}
        sent, expected = (came, went) if home else (went, came)
        heads = {}
        for key in went.keys() | came.keys():
            out, back = (sizes.get(key, (0, 0)) for sizes in (sent, expected))
            heads[key] = Head(send_rows=out[0], send_pairs=out[1], expect_rows=back[0], expect_pairs=back[1])
        return heads

    def _crossing(self, origins: Origins) -> Crossing:
        return Crossing.unpack(origins.plan, self._domains.count, len(self._places.arrivals))

    def _brought(self, origins: Origins, crossing: Crossing) -> int:
        """How many tokens this rank brings to its domain."""
        return len(origins.topk_ids_TK) + sum(c.tokens for c in crossing.came)

    def _check_size(self, head: Head) -> None:
        most = self._spec.max_tokens
        if not (0 <= head.send_rows <= most and 0 <= head.send_pairs <= head.send_rows * self._spec.top_k):
            raise self._nonsense(head)

    def _nonsense(self, head: Head) -> MismatchError:
        return MismatchError(
            f"dispatch: rank {head.rank} announced {head.send_rows} tokens with {head.send_pairs} experts, but that is not "
            f"what came, or not what its ExpertParallel allows: its a2a may be of another version [leg rail]",
            rank=self._comm.rank,
            peer=head.rank,
            op="dispatch",
        )

    def refuse(self, op: str, why: str) -> None:
        if self._comm.closed:
            return

        def call() -> None:
            with self._domains.guarded(op):
                steps: list[Callable[[], None]] = [
                    lambda: self._legs.refuse(op, why),
                    lambda: self._inner.refuse(op, why),
                ]
                for step in steps if op in ("dispatch", "combine_backward") else reversed(steps):
                    step()

        with contextlib.suppress(A2AError):  # the caller raises what it refuses for; a failure comes with the next call
            self._domains.lane.run(call)

    def close(self) -> None:
        self._inner.close()


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


__all__ = ["HierarchicalExchange", "MoeHierarchical"]
