"""Ready flags of ExpertParallel where all is ready, on a CPU. See test_cuda_moe_ready.py for GPUs, shim_moe_ready.py too."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import a2a
from moe_cases import Case, Step, with_options

CASE = with_options(Case(tokens=(5, 9)), expert_alignment=4, ready_rows=4)


def all_is_ready() -> None:
    with contextlib.closing(CASE.expert_parallel()) as ep:
        step = Step(CASE, ep)
        rows, _, routing = ep.dispatch(step.x_TH.detach(), step.ids_TK, step.weights_TK)
        flags = ep.ready
        flags.start()
        assert flags.rows == 4 and len(flags.arrived) == len(flags.sendable) >= -(-len(rows) // 4)
        assert bool((flags.arrived - flags.epoch(routing) >= 0).all()) and bool((flags.sendable >= 0).all())
        assert torch.equal(ep.combine(rows, routing, ready=True), ep.combine(rows, routing))
        with pytest.raises(a2a.UnsupportedError, match="CPU"):
            flags.params(routing)
        wide = torch.zeros(len(rows), 2 * CASE.hidden, dtype=CASE.dtype)[:, : CASE.hidden]
        with pytest.raises(ValueError, match="contiguous"):
            ep.combine(wide, routing, ready=True)


def test_on_a_cpu_all_is_ready(world: Any) -> None:
    world.run(all_is_ready)


def there_are_none() -> None:
    case = Case(tokens=(5, 9))
    with contextlib.closing(case.expert_parallel()) as ep:
        step = Step(case, ep)
        rows, _, routing = ep.dispatch(step.x_TH.detach(), step.ids_TK)
        with pytest.raises(ValueError, match="ready_rows=n"):
            _ = ep.ready
        with pytest.raises(ValueError, match="ready_rows=n"):
            ep.combine(rows, routing, ready=True)
    for wrong in (0, True, 1.5, 1 << 21):
        with pytest.raises(ValueError, match="ready_rows"):
            with_options(case, ready_rows=wrong).expert_parallel()


@pytest.mark.ranks(1)
def test_an_instance_without_them_says_so(world: Any) -> None:
    world.run(there_are_none)


def a_gradient() -> None:
    with contextlib.closing(CASE.expert_parallel()) as ep:
        grads = []
        for ready in (False, True):
            step = Step(CASE, ep)
            rows, _, routing = ep.dispatch(step.x_TH, step.ids_TK, step.weights_TK)
            ep.combine(rows, routing, ready=ready).backward(step.grad_TH)
            grads.append((step.x_TH.grad, step.weights_TK.grad))
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)


def test_gradients_are_those_without_them(world: Any) -> None:
    world.run(a_gradient)
