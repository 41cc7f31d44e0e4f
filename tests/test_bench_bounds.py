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


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import bounds

    return bounds


CALLS = (line("least", 0.75, "call by ctypes"), line("least", 0.5, "call by CPython"), line("least", 9.0, "checks"))


def test_a_bound_forbids_a_floor_that_asks_for_less_time(bounds: Any) -> None:
    def told(a2a_us: float, *more: Line) -> str:
        lines = [
            line("a2a", a2a_us, "pairwise", memory="symmetric", through="a2a"),
            line("gloo", 140.0),
            line("call", 25.0, "symmetric"),
            line("bound", 9.0, "flag"),
            line("bound", 20.0, "copy by memcpy"),
            line("bound", 50.0, "copy by stream"),
            line("bound", 30.0, "staged by memcpy"),
            line("bound", 1.0, "line by line"),
            *CALLS,
            *more,
        ]
        (row,) = bounds.markdown(lines, met=True).splitlines()[2:]
        return str(row)

    # 14 times faster than gloo would be 10 us
    assert told(30.0) == (
        "| symmetric | 1M | gloo | 14 | 4.67 | 6.83 | 10.0 | 30.0 | 25.0 | 20.5 | copy by memcpy | 20.0 | 0.50 | - "
        "| **forbidden** by 10.5 us |"
    )
    whole = line("whole", 8.0, "push by memcpy"), line("whole", 9.0, "slot by memcpy")
    assert told(30.0, *whole).endswith("| 8.00 | push by memcpy | 20.0 | 0.50 | - | not reached, not forbidden |")
    assert told(9.5, *whole).endswith("| met |")


def test_a_bound_through_torch_takes_its_share(bounds: Any) -> None:
    lines = [
        line("a2a", 40.0, memory="ordinary", through="dist"),
        line("gloo", 180.0),
        line("call", 25.0, "ordinary"),
        line("bound", 1.0, "copy by memcpy"),  # of symmetric tensors only
        line("bound", 24.0, "read and memcpy"),
        line("least", 6.0, "dist to Python"),
        line("least", 1.0, "dist to C++"),
        *CALLS,
    ]
    (row,) = bounds.markdown(lines, met=False).splitlines()[2:]
    assert row.endswith("| 30.5 | read and memcpy | 24.0 | 0.50 | 6.00 | **forbidden** by 0.50 us |")
    lines += [line("whole", 1.0, "read and memcpy"), line("torch", 29.0, "slot by memcpy")]
    (row,) = bounds.markdown(lines, met=False).splitlines()[2:]
    assert row.endswith("| 29.0 | slot by memcpy | 24.0 | 0.50 | 6.00 | not reached, not forbidden |")


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

    def ways(impl: str) -> set[tuple[int, str]]:
        timed = [x for x in lines if x.impl == impl and (x.p50_us or "why" in x.case)]
        return {(x.bytes, x.algorithm.split()[0]) for x in timed}

    small, large = 4 << 10, 2 << 20
    assert ways("bound") == {
        *((size, way) for size in (small, large) for way in ("flag", "copy", "staged", "read", "used")),
        *((small, way) for way in ("push", "slot")),
    }
    assert ways("whole") == {(small, way) for way in ("push", "slot", "read")}
    assert ways("torch") == {(small, way) for way in ("slot", "read")}
    assert ways("least") == {(size, way) for size in (small, large) for way in ("call", "checks", "dist")}
    assert "| symmetric | 4K |" in told.stdout


def test_an_exchange_that_costs_the_next_reader_more_is_no_bound(bounds: Any) -> None:
    times = {
        "read and memcpy": 80.0, "read and stream": 60.0, "staged by stream": 90.0,
        "used after read and memcpy": 90.0, "used after read and stream": 120.0,
    }  # fmt: skip
    lines = [Line("all_to_all_bounds", "bound", name, 1 << 20, "float32", 2, us) for name, us in times.items()]
    lines.append(Line("all_to_all_bounds", "gloo", "-", 1 << 20, "float32", 2, 500.0))
    kept = [line.algorithm for line in bounds.worthwhile(lines) if not line.algorithm.startswith("used")]
    assert kept == ["read and memcpy", "staged by stream", "-"]
    assert bounds.worthwhile(lines[-1:]) == lines[-1:]
