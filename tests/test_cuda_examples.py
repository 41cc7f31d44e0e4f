"""Examples that need a GPU, as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


def torchrun(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return done.stdout + done.stderr


def test_a_captured_step_trains() -> None:
    said = torchrun(str(EXAMPLES / "captured_step.py"), "--steps", "8")
    losses = [
        float(line.split("loss ")[1].split(",")[0]) for line in said.splitlines() if line.startswith("rank 0, step")
    ]
    assert len(losses) == 8 and losses[-1] < losses[0], said
    assert "skipped" not in said, said


def test_a_captured_step_skips_its_update_when_a_rank_is_lost() -> None:
    said = torchrun(str(EXAMPLES / "captured_step.py"), "--steps", "8", "--lose-rank-at", "3")
    assert "rank 0, step 2: " in said and "rank 0 stops at step 3" in said, said
    assert "rank 0 waited 5.0 s for rank 1" in said, said
    assert [line for line in said.splitlines() if "skipped" in line and "step 3" in line], said
