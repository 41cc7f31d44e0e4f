"""Even, synchronous all-to-alls that a communicator has made before, and the shortest way to make them again.

`again(output, input)` finds out whether a call with such tensors was made before, and makes it. On a CPU it is a function of
the C library that CPython calls directly, without ctypes, and that reads both tensors through DLPack's C exchange table
(csrc/cpu/python.cpp). Elsewhere, and where Python or torch lack what that takes, it is the same in Python, which takes four
times as long.

Both check all that may differ from call to call: dtypes, shapes, device, contiguity, overlap, and whether memory holds the
values as they are or their conjugates or negatives.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_size_t, c_void_p, py_object
from typing import Any

import torch

from a2a.kernels import cpu

UNKNOWN = -1  # no such call was made before, or not with tensors of this kind
_MOST = 1024
_DLPACK_MAJOR = 1
_DESCRIBE = 5  # place of dltensor_from_py_object_no_sync in DLPackExchangeAPI, in pointers

# `a2a_python`: its fields, and the functions of Python's that they hold
_PYTHON = {
    "pointer_of": "PyCapsule_GetPointer",
    "new_capsule": "PyCapsule_New",
    "new_function": "PyCFunction_NewEx",
    "integer": "PyLong_FromLong",
    "call": "PyObject_Vectorcall",
    "forget": "Py_DecRef",
    "clear_error": "PyErr_Clear",
    "no_memory": "PyErr_NoMemory",
    "release_gil": "PyEval_SaveThread",
    "take_gil": "PyEval_RestoreThread",
}
_METHODS = {"is_neg": torch.Tensor.is_neg, "is_conj": torch.Tensor.is_conj}  # C holds their addresses


class Prepared:
    """The calls of one communicator. `again` returns 0, a failure or `UNKNOWN`."""

    def __init__(self) -> None:
        self.again: Callable[[torch.Tensor, torch.Tensor], int] = self._again
        self._calls: dict[Any, Any] = {}

    def add(self, output: torch.Tensor, input: torch.Tensor, call: Any) -> None:
        """Remember what `AllToAll.prepare_even` gave for tensors like these."""
        if len(self._calls) >= _MOST:
            self.clear()
        self._calls[input.dtype, input.shape, output.shape] = call

    def clear(self) -> None:
        self._calls.clear()

    def __len__(self) -> int:
        return len(self._calls)

    def _again(self, output: torch.Tensor, input: torch.Tensor) -> int:
        dtype = input.dtype
        call = self._calls.get((dtype, input.shape, output.shape))
        if (
            call is None
            or output.dtype is not dtype
            or not (input.is_contiguous() and output.is_contiguous())
            or not input.get_device() == call.device == output.get_device()
            or (input.is_neg() or output.is_neg())
            or (dtype.is_complex and (input.is_conj() or output.is_conj()))
        ):
            return UNKNOWN
        to, of = output.data_ptr(), input.data_ptr()
        if -call.num_bytes < to - of < call.num_bytes:
            return UNKNOWN
        result: int = call.call(call.address, to, of)
        return result


class _Native(Prepared):
    """The same, in the C library."""

    def __init__(self, native: _Library) -> None:
        super().__init__()
        self._native, self._capsule = native, native.create()
        self.again = native.function(self._capsule)

    def add(self, output: torch.Tensor, input: torch.Tensor, call: Any) -> None:
        self._native.add(self._capsule, output, input, call.address, call.num_bytes)

    def clear(self) -> None:
        self._native.clear(self._capsule)

    def __len__(self) -> int:
        count: int = self._native.count(self._capsule)
        return count


class _Python(Structure):
    """`a2a_python`."""

    _fields_ = tuple((name, c_void_p) for name in (*_PYTHON, "describe", "no", *_METHODS))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a2a_python_bind": (None, (POINTER(_Python),)),
    "a2a_prepared_create": (py_object, ()),
    "a2a_prepared_function": (py_object, (py_object,)),
    "a2a_prepared_add": (None, (py_object, py_object, py_object, c_void_p, c_size_t)),
    "a2a_prepared_clear": (None, (py_object,)),
    "a2a_prepared_count": (c_size_t, (py_object,)),
}


class _Library:
    """The C library, bound to this Python and this torch; one a process, as `library` makes it."""

    def __init__(self, python: ctypes.PyDLL, describe: int) -> None:
        library = ctypes.PyDLL(str(cpu.find()))  # its functions keep the GIL
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.table = table = _Python(
            describe=describe, no=id(False), **{name: id(method) for name, method in _METHODS.items()}
        )
        for field, name in _PYTHON.items():
            setattr(table, field, ctypes.cast(getattr(python, name), c_void_p).value)
        library.a2a_python_bind(table)
        self.create, self.function = library.a2a_prepared_create, library.a2a_prepared_function
        self.add, self.clear, self.count = (getattr(library, f"a2a_prepared_{x}") for x in ("add", "clear", "count"))


@functools.cache
def library() -> _Library | None:
    """None: this Python or this torch has not what it takes."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if type(capsule).__name__ != "PyCapsule":
        return None
    python = ctypes.PyDLL(None)  # not ctypes.pythonapi, which is everybody's: types of functions are set here
    pointer_of = python.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = c_void_p, (py_object, c_char_p)
    api = pointer_of(capsule, b"dlpack_exchange_api")
    if ctypes.c_uint32.from_address(api).value != _DLPACK_MAJOR:
        return None
    describe = (c_void_p * (_DESCRIBE + 1)).from_address(api)[_DESCRIBE]
    return _Library(python, describe) if describe else None


def prepared(device_type: str) -> Prepared:
    """A new table, of calls on such a kind of device."""
    native = library() if device_type == "cpu" else None
    return Prepared() if native is None else _Native(native)
