"""The examples run as a user runs them, and what they print is right."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import a2a

EXAMPLES = Path(__file__).parent.parent / "examples"
LOSS = re.compile(r"^ *(.+?)  step +(\d+)  loss ([\d.]+)$", re.MULTILINE)


def run_example(name: str, *arguments: str, ranks: int | None = None) -> str:
    """What the example prints; its processes find the a2a that these tests use. `ranks`: torchrun starts it."""
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join([str(Path(a2a.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


no_launcher = pytest.mark.skipif(
    "RANK" in os.environ, reason="starts ranks of its own; torchrun has started some already"
)


@no_launcher
def test_the_language_model_learns_the_same_on_four_ranks_and_on_one() -> None:
    """--check compares the losses itself and fails otherwise."""
    output = run_example("train_moe_lm.py", "--ranks", "4", "--steps", "6", "--check")
    losses: dict[str, list[float]] = {}
    for name, _, loss in LOSS.findall(output):
        losses.setdefault(name, []).append(float(loss))
    assert {name: len(values) for name, values in losses.items()} == {"a2a": 6, "gloo": 6, "one process": 6}
    for name, values in losses.items():
        assert values[-1] < 0.9 * values[0], f"{name} did not learn"
    for name in ("a2a", "gloo"):
        assert f"{name}: losses differ from those of one process by at most" in output
        assert re.search(rf"^ *{name} +\d+ +[\d.]+% +[\d.]+%$", output, re.MULTILINE), "its row in the table"


@no_launcher
def test_gradients_under_ddp_on_two_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TOPOLOGY", "cpu:2x2")
    output = run_example("ddp.py", ranks=4)
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < 0.3 * losses[0]
    assert "2 domain(s); all ranks have the same weights: True" in output


def why_no_megatron() -> str | None:
    """Why the example for Megatron can't run; None: it can."""
    if importlib.util.find_spec("megatron") is None:
        return "megatron-core is not installed: pip install '.[trainers]'"
    if importlib.metadata.version("megatron-core") > "0.17" and importlib.util.find_spec("triton") is None:
        return "this megatron-core imports triton, which is not installed"
    return None


@pytest.mark.skipif(why_no_megatron() is not None, reason=str(why_no_megatron()))
@no_launcher
def test_the_megatron_model_learns() -> None:
    output = run_example("megatron_moe.py", ranks=2)
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < 0.6 * losses[0]


PAIR = re.compile(r"^step \d  loss ([\d.]+) .* ([\d.]+)$", re.MULTILINE)


def assert_pairs(output: str) -> None:
    """Five steps, whose losses (which the example compares) fall, and are those beside them to all digits but the last."""
    pairs = [(float(loss), float(other)) for loss, other in PAIR.findall(output)]
    assert len(pairs) == 5
    assert pairs[-1][0] < pairs[0][0]
    for loss, other in pairs:
        assert loss == pytest.approx(other, rel=1e-3)


@no_launcher
@pytest.mark.parametrize("name", ["context_parallel.py", "tensor_parallel.py"])
def test_a_cut_model_learns_as_the_whole_one(name: str) -> None:
    output = run_example(name, ranks=2)
    assert_pairs(output)
    if name == "tensor_parallel.py":
        assert int(re.search(r"^(\d+) collectives on a2a$", output, re.MULTILINE)[1]) >= 25


@no_launcher
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs TorchTitan: .ci/torchtitan")
def test_torchtitans_layer_learns_the_same_with_a2a() -> None:
    output = run_example("torchtitan_moe.py", ranks=2)
    assert_pairs(output)
    assert re.findall(r"^(\w+) of", output, re.MULTILINE) == ["AllToAllTokenDispatcher", "TokenDispatcher"]


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX: .ci/jax")
def test_a_jax_layer_on_four_devices_learns_as_on_one() -> None:
    pairs = re.findall(r"loss ([\d.]+) on 4 devices with a2a, ([\d.]+) on one", run_example("jax_all_to_all.py"))
    losses = [float(ours) for ours, _ in pairs]
    assert len(pairs) == 5 and losses == sorted(losses, reverse=True) and losses[0] > losses[-1] > 0
    assert all(float(ours) == pytest.approx(float(whole), rel=1e-4) for ours, whole in pairs)
