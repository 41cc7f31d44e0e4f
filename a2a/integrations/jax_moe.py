"""Mixture of Experts inside programs that JAX compiles: tokens to the ranks of their experts, and home again.

    rows, group_sizes, routing = jax_moe.dispatch(x, topk_ids, num_experts=64, axis_name="expert")
    rows = jax.lax.ragged_dot(rows, weights, group_sizes)        # the experts, which hold consecutive rows
    y = jax_moe.combine(rows, topk_weights, routing)

There is no capacity of an expert: shapes are static, but only rows that are there travel, by ragged_all_to_all. All else is
sorting and indexing in JAX, which differentiates it.

Shapes: T tokens of this rank, H hidden, K experts of a token, E experts of all ranks, R rows of this rank's experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from a2a.integrations.jax import AxisName, all_to_all, num_ranks, ragged_all_to_all


class Routing(NamedTuple):
    """Which rows went where: of one dispatch, for its combine. Arrays, but for the axis."""

    order: Any  # [T * K] pairs (token, expert) in the order in which they were sent
    arrived: Any  # [R] rows in expert order: at which row they arrived
    starts: Any  # [ranks] where the rows for a rank begin here,
    sizes: Any  # and how many they are
    there: Any  # where they began there
    arrivals: Any  # where a rank's rows arrived here,
    recv: Any  # and how many they are
    back: Any  # where they had begun there


def dispatch(
    x_TH: Any,
    topk_ids_TK: Any,
    *,
    num_experts: int,
    axis_name: AxisName,
    max_rows: int | None = None,
    timeout_s: float | None = None,
) -> tuple[Any, Any, Routing]:
    """Send each token to the ranks of its experts.

    Args:
        x_TH: tokens.
        topk_ids_TK: int32; experts of each token; rank r holds the r-th equal share of them. -1: none.
        num_experts: of all ranks, a multiple of the number of ranks.
        axis_name, timeout_s: as in `all_to_all`.
        max_rows: R; default: as many as all ranks could send. Where more come, the call raises.
    Returns:
        rows_RH: sorted by expert, then by rank and token; zeros behind the last.
        group_sizes: [experts of this rank] int32: how many rows each has.
        routing: for `combine`.
    Like: a2a.ExpertParallel.dispatch. Differs: weights are combine's; a token goes once for each expert.
    """
    world = num_ranks(axis_name)
    if num_experts % world:
        raise ValueError(f"dispatch: {world} ranks cannot share {num_experts} experts equally")
    local = num_experts // world
    T, K = topk_ids_TK.shape
    ids = jnp.where(topk_ids_TK < 0, num_experts, topk_ids_TK).reshape(-1)
    order = jnp.argsort(ids, stable=True)  # pairs without an expert come last
    counts_E = jnp.bincount(ids, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    theirs_E = all_to_all(counts_E, axis_name, 0, 0, tiled=True, timeout_s=timeout_s)  # of my experts, rank by rank
    sizes, recv = (c.reshape(world, local).sum(1, dtype=jnp.int32) for c in (counts_E, theirs_E))
    starts, arrivals = (jnp.cumsum(n, dtype=jnp.int32) - n for n in (sizes, recv))
    there, back = (all_to_all(a, axis_name, 0, 0, tiled=True, timeout_s=timeout_s) for a in (arrivals, starts))
    R = world * T * K if max_rows is None else max_rows
    rows_RH = ragged_all_to_all(
        x_TH[order // K],
        jnp.zeros((R, x_TH.shape[1]), x_TH.dtype),
        starts,
        sizes,
        there,
        recv,
        axis_name=axis_name,
        timeout_s=timeout_s,
    )
    expert = jnp.repeat(jnp.arange(theirs_E.size) % local, theirs_E, total_repeat_length=R)
    arrived = jnp.argsort(jnp.where(jnp.arange(R) < recv.sum(), expert, local), stable=True)
    group_sizes = theirs_E.reshape(world, local).sum(0, dtype=jnp.int32)
    return rows_RH[arrived], group_sizes, Routing(order, arrived, starts, sizes, there, arrivals, recv, back)


def combine(
    rows_RH: Any, topk_weights_TK: Any, routing: Routing, *, axis_name: AxisName, timeout_s: float | None = None
) -> Any:
    """Bring the rows home and sum those of each token: y[t] = sum over k of topk_weights[t, k] * its row.

    Args:
        rows_RH: as dispatch returned them, each from its expert.
        topk_weights_TK: of the tokens that this rank dispatched.
        routing: of the dispatch.
        axis_name, timeout_s: as in `all_to_all`.
    Returns: y_TH, of the rows' dtype; sums are taken in the weights' or rows' dtype, whichever is wider.
    Like: a2a.ExpertParallel.combine.
    """
    T, K = topk_weights_TK.shape
    H = rows_RH.shape[1]
    home = ragged_all_to_all(
        jnp.zeros_like(rows_RH).at[routing.arrived].set(rows_RH, unique_indices=True),
        jnp.zeros((T * K, H), rows_RH.dtype),
        routing.arrivals,
        routing.recv,
        routing.back,
        routing.sizes,
        axis_name=axis_name,
        timeout_s=timeout_s,
    )
    pairs = jnp.zeros_like(home).at[routing.order].set(home, unique_indices=True).reshape(T, K, H)
    return (pairs * topk_weights_TK[..., None]).sum(1).astype(rows_RH.dtype)


__all__ = ["Routing", "combine", "dispatch"]
