"""all_reduce_rms_norm on CPUs: the documented bits at every size, in every memory, and what goes wrong."""

from __future__ import annotations

import itertools
import random
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import a2a
from a2a.algorithms.rms_norm_base import rms_norm
from a2a.kernels import cpu
from deadlines import soon
from exchange_cases import assert_same_bits
from failure_cases import NOTICED_S
from norm_cases import DTYPES, reference, rows, spread

EPS = 1e-5
# Rows of no vector, of a block of 256 columns or several; tensors around the switch between algorithms, and of many units.
SHAPES = [
    *((0, 5), (1, 1), (3, 2), (2, 7), (5, 33), (4, 255), (4, 256), (3, 257), (2, 2, 300), (7,), (2, 1023), (9, 4096)),
    *((64, 1000), (3, 16384), (1, 16384), (130, 2880), (41, 8192)),
]
WAYS = ["new", "in place", "crossed", "given"]


def call(way: str, comm: Any, case: Any, eps: float, symmetric: bool = False) -> None:
    """One call, checked. `way`: where its results go."""
    source = comm.empty(case.input.shape, case.input.dtype) if symmetric else torch.empty_like(case.input)
    source.copy_(case.input)
    residual = case.residual.clone()
    outs: dict[str, Any] = {
        "new": {},
        "in place": {"out": source, "residual_out": residual},
        "crossed": {"out": residual, "residual_out": source},
        "given": {"out": torch.empty_like(source), "residual_out": torch.empty_like(source)},
    }[way]
    out, residual_out = a2a.all_reduce_rms_norm(source, residual, case.weight, eps, comm, **outs)
    assert_same_bits(residual_out, case.residual_out)
    assert_same_bits(out, case.out)
    for name, result in (("out", out), ("residual_out", residual_out)):
        assert outs.get(name, result) is result
    if way in ("new", "given"):
        assert_same_bits(source, case.input)
        assert_same_bits(residual, case.residual)


def shapes(dtype: torch.dtype, kind: str) -> None:
    with a2a.communicator() as comm:
        ways = itertools.cycle(WAYS)
        for shape in SHAPES:
            case = rows(comm.rank, comm.world_size, shape, dtype, EPS)
            symmetric = kind == "symmetric" or (kind == "mixed" and comm.rank % 2 == 0)
            shared = comm.empty(shape, dtype)  # collective, on every rank
            del shared
            for way in (next(ways), next(ways)):
                if kind == "ordinary":
                    call(way, comm, case, EPS)
                else:
                    whole = comm.empty(shape, dtype)
                    source = whole if symmetric else torch.empty_like(case.input)
                    source.copy_(case.input)
                    out, residual_out = a2a.all_reduce_rms_norm(source, case.residual, case.weight, EPS, comm)
                    assert_same_bits(residual_out, case.residual_out)
                    assert_same_bits(out, case.out)
        names = {plan.algorithm.name for plan in comm.plans.values()}
        assert names == ({"one_shot", "two_shot"} if comm.world_size > 1 else names)
        assert comm.stats()["handed_over"] == {}


@pytest.mark.ranks(1, 2, 3, 5)
@pytest.mark.parametrize("kind", ["ordinary", "symmetric", "mixed"])
def test_every_shape_has_the_documented_bits(world: Any, kind: str) -> None:
    world.run(shapes, dtype=torch.bfloat16, kind=kind)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_dtype_has_the_documented_bits(world: Any, dtype: torch.dtype) -> None:
    world.run(shapes, dtype=dtype, kind="ordinary")


def drawn(shape: tuple[int, ...], dtype: torch.dtype, eps: float, way: str, algorithm: str, salt: int) -> None:
    with a2a.communicator() as comm, pytest.MonkeyPatch.context() as patch:
        patch.setenv("A2A_ALGORITHM", f"all_reduce_rms_norm={algorithm}")
        case = rows(comm.rank, comm.world_size, shape, dtype, eps, salt)
        for _ in range(2):  # the second takes the fast way
            call(way, comm, case, eps)


@pytest.mark.ranks(2, 3)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 700)) | st.tuples(st.integers(1, 6), st.integers(1, 4096)),
    dtype=st.sampled_from(DTYPES),
    eps=st.sampled_from([0.0, 1e-6, 0.5]),
    way=st.sampled_from(WAYS),
    algorithm=st.sampled_from(["one_shot", "two_shot"]),
    salt=st.integers(0, 3),
)
def test_any_shape_has_the_documented_bits(
    world: Any, shape: tuple[int, int], dtype: torch.dtype, eps: float, way: str, algorithm: str, salt: int
) -> None:
    if algorithm == "one_shot" and shape[0] * shape[1] * dtype.itemsize > 64 << 10:
        algorithm = "two_shot"
    world.run(drawn, shape=shape, dtype=dtype, eps=eps, way=way, algorithm=algorithm, salt=salt)


def with_isa(name: str) -> None:
    before = cpu.isa()
    assert cpu.lib().a2a_select_isa(name.encode())
    try:
        with a2a.communicator() as comm:
            for dtype, shape in itertools.product(DTYPES, [(3, 1003), (40, 2048), (5, 16384)]):
                call("new", comm, rows(comm.rank, comm.world_size, shape, dtype, EPS), EPS)
    finally:
        cpu.lib().a2a_select_isa(before.encode())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(world: Any, isa: str) -> None:
    before = cpu.isa()
    if not cpu.lib().a2a_select_isa(isa.encode()):
        pytest.skip(f"this processor or build has no {isa}")
    cpu.lib().a2a_select_isa(before.encode())
    world.run(with_isa, name=isa)


def unfused(dtype: torch.dtype) -> None:
    """The bits of all_reduce and the documented formula; and torch's rms_norm, as near as float32 is."""
    with a2a.communicator() as comm:
        case = rows(comm.rank, comm.world_size, (70, 1500), dtype, EPS)
        summed = case.input.clone()
        a2a.all_reduce(summed, group=comm)
        out, residual_out = rms_norm(summed, case.residual, case.weight, EPS)
        assert_same_bits(residual_out, case.residual_out)
        assert_same_bits(out, case.out)
        theirs = torch.nn.functional.rms_norm(residual_out.double(), (1500,), case.weight.double(), EPS)
        step, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        # the rounding to dtype, and in float32: the tree's log2(1500) levels, and five operations
        bound = theirs.abs() * (step + 16 * torch.finfo(torch.float32).eps) + least * step
        assert torch.all((out.double() - theirs).abs() <= bound)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_all_reduce_then_the_formula_bit_for_bit(world: Any, dtype: torch.dtype) -> None:
    world.run(unfused, dtype=dtype)


def again(calls: int, jitter_ms: float) -> None:
    """New data in the same memory, small and large, with nothing between the calls."""
    rng, shared = random.Random(dist.get_rank()), random.Random(7)
    with a2a.communicator() as comm:
        memory = comm.empty(60, 1024, dtype=torch.bfloat16)
        residual = torch.empty(60, 1024, dtype=torch.bfloat16)
        cases = {
            n: [rows(comm.rank, comm.world_size, (n, 1024), torch.bfloat16, EPS, i) for i in range(3)]
            for n in (1, 9, 60)
        }
        for number in range(calls):
            case = cases[shared.choice([1, 9, 60])][number % 3]
            count = len(case.input)
            if jitter_ms and rng.random() < 0.5:
                time.sleep(rng.random() * jitter_ms / 1000)
            source, added = memory[:count].copy_(case.input), residual[:count].copy_(case.residual)
            out, _ = a2a.all_reduce_rms_norm(source, added, case.weight, EPS, comm, residual_out=added)
            source.fill_(float("nan"))
            assert torch.equal(out, case.out), f"call {number}"
            assert torch.equal(added, case.residual_out), f"call {number}"


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("jitter_ms", [0.0, 1.0], ids=["again", "jitter"])
def test_calls_follow_each_other_with_new_data(world: Any, jitter_ms: float) -> None:
    world.run(again, calls=60, jitter_ms=jitter_ms)


def other_memory() -> None:
    """Strides, overlaps, negatives, Parameters and versions."""
    with a2a.communicator() as comm:
        case = rows(comm.rank, comm.world_size, (6, 8), torch.float32, EPS)

        def check(input: Any, residual: Any, weight: Any, **outs: Any) -> None:
            for _ in range(2):
                got = a2a.all_reduce_rms_norm(input.clone() if outs else input, residual, weight, EPS, comm, **outs)
                assert_same_bits(got[0], case.out)
                assert_same_bits(got[1], case.residual_out)

        check(
            case.input.t().contiguous().t(), case.residual.t().contiguous().t(), case.weight.repeat_interleave(2)[::2]
        )
        check(torch._neg_view(-case.input), torch._neg_view(-case.residual), case.weight)
        with torch.no_grad():
            check(case.input, case.residual, torch.nn.Parameter(case.weight.clone()))
        with torch.inference_mode():
            check(case.input, case.residual, torch.nn.Parameter(case.weight.clone()))
        whole = torch.empty(60)
        near = whole[5:53].view(6, 8)
        overlapping = whole[:48].view(6, 8).copy_(case.residual)
        out, residual_out = a2a.all_reduce_rms_norm(case.input, overlapping, case.weight, EPS, comm, residual_out=near)
        assert residual_out is near
        assert_same_bits(near, case.residual_out)
        assert_same_bits(out, case.out)
        for _ in range(2):
            source, version = case.input.clone(), case.residual._version
            kept = case.residual.clone()
            before = kept._version, source._version
            a2a.all_reduce_rms_norm(source, kept, case.weight, EPS, comm, out=source, residual_out=kept)
            assert kept._version > before[0] and source._version > before[1]
            assert case.residual._version == version


@pytest.mark.ranks(2)
def test_tensors_of_any_stride_and_overlap(world: Any) -> None:
    world.run(other_memory)


def by_torch(case: str) -> dict[str, int]:
    topology = a2a.topology.presets.get("cpu:2x1") if case == "two domains" else None
    shape = (2, 16400) if case == "long rows" else (3, 300)
    with pytest.MonkeyPatch.context() as patch:
        if case == "rows longer than a slot":
            patch.setenv("A2A_STAGING_KB", "16")
            shape = (20, 4096)
        with a2a.communicator(topology=topology) as comm:
            for dtype in DTYPES:
                call("in place", comm, rows(comm.rank, comm.world_size, shape, dtype, EPS), EPS)
            if case == "rows longer than a slot":
                plan = next(iter(comm.plans.values()))
                assert "set A2A_STAGING_KB to 32" in dict(plan.rejected)["two_shot"]
            handed_over: dict[str, int] = comm.stats()["handed_over"]
            return handed_over


@pytest.mark.parametrize("case", ["two domains", "long rows", "rows longer than a slot"])
def test_without_a_kernel_torch_reduces_and_the_bits_of_two_ranks_are_the_same(world: Any, case: str) -> None:
    assert world.run(by_torch, case=case) == [{"all_reduce_rms_norm": 3}] * 2


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def norm(comm: Any, *shapes: Any, dtype: torch.dtype = torch.float32, eps: float = EPS, **outs: Any) -> Any:
    """A call with ones of these shapes."""
    return a2a.all_reduce_rms_norm(*(t(*shape, dtype=dtype) for shape in shapes), eps, comm, **outs)


def mixed_dtypes(comm: Any) -> None:
    a2a.all_reduce_rms_norm(t(3, 4), t(3, 4, dtype=torch.half), t(4), EPS, comm)


def no_tensor(comm: Any) -> None:
    a2a.all_reduce_rms_norm(t(3, 4), [1.0], t(4), EPS, comm)  # type: ignore[arg-type]


def one_result_for_two(comm: Any) -> None:
    both = t(3, 4)
    norm(comm, (3, 4), (3, 4), (4,), out=both, residual_out=both)


def a_gradient(comm: Any) -> None:
    a2a.all_reduce_rms_norm(t(3, 4), t(3, 4), t(4).requires_grad_(), EPS, comm)


RIGHT = (3, 4), (3, 4), (4,)
MISTAKES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "residual shape": (lambda c: norm(c, (3, 4), (4, 3), (4,)), ValueError, r"residual has shape \[4, 3\]"),
    "weight shape": (lambda c: norm(c, (3, 4), (3, 4), (3,)), ValueError, r"must be \[4\]"),
    "scalar": (lambda c: norm(c, (), (), ()), ValueError, "must have rows"),
    "no columns": (lambda c: norm(c, (3, 0), (3, 0), (0,)), ValueError, "must have rows"),
    "dtypes": (mixed_dtypes, TypeError, "residual is torch.float16"),
    "float64": (lambda c: norm(c, *RIGHT, dtype=torch.float64), TypeError, "float64"),
    "no tensor": (no_tensor, TypeError, "residual must be a torch tensor"),
    "eps": (lambda c: norm(c, *RIGHT, eps=-1.0), ValueError, "eps"),
    "out shape": (lambda c: norm(c, *RIGHT, out=t(12)), ValueError, "out has shape"),
    "out strides": (lambda c: norm(c, *RIGHT, out=t(4, 3).t()), ValueError, "out must be contiguous"),
    "one result for two": (one_result_for_two, ValueError, "they are two results"),
    "gradient": (a_gradient, RuntimeError, "no gradient"),
}


def a_mistake(name: str) -> None:
    wrong, error, says = MISTAKES[name]
    with a2a.communicator(timeout=20) as comm:
        for _ in range(2):  # the second time, the right call would take the fast way
            if comm.rank == 1:
                with pytest.raises(error, match=says):
                    wrong(comm)
            else:
                with pytest.raises(a2a.MismatchError, match="rank 1 refused"):
                    a2a.all_reduce_rms_norm(t(3, 4), t(3, 4), t(4), EPS, comm)
            out, residual_out = a2a.all_reduce_rms_norm(t(3, 4), t(3, 4), t(4), EPS, comm)  # nothing is broken
            assert (residual_out == comm.world_size + 1).all()
            assert_same_bits(out, reference([t(3, 4)] * comm.world_size, t(3, 4), t(4), EPS)[0])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_reaches_the_others_and_breaks_nothing(world: Any, name: str) -> None:
    world.run(a_mistake, name=name)


DIFFERENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rows": (lambda c: norm(c, (5, 40), (5, 40), (40,)), "5 rows of 40"),
    "shape of as many elements": (lambda c: norm(c, (8, 20), (8, 20), (20,)), "8 rows of 20"),
    "many rows": (lambda c: norm(c, (900, 40), (900, 40), (40,)), "900 rows of 40"),
    "eps": (lambda c: norm(c, (4, 40), (4, 40), (40,), eps=0.25), "eps 0.25"),
    "dtype": (lambda c: norm(c, (4, 40), (4, 40), (40,), dtype=torch.half), "float16"),
    "an all-reduce": (lambda c: a2a.all_reduce(t(160), group=c), "all_reduce"),
}


def different(name: str) -> None:
    other, says = DIFFERENT[name]
    comm = a2a.communicator(timeout=20)
    usual = (t(4, 40), t(4, 40), t(40), EPS, comm)
    a2a.all_reduce_rms_norm(*usual)
    with soon(NOTICED_S), pytest.raises(a2a.MismatchError, match=says):
        other(comm) if comm.rank == 2 else a2a.all_reduce_rms_norm(*usual)
    with soon(1.0), pytest.raises(a2a.MismatchError, match=says):  # it stays broken
        a2a.all_reduce_rms_norm(*usual)
    comm.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_rank_that_asks_for_something_else_is_found_out_by_all(world: Any, name: str) -> None:
    world.run(different, name=name)


def absent(num_rows: int) -> None:
    comm = a2a.communicator(timeout=60)
    usual = (t(num_rows, 64), t(num_rows, 64), t(64), EPS, comm)
    a2a.all_reduce_rms_norm(*usual)
    if comm.rank == 1:
        raise SystemExit(0)
    with soon(NOTICED_S), pytest.raises(a2a.PeerTimeoutError) as caught:
        a2a.all_reduce_rms_norm(*usual)
    assert caught.value.peer == 1
    comm.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_rows", [3, 2000])
def test_a_dead_rank_is_named(world: Any, num_rows: int) -> None:
    world.run(absent, expect_dead=(1,), num_rows=num_rows)


class Layer(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(spread(hidden, (hidden,), torch.bfloat16))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, residual = a2a.all_reduce_rms_norm(x * 2, residual, self.weight, EPS)
        return a2a.all_reduce_rms_norm(first + 1, residual, self.weight, EPS, dist.group.WORLD)


def compiled(backends: list[str]) -> None:
    case = rows(dist.get_rank(), dist.get_world_size(), (5, 48), torch.bfloat16, EPS)
    layer = Layer(48)
    with (
        torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}),
        torch.no_grad(),
    ):
        expected = layer(case.input, case.residual)
        for backend in backends:
            torch._dynamo.reset()
            got = torch.compile(layer, backend=backend, fullgraph=True)(case.input, case.residual)
            for a, e in zip(got, expected, strict=True):
                assert_same_bits(a, e)
    with pytest.raises(RuntimeError, match="no gradient"):
        torch.ops.a2a.all_reduce_rms_norm(
            case.input.requires_grad_(), case.residual, case.weight, EPS, dist.group.WORLD.group_name
        )[0].sum().backward()
    torch._dynamo.reset()


def test_it_compiles_into_one_full_graph(world: Any) -> None:
    backends = ["aot_eager"] if shutil.which("g++") is None else ["aot_eager", "inductor"]
    world.run(compiled, backends=backends, deadline_s=240)
