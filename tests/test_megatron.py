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
    expected = expected.detach()
    tolerance = RELATIVE * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got.detach(), expected, rtol=RELATIVE, atol=tolerance)


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
    grads = [
        torch.randn(s, generator=torch.Generator().manual_seed(99 + r)) for r, s in zip(ranks, shapes, strict=True)
    ]
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
        check_moe_layers,
        sizes=[parallel(4), parallel(2, expert_tensor=2, tensor=2), parallel(2)],
        deadline_s=DEADLINE_S,
    )


def check_variants() -> None:
    """The same answers where Megatron drops or pads, brings uneven numbers of tokens, or keeps its own steps."""
    size = parallel(2)
    with on_a2a(groups=()), model_parallel(**size):  # on gloo groups: everything goes by name
        layer = moe_layer(moe_config("flex", variable_seq_lengths=True, **size))
        assert dist.get_backend(layer.token_dispatcher.tp_ep_group) == "gloo"
        for tokens in ((6, 2), (3, 9), (1, 1), (40, 1)):  # fewer, more than before; Megatron needs one
            layer.zero_grad()
            compare_moe(layer, tokens=tokens)
        for dispatcher in ("flex", "alltoall"):
            for pads in (False, True):
                dropping = moe_config(
                    dispatcher, moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=pads, **size
                )
                compare_moe(moe_layer(dropping), keep=within_capacity)
        stepwise = moe_layer(moe_config("alltoall", moe_shared_expert_overlap=False, **size))
        stepwise.token_dispatcher.exchange = None
        group = stepwise.token_dispatcher.ep_group
        before = calls(group)
        compare_moe(stepwise)
        assert calls(group) == before + 6, "tokens and probabilities there, tokens back, and the gradients of each"


def within_capacity(probs_TE: Tensor) -> Tensor:
    """The first ceil(T * top_k / E / 2) tokens of an expert by probability, as Megatron drops them."""
    chosen = probs_TE > 0
    capacity = -(-int(chosen.sum()) // probs_TE.shape[1] // 2)
    kept = torch.zeros_like(probs_TE).scatter(0, probs_TE.topk(capacity, dim=0).indices, 1.0)
    return (kept * chosen).detach()


def test_uneven_dropped_and_stepwise_layers(world: World) -> None:
    world.run(check_variants, deadline_s=DEADLINE_S)


def check_own_groups() -> None:
    """A program that makes its process groups itself and hands them over, without Megatron's parallel_state."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(size)][rank]
    everybody = dist.new_group(backend="a2a")
    with on_a2a():
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection(ep=everybody, tp_ep=everybody, expt_tp=alone, expt_dp=alone)
        for name in ("tp", "cp", "tp_cp", "dp", "dp_cp", "tp_dp_cp"):
            setattr(groups, name, alone)
        for dispatcher in ("flex", "alltoall"):
            layer = moe_layer(moe_config(dispatcher, expert_model_parallel_size=size), groups)
            before = calls(everybody)
            compare_moe(layer)
            assert calls(everybody) >= before + 4


def test_layers_on_process_groups_of_ones_own(world: World) -> None:
    world.run(check_own_groups, deadline_s=DEADLINE_S)


# ---------------------------------------------------------------- tensor parallelism


def check_linears() -> None:
    parts = dist.get_world_size()
    rank, tokens, hidden, width = dist.get_rank(), 2 * parts, 16, 24
    first, second = weight(5, shape=(width, hidden)), weight(6, shape=(hidden, width))
    whole, grad = weight(7, shape=(tokens, 2, hidden)), weight(8, shape=(tokens, 2, hidden))
    dense = [tensor.clone().requires_grad_() for tensor in (whole, first, second)]
    expected = torch.tanh(dense[0] @ dense[1].t()) @ dense[2].t()
    expected.backward(grad)
    for sequence in (False, True):
        with on_a2a(), model_parallel(tensor_model_parallel_size=parts):
            from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

            setup = config(tensor_model_parallel_size=parts, sequence_parallel=sequence)
            common = {"config": setup, "init_method": setup.init_method, "bias": False, "skip_bias_add": False}
            column = ColumnParallelLinear(hidden, width, gather_output=False, **common)
            row = RowParallelLinear(width, hidden, input_is_parallel=True, **common)
            with torch.no_grad():
                column.weight.copy_(first.chunk(parts, 0)[rank])
                row.weight.copy_(second.chunk(parts, 1)[rank])

            def share(x: Tensor, sequence: bool = sequence) -> Tensor:
                return x.chunk(parts, 0)[rank] if sequence else x

            x = share(whole).clone().requires_grad_()
            before = calls(column.tp_group)
            y, _ = row(torch.tanh(column(x)[0]))
            y.backward(share(grad))
            assert calls(column.tp_group) == before + (5 if sequence else 2)
            close(y, share(expected))
            close(x.grad, share(dense[0].grad))
            close(column.weight.grad, dense[1].grad.chunk(parts, 0)[rank])
            close(row.weight.grad, dense[2].grad.chunk(parts, 1)[rank])


@pytest.mark.ranks(2, 4)
def test_tensor_parallel_linears(world: World) -> None:
    world.run(check_linears, deadline_s=DEADLINE_S)


def check_mappings() -> None:
    """Each region's forward and backward, uneven ones too, on a group that is not a2a's."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    everyone = [weight(9, r, shape=(size * 2, size * 3)) for r in range(size)]
    uneven = [1 + r for r in range(size)]
    ragged = [weight(10, r, shape=(n, 3)) for r, n in enumerate(uneven)]

    def check(function: Any, given: list[Tensor], expected: Any, **options: Any) -> None:
        """`expected` maps all ranks' inputs to this rank's output; the gradients of the sum over ranks follow from it."""
        inputs = [x.clone().requires_grad_() for x in given]
        outputs = [expected(inputs, r) for r in range(size)]
        grads = [weight(11, r, shape=tuple(y.shape)) for r, y in enumerate(outputs)]
        torch.autograd.backward(outputs, grads)
        x = given[rank].clone().requires_grad_()
        y = function(x, group=group, **options)
        y.backward(grads[rank])
        close(y, outputs[rank])
        close(x.grad, inputs[rank].grad)

    with on_a2a():
        from megatron.core.tensor_parallel import mappings

        before = calls(group)
        gather, scatter = (
            mappings.gather_from_sequence_parallel_region,
            mappings.reduce_scatter_to_sequence_parallel_region,
        )
        check(gather, everyone, lambda xs, r: torch.cat(xs))
        check(gather, ragged, lambda xs, r: torch.cat(xs), output_split_sizes=uneven)
        check(scatter, everyone, lambda xs, r: sum(xs).chunk(size)[r])
        whole = [weight(12, r, shape=(sum(uneven), 3)) for r in range(size)]
        check(scatter, whole, lambda xs, r: sum(xs).split(uneven)[r], input_split_sizes=uneven)
        check(mappings.all_gather_last_dim_from_tensor_parallel_region, everyone, lambda xs, r: torch.cat(xs, dim=-1))
        check(
            mappings.reduce_scatter_last_dim_to_tensor_parallel_region,
            everyone,
            lambda xs, r: sum(xs).chunk(size, dim=-1)[r],
        )
        sent = np.array([1 + (rank + r) % size for r in range(size)])  # NumPy, as Megatron's dispatcher has them
        rows = weight(13, rank, shape=(int(sent.sum()), 3)).requires_grad_()
        y = mappings.all_to_all(group, rows, sent, sent)  # symmetric: rank r sends here as many
        y.backward(y.detach())
        close(rows.grad, rows)  # it comes back where it was
        assert calls(group) == before + 14


@pytest.mark.ranks(2, 4)
def test_every_region_of_the_mappings(world: World) -> None:
    world.run(check_mappings, deadline_s=DEADLINE_S)
