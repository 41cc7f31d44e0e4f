"""`a2a demo --hosts 2`: an all-reduce of ranks on two hosts: right, and how much faster than gloo's flat one.

The hosts are network namespaces of this machine, see hosts.py: shared memory stays within a host, and what crosses
takes its time. Every rank contributes whole numbers that each can compute for every other, so results are compared
exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from a2a.cli import show
from a2a.cli.hosts import Hosts, spread
from a2a.cli.ranks import Emit, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    import a2a
    from a2a.measure import Contender

TIMED_S = 4.0
MBIT_PER_S = 1000.0
_PERIOD = 7


@dataclass(frozen=True)
class Request:
    """What to run. Sent to every rank."""

    num_bytes: int
    repeat: int | None = None


def run(request: Request, ranks: int | None) -> int:
    """Run the demo in blocks and dealt in turn, and print what it found; returns the exit code: 1 for a wrong result."""
    found: dict[str, dict[str, Any]] = {"blocks": {}, "cyclic": {}}
    with show.progress(2) as steps:
        for order, facts in found.items():
            steps.begin(f"timing all_reduce, ranks in {order}")
            on_hosts(work, request, ranks or 4, order, facts.update)
    out = show.console()
    facts = found["blocks"]
    out.print(
        f"all_reduce of [bold]{show.size_text(request.num_bytes)}[/bold] float32 on {facts['ranks']} ranks of two hosts, "
        f"joined by {MBIT_PER_S:g} Mbit/s.\n[dim]{facts['topology']}; {facts['machine']}[/dim]\n"
    )
    rows = [
        [order, facts["algorithm"], show.us_text(facts["a2a"]), show.us_text(facts["gloo"]),
         f"[bold]{show.ratio_text(facts['gloo'] / facts['a2a'])}[/bold]", "no" if facts["wrong"] else "yes"]
        for order, facts in found.items()
    ]  # fmt: skip
    show.print_table(out, ["ranks in", "algorithm", "a2a us", "gloo us", "times faster", "equal"], rows)
    return int(any(facts["wrong"] for facts in found.values()))


def on_hosts(work: Any, options: Any, ranks: int, order: str, receive: Emit, mbit_per_s: float = MBIT_PER_S) -> None:
    """`run_ranks` on two hosts: ranks in blocks or dealt in turn ("cyclic")."""
    with Hosts(mbit_per_s) as hosts:
        run_ranks(work, options, ranks, receive, places=tuple(hosts.places[host] for host in spread(ranks, order)))


def work(request: Request, emit: Emit) -> None:
    """Check and time both; on each rank."""
    import a2a
    from a2a.measure import Control, alternate, cpu_name

    with a2a.communicator() as comm:
        control = Control()
        timings = alternate(contenders(request.num_bytes, comm), control, budget_s=TIMED_S, repeat=request.repeat)
        ours, gloo = (timings[name]["total"] for name in ("a2a", "gloo"))
        plans = {plan.algorithm.name for plan in comm.plans.values()}
        emit({
            "ranks": comm.world_size,
            "topology": comm.topology.summary(),
            "machine": cpu_name(),
            "algorithm": ", ".join(sorted(plans)),
            "a2a": ours.p50_us,
            "gloo": gloo.p50_us,
            "wrong": ours.wrong + gloo.wrong,
            "crossed": comm.domains.bytes_sent,
        })  # fmt: skip


def contenders(num_bytes: int, comm: a2a.Communicator) -> list[Contender]:
    """a2a's all-reduce, whatever is planned, and gloo's flat one."""
    import torch
    import torch.distributed as dist

    import a2a
    from a2a.measure import Contender

    count = num_bytes // 4

    def pattern(rank: int) -> Tensor:
        return ((torch.arange(count) + 3 * rank) % _PERIOD).float()

    expected = torch.stack([pattern(rank) for rank in range(comm.world_size)]).sum(0)
    mine = pattern(comm.rank)

    def contender(name: str, call: Any) -> Contender:
        tensor = torch.empty(count)

        def check() -> int:
            tensor.copy_(mine)
            call(tensor)
            return int((tensor != expected).sum())

        return Contender(name, lambda: call(tensor), check)

    return [
        contender("a2a", lambda tensor: a2a.all_reduce(tensor, group=comm)),
        contender("gloo", dist.all_reduce),
    ]
