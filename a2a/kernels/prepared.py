"""Collectives that a communicator has made before, and the shortest way to make them again.

Each function of `Prepared` finds out whether such a call was made before, and makes it. On a CPU these are functions of the
C library that CPython calls directly, without ctypes, and that read tensors through DLPack's C exchange table
(csrc/cpu/python.cpp). Elsewhere, and where Python or torch lack what that takes, they are the same in Python, which takes
four times as long, and knows fewer calls: synchronous ones of the same shapes, and all-to-alls without splits.

Both check all that may differ from call to call: dtypes, sizes, device, contiguity, overlap, and whether memory holds the
values as they are or their conjugates or negatives.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_uint32, c_void_p, py_object
from typing import Any, ClassVar

import torch

from a2a.kernels import cpu

UNKNOWN = -1  # no such call was made before, or not with arguments of this kind
KINDS = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2, "all_to_all": 3}  # as in csrc/cpu/a2a.h
_MOST = 1024
_DLPACK_MAJOR = 1
_DESCRIBE = 5  # place of dltensor_from_py_object_no_sync in DLPackExchangeAPI, in pointers

# `a2a_python`: its fields, and what of Python's they hold
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
    "type_of": "PyObject_Type",
    "attribute": "PyObject_GetAttrString",
    "list_size": "PyList_Size",
    "list_at": "PyList_GetItem",
    "tuple_size": "PyTuple_Size",
    "tuple_at": "PyTuple_GetItem",
    "to_int64": "PyLong_AsLongLong",
}
_OBJECTS = {  # which live as long as this module: C holds their addresses
    "no": False,
    "none": None,
    "list": list,
    "tuple": tuple,
    "int_type": int,
    "is_neg": torch.Tensor.is_neg,
    "is_conj": torch.Tensor.is_conj,
}


class Prepared:
    """The calls of one communicator.

    Each attribute that is a function returns 0, a failure or `UNKNOWN`. `op` is a member of torch's ReduceOp, and not
    another object that equals it.

    Attributes:
        all_to_all: of (output, input, output_splits, input_splits).
        all_reduce: of (tensor, op).
        reduce_scatter: of (output, input, op).
        all_gather: of (output, input).
        submit_all_to_all, submit_all_reduce, submit_reduce_scatter, submit_all_gather: the same, asynchronously: they
            return a ticket of the library's, or `UNKNOWN`.
    """

    native: ClassVar[bool] = False  # whether asynchronous calls and all-to-alls with splits are known, and may be added

    def __init__(self, rank: int) -> None:
        self.all_to_all: Callable[[torch.Tensor, torch.Tensor, Any, Any], int] = self._all_to_all
        self.all_reduce: Callable[[torch.Tensor, Any], int] = self._all_reduce
        self.reduce_scatter: Callable[[torch.Tensor, torch.Tensor, Any], int] = self._reduce_scatter
        self.all_gather: Callable[[torch.Tensor, torch.Tensor], int] = self._all_gather
        self.submit_all_to_all: Callable[[torch.Tensor, torch.Tensor, Any, Any], int] = _unknown
        self.submit_all_reduce: Callable[[torch.Tensor, Any], int] = _unknown
        self.submit_reduce_scatter: Callable[[torch.Tensor, torch.Tensor, Any], int] = _unknown
        self.submit_all_gather: Callable[[torch.Tensor, torch.Tensor], int] = _unknown
        self._rank = rank
        self._calls: dict[Any, Any] = {}

    def add(self, kind: str, op: Any, output: torch.Tensor, input: torch.Tensor, call: Any) -> None:
        """Remember what `AllToAll.prepare_even` or `Reduction.prepare` gave for tensors like these."""
        if len(self._calls) >= _MOST:
            self.clear()
        self._calls[kind, id(op), input.dtype, input.shape, output.shape] = call

    def clear(self) -> None:
        self._calls.clear()

    def __len__(self) -> int:
        return len(self._calls)

    def _all_to_all(self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any) -> int:
        call = self._find("all_to_all", None, output, input)
        if call is None or not (_even(output_splits) and _even(input_splits)):
            return UNKNOWN
        to, of = output.data_ptr(), input.data_ptr()
        if -call.num_bytes < to - of < call.num_bytes:
            return UNKNOWN
        result: int = call.call(call.address, to, of)
        return result

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> int:
        call = self._find("all_reduce", op, tensor, tensor)
        if call is None:
            return UNKNOWN
        address = tensor.data_ptr()
        result: int = call.call(call.address, address, address)
        return result

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: Any) -> int:
        call = self._find("reduce_scatter", op, output, input)
        return UNKNOWN if call is None else self._of_share(call, output, input, whole=input, share=output)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> int:
        call = self._find("all_gather", None, output, input)
        return UNKNOWN if call is None else self._of_share(call, output, input, whole=output, share=input)

    def _of_share(
        self, call: Any, output: torch.Tensor, input: torch.Tensor, whole: torch.Tensor, share: torch.Tensor
    ) -> int:
        at, start, num_bytes = share.data_ptr(), whole.data_ptr(), share.nbytes
        if at < start + whole.nbytes and start < at + num_bytes and at != start + self._rank * num_bytes:
            return UNKNOWN
        result: int = call.call(call.address, output.data_ptr(), input.data_ptr())
        return result

    def _find(self, kind: str, op: Any, output: torch.Tensor, input: torch.Tensor) -> Any:
        dtype = input.dtype
        call = self._calls.get((kind, id(op), dtype, input.shape, output.shape))
        if (
            call is None
            or output.dtype is not dtype
            or not (input.is_contiguous() and output.is_contiguous())
            or not input.get_device() == call.device == output.get_device()
            or (call.device < 0 and not (input.is_cpu and output.is_cpu))
            or (input.is_neg() or output.is_neg())
            or (dtype.is_complex and (input.is_conj() or output.is_conj()))
        ):
            return None
        return call


def _unknown(*arguments: Any) -> int:
    return UNKNOWN


def _even(splits: Any) -> bool:
    return splits is None or (type(splits) in (list, tuple) and not splits)


class _Native(Prepared):
    """The same, in the C library."""

    native: ClassVar[bool] = True

    def __init__(self, native: _Library, rank: int) -> None:
        super().__init__(rank)
        self._native, self._capsule = native, native.create()
        for name, kind in KINDS.items():
            setattr(self, name, native.function(self._capsule, kind, False))
            setattr(self, f"submit_{name}", native.function(self._capsule, kind, True))

    def add(self, kind: str, op: Any, output: torch.Tensor, input: torch.Tensor, call: Any) -> None:
        self._native.add(self._capsule, KINDS[kind], op, output, input, call.address)

    def clear(self) -> None:
        self._native.clear(self._capsule)

    def __len__(self) -> int:
        count: int = self._native.count(self._capsule)
        return count


class _Python(Structure):
    """`a2a_python`."""

    _fields_ = tuple((name, c_void_p) for name in (*_PYTHON, "describe", *_OBJECTS))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a2a_python_bind": (None, (POINTER(_Python),)),
    "a2a_prepared_create": (py_object, ()),
    "a2a_prepared_function": (py_object, (py_object, c_uint32, c_int)),
    "a2a_prepared_add": (None, (py_object, c_uint32, py_object, py_object, py_object, c_void_p)),
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
        self.table = table = _Python(describe=describe, **{name: id(value) for name, value in _OBJECTS.items()})
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


def prepared(device_type: str, rank: int) -> Prepared:
    """A new table, of calls of this rank on such a kind of device."""
    native = library() if device_type == "cpu" else None
    return Prepared(rank) if native is None else _Native(native, rank)
