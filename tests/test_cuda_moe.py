"""ExpertParallel on GPUs gives the bits of the reference, on any number of ranks and of GPUs. Each rank takes GPU (rank mod
the number of GPUs).

torchrun --nproc-per-node 4 -m pytest -m gpu tests/test_cuda_moe.py
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from moe_cases import Case, Step, assert_answers, expected_step, full_step, run_steps_on_gpus, with_options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(1, 2, 3, 4, 8),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BASE = Case(device="cuda")


def assert_steps(world: Any, cases: list[Case]) -> None:
    """Run the cases on the ranks; every tensor of every rank has the bits of the reference."""
    of_ranks = world.run(run_steps_on_gpus, cases=cases, deadline_s=300)
    for number, case in enumerate(cases):
        try:
            assert_answers([answers[number] for answers in of_ranks], expected_step(case, world.size))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_dtypes_and_rows_of_any_multiple_of_16_bytes(world: Any) -> None:
    sizes = [(8, BF16), (24, F16), (2880, BF16), (3584, F16), (6144, BF16), (4, F32), (12, F32), (1204, F32)]
    assert_steps(world, [dataclasses.replace(BASE, hidden=h, dtype=d, tokens=(6, 4, 0, 9, 2)) for h, d in sizes])


def test_token_counts_differ_down_to_none(world: Any) -> None:
    counts = [(0, 4, 5), (0, 0, 6), (0,), (1, 0, 1), (1, 64, 17, 0)]
    assert_steps(world, [with_options(dataclasses.replace(BASE, tokens=t), max_tokens=64) for t in counts])


def test_routings(world: Any) -> None:
    cases = [dataclasses.replace(BASE, ids=ids, tokens=(40, 1, 33, 64)) for ids in ("any", "one", "none", "distinct")]
    cases += [dataclasses.replace(BASE, top_k=k, num_experts=40, ids="distinct", hidden=16) for k in (1, 2, 8, 32)]
    cases += [dataclasses.replace(BASE, top_k=32, num_experts=3, hidden=16)]
    cases += [dataclasses.replace(BASE, num_experts=1), dataclasses.replace(BASE, num_experts=300, top_k=6)]
    assert_steps(world, cases)


def test_weights_of_any_dtype_or_none(world: Any) -> None:
    cases = [dataclasses.replace(BASE, weights=w) for w in (None, BF16, F32, torch.float64)]
    assert_steps(world, [*cases, dataclasses.replace(BASE, apply_weights=False)])


def test_alignment_max_rows_layout_and_owners(world: Any) -> None:
    owners = tuple(e * 5 % world.size for e in range(7))
    options: list[dict[str, Any]] = [
        {"expert_alignment": 8}, {"expert_alignment": 128, "max_rows": 2000}, {"max_rows": 500},
        {"max_rows": 11, "overflow": "drop"}, {"max_rows": 0, "overflow": "drop"}, {"expert_to_rank": owners},
        {"wire_combine": "float32"}, {"wire_combine": "float32", "max_rows": 9, "overflow": "drop"},
    ]  # fmt: skip
    cases = [with_options(BASE, **o) for o in options]
    # Two rows a token at most: torch adds up a gathered token's gradients in any order.
    two = dataclasses.replace(BASE, top_k=2)
    cases += [with_options(two, layout="compact")]
    cases += [with_options(two, layout="compact", expert_alignment=4, max_rows=300)]
    assert_steps(world, cases)


@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_wire_formats(world: Any, wire: str) -> None:
    cases = [
        with_options(dataclasses.replace(BASE, hidden=hidden, dtype=dtype, scale=scale), wire=wire)
        for hidden, dtype, scale in ((40, BF16, 1.0), (2880, BF16, 100.0), (328, F16, 0.01), (260, F32, 1.0))
    ]
    assert_steps(world, [*cases, with_options(dataclasses.replace(cases[0], top_k=2), layout="compact")])


def test_many_chunks_and_short_rings(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are larger than the slots: chunks wait until earlier ones are consumed."""
    case = dataclasses.replace(BASE, hidden=256, tokens=(700, 900, 0, 333), ids="distinct", num_experts=16)
    of_ranks = world.run(run_in_small_rings, case=case, deadline_s=300)
    assert_answers(of_ranks, expected_step(case, world.size))


def run_in_small_rings(case: Case) -> Any:
    from a2a.algorithms import moe_push_geometry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_push_geometry, "CHUNK_BYTES", 60 << 10)
        patch.setattr(moe_push_geometry, "STAGING_BYTES", 128 << 10)
        return run_steps_on_gpus([case])[0]


def captured() -> None:
    """A whole step in a graph, replayed with new routing each time."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    case = with_options(dataclasses.replace(BASE, hidden=64, tokens=(30, 50), weights=F32), max_rows=400)
    with (
        a2a.communicator(device="cuda", timeout=20.0) as comm,
        contextlib.closing(case.expert_parallel(comm=comm)) as ep,
    ):
        tokens, _ = case.inputs(comm.rank)
        x, ids, weights = (t.cuda() for t in tokens)

        def step() -> tuple[torch.Tensor, ...]:
            rows, _, routing = ep.dispatch(x, ids, weights)
            y = ep.combine(rows, routing)
            grads, grad_weights = ep.combine_backward(y, rows, routing)
            return rows, y, *ep.dispatch_backward(grads, routing, grad_weights), routing.offsets_E

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = step()
        for seed in range(20):
            new, _ = dataclasses.replace(case, seed=seed).inputs(comm.rank)
            for tensor, value in zip((x, ids, weights), new, strict=True):
                tensor.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            got = [t.clone() for t in static]
            fresh = step()
            end = int(fresh[-1][-1]) if len(fresh[-1]) else 0
            assert torch.equal(got[0][:end], fresh[0][:end])
            for one, other in zip(got[1:], fresh[1:], strict=True):
                assert torch.equal(one, other)
        comm.check()


@pytest.mark.ranks(2, 4)
def test_a_captured_step_takes_new_routing(world: Any) -> None:
    world.run(captured, deadline_s=120)


def again(count: int) -> None:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    case = dataclasses.replace(BASE, hidden=512, tokens=(300, 0, 450), num_experts=32, top_k=4)
    case = with_options(case, max_rows=8192)
    with (
        a2a.communicator(device="cuda", timeout=20.0) as comm,
        contextlib.closing(case.expert_parallel(comm=comm)) as ep,
    ):
        generator = torch.Generator(device="cuda").manual_seed(comm.rank)
        errors = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(count):
            tokens = int(torch.randint(0, 451, (1,)).item()) if number % 7 else 0
            x = torch.randint(-8, 9, (tokens, 512), generator=generator, device="cuda").to(BF16)
            ids = torch.randint(-1, 32 if number % 3 else 3, (tokens, 4), generator=generator, device="cuda")
            rows, _, routing = ep.dispatch(x, ids)
            y = ep.combine(rows, routing)
            errors += (y != x * (ids >= 0).sum(1, keepdim=True)).sum()  # whole numbers: exact
        comm.check()
        assert int(errors) == 0


def test_again_and_again_with_fresh_routing(world: Any) -> None:
    world.run(again, count=300 if world.size <= torch.cuda.device_count() else 40, deadline_s=300)


def bad_ids() -> str:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with (
        a2a.communicator(device="cuda", timeout=5.0) as comm,
        contextlib.closing(BASE.expert_parallel(comm=comm)) as ep,
    ):
        x, ids = (
            torch.zeros(4, BASE.hidden, dtype=BF16, device="cuda"),
            torch.zeros(4, 3, dtype=torch.int64, device="cuda"),
        )
        ids[2, 1] = 7 if comm.rank == 1 else 0
        with contextlib.suppress(a2a.MismatchError):
            ep.dispatch(x, ids)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        with pytest.raises(a2a.MismatchError) as raised:
            comm.check()
        return str(raised.value)


@pytest.mark.ranks(2)
def test_an_id_out_of_range_is_a_failure_on_all_ranks(world: Any) -> None:
    for message in world.run(bad_ids):
        assert "rank 1" in message and "expert id" in message


def overflow() -> None:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    case = with_options(BASE, max_rows=3)
    with (
        a2a.communicator(device="cuda", timeout=5.0) as comm,
        contextlib.closing(case.expert_parallel(comm=comm)) as ep,
    ):
        step = Step(case, ep)
        with contextlib.suppress(a2a.RowOverflowError):  # the other rank's, if it is there already
            rows, _, _ = ep.dispatch(step.x_TH, step.ids_TK)
            assert rows.shape[0] == 3
        torch.cuda.synchronize()
        dist.barrier()
        assert int(comm.ok) == 0
        with pytest.raises(a2a.RowOverflowError, match="max_rows"):
            comm.check()


@pytest.mark.ranks(2)
def test_more_rows_than_max_rows_is_a_failure_on_all_ranks(world: Any) -> None:
    world.run(overflow)


def a_late_peer() -> None:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    limit = 1.0 if dist.get_world_size() <= torch.cuda.device_count() else 8.0  # ranks that share a GPU take turns
    comm = a2a.communicator(device="cuda", timeout=limit)
    case = with_options(BASE, max_rows=500)
    ep = case.expert_parallel(comm=comm)
    full_step(Step(case, ep))
    if comm.rank == 0:
        step = Step(case, ep)
        step.ep.dispatch(step.x_TH, step.ids_TK)
        torch.cuda.synchronize()
        with pytest.raises(a2a.PeerTimeoutError, match=rf"rank 0 waited {limit:.1f} s for rank 1"):
            comm.check()
    dist.barrier()
    comm.close()
    run_steps_on_gpus([BASE])  # the process and its GPU go on


@pytest.mark.ranks(2)
def test_a_peer_that_does_not_come_is_named_and_the_gpu_goes_on(world: Any) -> None:
    world.run(a_late_peer, deadline_s=60)
