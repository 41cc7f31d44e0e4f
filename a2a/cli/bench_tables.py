"""The tables that `a2a bench` prints of its lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from a2a.cli import show

if TYPE_CHECKING:
    from a2a.measure import Line


def show_exchanges(out: Any, lines: Sequence[Line]) -> None:
    """One table for each kind of memory: time, bandwidth and ratios by size."""
    for _, of_memory in by(lines, lambda line: (line.case["memory"],)):
        _show_exchanges(out, of_memory)
    footnotes(out, lines)


def _show_exchanges(out: Any, lines: Sequence[Line]) -> None:
    names = list(dict.fromkeys(line.impl for line in lines))
    baselines = [name for name in names if name != "a2a"]
    link = lines[0].case.get("link_GBps")
    rows = []
    for key, cell in by(lines, lambda line: (line.dtype, line.bytes)):
        of = {line.impl: line for line in cell}
        mine = of["a2a"]
        share = [_percent(mine.busbw_GBps, link)] if link else []
        rows.append(
            [
                show.size_text(key[1]),
                key[0],
                *(show.us_text(of[name].p50_us) for name in names),
                show.us_text(mine.p99_us),
                "-" if mine.busbw_GBps is None else f"{mine.busbw_GBps:.3g}",
                *share,
                *(f"[bold]{show.ratio_text(mine.ratio.get(name))}[/bold]" for name in baselines),
                _wrong(cell),
            ]
        )
    columns = ["bytes", "dtype", *(f"{name} us" for name in names), "a2a p99 us", "a2a bus GB/s"]
    columns += ["of link"] * bool(link) + [f"{name} / a2a" for name in baselines] + ["wrong"]
    first = lines[0]
    where = "" if first.case["through"] == "a2a" else ' through torch.distributed on backend "a2a"'
    what = f"{first.op}, {first.ranks} ranks, {first.case['memory']} tensors{where}{_on_gpu(first)}"
    title = f"{what}: p50 of the slowest rank"
    show.print_table(out, columns, rows, title=title, left=2)
    _show_beside(out, lines)


def show_moe(out: Any, lines: Sequence[Line]) -> None:
    """One table for each dtype and number of tokens: phases and ratios."""
    for _, cell in by(lines, lambda line: (line.dtype, line.case["tokens"])):
        _show_moe(out, cell)
    footnotes(out, lines)


def _show_moe(out: Any, cell: Sequence[Line]) -> None:
    names = list(dict.fromkeys(line.impl for line in cell))
    baselines = [name for name in names if name != "a2a"]
    rows = []
    for (part,), of_part in by(cell, lambda line: (line.case["part"],)):
        of = {line.impl: line for line in of_part}
        mine = of["a2a"]
        rows.append(
            [
                part.replace("_", " "),
                *(show.us_text(of[name].p50_us) for name in names),
                show.us_text(mine.p99_us),
                *(f"[bold]{show.ratio_text(mine.ratio.get(name))}[/bold]" for name in baselines),
                _wrong(of_part),
            ]
        )
    columns = ["phase", *(f"{name} us" for name in names), "a2a p99 us"]
    columns += [f"{name} / a2a" for name in baselines] + ["wrong"]
    case, first = cell[0].case, cell[0]
    title = (
        f"moe, {first.ranks} ranks, {case['tokens']} tokens each, hidden {case['hidden']}, {case['experts']} experts, "
        f"top-{case['top_k']}, {first.dtype}{moe_kind(case)}{_on_gpu(first)}: p50 of the slowest rank"
    )
    show.print_table(out, columns, rows, title=title)
    of_mine = {line.case["part"]: line for line in cell if line.impl == "a2a"}
    total, dispatch = of_mine.get("total"), of_mine.get("dispatch")
    if total is not None and total.ratio.get("copies"):
        out.print(
            f"Dispatch and combine, forward and backward, take {1 / total.ratio['copies']:.2f} times as long as plain "
            f"copies of the same rows."
        )
    if dispatch is not None and dispatch.p50_us and case.get("device"):
        sent = case["remote_bytes"] / dispatch.p50_us / 1e3
        share = f", {_percent(sent, case['link_GBps'])} of the link" if case["link_GBps"] else ""
        out.print(f"Dispatch sends {case['remote_bytes']:,} bytes to other ranks, {sent:.3g} GB/s{share}.")
    if case.get("max_rows") is not None:
        out.print(f"Every rank has room for max_rows={case['max_rows']} rows.")
    _show_beside(out, cell)


def moe_kind(case: Any) -> str:
    """What of a layer is not as usual, as words after a comma."""
    words = [
        f"{case['layout']} rows" if case.get("layout", "expert") != "expert" else "",
        f"alignment {case['alignment']}" if case.get("alignment", 1) != 1 else "",
        f"{case['wire']} wire" if case.get("wire") else "",
        "rows as they travel" if case.get("rows", "dtype") != "dtype" else "",
        f"at most {case['num_sms']} SMs" if case.get("num_sms") else "",
    ]
    return "".join(f", {word}" for word in words if word)


def _on_gpu(line: Line) -> str:
    if not line.case.get("device"):
        return ""
    sms = f", {line.sms} SMs" if line.sms else ""
    return f"{sms}, {'in a CUDA graph' if line.case['graph'] else 'eager'}"


def _percent(value: float | None, whole: float | None) -> str:
    return "-" if value is None or not whole else f"{100 * value / whole:.0f}%"


def _show_beside(out: Any, lines: Sequence[Line]) -> None:
    together = [line for line in lines if "beside" in line.case]
    if not together:
        return
    rows = [
        [
            line.impl,
            line.case["part"].replace("_", " ") if "part" in line.case else show.size_text(line.bytes),
            show.us_text(line.case["gemm_us"]),
            show.us_text(line.case["gemm_beside_us"]),
            f"[bold]{line.case['gemm_slowdown']:.3f}x[/bold]",
            show.us_text(line.p50_us),
            show.us_text(line.case["beside_p50_us"]),
        ]
        for line in together
    ]
    columns = ["", "call", "product alone us", "beside calls us", "slowdown", "call alone us", "beside the product us"]
    show.print_table(out, columns, rows, title=f"Beside a {together[0].case['beside']}", left=2)


def footnotes(out: Any, lines: Sequence[Line]) -> None:
    """What could not be measured, and on what machine the rest was."""
    for impl, why in dict.fromkeys((line.impl, line.case["why"]) for line in lines if "why" in line.case):
        out.print(f"{impl}: not measured: {why}", markup=False)
    env = lines[0].env
    commit = "no commit" if env["commit"] is None else env["commit"] + (", changed since" if env["dirty"] else "")
    machine = f"{env['gpu']}, NCCL {env['nccl']}" if env["gpu"] else env["cpu"]
    out.print(f"[dim]{machine}; torch {env['torch']}; {env['topology']}; {commit}[/dim]")


def _wrong(lines: Sequence[Line]) -> str:
    count = sum(line.wrong for line in lines)
    return f"[bold red]{count}[/bold red]" if count else "0"


def by(lines: Sequence[Line], key: Callable[[Line], tuple[Any, ...]]) -> list[tuple[tuple[Any, ...], list[Line]]]:
    """The lines in groups of one key, in order."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return list(groups.items())
