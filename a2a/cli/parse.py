"""Words of the command line turned into values, with errors that say what would have been understood."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_SHORT = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "float": "float32", "half": "float16", "double": "float64", "int": "int32",
}  # fmt: skip


def sizes(text: str) -> list[int]:
    """ "4K,1M" -> [4096, 1048576]; K, M, G are powers of 1024, as in nccl-tests.

    Raises:
        ValueError: something in it is not such a size.
    """
    return [_size(word.strip()) for word in text.split(",")]


def _size(word: str) -> int:
    number = word.upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in "KMG" else ""
    digits = number.removesuffix(unit) if unit else number
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"--bytes: {word!r} is not a size; write bytes, or 4K, 1M, 1G, separated by commas")
    return int(digits) << _UNITS[unit]


def counts(text: str, option: str) -> list[int]:
    """ "128,4096" -> [128, 4096].

    Raises:
        ValueError: something in it is not a whole number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdigit() or int(word) == 0:
            raise ValueError(f"{option}: {word!r} is not a whole number above 0")
    return [int(word) for word in words]


def groups(text: str) -> list[list[int]]:
    """ "0-3/4,6,8-9" -> [[0, 1, 2, 3], [4, 6, 8, 9]]: groups of ranks.

    Raises:
        ValueError: a part of it is no rank and no range of ranks.
    """
    return [[rank for word in group.split(",") for rank in _range(word.strip())] for group in text.split("/")]


def _range(word: str) -> range:
    first, dash, last = word.partition("-")
    if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last))):
        raise ValueError(f"--groups: {word!r} is no rank and no range; write groups as 0-3,8/4-7,9")
    return range(int(first), int(last if dash else first) + 1)


def words(text: str, known: tuple[str, ...], option: str) -> list[str]:
    """ "gloo,mpi" -> ["gloo", "mpi"], each of them known; "none" or "" -> [].

    Raises:
        ValueError: one is not known.
    """
    found = [word.strip() for word in text.split(",") if word.strip() not in ("", "none")]
    for word in found:
        if word not in known:
            raise ValueError(f"{option}: {word!r} is not one of {', '.join(known)}")
    return found


def word(text: str, known: tuple[str, ...], option: str) -> str:
    """One known word.

    Raises:
        ValueError: it is not known.
    """
    if text not in known:
        raise ValueError(f"{option}: {text!r} is not one of {', '.join(known)}")
    return text


def dtype_names(text: str) -> list[str]:
    """ "bf16,fp32" -> ["bfloat16", "float32"]: torch's names."""
    return [_SHORT.get(word.strip(), word.strip()) for word in text.split(",")]


def dtype(name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        ValueError: torch has none.
    """
    import torch

    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise ValueError(f"--dtype: torch has no dtype {name!r}; names are torch's, or bf16, fp16, fp32, fp64, fp8")
    return value
