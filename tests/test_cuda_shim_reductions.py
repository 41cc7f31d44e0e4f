"""The CUDA kernels of all-reduce, reduce-scatter and all-gather on a CPU: see test_cuda_shim.py, shim_reduce.py."""

from __future__ import annotations

import pytest

from shim_build import Kernel, Mutant, ShimBuild, run, shim
from shim_reduce import KERNELS, MUTANTS
from test_cuda_shim import MUTANT_RANKS, NOTICED

__all__ = ["shim"]  # a fixture


@pytest.fixture(scope="module", autouse=True)
def compiled_meanwhile(request: pytest.FixtureRequest, shim: ShimBuild) -> None:
    """Every core compiles mutants that were selected, while the first tests run."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and "mutant" in item.callspec.params:
            shim.start(item.callspec.params["kernel"], MUTANT_RANKS, item.callspec.params["mutant"].replacement)


@pytest.mark.parametrize(("ranks", "seeds"), [(1, 3), (2, 6), (3, 3)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_no_access_races_and_every_element_is_right(shim: ShimBuild, kernel: Kernel, ranks: int, seeds: int) -> None:
    done = run(shim.executable(kernel, ranks), ("all",), seeds)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("kernel", "mutant"), MUTANTS, ids=[f"{kernel.name}-{m.name}" for kernel, m in MUTANTS])
def test_a_mutant_is_caught(shim: ShimBuild, kernel: Kernel, mutant: Mutant) -> None:
    executable = shim.executable(kernel, MUTANT_RANKS, mutant.replacement)
    for scenario in mutant.scenarios:
        done = run(executable, (scenario,), seeds=200)  # it ends with the first seed that notices
        assert done.returncode in NOTICED, (
            f"{mutant.name} survived {scenario} (exit code {done.returncode}): {done.stderr}"
        )
