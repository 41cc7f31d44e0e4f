"""`a2a plan OP`: which algorithm, why, why not the others, and what it should cost.

On ranks that are started here, or for the ranks of a topology (`--topology`, `A2A_TOPOLOGY`), which need not be there: a
plan depends on nothing but the request and the topology.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

from a2a.cli import parse, show
from a2a.cli.ranks import Emit, run_ranks
from a2a.config import config, launch
from a2a.errors import UnsupportedError

OPS = ("all_to_all", "all_to_allv", "all_reduce", "reduce_scatter", "all_gather", "all_reduce_rms_norm", "moe")


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
    memory: str = "ordinary"


def run(request: Request, ranks: int | None, topology: str | None, json_path: str | None) -> int:
    """Plan, on ranks that are started for it or for those of a topology, and show the plans.

    Returns: the exit code: 1 if no algorithm supports one of the requests.
    """
    for name in request.dtypes:
        parse.dtype(name)
    plans: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}

    def receive(message: dict[str, Any]) -> None:
        if "mistake" in message:
            raise ValueError(message["mistake"])
        facts.update(message["facts"])
        plans.extend(message["plans"])

    given = topology or (config().topology if ranks is None and launch().world_size == 1 else None)
    if given is None:
        run_ranks(work, request, ranks, receive)
    else:
        _plan_all(request, _imagined(given), receive)
    if not plans:  # a rank other than 0, under a launcher
        return 0
    with show.json_lines(json_path) as file:
        for plan in plans if file is not None else ():
            print(json.dumps({**plan, **facts}), file=file)
    out = show.console(stderr=json_path == "-")
    out.print(f"[bold]{request.op}[/bold] on {facts['topology']}; costs and times are modelled, per rank and call")
    out.print(f"numbers: {facts['costs']}", markup=False)
    for plan in plans:
        _show(out, plan)
    return 1 if any(plan["algorithm"] is None for plan in plans) else 0


def _show(out: Any, plan: dict[str, Any]) -> None:
    what = f"{show.size_text(plan['bytes'])} {plan['dtype']}"
    out.print()
    if plan["algorithm"] is None:
        out.print(f"{what}: [bold]no algorithm supports this[/bold]")
    else:
        cost = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in plan["cost"].items() if value)
        out.print(
            f"{what}: [bold]{plan['algorithm']}[/bold], {plan['reason']}: {show.us_text(plan['time_us'])} us ({cost})"
        )
    parts = [f"{part['primitive']} {show.us_text(part['us'])}" for part in plan["parts"] if part["us"]]
    if parts:
        out.print(f"  of which, us: {' + '.join(parts)}", markup=False)
    for remark in plan["remarks"]:
        out.print(f"  {remark}", markup=False)
    for name, why in plan["rejected"]:
        out.print(f"  not {name}: {why}", markup=False)
    if plan["algorithm"] is None:
        out.print(f"-> {plan['reason']}", markup=False, style="bold")


def work(request: Request, emit: Emit) -> None:
    """Plan every request; on each rank, as a plan needs a communicator, but only rank 0's is shown: all plan alike."""
    import a2a

    with a2a.communicator() as comm:
        _plan_all(request, comm, emit)


def _plan_all(request: Request, comm: Any, emit: Emit) -> None:
    from a2a.plan import Request as PlanRequest

    plans = []
    for name in request.dtypes:
        if request.op == "moe":
            wanted = [moe_request(request, name, comm.world_size)]
        else:
            op = "all_to_all" if request.op == "all_to_allv" else request.op
            sums = (("reduce_op", "sum"),) if op in ("all_reduce", "reduce_scatter") else ()
            detail: Any = (("memory", request.memory), *sums)
            shares = comm.world_size if op == "all_gather" else 1  # sizes are nccl-tests', of the whole tensor
            unit = 1
            if op == "all_reduce_rms_norm":  # of whole rows
                detail, unit = (("hidden", request.hidden),), request.hidden * parse.dtype(name).itemsize
            bytes_sent = [max(unit, size // shares // unit * unit) for size in request.sizes]
            wanted = [PlanRequest(op, parse.dtype(name), size, detail) for size in bytes_sent]
        try:
            sizes = [one.num_bytes for one in wanted] if request.op == "moe" else request.sizes
            plans += [
                {"op": request.op, "bytes": size, "dtype": name, **_plan(one, comm)}
                for size, one in zip(sizes, wanted, strict=True)
            ]
        except ValueError as error:  # A2A_ALGORITHM
            emit({"mistake": str(error)})
            return
    facts = {"ranks": comm.world_size, "topology": comm.topology.summary(), "costs": comm.costs.source}
    emit({"plans": plans, "facts": facts})


def _plan(request: Any, comm: Any) -> dict[str, Any]:
    from a2a.plan import choose

    try:
        plan = choose(request, comm)
    except UnsupportedError as error:
        return {
            "algorithm": None,
            "reason": _way_out(request, comm),
            "time_us": None,
            "cost": {},
            "remarks": (),
            "parts": [],
            "numbers": None,
            "rejected": error.rejected,
        }
    return {
        "algorithm": plan.algorithm.name,
        "reason": plan.reason,
        "time_us": plan.time_us,
        "remarks": plan.algorithm.remarks(request, comm),
        "cost": {name: value for name, value in asdict(plan.cost).items() if name != "parts"},
        "parts": [{**asdict(part), "us": part.time_us(comm.costs)} for part in plan.cost.parts],
        "numbers": plan.costs,
        "rejected": plan.rejected,
    }


def _way_out(request: Any, comm: Any) -> str:
    """What to do where no algorithm supports a request."""
    if not comm.topology.is_single_domain:
        sizes = sorted({len(domain.ranks) for domain in comm.topology.domains})
        ranks = " or ".join(map(str, sizes))
        return (
            f"make its group of the ranks of one domain ({ranks} here): each domain then has all experts, and gradients "
            f"are averaged between domains as for any data parallel layer"
            if request.op == "moe"
            else f"make its group of the ranks of one domain ({ranks} here)"
        )
    return "each line above says what would have to differ"


def _imagined(given: str) -> Any:
    """What the planner asks of a communicator, for ranks that need not be there; transports that fit count as working."""
    from a2a.topology import Topology
    from a2a.topology.built_in import built_in
    from a2a.transport import candidates
    from a2a.transport.base import not_one_domain

    topology = Topology.load(given)
    device_type = "cpu" if topology.domains[0].kind == "cpu_host" else "cuda"
    fitting = [t for t in candidates() if t.device_type == device_type and not t.only_by_name]
    apart = not_one_domain(topology)
    return SimpleNamespace(
        world_size=topology.world_size,
        topology=topology,
        deterministic=True,
        device_type=device_type,
        group=topology,  # anything but None: ranks of a job have one, and a store
        store=topology,
        why_not=lambda transport, part: not_one_domain(part) or (None if transport in fitting else "for other memory"),
        transport=None if apart else next(iter(fitting), None),
        why_no_transport={transport.name: apart or "" for transport in fitting},
        costs=replace(built_in(topology), source=f"{_kind(given)} {given}: {built_in(topology).source}"),
    )


def _kind(given: str) -> str:
    from a2a.topology import presets

    return "preset" if presets.is_preset(given) else "file"


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
