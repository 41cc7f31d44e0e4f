"""`a2a topo --check`: groups of ranks that the rank order puts across domains, and an order that doesn't."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from a2a.cli import show
from a2a.cli.topo import ranges
from a2a.topology import Topology, placement

MAX_SHOWN = 8  # groups, and domains of the better order; --json and --ranks-file have all


@dataclass(frozen=True)
class Request:
    """Which groups to check: listed ones, or `size` ranks (None: a domain's) that are `stride` apart."""

    listed: Sequence[Sequence[int]] | None
    size: int | None
    stride: int
    ranks_file: Path | None


def run(request: Request, found: Sequence[Topology], json_path: str | None) -> int:
    """Check the topology's rank order; returns the exit code, 1 if a group is in several domains."""
    wrong = False
    for topology in found:
        result = placement.check(topology, _groups(request, topology))
        wrong = bool(result.split)
        with show.json_lines(json_path) as file:
            if file is not None:
                print(json.dumps({"topology": topology.summary(), "ok": not wrong, **asdict(result)}), file=file)
        _show(show.console(stderr=json_path == "-"), topology, result)
        if request.ranks_file is not None and result.order is not None:
            request.ranks_file.write_text("".join(f"{line}\n" for line in _lines(topology, result.order)))
    return int(wrong)


def _groups(request: Request, topology: Topology) -> Sequence[Sequence[int]]:
    if request.listed is not None:
        return request.listed
    size = request.size or math.gcd(*(len(domain.ranks) for domain in topology.domains)) // request.stride or 1
    return placement.regular_groups(topology.world_size, size, request.stride)


def _show(out: Any, topology: Topology, result: placement.Placement) -> None:
    sizes = "/".join(map(str, sorted({len(group) for group in result.groups})))
    out.print(f"{topology.summary()}; {len(result.groups)} groups of {sizes}", markup=False)
    if not result.split:
        out.print("Each group is inside one domain.")
        return
    out.print(f"{len(result.split)} of them in several domains:")
    for index in result.split[:MAX_SHOWN]:
        group = result.groups[index]
        domains = sorted({topology.domain_index(rank) for rank in group})
        where = ", ".join(_name(topology, domain) for domain in domains[:MAX_SHOWN])
        more = f" and {len(domains) - MAX_SHOWN} more" if len(domains) > MAX_SHOWN else ""
        out.print(f"  group {index} (ranks {ranges(sorted(group))}): {where}{more}", markup=False)
    if len(result.split) > MAX_SHOWN:
        out.print(f"  and {len(result.split) - MAX_SHOWN} more")
    if result.split_after:
        left = f"{len(result.split_after)} of them can't be mended" if result.order else "No order is better"
        out.print(f"{left}: {result.reason}.", markup=False)
    if result.order is not None:
        _show_order(out, topology, result, result.order)


def _show_order(out: Any, topology: Topology, result: placement.Placement, order: placement.Order) -> None:
    out.print("A better order:")
    runs = {domain: [r for r, place in enumerate(order) if topology.domain_index(place) == domain]
            for domain in range(len(topology.domains))}  # fmt: skip
    for domain, ranks in list(runs.items())[:MAX_SHOWN]:
        out.print(f"  {_name(topology, domain)}: ranks {ranges(ranks)}", markup=False)
    if len(runs) > MAX_SHOWN:
        out.print(f"  and {len(runs) - MAX_SHOWN} more domains")
    hosts = all(domain.host for domain in topology.domains)
    unit, word = "host" if hosts else "domain", result.distribution
    if hosts and word:
        out.print(f"Slurm: srun --distribution={word}")
    if word == "block":
        listed = ", ".join(_name(topology, domain) for domain in range(min(len(runs), MAX_SHOWN)))
        listed += ", ..." if len(runs) > MAX_SHOWN else ""
        out.print(
            f"torchrun: --node-rank in this order of {unit}s (static rendezvous; c10d's picks its own): {listed}",
            markup=False,
        )
        if not hosts:
            nodes = f"{len(topology.domains[0].ranks)} GPUs' worth of nodes"
            out.print(f"Slurm: srun --distribution=block, nodes sorted by domain; topology/block: --segment={nodes}")
    elif not word:
        out.print("No one-word setting of torchrun or srun does this: use the ranks file.")
    if hosts:
        out.print("Ranks file (--ranks-file FILE): a host a line, rank 0 first. Slurm: SLURM_HOSTFILE=FILE srun "
                  "--distribution=arbitrary; Open MPI: mpirun --hostfile FILE --map-by seq")  # fmt: skip
    else:
        out.print("Ranks file (--ranks-file FILE): line r says which present rank's place rank r takes.")


def _lines(topology: Topology, order: placement.Order) -> list[str]:
    hosts = all(domain.host for domain in topology.domains)
    return [topology.domain_of(place).host if hosts else str(place) for place in order]


def _name(topology: Topology, index: int) -> str:
    domain = topology.domains[index]
    return " ".join(filter(None, (domain.rack, domain.host))) or f"domain {index}"
