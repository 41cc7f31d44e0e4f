"""An expert-parallel layer in JAX: four devices of this process hold two experts each, and learn with one that holds all.

    python examples/jax_all_to_all.py

Tokens go to the devices of their experts and back by a2a's ragged all-to-all, inside `jax.jit` and `jax.shard_map`. The same
layer without any exchange, on one device, gives the same losses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from a2a.integrations import jax_moe

RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K, STEPS = 4, 32, 16, 8, 2, 5


def route(x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights, ids = jax.lax.top_k(jax.nn.softmax(x @ router), TOP_K)
    return weights, ids


def parallel_layer(x: jax.Array, router: jax.Array, experts: jax.Array) -> jax.Array:
    """Of one device: its tokens, and its experts."""
    weights, ids = route(x, router)
    rows, group_sizes, routing = jax_moe.dispatch(x, ids, num_experts=EXPERTS, axis_name="expert")
    rows = jax.nn.gelu(jax.lax.ragged_dot(rows, experts, group_sizes))
    return jax_moe.combine(rows, weights, routing, axis_name="expert")


def whole_layer(x: jax.Array, router: jax.Array, experts: jax.Array) -> jax.Array:
    """The definition: every token by every expert, and those chosen that it was routed to."""
    weights, ids = route(x, router)
    by_expert = jax.nn.gelu(jnp.einsum("th,ehf->tef", x, experts))
    return jnp.einsum("tkf,tk->tf", jnp.take_along_axis(by_expert, ids[..., None], axis=1), weights)


def train(layer, x: jax.Array, wanted: jax.Array, router: jax.Array, experts: jax.Array) -> list[float]:
    def loss(parameters: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.mean((layer(x, *parameters) - wanted) ** 2)

    @jax.jit
    def step(parameters):
        value, gradients = jax.value_and_grad(loss)(parameters)
        return value, jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradients)

    losses, parameters = [], (router, experts)
    for _ in range(STEPS):
        value, parameters = step(parameters)
        losses.append(float(value))
    return losses


def main() -> None:
    jax.config.update("jax_num_cpu_devices", RANKS)
    x, wanted, router, experts = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(
            [(RANKS * TOKENS, HIDDEN), (RANKS * TOKENS, HIDDEN), (HIDDEN, EXPERTS), (EXPERTS, HIDDEN, HIDDEN)]
        )
    )
    mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("expert"), PartitionSpec()
    layer = jax.shard_map(parallel_layer, mesh=mesh, in_specs=(split, whole, split), out_specs=split)
    with_a2a, alone = train(layer, x, wanted, router, experts), train(whole_layer, x, wanted, router, experts)
    for number, (one, other) in enumerate(zip(with_a2a, alone, strict=True)):
        print(f"step {number}: loss {one:.5f} on {RANKS} devices with a2a, {other:.5f} on one")
        assert abs(one - other) <= 1e-4 * abs(other)


if __name__ == "__main__":
    main()
