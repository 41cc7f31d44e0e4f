"""Every instruction set the kernels are compiled for gives the bits of the reference, where the processor has it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from a2a.kernels import cpu
from moe_cases import Answer, Case, assert_answers, expected_step, run_step, with_options

SETS = ("plain", "avx2", "avx512")


def has(name: str) -> bool:
    """Whether this processor and this build run the set; the choice is left as it was."""
    before = cpu.isa()
    there = bool(cpu.lib().a2a_select_isa(name.encode()))
    cpu.lib().a2a_select_isa(before.encode())
    return there


def step_with(isa: str, case: Case) -> Answer:
    before = cpu.isa()
    assert cpu.lib().a2a_select_isa(isa.encode())
    try:
        assert cpu.isa() == isa
        return run_step(case)
    finally:
        cpu.lib().a2a_select_isa(before.encode())


# Rows of whole vectors, with a tail, shorter than one, and long enough to be stored past the cache.
SHAPES = [(512, (6, 9)), (1208, (6, 9)), (8, (6, 9)), (4096, (64, 64))]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("hidden", "tokens"), SHAPES)
@pytest.mark.parametrize("wire", [None, "fp8", "mxfp8"])
def test_every_instruction_set_gives_the_same_bits(
    world: Any, isa: str, dtype: torch.dtype, hidden: int, tokens: tuple[int, int], wire: str | None
) -> None:
    if not has(isa):
        pytest.skip(f"this processor or build has no {isa}")
    case = Case(hidden=hidden, dtype=dtype, tokens=tokens)
    case = case if wire is None else with_options(case, wire=wire)
    assert_answers(world.run(step_with, isa=isa, case=case), expected_step(case, world.size))


def test_the_best_set_of_this_processor_is_chosen() -> None:
    assert cpu.isa() == [name for name in SETS if has(name)][-1]
    assert not ctypes.c_int(cpu.lib().a2a_select_isa(b"sse9")).value
