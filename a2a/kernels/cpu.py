"""The C library of the CPU kernels, through ctypes.

`lib()` loads it once and gives its functions types; csrc/cpu/a2a.h documents them. The wheel carries it beside this package
(`a2a/_lib/liba2a.so`). In an editable installation the sources may come first on `sys.path` while the library lies in
site-packages, so every folder of `sys.path` is looked in, too.

Only plain C crosses here: no torch ABI, no C++ run time, so that one binary serves every torch.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import sysconfig
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from pathlib import Path
from typing import Any

from a2a.errors import UnsupportedError

ABI = 5
OK, FAILED, PEER_REFUSED, FORKED, NOT_OPEN, PENDING, INVALID = range(7)
TEXTS = 256  # requests that a context keeps


class Cause(IntEnum):
    """Why a communicator is broken: `Cause` in csrc/cpu/signal.h and csrc/cuda/signal.cuh."""

    TIMEOUT = 1
    DIED = 2
    CLOSED = 3
    MISMATCH = 4
    SPLITS = 5
    OVERFLOW = 6
    INTERRUPTED = 7
    REFUSED = 8
    UNREADABLE = 9
    OUT_OF_RANGE = 10
    NOT_READY = 11


InterruptedCallback = CFUNCTYPE(c_int)


class MoeRows(Structure):
    """`a2a_moe_rows`: where a dispatch stores."""

    _fields_ = (
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("weights", c_void_p),
        ("rank", c_void_p),
        ("token", c_void_p),
        ("k", c_void_p),
        ("index", c_void_p),
        ("offsets", c_void_p),
        ("overflow", c_void_p),
        ("capacity", c_int64),
        ("compact_capacity", c_int64),
        ("limit", c_int64),
        ("rows_wire", c_int),
        ("compact", c_int),
        ("direct", c_int),
        ("bringer", c_void_p),
        ("place", c_void_p),
    )


class MoePart(Structure):
    """`a2a_moe_part`: tokens that a rank brings to a dispatch."""

    _fields_ = (
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("number", c_void_p),
        ("tokens", c_uint32),
        ("unused", c_uint32),
    )


class MoeDomains(Structure):
    """`a2a_moe_domains`: which domain holds which expert."""

    _fields_ = (
        ("experts", c_uint32),
        ("top_k", c_uint32),
        ("domains", c_uint32),
        ("mine", c_int32),
        ("domain", POINTER(c_int32)),
        ("local", POINTER(c_int32)),
    )


class MoeSums(Structure):
    """`a2a_moe_sums`: a domain's sums of some tokens."""

    _fields_ = (("rows", c_void_p), ("list", c_void_p), ("tokens", c_uint32), ("dense", c_uint32))


class Even(Structure):
    """`a2a_even`: an even all-to-all, prepared."""

    _fields_ = (("context", c_void_p), ("request", c_uint64), ("bytes_per_peer", c_uint64))


class Reduction(Structure):
    """`a2a_reduction`: an all-reduce, reduce-scatter or all-gather, prepared."""

    _fields_ = (
        ("context", c_void_p),
        ("request", c_uint32),
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("reduce", c_uint32),
        ("two_shot", c_uint32),
        ("unused", c_uint32),
        ("count", c_uint64),
    )


class Place(Structure):
    """`a2a_place`: where a step finds or puts chunk after chunk."""

    _fields_ = (("base", c_void_p), ("stride", c_uint64), ("slots", c_uint32), ("unused", c_uint32))


class Step(Structure):
    """`a2a_step`: a copy, read or sum of the cost model."""

    _fields_ = (
        *((name, c_uint32) for name in ("kind", "dtype", "terms", "rank")),
        ("out", Place),
        ("in_", POINTER(Place)),
    )


class Norm(Structure):
    """`a2a_norm`: an all-reduce with a residual add and RMSNorm, prepared."""

    _fields_ = (("reduction", Reduction), ("columns", c_uint32), ("eps", c_float))


_P, _U32, _U64, _N = c_void_p, c_uint32, c_uint64, c_size_t

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a2a_abi": (_U32, ()),
    "a2a_isa": (c_char_p, ()),
    "a2a_select_isa": (c_int, (c_char_p,)),
    "a2a_control_bytes": (_N, (_U32, _N)),
    "a2a_format": (None, (_P, _U32, _N, _U32)),
    "a2a_map": (_P, (c_int, _N)),
    "a2a_unmap": (None, (_P, _N)),
    "a2a_populate": (None, (_P, _N)),
    "a2a_attach": (_P, (_P, _N, _U32, _U32, _N, POINTER(c_int), _U32, c_double, c_double, InterruptedCallback)),
    "a2a_set_timeout": (None, (_P, c_double)),
    "a2a_close": (c_int, (_P,)),
    "a2a_destroy": (None, (_P,)),
    "a2a_add_segment": (c_int, (_P, _P, _N)),
    "a2a_read": (c_int, (c_int, _U64, _P, _N)),
    "a2a_enable_reads": (None, (_P, POINTER(c_int))),
    "a2a_failure": (_U64, (_P,)),
    "a2a_cause_text": (c_char_p, (_P, _U32)),
    "a2a_request_text": (c_char_p, (_P, _U32, _U32)),
    "a2a_fail": (None, (_P, _U32, _U32, c_char_p)),
    "a2a_last_peer": (_U32, (_P,)),
    "a2a_refusal": (c_char_p, (_P,)),
    "a2a_epoch": (_U32, (_P,)),
    "a2a_peer_epoch": (_U32, (_P, _U32)),
    "a2a_ok_word": (POINTER(c_uint32), (_P,)),
    "a2a_stats": (None, (_P, POINTER(c_uint64), POINTER(c_uint64))),
    "a2a_request": (c_int, (_P, _U64, _U64, c_char_p)),
    "a2a_refuse": (c_int, (_P, _U32, c_char_p)),
    "a2a_barrier": (c_int, (_P, _U32)),
    "a2a_all_gather_small": (c_int, (_P, _U32, _P, _P, _N)),
    "a2a_all_to_all_even": (c_int, (_P, _U32, _P, _P, _N)),
    "a2a_all_to_all_again": (c_int, (_P, _P, _P)),
    "a2a_all_to_all": (c_int, (_P, _U32, _P, _P, _P, _P)),
    "a2a_one_shot_bytes": (_N, ()),
    "a2a_two_shot_row_bytes": (_N, (_P,)),
    "a2a_reduce": (c_int, (_P, _P, _P)),
    "a2a_reduce_norm": (c_int, (_P, _P, _P, _P, _P, _P)),
    "a2a_submit_reduction": (_P, (_P, _P, _P)),
    "a2a_run_steps": (c_int, (_P, POINTER(Step), _U32, _N, _N, _U32)),
    "a2a_peer_memory": (_P, (_P, _U32, _U64)),
    "a2a_submit": (_P, (_P, _U32, _P, _P, _P, _P)),
    "a2a_submit_refusal": (_P, (_P, _U32, c_char_p)),
    "a2a_test": (c_int, (_P,)),
    "a2a_wait": (c_int, (_P, c_double)),
    "a2a_ticket_peer": (_U32, (_P,)),
    "a2a_ticket_refusal": (c_char_p, (_P,)),
    "a2a_release": (None, (_P,)),
    "a2a_moe_create": (_P, (_P, _U32, _U32, _U32, _U32, _U32, _U32, _U32, _U32, POINTER(c_int32), _U64)),
    "a2a_moe_destroy": (None, (_P,)),
    "a2a_moe_sources": (None, (_P, _U32, POINTER(c_int32))),
    "a2a_moe_bring": (None, (_P, _P)),
    "a2a_moe_count": (c_int, (_P, _U32, _P, c_int, _U32, _U64, POINTER(c_int64))),
    "a2a_moe_abort": (None, (_P,)),
    "a2a_moe_dispatch": (c_int, (_P, _P, _P, _P, c_int, _P, _U32, POINTER(MoeRows))),
    "a2a_moe_combine": (c_int, (_P, _U32, _P, c_int64, _P, _P, _P, _P, _P, _P, _P, _P, _U32)),
    "a2a_moe_spread": (c_int, (_P, _U32, _P, _U32, _P, c_int64, _P, _P, _P, _P, _P)),
    "a2a_moe_rail_select": (c_int, (POINTER(MoeDomains), _P, c_int, _U32, _P, _P, _P, _P)),
    "a2a_moe_rail_gather": (None, (_P, _P, _P, _U32, _N)),
    "a2a_moe_rail_quantize": (None, (_U32, _U32, _P, _U32, _U32, _P, _P)),
    "a2a_moe_rail_pairs": (None, (POINTER(MoeDomains), _P, c_int, _P, _P, _P, _U32, _P, c_int, _P)),
    "a2a_moe_rail_unpair": (c_int, (_P, c_int, _P, _P, _U32, _U64, _U32, _U32, _P, _P)),
    "a2a_moe_rail_grads": (None, (_P, _P, _P, _P, _U32, _U32, c_int)),
    "a2a_moe_rail_merge": (None, (_U32, _U32, _U32, _U32, _U32, POINTER(MoeSums), _P)),
    "a2a_jax_connect": (c_int64, (_P,)),
    "a2a_jax_disconnect": (None, (c_int64,)),
    "a2a_jax_site_type": (_P, ()),
    "a2a_jax_site_info": (_P, ()),
    "a2a_jax_cuda_connect": (c_int64, (c_uint32, c_uint32, c_double, _P)),
    "a2a_jax_cuda_prepare": (c_int64, (c_int64, _P, _P)),
    "a2a_jax_cuda_disconnect": (None, (c_int64,)),
    "a2a_quantize": (None, (_U32, _U32, _P, _P, _P, _N)),
    "a2a_dequantize": (None, (_U32, _U32, _P, _P, _P, _N)),
    "a2a_pool_create": (_P, (_P, _N, _P, _N)),
    "a2a_pool_private": (_P, (_N,)),
    "a2a_pool_child": (_P, (_P, _P, _N)),
    "a2a_pool_take": (_P, (_P, _N)),
    "a2a_pool_take_at": (_P, (_P, _N, _N)),
    "a2a_pool_holds": (c_int, (_P, _N)),
    "a2a_pool_shrink": (None, (_P, _P, _N)),
    "a2a_pool_give": (None, (_P, _P)),
    "a2a_pool_dlpack": (_P, (_P, _P, _N)),
    "a2a_pool_close": (None, (_P,)),
}


def find() -> Path | None:
    """Where the library lies, or None."""
    name = Path("_lib") / "liba2a.so"
    folders = [Path(__file__).parent.parent]
    folders += [Path(p) / "a2a" for p in (*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")) if p]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


@functools.cache
def lib() -> ctypes.CDLL:
    """Load the library.

    Raises:
        UnsupportedError: not on Linux, no library in this installation, or one of another version.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(f"a2a runs on Linux only; this is {platform.system()}")
    path = find()
    if path is None:
        raise UnsupportedError(
            "a2a: its compiled library a2a/_lib/liba2a.so is in no folder of sys.path. The sources alone are not enough: "
            "run `pip install .` (or `pip install -e .`) in the checkout"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(
            f"a2a: {path} can't be loaded ({error}); build it on this machine: pip install ."
        ) from error
    library.a2a_abi.restype = c_uint32
    if (found := library.a2a_abi()) != ABI:
        raise UnsupportedError(f"a2a: {path} has ABI {found}, this package needs {ABI}; reinstall a2a")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def isa() -> str:
    """The instruction set that the kernels use here: "plain", "avx2" or "avx512"."""
    name: bytes = lib().a2a_isa()
    return name.decode()


def pointers(addresses: list[int]) -> ctypes.Array[c_void_p]:
    """A C array of pointers; 0 is null."""
    return (c_void_p * len(addresses))(*addresses)


def sizes(values: list[int]) -> ctypes.Array[c_uint64]:
    """A C array of byte counts."""
    return (c_uint64 * len(values))(*values)


__all__ = ["ABI", "MoeDomains", "MoePart", "MoeRows", "MoeSums", "find", "isa", "lib", "pointers", "sizes"]
