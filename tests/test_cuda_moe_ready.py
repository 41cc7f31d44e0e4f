"""Ready flags of ExpertParallel on GPUs: a kernel of the test takes rows as they arrive and marks them as it makes them.

torchrun --nproc-per-node 2 -m pytest -m gpu tests/test_cuda_moe_ready.py
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from ctypes import c_uint32, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.kernels import cuda
from moe_cases import Case, with_options
from ready_maker import Maker, maker_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(1, 2, 4),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

BASE = Case(hidden=512, tokens=(300, 450, 0, 200), num_experts=16, top_k=4, ids="distinct", device="cuda")
READY = with_options(BASE, expert_alignment=16, max_rows=6000, ready_rows=16)
EXACT = with_options(BASE, ready_rows=100)  # which no expert's rows are a multiple of; the host waits for their number
SOURCE = Path(__file__).parent / "cuda_shim" / "make_rows.cu"


class MakeRows:
    """The kernel of cuda_shim/make_rows.cu, and a stream for it."""

    def __init__(self, ep: a2a.ExpertParallel, blocks: int = 8) -> None:
        place = ep.comm.require_transport("MakeRows").place
        module = cuda.Module("make_rows", place.arch, ep.ready.defines, SOURCE.read_text())
        function = module.function("make_rows")
        self._params = Maker()
        self._call = cuda.Call(
            function=function, context=place.context, params=ctypes.addressof(self._params),
            params_bytes=ctypes.sizeof(Maker), grid=blocks, block=256,
        )  # fmt: skip
        self.stream = torch.cuda.Stream()

    def launch(self, flags: Any, tensors: dict[str, torch.Tensor | None], marks: bool = True) -> None:
        maker = maker_of(flags, tensors, marks)
        ctypes.memmove(ctypes.addressof(self._params), ctypes.addressof(maker), ctypes.sizeof(maker))
        step = cuda.Step(cuda.Step.LAUNCH, 0, ctypes.addressof(self._call), 0, 0, (c_uint32 * 6)())
        cuda.check(
            cuda.lib().a2a_cuda_run((cuda.Step * 1)(step), 1, (c_void_p * 1)(self.stream.cuda_stream)), "make_rows"
        )


def ready_step(
    ep: a2a.ExpertParallel, kernel: MakeRows, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    late: int = 0, marks: bool = True, out: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Dispatch and combine with the kernel between them, whose experts hand on what they get; it is `late` by cycles."""
    rows, _, routing = ep.dispatch(x, ids, weights)
    ep.ready.start(kernel.stream)
    with torch.cuda.stream(kernel.stream):
        if late:
            torch.cuda._sleep(late)
        out = torch.empty_like(rows, requires_grad=False) if out is None else out
        seen = {
            "seen_rows": torch.empty_like(out, requires_grad=False),
            "seen_weights": torch.empty(len(out), device="cuda"),
        }
        tensors = {
            "rows": rows,
            "weights": routing.row_weights_R,
            "rank": routing.row_rank_R,
            "offsets": routing.offsets_E,
        }
        kernel.launch(ep.ready.params(routing), {**tensors, "out": out, **seen}, marks)
    y = ep.combine(out, routing, ready=True)
    torch.cuda.current_stream().wait_stream(kernel.stream)
    return {"y": y, "rows": rows, "weights": routing.row_weights_R, "end": routing.offsets_E[-1:], **seen}


def plain_step(
    ep: a2a.ExpertParallel, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    rows, _, routing = ep.dispatch(x, ids, weights)
    y = ep.combine(rows, routing)
    return {"y": y, "rows": rows, "weights": routing.row_weights_R, "end": routing.offsets_E[-1:]}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    end = int(expected["end"]) if expected["end"].numel() else 0
    assert torch.equal(got["y"], expected["y"])
    for mine, theirs in (("rows", "rows"), ("seen_rows", "rows"), ("weights", "weights"), ("seen_weights", "weights")):
        assert torch.equal(got[mine][:end], expected[theirs][:end]), mine


@contextlib.contextmanager
def opened(case: Case, chunk_bytes: int | None, timeout: float = 20.0) -> Any:
    from a2a.algorithms import moe_push_geometry

    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with pytest.MonkeyPatch.context() as patch:
        if chunk_bytes is not None:
            patch.setattr(moe_push_geometry, "CHUNK_BYTES", chunk_bytes)
        with (
            a2a.communicator(device="cuda", timeout=timeout) as comm,
            contextlib.closing(case.expert_parallel(comm=comm)) as ep,
        ):
            yield comm, ep, MakeRows(ep)


def inputs(case: Case, rank: int, seed: int) -> list[torch.Tensor]:
    tokens, _ = dataclasses.replace(case, seed=seed).inputs(rank)
    return [t.cuda() for t in tokens]


def eager(case: Case, chunk_bytes: int | None) -> None:
    with opened(case, chunk_bytes) as (comm, ep, kernel):
        for seed in range(12):
            given = inputs(case, comm.rank, seed)
            late = 2_000_000 if seed % 3 == comm.rank else 0
            got = ready_step(ep, kernel, *given, late=late)
            assert_same(got, plain_step(ep, *given))
        comm.check()


@pytest.mark.parametrize("chunk_bytes", [None, 64 << 10])
@pytest.mark.parametrize("case", [READY, EXACT], ids=["max_rows", "exact"])
def test_rows_are_there_when_their_flags_say_so(world: Any, case: Case, chunk_bytes: int | None) -> None:
    world.run(eager, case=case, chunk_bytes=chunk_bytes, deadline_s=120)


def captured(chunk_bytes: int | None) -> None:
    with opened(READY, chunk_bytes) as (comm, ep, kernel):
        x, ids, weights = inputs(READY, comm.rank, 0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ready_step(ep, kernel, x, ids, weights)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = ready_step(ep, kernel, x, ids, weights)
        for seed in range(20):
            for tensor, value in zip((x, ids, weights), inputs(READY, comm.rank, seed), strict=True):
                tensor.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            got = {name: tensor.clone() for name, tensor in static.items()}
            assert_same(got, plain_step(ep, x, ids, weights))
        comm.check()


@pytest.mark.parametrize("chunk_bytes", [None, 64 << 10])
def test_a_replayed_graph_finds_its_own_epochs(world: Any, chunk_bytes: int | None) -> None:
    world.run(captured, chunk_bytes=chunk_bytes, deadline_s=120)


def differentiated() -> None:
    with opened(READY, None) as (comm, ep, kernel):
        x, ids, weights = inputs(READY, comm.rank, 3)
        grad = torch.randn(x.shape, device="cuda").to(x.dtype)
        out = torch.zeros(6000, READY.hidden, dtype=READY.dtype, device="cuda", requires_grad=True)
        got = ready_step(ep, kernel, x.requires_grad_(), ids, weights.requires_grad_(), out=out)
        got["y"].backward(grad)
        of_weights, weights.grad = weights.grad, None
        assert of_weights is not None and out.grad is not None
        rows, _, routing = ep.dispatch(x.detach(), ids, weights)
        leaf = rows.detach().requires_grad_()
        ep.combine(leaf, routing).backward(grad)
        end = int(routing.offsets_E[-1])
        assert torch.equal(out.grad[:end], leaf.grad[:end]) and torch.equal(of_weights, weights.grad)
        comm.check()


@pytest.mark.ranks(2)
def test_gradients_are_those_without_flags(world: Any) -> None:
    world.run(differentiated)


def unmarked() -> None:
    with opened(READY, None, timeout=3.0) as (comm, ep, kernel):
        given = inputs(READY, comm.rank, 0)
        ready_step(ep, kernel, *given)
        torch.cuda.synchronize()
        comm.check()
        ready_step(ep, kernel, *given, marks=comm.rank != 0)
        torch.cuda.synchronize()
        dist.barrier()
        with pytest.raises(a2a.PeerTimeoutError) as raised:
            comm.check()
        assert raised.value.peer == 0 and int(comm.ok) == 0


@pytest.mark.ranks(1, 2)
def test_rows_that_nothing_marks_are_a_failure_and_the_gpu_goes_on(world: Any) -> None:
    world.run(unmarked, deadline_s=60)
