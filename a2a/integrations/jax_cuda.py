"""Launches of all-to-alls on GPUs that programs of JAX make: prepared when a program is traced, made by the C library.

`jax.py` has the calls, csrc/cpu/jax_cuda.cpp the handler. A communicator that programs use serves them alone: calls of
torch on it would have to wait for the programs, and programs for them (`jax.block_until_ready`, `torch.cuda.synchronize`).
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from ctypes import Structure, c_int, c_uint64
from typing import Any

import torch

from a2a import Communicator, UnsupportedError
from a2a.algorithms.all_to_all_push import Launcher
from a2a.kernels import cpu, cuda

_Shape = tuple[Sequence[int], int]  # sizes, bytes of an element


class _Bytes(Structure):
    """`a2a_jax_cuda_shape`: what the handler holds a call against."""

    _fields_ = (("in_bytes", c_uint64), ("out_bytes", c_uint64), ("row_bytes", c_uint64), ("ragged", c_int))


class Launches:
    """What compiled programs may launch on a communicator, by number.

    Attributes:
        communicator: the number that they know it by; less than 0.
    """

    def __init__(self, comm: Communicator) -> None:
        self._launcher, self._lib, self._known = Launcher(comm), cpu.lib(), dict[Any, int]()
        with torch.cuda.device(comm.device):
            event = cuda.event()
        self.communicator: int = self._lib.a2a_jax_cuda_connect(comm.world_size, comm.rank, comm.timeout_s, event)
        if not self.communicator:
            raise MemoryError("a2a: no memory for a communicator of JAX's programs")
        lib, number = self._lib, self.communicator

        def disconnect() -> None:
            lib.a2a_jax_cuda_disconnect(number)
            cuda.lib().a2a_cuda_event_free(event)

        comm.own(disconnect)

    def even(self, request: int, x: _Shape) -> int:
        """An all-to-all of equal pieces along the first dimension."""
        shape, num_bytes = x
        num_bytes *= math.prod(shape)
        key = (request, num_bytes)
        if key not in self._known:
            world = self._launcher.transport.world_size
            each = num_bytes // world
            prepared = self._launcher.prepare(request, [(each * p, each * p, each, each) for p in range(world)])
            self._known[key] = self._prepare(_Bytes(num_bytes, num_bytes, 0, 0), prepared.address)
        return self._known[key]

    def ragged(self, request: int, operand: _Shape, output: _Shape) -> int:
        """A ragged all-to-all of rows."""
        (in_rows, *row), element_bytes = operand
        out_rows, row_bytes = output[0][0], math.prod(row) * element_bytes
        key = (request, in_rows, out_rows, row_bytes)
        if key not in self._known:
            call, params = self._launcher.prepare_ragged(request, in_rows, out_rows, row_bytes)
            shape = _Bytes(in_rows * row_bytes, out_rows * row_bytes, row_bytes, 1)
            self._known[key] = self._prepare(shape, ctypes.addressof(call))
            del call, params  # copied
        return self._known[key]

    def _prepare(self, shape: _Bytes, call: int) -> int:
        number: int = self._lib.a2a_jax_cuda_prepare(self.communicator, ctypes.byref(shape), call)
        if not number:
            raise UnsupportedError("a2a: a call of a JAX program can't be prepared: its communicator is closed")
        return number


_known: weakref.WeakKeyDictionary[Communicator, Launches] = weakref.WeakKeyDictionary()


def launches(comm: Communicator) -> Launches:
    """Those of a communicator; made at the first call. Kernels are compiled and loaded then."""
    found = _known.get(comm)
    if found is None:
        found = _known[comm] = Launches(comm)
    return found


__all__ = ["Launches", "launches"]
