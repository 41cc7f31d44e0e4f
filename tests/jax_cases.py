"""What programs of JAX do between ranks, for tests on CPUs and on GPUs: inputs, and what must come out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import a2a
from a2a.integrations import jax as a2a_jax
from a2a.integrations import jax_moe

TOKENS, EXPERTS, TOP_K = 6, 8, 3


def numbers(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(-100, 100, shape)).astype(dtype)


def exchanges(comm: a2a.Communicator, width: int, again: int = 20) -> None:
    """All-to-alls between processes, of 6 rows of `width` floats for each, and their gradient."""
    rank, world = comm.rank, comm.world_size
    everyone = [np.arange(world * 6 * width, dtype=np.float32).reshape(-1, width) + 100 * r for r in range(world)]
    pieces = [np.split(x, world)[rank] for x in everyone]
    exchange = jax.jit(lambda x: a2a_jax.all_to_all(x, comm, 0, 1, tiled=True))
    for n in range(again):
        np.testing.assert_array_equal(exchange(everyone[rank] + n), np.concatenate(pieces, 1) + n)
    weights = [np.arange(6 * world * width, dtype=np.float32).reshape(6, -1) + r for r in range(world)]
    got = jax.jit(jax.grad(lambda x, w: (exchange(x) * w).sum()))(everyone[rank], weights[rank])
    np.testing.assert_array_equal(got, np.concatenate([np.split(w, world, 1)[rank] for w in weights]))


def ragged_exchanges(comm: a2a.Communicator, width: int) -> None:
    """A ragged all-to-all between processes, of 0 to 3 rows of `width` floats for each, and its gradient."""
    rank, world = comm.rank, comm.world_size
    send = np.asarray([[(p + 2 * r) % 4 for p in range(world)] for r in range(world)], np.int32)
    starts, there = np.cumsum(send, 1) - send, np.cumsum(send, 0) - send
    most = int(max(send.sum(0).max(), send.sum(1).max())) + 2
    rows = [np.arange(most * width, dtype=np.float32).reshape(most, width) + 1000 * r for r in range(world)]
    lists = starts[rank], send[rank], there[rank], send[:, rank]

    @jax.jit
    def step(x: Any, *lists: Any) -> Any:
        return a2a_jax.ragged_all_to_all(x, jnp.full((most + 1, width), -7.0), *lists, axis_name=comm)

    expected = np.full((most + 1, width), -7.0, np.float32)
    for p in range(world):
        a, b, n = starts[p, rank], there[p, rank], send[p, rank]
        expected[b : b + n] = rows[p][a : a + n]
    for n in range(5):
        got = np.asarray(step(rows[rank] + n, *lists))
        np.testing.assert_array_equal(got, np.where(expected == -7.0, -7.0, expected + n))
    got = jax.jit(jax.grad(lambda x, f, *lists: (step(x, *lists) * f).sum()))(rows[rank], rank + 1.0, *lists)
    factor = np.zeros((most, 1), np.float32)
    for p in range(world):
        factor[starts[rank, p] : starts[rank, p] + send[rank, p]] = p + 1
    np.testing.assert_array_equal(got, np.broadcast_to(factor, (most, width)))


def moe(x: Any, ids: Any, weights: Any, factors: Any, axis: Any, max_rows: int | None = None) -> Any:
    """A layer whose expert e multiplies by factors[e]."""
    rows, sizes, routing = jax_moe.dispatch(x, ids, num_experts=EXPERTS, axis_name=axis, max_rows=max_rows)
    rows = rows * jnp.repeat(factors, sizes, axis=0, total_repeat_length=len(rows))
    return jax_moe.combine(rows, weights, routing, axis_name=axis)


def moe_reference(x: Any, ids: Any, weights: Any, factors: Any) -> Any:
    rows = x[:, None] * factors[jnp.maximum(ids, 0)]
    return (jnp.where(ids < 0, 0, weights)[..., None] * rows).sum(1)


def moe_inputs(ranks: int) -> tuple[Any, ...]:
    random = np.random.default_rng(1)
    ids = np.argsort(random.random((ranks * TOKENS, EXPERTS)))[:, :TOP_K].astype(np.int32)
    ids[::3, 1], ids[TOKENS : 2 * TOKENS] = -1, -1  # rank 1 sends nothing
    x, weights, factors = numbers(ranks * TOKENS, 4), numbers(ranks * TOKENS, TOP_K), numbers(EXPERTS, 4)
    return x, jnp.asarray(ids), weights, factors


def loss_and_gradients(layer: Any, x: Any, ids: Any, weights: Any, factors: Any, scale: Any) -> Any:
    def loss(x: Any, weights: Any, factors: Any, ids: Any, scale: Any) -> Any:
        y = layer(x, ids, weights, factors)
        return (y * scale).sum(), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, weights, factors, ids, scale)
    return [np.asarray(a) for a in (y, *gradients)]


def moe_layer(comm: a2a.Communicator) -> None:
    """A layer between processes and its gradients, against the layer of one device."""
    rank, world = comm.rank, comm.world_size
    inputs = moe_inputs(world)
    scale = numbers(world * TOKENS, 4) % 3
    mine = [np.split(np.asarray(a), world)[rank] for a in (*inputs, scale)]
    got = loss_and_gradients(functools.partial(moe, axis=comm), *mine)
    expected = [np.split(a, world)[rank] for a in loss_and_gradients(moe_reference, *inputs, scale)]
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
