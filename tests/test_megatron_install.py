"""What `install()` of the Megatron integration replaces, what it refuses, and that `uninstall()` leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import a2a
import a2a.integrations.megatron as integration
from megatron_cpu import TESTED, model_parallel, needs_megatron, on_cpu
from pool import World
from test_megatron import DEADLINE_S, on_a2a


def everything() -> dict[tuple[str, str], int]:
    """The identity of every attribute of Megatron's modules, and of its classes'."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "megatron" and isinstance(module, types.ModuleType):
            for attribute, value in vars(module).items():
                found[name, attribute] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(f"{name}.{attribute}", inner): id(own) for inner, own in vars(value).items()}
    return found


def check_uninstall() -> None:
    with on_cpu():
        before = everything()
        report = integration.install()
        changed = {".".join(key) for key, value in everything().items() if before.get(key) != value}
        assert changed == {path for path, _ in report.replaced}
        assert len(changed) >= 13
        for path, why in report.replaced:
            assert f"{path}: {why}" in str(report)
        with pytest.raises(RuntimeError, match="uninstall"):
            integration.install()
        integration.uninstall()
        assert everything() == before
        integration.uninstall()  # there is nothing to do
        assert everything() == before


@needs_megatron
def test_uninstall_leaves_megatron_as_it_was(world: World) -> None:
    world.run(check_uninstall, deadline_s=DEADLINE_S)


def check_parts() -> None:
    parts = {"dispatchers": "moe", "tensor_parallel": "tensor_parallel", "gradients": "distributed"}
    for part, package in parts.items():
        others: dict[str, Any] = dict.fromkeys(parts.keys() - {part}, False)
        with on_a2a(groups=(), **others) as report:
            assert report.replaced
            for path, _ in report.replaced:
                assert f".{package}." in path
    with on_cpu():
        from megatron.core import parallel_state

        original = parallel_state.create_group
        integration.install()
        parallel_state.create_group = somebody_elses = lambda *_: None
        integration.uninstall()
        assert parallel_state.create_group is somebody_elses
        parallel_state.create_group = original


@needs_megatron
def test_each_part_alone(world: World) -> None:
    world.run(check_parts, deadline_s=DEADLINE_S)


def check_groups() -> None:
    with on_a2a(), model_parallel():
        from megatron.core import parallel_state

        assert dist.get_backend(parallel_state.get_tensor_model_parallel_group()) == "a2a"
        assert dist.get_backend(parallel_state.get_expert_model_parallel_group()) == "a2a"
        assert dist.get_backend(parallel_state.get_data_parallel_group()) == "gloo"
        assert dist.get_backend(parallel_state.get_pipeline_model_parallel_group()) == "gloo"
    with on_a2a(groups=["DATA_PARALLEL_GROUP"]), model_parallel():
        assert dist.get_backend(parallel_state.get_data_parallel_group()) == "a2a"
        assert dist.get_backend(parallel_state.get_tensor_model_parallel_group()) == "gloo"


@needs_megatron
def test_groups_get_the_backend(world: World) -> None:
    world.run(check_groups, deadline_s=DEADLINE_S)


def other(tensor: Any, group: Any, extra: Any) -> None:
    """What a fork may have made of one of Megatron's functions."""


def check_refusals() -> None:
    with on_cpu():
        import megatron.core
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import mappings

        before = everything()
        for version in ("0.15.3", "0.99.0", "1.0"):
            with (
                mock.patch.object(megatron.core, "__version__", version),
                pytest.raises(a2a.UnsupportedError, match=f"megatron-core {version} is not known; known are 0.16"),
            ):
                integration.install()
        with (
            mock.patch.object(mappings, "_reduce", other),
            pytest.raises(a2a.UnsupportedError, match=r"_reduce takes \['tensor', 'group', 'extra'\]; expected"),
        ):
            integration.install()
        with mock.patch.object(parallel_state, "create_group"):
            del parallel_state.create_group
            with pytest.raises(a2a.UnsupportedError, match="create_group is missing"):
                integration.install()
        with pytest.raises(ValueError, match="wire='fp4'; expected None, 'fp8', 'mxfp8' or 'recipe'"):
            integration.install(wire="fp4")
        assert everything() == before, "a refusal changes nothing"


@needs_megatron
def test_unknown_versions_are_refused(world: World) -> None:
    world.run(check_refusals, deadline_s=DEADLINE_S)


def test_without_megatron_it_says_so() -> None:
    with (
        mock.patch.dict(sys.modules, {"megatron": None, "megatron.core": None}),
        pytest.raises(a2a.UnsupportedError, match="pip install megatron-core"),
    ):
        integration.install()


@needs_megatron
def test_this_version_is_one_that_is_pinned() -> None:
    assert importlib.metadata.version("megatron-core") in TESTED
