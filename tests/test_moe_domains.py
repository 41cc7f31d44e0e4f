"""ExpertParallel over several domains: one domain's rows, documented sums, few bytes on the rails, and no hang."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import a2a
import moe_reference as reference
from moe_cases import (
    Answer,
    Case,
    Step,
    assert_answers,
    assert_steps_in_domains,
    expected_step,
    full_step,
    topology_of,
    with_options,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Domains = tuple[tuple[int, ...], ...]
BLOCKS, CYCLIC = ((0, 1), (2, 3)), ((0, 2), (1, 3))
UNEVEN, MIXED, THREE = ((0, 1, 2), (3, 4)), ((0, 3), (1, 2, 4)), ((0, 4), (1,), (2, 3))
OVER_FOUR, OVER_FIVE = [BLOCKS, CYCLIC], [UNEVEN, MIXED, THREE]
CULPRIT = 1
HEADS = 2048  # bytes that go ahead of a collective, on all rails of a rank, at most

OPTIONS: list[dict[str, Any]] = [
    {},
    {"expert_alignment": 16},
    {"wire_combine": "float32"},
    {"wire": "fp8"},
    {"wire": "mxfp8", "wire_combine": "float32"},
    {"layout": "compact", "expert_alignment": 2},
    {"layout": "compact", "wire": "fp8", "max_rows": 200},
    {"max_rows": 200},
    {"max_rows": 32, "overflow": "drop", "expert_alignment": 8},
    {"max_rows": 24, "overflow": "drop", "wire_combine": "float32", "wire": "fp8"},
]


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("domains", OVER_FOUR, ids=str)
def test_a_step_has_the_bits_of_the_reference(world: Any, domains: Domains) -> None:
    cases = [with_options(Case(domains=domains, seed=n), **options) for n, options in enumerate(OPTIONS)]
    assert_steps_in_domains(world, cases)


@pytest.mark.ranks(5)
@pytest.mark.parametrize("domains", OVER_FIVE, ids=str)
def test_so_has_one_in_uneven_domains(world: Any, domains: Domains) -> None:
    cases = [with_options(Case(domains=domains, seed=n), **options) for n, options in enumerate(OPTIONS)]
    assert_steps_in_domains(world, cases)


@pytest.mark.ranks(2)
def test_a_domain_may_be_one_rank(world: Any) -> None:
    cases = [with_options(Case(domains=((0,), (1,)), seed=n), **options) for n, options in enumerate(OPTIONS)]
    assert_steps_in_domains(world, cases)


@pytest.mark.ranks(5)
def test_any_dtype_weights_and_number_of_tokens(world: Any) -> None:
    tokens = ((0, 0, 0, 0, 0), (12, 0, 0, 0, 1), (0, 3, 12, 0, 7))
    cases = [
        Case(
            domains=UNEVEN,
            dtype=dtype,
            weights=weights,
            tokens=tokens[n % 3],
            apply_weights=n % 2 == 0,
            ids=ids,
            seed=n,
        )
        for n, (dtype, weights, ids) in enumerate(
            [(F32, None, "any"), (F16, BF16, "one"), (BF16, F32, "none"), (F32, F16, "distinct"), (BF16, None, "any")]
        )
    ]
    owners = [(4, 4, 0, 0, 3, 1, 2), (3, 3, 3, 4, 4, 4, 4), (0, 0, 0, 0, 0, 0, 0)]  # also none in a domain
    cases += [with_options(Case(domains=UNEVEN, seed=n), expert_to_rank=owned) for n, owned in enumerate(owners)]
    cases += [
        Case(domains=UNEVEN, num_experts=n, top_k=k, hidden=h) for n, k, h in [(1, 1, 8), (40, 32, 16), (70, 8, 600)]
    ]
    assert_steps_in_domains(world, [with_options(case, max_tokens=12) for case in cases])


def dispatch_alone(case: Case, domains: Domains | None) -> Answer:
    topology = None if domains is None else topology_of(domains)
    with a2a.communicator(topology=topology) as comm, contextlib.closing(case.expert_parallel(comm=comm)) as ep:
        (x_TH, ids_TK, weights_TK), _ = case.inputs(dist.get_rank())
        rows, rows_per_expert, routing = ep.dispatch(x_TH, ids_TK, weights_TK)
    return {"rows": rows, "rows_per_expert": rows_per_expert, **routing._replace(plan=torch.empty(0))._asdict()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{}, {"wire": "fp8"}, {"layout": "compact"}], ids=str)
def test_dispatched_rows_are_those_of_one_domain(world: Any, options: dict[str, Any]) -> None:
    case = with_options(Case(tokens=(20, 31, 0, 17)), **options)
    alone = world.run(dispatch_alone, case=case, domains=None)
    for domains in OVER_FOUR:
        assert_answers(world.run(dispatch_alone, case=case, domains=domains), alone)


def without_weights_on_odd_ranks(case: Case, domains: Domains | None) -> Answer:
    """Also with ids of 32 bits."""
    topology = None if domains is None else topology_of(domains)
    with a2a.communicator(topology=topology) as comm, contextlib.closing(case.expert_parallel(comm=comm)) as ep:
        (x_TH, ids_TK, weights_TK), _ = case.inputs(dist.get_rank())
        rows, _, routing = ep.dispatch(x_TH, ids_TK.int(), None if dist.get_rank() % 2 else weights_TK)
        end = int(routing.offsets_E[-1])
    return {"rows": rows[:end], "weights": routing.row_weights_R[:end], "token": routing.row_token_R[:end]}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{}, {"max_rows": 300}], ids=str)
def test_ranks_may_give_weights_or_none(world: Any, options: dict[str, Any]) -> None:
    case = with_options(Case(tokens=(20, 31, 0, 17), num_experts=8), **options)
    alone = world.run(without_weights_on_odd_ranks, case=case, domains=None)
    for domains in OVER_FOUR:
        assert_answers(world.run(without_weights_on_odd_ranks, case=case, domains=domains), alone)


@pytest.mark.ranks(2)
def test_experts_that_16_bits_do_not_number(world: Any) -> None:
    domains = ((0,), (1,))
    assert_steps_in_domains(world, [Case(num_experts=140_000, top_k=4, hidden=8, tokens=(30, 20), domains=domains)])


def combine_alone(case: Case, domains: Domains | None) -> Tensor:
    topology = None if domains is None else topology_of(domains)
    with a2a.communicator(topology=topology) as comm, contextlib.closing(case.expert_parallel(comm=comm)) as ep:
        step = Step(case, ep)
        step.dispatch()
        step.combine()
        return step.y_TH.detach()


@pytest.mark.ranks(4)
def test_sums_differ_from_one_domain_by_one_rounding_a_level(world: Any) -> None:
    """Each domain's sum and the owner's are rounded once: half a unit of the last place of what they sum, at most."""
    case = Case(tokens=(64,), top_k=8, num_experts=16, ids="distinct", hidden=64)
    flat = world.run(combine_alone, case=case, domains=None)
    levels = world.run(combine_alone, case=case, domains=BLOCKS)
    unit = 2.0**-8
    differing = 0
    for rank, (one, two) in enumerate(zip(flat, levels, strict=True)):
        size_TH = sizes_of(case, rank)
        assert ((one.double() - two.double()).abs() <= 4 * unit * size_TH).all()
        differing += int((one != two).sum())
    assert differing  # or there was nothing to bound


def sizes_of(case: Case, rank: int) -> Tensor:
    """The sum of the sizes of what is summed for each token."""
    x_TH, ids_TK, weights_TK = case.inputs(rank)[0]
    factors_E = torch.tensor([0.37 * (e % 11) - 1.9 for e in range(case.num_experts)], dtype=case.dtype)
    assert weights_TK is not None
    sizes: Tensor = (
        (weights_TK.double()[..., None] * (x_TH[:, None] * factors_E[ids_TK][..., None]).double()).abs().sum(1)
    )
    return sizes


# ---- any routing -----------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, domains: Domains) -> Case:
    num_experts, ranks = draw(st.integers(1, 9)), sum(map(len, domains))
    options: dict[str, Any] = {
        "expert_alignment": draw(st.sampled_from([1, 1, 2, 16])),
        "layout": draw(st.sampled_from(["expert", "expert", "compact"])),
        "wire": draw(st.sampled_from([None, None, "fp8", "mxfp8"])),
        "wire_combine": draw(st.sampled_from([None, "float32"])),
        "max_tokens": 12,
    }
    if draw(st.booleans()):
        owners = st.lists(st.integers(0, ranks - 1), min_size=num_experts, max_size=num_experts)
        options["expert_to_rank"] = tuple(draw(owners))
    if draw(st.booleans()):
        compact = options["layout"] == "compact"
        options |= {"max_rows": 500 if compact else draw(st.integers(0, 60)), "overflow": "drop"}
    case = Case(
        num_experts=num_experts,
        top_k=draw(st.integers(1, 5)),
        hidden=8 * draw(st.integers(1, 40)),
        tokens=tuple(draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks))),
        dtype=draw(st.sampled_from([BF16, F16, F32])),
        ids=draw(st.sampled_from(["any", "any", "one", "none"])),
        weights=draw(st.sampled_from([None, F32, BF16])),
        apply_weights=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        domains=domains,
    )
    return with_options(case, **options)


quietly = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


@pytest.mark.ranks(5)
@pytest.mark.parametrize("domains", OVER_FIVE, ids=str)
def test_any_routing(world: Any, domains: Domains) -> None:
    @settings(quietly, max_examples=3)
    @given(several=st.lists(cases(domains), min_size=8, max_size=8))
    def check(several: list[Case]) -> None:
        assert_steps_in_domains(world, several)

    check()


@pytest.mark.ranks(4)
def test_rows_that_no_slot_of_the_domain_holds(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [{}, {"wire": "fp8"}, {"layout": "compact"}, {"wire_combine": "float32", "wire": "mxfp8"}]
    cases = [
        with_options(Case(hidden=6160, top_k=2, tokens=(9, 12, 4, 0), domains=CYCLIC, seed=n), **o)
        for n, o in enumerate(options)
    ]
    answers = world.run(run_with_little_staging, cases=cases)
    for number, case in enumerate(cases):
        assert_answers([of_rank[number] for of_rank in answers], expected_step(case, 4))


def run_with_little_staging(cases: list[Case]) -> list[Answer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A2A_STAGING_KB", "16")
        comm = a2a.communicator(topology=topology_of(cases[0].domains or ()))
        comm.domains  # noqa: B018  made now, with this much
    with comm:
        return [full_step(Step(case, case.expert_parallel(comm=comm))) for case in cases]


# ---- what a user does with it ----------------------------------------------------------------------------------------


def again(cases: list[Case]) -> None:
    """Steps back to back on one instance, while every rank sleeps now and then; checked afterwards."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sleeps, answers = random.Random(rank), []
    with (
        a2a.communicator(topology=topology_of(cases[0].domains or ())) as comm,
        contextlib.closing(cases[0].expert_parallel(comm=comm)) as ep,
    ):
        for case in cases:
            step = Step(case, ep)
            for act in (step.dispatch, step.combine, step.backward):
                if sleeps.random() < 0.2:
                    time.sleep(sleeps.random() * 0.003)
                act()
            answers.append(step.answer())
    for case, answer in zip(cases, answers, strict=True):
        assert_answers([answer], [expected_step(case, world_size)[rank]])


@pytest.mark.ranks(5)
def test_many_steps_with_new_routing_each(world: Any) -> None:
    world.run(again, cases=[Case(seed=n, hidden=24, top_k=2, tokens=(4, 3, 0, 2, 5), domains=MIXED) for n in range(40)])


def several_in_flight(cases: list[Case]) -> list[Answer]:
    """Dispatch all, then combine all, then the gradients in another order."""
    with (
        a2a.communicator(topology=topology_of(cases[0].domains or ())) as comm,
        contextlib.closing(cases[0].expert_parallel(comm=comm)) as ep,
    ):
        steps = [Step(case, ep) for case in cases]
        for step in steps:
            step.dispatch()
        for step in reversed(steps):
            step.combine()
        for step in steps:
            step.backward()
        return [step.answer() for step in steps]


@pytest.mark.ranks(4)
def test_many_routings_may_be_in_flight(world: Any) -> None:
    cases = [Case(seed=n, domains=CYCLIC, tokens=(5, 9, 0, n)) for n in range(4)]
    cases = [with_options(case, max_tokens=9) for case in cases]
    answers = world.run(several_in_flight, cases=cases)
    for number, case in enumerate(cases):
        assert_answers([of_rank[number] for of_rank in answers], expected_step(case, 4))


def by_hand(case: Case) -> Answer:
    """A step on rows as they travelled, its backward by hand; tokens quantised by the caller."""
    with (
        a2a.communicator(topology=topology_of(case.domains or ())) as comm,
        contextlib.closing(case.expert_parallel(comm=comm)) as ep,
    ):
        (x_TH, ids_TK, weights_TK), grad_TH = case.inputs(dist.get_rank())
        wire = dict(case.options)["wire"]
        (q_RH, scales_RB), _, routing = ep.dispatch(reference.quantise(x_TH, wire), ids_TK, weights_TK)
        out_RH = reference.dequantise(q_RH, scales_RB, wire, case.dtype)
        y_TH = ep.combine(out_RH, routing)
        grad_out, grad_row_weights_R = ep.combine_backward(grad_TH, out_RH, routing)
        grad_x, _ = ep.dispatch_backward(grad_out, routing, grad_row_weights_R)
    return {"out": out_RH, "y": y_TH, "grad_out": grad_out, "grad_row_weights_R": grad_row_weights_R, "grad_x": grad_x}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_a_quantised_payload_passes_through_with_its_scales(world: Any, wire: str) -> None:
    case = with_options(Case(domains=BLOCKS, hidden=200), wire=wire, rows="wire")
    layer = case.layer(4)
    tokens, grads_y = zip(*(case.inputs(rank) for rank in range(4)), strict=True)
    received = reference.dispatch(layer, tokens)
    outs = [got.rows_RH for got in received]
    ys = reference.combine(layer, tokens, received, outs)
    grads = reference.combine_backward(layer, received, outs, grads_y)
    grads_x = reference.dispatch_backward(layer, tokens, received, [grad for grad, _ in grads])
    for rank, answer in enumerate(world.run(by_hand, case=case)):
        expected = dict(zip(answer, (outs[rank], ys[rank], *grads[rank], grads_x[rank]), strict=True))
        assert_answers([answer], [expected])


# ---- bytes on the rails ----------------------------------------------------------------------------------------------


def bytes_of_phases(case: Case) -> list[int]:
    with (
        a2a.communicator(topology=topology_of(case.domains or ())) as comm,
        contextlib.closing(case.expert_parallel(comm=comm)) as ep,
    ):
        step, sent = Step(case, ep), [comm.domains.bytes_sent]
        step.dispatch()
        sent.append(comm.domains.bytes_sent)
        step.combine()
        sent.append(comm.domains.bytes_sent)
        step.backward()
        sent.append(comm.domains.bytes_sent)
        return [after - before for before, after in itertools.pairwise(sent)]


def crossing(case: Case, world_size: int) -> tuple[list[int], list[int]]:
    """How many tokens each rank must send to other domains, counted once for each; and whose sums it sends home."""
    assert case.domains is not None
    owned = reference.experts_of_ranks(case.layer(world_size))
    domain_of = {e: d for d, ranks in enumerate(case.domains) for rank in ranks for e in owned[rank]}
    out, home = [0] * world_size, [0] * world_size
    for own, ranks in enumerate(case.domains):
        for place, rank in enumerate(ranks):
            for ids in case.inputs(rank)[0].topk_ids_TK.tolist():
                for d in {domain_of[e] for e in ids if e >= 0} - {own}:
                    out[rank] += 1
                    home[case.domains[d][place % len(case.domains[d])]] += 1
    return out, home


@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("options", [{}, {"wire": "fp8"}, {"wire_combine": "float32"}], ids=str)
def test_a_token_crosses_once_to_each_domain(world: Any, options: dict[str, Any]) -> None:
    """Numbers, experts and weights included, rails carry at most 2 % more than the rows themselves, and heads."""
    for domains in OVER_FOUR if world.size == 4 else OVER_FIVE:
        case = Case(num_experts=32, top_k=8, hidden=2048, tokens=(200,), ids="distinct", domains=domains)
        case = with_options(case, **options)
        wire_row, sum_row = 2 * case.hidden, 2 * case.hidden
        if "wire" in options:
            wire_row = case.hidden + 4 * case.hidden // 128
        if "wire_combine" in options:
            sum_row *= 2
        out, home = crossing(case, world.size)
        for rank, (dispatch, combine, backward) in enumerate(world.run(bytes_of_phases, case=case)):
            assert out[rank] * wire_row < dispatch < 1.02 * out[rank] * wire_row + HEADS
            assert home[rank] * sum_row < combine < 1.02 * home[rank] * sum_row + HEADS
            both = out[rank] * wire_row + home[rank] * sum_row
            assert both < backward < 1.02 * both + 2 * HEADS


@pytest.mark.ranks(4)
def test_with_max_rows_what_crosses_does_not_depend_on_the_routing(world: Any) -> None:
    case = Case(num_experts=8, top_k=2, hidden=64, tokens=(6, 3, 0, 8), domains=BLOCKS)
    cases = [
        with_options(dataclasses.replace(case, ids=ids), max_rows=100, max_tokens=8) for ids in ("any", "one", "none")
    ]
    first, *others = [world.run(bytes_of_phases, case=case) for case in cases]
    assert all(phases == first[0] for phases in first)
    assert all(other == first for other in others)
