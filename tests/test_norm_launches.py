"""How GPU calls of all_reduce_rms_norm are cut into launches: on every rank alike, within the staging, all rows once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from a2a.algorithms import rms_norm_cuda
from a2a.algorithms.rms_norm_cuda import Cut, slabs

STAGING = 64 << 20


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 72])
def test_the_staging_holds_what_the_kernels_address(world_size: int) -> None:
    staging = min(128 << 20, world_size * (32 << 20))
    packets, row_slab = slabs(staging, world_size)
    assert packets % 16 == row_slab % 4096 == 0
    words = 3 * world_size * 32 * 64 * 4
    assert words + 2 * world_size * packets + 3 * world_size * row_slab <= staging
    for row_bytes in (16, 1152, 14336, 65536):
        assert Cut.of(1, row_bytes, world_size, row_slab).rows == 1


@pytest.mark.parametrize("per_owner", [1, 2, 8])
@pytest.mark.parametrize("row_bytes", [16, 144, 5760, 16384, 65536])
def test_a_cut_fits_and_has_every_row(per_owner: int, row_bytes: int) -> None:
    slab = 2 << 20
    for rows in (1, 2, 31, 32, 33, 64, 1000, 100_000):
        cut = Cut.of(rows, row_bytes, per_owner, slab)
        assert 0 < cut.rows <= rows and 0 < cut.grid <= 32
        batches = -(-cut.rows // (cut.grid * cut.batch_rows))
        slot = -(-cut.batch_rows * (row_bytes + 4) // 16) * 16
        assert batches <= 64
        assert cut.grid * -(-batches // per_owner) * slot <= slab
        assert cut.rows == rows or cut.rows * row_bytes > slab // 3  # several launches, none of them small


class FakeModule:
    def __init__(self, name: str) -> None:
        self.name = name

    def function(self, name: str) -> int:
        return {"norm_flags": 1, "norm_rows": 2}[name]

    def constant(self, name: str) -> int:
        return 512 if "threads" in name else 1


class Launches:
    """Stands in for a2a.kernels.cuda and the C library; notes what is launched."""

    FAILED = -1

    def __init__(self) -> None:
        from a2a.kernels import cuda

        self.Call, self.seen = cuda.Call, list[Any]()

    def lib(self) -> Any:
        return SimpleNamespace(a2a_cuda_launch=self.launch)

    def module(self, name: str, target: Any, defines: dict[str, int]) -> FakeModule:
        assert {"WORLD", "HIDDEN", "DTYPE", "PACKET_BYTES", "ROW_BYTES"} <= set(defines)
        return FakeModule(name)

    def launch(self, address: int, stream: int, out: int, residual_out: int) -> int:
        call = self.Call.from_address(address)
        params = rms_norm_cuda.NormParams.from_address(call.params)
        self.seen.append((call.function, call.grid, params.rows, out, residual_out, params.input, params.residual))
        assert (params.weight, params.place.rank, params.digest) == (5, 1, 77)
        assert call.params_bytes == 104
        return 0


@pytest.mark.parametrize("two_shot", [False, True])
def test_every_row_is_in_one_launch(monkeypatch: pytest.MonkeyPatch, two_shot: bool) -> None:
    fake = Launches()
    place = SimpleNamespace(device=SimpleNamespace(index=0), arch="sm_90", context=0, base=0, window=1, host=0)
    transport = SimpleNamespace(
        place=place, norm_staging=SimpleNamespace(num_bytes=STAGING, address=4096), digest=lambda request: 77,
        last_stream=9,
    )  # fmt: skip
    comm: Any = SimpleNamespace(rank=1, world_size=2, timeout_s=1.0, require_transport=lambda op: transport)
    monkeypatch.setattr(rms_norm_cuda, "cuda", fake)
    monkeypatch.setattr(rms_norm_cuda, "_get_stream", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    kernels = rms_norm_cuda._Kernels(comm, 4096, torch.bfloat16, two_shot)
    for rows in (0, 1, 8, 64, 5000, 60_000):
        fake.seen.clear()
        assert kernels.prepare(3, rows, 1e-6)(1 << 20, 2 << 20, 3 << 20, 4 << 20, 5) == 0
        done = 0
        for function, _, count, out, residual_out, source, residual in fake.seen:
            at = done * 8192
            assert (out, residual_out, source, residual) == (
                at + (1 << 20),
                at + (2 << 20),
                at + (3 << 20),
                at + (4 << 20),
            )
            assert function == (1 if not two_shot and rows <= 8 else 2)
            done += count
        assert done == rows and len(fake.seen) >= 1
