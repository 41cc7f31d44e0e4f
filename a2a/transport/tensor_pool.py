"""Blocks of memory as tensors: a DLPack deleter gives each back to its pool when the tensor dies, also after a close."""

from __future__ import annotations

import ctypes

import torch
import torch.utils.dlpack

from a2a.kernels import cpu
from a2a.transport.base import SymmetricBuffer


def tensor_of(pool: int, pointer: int, num_bytes: int) -> torch.Tensor:
    """A block of a pool as a flat uint8 tensor, whose end gives the block back."""
    managed = cpu.lib().a2a_pool_dlpack(pool, pointer, num_bytes)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return torch.utils.dlpack.from_dlpack(new_capsule(managed, b"dltensor", None))


class TensorPool:
    """Memory of one rank that goes out as tensors and comes back when they die. Not collective."""

    def __init__(self, buffer: SymmetricBuffer, pool: int) -> None:
        self._buffer, self._pool, self._lib = buffer, pool, cpu.lib()

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """(pointer, symmetric address) of a new block, or None when the pool is full. A private pool's
        addresses mean nothing.
        """
        pointer: int | None = self._lib.a2a_pool_take(self._pool, num_bytes)
        return None if pointer is None else (pointer, self._buffer.address + pointer - self._buffer.pointer)

    def give(self, pointer: int) -> None:
        """Take a block back that became no tensor."""
        self._lib.a2a_pool_give(self._pool, pointer)

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        """Keep the first `num_bytes` of a block, as a flat uint8 tensor that owns it."""
        self._lib.a2a_pool_shrink(self._pool, pointer, num_bytes)
        return tensor_of(self._pool, pointer, num_bytes)

    def close(self) -> None:
        """No new blocks; the memory goes back once the last tensor is gone."""
        self._lib.a2a_pool_close(self._pool)


__all__ = ["TensorPool", "tensor_of"]
