"""What run_cpu.py and run_gpu.py share: run `a2a bench` again and again, and collect its lines in one file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from a2a.measure import Line


def measure(
    command: str, extra: Sequence[str] = (), *, limit_s: float | None = None, variables: Mapping[str, str] | None = None
) -> tuple[int, list[Line]]:
    """Run `a2a bench` with these words; its exit code (124: it took longer than `limit_s`) and the lines that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        words = [sys.executable, "-m", "a2a", "bench", *command.split(), *extra, "--json", str(path)]
        try:
            environment = {**os.environ, **(variables or {})}
            code = subprocess.run(words, check=False, timeout=limit_s, env=environment).returncode
        except subprocess.TimeoutExpired:
            code = 124
        lines = [Line.from_json(text) for text in path.read_text().splitlines()] if path.exists() else []
    told = " ".join(["a2a bench", command, *extra])  # without the temporary file
    if code:
        print(f"exit code {code}: {told}", file=sys.stderr)
    return code, [Line(**{**vars(line), "env": {**line.env, "command": told}}) for line in lines]


def write(path: Path, lines: Sequence[Line]) -> None:
    """Write the lines to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line.to_json() + "\n" for line in lines))


def verdict(path: Path, lines: Sequence[Line], failed: int, missed: Sequence[str] | None) -> int:
    """Say how a run ended. `missed`: what is below its floor; None: nobody asked. Returns the exit code."""
    wrong = sum(line.wrong for line in lines)
    print(f"{len(lines)} lines in {path}; {wrong} wrong elements; {failed} commands failed")
    for text in missed or ():
        print(f"missed: {text}")
    if failed or wrong:
        return 1
    if missed is not None:
        print("Every floor is met." if not missed else f"{len(missed)} floors are missed.")
    return 2 if missed else 0
