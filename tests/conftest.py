"""Fixtures of all tests: worlds of ranks.

`@pytest.mark.ranks(2, 4)` on a test (or `pytestmark` in a module) runs it with `world` being 2 and then 4 ranks; without it
`world` has 2. Under torchrun `world` is the world that is there, and tests for another number of ranks are skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # `pool` by one name, here and in the ranks, in every import mode

from pool import InlineWorld, Pool, World

TORCHRUN_WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


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
    if TORCHRUN_WORLD_SIZE is None:
        with Pool() as ranks:
            yield ranks
    else:
        dist.init_process_group("gloo")
        yield None
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest, pool: Pool | None) -> World | InlineWorld:
    return _world(pool, request.param)


def _world(pool: Pool | None, size: int) -> World | InlineWorld:
    if pool is not None:
        return pool.world(size)
    if size != TORCHRUN_WORLD_SIZE:
        pytest.skip(f"for {size} ranks; torchrun started {TORCHRUN_WORLD_SIZE}")
    return InlineWorld(size)
