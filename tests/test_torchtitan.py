"""TorchTitan's real layers and models with its token dispatcher replaced by a2a's."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import a2a
from a2a_world import A2AWorld

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="needs TorchTitan: pip install 'a2a[trainers]', or .ci/torchtitan",
)

BATCH = 3
DEADLINE_S = 300.0  # a rank imports TorchTitan once, and some compile: that takes long on a busy machine


def load() -> None:
    """Import TorchTitan, which takes every rank seconds of its own: nobody shall wait for it inside a collective."""
    import titan_model  # noqa: F401


def run(world: A2AWorld, check: Any, **kwargs: Any) -> list[Any]:
    world.run(load, deadline_s=DEADLINE_S)
    return world.run(check, deadline_s=DEADLINE_S, **kwargs)


@contextlib.contextmanager
def served(passes: int) -> Iterator[None]:
    """a2a runs so many forward and backward passes of a layer inside, no more and no less."""
    names = ("_run_dispatch", "_run_combine", "_run_combine_backward", "_run_dispatch_backward")
    originals = {name: getattr(a2a.ExpertParallel, name) for name in names}
    counts = dict.fromkeys(names, 0)

    def counting(name: str) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return originals[name](*args)

        return call

    for name in names:
        setattr(a2a.ExpertParallel, name, counting(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(a2a.ExpertParallel, name, original)
    assert counts == dict.fromkeys(names, passes)


def close(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Within 1e-5 of the value, or of the largest: sums of many tokens cancel."""
    atol = 1e-5 * expected.detach().abs().max().item()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol, msg=lambda text: f"{what}: {text}")


def whole_input(size: int) -> tuple[Tensor, Tensor]:
    import titan_model as titan

    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, size * BATCH, titan.LENGTH, titan.WIDTH, generator=generator)
    return x, grad


def layer_is_that_of_one_process(how: str, compiled: bool) -> None:
    """The whole layer sees the sequences of all ranks; this rank's layer its own, and every gradient must be a part."""
    import titan_model as titan

    torchtitan = titan.integration
    rank, size = dist.get_rank(), dist.get_world_size()
    x, grad = whole_input(size)
    here = slice(rank * BATCH, (rank + 1) * BATCH)
    reference, x_all = titan.moe_layer([titan.FLOAT32], None), x.clone().requires_grad_()
    y_all = reference(x_all)
    y_all.backward(grad)
    if how == "install":
        torchtitan.install()
    try:
        overrides = [titan.FLOAT32, *([titan.A2A] if how == "override" else [])]
        layer, x_here = titan.moe_layer(overrides, titan.parallel_dims()), x[here].clone().requires_grad_()
        forward = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        with served(0 if how == "stock" else 1):
            y = forward(x_here)
            y.backward(grad[here])
    finally:
        torchtitan.uninstall()
        torch._dynamo.reset()
    close(y, y_all[here])
    close(x_here.grad, x_all.grad[here])
    for (name, parameter), (_, expected) in zip(layer.named_parameters(), reference.named_parameters(), strict=True):
        if "inner_experts" in name:  # this rank's experts have seen all tokens
            got, wanted = parameter.grad.to_local(), expected.grad.chunk(size)[rank]
        else:  # the others have seen this rank's only
            got, wanted = parameter.grad.clone(), expected.grad
            got = got.to_local() if hasattr(got, "to_local") else got
            dist.all_reduce(got)
        close(got, wanted, name)


@pytest.mark.parametrize("how", ["override", "install", "stock"])
def test_the_layer_is_that_of_one_process(two: A2AWorld, how: str) -> None:
    run(two, layer_is_that_of_one_process, backend="gloo", how=how, compiled=False)


def test_the_layer_on_four_ranks_and_backend_a2a(four: A2AWorld) -> None:
    run(four, layer_is_that_of_one_process, how="override", compiled=False)


@pytest.mark.parametrize("how", ["override", "install"])
def test_the_compiled_layer_is_that_of_one_process(two: A2AWorld, how: str) -> None:
    run(two, layer_is_that_of_one_process, how=how, compiled=True)


def rows_have_torchtitans_bits() -> None:
    """TorchTitan's own experts, which round to bfloat16, get the same rows in the same order."""
    import titan_model as titan

    x, grad = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in whole_input(dist.get_world_size()))
    seen: list[list[Tensor]] = []
    for overrides in ([], [titan.A2A]):
        layer = titan.moe_layer(overrides, titan.parallel_dims())
        inputs: list[Tensor] = []
        layer.routed_experts.inner_experts.register_forward_hook(
            lambda _, given, result, inputs=inputs: inputs.extend([*given, result])
        )
        y = layer(x)
        y.backward(grad)
        seen.append([*inputs, y])
    stock, ours = seen
    for own, its in zip(ours[:3], stock[:3], strict=True):
        assert own.dtype == its.dtype
        assert torch.equal(own, its)
    close(ours[3], stock[3])


def test_experts_get_the_bits_that_torchtitans_dispatcher_gives_them(two: A2AWorld) -> None:
    run(two, rows_have_torchtitans_bits)


def trained_alike(steps: int, replicas: int, compiled: bool) -> None:
    import titan_model as titan

    with served(0):
        stock = titan.train([titan.FLOAT32], steps, replicas, compiled)
    with served(steps):
        ours = titan.train([titan.FLOAT32, titan.A2A], steps, replicas, compiled)
    assert stock[-1] < stock[0]
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)


def test_ten_steps_with_fsdp_have_the_same_losses(two: A2AWorld) -> None:
    run(two, trained_alike, steps=10, replicas=1, compiled=False)


def test_steps_with_hsdp_have_the_same_losses(four: A2AWorld) -> None:
    """Two replicas of two ranks: gradients are reduced among the ranks of a replica and between the replicas."""
    run(four, trained_alike, steps=4, replicas=2, compiled=False)


def test_compiled_steps_have_the_same_losses(two: A2AWorld) -> None:
    run(two, trained_alike, steps=3, replicas=1, compiled=True)


def number_of_tokens_may_grow() -> list[int]:
    import titan_model as titan

    torchtitan = titan.integration
    layer = titan.moe_layer([titan.FLOAT32, (titan.A2A, {"wire": "fp8"})], titan.parallel_dims())
    before = set(torchtitan._instances)
    outputs = [layer(torch.ones(batch, titan.LENGTH, titan.WIDTH, requires_grad=True)) for batch in (1, 2, 1)]
    for y in outputs:  # also of the instance that was too small for the second call
        y.sum().backward()
    made = [ep for number, ep in torchtitan._instances.items() if number not in before]
    assert {ep.spec.wire for ep in made} == {"fp8"}
    return [ep.spec.max_tokens // titan.LENGTH for ep in made]


def test_more_tokens_make_a_larger_instance_and_options_reach_it(two: A2AWorld) -> None:
    assert run(two, number_of_tokens_may_grow) == [[1, 2], [1, 2]]


def nothing_changes_unasked() -> None:
    import titan_model as titan

    torchtitan = titan.integration
    Own = torchtitan.AllToAllTokenDispatcher
    methods = (Own.dispatch, Own.combine)
    dispatcher = titan.model_config().layers[1].moe.routed_experts.token_dispatcher
    assert type(dispatcher) is Own.Config
    assert type(dispatcher.build()) is Own
    torchtitan.install()
    torchtitan.install()
    assert (Own.dispatch, Own.combine) != methods
    torchtitan.uninstall()
    assert (Own.dispatch, Own.combine) == methods
    replaced = titan.model_config([(titan.A2A, {"max_tokens": 64})]).layers[1].moe.routed_experts.token_dispatcher
    assert type(replaced) is torchtitan.TokenDispatcher.Config
    assert (replaced.num_experts, replaced.top_k, replaced.max_tokens) == (titan.EXPERTS, titan.TOP_K, 64)
    assert (Own.dispatch, Own.combine) == methods


def test_without_the_override_torchtitan_is_as_it_was(two: A2AWorld) -> None:
    run(two, nothing_changes_unasked)


def says_what_it_replaces() -> None:
    import titan_model as titan

    torchtitan = titan.integration
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("a2a")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        titan.model_config([titan.A2A])
        assert told == ["torchtitan: a2a replaces a token dispatcher of 8 experts, top-3"]
        known = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.9.1" if name == "torchtitan" else known(name)
        try:
            for refused in (torchtitan.install, lambda: titan.model_config([titan.A2A])):
                with pytest.raises(
                    a2a.UnsupportedError, match=r"TorchTitan 0\.9\.1 is installed, and a2a knows 0\.3\.0"
                ):
                    refused()
        finally:
            importlib.metadata.version = known
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_it_says_what_it_replaces_and_refuses_versions_that_it_does_not_know(two: A2AWorld) -> None:
    run(two, says_what_it_replaces)
