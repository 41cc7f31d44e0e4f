"""PNGs: exchanges over size, MoE phases, a topology. Matplotlib is optional and asked for only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a2a.cli.show import size_text
from a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from a2a.measure import Line
    from a2a.simulate import Step
    from a2a.topology import Topology

# One colour an implementation in every plot; they differ in lightness too, for print and for the colour-blind.
COLOURS = {
    "a2a": "#c8321e", "gloo": "#3b6fb5", "nccl": "#3b6fb5", "mpi": "#2b8a57", "nccl_symm": "#2b8a57", "nccl_ce": "#c99a2e",
    "memcpy": "#555555", "copy": "#555555", "copies": "#9a9a9a",
}  # fmt: skip
LABELS = {
    "memcpy": "memory's limit: a copy of as many bytes", "copies": "plain copies", "copy": "copy engines, nobody waiting",
    "nccl": "NCCL", "nccl_symm": "NCCL, symmetric window", "nccl_ce": "NCCL, copy engines",
}  # fmt: skip
LIMITS = ("memcpy", "copy")  # drawn as what bounds the others
GREY = "#888888"
DPI = 160


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("--plot needs Matplotlib: pip install 'a2a[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": GREY,
            "svg.fonttype": "none",
        }
    )
    return pyplot


def exchanges(lines: Sequence[Line], path: Path) -> None:
    """Time and bandwidth over size on log axes, a row for each dtype and memory.

    Plain copies are dashed, what the planner predicts is dotted.
    """
    pyplot = _pyplot()
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.dtype, line.case["memory"]), []).append(line)
    figure, grid = pyplot.subplots(
        len(groups), 2, figsize=(10.5, 0.9 + 3.8 * len(groups)), layout="constrained", squeeze=False, sharex=True
    )
    for (kind, of_kind), (left, right) in zip(groups.items(), grid, strict=True):
        _exchange_panels(left, right, of_kind, ", ".join(kind))
    for axes in grid[-1]:
        axes.set_xlabel("send buffer of each rank, bytes")
    handles, labels = grid[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper right", ncols=len(labels))
    first = lines[0]
    through = "" if first.case["through"] == "a2a" else " through torch.distributed"
    title = f"{first.op}{through}, {first.ranks} ranks{_in_graph(first)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    _source(figure, first)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _exchange_panels(left: Any, right: Any, lines: Sequence[Line], kind: str) -> None:
    sizes = sorted({line.bytes for line in lines})
    for impl in dict.fromkeys(line.impl for line in lines):
        points = sorted(
            (line.bytes, line.p50_us, line.p99_us, line.algbw_GBps)
            for line in lines
            if line.impl == impl and line.p50_us is not None
        )
        if not points:
            continue
        x, p50, p99, bandwidth = zip(*points, strict=True)
        limit = impl in LIMITS
        style = {
            "color": COLOURS.get(impl),
            "linestyle": "--" if limit else "-",
            "linewidth": 1.3 if limit else 2.2 if impl == "a2a" else 1.6,
            "marker": None if limit and len(points) > 1 else "o",
            "markersize": 4,
            "zorder": 3 if impl == "a2a" else 2,
        }
        left.plot(x, p50, **style)
        if not limit:
            left.fill_between(x, p50, p99, color=COLOURS.get(impl), alpha=0.12, linewidth=0)
        right.plot(x, bandwidth, label=LABELS.get(impl, impl), **style)
    predicted = sorted(
        (line.bytes, line.case["predicted_us"]) for line in lines if line.impl == "a2a" and "predicted_us" in line.case
    )
    if predicted:
        dotted = {
            "color": COLOURS["a2a"],
            "linestyle": ":",
            "linewidth": 1.3,
            "marker": "x",
            "markersize": 5,
            "zorder": 4,
        }
        left.plot(*zip(*predicted, strict=True), **dotted)
        speeds = [(size, size / us / 1e3) for size, us in predicted if us > 0]
        right.plot(*zip(*speeds, strict=True), label="a2a, predicted", **dotted)
    titles = (f"{kind}: time of a call, us (band: up to p99)", f"{kind}: send buffer / time, GB/s")
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [size_text(size) for size in sizes])
        axes.minorticks_off()
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def moe(lines: Sequence[Line], path: Path) -> None:
    """Phases side by side on a log axis, a bar an implementation; one panel a dtype and number of tokens."""
    pyplot = _pyplot()
    kinds = list(dict.fromkeys((line.dtype, line.case["tokens"]) for line in lines))
    parts = list(dict.fromkeys(line.case["part"] for line in lines))
    impls = list(dict.fromkeys(line.impl for line in lines))
    figure, grid = pyplot.subplots(
        1, len(kinds), figsize=(5.6 * len(kinds) + 0.6, 4.4), layout="constrained", sharey=True, squeeze=False
    )
    width = 0.8 / len(impls)
    for axes, (dtype, tokens) in zip(grid[0], kinds, strict=True):
        of_kind = [line for line in lines if (line.dtype, line.case["tokens"]) == (dtype, tokens)]
        for index, impl in enumerate(impls):
            of = {line.case["part"]: line for line in of_kind if line.impl == impl}
            heights = [(of[part].p50_us or 0) / 1e3 for part in parts]
            places = [place + (index - (len(impls) - 1) / 2) * width for place in range(len(parts))]
            bars = axes.bar(places, heights, width * 0.92, color=COLOURS.get(impl), label=LABELS.get(impl, impl))
            axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=7, padding=1)
        axes.set_yscale("log")
        axes.set_xticks(range(len(parts)), [part.replace("_", "\n") for part in parts])
        axes.set_title(f"{dtype}, {tokens} tokens a rank", loc="left", fontsize=10)
        axes.grid(True, axis="y", which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.margins(y=0.15)
    grid[0][0].set_ylabel("p50 of the slowest rank, ms")
    grid[0][0].legend(frameon=False, loc="upper left", ncols=len(impls))
    first = lines[0]
    case = first.case
    figure.suptitle(
        f"MoE layer, {first.ranks} ranks, hidden {case['hidden']}, {case['experts']} experts, "
        f"top-{case['top_k']}{_in_graph(first)}",
        x=0.01, ha="left", fontsize=12, fontweight="bold",
    )  # fmt: skip
    _source(figure, first)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def topology(topo: Topology, path: Path) -> None:
    """Domains as boxes of ranks, one colour a rail; large ones are cut short in the middle, and say so."""
    pyplot = _pyplot()
    rails = topo.rails()
    rail_of: dict[int, int] = {}
    for index, rail in enumerate(rails):
        for rank in rail:
            rail_of.setdefault(rank, index)
    domains = _some(list(topo.domains), 12)
    tallest = max(len(_some(list(domain.ranks), 12)) for domain in domains if domain is not None)
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.5 * len(domains), 1.9 + 0.5 * tallest), layout="constrained")
    colours = pyplot.get_cmap("plasma")
    places: dict[int, tuple[float, float]] = {}
    for column, domain in enumerate(domains):
        x = 1.5 * column
        if domain is None:
            axes.text(x, -tallest / 2, f"... {len(topo.domains) - 11} more ...", ha="center", va="center", rotation=90)
            continue
        ranks = _some(list(domain.ranks), 12)
        box = pyplot.Rectangle((x - 0.55, -len(ranks) + 0.4), 1.1, len(ranks) + 0.2, fill=False, edgecolor=GREY)
        axes.add_patch(box)
        name = " ".join(filter(None, (domain.rack, domain.host))) or f"domain {topo.domain_index(domain.ranks[0])}"
        axes.text(x, 0.95, f"{name}\n{domain.kind}", ha="center", va="bottom", fontsize=8)
        for row, rank in enumerate(ranks):
            if rank is None:
                axes.text(x, -row, f"... {len(domain.ranks) - 11} more ...", ha="center", va="center", fontsize=7)
                continue
            places[rank] = (x, -row)
            colour = colours(0.02 + 0.66 * rail_of[rank] / max(1, len(rails) - 1))
            axes.scatter([x], [-row], s=260, color=colour, zorder=3)
            axes.text(x, -row, str(rank), ha="center", va="center", color="white", fontsize=8, zorder=4)
    for rail in rails:
        shown = [places[rank] for rank in rail if rank in places]
        if len(shown) > 1:
            axes.plot(*zip(*shown, strict=True), color="#cccccc", linewidth=1, zorder=1)
    axes.set_xlim(-0.9, 1.5 * (len(domains) - 1) + 0.9)
    axes.set_ylim(-tallest + 0.1, 2.2)
    axes.set_axis_off()
    up, out = topo.scale_up, topo.scale_out
    links = f"in a domain {up.bandwidth_GBps:g} GB/s, {up.latency_us:g} us"
    if not topo.is_single_domain:
        links += f"; between domains, along the rails, {out.bandwidth_GBps:g} GB/s, {out.latency_us:g} us"
    figure.suptitle(topo.summary(), x=0.02, ha="left", fontsize=11, fontweight="bold")
    figure.supxlabel(links, x=0.02, ha="left", fontsize=8, color=GREY, wrap=True)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


STEP_PARTS = {"compute": "#3b6fb5", "exposed communication": "#c8321e", "bubble": "#c9c9c9"}


def simulated(steps: Sequence[Step], path: Path) -> None:
    """A bar a number of GPUs: where a step's time goes; beside it, communication by kind, exposed and hidden."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.6 * len(steps) + 4), layout="constrained")
    labels = [f"{step.job.gpus:,}" for step in steps]
    start = [0.0] * len(steps)
    parts = zip(
        STEP_PARTS.items(), zip(*((s.compute_s, s.exposed_s, s.bubble_s) for s in steps), strict=True), strict=True
    )
    for (part, colour), seconds in parts:
        widths = [value * 1e3 for value in seconds]
        left.barh(labels, widths, left=start, color=colour, label=part)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    left.set_title("a step, ms, by number of GPUs", loc="left", fontsize=10)
    left.invert_yaxis()
    kinds = [name for name, share in steps[-1].shares.items() if share.total_s]
    height = 0.8 / len(steps)
    for index, step in enumerate(steps):
        places = [place + (index - (len(steps) - 1) / 2) * height for place in range(len(kinds))]
        exposed = [step.shares[kind].exposed_s * 1e3 for kind in kinds]
        hidden = [step.shares[kind].hidden_s * 1e3 for kind in kinds]
        right.barh(places, exposed, height * 0.9, color=STEP_PARTS["exposed communication"])
        right.barh(places, hidden, height * 0.9, left=exposed, color="#e9b8af")
        for place, total in zip(places, map(sum, zip(exposed, hidden, strict=True)), strict=True):
            right.text(total, place, f" {step.job.gpus:,}", va="center", fontsize=7, color=GREY)
    right.set_yticks(range(len(kinds)), kinds)
    right.invert_yaxis()
    right.set_title("communication of a GPU, ms: exposed (dark), hidden (light)", loc="left", fontsize=10)
    figure.legend(frameon=False, loc="outside lower right", ncols=3)
    job = steps[0].job
    title = f"modelled: {steps[0].model.name} on {job.hardware}, PP{job.pp} VP{job.vp} TP{job.tp} EP{job.ep}"
    figure.suptitle(f"{title}, overlap {job.overlap}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _some(items: list[Any], limit: int) -> list[Any]:
    """All items, or the first few, None, and the last one."""
    return items if len(items) <= limit else [*items[: limit - 2], None, items[-1]]


def _in_graph(line: Line) -> str:
    return ", in a CUDA graph" if line.case.get("graph") else ""


def _source(figure: Any, line: Line) -> None:
    env = line.env
    commit = f", commit {env['commit']}" if env["commit"] else ""
    figure.supxlabel(
        f"{env['gpu'] or env['cpu']}; torch {env['torch']}{commit}; p50 of alternating runs, slowest rank",
        x=0.01, ha="left", fontsize=7, color=GREY,
    )  # fmt: skip
