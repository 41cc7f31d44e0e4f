"""All-to-all inside programs that JAX compiles, against jax.lax: between devices of a process, and between processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

jax = pytest.importorskip("jax", reason="needs jax: pip install 'a2a[jax]', or see .ci/jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

import a2a  # noqa: E402
from a2a.integrations import jax as a2a_jax  # noqa: E402
from jax_cases import (  # noqa: E402
    TOKENS,
    exchanges,
    loss_and_gradients,
    moe,
    moe_inputs,
    moe_layer,
    moe_reference,
    numbers,
    ragged_exchanges,
)

jax.config.update("jax_num_cpu_devices", 4)
WORLD = 4
FAILURES = (jax.errors.JaxRuntimeError, ValueError)  # JAX turns some statuses into the one, some into the other
AXES = PartitionSpec("x")


def on_devices(f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """`f` of each device's share of its arguments, compiled."""
    mesh = jax.make_mesh((WORLD,), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=AXES, out_specs=AXES, **kwargs))


CASES = [("float32", *case) for case in [(0, 0, True), (1, 0, True), (0, 2, True), (1, 2, False), (1, 1, True)]]
CASES += [(d, 1, 0, True) for d in ("bfloat16", "float16", "int8", "int32", "bool", "complex64", "float8_e4m3fn")]


@pytest.mark.parametrize(("dtype", "split", "concat", "tiled"), CASES)
def test_all_to_all_is_that_of_lax(dtype: str, split: int, concat: int, tiled: bool) -> None:
    x = numbers(WORLD * 8, 4, 3, dtype=dtype)
    ours, theirs = (
        on_devices(functools.partial(op, axis_name="x", split_axis=split, concat_axis=concat, tiled=tiled))
        for op in (a2a_jax.all_to_all, jax.lax.all_to_all)
    )
    for _ in range(2):  # compiled, and again
        got, expected = ours(x), theirs(x)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(expected).view(np.uint8))


def test_the_gradient_is_that_of_lax() -> None:
    x = numbers(WORLD * 8, 4, 3)
    weight = numbers(WORLD * 2, 16, 3)

    def gradient(op: Any) -> Any:
        exchange = on_devices(functools.partial(op, axis_name="x", split_axis=0, concat_axis=1, tiled=True))
        return jax.jit(jax.grad(lambda x: (exchange(x) ** 2 * weight).sum()))(x)

    np.testing.assert_array_equal(gradient(a2a_jax.all_to_all), gradient(jax.lax.all_to_all))


def split(seed: int, rows: int = 7) -> tuple[Any, ...]:
    """How many rows each rank sends each, and the lists of ragged_all_to_all for that: [ranks, ranks]."""
    sizes = np.random.default_rng(seed).integers(0, rows, (WORLD, WORLD)).astype(np.int32)
    sizes[1, :] = 0
    starts = np.cumsum(sizes, 1) - sizes
    there = np.cumsum(sizes, 0) - sizes + 1  # every rank's first row stays
    return starts, sizes, there, sizes.T


def ragged_reference(operand: Any, output: Any, starts: Any, sizes: Any, there: Any, _: Any) -> Any:
    """jax.lax.ragged_all_to_all as its documentation defines it, for all devices at once."""
    out = list(jnp.split(output, WORLD))
    rows = jnp.split(operand, WORLD)
    for p in range(WORLD):
        for r in range(WORLD):
            a, b, n = starts[p, r], there[p, r], sizes[p, r]
            out[r] = out[r].at[b : b + n].set(rows[p][a : a + n])
    return jnp.concatenate(out)


def ragged(operand: Any, output: Any, *lists: Any) -> Any:
    def exchange(operand: Any, output: Any, *lists: Any) -> Any:
        return a2a_jax.ragged_all_to_all(operand, output, *(a[0] for a in lists), axis_name="x", timeout_s=10.0)

    return jax.block_until_ready(on_devices(exchange)(operand, output, *lists))


def gradients(f: Any, weight: Any, operand: Any, output: Any, *lists: Any) -> Any:
    return jax.jit(jax.grad(lambda a, b: (f(a, b, *lists) * weight).sum(), (0, 1)))(operand, output)


@pytest.mark.parametrize(("dtype", "seed"), [("float32", 0), ("float32", 1), ("bfloat16", 2), ("int8", 3)])
def test_ragged_all_to_all_and_its_gradient(dtype: str, seed: int) -> None:
    lists = split(seed)
    operand, output = numbers(WORLD * 28, 3, 2, dtype=dtype), numbers(WORLD * 30, 3, 2, dtype=dtype) + 1
    np.testing.assert_array_equal(ragged(operand, output, *lists), ragged_reference(operand, output, *lists))
    if dtype == "float32":
        weight = numbers(WORLD * 30, 3, 2, dtype=dtype)
        got, expected = (gradients(f, weight, operand, output, *lists) for f in (ragged, ragged_reference))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_sizes_that_disagree_are_told() -> None:
    starts, sizes, there, recv = split(0)
    recv = recv.copy()
    recv[2, 3] += 1
    operand, output = numbers(WORLD * 28, 3), numbers(WORLD * 30, 3)
    with pytest.raises(FAILURES, match=r"rank 3 sends . rows to rank 2.*rank 2 expects"):
        ragged(operand, output, starts, sizes, there, recv)
    starts = starts.copy()
    starts[3, 0] = 28
    with pytest.raises(FAILURES, match=r"rank 3 sends rank 0 . rows from row 28 on, of the 28"):
        ragged(operand, output, starts, sizes, there, sizes.T)


def test_loops_and_recomputation() -> None:
    """A call in a loop, two calls of one compiled function, and a backward pass that makes them again."""

    def steps(op: Any, x: Any) -> Any:
        again = jax.jit(lambda x: op(x, "x", 0, 0, tiled=True))
        step = jax.checkpoint(lambda x, _: (jnp.sin(again(x) + again(2 * x)), None))
        return jax.lax.scan(step, x, None, length=20)[0]

    x = numbers(WORLD * 8, 3)
    got, expected = (
        jax.jit(jax.value_and_grad(lambda x, op=op: on_devices(functools.partial(steps, op))(x).sum()))(x)
        for op in (a2a_jax.all_to_all, jax.lax.all_to_all)
    )
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


def test_groups_of_a_mesh_with_two_axes() -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = numbers(16, 8)
    for axis in ("x", "y", ("y", "x")):
        got, expected = (
            jax.jit(
                jax.shard_map(
                    functools.partial(op, axis_name=axis, split_axis=0, concat_axis=1, tiled=True),
                    mesh=mesh,
                    in_specs=PartitionSpec("x", "y"),
                    out_specs=PartitionSpec("x", "y"),
                )
            )(x)
            for op in (a2a_jax.all_to_all, jax.lax.all_to_all)
        )
        np.testing.assert_array_equal(got, expected)


def test_a_missing_device_is_named() -> None:
    def all_but_two(x: Any) -> Any:
        def exchange(x: Any) -> Any:
            return a2a_jax.all_to_all(x, "x", 0, 0, tiled=True, timeout_s=1.0)

        return jax.lax.cond(jax.lax.axis_index("x") == 2, lambda x: x + 0, exchange, x)

    with pytest.raises(FAILURES, match=r"3 of 4 ranks waited 1.0 s for rank 2\."):
        jax.block_until_ready(on_devices(all_but_two, check_vma=False)(numbers(16, 4)))


def test_shapes_that_do_not_fit_are_told_when_traced() -> None:
    def call(**kwargs: Any) -> None:
        on_devices(lambda x: a2a_jax.all_to_all(x, **kwargs))(numbers(24, 4))

    with pytest.raises(ValueError, match=r"x has 6 along split_axis 0, which 4 ranks cannot share"):
        call(axis_name="x", split_axis=0, concat_axis=0, tiled=True)
    with pytest.raises(ValueError, match=r"'z' is no axis .* expected one of \['x'\]"):
        call(axis_name="z", split_axis=1, concat_axis=0)


# ---------------------------------------------------------------- between processes


def check_processes() -> None:
    with a2a.communicator(timeout=20.0) as comm:
        exchanges(comm, 3)
        ragged_exchanges(comm, 5)


@pytest.mark.ranks(2, 3)
def test_processes_exchange(world: Any) -> None:
    world.run(check_processes)


def check_failures() -> None:
    x = numbers(4, 3)
    comm = a2a.communicator(timeout=1.0)
    exchange = jax.jit(lambda x: a2a_jax.all_to_all(x, comm, 0, 0, tiled=True))
    jax.block_until_ready(exchange(x))
    if comm.rank == 0:
        with pytest.raises(FAILURES, match=r"rank 0 waited 1.0 s for rank 1 in jax all_to_all\(float32\[2, 2, 3\]\)"):
            jax.block_until_ready(exchange(x))
        with pytest.raises(a2a.PeerTimeoutError, match="rank 0 waited"):
            comm.check()
    dist.barrier()
    comm.close()
    with pytest.raises(FAILURES, match="its communicator is closed"):
        jax.block_until_ready(exchange(x))

    with a2a.communicator(timeout=10.0) as comm:
        recv = np.asarray([1, 2 if comm.rank else 1], np.int32)
        one = np.asarray([1, 1], np.int32)
        starts = np.asarray([0, 1], np.int32)
        there = np.asarray([comm.rank] * 2, np.int32)
        exchange = jax.jit(functools.partial(a2a_jax.ragged_all_to_all, axis_name=comm))
        why = "rank 1 sends 1 rows to rank 1, .* rank 1 expects 2 rows"
        with pytest.raises(FAILURES, match=why if comm.rank else f"rank 1 refused its own call.*{why}"):
            jax.block_until_ready(exchange(x, x, starts, one, there, recv))


def test_a_missing_process_is_named_and_wrong_sizes_are_told(world: Any) -> None:
    world.run(check_failures)


# ---------------------------------------------------------------- Mixture of Experts


def test_dispatch_and_combine_are_the_layer_of_one_device() -> None:
    inputs = moe_inputs(WORLD)
    scale = numbers(WORLD * TOKENS, 4) % 3
    got = loss_and_gradients(on_devices(functools.partial(moe, axis="x")), *inputs, scale)
    for one, other in zip(got, loss_and_gradients(moe_reference, *inputs, scale), strict=True):
        np.testing.assert_array_equal(one, other)


def test_more_rows_than_there_is_room_for_are_told() -> None:
    with pytest.raises(FAILURES, match=r"rank . sends . rows to rank ., .*its output has 5"):
        jax.block_until_ready(on_devices(functools.partial(moe, axis="x", max_rows=5))(*moe_inputs(WORLD)))


def check_moe() -> None:
    with a2a.communicator(timeout=20.0) as comm:
        moe_layer(comm)


def test_dispatch_and_combine_between_processes(world: Any) -> None:
    world.run(check_moe)
