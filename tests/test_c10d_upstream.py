"""torch's own cases of all-to-all, on backend "a2a": equal and unequal, complex, on WORLD, on a part, on a group of all.

Rank r sends pieces filled with r. Equal ones: everybody gets one row from each peer. Unequal: rank r gets r + 1 rows from
each, so that the splits differ on the sending side only.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from a2a_world import A2AWorld
from pool import Pool

WORLD_SIZE = 3
GROUPS = {"world": None, "part": [1, 2], "full": [0, 1, 2]}  # the last two are made by new_group
DTYPES = {"real": torch.float32, "complex": torch.complex64}

pytestmark = [
    pytest.mark.parametrize("which", GROUPS),
    pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys()),
]


@pytest.fixture(scope="module")
def ranks(pool: Pool | None) -> Iterator[A2AWorld]:
    if pool is None:
        pytest.skip("makes default groups of its own, which torchrun's ranks can't")
    with Pool() as own:
        yield A2AWorld(own, WORLD_SIZE)


def filled(rows: int, value: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, WORLD_SIZE), value, dtype=dtype) * (1 + 1j if dtype.is_complex else 1)


def members_and_group(which: str) -> tuple[list[int], dist.ProcessGroup | None]:
    if GROUPS[which] is None:
        return list(range(WORLD_SIZE)), None
    return GROUPS[which], dist.new_group(GROUPS[which])


def check_single(which: str, dtype: torch.dtype, unequal: bool) -> None:
    members, group = members_and_group(which)
    rank = dist.get_rank()
    if rank in members:
        rows_sent = [peer + 1 if unequal else 1 for peer in members]
        rows_got = rank + 1 if unequal else 1
        source = filled(sum(rows_sent), rank, dtype)
        target = filled(rows_got * len(members), -1, dtype)
        splits = ([rows_got] * len(members), rows_sent) if unequal else ()
        dist.all_to_all_single(target, source, *splits, group=group)
        expected = torch.cat([filled(rows_got, peer, dtype) for peer in members])
        torch.testing.assert_close(target, expected, rtol=0, atol=0)
        assert not (group or dist.group.WORLD).stats()["handed_over"]
        leave(group)


def check_list(which: str, dtype: torch.dtype) -> None:
    members, group = members_and_group(which)
    rank = dist.get_rank()
    if rank in members:
        sources = [filled(peer + 1, rank, dtype) for peer in members]
        targets = [filled(rank + 1, -1, dtype) for _ in members]
        dist.all_to_all(targets, sources, group=group)
        expected = [filled(rank + 1, peer, dtype) for peer in members]
        torch.testing.assert_close(targets, expected, rtol=0, atol=0)
        assert not (group or dist.group.WORLD).stats()["handed_over"]
        leave(group)


def leave(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
def test_all_to_all_single(ranks: A2AWorld, which: str, dtype: torch.dtype, unequal: bool) -> None:
    ranks.run(check_single, which=which, dtype=dtype, unequal=unequal)


def test_all_to_all(ranks: A2AWorld, which: str, dtype: torch.dtype) -> None:
    ranks.run(check_list, which=which, dtype=dtype)
