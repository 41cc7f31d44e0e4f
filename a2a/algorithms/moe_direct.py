"""Mixture of Experts with rows stored where they belong.

Each rank has a pool of symmetric memory. Before a dispatch it sets aside room for the most rows that could come and sends
the address along with its counts; the sources then store every row into its final place, and only ids and weights go
through the rings. Afterwards the room shrinks to what came, and belongs to the returned tensor until that dies. A rank
whose pool is full asks to be staged for, this once; the others need not know more. Combine is that of `moe_staged`.

Wins whenever rows keep their dtype: every row is written once and nothing else is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Cost, Part, Request
from a2a.algorithms.moe_base import MoeExchange, MoeSpec, Sources, routed_bytes
from a2a.algorithms.moe_staged import _MOST_POOL_BYTES, _WORST_CASES, MoeStaged, SharedMemoryExchange

if TYPE_CHECKING:
    from a2a.comm import Communicator

_MOST_BYTES = 64 << 30  # address space for one dispatch in which everything comes to one rank
_TOUCH_BYTES = 64 << 20  # the most of a pool that is touched when it is made


class MoeDirect(MoeStaged):
    """See the module's docstring."""

    name: ClassVar[str] = "direct"

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        reason = super().unsupported(request, comm)
        if reason is not None:
            return reason
        if request.get("wire") is not None:
            return f"rows are stored as they are; wire={request.get('wire')!r} is converted on arrival"
        if request.get("layout") != "expert":
            return f"a row of layout={request.get('layout')!r} has no place of its own per expert"
        if request.get("most_row_bytes") * comm.world_size > _MOST_BYTES:
            most = request.get("most_row_bytes") * comm.world_size
            return f"its pool would have to hold {most >> 30} GiB; lower max_tokens"
        return None

    def cost(self, request: Request, comm: Communicator) -> Cost:
        rows, _ = routed_bytes(request, comm)
        parts = (Part("call_all_to_all"), Part("signal"), Part("push", rows))
        return Cost(steps=2, scale_up_bytes=rows, copied_bytes=rows, parts=parts)

    def open(self, comm: Communicator, spec: MoeSpec, sources: Sources | None = None) -> MoeExchange:
        return DirectExchange(comm, spec, sources)


class DirectExchange(SharedMemoryExchange):
    """SharedMemoryExchange whose peers store dispatched rows into a pool of symmetric memory."""

    def __init__(self, comm: Communicator, spec: MoeSpec, sources: Sources | None = None) -> None:
        super().__init__(comm, spec, sources)
        most = max(spec.most_rows(rank, self._sources.count) * spec.row_bytes for rank in range(comm.world_size))
        self._pool: Any = None
        if pool_bytes := min(_WORST_CASES * most, max(most, _MOST_POOL_BYTES)):
            buffer = self._transport.alloc(pool_bytes, self._what + " (pool)", touch=False)
            self._pool = self._transport.pool(buffer)
            even = spec.max_tokens * spec.top_k * spec.row_bytes
            self._lib.a2a_populate(buffer.pointer, min(pool_bytes, 2 * even, _TOUCH_BYTES))

    def _reserve(self) -> tuple[int, int] | None:
        if self._pool is None or self._most_bytes == 0:
            return None
        reserved: tuple[int, int] | None = self._pool.take(self._most_bytes)
        return reserved

    def _unreserve(self, pointer: int) -> None:
        self._pool.give(pointer)

    def _reserved(self, pointer: int, height: int) -> torch.Tensor:
        return self._pooled(self._pool, pointer, height)

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None


__all__ = ["DirectExchange", "MoeDirect"]
