"""What the README's tables of results are made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from a2a.measure import Line


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table: the first row is its head, the first column holds words."""
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in body])


def by_size(sizes: Sequence[int], lines: Mapping[int, Line], text: Callable[[Line], str]) -> list[str]:
    """A cell for each size; "-" where there is no line."""
    return [text(lines[size]) if size in lines else "-" for size in sizes]


def p50(line: Line) -> str:
    """us with three digits."""
    return "-" if line.p50_us is None else f"{line.p50_us:.3g}" if line.p50_us < 1000 else f"{line.p50_us:,.0f}"


def origin(lines: Sequence[Line], machine: str) -> str:
    """How and where lines were measured; `machine`: the part of `env` that names it."""

    def each(get: Callable[[Line], object]) -> str:
        return ", ".join(dict.fromkeys(str(get(line)) for line in lines))

    commits = each(lambda line: f"{line.env['commit']}{' (changed since)' if line.env['dirty'] else ''}")
    versions = f"torch {each(lambda line: line.env['torch'])}"
    if machine == "gpu":
        versions += f", NCCL {each(lambda line: line.env['nccl'])}"
    return (
        f"p50 of alternating runs, slowest rank; {each(lambda line: line.env[machine])}; {versions}; commit {commits}"
    )
