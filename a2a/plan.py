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


@dataclass(frozen=True)
class Plan:
    """Which algorithm does a request, what it should cost, and every other one with the reason against it."""

    request: Request
    algorithm: Algorithm
    cost: Cost
    time_us: float
    reason: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.request.op}: {self.algorithm.name} ({self.reason}; modelled {self.time_us:.1f} us)"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.rejected])


def choose(request: Request, comm: Communicator) -> Plan:
    """Plan `request` on `comm`.

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
        return Plan(request, match[0][1], match[0][2], match[0][0], "A2A_ALGORITHM", tuple(rejected))
    if not able:
        raise UnsupportedError(
            f"{request.op}: no algorithm supports this request: "
            + "; ".join(f"{name}: {why}" for name, why in rejected),
            rejected=tuple(rejected),
        )
    able.sort(key=lambda entry: entry[0])
    best = able[0]
    rejected += [
        (a.name, f"modelled {time:.1f} us, {time / max(best[0], 1e-9):.2f} times as long") for time, a, _ in able[1:]
    ]
    return Plan(request, best[1], best[2], best[0], "least modelled time", tuple(rejected))


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
