"""Groups of ranks against domains: what a rank order splits, and the orders that don't."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from a2a.cli import parse
from a2a.topology import Domain, Topology, placement, presets
from cli_run import Here


def domains_of(*members: list[int], hosts: bool = True) -> Topology:
    domains = [Domain(tuple(ranks), "nvlink", f"h{i}" if hosts else "") for i, ranks in enumerate(members)]
    return Topology(tuple(domains), presets.H200_NVLINK, presets.HOPPER_NET)


def moved(topology: Topology, order: tuple[int, ...]) -> Topology:
    """The topology that the ranks would find after `order` was applied."""
    return topology.restrict(order)


CYCLIC = domains_of([0, 2, 4, 6], [1, 3, 5, 7])
BLOCK = domains_of([0, 1, 2, 3], [4, 5, 6, 7])


def test_regular_groups_are_consecutive_or_strided() -> None:
    assert placement.regular_groups(8, 4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert placement.regular_groups(8, 2, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    with pytest.raises(ValueError, match="6 ranks don't divide into groups of 4; expected a multiple of 4"):
        placement.regular_groups(6, 4)


def test_a_good_order_is_left_alone() -> None:
    result = placement.check(BLOCK, placement.regular_groups(8, 4))
    assert (result.split, result.order, result.split_after) == ((), None, ())


def test_a_cyclic_order_is_told_to_become_a_block_order() -> None:
    groups = placement.regular_groups(8, 4)
    result = placement.check(CYCLIC, groups)
    assert result.split == (0, 1)
    assert result.order == (0, 2, 4, 6, 1, 3, 5, 7)
    assert result.distribution == "block"
    assert placement.check(moved(CYCLIC, result.order), groups).split == ()


def test_strided_groups_want_the_cyclic_order() -> None:
    groups = placement.regular_groups(8, 4, 2)
    result = placement.check(BLOCK, groups)
    assert result.distribution == "cyclic"
    assert result.order is not None
    assert placement.check(moved(BLOCK, result.order), groups).split == ()


def test_groups_that_skip_tensor_parallel_ranks_want_planes() -> None:
    topology = domains_of(list(range(8)), list(range(8, 16)))
    groups = [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    result = placement.check(topology, groups)
    assert (result.distribution, result.split_after) == ("plane=2", ())


def test_an_order_that_no_launcher_has_a_word_for_is_packed() -> None:
    groups = [[0, 7, 3, 4], [1, 2, 5, 6]]
    result = placement.check(BLOCK, groups)
    assert (result.split, result.split_after, result.distribution) == ((0, 1), (), "")
    assert result.order is not None
    assert placement.check(moved(BLOCK, result.order), groups).split == ()


def test_random_orders_of_unequal_domains_are_mended() -> None:
    shuffle = random.Random(7)
    for _ in range(20):
        ranks = list(range(24))
        shuffle.shuffle(ranks)
        topology = domains_of(ranks[:4], ranks[4:12], ranks[12:])
        groups = placement.regular_groups(24, 4)
        result = placement.check(topology, groups)
        assert result.split
        assert result.order is not None
        assert sorted(result.order) == list(range(24))
        assert result.split_after == placement.check(moved(topology, result.order), groups).split == ()


def test_racks_of_72_hold_two_groups_of_32_each() -> None:
    topology = presets.get("gb300:nvl72x4")
    result = placement.check(topology, placement.regular_groups(288, 32))
    assert (len(result.split), len(result.split_after)) == (3, 1)  # 9 groups, room for 8 whole ones
    assert "hold 8 whole groups of 32" in result.reason
    assert result.order is not None
    assert placement.check(moved(topology, result.order), result.groups).split == result.split_after


def test_a_group_larger_than_any_domain_is_told() -> None:
    result = placement.check(presets.get("h200:4x8"), placement.regular_groups(32, 16))
    assert (result.split, result.order) == ((0, 1), None)
    assert "larger than any domain (8 ranks)" in result.reason


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 8]], "rank 8 is not in this topology"),
        ([[0, 1], [1]], "rank 1 is listed 2 times"),
        ([[0], []], "a group is empty"),
    ],
)
def test_wrong_groups_are_named(groups: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placement.check(BLOCK, groups)


def test_ranks_outside_the_groups_keep_room_for_them() -> None:
    result = placement.check(BLOCK, [[0, 4], [1, 5]])
    assert result.split_after == ()
    assert result.order is not None
    assert sorted(result.order) == list(range(8))


def test_groups_are_written_as_ranges() -> None:
    assert parse.groups("0-3,8/4,9") == [[0, 1, 2, 3, 8], [4, 9]]
    with pytest.raises(ValueError, match="'3-1' is no rank"):
        parse.groups("3-1")


# ---- the command


def test_check_exits_with_0_where_nothing_is_wrong(here: Here) -> None:
    told = here("topo", "--topology", "h200:4x8", "--check", "--group-size", "8")
    assert told.returncode == 0, told.stderr
    assert "4 groups of 8" in told.stdout
    assert "Each group is inside one domain" in told.stdout


def test_check_prints_the_setting_and_writes_the_ranks_file(here: Here, tmp_path: Path) -> None:
    CYCLIC.save(tmp_path / "topo.json")
    ranks_file, json_file = tmp_path / "ranks", tmp_path / "check.json"
    told = here(
        *("topo", "--check", "--topology", tmp_path / "topo.json", "--group-size", "4"),
        *("--ranks-file", ranks_file, "--json", json_file),
    )
    assert told.returncode == 1, told.stderr
    assert "group 0 (ranks 0-3): h0, h1" in told.stdout
    assert "srun --distribution=block" in told.stdout
    assert "torchrun: --node-rank" in told.stdout
    assert ranks_file.read_text().split() == ["h0"] * 4 + ["h1"] * 4
    (line,) = json_file.read_text().splitlines()
    assert json.loads(line)["order"] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert json.loads(line)["ok"] is False


def test_check_of_racks_says_how_to_allocate_nodes(here: Here) -> None:
    told = here("topo", "--check", "--topology", "gb300:nvl72x4", "--group-size", "64")
    assert told.returncode == 2
    assert "288 ranks don't divide into groups of 64" in told.stderr
    told = here("topo", "--check", "--topology", "gb300:nvl72x4", "--group-size", "32")
    assert told.returncode == 1
    assert "start a multiple of 32 ranks in each domain" in told.stdout


def test_options_of_check_need_it(here: Here) -> None:
    told = here("topo", "--topology", "cpu:4", "--group-size", "2")
    assert told.returncode == 2
    assert "add --check" in told.stderr
