"""Write the measured tables of README.md from bench/results/*.jsonl, between two marks.

    python bench/readme_table.py            rewrites what stands between <!-- bench-table:begin --> and its end
    python bench/readme_table.py --check    changes nothing; exit code 1 if README.md does not show what the results say
    python bench/readme_table.py --print    to stdout

A cell that was not run is "-". Numbers are p50 of the slowest rank; baselines alternated with a2a in the same run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import gpu_tables
import tables

from a2a.cli.show import ratio_text, size_text
from a2a.measure import Line

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench-table:begin -->", "<!-- bench-table:end -->"
REDUCTIONS = ("all_reduce", "reduce_scatter", "all_gather")
WAYS = (
    ("`a2a.all_to_all_single`, symmetric tensors", {"memory": "symmetric", "through": "a2a"}),
    ("`a2a.all_to_all_single`, ordinary tensors", {"memory": "ordinary", "through": "a2a"}),
    ('`dist.all_to_all_single` on backend `"a2a"`', {"memory": "ordinary", "through": "dist"}),
)


def read(folder: Path) -> list[Line]:
    """All lines of a folder of results."""
    return [
        Line.from_json(text)
        for path in sorted(folder.glob("*.jsonl"))
        for text in path.read_text().splitlines()
        if text.strip()
    ]


def markdown(lines: Sequence[Line]) -> str:
    """The tables, and where their numbers come from: GPUs first. Bounds (bounds.py) have a table in bench/README.md; what
    crosses hosts (hosts.py) stands in the README's text.
    """
    lines = [line for line in lines if line.op in ("all_to_all", "all_to_allv", "moe", *REDUCTIONS)]
    lines = [line for line in lines if "hosts" not in line.case]
    if not lines:
        return "No results yet: `python bench/run_cpu.py`."
    on_gpus = [line for line in lines if line.case.get("device") == "cuda"]
    on_cpus = [line for line in lines if line.case.get("device") != "cuda"]
    parts = [gpu_tables.markdown(on_gpus)] if on_gpus else []
    parts += [
        exchanges(on_cpus, ranks) for ranks in sorted({line.ranks for line in on_cpus if line.op == "all_to_all"})
    ]
    parts += [moe(on_cpus, ranks) for ranks in sorted({line.ranks for line in on_cpus if line.op == "moe"})]
    reduced = [line for line in on_cpus if line.op in REDUCTIONS]
    others = [line for line in on_cpus if line.op not in REDUCTIONS]
    parts += [sources(others, "run_cpu.py")] if others else []
    parts += [reductions(reduced, ranks) for ranks in sorted({line.ranks for line in reduced})]
    parts += [sources(reduced, "run_reductions.py")] if reduced else []
    return "\n\n".join(filter(None, parts))


def exchanges(lines: Sequence[Line], ranks: int) -> str:
    """all_to_all in float32: a2a's time and how many times faster than each baseline, by size."""
    of_op = [line for line in lines if line.op == "all_to_all" and line.ranks == ranks and line.dtype == "float32"]
    sizes = sorted({line.bytes for line in of_op})
    if not sizes:
        return ""
    table = [[f"all-to-all, {ranks} ranks, float32", *map(size_text, sizes)]]
    for name, case in WAYS:
        of_way = [line for line in of_op if all(line.case.get(key) == value for key, value in case.items())]
        mine = {line.bytes: line for line in of_way if line.impl == "a2a"}
        if not mine:
            continue
        table.append([f"{name}, us", *tables.by_size(sizes, mine, tables.p50)])
        for baseline in ("gloo", "mpi"):
            if any(baseline in line.ratio for line in mine.values()):
                cells = tables.by_size(sizes, mine, lambda line, name=baseline: ratio_text(line.ratio.get(name)))
                table.append([f"... times faster than {'MPI' if baseline == 'mpi' else baseline}", *cells])
    first = next(case for name, case in WAYS if any(line.case.get("memory") == case["memory"] for line in of_op))
    for impl, name in (("gloo", "gloo, us"), ("mpi", "MPI (mpi4py), us"), ("memcpy", "memcpy of as many bytes, us")):
        of_impl = {
            line.bytes: line for line in of_op if line.impl == impl and line.case.get("memory") == first["memory"]
        }
        if of_impl:
            table.append([name, *tables.by_size(sizes, of_impl, tables.p50)])
    return tables.markdown(table)


def moe(lines: Sequence[Line], ranks: int) -> str:
    """The MoE layer without skew: phases, baselines and ratios, by dtype."""
    of_op = [line for line in lines if line.op == "moe" and line.ranks == ranks and not line.case["skew"]]
    if not of_op:
        return ""
    case, dtypes = of_op[0].case, list(dict.fromkeys(line.dtype for line in of_op))
    head = (
        f"MoE layer, {ranks} ranks, {case['tokens']} tokens each, hidden {case['hidden']}, {case['experts']} experts, "
    )
    table = [
        [
            f"{head}top-{case['top_k']}",
            *(f"{dtype}, {what}" for dtype in dtypes for what in ("ms", "gloo / a2a", "a2a / copies")),
        ]
    ]
    for part in dict.fromkeys(line.case["part"] for line in of_op):
        row = [part.replace("_", " ")]
        for dtype in dtypes:
            mine = next(
                line for line in of_op if line.impl == "a2a" and line.dtype == dtype and line.case["part"] == part
            )
            copies = mine.ratio.get("copies")
            row += [
                "-" if mine.p50_us is None else f"{mine.p50_us / 1e3:.3g}",
                ratio_text(mine.ratio.get("gloo")),
                "-" if copies is None else f"{1 / copies:.2f}x",
            ]
        table.append(row)
    return tables.markdown(table) + (
        "\n\nThe gloo layer is the same one made of sort, counts and `all_to_all_single`; copies are plain copies of the "
        "same rows, on all ranks at once."
    )


def reductions(lines: Sequence[Line], ranks: int) -> str:
    """All-reduces, reduce-scatters and all-gathers: a2a's time and how many times faster than each baseline, by size."""
    of_ranks = [line for line in lines if line.ranks == ranks]
    sizes = sorted({line.bytes for line in of_ranks})
    table = [[f"reductions and gathers, {ranks} ranks", *map(size_text, sizes)]]
    kinds = dict.fromkeys((line.op, line.dtype, str(line.case["memory"])) for line in of_ranks)
    for op, dtype, memory in sorted(kinds, key=lambda kind: (REDUCTIONS.index(kind[0]), kind[1] != "float32", kind[2])):
        of_kind = [x for x in of_ranks if (x.op, x.dtype, x.case["memory"]) == (op, dtype, memory)]
        mine = {line.bytes: line for line in of_kind if line.impl == "a2a"}
        table.append(
            [f"{op.replace('_', '-')}, {dtype}, {memory} tensors, us", *tables.by_size(sizes, mine, tables.p50)]
        )
        for baseline, name in (("gloo", "gloo"), ("mpi", "MPI")):
            if any(baseline in line.ratio for line in mine.values()):
                cells = tables.by_size(sizes, mine, lambda line, name=baseline: ratio_text(line.ratio.get(name)))
                table.append([f"... times faster than {name}", *cells])
    return tables.markdown(table)


def sources(lines: Sequence[Line], script: str) -> str:
    """Machine, versions, commit and commands of results on CPUs."""
    return f"{tables.origin(lines, 'cpu')}. Made by `python bench/{script}`; see [bench/README.md](bench/README.md)."


def replaced(text: str, table: str) -> str:
    """`text` with what stands between the marks replaced.

    Raises:
        ValueError: the marks are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md needs one {BEGIN} and, after it, one {END}")
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n{table}\n{END}{text.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true", dest="to_stdout")
    arguments = parser.parse_args()
    table = markdown(read(arguments.results))
    if arguments.to_stdout:
        print(table)
        return 0
    text = arguments.readme.read_text()
    new = replaced(text, table)
    if arguments.check:
        if new != text:
            print("README.md does not show what bench/results says: run python bench/readme_table.py", file=sys.stderr)
        return int(new != text)
    arguments.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
