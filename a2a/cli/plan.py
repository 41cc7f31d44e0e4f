"""`a2a plan OP`: which algorithm, why, why not the others, and what it should cost, on the ranks of this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from a2a.cli import parse, show
from a2a.cli.ranks import Emit, run_ranks

OPS = ("all_to_all", "all_to_allv", "moe")


@dataclass(frozen=True)
class Request:
    """What is to be planned. Sent to every rank."""

    op: str
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    tokens: int
    hidden: int
    experts: int
    top_k: int


def run(request: Request, ranks: int | None, json_path: str | None) -> int:
    """Plan on ranks that are started for it, and show the plans; returns the exit code."""
    for name in request.dtypes:
        parse.dtype(name)
    plans: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}

    def receive(message: dict[str, Any]) -> None:
        facts.update(message["facts"])
        plans.extend(message["plans"])

    run_ranks(work, request, ranks, receive)
    if not plans:  # a rank other than 0, under a launcher
        return 0
    with show.json_lines(json_path) as file:
        for plan in plans if file is not None else ():
            print(json.dumps({**plan, **facts}), file=file)
    out = show.console(stderr=json_path == "-")
    out.print(f"[bold]{request.op}[/bold] on {facts['topology']}; costs and times are modelled, per rank and call")
    for plan in plans:
        cost = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in plan["cost"].items() if value)
        out.print()
        out.print(
            f"{show.size_text(plan['bytes'])} {plan['dtype']}: [bold]{plan['algorithm']}[/bold], {plan['reason']}: "
            f"{show.us_text(plan['time_us'])} us ({cost})"
        )
        for name, why in plan["rejected"]:
            out.print(f"  not {name}: {why}", markup=False)
    return 0


def work(request: Request, emit: Emit) -> None:
    """Plan every request; on each rank, as a plan needs a communicator, but only rank 0's is shown: all plan alike."""
    import a2a
    from a2a.plan import Request as PlanRequest
    from a2a.plan import choose

    plans = []
    with a2a.communicator() as comm:
        for name in request.dtypes:
            if request.op == "moe":
                wanted = [moe_request(request, name, comm.world_size)]
            else:
                wanted = [PlanRequest("all_to_all", parse.dtype(name), size) for size in request.sizes]
            for one in wanted:
                plan = choose(one, comm)
                plans.append(
                    {
                        "op": request.op,
                        "bytes": one.num_bytes,
                        "dtype": name,
                        "algorithm": plan.algorithm.name,
                        "reason": plan.reason,
                        "time_us": plan.time_us,
                        "cost": asdict(plan.cost),
                        "rejected": plan.rejected,
                    }
                )
        emit({"plans": plans, "facts": {"ranks": comm.world_size, "topology": comm.topology.summary()}})


def moe_request(request: Request, dtype: str, ranks: int) -> Any:
    """What ExpertParallel with these arguments asks the planner."""
    from a2a.algorithms.moe_base import MoeSpec

    base, more = divmod(request.experts, ranks)
    owners = [rank for rank in range(ranks) for _ in range(base + (rank < more))]
    spec = MoeSpec(
        num_experts=request.experts,
        top_k=request.top_k,
        hidden=request.hidden,
        max_tokens=request.tokens,
        dtype=parse.dtype(dtype),
        expert_alignment=1,
        max_rows=None,
        overflow="raise",
        wire=None,
        rows="dtype",
        layout="expert",
        expert_to_rank=tuple(owners),
        wire_combine=None,
    )
    return spec.request()
