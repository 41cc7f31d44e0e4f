"""What ExpertParallel over several domains says to a mistake, a mismatch and a death: in every domain, and no rank hangs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from moe_cases import Case, Step, assert_answers, expected_step, full_step, topology_of

BLOCKS, UNEVEN = ((0, 1), (2, 3)), ((0, 1, 2), (3, 4))
CULPRIT = 2
GOOD = Case(tokens=(4, 5), num_experts=9, top_k=3, hidden=40)


@contextlib.contextmanager
def across(timeout: float = 20.0) -> Iterator[Any]:
    """A communicator of the domains that this many ranks have."""
    with a2a.communicator(
        topology=topology_of(BLOCKS if dist.get_world_size() == 4 else UNEVEN), timeout=timeout
    ) as comm:
        yield comm


# ---- mistakes: nothing is exchanged, and life goes on -----------------------------------------------------------------


def until_dispatched(ep: a2a.ExpertParallel) -> Step:
    step = Step(GOOD, ep)
    with torch.no_grad():
        step.dispatch()
    return step


def bad_id(ep: a2a.ExpertParallel, wrong: bool) -> None:
    step = Step(GOOD, ep)
    ids_TK = step.ids_TK.clone()
    if wrong:
        ids_TK[1, 2] = 9
    ep.dispatch(step.x_TH, ids_TK)


def bad_rows(ep: a2a.ExpertParallel, wrong: bool) -> None:
    step = until_dispatched(ep)
    ep.combine(step.out_RH[:, :32] if wrong else step.out_RH, step.routing)


def bad_gradient(ep: a2a.ExpertParallel, wrong: bool) -> None:
    step = until_dispatched(ep)
    ep.combine_backward(step.grad_TH[:1] if wrong else step.grad_TH, step.out_RH, step.routing)


def bad_gradient_of_rows(ep: a2a.ExpertParallel, wrong: bool) -> None:
    step = until_dispatched(ep)
    ep.dispatch_backward(step.out_RH.double() if wrong else step.out_RH, step.routing)


MISTAKES: dict[str, tuple[Callable[[a2a.ExpertParallel, bool], None], str]] = {
    "dispatch": (bad_id, r"topk_ids_TK\[1, 2\] is 9; expert ids are 0 to 8"),
    "combine": (bad_rows, "out_rows has shape"),
    "combine_backward": (bad_gradient, "grad has shape"),
    "dispatch_backward": (bad_gradient_of_rows, "grad_rows is torch.float64"),
}


def make_mistake(name: str) -> None:
    act, message = MISTAKES[name]
    culprit = dist.get_rank() == CULPRIT
    with across() as comm, contextlib.closing(GOOD.expert_parallel(comm=comm)) as ep:
        for _ in range(2):
            with pytest.raises((ValueError, TypeError) if culprit else a2a.MismatchError, match=message) as caught:
                act(ep, culprit)
            if not culprit:
                assert f"rank {CULPRIT} refused its own call" in str(caught.value), caught.value
        step = Step(GOOD, ep)
        assert_answers([full_step(step)], [expected_in_domains(dist.get_rank())])
        comm.check()


def expected_in_domains(rank: int) -> Any:
    world_size = dist.get_world_size()
    domains = BLOCKS if world_size == 4 else UNEVEN
    case = Case(tokens=(4, 5), num_experts=9, top_k=3, hidden=40, domains=domains)
    return expected_step(case, world_size)[rank]


@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_is_told_in_every_domain_and_breaks_nothing(world: Any, name: str) -> None:
    world.run(make_mistake, name=name, deadline_s=30)


def mistakes_everywhere() -> None:
    with across() as comm, contextlib.closing(GOOD.expert_parallel(comm=comm)) as ep:
        with pytest.raises(ValueError, match="expert ids are 0 to 8"):
            bad_id(ep, True)
        bad_id(ep, False)


@pytest.mark.ranks(4)
def test_the_same_mistake_of_all_ranks_is_everybodys_own(world: Any) -> None:
    world.run(mistakes_everywhere)


# ---- mismatches ------------------------------------------------------------------------------------------------------


def construct_differently(others: list[int]) -> None:
    hidden = 48 if dist.get_rank() in others else 40
    with across() as comm:
        with pytest.raises(a2a.MismatchError, match=r"(?s)hidden=4[08].*hidden=4[08]"):
            GOOD.expert_parallel(comm=comm, hidden=hidden)
        with contextlib.closing(GOOD.expert_parallel(comm=comm)) as ep:
            bad_id(ep, False)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("others", [[2, 3], [3]], ids=["another domain", "another rank of a domain"])
def test_ranks_that_construct_it_differently_all_hear_of_it(world: Any, others: list[int]) -> None:
    world.run(construct_differently, others=others, deadline_s=30)


def other_ops(others: list[int]) -> None:
    with across() as comm:
        ep = GOOD.expert_parallel(comm=comm)
        step, other = until_dispatched(ep), Step(GOOD, ep)
        with pytest.raises(a2a.MismatchError, match=r"(?s)dispatch.*combine|combine.*dispatch"):
            ep.combine(step.out_RH, step.routing) if dist.get_rank() in others else other.dispatch()
        assert int(comm.ok) == 0
        with pytest.raises(a2a.MismatchError):  # on and on
            comm.check()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("others", [[2, 3], [3]], ids=["another domain", "another rank of a domain"])
def test_ranks_that_run_different_ops_all_hear_of_it(world: Any, others: list[int]) -> None:
    world.run(other_ops, others=others, deadline_s=30)


def another_routing() -> None:
    """One domain combines with the routing of another dispatch, of as many tokens."""
    with across() as comm:
        ep = GOOD.expert_parallel(comm=comm)
        steps = [until_dispatched(ep)]
        other = Step(GOOD, ep)
        other.ids_TK = other.ids_TK.clone()
        other.ids_TK[:, 0] = -1
        other.ids_TK[0] = 0
        with torch.no_grad():
            other.dispatch()
        steps.append(other)
        step = steps[dist.get_rank() >= 2]
        with pytest.raises(a2a.MismatchError, match="routing of another dispatch"):
            ep.combine(step.out_RH, step.routing)


@pytest.mark.ranks(4)
def test_the_routing_of_another_dispatch_is_found_out(world: Any) -> None:
    world.run(another_routing, deadline_s=30)


def overflow() -> None:
    """All rows come to the last rank, whose domain raises at once, the others with their next call."""
    case = Case(tokens=(20,), num_experts=4, top_k=1, ids="one")
    with across() as comm:
        ep = case.expert_parallel(comm=comm, max_rows=8)
        step, rank = Step(case, ep), dist.get_rank()
        if rank < 2:
            step.dispatch()
        with pytest.raises(a2a.RowOverflowError, match=r"rank 3 received 80 rows .80 with padding., above max_rows=8"):
            step.combine() if rank < 2 else step.dispatch()


@pytest.mark.ranks(4)
def test_overflow_is_raised_in_every_domain(world: Any) -> None:
    world.run(overflow, deadline_s=30)


# ---- deaths ----------------------------------------------------------------------------------------------------------


def die(before: str) -> None:
    with across() as comm, torch.no_grad():
        ep = GOOD.expert_parallel(comm=comm)
        step = Step(GOOD, ep)
        acts: dict[str, Callable[[], Any]] = {
            "dispatch": step.dispatch,
            "combine": step.combine,
            "combine_backward": lambda: ep.combine_backward(step.grad_TH, step.out_RH, step.routing),
            "dispatch_backward": lambda: ep.dispatch_backward(step.out_RH, step.routing),
        }
        for name, act in acts.items():
            if name != before:
                act()
                continue
            if dist.get_rank() == CULPRIT:
                os._exit(7)
            with pytest.raises(a2a.PeerTimeoutError, match=f"rank {CULPRIT}.*leg (rail|domain)") as caught:
                act()
            assert (caught.value.peer, caught.value.cause) == (CULPRIT, "died")
            return


@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("before", ["dispatch", "combine", "combine_backward", "dispatch_backward"])
def test_a_rank_that_dies_is_named_in_every_domain_with_its_leg(world: Any, before: str) -> None:
    world.run(die, before=before, expect_dead=[CULPRIT], deadline_s=30)


def late() -> str:
    with across(timeout=4.0) as comm:
        ep = GOOD.expert_parallel(comm=comm)
        dist.barrier()
        if dist.get_rank() != CULPRIT:
            with pytest.raises(a2a.PeerTimeoutError, match=f"rank {CULPRIT}") as caught:
                Step(GOOD, ep).dispatch()
            assert caught.value.cause == "timeout"
        dist.barrier()
    return ""


@pytest.mark.ranks(4)
def test_a_rank_that_is_late_is_named_in_every_domain(world: Any) -> None:
    world.run(late, deadline_s=30)
