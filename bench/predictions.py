"""What the planner predicts beside what is measured, for every collective of CPU ranks: bench/results/cpu_predictions.jsonl.

    python bench/predictions.py [--ranks 2,4] [--out FILE] [--only TEXT] [--short]
    python bench/predictions.py --table FILE

For each number of ranks it measures the primitives' costs (`a2a topo --measure`, into a cache of its own), then runs
`a2a bench` with sizes that no curve was fitted to. The exit code is 1 if a result was wrong, and 2 if a prediction is off by
more than `MOST` of the measured p50.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import runs
import tables

from a2a.cli import parse, show
from a2a.measure import Line

MOST = 0.25
SIZES = "64K,256K,1M,4M,16M,64M,256M"
OPS = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
SHORT = ("--bytes", "4K", "--repeat", "3")


def commands(ranks: int) -> list[str]:
    """Words of `a2a bench`: every op, on both kinds of memory, and a dtype whose sums cost more."""
    usual = [f"{op} --ranks {ranks} --bytes {SIZES} --against none --memory symmetric,ordinary" for op in OPS]
    return [*usual, f"all_reduce --ranks {ranks} --bytes {SIZES} --against none --memory ordinary --dtype bf16"]


def error(line: Line) -> float:
    """By which share of the measured p50 the prediction is off."""
    assert line.p50_us
    return float(line.case["predicted_us"]) / line.p50_us - 1


def predicted(lines: Sequence[Line]) -> list[Line]:
    """Those of a2a's lines that have a measured and a predicted time."""
    return [line for line in lines if line.impl == "a2a" and line.p50_us and "predicted_us" in line.case]


def markdown(lines: Sequence[Line]) -> str:
    """Predicted / measured us and the error, by size: a row a kind."""
    lines = predicted(lines)
    sizes = sorted({line.bytes for line in lines})
    table = [["predicted / measured, us", *map(show.size_text, sizes)]]
    kinds = dict.fromkeys((line.ranks, line.op, line.dtype, str(line.case["memory"])) for line in lines)
    for kind in kinds:
        of = {x.bytes: x for x in lines if (x.ranks, x.op, x.dtype, x.case["memory"]) == kind}
        ranks, op, dtype, memory = kind
        table.append([f"{ranks} ranks, {op}, {dtype}, {memory}", *tables.by_size(sizes, of, _cell)])
    return tables.markdown(table)


def _cell(line: Line) -> str:
    share = error(line)
    text = f"{show.us_text(line.case['predicted_us'])} / {show.us_text(line.p50_us)} ({100 * share:+.0f}%)"
    return f"**{text}**" if abs(share) > MOST else text


def summary(lines: Sequence[Line]) -> str:
    """How many predictions are within the limit, and the worst."""
    lines = predicted(lines)
    within = sum(abs(error(line)) <= MOST for line in lines)
    worst = max(lines, key=lambda line: abs(error(line)))
    where = f"{worst.op} of {show.size_text(worst.bytes)}, {worst.ranks} ranks, {worst.case['memory']}"
    count = f"{within} of {len(lines)} predictions within {100 * MOST:.0f} %"
    return f"{count}; the worst is off by {100 * error(worst):+.0f} % ({where})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_predictions.jsonl")
    parser.add_argument("--only", default="", help="only commands that contain this text")
    parser.add_argument("--short", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--table", type=Path, help="measure nothing; print the table of this file")
    arguments = parser.parse_args()
    if arguments.table:
        lines = [Line.from_json(text) for text in arguments.table.read_text().splitlines()]
        print(markdown(lines), summary(lines), sep="\n\n")
        return 0
    lines, failed = [], 0
    with tempfile.TemporaryDirectory() as cache:
        for ranks in parse.counts(arguments.ranks, "--ranks"):
            most = ("--most", "6K", "--repeat", "1") if arguments.short else ()
            measure = [sys.executable, "-m", "a2a", "topo", "--measure", "--ranks", str(ranks), *most]
            failed += subprocess.run(measure, check=False, env={**os.environ, "A2A_CACHE_DIR": cache}).returncode != 0
            for command in (command for command in commands(ranks) if arguments.only in command):
                words = f"{command} --device cpu"
                code, new = runs.measure(words, SHORT if arguments.short else (), variables={"A2A_CACHE_DIR": cache})
                failed += code != 0
                lines += new
                runs.write(arguments.out, lines)
    print(markdown(lines), summary(lines), sep="\n\n")
    if failed or any(line.wrong for line in lines):
        return 1
    return 2 if not arguments.short and any(abs(error(line)) > MOST for line in predicted(lines)) else 0


if __name__ == "__main__":
    sys.exit(main())
