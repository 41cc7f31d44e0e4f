"""The layers that `a2a bench moe` times, in the way that GPUs have them timed: each phase by itself, again and again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.cli.moe_case import MoeCase
from a2a.cli.moe_contenders import PARTS, A2aRounds, C10dRounds, Rounds

CASE: dict[str, Any] = {"tokens": 37, "hidden": 128, "experts": 7, "top_k": 3, "dtype": torch.bfloat16, "seed": 5}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"alignment": 8},
    {"max_rows": 200, "alignment": 4},
    {"layout": "compact"},
    {"layout": "compact", "max_rows": 200, "alignment": 4},
    {"wire": "fp8"},
    {"wire": "fp8", "rows": "wire", "alignment": 4},
    {"wire": "mxfp8", "rows": "wire", "layout": "compact", "max_rows": 200},
)


def phases(kind: dict[str, Any]) -> None:
    with a2a.communicator() as comm:
        case = MoeCase(**CASE, ranks=comm.world_size, **kind)
        rounds = A2aRounds(case, comm)
        repeated(rounds)


def baseline_phases() -> None:
    repeated(C10dRounds(MoeCase(**CASE, ranks=dist.get_world_size()), dist.get_rank()))


def repeated(rounds: Rounds) -> None:
    assert rounds.wrong() == 0
    for name in PARTS:
        for _ in range(3):
            getattr(rounds, name)()
    for _ in range(2):
        rounds.round()
    assert rounds.wrong() == 0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "usual")
def test_phases_may_be_made_any_number_of_times(world: Any, kind: dict[str, Any]) -> None:
    world.run(phases, kind=kind)


@pytest.mark.ranks(2, 3)
def test_so_may_the_baselines(world: Any) -> None:
    world.run(baseline_phases)


def forgotten(what: str) -> None:
    """A layer that loses a row, or mixes up experts, is found out by its own check."""
    with a2a.communicator() as comm:
        rounds = A2aRounds(MoeCase(**CASE, ranks=comm.world_size, layout="compact"), comm)
        combine = rounds.combine

        def broken() -> None:
            if what == "experts":
                rounds.out = rounds.out.flip(0)
            else:
                rounds.out[len(rounds.out) // 2] = 0
            combine()

        rounds.combine = broken  # type: ignore[method-assign]
        assert rounds.wrong() > 0


@pytest.mark.parametrize("what", ["experts", "row"])
def test_a_broken_layer_is_found_out(world: Any, what: str) -> None:
    world.run(forgotten, what=what)
