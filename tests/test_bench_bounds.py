"""The bounds that floors are held against move every byte, and forbid a floor if they take longer than it leaves."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import a2a
from a2a.measure import Cell, Line, Timing

BENCH = Path(__file__).resolve().parent.parent / "bench"


def line(impl: str, p50_us: float, algorithm: str = "-", **case: Any) -> Line:
    cell = Cell("all_to_all_bounds", 1 << 20, "float32", 2, case, {})
    return dataclasses.replace(cell.line(impl, Timing((p50_us,), calls=1)), algorithm=algorithm)


def test_a_bound_forbids_a_floor_that_asks_for_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import bounds

    def told(bound_us: float) -> str:
        lines = [
            line("a2a", 30.0, "pairwise", memory="symmetric", through="a2a"),
            line("gloo", 140.0),
            line("call", 25.0, "symmetric"),
            line("bound", 9.0, "flag"),
            line("bound", 9.0, "read and memcpy"),
            line("bound", bound_us, "copy by memcpy"),
            line("bound", 50.0, "copy by stream"),
            line("bound", 1.0, "line by line"),
        ]
        (row,) = bounds.markdown(lines, met=False).splitlines()[2:]
        return str(row)

    # 14 times faster than gloo would be 10 us
    assert told(20.0) == "| symmetric | 1M | gloo | 14 | 4.67 | **7** | 10.0 | 30.0 | 25.0 | 20.0 | copy by memcpy |"
    assert "| 17.5 | 10.0 | 30.0 | 25.0 | 8.00 | copy by memcpy |" in told(8.0)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_bounds_move_every_byte_that_they_are_timed_for(tmp_path: Path) -> None:
    out = tmp_path / "bounds.jsonl"
    told = subprocess.run(
        [sys.executable, BENCH / "bounds.py", "--only", "4K,2M", "--budget", "0.05", "--out", out],
        env={**os.environ, "PYTHONPATH": str(Path(a2a.__file__).parent.parent)},  # the a2a that is tested here
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    lines = [Line.from_json(text) for text in out.read_text().splitlines()]
    assert {x.wrong for x in lines} == {0}
    ways = {(x.bytes, x.algorithm.split()[0]) for x in lines if x.impl == "bound" and (x.p50_us or "why" in x.case)}
    assert ways == {(size, way) for size in (4 << 10, 2 << 20) for way in ("flag", "copy", "staged", "read")}
    assert "| symmetric | 4K |" in told.stdout
