"""What the first signal of a call tells of it, for the errors of ranks that asked for different things.

All calls carry a digest of what their ranks must agree on. Reductions and all-gathers carry what it is made of, too
(`about` and `count` in reduce.cuh's headers); the few things that an all-to-all agrees on are tried one after the other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch

_REDUCTION = 1 << 15  # in `about`: it is one
_OPS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
_REDUCES = ("sum", "avg", "max", "min", "")
_DTYPES = sorted({str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)})


def digest_of(agree: str) -> int:
    """32 bits of what ranks must agree on; never 0, which is a refusal's."""
    return int.from_bytes(hashlib.sha256(agree.encode()).digest()[:4], "little") or 1


def about(op: int, dtype: torch.dtype, reduce_op: int) -> int:
    """16 bits that say which reduction it is."""
    return _REDUCTION | op << 9 | _DTYPES.index(str(dtype).removeprefix("torch.")) << 3 | reduce_op


def told(header: Sequence[int]) -> str | None:
    """The call with this `Header` of signal.cuh, as eight words; None: it can't be told."""
    _, digest, _, first, _, count, _, second = header
    what = second >> 16
    if what & _REDUCTION:
        op, dtype, reduces = _OPS[what >> 9 & 3], _DTYPES[what >> 3 & 63], _REDUCES[what & 7]
        return f"{op}({', '.join(filter(None, (dtype, reduces, f'{first >> 16 << 32 | count} elements')))})"
    return _all_to_alls().get(digest)


@functools.cache
def _all_to_alls() -> dict[int, str]:
    ops = ("all_to_all_single", "all_to_all")
    return {digest_of(f"{op}|{dtype}"): f"{op}({dtype})" for op in ops for dtype in _DTYPES}
