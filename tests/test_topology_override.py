"""A2A_TOPOLOGY instead of detection: equal on all ranks, of the right size, cut for a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from a2a.errors import MismatchError
from a2a.topology import Topology, presets, resolve
from topology_ranks import (
    groups,
    run_threads,
    same,
)


def resolving(*overrides: str | None, **options: Any) -> list[Any]:
    """Resolve on as many ranks as there are overrides."""
    return run_threads(lambda x, rank, size: resolve(x, rank, size, overrides[rank], **options), len(overrides))


def test_without_an_override_the_topology_is_detected() -> None:
    assert groups(same(resolving(None, None, None))) == [(0, 1, 2)]
    assert resolve(None, 0, 1) == Topology.detect()


def test_an_override_is_taken_instead_of_what_is_there(tmp_path: Path) -> None:
    assert same(resolving("cpu:2x2", "cpu:2x2", "cpu:2x2", "cpu:2x2")) == presets.get("cpu:2x2")
    presets.get("cpu:3x1").save(tmp_path / "three.json")
    assert same(resolving(*[str(tmp_path / "three.json")] * 3)) == presets.get("cpu:3x1")
    assert resolve(None, 0, 1, "cpu:1") == presets.get("cpu:1")


def test_a_group_gets_its_part_of_the_jobs_override() -> None:
    part = same(resolving("cpu:2x2", "cpu:2x2", "cpu:2x2", job_ranks=[3, 0, 2], job_size=4))
    assert groups(part) == [(0, 2), (1,)]


def all_raise(results: list[Any], kind: type[Exception], *parts: str) -> None:
    assert [type(error) for error in results] == [kind] * len(results)
    for error in results:
        assert all(part in str(error) for part in parts), error


def test_an_override_for_another_number_of_ranks_is_refused_on_all() -> None:
    all_raise(resolving("cpu:4", "cpu:4"), ValueError, "A2A_TOPOLOGY=cpu:4 is for 4 ranks, but the job has 2")
    all_raise(resolving("cpu:4", "cpu:4", job_ranks=[0, 1], job_size=8), ValueError, "4 ranks, but the job has 8")
    with pytest.raises(ValueError, match="is for 2 ranks, but the job has 1"):
        resolve(None, 0, 1, "cpu:2")


def test_an_override_that_one_rank_can_not_load_is_refused_on_all(tmp_path: Path) -> None:
    presets.get("cpu:2").save(tmp_path / "two.json")
    results = resolving(str(tmp_path / "two.json"), str(tmp_path / "missing.json"))
    all_raise(results, ValueError, "rank 1: A2A_TOPOLOGY=", "missing.json", "neither a preset nor a readable file")


@pytest.mark.parametrize(
    "overrides", [("cpu:4", "cpu:2x2", "cpu:4", "cpu:4"), ("cpu:4", None, "cpu:4", "cpu:4"), (None, "cpu:2")]
)
def test_overrides_that_differ_are_refused_on_all(overrides: tuple[str | None, ...]) -> None:
    results = resolving(*overrides)
    all_raise(results, MismatchError, "rank 0 has", "rank 1 has", "set A2A_TOPOLOGY alike")
    assert [error.peer for error in results] == [1, *[0] * (len(results) - 1)]


def test_files_of_other_names_but_equal_content_agree(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for name in names:
        presets.get("cpu:2").save(name)
    assert same(resolving(*names)) == presets.get("cpu:2")
