"""`a2a trial` on a job of Megatron Core's that knows nothing of a2a: its layer as it is, then on a2a, to the same bits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cli_run import Here
from megatron_cpu import needs_megatron

pytestmark = needs_megatron

JOB = """
import torch
import torch.distributed as dist
from megatron_cpu import model_parallel, moe_config, moe_layer, on_cpu

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
with on_cpu(), model_parallel(expert_model_parallel_size=2):
    from megatron.core.transformer.moe import token_dispatcher
    # Sizes that a GPU has are given to the host as NumPy arrays; those of a CPU would stay tensors, which gloo doesn't take.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, record_stream=False: (
        x.numpy() if as_numpy and isinstance(x, torch.Tensor) else x
    )
    layer = moe_layer(moe_config("alltoall"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(50):
        y, _ = layer(torch.randn(5, 2, 16))
        loss = y.square().mean()
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_megatron_layer_trains_to_the_same_bits_on_a2a(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(job))
    told = here("trial", "--steps", "4", "--json", "-", "--", *launcher)
    assert told.returncode == 0, told.stderr
    *runs, _, difference = map(json.loads, told.stdout.splitlines())
    compared = difference["difference"]
    assert compared["compared"] == compared["same_bits"] > 0
    for record in runs[-1]["ranks"]:
        assert record["integrations"] == ["a2a.integrations.megatron"], record["refused"]
        assert sum(comm["collectives"] for comm in record["a2a"]) > 0
