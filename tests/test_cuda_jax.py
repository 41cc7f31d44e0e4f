"""All-to-all inside programs that JAX compiles for GPUs: between processes, of which several may share a GPU.

pytest -m gpu tests/test_cuda_jax.py            needs torch and JAX, both with CUDA
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

# Before JAX takes three quarters of each GPU, of which torch and the other ranks want some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax", reason="needs jax with CUDA: pip install 'jax[cuda13]'")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

import a2a  # noqa: E402
from a2a.integrations import jax as a2a_jax  # noqa: E402
from jax_cases import exchanges, moe_layer, numbers, ragged_exchanges  # noqa: E402

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
FAILURES = (jax.errors.JaxRuntimeError, ValueError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in PLUGINS), reason=f"JAX has none of {', '.join(PLUGINS)}"
    ),
]


@contextmanager
def communicator(timeout: float = 60.0) -> Iterator[a2a.Communicator]:
    """A communicator on the GPU that torch and JAX then take, too."""
    gpus = jax.devices("cuda")
    which = dist.get_rank() % len(gpus)
    torch.cuda.set_device(which)
    with jax.default_device(gpus[which]), a2a.communicator(device="cuda", timeout=timeout) as comm:
        yield comm


def check_exchanges() -> None:
    with communicator() as comm:
        for width in (3, 1000, 200_000):  # packets, few and many; through the rings
            exchanges(comm, width)
        comm.check()


@pytest.mark.ranks(1, 2, 4)
def test_processes_exchange(world: Any) -> None:
    world.run(check_exchanges, deadline_s=300)


def check_dtypes() -> None:
    with communicator() as comm:
        rank, world = comm.rank, comm.world_size
        exchange = jax.jit(lambda x: a2a_jax.all_to_all(x, comm, 0, 0, tiled=True))
        for name in ("bfloat16", "float16", "int8", "int32", "bool", "complex64", "float8_e4m3fn"):
            x = numbers(world * 4, 5, dtype=name)
            got = exchange(jnp.roll(x, rank, 1))
            expected = jnp.concatenate([jnp.split(jnp.roll(x, p, 1), world)[rank] for p in range(world)])
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(expected).view(np.uint8))
        assert exchange(jnp.zeros((world, 0))).shape == (world, 0)
        with pytest.raises(ValueError, match="int4 has 4 bits"):
            exchange(jnp.zeros((world, 2), jnp.int4))


@pytest.mark.ranks(2)
def test_every_dtype_of_whole_bytes_travels(world: Any) -> None:
    world.run(check_dtypes, deadline_s=300)


def check_ragged() -> None:
    with communicator() as comm:
        for width in (5, 1, 400_000):  # in bytes 20, 4 and 1,600,000: four rows are more than a pair sends as packets
            ragged_exchanges(comm, width)
        comm.check()


@pytest.mark.ranks(1, 2, 4)
def test_processes_exchange_rows_as_lists_on_the_gpu_say(world: Any) -> None:
    world.run(check_ragged, deadline_s=300)


def check_moe() -> None:
    with communicator() as comm:
        moe_layer(comm)
        comm.check()


@pytest.mark.ranks(1, 2)
def test_dispatch_and_combine_and_their_gradients(world: Any) -> None:
    world.run(check_moe, deadline_s=300)


def check_loops() -> None:
    """Calls in a loop on the device, of several sizes in one program, next to other work; and two programs in turn."""
    with communicator() as comm:
        rank, world = comm.rank, comm.world_size
        again = functools.partial(a2a_jax.all_to_all, axis_name=comm, split_axis=0, concat_axis=0, tiled=True)

        @jax.jit
        def program(x: Any, y: Any) -> Any:
            def step(carry: Any, _: Any) -> Any:
                x, y = carry
                return (again(x) + 1, again(again(y)) + jnp.mean(x) * 0), None

            return jax.lax.scan(step, (x, y), None, length=25)[0]

        x = np.arange(world * 3, dtype=np.float32)[:, None] + 100 * rank
        y = np.arange(world * 2 * 600, dtype=np.float32).reshape(world * 2, 600) + rank
        other = jax.jit(lambda x: again(x) * 2)
        results = []
        for n in range(6):  # without waiting in between
            results.append((program(x + n, y), other(x + n)))
        x_of = [np.arange(world * 3, dtype=np.float32)[:, None] + 100 * p for p in range(world)]
        swapped = np.concatenate([np.split(a, world)[rank] for a in x_of])
        for n, ((got_x, got_y), got_other) in enumerate(results):
            np.testing.assert_array_equal(got_x, swapped + n + 25)  # an odd number of exchanges
            np.testing.assert_array_equal(got_y, y)  # an even one
            np.testing.assert_array_equal(got_other, (swapped + n) * 2)
        comm.check()


@pytest.mark.ranks(2)
def test_loops_and_programs_that_follow_each_other(world: Any) -> None:
    world.run(check_loops, deadline_s=300)


def check_failures() -> None:
    with communicator(timeout=2.0) as comm:
        x = numbers(2 * comm.world_size, 3)
        exchange = jax.jit(lambda x: a2a_jax.all_to_all(x, comm, 0, 0, tiled=True))
        jax.block_until_ready(exchange(x))
        dist.barrier()
        if comm.rank == 0:
            jax.block_until_ready(exchange(x))  # its kernel gives up by itself
            with pytest.raises(a2a.PeerTimeoutError, match=r"rank 0 waited 2\.0 s for rank 1"):
                comm.check()
            with pytest.raises(FAILURES, match=r"did not come within the communicator's timeout .*about rank 1"):
                jax.block_until_ready(exchange(x))
        dist.barrier()
    # Outside of the communicator's block JAX's device by default is another, so that it may trace the call anew.
    with pytest.raises((*FAILURES, a2a.A2AError), match="communicator is closed"):
        jax.block_until_ready(exchange(x))

    with communicator() as comm:  # the context is as good as new
        exchanges(comm, 3, again=2)
        recv = np.asarray([1, 2 if comm.rank else 1], np.int32)
        one, starts = np.asarray([1, 1], np.int32), np.asarray([0, 1], np.int32)
        there = np.asarray([comm.rank] * 2, np.int32)
        ragged = jax.jit(functools.partial(a2a_jax.ragged_all_to_all, axis_name=comm))
        jax.block_until_ready(ragged(x, x, starts, one, there, recv))
        dist.barrier()
        with pytest.raises(a2a.MismatchError, match="rank 1 passed offsets or sizes to"):
            comm.check()


@pytest.mark.ranks(2)
def test_a_missing_process_is_named_and_wrong_sizes_are_told(world: Any) -> None:
    world.run(check_failures, deadline_s=180)


def check_what_does_not_fit() -> None:
    with communicator() as comm, a2a.communicator(timeout=20.0) as cpu_comm:
        x = numbers(2 * comm.world_size, 3)
        with pytest.raises(
            FAILURES, match=r"its communicator serves CPU tensors, and this program was compiled for a GPU"
        ):
            jax.block_until_ready(jax.jit(lambda x: a2a_jax.all_to_all(x, cpu_comm, 0, 0, tiled=True))(x))
        with (
            jax.default_device(jax.devices("cpu")[0]),
            pytest.raises(FAILURES, match=r"its communicator serves GPUs, and this program was compiled for a CPU"),
        ):
            jax.block_until_ready(jax.jit(lambda x: a2a_jax.all_to_all(x, comm, 0, 0, tiled=True))(np.asarray(x)))
        gpus = jax.devices("cuda")[:1]
        mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=gpus)
        spec = PartitionSpec("x")
        layer = jax.shard_map(
            lambda x: a2a_jax.all_to_all(x, "x", 0, 0, tiled=True), mesh=mesh, in_specs=spec, out_specs=spec
        )
        with pytest.raises(FAILURES, match=r"several GPUs between processes only; start one process for each GPU"):
            jax.block_until_ready(jax.jit(layer)(jax.device_put(x, gpus[0])))
        comm.check()


@pytest.mark.ranks(2)
def test_programs_and_communicators_of_different_devices_are_told_apart(world: Any) -> None:
    world.run(check_what_does_not_fit, deadline_s=180)
