"""The CUDA kernels on a CPU: every access watched for data races, every byte compared; mutants must be caught.

`cuda_shim/` is a machine of up to 8 GPUs on one CPU thread: every thread of a kernel is a fiber, a seed decides who runs
when, and a detector judges each access by orders and scopes as PTX has them (csrc/README.md says what it can't show). The
kernels' own sources run on it, but for constants that are made small. A mutant is such a source with a line broken, which a
scenario must notice by a data race, a wrong byte or record, or a hang.

`python tests/test_cuda_shim.py 1000` runs a thousand seeds of every scenario with 1 to 8 ranks, also of the reductions'
kernels, which are test_cuda_shim_reductions.py's, and of ExpertParallel's, which are test_cuda_shim_moe.py's.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shim_all_to_all_push
import shim_moe_push
import shim_norm
import shim_reduce
from shim_build import SHIM, SOURCES, Kernel, Mutant, ShimBuild, run, shim

__all__ = ["shim"]  # a fixture

WRONG, MISUSE, HANG, RACE = 1, 2, 3, 4  # exit codes
NOTICED = (WRONG, MISUSE, HANG, RACE, -11)
KERNELS = (
    (shim_all_to_all_push.KERNEL, shim_all_to_all_push.MUTANTS),
    (shim_all_to_all_push.RAGGED, shim_all_to_all_push.RAGGED_MUTANTS),
)
MUTANT_RANKS = 3
SELF_TEST = Kernel("self_test")
# Scenarios of self_test.cpp, and how each must end.
SELF_TESTS = {
    "warps": 0, "histogram": 0, "message": 0, "fence": 0, "launches": 0, "exchange": 0,
    "bulk": 0, "conversions": 0, "bulk_no_await": RACE, "bulk_no_wait_read": RACE, "bulk_no_wait": RACE,
    "not_released": RACE, "not_acquired": RACE, "device_scope": RACE, "volatile_word": RACE, "plain_word": RACE,
    "out_of_order": WRONG, "early_launch": RACE, "no_syncthreads": RACE, "no_syncwarp": RACE, "block_scope": RACE,
    "blocks": RACE, "divergent": HANG, "unlike": MISUSE, "nobody_comes": HANG, "half_a_warp": MISUSE,
}  # fmt: skip


def test_every_function_of_ptx_has_a_twin() -> None:
    def functions(path: Path) -> set[str]:
        found = re.findall(r"__forceinline__ ([\w:]+ \w+\([^)]*\)) \{", path.read_text())
        return {re.sub(r"\s+", " ", f) for f in found if "shared_address" not in f}  # which only that file uses

    real, twins = functions(SOURCES / "cuda" / "ptx.cuh"), functions(SHIM / "ptx.cuh")
    assert len(real) > 5
    assert not real - twins, f"tests/cuda_shim/ptx.cuh needs a twin of {sorted(real - twins)}"
    assert not twins - real, f"csrc/cuda/ptx.cuh has no {sorted(twins - real)}"


def test_every_kernel_has_scenarios() -> None:
    elsewhere = {*shim_moe_push.SOURCES, *shim_reduce.SOURCES, *shim_norm.SOURCES, "reduce_multimem", "all_to_all_copy"}
    here = {kernel.name for kernel, _ in KERNELS} - {shim_all_to_all_push.RAGGED.name}  # which has no source of its own
    assert {p.stem for p in (SOURCES / "cuda").glob("*.cu")} == here | elsewhere


@pytest.fixture(scope="session", autouse=True)
def compiled_meanwhile(request: pytest.FixtureRequest, shim: ShimBuild) -> None:
    """Every core compiles mutants that were selected, while the first tests run."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.function is test_a_mutant_is_caught:
            shim.start(item.callspec.params["kernel"], MUTANT_RANKS, item.callspec.params["mutant"].replacement)


@pytest.mark.parametrize("scenario", SELF_TESTS)
def test_the_machine_does_and_notices_what_it_must(shim: ShimBuild, scenario: str) -> None:
    wanted = SELF_TESTS[scenario]
    done = run(shim.executable(SELF_TEST, 2), (scenario,), seeds=500 if wanted else 20)
    assert done.returncode == wanted, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("ranks", "seeds"), [(1, 4), (2, 10), (3, 6), (8, 1)])
@pytest.mark.parametrize("kernel", [kernel for kernel, _ in KERNELS], ids=lambda kernel: kernel.name)
def test_no_access_races_and_every_byte_is_right(shim: ShimBuild, kernel: Kernel, ranks: int, seeds: int) -> None:
    done = run(shim.executable(kernel, ranks), ("all",), seeds)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    ("kernel", "mutant"),
    [pytest.param(kernel, m, id=f"{kernel.name}-{m.name}") for kernel, mutants in KERNELS for m in mutants],
)
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
        reductions = (*shim_reduce.KERNELS, *shim_reduce.MORE_KERNELS)
        jobs = [(kernel, ranks) for kernel in (*(k for k, _ in KERNELS), *reductions) for ranks in range(1, 9)]
        results = pool.map(lambda job: run(build.executable(*job), ("all",), seeds, timeout_s=None), jobs)
        failed = 0
        for (kernel, ranks), done in zip(jobs, results, strict=True):
            failed |= done.returncode
            print(f"{kernel.name}, {ranks} ranks: {done.stderr or 'ok'}", flush=True)
        build.close()
        return failed or shim_moe_push.run_all(Path(name), seeds)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
