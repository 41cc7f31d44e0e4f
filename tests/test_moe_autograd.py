"""ExpertParallel inside autograd: what is detached, in flight, recomputed, interleaved or run without a graph."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import a2a
from moe_cases import Answer, Case, Step, assert_answers, assert_same_bits, expected_step, full_step, with_options

DETACHED_RANK = 1


# ---- gradients that end somewhere ------------------------------------------------------------------------------------


def step_with_detached_rows(case: Case) -> tuple[Answer, Answer]:
    """A step in which the experts of one rank are cut out of the graph, and a full one."""
    with contextlib.closing(case.expert_parallel()) as ep:
        step, full = Step(case, ep), Step(case, ep)
        step.dispatch()
        if dist.get_rank() == DETACHED_RANK:
            step.out_RH = step.out_RH.detach()
        step.combine()
        step.backward()
        return step.answer(), full_step(full)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("weights", [None, torch.float32], ids=str)
@pytest.mark.parametrize("apply_weights", [True, False], ids=["weighted", "unweighted"])
def test_a_rank_whose_experts_are_detached_still_runs_its_backward(
    world: Any, weights: torch.dtype | None, apply_weights: bool
) -> None:
    case = Case(num_experts=6, top_k=2, dtype=torch.float32, weights=weights, apply_weights=apply_weights)
    answers = world.run(step_with_detached_rows, case=case)
    owner = torch.arange(6) // (6 // world.size)
    for rank, (answer, full) in enumerate(answers):
        for name in ("y", "grad_weights", "grad_row_weights_R"):
            assert_same_bits(answer[name], full[name], f"{name} of rank {rank}")
        ids_TK = case.inputs(rank)[0].topk_ids_TK
        untouched_T = ((owner[ids_TK] != DETACHED_RANK) | (ids_TK == -1)).all(1)
        assert torch.equal(answer["grad_x"][untouched_T], full["grad_x"][untouched_T])
        assert not torch.equal(answer["grad_x"], full["grad_x"]) or not len(ids_TK)


def step_where_only_one_rank_needs_gradients(case: Case, needs: str) -> Answer:
    """Only the last rank's x or weights require a gradient; the experts have parameters everywhere."""
    with a2a.communicator(timeout=8) as comm:
        step = Step(case, case.expert_parallel(comm=comm))
        last = dist.get_rank() == dist.get_world_size() - 1
        step.x_TH.requires_grad_(last and needs in ("x", "both"))
        step.weights_TK.requires_grad_(last and needs in ("weights", "both"))
        step.dispatch()
        parameter = torch.ones(case.hidden, dtype=case.dtype, requires_grad=True)
        step.out_RH = step.out_RH * parameter
        step.combine()
        step.backward()
        return step.answer() | {"parameter": parameter.grad}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("needs", ["x", "weights", "both", "neither"])
def test_ranks_may_differ_in_what_needs_a_gradient(world: Any, needs: str) -> None:
    """As on a rank without tokens, whose x is a fresh empty tensor."""
    case = Case(dtype=torch.float32, tokens=(5, 9, 4))
    answers = world.run(step_where_only_one_rank_needs_gradients, case=case, needs=needs)
    expected = expected_step(case, world.size)
    assert all(answer["parameter"].isfinite().any() for answer in answers)
    if needs in ("x", "both"):
        assert_same_bits(answers[-1]["grad_x"], expected[-1]["grad_x"], "grad_x of the last rank")
    if needs in ("weights", "both"):
        assert_same_bits(answers[-1]["grad_weights"], expected[-1]["grad_weights"], "grad_weights of the last rank")


def weights_applied_by_the_experts(case: Case) -> Answer:
    with contextlib.closing(case.expert_parallel()) as ep:
        step = Step(case, ep)
        step.dispatch()
        step.out_RH = step.out_RH.nan_to_num() * step.routing.row_weights_R[:, None]
        step.combine()
        step.backward()
        return step.answer()


def test_row_weights_may_be_used_before_combine(world: Any) -> None:
    """row_weights_R is differentiable: applied by the experts it gives the same y, and the same gradients but for order."""
    case = Case(dtype=torch.float32, apply_weights=False)
    expected = expected_step(Case(dtype=torch.float32), world.size)
    for answer, expectation in zip(world.run(weights_applied_by_the_experts, case=case), expected, strict=True):
        assert_same_bits(answer["y"], expectation["y"], "y")
        torch.testing.assert_close(answer["grad_x"], expectation["grad_x"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(answer["grad_weights"], expectation["grad_weights"], rtol=1e-5, atol=1e-5)


def differentiate_twice(case: Case) -> None:
    with contextlib.closing(case.expert_parallel()) as ep:
        step = Step(case, ep)
        step.dispatch()
        step.combine()
        (grad_TH,) = torch.autograd.grad(step.y_TH.float().square().sum(), step.x_TH, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(grad_TH.float().sum(), step.x_TH)


def test_double_backward_raises(world: Any) -> None:
    world.run(differentiate_twice, case=Case(tokens=(4, 5)))


def sums_of_y(case: Case) -> list[Answer]:
    """The gradient of a sum is an expanded scalar; inputs and expert outputs are views with gaps."""
    with contextlib.closing(case.expert_parallel()) as ep:
        plain, gappy = Step(case, ep), Step(case, ep)
        for step in (plain, gappy):
            step.grad_TH = torch.ones_like(step.grad_TH)
        leaf = torch.empty(2, case.hidden, len(gappy.x_TH), dtype=case.dtype)
        leaf[0] = gappy.x_TH.detach().T
        leaf.requires_grad_()
        gappy.x_TH, gappy.ids_TK = leaf[0].T, gappy.ids_TK.T.contiguous().T.int()
        gappy.x_TH.retain_grad()
        gappy.dispatch()
        gappy.out_RH = torch.stack([gappy.out_RH, gappy.out_RH], -1)[..., 0]
        gappy.out_RH.retain_grad()
        gappy.combine()
        gappy.y_TH.sum().backward()
        return [full_step(plain), gappy.answer()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_tensors_and_int32_ids_are_the_same_to_it(world: Any, dtype: torch.dtype) -> None:
    plain, gappy = zip(*world.run(sums_of_y, case=Case(dtype=dtype)), strict=True)
    assert_answers(list(gappy), list(plain))


# ---- many routings in flight -----------------------------------------------------------------------------------------

IN_FLIGHT = [Case(seed=1), Case(seed=2, tokens=(2, 0, 9, 1)), Case(seed=3, ids="one", tokens=(0, 8))]


def several_in_flight(cases: list[Case], combine_order: list[int], backward_order: list[int]) -> list[Answer]:
    with contextlib.closing(cases[0].expert_parallel()) as ep:
        steps = [Step(case, ep) for case in cases]
        for step in steps:
            step.dispatch()
        for i in combine_order:
            steps[i].combine()
        for i in backward_order:
            steps[i].backward()
        return [step.answer() for step in steps]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("combine_order", "backward_order"), [([0, 1, 2], [2, 1, 0]), ([2, 0, 1], [1, 2, 0])], ids=str)
def test_routings_in_flight_don_t_disturb_each_other(
    world: Any, combine_order: list[int], backward_order: list[int]
) -> None:
    answers = world.run(several_in_flight, cases=IN_FLIGHT, combine_order=combine_order, backward_order=backward_order)
    for i, case in enumerate(IN_FLIGHT):
        assert_answers([answer[i] for answer in answers], expected_step(case, world.size))


def results_kept(case: Case, steps: int) -> None:
    """Keep the results of many steps, drop some of them in between, and close the instance."""
    generator = random.Random(dist.get_rank())
    kept: list[list[tuple[Tensor, Tensor]]] = []
    with contextlib.closing(case.expert_parallel()) as ep:
        for seed in range(steps):
            step = Step(dataclasses.replace(case, seed=seed), ep)
            answer = full_step(step)
            tensors = [*answer.values(), step.rows.detach(), *(t.detach() for t in step.routing)]
            kept.append([(t, t.clone()) for t in tensors])
            if seed % 3 == 2:
                kept.pop(generator.randrange(len(kept)))
    for pair in (pair for pairs in kept for pair in pairs):
        assert_same_bits(*pair, "a tensor of an earlier step, after its ExpertParallel was closed")


@pytest.mark.parametrize("hidden", [40, 8192])
def test_results_own_their_storage(world: Any, hidden: int) -> None:
    """Small ones and large ones, more of them than any pool holds at once."""
    world.run(results_kept, case=Case(hidden=hidden, tokens=(30, 40)), steps=14)


def two_instances_on_one_communicator(first: Case, second: Case) -> list[Answer]:
    with (
        a2a.communicator() as comm,
        contextlib.closing(first.expert_parallel(comm=comm)) as first_ep,
        contextlib.closing(second.expert_parallel(comm=comm)) as second_ep,
    ):
        steps = [Step(first, first_ep), Step(second, second_ep), Step(first, first_ep)]
        for step in steps:
            step.dispatch()
        for step in reversed(steps):
            step.combine()
        for step in steps:
            step.backward()
        return [step.answer() for step in steps]


@pytest.mark.ranks(2, 3)
def test_two_instances_share_a_communicator(world: Any) -> None:
    first = Case()
    second = with_options(Case(num_experts=4, hidden=256, dtype=torch.float32, top_k=2, tokens=(30,)), wire="fp8")
    answers = world.run(two_instances_on_one_communicator, first=first, second=second)
    for i, case in enumerate([first, second, first]):
        assert_answers([answer[i] for answer in answers], expected_step(case, world.size))


# ---- recomputed, or without a graph ----------------------------------------------------------------------------------


def checkpointed(case: Case, use_reentrant: bool) -> Answer:
    """Two layers on one instance, each checkpointed: their dispatches are recomputed in backward, last layer first."""
    with contextlib.closing(case.expert_parallel()) as ep:

        def layer(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            rows_RH, _, routing = ep.dispatch(x_TH, ids_TK, weights_TK)
            return ep.combine(torch.sin(rows_RH), routing)

        answers = {}
        for name in ("checkpointed", "plain"):
            step = Step(case, ep)
            y_TH = step.x_TH
            for _ in range(2):
                arguments = (y_TH, step.ids_TK, step.weights_TK)
                y_TH = (
                    checkpoint(layer, *arguments, use_reentrant=use_reentrant) if name[0] == "c" else layer(*arguments)
                )
            y_TH.backward(step.grad_TH)
            answers |= {f"{name} y": y_TH.detach(), f"{name} x": step.x_TH.grad, f"{name} w": step.weights_TK.grad}
        return answers


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
def test_a_checkpointed_layer_recomputes_to_the_same_bits(world: Any, use_reentrant: bool) -> None:
    for answer in world.run(checkpointed, case=Case(dtype=torch.float32), use_reentrant=use_reentrant):
        for name in "yxw":
            assert_same_bits(answer[f"checkpointed {name}"], answer[f"plain {name}"], name)


def forward_only(case: Case, mode: str) -> Answer:
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with contextlib.closing(case.expert_parallel()) as ep, modes[mode]():
        step = Step(case, ep)
        step.dispatch()
        assert not step.rows.requires_grad and not step.routing.row_weights_R.requires_grad
        step.combine()
        assert not step.y_TH.requires_grad
    return {"rows": step.rows.clone(), "y": step.y_TH.clone()}


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_forward_alone(world: Any, mode: str) -> None:
    expected = expected_step(Case(), world.size)
    for answer, expectation in zip(world.run(forward_only, case=Case(), mode=mode), expected, strict=True):
        for name in answer:
            assert_same_bits(answer[name], expectation[name], name)


def under_autocast(case: Case) -> list[Tensor]:
    """A float32 expert between dispatch and combine: autocast makes its output bfloat16, and leaves the weights alone."""
    with contextlib.closing(case.expert_parallel()) as ep:
        answers = []
        expert = torch.nn.Linear(case.hidden, case.hidden, bias=False)
        torch.nn.init.eye_(expert.weight)
        for enabled in (True, False):
            step = Step(case, ep)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                rows_RH, _, routing = ep.dispatch(step.x_TH, step.ids_TK, step.weights_TK)
                out_RH = expert(rows_RH) if enabled else rows_RH
                assert routing.row_weights_R.dtype == torch.float32
                y_TH = ep.combine(out_RH, routing)
            y_TH.backward(step.grad_TH)
            answers += [y_TH.detach(), step.x_TH.grad, step.weights_TK.grad]
        return answers


def test_autocast_around_a_layer(world: Any) -> None:
    for answer in world.run(under_autocast, case=Case()):
        for actual, expected in zip(answer[:3], answer[3:], strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)  # the identity may turn a -0 into 0
