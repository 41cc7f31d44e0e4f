"""How ExpertParallel on GPUs cuts its calls: the same on every rank, within its bounds, for any request."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from a2a.algorithms import moe_push_geometry, moe_push_order
from a2a.algorithms.moe_base import MoeSpec
from a2a.algorithms.moe_push import PushExchange
from a2a.algorithms.moe_push_geometry import Geometry

BASE = MoeSpec(
    num_experts=256, top_k=8, hidden=7168, max_tokens=4096, dtype=torch.bfloat16, expert_alignment=1, max_rows=None,
    overflow="raise", wire=None, rows="dtype", layout="expert", expert_to_rank=(0,) * 128 + (1,) * 128, wire_combine=None,
)  # fmt: skip
TOKENS = (0, 1, 31, 128, 4096, 8192, 100_000)


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
@pytest.mark.parametrize("wire_combine", [None, "float32"])
@pytest.mark.parametrize("num_sms", [None, 2, 24])
def test_slots_fit_and_hold_two_chunks(world_size: int, wire_combine: str | None, num_sms: int | None) -> None:
    for tokens, hidden in itertools.product(TOKENS, (8, 7168)):
        spec = dataclasses.replace(BASE, max_tokens=tokens, hidden=hidden, wire_combine=wire_combine, num_sms=num_sms)
        g = Geometry.of(spec, world_size)
        peers = max(world_size - 1, 1)
        slots = 2 * peers * g.ranges * g.ring * (g.slot_bytes + g.meta_bytes)
        assert slots < g.stage_bytes <= max(2 * slots, slots + (1 << 20))
        assert g.stage_bytes <= moe_push_geometry.MOST_STAGING_BYTES + (64 << 20)
        if world_size == 2:
            assert g.stage_bytes <= (256 << 20) + (1 << 20)
        assert g.chunk_tokens * g.chunks * g.ranges >= tokens
        assert g.ring >= 2 * g.chunk_tokens or g.ring >= g.chunk_tokens * g.chunks
        assert 1 <= g.ranges <= 32 and g.chunks >= 1
        assert g.summers <= moe_push_geometry.MOST_BLOCKS
        if num_sms is not None:
            assert g.senders + 1 <= num_sms and g.summers <= max(1, num_sms // 2) * moe_push_geometry.SUMS_A_SM


def groups(spec: MoeSpec, world_size: int, weights: tuple[int, ...]) -> tuple[Geometry, list[tuple[int, int]]]:
    exchange = PushExchange.__new__(PushExchange)
    exchange._spec, exchange._geometry = spec, Geometry.of(spec, world_size)
    return exchange._geometry, exchange._groups(weights)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("weights", [moe_push_order.SPREAD_GROUPS, moe_push_order.GATHER_GROUPS])
def test_kernels_share_out_all_chunks_in_order(tokens: int, weights: tuple[int, ...]) -> None:
    """And none waits for a chunk that is sent only when one of its own has been taken."""
    for world_size in (2, 8, 64):
        g, cut = groups(dataclasses.replace(BASE, max_tokens=tokens), world_size, weights)
        assert [chunk for first, end in cut for chunk in range(first, end)] == list(range(g.chunks))
        assert all(end - first <= max(1, g.ring // g.chunk_tokens) for first, end in cut)


def test_small_requests_are_one_chunk_and_large_ones_overlap() -> None:
    assert Geometry.of(dataclasses.replace(BASE, max_tokens=128), 2).chunks == 1
    assert Geometry.of(BASE, 2).chunks >= 4
