"""What ExpertParallel says to a mistake: on the rank that made it at once, and to its peers instead of a hang."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import a2a
from moe_cases import Answer, Case, Step, assert_answers, expected_step

CULPRIT = 1  # the rank that does it wrong

# ---- construction ----------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden": 12}, "16 bytes"),
    ({"hidden": 2, "dtype": torch.float32}, "16 bytes"),
    ({"hidden": 0}, "hidden"),
    ({"top_k": 0}, "top_k.*32"),
    ({"top_k": 33, "num_experts": 64}, "top_k.*32"),
    ({"num_experts": 0}, "num_experts"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"dtype": torch.float64}, "float64"),
    ({"dtype": torch.int32}, "int32"),
    ({"expert_alignment": 0}, "expert_alignment"),
    ({"max_rows": -1}, "max_rows"),
    ({"overflow": "ignore"}, "overflow.*ignore"),
    ({"wire": "fp4"}, "wire.*fp4"),
    ({"rows": "wire"}, "wire"),
    ({"rows": "float"}, "rows.*float"),
    ({"layout": "dense"}, "layout.*dense"),
    ({"wire_combine": "fp8"}, "wire_combine.*fp8"),
    ({"expert_to_rank": (0, 1)}, "expert_to_rank.*2.*7"),
    ({"expert_to_rank": (0, 1, 0, 1, 0, 1, 2)}, "expert_to_rank.*2"),
]


def refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        Case().expert_parallel(**arguments)


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda value: str(value))
def test_a_wrong_argument_is_refused_with_its_name_and_value(
    world: Any, arguments: dict[str, Any], message: str
) -> None:
    world.run(refuses, arguments=arguments, message=message)


def construct_differently(name: str, values: list[Any], shown: list[str]) -> None:
    rank = dist.get_rank()
    with a2a.communicator() as comm:
        with pytest.raises(a2a.MismatchError, match=f"rank {1 if rank == 0 else 0 if rank == 1 else '[01]'}") as caught:
            Case().expert_parallel(comm=comm, **{name: values[rank % 2]})
        for text in shown:
            assert text in str(caught.value)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("hidden", [40, 48], ["hidden=40", "hidden=48"]),
        ("num_experts", [7, 8], ["num_experts=7", "num_experts=8"]),
        ("top_k", [3, 4], ["top_k=3", "top_k=4"]),
        ("max_tokens", [16, 17], ["max_tokens=16", "max_tokens=17"]),
        ("dtype", [torch.bfloat16, torch.float16], ["bfloat16", " float16"]),
        ("expert_alignment", [1, 16], ["alignment=16"]),
        ("max_rows", [None, 64], ["max_rows=64"]),
        ("wire", [None, "fp8"], ["wire=fp8"]),
        ("layout", ["expert", "compact"], ["layout=compact"]),
        ("wire_combine", ["float32", None], ["wire_combine=float32"]),
        ("expert_to_rank", [(0, 1, 0, 1, 0, 1, 0), (1, 0, 1, 0, 1, 0, 1)], ["expert_to_rank"]),
    ],
    ids=str,
)
def test_ranks_that_construct_it_differently_all_hear_of_it(
    world: Any, name: str, values: list[Any], shown: list[str]
) -> None:
    world.run(construct_differently, name=name, values=values, shown=shown)


# ---- dispatch and combine --------------------------------------------------------------------------------------------

GOOD = Case(tokens=(4, 5), num_experts=7, top_k=3, hidden=40)


def dispatch_wrongly(
    x: Callable[[Tensor], Tensor], ids: Callable[[Tensor], Tensor], weights: Callable[..., Any]
) -> Any:
    def act(ep: a2a.ExpertParallel, step: Step) -> None:
        ep.dispatch(x(step.x_TH.detach()), ids(step.ids_TK), weights(step.weights_TK.detach()))

    return act


def same(tensor: Tensor) -> Tensor:
    return tensor


def combine_wrongly(out: Callable[[Tensor], Tensor]) -> Any:
    def act(ep: a2a.ExpertParallel, step: Step) -> None:
        step.dispatch()
        ep.combine(out(step.out_RH.detach()), step.routing)

    return act


MISTAKES: dict[str, tuple[Any, str]] = {
    "more tokens than max_tokens": (
        dispatch_wrongly(lambda x: x.repeat(3, 1), lambda i: i.repeat(3, 1), lambda w: w.repeat(3, 1)),
        "15 tokens.*max_tokens.*5",
    ),
    "an id too large": (
        dispatch_wrongly(same, lambda i: i.index_fill(0, torch.tensor(2), 7), same),
        r"\[2, 0\].* 7.*0 to 6",
    ),
    "an id below -1": (
        dispatch_wrongly(same, lambda i: i.index_fill(0, torch.tensor(2), -2), same),
        r"\[2, 0\].* -2.*0 to 6",
    ),
    "rows of another width": (dispatch_wrongly(lambda x: x[:, :32], same, same), "32.*40"),
    "rows of another dtype": (dispatch_wrongly(lambda x: x.float(), same, same), "float32.*bfloat16"),
    "rows in three dimensions": (dispatch_wrongly(lambda x: x[None], same, same), "1, 5, 40"),
    "ids for another number of tokens": (dispatch_wrongly(same, lambda i: i[1:], same), "5, 40.*4"),
    "ids of another top_k": (dispatch_wrongly(same, lambda i: i[:, :2], same), "3.*5, 2"),
    "ids that are no integers": (dispatch_wrongly(same, lambda i: i.float(), same), "float32"),
    "weights of another shape": (dispatch_wrongly(same, same, lambda w: w[:, 0]), r"\(5,\)|\[5\]"),
    "weights that are integers": (dispatch_wrongly(same, same, lambda w: w.long()), "int64"),
    "expert outputs of another dtype": (combine_wrongly(lambda out: out.float()), "float32.*bfloat16"),
    "expert outputs with a row too few": (combine_wrongly(lambda out: out[1:]), "rows"),
    "expert outputs of another width": (combine_wrongly(lambda out: out[:, :32]), "32.*40"),
}


def make_mistake(name: str) -> None:
    act, message = MISTAKES[name]
    with a2a.communicator(timeout=20) as comm:
        ep = GOOD.expert_parallel(comm=comm)
        step = Step(GOOD, ep)
        if dist.get_rank() == CULPRIT:
            with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
                act(ep, step)
        else:
            with pytest.raises(a2a.A2AError, match=f"rank {CULPRIT}"):
                dispatch_and_combine(step)
    assert_life_goes_on()


def dispatch_and_combine(step: Step) -> None:
    step.dispatch()
    step.combine()


def assert_life_goes_on() -> None:
    """A new communicator works in the same processes."""
    with a2a.communicator() as comm, contextlib.closing(GOOD.expert_parallel(comm=comm)) as ep:
        dispatch_and_combine(Step(GOOD, ep))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_value_error_where_it_is_made_and_its_peers_are_told(world: Any, name: str) -> None:
    world.run(make_mistake, name=name, deadline_s=15)


def make_it_everywhere() -> None:
    """The same mistake on all ranks, then the right call, on one instance: nobody has waited for anybody."""
    with contextlib.closing(GOOD.expert_parallel()) as ep:
        step = Step(GOOD, ep)
        with pytest.raises(ValueError, match=r"32.*40"):
            ep.dispatch(step.x_TH[:, :32], step.ids_TK)


def test_the_same_mistake_on_all_ranks_is_a_value_error_on_all(world: Any) -> None:
    world.run(make_it_everywhere)


def overflow() -> None:
    with a2a.communicator() as comm:
        case = Case(tokens=(20,), num_experts=2, top_k=1, ids="one")  # all rows for the one expert of rank 1
        step = Step(case, case.expert_parallel(comm=comm, max_rows=8))
        with pytest.raises(a2a.A2AError, match="rank 1") as caught:
            dispatch_combine_and_check(step, comm)
        if dist.get_rank() == 1:
            assert isinstance(caught.value, a2a.RowOverflowError)
            assert f"{20 * comm.world_size} rows" in str(caught.value) and "max_rows=8" in str(caught.value)


def dispatch_combine_and_check(step: Step, comm: a2a.Communicator) -> None:
    dispatch_and_combine(step)
    dist.barrier()
    comm.check()


@pytest.mark.ranks(2, 3)
def test_overflow_raise_names_the_rank_and_the_numbers(world: Any) -> None:
    world.run(overflow)


# ---- lifetimes -------------------------------------------------------------------------------------------------------


def close_and_use() -> None:
    with a2a.communicator() as comm:
        ep = GOOD.expert_parallel(comm=comm)
        step = Step(GOOD, ep)
        dispatch_and_combine(step)
        ep.close()
        ep.close()
        with pytest.raises((RuntimeError, ValueError), match="closed"):
            step.dispatch()
        again = GOOD.expert_parallel(comm=comm)
        dispatch_and_combine(Step(GOOD, again))
    with pytest.raises((RuntimeError, ValueError), match="closed"):
        again.dispatch(step.x_TH, step.ids_TK)


def test_a_closed_instance_says_so_and_its_communicator_lives_on(world: Any) -> None:
    world.run(close_and_use)


def on_a_group_that_has_done_nothing() -> list[Answer]:
    """A group of the upper ranks only, whose first collective is ours."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    return [run_in_group(Case(), group)]


def run_in_group(case: Case, group: dist.ProcessGroup) -> Answer:
    with contextlib.closing(case.expert_parallel(group=group)) as ep:
        step = Step(case, ep, group)
        dispatch_and_combine(step)
        step.backward()
        return step.answer()


@pytest.mark.ranks(3)
def test_it_works_on_a_subgroup_whose_first_collective_it_is(world: Any) -> None:
    answers = world.run(on_a_group_that_has_done_nothing)
    assert_answers([answer for rank_answers in answers for answer in rank_answers], expected_step(Case(), 2))


def die_between_dispatch_and_combine() -> None:
    with a2a.communicator(timeout=20) as comm:
        step = Step(GOOD, GOOD.expert_parallel(comm=comm))
        step.dispatch()
        if dist.get_rank() == CULPRIT:
            os._exit(7)
        with pytest.raises(a2a.PeerTimeoutError, match=f"rank {CULPRIT}") as caught:
            step.combine()
        assert (caught.value.peer, caught.value.cause) == (CULPRIT, "died")


@pytest.mark.ranks(2, 3)
def test_a_rank_that_dies_is_named(world: Any) -> None:
    world.run(die_between_dispatch_and_combine, expect_dead=[CULPRIT], deadline_s=15)


def other_ops() -> None:
    """Rank 1 combines while the others dispatch."""
    with a2a.communicator(timeout=20) as comm:
        ep = GOOD.expert_parallel(comm=comm)
        step, other = Step(GOOD, ep), Step(GOOD, ep)
        step.dispatch()
        with pytest.raises(a2a.MismatchError, match=r"dispatch.*combine|combine.*dispatch"):
            step.combine() if dist.get_rank() == CULPRIT else other.dispatch()


@pytest.mark.ranks(2, 3)
def test_ranks_that_run_different_ops_all_hear_of_it(world: Any) -> None:
    world.run(other_ops)
