"""ExpertParallel gives the bits of the reference: rows, their metadata, y and every gradient, on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import a2a
import moe_reference as reference
from a2a.algorithms import candidates
from moe_cases import (
    Answer,
    Case,
    Step,
    assert_answers,
    assert_same_bits,
    assert_step,
    expected_step,
    full_step,
    run_step,
    with_options,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALGORITHMS = [a.name for a in candidates() if a.op == "moe" and a.device_type == "cpu" and a.name != "hierarchical"]
on_every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


# ---- one dimension at a time -----------------------------------------------------------------------------------------


@on_every_algorithm
@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_a_step_on_any_number_of_ranks(world: Any, algorithm: str, dtype: torch.dtype) -> None:
    assert_step(world, Case(dtype=dtype, algorithm=algorithm))


@on_every_algorithm
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(8, BF16), (24, F16), (2880, BF16), (3072, BF16), (3584, F16), (6144, BF16), (4, F32), (12, F32), (1204, F32)],
)
def test_any_row_that_is_a_multiple_of_16_bytes(world: Any, algorithm: str, hidden: int, dtype: torch.dtype) -> None:
    assert_step(world, Case(hidden=hidden, dtype=dtype, tokens=(6, 4), algorithm=algorithm))


@on_every_algorithm
@pytest.mark.ranks(3)
@pytest.mark.parametrize("tokens", [(0, 4, 5), (0, 0, 6), (0, 0, 0), (1, 0, 1)], ids=str)
def test_no_tokens_on_one_several_or_all_ranks(world: Any, algorithm: str, tokens: tuple[int, ...]) -> None:
    assert_step(world, with_options(Case(tokens=tokens, algorithm=algorithm), max_tokens=8))


@pytest.mark.ranks(4)
def test_token_counts_may_differ_up_to_max_tokens(world: Any) -> None:
    assert_step(world, Case(tokens=(1, 64, 17, 0), hidden=16))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("top_k", [1, 2, 8, 32])
def test_top_k_up_to_32(world: Any, top_k: int) -> None:
    assert_step(world, Case(top_k=top_k, num_experts=40, ids="distinct", hidden=16))


@pytest.mark.ranks(2)
def test_a_repeated_id_makes_as_many_rows(world: Any) -> None:
    assert_step(world, Case(top_k=32, num_experts=3, hidden=16))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(1, 1), (2, 2), (3, 2), (4, 2), (8, 3), (257, 4)], ids=lambda n: f"{n}"
)
def test_any_number_of_experts_even_fewer_than_ranks(world: Any, num_experts: int, top_k: int) -> None:
    assert_step(world, Case(num_experts=num_experts, top_k=top_k))


@on_every_algorithm
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("top_k", [1, 3])
def test_all_tokens_to_one_expert(world: Any, algorithm: str, top_k: int) -> None:
    assert_step(world, Case(ids="one", top_k=top_k, tokens=(40, 1, 33, 64), algorithm=algorithm))


@pytest.mark.ranks(3)
def test_a_token_of_only_minus_one_gets_zero_and_gives_zero_gradient(world: Any) -> None:
    case = Case(ids="none")
    assert_step(world, case)
    for answer in expected_step(case, 3):
        assert not answer["y"].any() and not answer["grad_x"].any() and not answer["grad_weights"].any()


@on_every_algorithm
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("ids", ["any", "one", "none"])
def test_blocks_are_padded_with_zeros_to_the_alignment(world: Any, algorithm: str, alignment: int, ids: str) -> None:
    assert_step(world, with_options(Case(ids=ids, algorithm=algorithm), expert_alignment=alignment))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("owners", [(2, 0, 1, 2, 0, 1, 2), (1, 1, 1, 1, 1, 1, 1), (2, 2, 0, 0, 2, 0, 2)], ids=str)
def test_expert_to_rank_places_experts_anywhere(world: Any, owners: tuple[int, ...]) -> None:
    assert_step(world, with_options(Case(), expert_to_rank=owners))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("weights", [None, F32, BF16], ids=str)
@pytest.mark.parametrize("apply_weights", [True, False], ids=["weighted", "unweighted"])
def test_weights_and_their_gradients_are_exact_in_their_own_dtype(
    world: Any, weights: torch.dtype | None, apply_weights: bool
) -> None:
    assert_step(world, Case(weights=weights, apply_weights=apply_weights, hidden=600, dtype=F32))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("alignment", [1, 16])
def test_compact_rows_hand_out_each_token_once(world: Any, alignment: int) -> None:
    assert_step(world, with_options(Case(), layout="compact", expert_alignment=alignment))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_combine_may_send_float32(world: Any, dtype: torch.dtype) -> None:
    assert_step(world, with_options(Case(dtype=dtype), wire_combine="float32"))


# ---- max_rows --------------------------------------------------------------------------------------------------------


@on_every_algorithm
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("alignment", [1, 16])
def test_max_rows_fixes_the_shape_and_changes_nothing_else(world: Any, algorithm: str, alignment: int) -> None:
    case = with_options(Case(algorithm=algorithm), expert_alignment=alignment, max_rows=160)
    assert_step(world, case)


@on_every_algorithm
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("max_rows", [16, 32])
@pytest.mark.parametrize("alignment", [1, 16])
def test_overflow_drop_drops_the_highest_positions_and_counts_them(
    world: Any, algorithm: str, max_rows: int, alignment: int
) -> None:
    case = with_options(
        Case(tokens=(25, 9, 30), algorithm=algorithm), expert_alignment=alignment, max_rows=max_rows, overflow="drop"
    )
    assert any(int(answer["overflow"]) for answer in expected_step(case, world.size))
    assert_step(world, case)


def drop_in_a_compact_layout() -> None:
    """Expert 0's rows come from the last tokens, and the rows of the first ones are dropped."""
    ids = torch.tensor([[1], [1], [1], [0], [0]])
    x = torch.arange(5.0).repeat(8, 1).T.contiguous() + 100 * dist.get_rank()
    options: dict[str, Any] = {"max_rows": 4, "overflow": "drop", "layout": "compact", "expert_to_rank": (0, 0)}
    with contextlib.closing(
        a2a.ExpertParallel(num_experts=2, top_k=1, hidden=8, max_tokens=5, dtype=F32, **options)
    ) as ep:
        rows, _, routing = ep.dispatch(x, ids)
        got = rows[routing.row_index_R]
        if dist.get_rank() == 0:
            assert int(routing.overflow) == 6
            expected = [3.0, 4.0, 103.0, 104.0]
            assert got[:, 0].tolist() == expected
        y = ep.combine(got, routing)
        assert torch.equal(y, torch.where(ids == 0, x, 0.0))


@pytest.mark.ranks(2)
def test_compact_rows_of_what_is_not_dropped(world: Any) -> None:
    world.run(drop_in_a_compact_layout)


# ---- the worked example of the documentation --------------------------------------------------------------------------


def worked_example(layout: str) -> Answer:
    """Two ranks, four experts, top-2, alignment 4; tokens a and b on rank 0, c and d on rank 1."""
    x_TH, ids_TK = torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 2], [0, 1]])
    if dist.get_rank() == 1:
        x_TH, ids_TK = torch.tensor([[3.0], [4.0]]), torch.tensor([[0, 1], [3, 0]])
    with contextlib.closing(
        a2a.ExpertParallel(
            num_experts=4, top_k=2, hidden=8, max_tokens=2, expert_alignment=4, layout=layout, dtype=torch.float32
        )
    ) as ep:
        rows_RH, rows_per_expert, routing = ep.dispatch(x_TH.expand(2, 8).contiguous(), ids_TK)
        out_RH = rows_RH[routing.row_index_R] if layout == "compact" else rows_RH
        y_TH = ep.combine(out_RH, routing)
    return {"rows": rows_RH[:, 0], "rows_per_expert": rows_per_expert, "y": y_TH[:, 0], **routing._asdict()}


def test_the_worked_example_is_as_drawn(world: Any) -> None:
    a, b, c, d = 1, 2, 3, 4
    first, second = world.run(worked_example, layout="expert")
    assert first["rows"].tolist() == [a, b, c, d, b, c, 0, 0]
    assert first["row_rank_R"].tolist() == [0, 0, 1, 1, 0, 1, -1, -1]
    assert first["row_token_R"].tolist() == [0, 1, 0, 1, 1, 0, -1, -1]
    assert first["row_k_R"].tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert first["rows_per_expert"].tolist() == [4, 2]
    assert first["offsets_E"].tolist() == [4, 8]
    assert second["rows"].tolist() == [a, 0, 0, 0, d, 0, 0, 0]
    assert first["y"].tolist() == [2 * a, 2 * b] and second["y"].tolist() == [2 * c, 2 * d]


def test_the_compact_worked_example_is_as_drawn(world: Any) -> None:
    first, second = world.run(worked_example, layout="compact")
    assert first["rows"].tolist() == [1, 2, 3, 4]
    assert first["row_index_R"].tolist() == [0, 1, 2, 3, 1, 2, 0, 0]
    assert first["y"].tolist() == [2, 4] and second["y"].tolist() == [6, 8]


# ---- what a user builds on it ----------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_a_step_repeats_bit_for_bit(world: Any) -> None:
    case = Case(tokens=(30, 41, 7, 22), hidden=264)
    first = world.run(run_step, case=case)
    for _ in range(3):
        assert_answers(world.run(run_step, case=case), first)


@pytest.mark.ranks(1, 2, 4)
def test_the_number_of_ranks_changes_no_dispatched_row(world: Any) -> None:
    """All tokens on rank 0 and one expert a token: y and the gradients can't depend on who owns the experts."""
    case = Case(tokens=(23, 0, 0, 0), top_k=1, num_experts=8)
    alone, spread = expected_step(case, 1)[0], world.run(run_step, case=case)
    assert torch.equal(torch.cat([answer["rows"] for answer in spread]), alone["rows"])
    for name in ("y", "grad_x", "grad_weights"):
        assert_same_bits(spread[0][name], alone[name], name)


def grouped_matmul(case: Case) -> tuple[Tensor, Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    owned = reference.experts_of_ranks(case.layer(world_size))[rank]
    (x_TH, ids_TK, weights_TK), _ = case.inputs(rank)
    with contextlib.closing(case.expert_parallel()) as ep:
        rows_RH, _, routing = ep.dispatch(x_TH, ids_TK, weights_TK)
        out_RH = torch._grouped_mm(rows_RH, expert_matrices(case)[owned], offs=routing.offsets_E)
        return ep.combine(out_RH, routing)


def expert_matrices(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-2, 3, (case.num_experts, case.hidden, case.hidden), generator=generator).to(case.dtype)


def test_rows_feed_a_grouped_matmul(world: Any) -> None:
    """Rows are packed by expert, aligned and padded with zeros, and offsets_E is what torch._grouped_mm takes."""
    case = with_options(
        Case(num_experts=6, hidden=32, tokens=(20, 30), weights=None, ids="distinct"), expert_alignment=16
    )
    matrices = expert_matrices(case).double()
    for rank, y_TH in enumerate(world.run(grouped_matmul, case=case)):
        x_TH, ids_TK, _ = case.inputs(rank)[0]
        dense = torch.einsum("th,tkhg->tg", x_TH.double(), matrices[ids_TK])
        torch.testing.assert_close(y_TH.double(), dense, rtol=2e-2, atol=2e-1)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(("dtype", "unit"), [(BF16, 2.0**-8), (F16, 2.0**-11), (F32, 2.0**-24)], ids=str)
def test_combine_is_as_accurate_as_its_roundings(
    world: Any, dtype: torch.dtype, unit: float, record_property: Any
) -> None:
    """Against float64, y is off by its own rounding, one for each partial row that was sent, and float32's sums."""
    case = Case(dtype=dtype, top_k=8, num_experts=16, ids="distinct", tokens=(64,), hidden=64)
    factors_E = torch.tensor([0.37 * (e % 11) - 1.9 for e in range(16)], dtype=dtype)
    for rank, answer in enumerate(world.run(run_step, case=case)):
        x_TH, ids_TK, weights_TK = case.inputs(rank)[0]
        terms_TKH = weights_TK.double()[..., None] * (x_TH[:, None] * factors_E[ids_TK][..., None]).double()
        owners_TK = ids_TK // (16 // world.size)
        partials = torch.stack([(terms_TKH * (owners_TK == r)[..., None]).sum(1) for r in range(world.size)])
        bound_TH = unit * terms_TKH.sum(1).abs() + 10 * 2.0**-24 * terms_TKH.abs().sum(1)
        if world.size > 1:
            bound_TH += unit * partials.abs().sum(0)
        error_TH = (answer["y"].double() - terms_TKH.sum(1)).abs()
        assert (error_TH <= 1.01 * bound_TH).all()
        assert error_TH.max() > 0  # or this measures nothing
        record_property(f"largest error of rank {rank} in units of its bound", float((error_TH / bound_TH).max()))


@on_every_algorithm
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("hidden", "dtype"), [(8192, BF16), (8200, BF16), (4100, F32)])
def test_megabytes_that_are_stored_past_the_cache(world: Any, algorithm: str, hidden: int, dtype: torch.dtype) -> None:
    case = Case(hidden=hidden, dtype=dtype, tokens=(90, 100, 80), ids="distinct", algorithm=algorithm)
    assert_step(world, with_options(case, expert_alignment=16))


def run_step_with_little_staging(case: Case) -> Answer:
    """16 KiB between two ranks: less than a row of 6,144 float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A2A_STAGING_KB", "16")
        comm = a2a.communicator()
    with comm:
        return full_step(Step(case, case.expert_parallel(comm=comm)))


@on_every_algorithm
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("hidden", "dtype"), [(6144, F32), (2880, BF16), (40, BF16)])
@pytest.mark.parametrize("ids", ["any", "one"])
def test_staging_is_bounded_by_the_ring(world: Any, algorithm: str, hidden: int, dtype: torch.dtype, ids: str) -> None:
    """Many times what the rings hold, also to one rank only, and rows that no slot holds whole."""
    tokens = (24, 17, 1, 0) if hidden > 1000 else (200, 300, 10, 0)
    case = Case(hidden=hidden, dtype=dtype, top_k=2, ids=ids, tokens=tokens, algorithm=algorithm)
    assert_answers(world.run(run_step_with_little_staging, case=case), expected_step(case, world.size))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "options",
    [{"wire": "fp8"}, {"wire": "mxfp8"}, {"layout": "compact"}, {"wire_combine": "float32"}, {"max_rows": 32}],
    ids=str,
)
def test_every_kind_of_rows_fits_a_small_ring(world: Any, options: dict[str, Any]) -> None:
    case = Case(hidden=6160, top_k=2, tokens=(9, 12, 4))
    case = with_options(case, **options, overflow="drop")
    assert_answers(world.run(run_step_with_little_staging, case=case), expected_step(case, world.size))


def again(cases: list[Case], jitter: bool) -> None:
    """Steps back to back on one instance, checked afterwards; with `jitter` every rank sleeps now and then."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sleeps = random.Random(rank)
    answers = []
    with contextlib.closing(cases[0].expert_parallel()) as ep:
        for case in cases:
            step = Step(case, ep)
            for act in (step.dispatch, step.combine, step.backward):
                if jitter and sleeps.random() < 0.4:
                    time.sleep(sleeps.random() * 0.004)
                act()
            answers.append(step.answer())
    for case, answer in zip(cases, answers, strict=True):
        assert_answers([answer], [expected_step(case, world_size)[rank]])


@on_every_algorithm
@pytest.mark.ranks(4)
@pytest.mark.parametrize("jitter", [False, True], ids=["back to back", "jitter"])
def test_a_hundred_steps_with_new_routing_each(world: Any, algorithm: str, jitter: bool) -> None:
    cases = [Case(seed=seed, hidden=24, top_k=2, tokens=(4, 3, 0, 2), algorithm=algorithm) for seed in range(100)]
    world.run(again, cases=cases, jitter=jitter)


def resident_bytes_over_steps(case: Case) -> list[int]:
    resident = []
    with contextlib.closing(case.expert_parallel()) as ep:
        for _ in range(2):
            for _ in range(25):
                step = Step(case, ep)
                step.dispatch()
                step.combine()
                step.backward()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return resident


@on_every_algorithm
def test_memory_stays_flat_over_steps(world: Any, algorithm: str) -> None:
    """A step here makes 3 MB of rows: those of twenty-five steps, if kept, would show."""
    case = Case(hidden=2048, tokens=(128, 128), ids="distinct", algorithm=algorithm)
    for before, after in world.run(resident_bytes_over_steps, case=case):
        assert after - before < 20e6


# ---- any routing -----------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.integers(1, 9))
    options: dict[str, Any] = {
        "expert_alignment": draw(st.sampled_from([1, 1, 2, 16])),
        "layout": draw(st.sampled_from(["expert", "expert", "compact"])),
        "wire": draw(st.sampled_from([None, None, "fp8", "mxfp8"])),
        "wire_combine": draw(st.sampled_from([None, "float32"])),
        "max_tokens": 12,
    }
    if draw(st.booleans()):
        options["expert_to_rank"] = tuple(draw(st.lists(st.integers(0, 2), min_size=num_experts, max_size=num_experts)))
    plain = options["layout"] == "expert" and options["wire"] is None  # what every algorithm serves
    case = Case(
        num_experts=num_experts,
        top_k=draw(st.integers(1, 5)),
        hidden=8 * draw(st.integers(1, 40)),
        tokens=tuple(draw(st.lists(st.integers(0, 12), min_size=3, max_size=3))),
        dtype=draw(st.sampled_from([BF16, F16, F32])),
        ids=draw(st.sampled_from(["any", "any", "one", "none"])),
        weights=draw(st.sampled_from([None, F32, BF16])),
        apply_weights=draw(st.booleans()),
        algorithm=draw(st.sampled_from(ALGORITHMS)) if plain else None,
        seed=draw(st.integers(0, 99)),
    )
    return with_options(case, **options)


quietly = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


@pytest.mark.ranks(3)
@settings(quietly, max_examples=40)
@given(case=cases())
def test_any_routing(world: Any, case: Case) -> None:
    assert_step(world, case)


@pytest.mark.ranks(3)
@settings(quietly, max_examples=20)
@given(case=cases())
def test_any_routing_through_small_rings(world: Any, case: Case) -> None:
    case = dataclasses.replace(case, hidden=8 * case.hidden, seed=case.seed + 100)
    assert_answers(world.run(run_step_with_little_staging, case=case), expected_step(case, world.size))
