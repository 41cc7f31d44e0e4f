"""What ranks that asked for different things are told of each other's calls."""

from __future__ import annotations

import pytest
import torch

from a2a.kernels.cuda_requests import about, digest_of, told


def header(agree: str, what: int, count: int, addresses: int = 0) -> list[int]:
    """As `send_header` of reduce.cuh packs it."""
    first, second = addresses | count >> 32 << 48, addresses | what << 48
    low = 0xFFFFFFFF
    return [7, digest_of(agree), first & low, first >> 32, 7, count & low, second & low, second >> 32]


@pytest.mark.parametrize("count", [0, 4, 40_000, (1 << 40) + 3])
def test_a_reduction_is_told_by_its_header(count: int) -> None:
    ordinary = (1 << 48) - 1
    words = header("whatever", about(0, torch.bfloat16, 2), count, ordinary)
    assert told(words) == f"all_reduce(bfloat16, max, {count} elements)"
    words = header("whatever", about(2, torch.complex64, 4), count)
    assert told(words) == f"all_gather_into_tensor(complex64, {count} elements)"


def test_an_all_to_all_is_told_by_its_digest() -> None:
    assert told(header("all_to_all_single|float16", 0, 5)) == "all_to_all_single(float16)"
    assert told(header("moe", 0, 5)) is None
