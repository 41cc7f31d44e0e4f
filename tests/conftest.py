"""Fixtures of all tests: worlds of ranks.

`@pytest.mark.ranks(2, 4)` on a test (or `pytestmark` in a module) runs it with `world` being 2 and then 4 ranks; without it
`world` has 2. Under torchrun `world` is the world that is there, and tests for another number of ranks are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # `pool` by one name, here and in the ranks, in every import mode

from a2a.config import launch
from a2a_world import A2AWorld
from pool import InlineWorld, Pool, World

LAUNCHED_RANKS = launch().world_size if launch().launcher == "torchrun" else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): the numbers of ranks that `world` shall have")
    config.addinivalue_line("markers", "slow: takes seconds, or gigabytes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ranks")
        sizes = mark.args if mark else (2,)
        metafunc.parametrize("world", sizes, indirect=True, ids=[f"{size}ranks" for size in sizes], scope="session")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool | None]:
    """The ranks of this session; None under torchrun."""
    if LAUNCHED_RANKS is None:
        with Pool() as ranks:
            yield ranks
    else:
        dist.init_process_group("gloo")
        yield None
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest, pool: Pool | None) -> World | InlineWorld:
    size: int = request.param
    if pool is not None:
        return pool.world(size)
    if size != LAUNCHED_RANKS:
        pytest.skip(f"for {size} ranks; torchrun started {LAUNCHED_RANKS}")
    return InlineWorld(size)


@pytest.fixture(scope="module")
def own_pool(pool: Pool | None) -> Iterator[Pool]:
    """Ranks for tests that make default groups of backend "a2a"."""
    if pool is None:
        pytest.skip("makes default groups of its own, which torchrun's ranks can't")
    with Pool() as own:
        yield own


@pytest.fixture(scope="module")
def two(own_pool: Pool) -> A2AWorld:
    return A2AWorld(own_pool, 2)


@pytest.fixture(scope="module")
def four(own_pool: Pool) -> A2AWorld:
    return A2AWorld(own_pool, 4)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process; see `cli_run`."""
    from cli_run import in_this_process  # only for tests that ask for it, as it looks for an MPI

    return in_this_process(monkeypatch, capsys)
