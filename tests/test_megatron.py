"""Megatron Core's own layers on a2a against the same computed densely in one process: forward and all gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import a2a
from megatron_cpu import config, model_parallel, moe_config, moe_layer, needs_megatron, on_cpu, weight
from pool import World

pytestmark = needs_megatron
DEADLINE_S = 240.0  # the first check in a rank imports Megatron
RELATIVE = 1e-5


@contextlib.contextmanager
def on_a2a(**options: Any) -> Iterator[Any]:
    """Megatron on a CPU, installed on a2a inside."""
    import a2a.integrations.megatron as integration

    with on_cpu():
        report = integration.install(**options)
        try:
            yield report
        finally:
            integration.uninstall()


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        got.detach(), expected.detach(), rtol=RELATIVE, atol=RELATIVE * float(expected.abs().max())
    )


def calls(group: Any) -> int:
    """Collectives that a2a's shared memory has carried for this group; none was handed to another engine."""
    from a2a.comm import implicit

    stats = implicit(group).stats()
    assert stats["handed_over"] == {}
    return int(stats["collectives"])


# ---------------------------------------------------------------- MoE layers


@dataclasses.dataclass
class Dense:
    """The layer of `moe_layer` in one process: `tokens[i]` are those of the i-th rank, which has a router of its own."""

    tokens: list[Tensor]
    routers: list[Tensor]
    fc1: list[Tensor]
    fc2: list[Tensor]
    outputs: list[Tensor]


def dense_moe(config: Any, tokens: list[Tensor], grads: list[Tensor], keep: Any = None) -> Dense:
    """`keep(logits_TE, chosen_TE)` drops choices, as a capacity does."""
    experts, hidden, width = config.num_moe_experts, config.hidden_size, config.moe_ffn_hidden_size
    tokens = [x.detach().clone().requires_grad_() for x in tokens]
    routers = [weight(0, shape=(experts, hidden)).requires_grad_() for _ in tokens]
    fc1 = [weight(1, index, shape=(width, hidden)).requires_grad_() for index in range(experts)]
    fc2 = [weight(2, index, shape=(hidden, width)).requires_grad_() for index in range(experts)]
    outputs = []
    for x, router in zip(tokens, routers, strict=True):
        flat = x.view(-1, hidden)
        top, ids = (flat @ router.t()).topk(config.moe_router_topk)
        probs_TE = torch.zeros(len(flat), experts).scatter(1, ids, top.softmax(-1))
        if keep is not None:
            probs_TE = probs_TE * keep(probs_TE)
        y = sum(
            torch.nn.functional.gelu(flat @ fc1[e].t()) @ fc2[e].t() * probs_TE[:, e : e + 1] for e in range(experts)
        )
        outputs.append(y.view(x.shape))
    torch.autograd.backward(outputs, grads)
    return Dense(tokens, routers, fc1, fc2, outputs)


def compare_moe(layer: Any, keep: Any = None, tokens: tuple[int, ...] = (6,)) -> None:
    """Run the layer on this rank's tokens, and everybody's densely; compare what this rank can see."""
    group, part = layer.token_dispatcher.tp_ep_group, dist.get_rank(layer.token_dispatcher.tp_group)
    parts, ranks = layer.token_dispatcher.tp_size, dist.get_process_group_ranks(group)
    shapes = [(tokens[i % len(tokens)], 2, layer.config.hidden_size) for i in range(len(ranks))]
    everyone = [torch.randn(s, generator=torch.Generator().manual_seed(r)) for r, s in zip(ranks, shapes, strict=True)]
    grads = [torch.randn(s, generator=torch.Generator().manual_seed(99 + r)) for r, s in zip(ranks, shapes, strict=True)]
    dense = dense_moe(layer.config, everyone, grads, keep)
    mine = dist.get_rank(group)
    x = everyone[mine].clone().requires_grad_()
    y, _ = layer(x)
    y.backward(grads[mine])
    close(y, dense.outputs[mine])
    close(x.grad, dense.tokens[mine].grad)
    close(layer.router.weight.grad, dense.routers[mine].grad)
    for index, expert in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True):
        close(expert.linear_fc1.weight.grad, dense.fc1[index].grad.chunk(parts, 0)[part])
        close(expert.linear_fc2.weight.grad, dense.fc2[index].grad.chunk(parts, 1)[part])


def parallel(expert: int, expert_tensor: int = 1, tensor: int = 1) -> dict[str, Any]:
    """Sizes as both the groups and the config take them."""
    return {
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "tensor_model_parallel_size": tensor,
    }


def check_moe_layers(sizes: list[dict[str, Any]]) -> None:
    for size in sizes:
        with on_a2a(), model_parallel(**size):
            for dispatcher in ("flex", "alltoall"):
                layer = moe_layer(
                    moe_config(dispatcher, sequence_parallel=size["tensor_model_parallel_size"] > 1, **size)
                )
                group = layer.token_dispatcher.tp_ep_group
                assert dist.get_backend(group) == "a2a"
                compare_moe(layer)
                before = calls(group)
                compare_moe_again(layer)
                assert calls(group) == before + 4, "dispatch, combine, and the backward of each"


def compare_moe_again(layer: Any) -> None:
    """A second time, from fresh gradients: nothing of the first call is left."""
    layer.zero_grad()
    compare_moe(layer)


def test_moe_layers_on_two_ranks(world: World) -> None:
    world.run(check_moe_layers, sizes=[parallel(2)], deadline_s=DEADLINE_S)


@pytest.mark.ranks(4)
def test_moe_layers_on_four_ranks(world: World) -> None:
    world.run(
        check_moe_layers, sizes=[parallel(4), parallel(2, expert_tensor=2, tensor=2), parallel(2)], deadline_s=DEADLINE_S
    )
