"""The README's tables of results on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tables

from a2a.cli.bench_tables import moe_kind
from a2a.cli.show import ratio_text, size_text
from a2a.measure import Line

_MADE = "Made by `python bench/run_gpu.py`; see [bench/README.md](bench/README.md)."
_BASELINES = (
    ("nccl", "NCCL, us"),
    ("nccl_symm", "NCCL, registered symmetric window, us"),
    ("nccl_ce", "NCCL, the same by copy engines, us"),
    ("copy", "copy engines alone, nobody waiting, us"),
)


def markdown(lines: Sequence[Line]) -> str:
    """All of them, and where their numbers come from."""
    alone, together = [], []
    for line in lines:
        (together if "beside" in line.case else alone).append(line)
    parts = [exchanges(alone, graph) for graph in (True, False)]
    parts += [moe(alone), beside(together), f"{tables.origin(lines, 'gpu')}. {_MADE}"]
    return "\n\n".join(filter(None, parts))


def exchanges(lines: Sequence[Line], graph: bool) -> str:
    """all_to_all by size: a2a's time, its share of the link and its ratios, for each kind of memory; then the baselines."""
    of_op = [line for line in lines if line.op == "all_to_all" and line.case["graph"] == graph]
    sizes = sorted({line.bytes for line in of_op})
    if not of_op:
        return ""
    how = "calls in a CUDA graph" if graph else "eager calls"
    first = of_op[0]
    rows = [[f"all-to-all, {first.ranks} x {first.env['gpu']}, {first.dtype}, {how}", *map(size_text, sizes)]]
    for memory in dict.fromkeys(line.case["memory"] for line in of_op):
        of_kind = [line for line in of_op if line.case["memory"] == memory]
        mine = {line.bytes: line for line in of_kind if line.impl == "a2a"}
        rows.append([f"`a2a.all_to_all_single`, {memory} tensors, us", *tables.by_size(sizes, mine, tables.p50)])
        if first.case["link_GBps"]:
            rows.append(
                [f"... share of the link's {first.case['link_GBps']:g} GB/s", *tables.by_size(sizes, mine, _share)]
            )
        for impl, name in (("nccl", "NCCL"), ("nccl_symm", "NCCL in a symmetric window")):
            if any(impl in line.ratio for line in mine.values()):
                cells = tables.by_size(sizes, mine, lambda line, impl=impl: ratio_text(line.ratio.get(impl)))
                rows.append([f"... times faster than {name}", *cells])
    for impl, name in _BASELINES:
        of_impl = {
            line.bytes: line for line in of_op if line.impl == impl and line.case["memory"] == first.case["memory"]
        }
        if any(line.p50_us is not None for line in of_impl.values()):
            rows.append([name, *tables.by_size(sizes, of_impl, tables.p50)])
    return tables.markdown(rows)


def _share(line: Line) -> str:
    return "-" if line.busbw_GBps is None else f"{100 * line.busbw_GBps / line.case['link_GBps']:.0f}%"


def moe(lines: Sequence[Line]) -> str:
    """Dispatch and combine of each kind of layer, and the whole round, by number of tokens."""
    of_op = [line for line in lines if line.op == "moe"]
    if not of_op:
        return ""
    first = of_op[0]
    counts = sorted({line.case["tokens"] for line in of_op})
    case = first.case
    head = (
        f"MoE layer, {first.ranks} x {first.env['gpu']}, hidden {case['hidden']}, {case['experts']} experts, "
        f"top-{case['top_k']}, {first.dtype}; dispatch / combine / round with backward, us"
    )
    rows = [[head, *(f"{count:,} tokens a rank" for count in counts)]]
    for kind in dict.fromkeys(map(_kind, of_op)):
        of_kind = [line for line in of_op if _kind(line) == kind]
        rows.append([kind, *(_phases(of_kind, count, tables.p50) for count in counts)])
        if any("nccl" in line.ratio for line in of_kind):
            cells = [_phases(of_kind, count, lambda line: ratio_text(line.ratio.get("nccl"))) for count in counts]
            rows.append(["... times faster than NCCL", *cells])
    return tables.markdown(rows) + (
        "\n\nThe NCCL layer is the same one made of sort, counts and `all_to_all_single`, and can't be captured in a graph. "
        "In a graph, ranks have room for 1.25 times the rows of uniform routing."
    )


def _kind(line: Line) -> str:
    how = "in a CUDA graph" if line.case["graph"] else "eager, exactly the rows that come"
    return f"{how}{moe_kind(line.case)}"


def _phases(lines: Sequence[Line], tokens: int, text: Callable[[Line], str]) -> str:
    of: dict[Any, Line] = {
        line.case["part"]: line for line in lines if line.impl == "a2a" and line.case["tokens"] == tokens
    }
    return " / ".join(text(of[part]) if part in of else "-" for part in ("dispatch", "combine", "total")) if of else "-"


def beside(lines: Sequence[Line]) -> str:
    """How much slower a matrix product is beside each implementation, and each implementation beside it."""
    if not lines:
        return ""
    impls = list(dict.fromkeys(line.impl for line in lines))
    rows = [[f"beside a {lines[0].case['beside']}: the product's slowdown, and the call's us", *impls]]
    for call in dict.fromkeys(map(_call, lines)):
        of = {line.impl: line for line in lines if _call(line) == call}
        rows.append([call, *(_together(of[impl]) if impl in of else "-" for impl in impls)])
    return tables.markdown(rows)


def _call(line: Line) -> str:
    part = line.case.get("part")
    return f"all-to-all of {size_text(line.bytes)}" if part is None else f"MoE {part.replace('_', ' ')}"


def _together(line: Line) -> str:
    return f"{line.case['gemm_slowdown']:.2f}x, {line.case['beside_p50_us']:.3g}"
