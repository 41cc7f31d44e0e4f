"""What Megatron's dispatchers get of the exchange: layouts, budgets, formats. Needs no Megatron: the exchange asks for
attributes of a config and for two functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from a2a.integrations.megatron.dispatchers import exchange_class, why_stepwise
from a2a.integrations.megatron.exchange import Exchanges, ExpertExchange, Settings, expert_ids, wire_format
from pool import World

HIDDEN, EXPERTS, TOP_K = 64, 4, 2


def exchange(max_tokens: int | None = None, wire: str | None = None, **changes: Any) -> ExpertExchange:
    """On the default group, with as much of Megatron's config as it looks at."""
    settings = Settings(max_tokens, wire, None, align_size=lambda _: 16, capacity=lambda **_: 3)
    config = SimpleNamespace(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_pad_expert_input_to_capacity=False,
        moe_expert_capacity_factor=None,
        variable_seq_lengths=True,
        fp8=None,
        fp8_recipe=None,
    )
    vars(config).update(changes)
    made = exchange_class(settings, Exchanges())
    return made(dist.group.WORLD, EXPERTS // dist.get_world_size(), EXPERTS, config)


def routed(tokens: int, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, map, probabilities): every token to the same experts, with probabilities 2, 3, ... in their order."""
    x = (100.0 * dist.get_rank() + torch.arange(float(tokens)))[:, None].expand(-1, HIDDEN).clone().requires_grad_()
    probs = torch.zeros(tokens, EXPERTS)
    for weight, expert in enumerate(sorted(ids), start=2):
        probs[:, expert] = weight
    return x, probs > 0, probs.requires_grad_()


def there_and_back(dispatcher: ExpertExchange, tokens: int, ids: list[int]) -> None:
    """Experts multiply a row by its probability and their number + 1."""
    x, routing_map, probs = routed(tokens, ids)
    dispatcher.setup_metadata(routing_map, probs)
    rows = dispatcher.dispatch(x)
    rows, row_probs = dispatcher.get_permuted_hidden_states_by_experts(rows)
    counts = dispatcher.get_number_of_tokens_per_expert()
    assert row_probs is not None and counts is not None and int(counts.sum()) == len(rows)
    numbers = torch.arange(EXPERTS).chunk(dist.get_world_size())[dist.get_rank()].repeat_interleave(counts) + 1
    out = rows * (numbers * row_probs)[:, None]
    y = dispatcher.combine(dispatcher.get_restored_hidden_states_by_experts(out))
    factor = float(sum(weight * (expert + 1) for weight, expert in enumerate(sorted(ids), start=2)))
    assert torch.equal(y, x.detach() * factor)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, factor))
    expected = torch.where(routing_map, x.detach()[:, :1] * HIDDEN * (torch.arange(EXPERTS) + 1), 0)
    assert torch.equal(probs.grad, expected)


def check_counts() -> None:
    dispatcher, rank = exchange(), dist.get_rank()
    for mine, ids in ((3, [0, 3]), (0 if rank else 5, [1, 2]), (0, [0, 1]), (7, [2]), (4, [])):
        there_and_back(dispatcher, mine, ids)
    padded = exchange(fp8="e4m3")  # each expert's rows a multiple of 16
    there_and_back(padded, 3, [0, 3])
    assert padded.tokens_per_expert is not None
    assert padded.tokens_per_expert.tolist() == [16, 0] if rank == 0 else [0, 16]


def test_any_number_of_tokens_and_experts(world: World) -> None:
    world.run(check_counts)


def check_budget() -> None:
    """20 rows for rank 0's first expert and a budget of 12: eight are dropped and the flag is up until it is put down."""
    dispatcher = exchange(moe_expert_rank_capacity_factor=0.75, variable_seq_lengths=False)
    for ids, over in (([0], True), ([1], True), ([], True)):
        x, routing_map, probs = routed(10, ids)
        dispatcher.setup_metadata(routing_map, probs)
        rows = dispatcher.dispatch(x)
        dispatcher.combine(rows)
        assert len(rows) == 16, "20 x 0.75, rounded up to what the experts' kernels take"
        assert dispatcher.tokens_per_expert is not None
        assert int(dispatcher.tokens_per_expert.sum()) == (16 if ids and dist.get_rank() == 0 else 0)
        assert dispatcher.over_budget.item() == (over and dist.get_rank() == 0)
    dispatcher.over_budget.fill_(0)
    x, routing_map, probs = routed(5, [0, 3])
    dispatcher.setup_metadata(routing_map, probs)
    dispatcher.combine(dispatcher.dispatch(x))
    assert not dispatcher.over_budget.item()


def test_rows_over_the_budget_are_dropped_and_told(world: World) -> None:
    world.run(check_budget)


def check_wire() -> None:
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    _, routing_map, probs = routed(6, [0, 3])
    got = {}
    for wire in (None, "mxfp8", "fp8"):
        dispatcher = exchange(wire=wire)
        dispatcher.setup_metadata(routing_map, probs)
        got[wire] = dispatcher.dispatch(x).detach().clone()
        dispatcher.combine(got[wire])
    for wire in ("mxfp8", "fp8"):
        assert not torch.equal(got[wire], got[None])
        torch.testing.assert_close(got[wire], got[None], rtol=2**-4, atol=0.01)  # e4m3: 3 bits
    assert not torch.equal(got["mxfp8"], got["fp8"])


def test_tokens_travel_in_the_format_that_was_asked_for(world: World) -> None:
    world.run(check_wire)


def check_most() -> None:
    dispatcher = exchange(max_tokens=4)
    there_and_back(dispatcher, 4, [0, 1])
    x, routing_map, probs = routed(5, [0])
    dispatcher.setup_metadata(routing_map, probs)
    with pytest.raises(ValueError, match=r"5 tokens on rank [01], above max_tokens=4"):
        dispatcher.dispatch(x)
    there_and_back(dispatcher, 3, [0, 1])


def test_more_tokens_than_was_said_is_an_error(world: World) -> None:
    world.run(check_most)


def test_ids_of_a_map() -> None:
    chosen = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    assert expert_ids(chosen, 2).tolist() == [[1, 2], [0, 3], [2, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("asked", "fp8", "recipe", "wire"),
    [
        (None, "hybrid", "mxfp8", None),
        ("fp8", None, None, "fp8"),
        ("recipe", "e4m3", "mxfp8", "mxfp8"),
        ("recipe", "e4m3", "blockwise", "fp8"),
        ("recipe", "hybrid", "delayed", None),
        ("recipe", None, "mxfp8", None),
    ],
)
def test_recipes_have_formats(asked: str | None, fp8: str | None, recipe: str | None, wire: str | None) -> None:
    assert wire_format(asked, SimpleNamespace(fp8=fp8, fp8_recipe=recipe)) == wire


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"overlap_moe_expert_parallel_comm": True}, "1F1B"),
        ({"moe_shared_expert_overlap": True}, "shared experts"),
        ({"moe_router_padding_for_quantization": True}, "pads its map"),
        ({"cuda_graph_impl": "transformer_engine"}, "CUDA graphs"),
    ],
)
def test_why_megatrons_own_steps(changes: dict[str, Any], reason: str | None) -> None:
    said = why_stepwise(SimpleNamespace(**changes))
    assert said is None if reason is None else reason in str(said)
