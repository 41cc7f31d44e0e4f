"""all_reduce_rms_norm on GPUs, and reductions through the software switch. Each rank takes GPU (rank mod their number).

torchrun --nproc-per-node 4 -m pytest -m gpu tests/test_cuda_fused.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.plan import Request, choose
from exchange_cases import assert_same_bits
from failure_cases import heard
from norm_cases import DTYPES, Rows, rows
from test_reductions import in_rank_order, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(2, 3, 4, 8),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

EPS = 1e-5
# One row and many, by packets and in batches, of one vector, of an odd number of them, of several a thread.
SHAPES = [(0, 64), (1, 8), (3, 72), (1, 8192), (4, 8192), (7, 2880), (33, 264), (100, 5120), (64, 16384), (3000, 1024)]
LARGE = [(4096, 7168)]  # several launches


@contextmanager
def communicator(timeout: float = 20.0, **options: Any) -> Iterator[a2a.Communicator]:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with a2a.communicator(device="cuda", timeout=timeout, **options) as comm:
        yield comm


def on_gpu(case: Rows) -> Rows:
    return Rows(*(tensor.cuda() for tensor in case))


def check(comm: Any, case: Rows, way: str) -> None:
    source = comm.empty(case.input.shape, case.input.dtype) if way == "symmetric" else torch.empty_like(case.input)
    source.copy_(case.input)
    residual = case.residual.clone()
    outs: dict[str, Any] = {
        "in place": {"out": source, "residual_out": residual},
        "crossed": {"out": residual, "residual_out": source},
    }.get(way, {})
    out, residual_out = a2a.all_reduce_rms_norm(source, residual, case.weight, EPS, comm, **outs)
    assert_same_bits(residual_out.cpu(), case.residual_out.cpu())
    assert_same_bits(out.cpu(), case.out.cpu())


def every_shape(algorithm: str) -> None:
    with pytest.MonkeyPatch.context() as patch, communicator() as comm:
        patch.setenv("A2A_ALGORITHM", f"all_reduce_rms_norm={algorithm}")
        ways = itertools.cycle(["new", "symmetric", "in place", "crossed"])
        for dtype, shape in itertools.product(DTYPES, SHAPES):
            case = on_gpu(rows(comm.rank, comm.world_size, shape, dtype, EPS))
            for _ in range(2):
                check(comm, case, next(ways))
        for shape in LARGE:
            check(comm, on_gpu(rows(comm.rank, comm.world_size, shape, torch.bfloat16, EPS)), "new")
        comm.check()


@pytest.mark.parametrize("algorithm", ["push_one_shot", "push_two_shot"])
def test_every_shape_has_the_bits_of_the_cpu(world: Any, algorithm: str) -> None:
    world.run(every_shape, algorithm=algorithm, deadline_s=600)


def misaligned_and_long() -> None:
    with communicator() as comm:
        case = on_gpu(rows(comm.rank, comm.world_size, (5, 64), torch.bfloat16, EPS))
        whole = [torch.empty(5 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(5, 64) for _ in range(4)]
        for _ in range(2):
            whole[0].copy_(case.input), whole[1].copy_(case.residual)
            weight = torch.empty(65, dtype=torch.bfloat16, device="cuda")[1:].copy_(case.weight)
            out, residual_out = a2a.all_reduce_rms_norm(
                *whole[:2], weight, EPS, comm, out=whole[2], residual_out=whole[3]
            )
            assert out is whole[2] and residual_out is whole[3]
            assert_same_bits(out, case.out)
            assert_same_bits(residual_out, case.residual_out)


def test_tensors_may_lie_anywhere(world: Any) -> None:
    world.run(misaligned_and_long)


def again(calls: int) -> None:
    """New data in the same memory, few rows and many, with nothing between the calls, and in a CUDA graph."""
    with communicator() as comm:
        shapes = [(2, 4096), (50, 4096)]
        cases = [
            [on_gpu(rows(comm.rank, comm.world_size, s, torch.bfloat16, EPS, i)) for i in range(3)] for s in shapes
        ]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        memory = [comm.empty(*shape, dtype=torch.bfloat16) for shape in shapes]
        for number in range(calls):
            kind = number % 2
            case = cases[kind][number % 3]
            out, residual_out = a2a.all_reduce_rms_norm(
                memory[kind].copy_(case.input), case.residual, case.weight, EPS, comm
            )
            memory[kind].fill_(float("nan"))
            wrong += (out != case.out).sum() + (residual_out != case.residual_out).sum()
        assert int(wrong) == 0
        graph, case = torch.cuda.CUDAGraph(), cases[1][0]
        source, residual = case.input.clone(), case.residual.clone()
        with torch.cuda.graph(graph):
            for _ in range(3):
                outs = a2a.all_reduce_rms_norm(source, residual, case.weight, EPS, comm)
        for index, other in enumerate(cases[1]):
            source.copy_(other.input), residual.copy_(other.residual)
            graph.replay()
            # the weights are those of the captured case
            expected = rows(comm.rank, comm.world_size, shapes[1], torch.bfloat16, EPS, index)
            assert_same_bits(outs[1].cpu(), expected.residual_out)
        comm.check()


def test_calls_follow_each_other_and_are_captured(world: Any) -> None:
    world.run(again, calls=200, deadline_s=300)


def differs(name: str) -> None:
    comm = a2a.communicator(device=f"cuda:{dist.get_rank() % torch.cuda.device_count()}", timeout=10)
    torch.cuda.set_device(comm.device)
    ones = torch.ones(4, 64, device="cuda"), torch.ones(4, 64, device="cuda"), torch.ones(64, device="cuda")
    a2a.all_reduce_rms_norm(*ones, EPS, comm)
    others: dict[str, Any] = {
        "eps": lambda: a2a.all_reduce_rms_norm(*ones, 0.5, comm),
        "rows": lambda: a2a.all_reduce_rms_norm(ones[0][:3], ones[1][:3], ones[2], EPS, comm),
        "an all-reduce": lambda: a2a.all_reduce(ones[0], group=comm),
    }
    if comm.rank != 1:
        a2a.all_reduce_rms_norm(*ones, EPS, comm)
    elif name == "refused":
        with pytest.raises(ValueError, match="weight has shape"):
            a2a.all_reduce_rms_norm(*ones[:2], ones[0], EPS, comm)
    else:
        others[name]()
    torch.cuda.synchronize()
    with pytest.raises(a2a.MismatchError):
        heard(comm)
    comm.close()


@pytest.mark.parametrize("name", ["eps", "rows", "an all-reduce", "refused"])
def test_ranks_that_ask_for_something_else_are_found_out(world: Any, name: str) -> None:
    world.run(differs, name=name, deadline_s=120)


# ---- the software switch


def switched() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A2A_SOFTWARE_SWITCH", "1")
        patch.setenv("A2A_ALGORITHM", "all_reduce=multimem,reduce_scatter=multimem,all_gather=multimem")
        with communicator() as comm:
            world, rank = comm.world_size, comm.rank
            for dtype, count in itertools.product(
                (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64), (1, 7, 1000, 70_001, 900_001)
            ):
                terms = [values(r, count * world, dtype) for r in range(world)]
                expected = in_rank_order(terms, dist.ReduceOp.SUM)
                tensor = terms[rank].cuda()
                a2a.all_reduce(tensor, group=comm)
                assert_same_bits(tensor.cpu(), expected)
                share = torch.empty(count, dtype=dtype, device="cuda")
                a2a.reduce_scatter_tensor(share, terms[rank].cuda(), group=comm)
                assert_same_bits(share.cpu(), expected[rank * count : (rank + 1) * count])
                whole = torch.empty(count * world, dtype=dtype, device="cuda")
                a2a.all_gather_into_tensor(whole, terms[rank][:count].cuda(), group=comm)
                assert_same_bits(whole.cpu(), torch.cat([term[:count] for term in terms]))
            assert {plan.algorithm.name for plan in comm.plans.values()} == {"multimem"}
            comm.check()


def test_the_software_switch_passes_its_test_and_adds_in_rank_order(world: Any) -> None:
    world.run(switched, deadline_s=300)


def not_switched() -> None:
    with communicator(deterministic=False) as comm:
        asked = Request("all_reduce", torch.bfloat16, 1 << 20, (("reduce_op", "sum"),))
        plan = choose(asked, comm)
        if plan.algorithm.name != "multimem":
            assert "multicast" in dict(plan.rejected)["multimem"] or "modelled" in dict(plan.rejected)["multimem"]
    with communicator() as comm:
        assert "deterministic=False" in dict(choose(asked, comm).rejected)["multimem"]


def test_without_multicast_the_switch_is_refused_with_the_reason(world: Any) -> None:
    world.run(not_switched)
