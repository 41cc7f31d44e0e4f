"""Across hosts: all-reduce of ranks on two hosts that a cable of 1 Gbit/s joins, a2a's against gloo's flat one.

    python bench/hosts.py [--ranks 4] [--bytes 64M] [--mbit 1000] [--check] [--output FILE]

The hosts are network namespaces of this machine (a2a/cli/hosts.py): run it as root, alone on the machine. Ranks are
placed in blocks (neighbouring ranks on one host) and cyclic (neighbouring ranks on different hosts), which changes what
a flat ring sends over the cable, and nothing for a2a. Prints a JSON line for each implementation and placement, as `a2a
bench --json`. `--check` exits with 2 if a floor is missed: a2a at least 1.4 times as fast in blocks and 2.7 times in
cyclic order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from runs import verdict, write

from a2a.cli.demo_hosts import contenders, on_hosts
from a2a.cli.parse import sizes
from a2a.measure import Cell, Control, Line, alternate, environment

FLOORS = {"blocks": 1.4, "cyclic": 2.7}


def work(options: dict[str, Any], emit: Any) -> None:
    import a2a

    with a2a.communicator() as comm:
        control = Control()
        pair = contenders(options["bytes"], comm)
        timings = {
            name: parts["total"] for name, parts in alternate(pair, control, budget_s=options["budget_s"]).items()
        }
        crossed = comm.domains.bytes_sent
        case = {"order": options["order"], "mbit_per_s": options["mbit"], "hosts": len(comm.topology.domains)}
        command = f"python bench/hosts.py --ranks {comm.world_size}"
        cell = Cell("all_reduce", options["bytes"], "float32", comm.world_size, case,
                    environment(comm.topology.summary(), command))  # fmt: skip
        algorithm = ", ".join(sorted({plan.algorithm.name for plan in comm.plans.values()}))
        lines = [
            cell.line("a2a", timings["a2a"], algorithm=algorithm, baselines={"gloo": timings["gloo"]},
                      case={"rail_bytes": crossed}),
            cell.line("gloo", timings["gloo"]),
        ]  # fmt: skip
        emit({"lines": [line.to_json() for line in lines]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bytes", default="64M")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds a placement")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines: list[Line] = []
    for order in FLOORS:
        received: list[str] = []
        asked = {"bytes": sizes(options.bytes)[0], "order": order, "mbit": options.mbit, "budget_s": options.budget}
        on_hosts(work, asked, options.ranks, order, lambda m: received.extend(m["lines"]), options.mbit)  # noqa: B023
        for text in received:
            print(text, flush=True)
            lines.append(Line.from_json(text))
    if options.output:
        write(options.output, lines)
    missed = [
        f"{line.case['order']}: {line.ratio['gloo']} times as fast as gloo; the floor is {FLOORS[line.case['order']]}"
        for line in lines
        if line.impl == "a2a" and line.ratio["gloo"] < FLOORS[line.case["order"]]
    ]
    if not options.output:
        for text in missed:
            print(f"missed: {text}", file=sys.stderr)
        return 1 if any(line.wrong for line in lines) else 2 if options.check and missed else 0
    return verdict(options.output, lines, 0, missed if options.check else None)


if __name__ == "__main__":
    sys.exit(main())
