"""The implementations that `a2a bench all_to_all` and `all_to_allv` time against each other.

Every one of them moves the same elements: what rank s sends to rank d is `pattern(s, d, count)`, which each rank can compute
for every other, so that results are compared element by element, exactly.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from a2a.measure import Contender
from a2a.plan import Request, choose

if TYPE_CHECKING:
    from a2a.comm import Communicator

CALL = Callable[[], object]
CPU = torch.device("cpu")
POISON = 0xA5  # every byte of an output before a check; no pattern comes out as such a run


@dataclass(frozen=True)
class Exchange:
    """One all-to-all: how many elements every rank sends to every other.

    Attributes:
        op: "all_to_all" (even) or "all_to_allv".
        counts: counts[s][d] elements go from rank s to rank d.
        dtype: of the elements.
        rank: whose side this is.
        device: where its tensors are.
    """

    op: str
    counts: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    rank: int
    device: torch.device = CPU

    @staticmethod
    def of_bytes(
        op: str,
        num_bytes: int,
        dtype: torch.dtype,
        rank: int,
        world_size: int,
        device: torch.device = CPU,
    ) -> Exchange:
        """The exchange with `num_bytes` of send buffer on each rank, rounded down as nccl-tests does.

        The sizes of all_to_allv are random, the same in every run: each rank's buffer is cut in proportions of 0.5 to 1.5.
        """
        elements = num_bytes // dtype.itemsize
        if elements < world_size:
            raise ValueError(
                f"--bytes {num_bytes}: {elements} elements of {dtype} are fewer than one for each of {world_size} ranks"
            )
        if op == "all_to_all":
            counts = ((elements // world_size,) * world_size,) * world_size
        else:
            counts = tuple(_cut(elements, world_size, random.Random(seed)) for seed in range(world_size))
        return Exchange(op, counts, dtype, rank, device)

    @property
    def world_size(self) -> int:
        return len(self.counts)

    @property
    def sends(self) -> list[int]:
        return list(self.counts[self.rank])

    @property
    def receives(self) -> list[int]:
        return [row[self.rank] for row in self.counts]

    @property
    def num_bytes(self) -> int:
        """The size of a send buffer; the same on every rank."""
        return sum(self.sends) * self.dtype.itemsize

    def fill(self, tensor: Tensor) -> None:
        """Write what this rank sends."""
        for peer, piece in enumerate(torch.split(tensor, self.sends)):
            piece.copy_(self.pattern(self.rank, peer, len(piece)))

    def pattern(self, source: int, destination: int, count: int) -> Tensor:
        """`count` small whole numbers, cast to the dtype, that tell source, destination and position apart."""
        first = 31 * source + 17 * destination
        return (torch.arange(first, first + count, device=self.device) % 113).to(self.dtype)

    def wrong(self, output: Tensor) -> int:
        """How many elements of `output` are not, bit for bit, what this rank should have received."""
        count = 0
        for peer, piece in enumerate(torch.split(output, self.receives)):
            expected = _bytes(self.pattern(peer, self.rank, len(piece)))
            differs = (_bytes(piece) != expected).view(-1, self.dtype.itemsize)
            count += int(differs.any(dim=1).sum())
        return count


def _cut(elements: int, parts: int, generator: random.Random) -> tuple[int, ...]:
    shares = [0.5 + generator.random() for _ in range(parts)]
    counts = [int(elements * share / sum(shares)) for share in shares]
    counts[-1] += elements - sum(counts)
    return tuple(counts)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dtype is not torch.uint8 else tensor.contiguous()


# ------------------------------------------------------------------------------------------------------- contenders


def a2a_contender(exchange: Exchange, comm: Communicator, memory: str) -> Contender:
    """`a2a.all_to_all_single` on tensors from `comm.empty` (memory "symmetric") or from torch ("ordinary")."""
    import a2a

    total_in, total_out = sum(exchange.sends), sum(exchange.receives)
    if memory == "symmetric":
        capacity = max(sum(row) for row in zip(*exchange.counts, strict=True))  # comm.empty is collective: equal sizes
        source = comm.empty((max(capacity, total_in),), exchange.dtype)[:total_in]
        output = comm.empty((max(capacity, total_in),), exchange.dtype)[:total_out]
    else:
        source = torch.empty(total_in, dtype=exchange.dtype, device=exchange.device)
        output = torch.empty(total_out, dtype=exchange.dtype, device=exchange.device)

    def call_even() -> object:
        return a2a.all_to_all_single(output, source, group=comm)

    receives, sends = exchange.receives, exchange.sends

    def call_uneven() -> object:
        return a2a.all_to_all_single(output, source, receives, sends, group=comm)

    call = call_even if exchange.op == "all_to_all" else call_uneven
    plan = choose(Request("all_to_all", exchange.dtype, exchange.num_bytes, (("memory", memory),)), comm)
    sms = plan.cost.sms if exchange.device.type == "cuda" else None
    made = contender("a2a", exchange, source, output, call, algorithm=plan.algorithm.name, sms=sms)
    return replace(made, predicted_us=plan.time_us)


def dist_contender(name: str, exchange: Exchange, group: dist.ProcessGroup | None) -> Contender:
    """`dist.all_to_all_single` on a group: gloo's, or one of backend "a2a"."""
    source = torch.empty(sum(exchange.sends), dtype=exchange.dtype, device=exchange.device)
    output = torch.empty(sum(exchange.receives), dtype=exchange.dtype, device=exchange.device)
    call = dist_call(exchange, source, output, group)
    return contender(name, exchange, source, output, call, optional=name != "a2a")


def dist_call(exchange: Exchange, source: Tensor, output: Tensor, group: dist.ProcessGroup | None) -> CALL:
    """A call of `dist.all_to_all_single`, with splits only where they are needed."""
    receives, sends = exchange.receives, exchange.sends

    def call_even() -> object:
        return dist.all_to_all_single(output, source, group=group)

    def call_uneven() -> object:
        return dist.all_to_all_single(output, source, receives, sends, group=group)

    return call_even if exchange.op == "all_to_all" else call_uneven


def mpi_contender(exchange: Exchange, world: Any) -> Contender:
    """mpi4py's `Alltoall` or `Alltoallv` on NumPy arrays of the tensors' memory."""
    source = torch.empty(sum(exchange.sends), dtype=exchange.dtype)
    output = torch.empty(sum(exchange.receives), dtype=exchange.dtype)
    source_array, output_array, scale = _arrays(source, output)
    if exchange.op == "all_to_all":

        def call() -> object:
            return world.Alltoall(source_array, output_array)

    else:
        send = [source_array, (_scaled(exchange.sends, scale), _starts(exchange.sends, scale))]
        receive = [output_array, (_scaled(exchange.receives, scale), _starts(exchange.receives, scale))]

        def call() -> object:
            return world.Alltoallv(send, receive)

    return contender("mpi", exchange, source, output, call, optional=True)


def memcpy_contender(exchange: Exchange) -> Contender:
    """libc's memcpy of a send buffer on every rank at once: what moving these bytes costs without any ranks to talk to."""
    source = torch.empty(sum(exchange.sends), dtype=exchange.dtype)
    output = torch.empty_like(source)
    to, of, size = output.data_ptr(), source.data_ptr(), exchange.num_bytes
    exchange.fill(source)

    def call() -> object:
        return ctypes.memmove(to, of, size)

    def check() -> int:
        _bytes(output).fill_(POISON)
        call()
        return int((_bytes(output) != _bytes(source)).sum())

    return Contender("memcpy", call, check)


def contender(
    name: str,
    exchange: Exchange,
    source: Tensor,
    output: Tensor,
    call: CALL,
    *,
    algorithm: str = "-",
    sms: int | None = None,
    optional: bool = False,
) -> Contender:
    """The contender that sends `source`, which is filled here, to `output` by `call`."""
    exchange.fill(source)

    def check_call(make: CALL) -> int:
        poison(output)
        make()
        return exchange.wrong(output)

    return Contender(
        name, call, lambda: check_call(call), algorithm=algorithm, sms=sms, check_call=check_call, optional=optional
    )


def poison(output: Tensor) -> None:
    """Make every element wrong."""
    if output.numel():
        output.view(torch.uint8).fill_(POISON)


def _arrays(source: Tensor, output: Tensor) -> tuple[Any, Any, int]:
    """NumPy arrays over both, and how many of their elements make one of the tensors'."""
    try:
        return source.numpy(), output.numpy(), 1
    except TypeError:  # bfloat16, float8: NumPy has no such dtype, MPI moves their bytes
        return source.view(torch.uint8).numpy(), output.view(torch.uint8).numpy(), source.dtype.itemsize


def _scaled(counts: list[int], scale: int) -> Any:
    return np.array(counts) * scale


def _starts(counts: list[int], scale: int) -> Any:
    return np.concatenate([[0], np.cumsum(counts)[:-1]]) * scale
