"""What commands print: a console, tables that survive narrow terminals, progress on a terminal only, JSON lines."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

NO_TERMINAL_WIDTH = 160  # files and pipes have no edge to wrap at


def console(*, stderr: bool = False) -> Console:
    """A console for stdout (or stderr); plain text where that is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=NO_TERMINAL_WIDTH, no_color=True, emoji=False)


def print_table(
    out: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", left: int = 1
) -> None:
    """Print a table; one block of `column  value` lines a row where the terminal is too narrow for it.

    Args:
        out: where to.
        columns: headings.
        rows: cells as text; rich's markup is understood.
        title: printed above.
        left: how many of the first columns hold words and are aligned left; numbers are aligned right.
    """
    table = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold")
    widths = [_width(index, [columns, *rows], wrapped=index < left) for index in range(len(columns))]
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index >= left, min_width=width)
    for row in rows:
        table.add_row(*row)
    if sum(widths) + 3 * len(widths) + 1 <= out.width:  # two spaces and a line for each, and one more line
        out.print(table)
        return
    if title:
        out.print(f"[bold]{title}[/bold]")
    widest = max(len(column) for column in columns)
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            out.print(f"[bold]{column.ljust(widest)}[/bold] {cell}")
        out.print()


def _width(index: int, rows: Sequence[Sequence[str]], *, wrapped: bool) -> int:
    """What a column needs: its longest cell or, where cells may be wrapped, its longest word."""
    cells = [Text.from_markup(row[index]).plain for row in rows]
    return max(map(len, [word for cell in cells for word in cell.split()] if wrapped else cells), default=1)


class Steps:
    """Progress through a known number of steps; `begin(text)` starts the next one."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting ranks", total=total)
        self._begun = False

    def begin(self, text: str) -> None:
        self._progress.update(self._task, description=text, advance=1 if self._begun else 0)
        self._begun = True


@contextlib.contextmanager
def progress(total: int) -> Iterator[Steps]:
    """A progress bar on stderr while the block runs; nothing where stderr is no terminal."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        yield Steps(bar, total)


@contextlib.contextmanager
def json_lines(path: str | None) -> Iterator[IO[str] | None]:
    """The file that `--json PATH` names, stdout for "-", or None."""
    if path is None:
        yield None
    elif path == "-":
        yield sys.stdout
    else:
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        with Path(path).expanduser().open("w") as file:
            yield file


def size_text(num_bytes: int) -> str:
    """4096 -> "4K", as sizes are given on the command line; what is no whole number of a unit stays in bytes."""
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{unit}"
    return str(num_bytes)


def us_text(us: float | None) -> str:
    """Microseconds with three digits, and no more digits than that after the point."""
    if us is None or math.isnan(us):
        return "-"
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def ratio_text(ratio: float | None) -> str:
    if ratio is None or math.isnan(ratio):
        return "-"
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2g}x"
