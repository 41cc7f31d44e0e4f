"""Reductions on GPUs, as far as no GPU is needed: which algorithm is planned, and whether its launches fit its kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from a2a.algorithms import candidates
from a2a.algorithms.cuda_reduction_base import BLOCKS, CHANNELS, SLOTS, UNIT, CudaFlags, CudaReduction, Params, cut
from a2a.kernels import cuda_params
from a2a.plan import Request
from a2a.transport.cuda_vmm import CudaVmm

WORLDS = [1, 2, 3, 4, 8, 72]
OURS = [a for a in candidates() if isinstance(a, CudaReduction) and a.kernel in ("reduce_flags", "reduce_shares")]


def comm(world_size: int) -> Any:
    return SimpleNamespace(world_size=world_size, transport=CudaVmm)


def staging_bytes(world_size: int) -> int:
    """sizeof(Staging) of reduce.cuh, rounded up."""
    flag_bytes, chunk_bytes = cut(comm(world_size))
    slabs = 2 * 2 * 16 * 4 * -(-flag_bytes // UNIT)
    rings = 2 * CHANNELS * SLOTS * chunk_bytes
    return 64 + world_size * (4 + 3 * 8 * CHANNELS + slabs + rings)


@pytest.mark.parametrize("world_size", WORLDS)
def test_staging_fits_what_the_transport_has(world_size: int) -> None:
    flag_bytes, chunk_bytes = cut(comm(world_size))
    assert staging_bytes(world_size) <= CudaVmm.reduction_bytes(world_size)
    assert chunk_bytes >= 1024 and chunk_bytes % 1024 == 0
    assert flag_bytes >= 64 << 10


def test_parameters_lie_as_in_the_kernel() -> None:
    assert cuda_params.Place.text.offset == 36
    offsets = [getattr(Params, name).offset for name in ("place", "staging", "count", "shares", "digest", "about")]
    assert offsets == [16, 56, 64, 72, 88, 92]


@pytest.mark.parametrize("algorithm", OURS, ids=lambda a: f"{a.op}-{a.name}")
@pytest.mark.parametrize("world_size", WORLDS)
def test_launches_fit_the_kernels(algorithm: CudaReduction, world_size: int) -> None:
    flag_bytes, _ = cut(comm(world_size))
    for num_bytes in (0, 1, 47, 48, 4096, 100_003, 1 << 20, (1 << 30) + 2):
        request = Request(algorithm.op, torch.uint8, num_bytes * world_size, (("reduce_op", "sum"),))
        whole, share = algorithm.shares(request.num_bytes, world_size)
        assert whole <= share * world_size
        blocks, threads = algorithm.launch_of(whole, share)
        assert 1 <= blocks <= BLOCKS
        if isinstance(algorithm, CudaFlags):
            assert threads % 32 == 0 and threads <= 512
            if algorithm.too_large(request, comm(world_size)) is None:
                most = whole if algorithm.op == "all_reduce" and not algorithm.two_shot else share
                assert most <= flag_bytes
        else:
            assert threads == 1024


@pytest.mark.parametrize(
    ("op", "world_size"), [("all_reduce", 2), ("all_reduce", 8), ("all_gather", 2), ("reduce_scatter", 4)]
)
def test_small_tensors_take_fewer_steps_than_large_ones(op: str, world_size: int) -> None:
    names = [_planned(op, size, world_size) for size in (256, 4096, 1 << 18, 1 << 20, 1 << 24, 1 << 28)]
    assert names[0] == "flags" and names[-1] == "shares"
    order = ["flags", "two_shot_flags", "shares"]
    assert [order.index(name) for name in names] == sorted(order.index(name) for name in names)
    assert ("two_shot_flags" in names) == (op == "all_reduce" and world_size > 2)


def _planned(op: str, num_bytes: int, world_size: int) -> str:
    from a2a.cli.plan import _imagined
    from a2a.plan import choose

    request = Request(op, torch.bfloat16, num_bytes, (("reduce_op", "sum"),))
    return choose(request, _imagined(f"h200:1x{world_size}")).algorithm.name


def test_a_float8_reduction_goes_to_the_groups_engine() -> None:
    from a2a.cli.plan import _imagined
    from a2a.plan import choose

    comm = _imagined("h200:1x2")
    for dtype, op in ((torch.float8_e4m3fn, "sum"), (torch.float32, "product")):
        plan = choose(Request("all_reduce", dtype, 4096, (("reduce_op", op),)), comm)
        assert plan.algorithm.name == "c10d"
        assert "it reduces" in dict(plan.rejected)["shares"]
    assert choose(Request("all_gather", torch.float8_e4m3fn, 4096), comm).algorithm.name == "flags"
