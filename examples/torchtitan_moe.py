"""TorchTitan's DeepSeek-style MoE layer, expert-parallel over CPU ranks, with its token dispatcher and with a2a's.

    torchrun --nproc-per-node 2 examples/torchtitan_moe.py

A job that TorchTitan's trainer runs needs no code, only the option

    --override.imports a2a.integrations.torchtitan.expert_parallel
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torchtitan.tools.utils

torchtitan.tools.utils.device_type = "cpu"  # TorchTitan's parts ask for it when they are imported: so it comes first

import spmd_types as spmd  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.moe_sharding import set_moe_sharding_config  # noqa: E402
from torchtitan.models.deepseek_v3 import deepseekv3_configs  # noqa: E402

import a2a  # noqa: E402, F401  (registers the backend)

A2A = "a2a.integrations.torchtitan.expert_parallel"
STEPS, SHAPE = 5, (2, 32, 256)  # sequences of a rank, tokens, width of TorchTitan's debug model
LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}  # what tensor parallelism would cut


def build(overrides: list[str], dims: ParallelDims) -> torch.nn.Module:
    """The second layer's MoE, with the same weights every time."""
    config = deepseekv3_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard").layers[1].moe
    apply_overrides(OverrideConfig(imports=overrides), config)
    set_moe_sharding_config(config, enable_ep=True, enable_sp=True, expert_param_layout=LAYOUT)
    layer = config.build()
    torch.manual_seed(0)
    layer.init_states(buffer_device=torch.device("cpu"))
    layer.parallelize(dims)
    return layer


def train(overrides: list[str], dims: ParallelDims) -> list[float]:
    layer = build(overrides, dims)
    if dist.get_rank() == 0:
        print(f"{type(layer.routed_experts.token_dispatcher).__qualname__} of {overrides or 'TorchTitan'}", flush=True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    x, losses = torch.randn(SHAPE, generator=torch.Generator().manual_seed(dist.get_rank())), []
    for _ in range(STEPS):
        loss = (layer(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        for name, parameter in layer.named_parameters():
            if "inner_experts" in name:  # this rank's own: they have seen all tokens
                parameter.grad /= dist.get_world_size()
            else:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:a2a")
    size = dist.get_world_size()
    set_spmd_backend("partial_dtensor")
    dims = ParallelDims(1, size, cp=1, tp=1, pp=1, ep=size, world_size=size, spmd_backend="partial_dtensor")
    dims.build_mesh()
    stock, ours = train([], dims), train([A2A], dims)
    if dist.get_rank() == 0:
        for step, (own, theirs) in enumerate(zip(ours, stock, strict=True)):
            print(f"step {step}  loss {own:.6f}  with TorchTitan's dispatcher {theirs:.6f}")
    torch.testing.assert_close(ours, stock, rtol=1e-3, atol=0)  # TorchTitan's experts round to bfloat16
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
