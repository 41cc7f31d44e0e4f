"""All-to-all inside programs that JAX compiles: `jax.jit` and `jax.shard_map`, on CPU.

    from a2a.integrations import jax as a2a_jax
    y = a2a_jax.all_to_all(x, "expert", split_axis=0, concat_axis=0, tiled=True)

Each is a custom call whose handler is in a2a's C library (csrc/cpu/jax_ffi.cpp). No handler waits: XLA gets a future, so it
may run its devices in turn. Results are those of jax.lax, bit for bit, and so are reverse-mode gradients; there is no forward
mode.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from a2a.config import config
from a2a.kernels import cpu

AxisName = str | tuple[str, ...]

_TARGET = "a2a_all_to_all"
_registering = threading.Lock()


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Split `x` over the ranks of an axis, and concatenate what they send.

    Args:
        x: any shape and dtype of whole bytes.
        axis_name: of the mesh, one or several: ranks are its devices, all in this process.
        split_axis: its size is the number of ranks (tiled: a multiple of it); piece p goes to rank p.
        concat_axis: where the pieces are stacked (tiled: concatenated), in rank order.
        tiled: as in jax.lax.all_to_all.
        timeout_s: how long devices wait for one that doesn't come; default: A2A_TIMEOUT_S, or 1800.
    Raises:
        ValueError: shapes don't fit, when traced.
        jax.errors.JaxRuntimeError: when run: a rank did not come, and is named; or ranks differ.
    Like: jax.lax.all_to_all. Differs: no axis_index_groups, no forward-mode gradient.
    """
    ranks = _Ranks.of(axis_name, timeout_s, "all_to_all")
    (x,) = ranks.varying(x)
    world = ranks.world
    split_axis, concat_axis = (_axis(a, x.ndim, "all_to_all") for a in (split_axis, concat_axis))
    size = x.shape[split_axis]
    if size % world or not (tiled or size == world):
        raise ValueError(
            f"all_to_all: x has {size} along split_axis {split_axis}, which {world} ranks cannot share; expected "
            + (f"a multiple of {world}" if tiled else f"{world}, or tiled=True and a multiple")
        )
    if not tiled:
        return jnp.moveaxis(_even(jnp.moveaxis(x, split_axis, 0), ranks), 0, concat_axis)
    pieces = x.reshape(*x.shape[:split_axis], world, size // world, *x.shape[split_axis + 1 :])
    received = jnp.moveaxis(_even(jnp.moveaxis(pieces, split_axis, 0), ranks), 0, concat_axis)
    shape = received.shape
    return received.reshape(*shape[:concat_axis], world * shape[concat_axis + 1], *shape[concat_axis + 2 :])


def _axis(axis: int, ndim: int, op: str) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} of an array of {ndim} dimensions")
    return axis % ndim


# ---------------------------------------------------------------- who exchanges


class _Ranks:
    """An axis of the mesh, as the call sees it when it is traced."""

    def __init__(self, axes: tuple[str, ...], timeout_s: float, op: str) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        manual = mesh.manual_axes
        if missing := [axis for axis in axes if axis not in manual]:
            raise ValueError(
                f"{op}: {', '.join(map(repr, missing))} is no axis that jax.shard_map runs over here; expected one of "
                f"{list(manual)}"
            )
        if left := [axis for axis in mesh.axis_names if axis not in manual and mesh.shape[axis] > 1]:
            raise ValueError(f"{op}: jax.shard_map must run over all axes of the mesh; left out: {left}")
        self.axes, self.others = axes, tuple(axis for axis in manual if axis not in axes)
        self.world = int(np.prod([mesh.shape[axis] for axis in axes]))
        self.timeout_s, self.op = timeout_s, op

    @staticmethod
    def of(axis_name: AxisName, timeout_s: float | None, op: str) -> _Ranks:
        if timeout_s is None:
            timeout_s = config().timeout_s or 1800.0
        return _Ranks((axis_name,) if isinstance(axis_name, str) else tuple(axis_name), timeout_s, op)

    def place(self) -> jax.Array:
        group = jax.lax.axis_index(self.others) if self.others else 0
        return jnp.stack([jnp.asarray(i, jnp.int32) for i in (group, jax.lax.axis_index(self.axes))])

    def varying(self, *arrays: Any) -> list[Any]:
        """The arrays, cast to vary along the axes, and along all others that one of them varies along."""
        return _cast(arrays, set(self.axes).union(*(_varying(a) for a in arrays)))

    def attributes(self, dtype: Any, agree: str) -> dict[str, Any]:
        axes = ", ".join(map(repr, self.axes))
        return {
            "world": np.int64(self.world),
            "element_bytes": np.int64(dtype.itemsize),
            "timeout_s": np.float64(self.timeout_s),
            "what": f"a2a {self.op} along {axes}"[:120],
            "communicator": np.int64(0),
            "digest": np.int64(0),
        }


# ---------------------------------------------------------------- the custom calls


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _even(x: Any, ranks: _Ranks) -> Any:
    """out[p] of rank r = x[r] of rank p."""
    return _call(ranks, x, x)


def _even_forward(x: Any, ranks: _Ranks) -> tuple[Any, None]:
    return _even(x, ranks), None


def _even_backward(ranks: _Ranks, _: None, grad: Any) -> tuple[Any]:
    return (_even(grad, ranks),)


_even.defvjp(_even_forward, _even_backward)


def _call(ranks: _Ranks, like: Any, *operands: Any, aliases: Any = None) -> Any:
    _register()
    kind = jax.typeof(like)
    operands = (*operands, ranks.place())
    call = jax.ffi.ffi_call(
        _TARGET,
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.sharding, manual_axis_type=kind.manual_axis_type),
        has_side_effect=True,
        vmap_method="sequential",
        input_output_aliases=aliases,
    )
    # JAX wants operands that vary along the same axes; the result varies as `like` does.
    everywhere = _cast(operands, set().union(*(_varying(a) for a in operands)))
    return call(*everywhere, **ranks.attributes(kind.dtype, ""))


def _varying(array: Any) -> frozenset[str]:
    varying: frozenset[str] = jax.typeof(array).manual_axis_type.varying
    return varying


def _cast(arrays: Sequence[Any], axes: set[str]) -> list[Any]:
    return [jax.lax.pcast(a, tuple(sorted(axes - _varying(a))), to="varying") for a in arrays]


@functools.cache
def _register_once() -> None:
    lib = cpu.lib()
    capsule = jax.ffi.pycapsule
    for name in ("a2a_jax_site_type", "a2a_jax_site_info"):
        getattr(lib, name).restype = ctypes.c_void_p
    jax.ffi.register_ffi_type(
        "a2a_site",
        {"type_id": capsule(lib.a2a_jax_site_type()), "type_info": capsule(lib.a2a_jax_site_info())},
        platform="cpu",
    )
    handlers = {"instantiate": capsule(lib.a2a_jax_instantiate), "execute": capsule(lib.a2a_jax_execute)}
    jax.ffi.register_ffi_target(_TARGET, handlers, platform="cpu", api_version=1)


def _register() -> None:
    with _registering:
        _register_once()


__all__ = ["all_to_all"]
