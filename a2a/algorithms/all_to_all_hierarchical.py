"""All-to-all of several domains: one message a rail for each other domain, handed on inside it.

    sizes     over the rail: how many bytes this rank sends to each rank of each other domain
    cross     what goes to the ranks of one domain goes to its rank on this rail, as one message
    inside    meanwhile, the domain's own pieces; then what has come over the rails is handed on, and its sizes before it

A rank talks to one rank of each other domain instead of to all of its ranks: fewer and larger messages, for a copy in
shared memory. Only sizes that both sides expect are handed on; a rank that is sent another size than it expects names
the sender.

Wins where messages between domains are dear, which is where pieces are small or ranks many. CPU tensors only: the host
waits for sizes, which a GPU's caller should not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import AllToAll, Cost, Request
from a2a.algorithms.hierarchical_base import Across, best, part_of
from a2a.domains import Agreement, Asked
from a2a.errors import MismatchError
from a2a.work import Work

if TYPE_CHECKING:
    from a2a.comm import Communicator
    from a2a.domains import Domains


class AllToAllHierarchical(Across, AllToAll):
    """See the module's docstring."""

    name: ClassVar[str] = "hierarchical"
    device_type: ClassVar[str] = "cpu"
    inside: ClassVar[tuple[str, ...]] = ("all_to_all",)
    rail_steps: ClassVar[int] = 3

    def parts(self, request: Request, comm: Communicator, view: Any) -> list[tuple[str, int]]:
        own = request.num_bytes * view.world_size // comm.world_size
        return [("all_to_all", own), ("all_to_all", request.num_bytes - own), ("all_to_all", 0)]

    def crossing(self, request: Request, comm: Communicator, view: Any) -> int:
        return request.num_bytes * (comm.world_size - int(view.world_size)) // comm.world_size

    def cost(self, request: Request, comm: Communicator) -> Cost:
        cost = super().cost(request, comm)
        return Cost(
            steps=cost.steps,
            scale_up_bytes=cost.scale_up_bytes,
            scale_out_bytes=cost.scale_out_bytes,
            copied_bytes=cost.copied_bytes + 2 * cost.scale_out_bytes,  # into one message, and into one piece
            rail_steps=cost.rail_steps,
        )

    def register(self, comm: Communicator, agree: str, row_bytes: int, text: str) -> int:
        return comm.domains.request(Asked("all_to_all", agree, text, row_bytes))

    def refuse(self, comm: Communicator, request: int, why: str, async_op: bool) -> None:
        domains = comm.domains
        asked = domains.asked(request)
        told = f"rank {domains.parent_rank} refused its own call, so nothing was exchanged: {why}"

        def call() -> None:
            with domains.guarded(asked.op):
                agreement, algorithm = Agreement(domains, asked), _inner(domains)
                number = algorithm.register(domains.inner, asked.agree, 0, asked.text)
                algorithm.refuse(domains.inner, number, why, False)
                agreement.tell(told, domains.parent_rank)
                agreement.hear()

        domains.lane.run(call) if not async_op else domains.lane.submit(call, [], asked.op)

    def run_even(self, comm: Communicator, request: int, output: torch.Tensor, input: torch.Tensor, op: str) -> None:
        outputs, inputs = (list(t.view(-1).chunk(comm.world_size)) for t in (output, input))
        if not input.numel():
            outputs, inputs = [output.view(-1)] * comm.world_size, [input.view(-1)] * comm.world_size
        self.run(comm, request, outputs, inputs, op)

    def run(
        self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: str
    ) -> None:
        domains = comm.domains
        asked = domains.asked(request)
        domains.lane.run(lambda: _exchange(domains, asked, outputs, inputs, op))

    def submit(
        self,
        comm: Communicator,
        request: int,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        op: str,
        result: list[torch.Tensor],
        finish: Any,
    ) -> Work:
        domains = comm.domains
        asked = domains.asked(request)

        def call() -> None:
            _exchange(domains, asked, outputs, inputs, op)
            if finish is not None:
                finish()

        return domains.aside.run(call, result, (*outputs, *inputs, *result))


def _inner(domains: Domains) -> AllToAll:
    found = best(part_of(Request("all_to_all", torch.uint8), "all_to_all", 0), domains.inner)
    assert found is not None and isinstance(found[0], AllToAll), "the planner asked before"
    return found[0]


def _exchange(domains: Domains, asked: Asked, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: str) -> None:
    send, receive = [_bytes(t) for t in inputs], [_bytes(t) for t in outputs]
    with domains.guarded(op):
        _Exchange(domains, asked, op).run(receive, send)


class _Exchange:
    """One call. Sizes are bytes."""

    def __init__(self, domains: Domains, asked: Asked, op: str) -> None:
        self._domains, self._asked, self._op = domains, asked, op
        self._algorithm = _inner(domains)
        self._others = [d for d in range(domains.count) if d != domains.index]

    def run(self, receive: list[torch.Tensor], send: list[torch.Tensor]) -> None:
        domains = self._domains
        members = domains.members
        agreement = Agreement(domains, self._asked)
        agreement.first(
            lambda: self._inside([receive[r] for r in members], [send[r] for r in members], self._asked.row_bytes)
        )
        agreement.check()
        sizes, messages, works = self._cross(send)
        for work in works:
            work.wait()
        self._hand_on(receive, sizes, messages)

    def _cross(self, send: list[torch.Tensor]) -> tuple[dict[int, list[int]], dict[int, torch.Tensor], list[Any]]:
        """Start all messages; (sizes by sending rank, what has come by sending rank, what to wait for)."""
        domains, nothing = self._domains, torch.empty(0, dtype=torch.uint8)
        own_sizes = [
            torch.tensor([send[r].numel() for r in ranks], dtype=torch.int64) if d != domains.index else nothing
            for d, ranks in enumerate(domains.ranks)
        ]
        coming: dict[int, torch.Tensor] = {}
        works = []
        for index, rail in domains.rails.items():
            own = index == domains.rank  # the rail that this rank's pieces go over
            heads = [
                torch.empty(len(domains.members), dtype=torch.int64) if self._sends(d, index) else nothing
                for d in range(domains.count)
            ]
            works.append(rail.all_to_all(heads, own_sizes if own else [nothing] * domains.count, async_op=True))
            coming |= {domains.ranks[d][index]: heads[d] for d in range(domains.count) if self._sends(d, index)}
        for work in works:
            work.wait()
        sizes = {rank: head.tolist() for rank, head in coming.items()}
        messages, works = {}, []
        for index, rail in domains.rails.items():
            own = index == domains.rank
            bodies = [nothing] * domains.count
            for d in self._others:
                if self._sends(d, index):
                    rank = domains.ranks[d][index]
                    bodies[d] = messages[rank] = torch.empty(sum(sizes[rank]), dtype=torch.uint8)
            going = [nothing] * domains.count
            if own:
                for d in self._others:
                    going[d] = torch.cat([send[r] for r in domains.ranks[d]])
            works.append(rail.all_to_all(bodies, going, async_op=True))
        return sizes, messages, works

    def _sends(self, domain: int, index: int) -> bool:
        """Whether that domain's pieces for this one come over the rail: it is the first that its rank is on."""
        return domain != self._domains.index and index < len(self._domains.ranks[domain])

    def _hand_on(
        self, receive: list[torch.Tensor], sizes: dict[int, list[int]], messages: dict[int, torch.Tensor]
    ) -> None:
        """Give the domain's ranks what has come for them over this rank's rails, and take what others give."""
        domains, size = self._domains, len(self._domains.members)
        far = [rank for d in self._others for rank in domains.ranks[d]]
        by = {rank: place % size for d in self._others for place, rank in enumerate(domains.ranks[d])}
        heads = [torch.tensor([sizes[r][q] for r in far if r in sizes], dtype=torch.int64) for q in range(size)]
        told = [torch.empty(sum(p == by[r] for r in far), dtype=torch.int64) for p in range(size)]
        self._inside([_bytes(t) for t in told], [_bytes(t) for t in heads], 0)
        for place in range(size):
            senders = [r for r in far if by[r] == place]
            for rank, num_bytes in zip(senders, told[place].tolist(), strict=True):
                if num_bytes != receive[rank].numel():
                    raise MismatchError(
                        f"split sizes disagree: rank {rank} sends {num_bytes} bytes to rank {domains.parent_rank}, which "
                        f"expects {receive[rank].numel()} [leg rail]",
                        rank=domains.parent_rank,
                        peer=rank,
                        op=self._op,
                    )
        pieces = {rank: torch.split(message, sizes[rank]) for rank, message in messages.items()}
        out = [
            torch.cat([pieces[r][q] for r in far if r in pieces]) if pieces else heads[q][:0].view(torch.uint8)
            for q in range(size)
        ]
        come = [torch.empty(sum(receive[r].numel() for r in far if by[r] == p), dtype=torch.uint8) for p in range(size)]
        self._inside(come, out, 0)
        for place in range(size):
            senders = [r for r in far if by[r] == place]
            for rank, piece in zip(
                senders, torch.split(come[place], [receive[r].numel() for r in senders]), strict=True
            ):
                receive[rank].copy_(piece)

    def _inside(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], row_bytes: int) -> None:
        inner, asked = self._domains.inner, self._asked
        request = self._algorithm.register(inner, asked.agree, row_bytes, asked.text)
        self._algorithm.run(inner, request, outputs, inputs, self._op)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
