"""The kernels of all_reduce_rms_norm, and those through the software switch, on a CPU: see test_cuda_shim.py.

`python tests/test_cuda_shim_fused.py 1000` runs a thousand seeds of every scenario with 1 to 8 ranks.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shim_multimem
import shim_norm
from shim_build import Kernel, Mutant, ShimBuild, run, shim
from test_cuda_shim import MUTANT_RANKS, NOTICED

__all__ = ["shim"]  # a fixture

KERNELS = (*shim_norm.KERNELS, *shim_multimem.KERNELS)
MUTANTS = (
    *((shim_norm.ONE_SHOT, mutant) for mutant in shim_norm.ONE_SHOT_MUTANTS),
    *((shim_norm.TWO_SHOT, mutant) for mutant in shim_norm.TWO_SHOT_MUTANTS),
    *shim_multimem.MUTANTS,
)


@pytest.fixture(scope="session", autouse=True)
def fused_compiled_meanwhile(request: pytest.FixtureRequest, shim: ShimBuild) -> None:
    """Every core compiles mutants that were selected, while the first tests run."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.function is test_a_mutant_is_caught:
            shim.start(item.callspec.params["kernel"], MUTANT_RANKS, item.callspec.params["mutant"].replacement)


@pytest.mark.parametrize(("ranks", "seeds"), [(2, 6), (3, 4)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_no_access_races_and_every_byte_is_right(shim: ShimBuild, kernel: Kernel, ranks: int, seeds: int) -> None:
    done = run(shim.executable(kernel, ranks), ("all",), seeds)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("kernel", "mutant"), MUTANTS, ids=[f"{kernel.name}-{m.name}" for kernel, m in MUTANTS])
def test_a_mutant_is_caught(shim: ShimBuild, kernel: Kernel, mutant: Mutant) -> None:
    executable = shim.executable(kernel, MUTANT_RANKS, mutant.replacement)
    for scenario in mutant.scenarios:
        done = run(executable, (scenario,), seeds=1000)  # it ends with the first seed that notices
        assert done.returncode in NOTICED, (
            f"{mutant.name} survived {scenario} (exit code {done.returncode}): {done.stderr}"
        )


def main(seeds: int) -> int:
    """Every kernel with 1 to 8 ranks; one run a core at a time."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        build = ShimBuild(Path(name))
        kernels = (*KERNELS, *shim_norm.MORE_KERNELS, *shim_multimem.MORE_KERNELS)
        jobs = [(kernel, ranks) for kernel in kernels for ranks in range(1, 9)]
        results = pool.map(lambda job: run(build.executable(*job), ("all",), seeds, timeout_s=None), jobs)
        failed = 0
        for (kernel, ranks), done in zip(jobs, results, strict=True):
            failed |= done.returncode
            print(f"{kernel.name}, {ranks} ranks: {done.stderr or 'ok'}", flush=True)
        build.close()
        return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
