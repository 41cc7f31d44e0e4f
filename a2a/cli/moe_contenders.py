"""The MoE layers that `a2a bench moe` and `a2a demo` time against each other, and the check that all of them must pass.

A layer's round has four phases: dispatch, combine, combine backward, dispatch backward. On a CPU a call is a whole round,
and each phase is timed within it. On a GPU, where calls only queue work, each phase is timed in rows of its own, and so is
the round. The experts do nothing in a timed round; while checking, the rows of expert e are multiplied by 1, 2 or 4, so
that a row that went to the wrong expert or came home to the wrong place shows.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import a2a
from a2a.cli.moe_c10d import C10dMoe
from a2a.cli.moe_case import MoeCase, Outcome, dequantised, factor, wrong
from a2a.clocks import Clock
from a2a.measure import Contender

WAITS = "its host waits for the counts of rows, which no CUDA graph can"
PARTS = ("dispatch", "combine", "combine_backward", "dispatch_backward")


class Rounds(ABC):
    """A layer and its tokens. A phase may be made any number of times: it uses what the one before it has left here.

    Attributes:
        scaled: the experts multiply, and everything is computed from this round's rows; for checks.
        rows, y, grad_x, grad_weights: what the last round gave.
    """

    scaled = False
    rows: Any
    y: Tensor
    grad_x: Tensor
    grad_weights: Tensor

    def __init__(self, case: MoeCase, rank: int) -> None:
        self.case, self.rank = case, rank
        self.x, self.ids, self.weights, self.grad = case.inputs(rank)

    @abstractmethod
    def dispatch(self) -> None: ...

    @abstractmethod
    def experts(self) -> None:
        """What lies between dispatch and combine. Not timed."""

    @abstractmethod
    def combine(self) -> None: ...

    @abstractmethod
    def combine_backward(self) -> None: ...

    def experts_backward(self) -> None:  # noqa: B027
        """What lies between the backwards, if anything. Not timed."""

    @abstractmethod
    def dispatch_backward(self) -> None: ...

    @abstractmethod
    def expert_rows(self) -> Tensor:
        """The expert-major rows that the last dispatch gave, without padding."""

    def round(self) -> None:
        """All phases, one after the other."""
        self.dispatch()
        self.experts()
        self.combine()
        self.combine_backward()
        self.experts_backward()
        self.dispatch_backward()

    def timed_round(self) -> tuple[int, ...]:
        """The same on a CPU; ns of each phase."""
        clock = [0]
        for phase, between in (
            (self.dispatch, self.experts),
            (self.combine, None),
            (self.combine_backward, self.experts_backward),
            (self.dispatch_backward, None),
        ):
            begin = time.perf_counter_ns()
            phase()
            clock.append(time.perf_counter_ns() - begin + clock[-1])
            if between is not None:
                between()
        self.forget()
        return _differences(clock)

    def forget(self) -> None:
        """Let go of a round's tensors, as a step of training does."""
        for name in ("rows", "y", "grad_x", "grad_weights"):
            self.__dict__.pop(name, None)

    def wrong(self, clock: Clock | None = None) -> int:
        """Make a round with experts that multiply, and count what is wrong."""
        self.scaled = True
        if clock is None:
            self.round()
        else:
            clock.perform(self.round)
        self.scaled = False
        outcome = Outcome(self.expert_rows(), self.y.detach(), self.grad_x, self.grad_weights, self.padding_wrong())
        return wrong(self.case, self.rank, outcome)

    def padding_wrong(self) -> int:
        """How many elements of padding are not zero."""
        return 0

    def contender(self, name: str, clock: Clock, **options: Any) -> Contender:
        """Phases timed within a round on a CPU, each by itself on a GPU."""
        if self.x.device.type == "cpu":
            return Contender(name, self.timed_round, self.wrong, parts=PARTS, **options)
        phases = {part: getattr(self, part) for part in PARTS}
        return Contender(name, self.round, lambda: self.wrong(clock), phases=phases, **options)


class A2aRounds(Rounds):
    """`a2a.ExpertParallel`, forward and backward by its own calls: what autograd would call, without autograd."""

    def __init__(self, case: MoeCase, comm: Any) -> None:
        super().__init__(case, comm.rank)
        self.layer = a2a.ExpertParallel(comm=comm, **case.layer_arguments())
        self._plain = case.layout == "expert" and case.rows == "dtype"
        self._out: Tensor | None = None  # stand-ins for what experts would give, where their rows are of another form
        self._grad_rows: Tensor | None = None

    def dispatch(self) -> None:
        with torch.no_grad():
            self.rows, self.per_expert, self.routing = self.layer.dispatch(self.x, self.ids, self.weights)

    def experts(self) -> None:
        if self.scaled:
            rows = self._expanded()
            self.scale = self._row_factors(len(rows))
            self.out = self._out = rows * self.scale
        elif self._plain:
            self.out = self.rows
        else:
            self.out = self._expanded() if self._out is None else self._out

    def combine(self) -> None:
        with torch.no_grad():
            self.y = self.layer.combine(self.out, self.routing)

    def combine_backward(self) -> None:
        with torch.no_grad():
            self.grads = self.layer.combine_backward(self.grad, self.out, self.routing)

    def experts_backward(self) -> None:
        grad_rows = self.grads[0]
        if self.scaled:
            self.grad_rows = self._grad_rows = self._gathered(grad_rows * self.scale)
        elif self.case.layout == "expert":
            self.grad_rows = grad_rows
        else:
            self.grad_rows = self._gathered(grad_rows) if self._grad_rows is None else self._grad_rows

    def dispatch_backward(self) -> None:
        with torch.no_grad():
            grads = self.layer.dispatch_backward(self.grad_rows, self.routing, self.grads[1])
        self.grad_x, self.grad_weights = grads

    def forget(self) -> None:
        super().forget()
        for name in ("per_expert", "routing", "out", "grads", "grad_rows"):
            self.__dict__.pop(name, None)

    def expert_rows(self) -> Tensor:
        return self._expanded()[self._positions()]

    def padding_wrong(self) -> int:
        if self.case.layout == "compact":
            return 0
        expanded = self._expanded()
        end = int(self.routing.offsets_E[-1]) if len(self.routing.offsets_E) else 0
        padding = torch.ones(len(expanded), dtype=torch.bool, device=expanded.device)
        padding[end:] = False  # unspecified
        padding[self._positions()] = False
        return int((expanded[padding] != 0).sum())

    def _positions(self) -> Tensor:
        """Where the rows that are no padding lie."""
        ends, counts = self.routing.offsets_E.tolist(), self.per_expert.tolist()
        starts = [0, *ends][: len(ends)]
        pieces = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).to(self.x.device)

    def _expanded(self) -> Tensor:
        """One row for each row of the routing, of the instance's dtype. Doesn't wait for a GPU."""
        rows = dequantised(self.case, *self.rows) if self.case.rows == "wire" else self.rows
        if self.case.layout == "compact" and len(rows):
            index = self.routing.row_index_R.long().clamp(0, len(rows) - 1)  # unspecified past the end
            rows = rows.index_select(0, index)
        expanded: Tensor = rows
        return expanded

    def _row_factors(self, num_rows: int) -> Tensor:
        ends = self.routing.offsets_E
        first = self.case.experts_of(self.rank)[0]
        expert = torch.searchsorted(ends, torch.arange(num_rows, device=ends.device, dtype=ends.dtype), right=True)
        return factor(first + expert.clamp(max=max(len(ends) - 1, 0))).to(self.case.dtype).unsqueeze(1)

    def _gathered(self, grad_rows: Tensor) -> Tensor:
        """The gradient of the rows as they were dispatched: a compact row's is the sum of its experts'."""
        if self.case.layout == "expert":
            return grad_rows
        rows = self.rows[0] if self.case.rows == "wire" else self.rows
        routing = self.routing
        total = torch.zeros(rows.shape, dtype=torch.float32, device=grad_rows.device)
        if len(rows) and len(routing.offsets_E):
            place = torch.arange(len(grad_rows), device=grad_rows.device)
            real = (place < routing.offsets_E[-1]) & (routing.row_rank_R >= 0)
            index = routing.row_index_R.long().clamp(0, len(rows) - 1)
            total.index_add_(0, index, torch.where(real.unsqueeze(1), grad_rows.float(), 0))
        return total.to(self.case.dtype)


class C10dRounds(Rounds):
    """The same layer out of sort, counts and `all_to_all_single` on gloo or NCCL, through autograd."""

    def __init__(self, case: MoeCase, rank: int, group: Any = None) -> None:
        super().__init__(case, rank)
        self.layer = C10dMoe(case.experts, group)
        self.x.requires_grad_()
        self.weights.requires_grad_()

    def dispatch(self) -> None:
        self.rows, self.route = self.layer.dispatch(self.x, self.ids)

    def experts(self) -> None:
        self.leaf = self.rows.detach().requires_grad_()
        self.out = self.leaf
        if self.scaled:
            _, experts = self.case.expected_rows(self.rank)
            self.out = self.leaf * factor(experts).to(self.case.dtype).unsqueeze(1)

    def combine(self) -> None:
        self.y = self.layer.combine(self.out, self.weights, self.route)

    def combine_backward(self) -> None:
        grads = torch.autograd.grad(self.y, (self.leaf, self.weights), self.grad, retain_graph=True)
        self.grad_leaf, self.grad_weights = grads

    def dispatch_backward(self) -> None:
        (self.grad_x,) = torch.autograd.grad(self.rows, self.x, self.grad_leaf, retain_graph=True)

    def forget(self) -> None:
        super().forget()
        for name in ("route", "leaf", "out", "grad_leaf"):
            self.__dict__.pop(name, None)

    def expert_rows(self) -> Tensor:
        rows: Tensor = self.rows.detach()
        return rows


def a2a_contender(case: MoeCase, comm: Any, clock: Clock) -> Contender:
    """`a2a.ExpertParallel`."""
    rounds = A2aRounds(case, comm)
    plan = rounds.layer.plan
    sms = plan.cost.sms if comm.device_type == "cuda" else None
    return rounds.contender("a2a", clock, algorithm=plan.algorithm.name, sms=sms)


def c10d_contender(
    name: str, case: MoeCase, rank: int, clock: Clock, group: Any = None, *, why_not: str = ""
) -> Contender:
    """The same layer on gloo's or NCCL's all-to-all."""
    if why_not:
        phases = dict.fromkeys(PARTS, int)
        return Contender(name, int, lambda: 0, phases=phases, optional=True, why_not=why_not)
    return C10dRounds(case, rank, group).contender(name, clock, optional=name != "gloo")


def copies_contender(case: MoeCase, rank: int) -> Contender:
    """What copying this rank's rows costs with nobody to talk to: written once by dispatch, read once by combine, and back.

    A leg copies R rows in runs of T, from a tensor of T rows when writing and to one of T rows when reading, T being the
    rank's number of tokens. As in the layer, the rows and tokens of the backward are other memory than those of the forward.
    Everything is allocated and touched before.
    """
    num_rows = len(case.expected_rows(rank)[0])

    def legs() -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        rows = torch.ones(num_rows, case.hidden, dtype=case.dtype)
        source, target = (torch.ones(max(case.tokens, 1), case.hidden, dtype=case.dtype) for _ in range(2))
        pieces = torch.split(rows, max(case.tokens, 1))

        def write() -> None:
            for piece in pieces:
                piece.copy_(source[: len(piece)])

        def read() -> None:
            for piece in pieces:
                target[: len(piece)].copy_(piece)

        return rows, write, read

    rows, write, read = legs()
    grad_rows, write_grad, read_grad = legs()

    def run() -> tuple[int, ...]:
        clock = [time.perf_counter_ns()]
        for leg in (write, read, write_grad, read_grad):
            leg()
            clock.append(time.perf_counter_ns())
        return _differences(clock)

    def check() -> int:
        rows.zero_()
        grad_rows.zero_()
        write()
        write_grad()
        return int((rows != 1).sum() + (grad_rows != 1).sum())

    return Contender("copies", run, check, parts=PARTS)


def _differences(clock: list[int]) -> tuple[int, ...]:
    return tuple(later - earlier for earlier, later in itertools.pairwise(clock))
