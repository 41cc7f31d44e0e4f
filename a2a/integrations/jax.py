"""All-to-all inside programs that JAX compiles, with `jax.jit` and `jax.shard_map`: on CPUs, and between processes on GPUs.

    from a2a.integrations import jax as a2a_jax
    y = a2a_jax.all_to_all(x, "expert", 0, 0, tiled=True)    # between the devices of this process
    y = a2a_jax.all_to_all(x, comm, 0, 0, tiled=True)        # between processes: a2a.communicator(group), one device each

Each is a custom call whose handler is in a2a's C library (csrc/cpu/jax_ffi.cpp; jax_cuda.cpp for GPUs). No handler waits:
on a CPU, XLA gets a future; on a GPU, a kernel is launched. So XLA may run its devices in turn. Results and reverse-mode
gradients are those of jax.lax, bit for bit; there is no forward mode.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import a2a
from a2a.config import config
from a2a.integrations import jax_cuda
from a2a.kernels import cpu

AxisName = str | tuple[str, ...] | a2a.Communicator

_TARGET = "a2a_all_to_all"
_lock = threading.Lock()


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
        axis_name: of the mesh, one or several: ranks are its devices, all in this process, which are CPUs. Or a
            Communicator, of CPU tensors or of CUDA's, as the program is compiled for one or the other: ranks are its
            processes, which run the same program on one device each: what differs by rank is an argument, no constant.
        split_axis: its size is the number of ranks (tiled: a multiple of it); piece p goes to rank p.
        concat_axis: where the pieces are stacked (tiled: concatenated), in rank order.
        tiled: as in jax.lax.all_to_all.
        timeout_s: how long devices wait for one that doesn't come; default: A2A_TIMEOUT_S, or 1800. A
            Communicator has its own.
    Raises:
        ValueError: shapes don't fit, when traced.
        jax.errors.JaxRuntimeError: or ValueError, when run: a rank did not come, and is named; or ranks differ.
            With a Communicator, its check() raises the same as one of a2a's errors. On GPUs a call that fails says nothing,
            as its kernel runs later: the next one raises, and check() does once results are there.
    Like: jax.lax.all_to_all. Differs: no axis_index_groups, no forward-mode gradient.
    """
    ranks = _ranks(axis_name, timeout_s, "all_to_all")
    (x,) = _alike(ranks, x)
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


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    timeout_s: float | None = None,
) -> Any:
    """Send any number of rows to each rank of an axis, and return `output` with what they send in its place.

    Args:
        operand: [rows, ...]; what is sent to different ranks may not overlap, if its gradient is taken.
        output: [rows, ...] of the same dtype and row shape; what no rank sends to stays.
        input_offsets, send_sizes: [ranks] integers: rank p is sent send_sizes[p] rows from input_offsets[p] on.
        output_offsets: [ranks] integers: where in rank p's output they begin there.
        recv_sizes: [ranks] integers: how many rows rank p sends here.
        axis_name, timeout_s: as in all_to_all.
    Raises:
        ValueError: shapes or dtypes don't fit, when traced.
        jax.errors.JaxRuntimeError, ValueError: when run, as all_to_all; or sizes of ranks disagree, or rows lie outside.
    Like: jax.lax.ragged_all_to_all. Differs: runs on CPUs too, checks sizes, no axis_index_groups, no forward-mode gradient.
    """
    ranks = _ranks(axis_name, timeout_s, "ragged_all_to_all")
    lists = [jnp.asarray(a) for a in (input_offsets, send_sizes, output_offsets, recv_sizes)]
    for name, a in zip(("input_offsets", "send_sizes", "output_offsets", "recv_sizes"), lists, strict=True):
        if a.shape != (ranks.world,) or not jnp.issubdtype(a.dtype, jnp.integer):
            raise ValueError(
                f"ragged_all_to_all: {name} has shape {a.shape} and dtype {a.dtype}; expected ({ranks.world},), integers"
            )
    if operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:] or not operand.ndim:
        raise ValueError(
            f"ragged_all_to_all: operand is {operand.dtype}{list(operand.shape)}, output {output.dtype}"
            f"{list(output.shape)}; expected the same dtype and the same shape but for dimension 0"
        )
    return _ragged(*_alike(ranks, operand, output, *(a.astype(jnp.int32) for a in lists)), ranks)


def _axis(axis: int, ndim: int, op: str) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} of an array of {ndim} dimensions")
    return axis % ndim


# ---------------------------------------------------------------- who exchanges


class _Axis:
    """An axis of the mesh, as a call sees it when it is traced: ranks are devices."""

    communicator = 0

    def __init__(self, axes: tuple[str, ...], timeout_s: float | None, op: str) -> None:
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
        self.timeout_s = (config().timeout_s or 1800.0) if timeout_s is None else timeout_s
        self.what = f"a2a {op} along {', '.join(map(repr, self.axes))}"

    def place(self) -> jax.Array:
        group = jax.lax.axis_index(self.others) if self.others else 0
        return jnp.stack([jnp.asarray(i, jnp.int32) for i in (group, jax.lax.axis_index(self.axes))])

    def request(self, agree: str, operands: Sequence[Any]) -> int:
        return 0


class _Processes:
    """A communicator of CPU tensors: ranks are processes."""

    axes = ()

    def __init__(self, comm: a2a.Communicator, timeout_s: float | None, op: str) -> None:
        transport = comm.require_transport(op)
        if timeout_s is not None:
            raise ValueError(f"{op}: pass the timeout to a2a.communicator(), which all of its calls share")
        mesh = jax.sharding.get_abstract_mesh()
        if several := {axis: mesh.shape[axis] for axis in mesh.manual_axes if mesh.shape[axis] > 1}:
            raise ValueError(f"{op}: a rank of a communicator is one device; jax.shard_map runs over {several} here")
        self.world, self.timeout_s = comm.world_size, comm.timeout_s
        self.what = f"a2a {op}"  # no word of the rank: ranks compile the same program
        self._transport, self._op = transport, op
        self.communicator = self._connect(comm)

    def _connect(self, comm: a2a.Communicator) -> int:
        """The number that compiled programs know the communicator by. Once it is closed, they raise."""
        with _lock:
            known = _connected.get(comm)
            if known is None:
                lib = cpu.lib()
                known = _connected[comm] = lib.a2a_jax_connect(comm.handle)
                comm.own(functools.partial(lib.a2a_jax_disconnect, known))
            return known

    def place(self) -> jax.Array:
        return jnp.zeros(2, jnp.int32)  # the C library knows; here, ranks would compile different programs

    def request(self, agree: str, operands: Sequence[Any]) -> int:
        index: int = self._transport.request(f"jax {self._op} {agree}", 0, f"jax {self._op}({agree})")
        return index


class _Gpus(_Processes):
    """A communicator of CUDA tensors. Its launches are prepared when they are traced."""

    def _connect(self, comm: a2a.Communicator) -> int:
        with _lock:
            self._launches = jax_cuda.launches(comm)
        return self._launches.communicator

    def request(self, agree: str, operands: Sequence[Any]) -> int:
        shapes = [(a.shape, a.dtype.itemsize) for a in operands[:2]]
        text = super().request(agree, operands)
        with _lock:
            return self._launches.ragged(text, *shapes) if len(operands) > 1 else self._launches.even(text, *shapes)


_Ranks = _Axis | _Processes
_PROCESSES = {"cpu": _Processes, "cuda": _Gpus}
_connected: weakref.WeakKeyDictionary[a2a.Communicator, int] = weakref.WeakKeyDictionary()


def _ranks(axis_name: AxisName, timeout_s: float | None, op: str) -> _Ranks:
    if isinstance(axis_name, a2a.Communicator):
        kind = _PROCESSES.get(axis_name.device_type)
        if kind is None:
            raise ValueError(
                f"{op}: the communicator serves {axis_name.device_type} tensors; expected one of {', '.join(_PROCESSES)}"
            )
        return kind(axis_name, timeout_s, op)
    return _Axis((axis_name,) if isinstance(axis_name, str) else tuple(axis_name), timeout_s, op)


def num_ranks(axis_name: AxisName) -> int:
    """The ranks along an axis of the mesh, or of a Communicator: a number, where a program is traced."""
    return _ranks(axis_name, None, "num_ranks").world


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _ragged(operand: Any, output: Any, starts: Any, send: Any, there: Any, recv: Any, ranks: _Ranks) -> Any:
    return _call(ranks, output, operand, output, starts, send, there, recv, aliases={1: 0})


def _ragged_forward(
    operand: Any, output: Any, starts: Any, send: Any, there: Any, recv: Any, ranks: _Ranks
) -> tuple[Any, Any]:
    kept = (jnp.zeros_like(operand), starts, send, there, recv)  # constants until the backward pass wants them
    return _ragged(operand, output, starts, send, there, recv, ranks), kept


def _ragged_backward(ranks: _Ranks, kept: Any, grad: Any) -> tuple[Any, ...]:
    """Rows go back where they came from; a row of `output` that was overwritten has no gradient."""
    zeros, starts, send, there, recv = kept
    here, back = (_even(a, ranks) for a in (there, starts))  # where rank p's rows begin here, and where they came from
    to_operand = _ragged(grad, zeros, here, recv, back, send, ranks)
    edges = (
        jnp.zeros_like(here, shape=(grad.shape[0] + 1,))
        .at[here]
        .add(jnp.sign(recv))
        .at[here + recv]
        .add(-jnp.sign(recv))
    )
    written = jnp.cumsum(edges)[:-1].reshape(-1, *[1] * (grad.ndim - 1)) > 0
    return to_operand, jnp.where(written, jnp.zeros_like(grad), grad), None, None, None, None


_ragged.defvjp(_ragged_forward, _ragged_backward)


def _call(ranks: _Ranks, like: Any, *operands: Any, aliases: Any = None) -> Any:
    _register()
    kind = jax.typeof(like)
    if _bits(kind.dtype) % 8:
        raise ValueError(f"{ranks.what}: {kind.dtype} has {_bits(kind.dtype)} bits; expected a dtype of whole bytes")
    agree = f"{kind.dtype}{list(kind.shape[1:] if len(operands) > 1 else kind.shape)}"
    request = ranks.request(agree, operands)
    operands = (*operands, ranks.place())
    call = jax.ffi.ffi_call(
        _TARGET,
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.sharding, manual_axis_type=kind.manual_axis_type),
        vmap_method="sequential",
        input_output_aliases=aliases,
    )
    # JAX wants operands that vary along the same axes; the result varies as `like` does.
    everywhere = _cast(operands, set().union(*(_varying(a) for a in operands)))
    return call(
        *everywhere,
        world=np.int64(ranks.world),
        element_bytes=np.int64(kind.dtype.itemsize),
        timeout_s=np.float64(ranks.timeout_s),
        what=ranks.what[:120],
        communicator=np.int64(ranks.communicator),
        request=np.int64(request),
        digest=np.int64(
            int.from_bytes(hashlib.sha256(f"{len(operands)} {agree}".encode()).digest()[:8], "little") >> 1
        ),
    )


def _bits(dtype: Any) -> int:
    for kind, info in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        if jnp.issubdtype(dtype, kind):
            return int(info(dtype).bits)
    return 8 * int(dtype.itemsize)


def _varying(array: Any) -> frozenset[str]:
    varying: frozenset[str] = jax.typeof(array).manual_axis_type.varying
    return varying


def _alike(ranks: _Ranks, *arrays: Any) -> list[Any]:
    """The arrays, cast to vary along the ranks' axes, and along all others that one of them varies along."""
    return _cast(arrays, set(ranks.axes).union(*(_varying(a) for a in arrays)))


def _cast(arrays: Sequence[Any], axes: set[str]) -> list[Any]:
    return [jax.lax.pcast(a, tuple(sorted(axes - _varying(a))), to="varying") for a in arrays]


@functools.cache
def _register_once() -> None:
    lib = cpu.lib()
    capsule = jax.ffi.pycapsule
    jax.ffi.register_ffi_type(
        "a2a_site",
        {"type_id": capsule(lib.a2a_jax_site_type()), "type_info": capsule(lib.a2a_jax_site_info())},
        platform="cpu",
    )
    handlers = {"instantiate": capsule(lib.a2a_jax_instantiate), "execute": capsule(lib.a2a_jax_execute)}
    jax.ffi.register_ffi_target(_TARGET, handlers, platform="cpu", api_version=1)
    # Without a GPU plug-in this waits in a list for one.
    jax.ffi.register_ffi_target(_TARGET, capsule(lib.a2a_jax_cuda_execute), platform="CUDA", api_version=1)


def _register() -> None:
    with _lock:
        _register_once()


__all__ = ["all_to_all", "num_ranks", "ragged_all_to_all"]
