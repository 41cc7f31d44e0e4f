"""The copy engines' all-to-all on an emulated machine: see test_cuda_shim.py, shim_copy.py."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import pytest

from pool import PRELOADED
from shim_build import Replacement, located, why_not
from shim_copy import CAUSES, MUTANTS, CopyMutant, job

NOTICED = (1, 2, 3, 4, -11)  # exit codes: an exception or a wrong byte, misuse, a hang, a race


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all tests, whose machine is compiled once."""
    if reason := why_not():
        pytest.skip(reason)
    return tmp_path_factory.mktemp("shim_copy")


def run(folder: Path, world: int, scenario: str, seeds: int, mutations: Sequence[Replacement] = ()) -> tuple[int, str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    log = folder / "log"
    process = context.Process(target=job, args=(folder, world, scenario, seeds, mutations, log))
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
    process.join()
    return process.exitcode or 0, located(log.read_text())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_access_races_and_every_byte_is_right(folder: Path, size: int) -> None:
    code, said = run(folder, size, "exchanges", 10)
    assert code == 0, f"exit code {code}\n{said}"


@pytest.mark.parametrize("how", CAUSES)
def test_a_failure_is_told_to_every_rank(folder: Path, how: str) -> None:
    code, said = run(folder, 3, how, 5)
    assert code == 0, f"exit code {code}\n{said}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(folder: Path, mutant: CopyMutant) -> None:
    code, said = run(folder, 3, mutant.scenario, 20, (mutant.replacement,))
    assert code in NOTICED, f"{mutant.name} survived {mutant.scenario} (exit code {code}): {said}"
    assert "adapt the replacement" not in said and "error:" not in said, said
