"""All-to-all inside programs that JAX compiles, against jax.lax: between four devices of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs jax: pip install 'a2a[jax]', or see .ci/jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

from a2a.integrations import jax as a2a_jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 4)
WORLD = 4
AXES = PartitionSpec("x")


def on_devices(f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """`f` of each device's share of its arguments, compiled."""
    mesh = jax.make_mesh((WORLD,), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=AXES, out_specs=AXES, **kwargs))


def numbers(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(-100, 100, shape)).astype(dtype)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "int32", "bool", "complex64", "float8_e4m3fn"]
)
@pytest.mark.parametrize(
    ("split", "concat", "tiled"), [(0, 0, True), (1, 0, True), (0, 2, True), (1, 2, False), (1, 1, True)]
)
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


def test_a_missing_device_is_named() -> None:
    def all_but_two(x: Any) -> Any:
        def exchange(x: Any) -> Any:
            return a2a_jax.all_to_all(x, "x", 0, 0, tiled=True, timeout_s=1.0)

        return jax.lax.cond(jax.lax.axis_index("x") == 2, lambda x: x + 0, exchange, x)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"3 of 4 ranks waited 1.0 s for rank 2\."):
        jax.block_until_ready(on_devices(all_but_two, check_vma=False)(numbers(16, 4)))
