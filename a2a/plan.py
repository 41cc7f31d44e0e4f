"""The planner: the cheapest algorithm that supports a request, and why not the others.

A plan depends only on values that are equal on all ranks (the request and the topology), so that all ranks choose alike
without asking each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from a2a.algorithms import candidates
from a2a.algorithms.base import Algorithm, Cost, Request
from a2a.comm import Communicator
from a2a.config import config
from a2a.errors import UnsupportedError

NEVER_SLOWER = 1.03  # what a call may take beyond the group's own engine before it is handed over
_REASON = "least modelled time"


@dataclass(frozen=True)
class Plan:
    """Which algorithm does a request, what it should cost, and every other one with the reason against it."""

    request: Request
    algorithm: Algorithm
    cost: Cost
    time_us: float
    reason: str
    rejected: tuple[tuple[str, str], ...]
    costs: str = ""  # where the numbers come from

    def __str__(self) -> str:
        lines = [f"{self.request.op}: {self.algorithm.name} ({self.reason}; {self.time_us:.1f} us, {self.costs})"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.rejected])


def choose(request: Request, comm: Communicator) -> Plan:
    """Plan `request` on `comm`.

    The cheapest algorithm wins. The group's own engine does so only where it is ahead by more than `NEVER_SLOWER` and the
    costs were measured, and never with sums of its own order where another algorithm's are in a fixed one.

    Raises:
        UnsupportedError: no algorithm supports it; lists every reason.
        ValueError: A2A_ALGORITHM names an algorithm that does not exist or can't.
    """
    forced = _forced(request.op)
    able: list[tuple[float, Algorithm, Cost]] = []
    rejected: list[tuple[str, str]] = []
    known = [a for a in candidates() if a.op == request.op]
    for algorithm in known:
        reason = algorithm.unsupported(request, comm)
        if reason is not None:
            rejected.append((algorithm.name, reason))
            continue
        cost = algorithm.cost(request, comm)
        able.append((cost.time_us(comm), algorithm, cost))
    if forced is not None:
        match = [entry for entry in able if entry[1].name == forced]
        if not match:
            why = dict(rejected).get(forced, f"there are: {', '.join(a.name for a in known)}")
            raise ValueError(f"A2A_ALGORITHM asks for {request.op}={forced}, which can't be used: {why}")
        rejected += [(a.name, "A2A_ALGORITHM asks for another") for _, a, _ in able if a.name != forced]
        return _plan(request, comm, match[0], "A2A_ALGORITHM", rejected)
    if not able:
        raise UnsupportedError(
            f"{request.op}: no algorithm supports this request: "
            + "; ".join(f"{name}: {why}" for name, why in rejected),
            rejected=tuple(rejected),
        )
    able.sort(key=lambda entry: entry[0])
    own = next((entry for entry in able if not entry[1].baseline), None)
    best = able[0] if own is None or _hands_over(able[0], own, comm) else own
    for time, algorithm, cost in able:
        if algorithm is not best[1]:
            rejected.append((algorithm.name, _why_not((time, algorithm, cost), best, comm)))
    return _plan(request, comm, best, f"handed over: {_REASON}" if best[1].baseline and own else _REASON, rejected)


_Entry = tuple[float, Algorithm, Cost]


def _plan(request: Request, comm: Communicator, entry: _Entry, reason: str, rejected: list[tuple[str, str]]) -> Plan:
    time, algorithm, cost = entry
    return Plan(request, algorithm, cost, time, reason, tuple(rejected), comm.costs.told(cost.primitives))


def _hands_over(first: _Entry, own: _Entry, comm: Communicator) -> bool:
    """Whether the group's engine, if it comes first, serves instead of the best algorithm of ours."""
    if not first[1].baseline or (own[1].deterministic and not first[1].deterministic):
        return False
    measured = all(entry[2].primitives <= comm.costs.measured for entry in (first, own))
    return measured and own[0] > NEVER_SLOWER * first[0]


def _why_not(entry: _Entry, best: _Entry, comm: Communicator) -> str:
    time, algorithm, _ = entry
    times = f"modelled {time:.1f} us, {time / max(best[0], 1e-9):.2f} times as long"
    if time >= best[0]:
        return times
    if best[1].deterministic and not algorithm.deterministic:
        return f"{times}; its sums have no fixed order"
    if not all(each[2].primitives <= comm.costs.measured for each in (entry, best)):
        return f"{times} by costs that were not measured here (`a2a topo --measure`)"
    return f"{times}, which is within {NEVER_SLOWER:g}"


def _forced(op: str) -> str | None:
    """What A2A_ALGORITHM ("op=name,op=name") asks for this op."""
    for entry in filter(None, (config().algorithm or "").split(",")):
        name, equals, algorithm = entry.partition("=")
        if not equals:
            raise ValueError(f"A2A_ALGORITHM={config().algorithm!r}: {entry!r} is not of the form op=algorithm")
        if name.strip() == op:
            return algorithm.strip()
    return None


__all__ = ["Plan", "Request", "choose"]
