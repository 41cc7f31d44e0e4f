"""ExpertParallel's CUDA kernels on a CPU, and the host code that launches them: see test_cuda_shim.py, shim_moe_push.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shim_build import why_not
from shim_moe_mutants import MUTANTS, MoeMutant
from shim_moe_push import FAILURES, LAYERS, run

NOTICED = (1, 2, 3, 4, -11)  # exit codes: an exception or a wrong byte, misuse, a hang, a race
# The other layers run in the longer form.
LAYERS_HERE = [
    *("chunks", "eight_ranks", "short_ring", "ranges", "pieces", "wide", "float32"),
    *("compact_rows", "top_32", "one_expert", "fp8", "mxfp8_rows", "ready", "ready_wire"),
]


class Jobs:
    """A process a test; as many at a time as there are cores."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pool = folder, ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._jobs: dict[tuple[Any, ...], Future[tuple[int, str]]] = {}

    def start(self, layer: str, scenario: str, seeds: int, mutant: MoeMutant | None = None) -> Future[tuple[int, str]]:
        key = (layer, scenario, seeds, mutant)
        if key not in self._jobs:
            mutations = () if mutant is None else (mutant.replacement,)
            self._jobs[key] = self._pool.submit(run, self._folder, LAYERS[layer], (scenario,), seeds, mutations)
        return self._jobs[key]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """All that was selected, begun at once."""
    if reason := why_not():
        pytest.skip(reason)
    begun = Jobs(tmp_path_factory.mktemp("shim_moe"))
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            begun.start(*arguments(**item.callspec.params))
    yield begun
    begun.close()


def arguments(
    layer: str = "", how: str = "exchanges", mutant: MoeMutant | None = None
) -> tuple[str, str, int, MoeMutant | None]:
    if mutant is not None:
        return mutant.layer, mutant.scenario, 40, mutant  # it ends with the first seed that notices
    return layer, how, 1 if how == "exchanges" else 2, None


@pytest.mark.parametrize("layer", LAYERS_HERE)
def test_no_access_races_and_every_bit_is_right(jobs: Jobs, layer: str) -> None:
    code, said = jobs.start(*arguments(layer=layer)).result()
    assert code == 0, f"exit code {code}\n{said}"


@pytest.mark.parametrize(("layer", "how"), FAILURES)
def test_a_failure_is_told_to_every_rank(jobs: Jobs, layer: str, how: str) -> None:
    code, said = jobs.start(*arguments(layer=layer, how=how)).result()
    assert code == 0, f"exit code {code}\n{said}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(jobs: Jobs, mutant: MoeMutant) -> None:
    code, said = jobs.start(*arguments(mutant=mutant)).result()
    assert code in NOTICED, f"{mutant.name} survived {mutant.scenario} of {mutant.layer} (exit code {code}): {said}"
    assert "adapt the replacement" not in said and "error:" not in said, said
