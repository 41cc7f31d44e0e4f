"""Exchanges whose every byte every rank can compute, and the kinds of memory to make them with.

Contents are byte patterns, not numbers: they reach every dtype's odd corners (NaNs with payloads, negative zeros) and are
compared as bytes.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import a2a

FLOATS = ["float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"]
SMALL_FLOATS = [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")] + [
    "float4_e2m1fn_x2"
]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)] + ["bool"]
DTYPES = [getattr(torch, name) for name in FLOATS + SMALL_FLOATS + INTEGERS if hasattr(torch, name)]

MEMORIES = ["ordinary", "symmetric", "symmetric view", "strided", "transposed", "unaligned"]

Splits = tuple[tuple[int, ...], ...]  # [source rank][target rank]: rows


def pattern(source: int, target: int, num_bytes: int, salt: int = 0) -> torch.Tensor:
    """The bytes that `source` sends to `target`."""
    start = (source * 61 + target * 17 + salt * 101) % 251
    return ((torch.arange(num_bytes, dtype=torch.int64) * 7 + start) % 251).to(torch.uint8)


def as_dtype(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Bytes as a tensor; a bool has only two of them."""
    data = data % 2 if dtype is torch.bool else data
    return data.view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as bytes, in order, whatever its strides."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert tuple(got.shape) == tuple(expected.shape)
    a, b = bytes_of(got), bytes_of(expected)
    if not torch.equal(a, b):
        wrong = (a != b).nonzero().reshape(-1)
        first = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {len(a)} bytes are wrong, the first at {first} and the last at {int(wrong[-1])}: "
            f"got {a[first : first + 8].tolist()}, expected {b[first : first + 8].tolist()}"
        )


def random_splits(world_size: int, seed: int, most: int = 9, nothing: float = 0.3) -> Splits:
    """Rows from every rank to every rank, the same on all ranks; a share of the pairs exchanges nothing."""
    rng = random.Random(seed)
    return tuple(
        tuple(0 if rng.random() < nothing else rng.randint(1, most) for _ in range(world_size))
        for _ in range(world_size)
    )


def even_splits(world_size: int, rows: int) -> Splits:
    return ((rows,) * world_size,) * world_size


@dataclass(frozen=True)
class Exchange:
    """One all-to-all: who sends how many rows of which shape to whom."""

    splits: Splits
    row_shape: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float32
    salt: int = 0
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", len(self.splits))

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    def sent(self, rank: int) -> list[int]:
        return list(self.splits[rank])

    def received(self, rank: int) -> list[int]:
        return [self.splits[source][rank] for source in range(self.world_size)]

    def block(self, source: int, target: int) -> torch.Tensor:
        rows = self.splits[source][target]
        data = pattern(source, target, rows * self.row_bytes, self.salt)
        return as_dtype(data, self.dtype, (rows, *self.row_shape))

    def input(self, rank: int) -> torch.Tensor:
        return self._joined([(rank, target) for target in range(self.world_size)], sum(self.sent(rank)))

    def expected(self, rank: int) -> torch.Tensor:
        return self._joined([(source, rank) for source in range(self.world_size)], sum(self.received(rank)))

    def most_rows(self) -> int:
        """The most rows that any rank sends or receives."""
        return max(max(sum(self.sent(rank)), sum(self.received(rank))) for rank in range(self.world_size))

    def _joined(self, pairs: list[tuple[int, int]], rows: int) -> torch.Tensor:
        data = torch.cat([bytes_of(self.block(source, target)) for source, target in pairs])
        return data.view(self.dtype).reshape(rows, *self.row_shape)


def allocate(memory: str, rows: int, exchange: Exchange, comm: Any) -> torch.Tensor:
    """A tensor of `rows` rows in one kind of memory, filled with a byte that no pattern has.

    `comm.empty` is collective, so every rank calls this equally often, with whatever kind it likes: the symmetric tensor is
    made in any case, as large as the exchange needs anywhere.
    """
    shape, dtype = (rows, *exchange.row_shape), exchange.dtype
    symmetric = comm.empty((exchange.most_rows() + 3, *exchange.row_shape), dtype)
    if memory == "ordinary":
        tensor = torch.empty(shape, dtype=dtype)
    elif memory == "symmetric":
        tensor = symmetric[:rows]
    elif memory == "symmetric view":
        tensor = symmetric[3 : 3 + rows]
    elif memory == "strided":
        tensor = torch.empty((rows, 2, *exchange.row_shape), dtype=dtype)[:, 1]
    elif memory == "transposed":
        tensor = torch.empty((*exchange.row_shape, rows), dtype=dtype).movedim(-1, 0)
    elif memory == "unaligned":
        count = math.prod(shape)
        offset = 16 if dtype is torch.complex128 else 1  # torch copies complex128 by aligned instructions
        raw = bytearray(count * dtype.itemsize + offset)
        tensor = (
            torch.frombuffer(raw, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        )
        tensor = tensor.reshape(shape)
    else:
        raise ValueError(memory)
    return tensor.copy_(as_dtype(torch.full((tensor.numel() * tensor.element_size(),), 252).byte(), dtype, shape))


def fill_freed_memory(num_bytes: int) -> None:
    """Let go of what nothing refers to, and write over memory that was just freed."""
    gc.collect()
    for _ in range(4):
        torch.full((num_bytes,), 253, dtype=torch.uint8)


def exchange_once(group: Any = None, seed: int = 5) -> None:
    """One uneven exchange on a group or communicator, checked."""
    world_size = group.world_size if isinstance(group, a2a.Communicator) else dist.get_world_size(group)
    rank = group.rank if isinstance(group, a2a.Communicator) else dist.get_rank(group)
    exchange = Exchange(random_splits(world_size, seed))
    output = torch.empty_like(exchange.expected(rank))
    a2a.all_to_all_single(output, exchange.input(rank), exchange.received(rank), exchange.sent(rank), group)
    assert_same_bits(output, exchange.expected(rank))


def shared_mappings() -> int:
    """How many segments of shared memory are mapped here."""
    gc.collect()
    return sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())
