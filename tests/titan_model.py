"""A small DeepSeek-style model of TorchTitan's, on CPU ranks: its real layers, parallelised by its real code.

TorchTitan decides at its import that it runs on GPUs; so this module must come before any other part of it. Its grouped
products round to bfloat16, and its attention for language models is for GPUs: where a test compares in float32, experts
compute in float32 (by TorchTitan's own override) and attention is its ScaledDotProductAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils

torchtitan.tools.utils.device_type = "cpu"

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides, derive, override  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models import deepseek_v3 as titan  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config  # noqa: E402

from a2a.integrations import torchtitan as integration  # noqa: E402, F401

WORDS, WIDTH, LENGTH, EXPERTS, TOP_K = 64, 32, 12, 8, 3
SPMD = "partial_dtensor"  # the others need a newer torch for FSDP
FLOAT32 = f"{__name__}.float32_experts"
A2A = "a2a.integrations.torchtitan.expert_parallel"


class Float32Experts(GroupedExperts):
    """GroupedExperts without rounding to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        w1_EFD, w2_EDF, w3_EFD = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        ends_E = num_tokens_per_expert_E.cumsum(0)
        expert_R = torch.searchsorted(ends_E, torch.arange(x_RD.shape[0]), right=True)
        up_RF = torch.einsum("rd,rfd->rf", x_RD, w1_EFD[expert_R])
        gate_RF = torch.einsum("rd,rfd->rf", x_RD, w3_EFD[expert_R])
        return torch.einsum("rf,rdf->rd", torch.nn.functional.silu(up_RF) * gate_RF, w2_EDF[expert_R])


@override(target=GroupedExperts.Config, exact=True)
def float32_experts(cfg: GroupedExperts.Config) -> Float32Experts.Config:
    return derive(cfg, Float32Experts.Config)


def model_config(overrides: Sequence[Any] = ()) -> Any:
    """One dense layer and one of experts, with TorchTitan's overrides applied by TorchTitan."""
    rope = ComplexRoPE.Config(
        dim=8, max_seq_len=LENGTH, theta=1e4, scaling="yarn", rope_factor=40.0, beta_fast=32.0, beta_slow=1.0,
        original_seq_len=LENGTH,
    )  # fmt: skip
    layers = titan._build_dsv3_layers(
        n_layers=2, n_dense_layers=1, dim=WIDTH, n_heads=2, q_lora_rank=0, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, mscale=0.7, dense_hidden_dim=48, moe_hidden_dim=16, num_experts=EXPERTS,
        num_shared_experts=1, router_top_k=TOP_K, router_score_func="softmax", attn_backend="flex",
        moe_comm_backend="standard", non_blocking_capacity_factor=None, rope=rope,
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = titan.DeepSeekV3Model.Config(
        vocab_size=WORDS,
        dim=WIDTH,
        tok_embeddings=Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=titan._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=titan._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=titan._output_linear_init(WIDTH)),
        layers=layers,
        mtp_layers=[],
    )
    apply_overrides(OverrideConfig(imports=list(overrides)), config)
    return config


def parallel_dims(replicas: int = 1) -> ParallelDims:
    """Experts and parameters over the ranks of a replica."""
    set_spmd_backend(SPMD)
    size = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=replicas, dp_shard=size // replicas, cp=1, tp=1, pp=1, ep=size // replicas, world_size=size,
        spmd_backend=SPMD,
    )  # fmt: skip
    dims.build_mesh()
    return dims


def filled(module: torch.nn.Module) -> Any:
    """The module with parameters that depend on their names' order alone, and counters at zero."""
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(module.named_parameters()):
        scale = max(parameter.shape[-1], 1) ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    for _, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.zero_()
    return module


def moe_layer(overrides: Sequence[Any], dims: ParallelDims | None) -> Any:
    """TorchTitan's MoE layer: over the ranks, or whole on one process."""
    config = model_config(overrides)
    set_deepseek_v3_sharding_config(config, enable_sp=True, enable_ep=True)
    layer = filled(config.layers[1].moe.build())
    if dims is not None:
        layer.parallelize(dims)
    return layer


def train(overrides: Sequence[Any], steps: int, replicas: int = 1, compiled: bool = False) -> list[float]:
    """Losses of this rank over some steps, with FSDP (or HSDP) and expert parallelism as TorchTitan sets them up."""
    dims = parallel_dims(replicas)
    config = model_config(overrides)
    set_deepseek_v3_sharding_config(config, enable_sp=True, enable_ep=True)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))  # the caches of positions, among others
    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(sum(name.encode()))
        parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    model = titan.parallelize_deepseekv3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(local_batch_size=1, seq_len=LENGTH, mixed_precision_param="float32"),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=dims.dp_replicate,
            data_parallel_shard_degree=dims.dp_shard,
            expert_parallel_degree=dims.ep,
            spmd_backend=SPMD,
        ),
        compile_config=CompileConfig(enable=compiled, backend="aot_eager", components=["model"]),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can't scale while it sums
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(WORDS, (2, LENGTH), generator=generator)
        targets = (5 * ids + 1) % WORDS  # what can be learned
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
