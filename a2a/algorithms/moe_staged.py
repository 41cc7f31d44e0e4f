"""Mixture of Experts through bounded rings in shared memory.

Dispatch: a rank stores each of its tokens once into its publication ring, and every rank copies from there what its
experts need. Combine: a rank sums the rows that it holds of a token and stores the sum into the ring of the token's owner,
who adds the ranks' sums in rank order. Both are cut into units that fit a ring slot, so that the memory in between stays
the same for any number of tokens. csrc/cpu/moe_*.cpp have the protocols.

Large results come from a pool of this instance: torch has no cache of CPU memory, and the page faults of a fresh matrix
cost more than the copy that fills it. A tensor keeps its block until it dies; when the pool is full, torch's memory serves.

Wins with a wire format (a token is quantised once, whatever its number of experts) and with `layout="compact"`. Otherwise
`direct` moves fewer bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Cost, Part, Request
from a2a.algorithms.moe_base import (
    DTYPE_CODE,
    SCALE_DTYPE,
    WIRE_CODE,
    Dispatched,
    Moe,
    MoeExchange,
    MoeSpec,
    Origins,
    Payload,
    Sources,
    routed_bytes,
)
from a2a.errors import RowOverflowError
from a2a.kernels import cpu

if TYPE_CHECKING:
    from a2a.comm import Communicator

_WORST_CASES = 4  # what the pool holds, in dispatches in which everything comes to one rank
_MOST_POOL_BYTES = 64 << 30  # address space of a rank's pool; its pages come as they are written
_POOLED_BYTES = 256 << 10  # smaller matrices come from torch, whose allocator keeps them warm
_WIDE_SUMS = 2  # kWideSums of the kernels


class MoeStaged(Moe):
    """See the module's docstring."""

    name: ClassVar[str] = "staged"
    device_type: ClassVar[str] = "cpu"

    def cost(self, request: Request, comm: Communicator) -> Cost:
        rows, distinct = routed_bytes(request, comm)
        parts = (Part("call_all_to_all"), Part("signal"), Part("gather", distinct), Part("stream", rows))
        return Cost(steps=2, scale_up_bytes=distinct, copied_bytes=rows + request.num_bytes, parts=parts)

    def open(self, comm: Communicator, spec: MoeSpec, sources: Sources | None = None) -> MoeExchange:
        return SharedMemoryExchange(comm, spec, sources)


class SharedMemoryExchange(MoeExchange):
    """The CPU kernels of one ExpertParallel; `staged` and `direct` differ only in where dispatched rows lie.

    With `sources`, the ranks bring tokens of other domains, too: `bring` says where they lie, arguments are of all that
    this rank brings, and `Dispatched.plan` holds who brought each row and its place there, [2, R], for the collectives
    that follow.
    """

    def __init__(self, comm: Communicator, spec: MoeSpec, sources: Sources | None = None) -> None:
        self._lib, self._comm, self._spec = cpu.lib(), comm, spec
        self._transport = comm.require_transport("ExpertParallel")
        self._sources = sources or Sources(tuple((rank,) for rank in range(comm.world_size)))
        self._brings = sources is not None
        self.spare_rows = 0  # of the matrices of sums, past the end
        # Sums that go on over a rail keep the width in which they travel.
        self.sum_dtype = torch.float32 if self._brings and spec.wide_sums else spec.dtype
        parts = self._sources.parts
        counts = 2 * (-(-parts * (spec.num_experts + comm.world_size + 1) * 4 // 64) * 64)
        self._what = spec.identity()
        self._counts = self._transport.alloc(counts, self._what)
        owners = (ctypes.c_int32 * spec.num_experts)(*spec.expert_to_rank)
        self._moe: int | None = self._lib.a2a_moe_create(
            comm.handle,
            spec.num_experts,
            spec.top_k,
            spec.hidden,
            spec.max_tokens,
            DTYPE_CODE[spec.dtype],
            spec.expert_alignment,
            WIRE_CODE[spec.wire],
            _WIDE_SUMS if self._brings and spec.wide_sums else spec.wide_sums,
            owners,
            self._counts.address,
        )
        self._lib.a2a_moe_sources(self._moe, parts, (ctypes.c_int32 * (comm.world_size * parts))(*self._sources.flat))
        self._local = spec.local_experts(comm.rank)
        most = [spec.most_rows(rank, self._sources.count) * spec.row_bytes for rank in range(comm.world_size)]
        self._most_bytes = most[comm.rank]
        matrix_bytes = max(self._most_bytes, spec.max_tokens * spec.row_bytes)
        self._private: Any = self._transport.private_pool(min(_WORST_CASES * matrix_bytes, _MOST_POOL_BYTES))
        self._asks = spec.asks()

    def _request(self, op: str) -> int:
        agree, text = self._asks[op]
        number: int = self._transport.request(agree, 0, text)
        return number

    # ---- memory

    def _reserve(self) -> tuple[int, int] | None:
        """(pointer, symmetric address) of room for the most rows, before it is known how many come; None: none is needed."""
        return None

    def _unreserve(self, pointer: int) -> None:
        """Give that room back."""

    def _reserved(self, pointer: int, height: int) -> torch.Tensor:
        """The first `height` rows of that room, as a tensor that owns it."""
        raise NotImplementedError

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Flat uint8. Large ones from the pool: fresh pages cost more than the copy that fills them."""
        block = self._private.take(num_bytes) if self._private is not None and num_bytes >= _POOLED_BYTES else None
        if block is None:
            return torch.empty(num_bytes, dtype=torch.uint8)
        flat: torch.Tensor = self._private.tensor(block[0], num_bytes)
        return flat

    def matrix(self, height: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[height, hidden]."""
        dtype, hidden = dtype or self._spec.dtype, self._spec.hidden
        num_bytes = height * hidden * dtype.itemsize
        if num_bytes < _POOLED_BYTES:
            return torch.empty(height, hidden, dtype=dtype)
        return self.memory(num_bytes).view(dtype).view(height, hidden)

    def _pooled(self, pool: Any, pointer: int, height: int) -> torch.Tensor:
        flat: torch.Tensor = pool.tensor(pointer, height * self._spec.row_bytes)
        return flat.view(self._spec.dtype).view(height, self._spec.hidden)

    def bring(self, parts: list[Payload]) -> None:
        """Where the tokens lie that this rank brings to the next dispatch or combine_backward."""
        rows = [cpu.MoePart(_pointer(p.rows), _pointer(p.scales), _pointer(p.numbers), p.rows.shape[0]) for p in parts]
        rows += [cpu.MoePart(1, rows[0].scales, None, 0)] * (self._sources.parts - len(rows))
        self._parts = (cpu.MoePart * len(rows))(*rows)  # the library reads them
        self._lib.a2a_moe_bring(self._moe, self._parts)

    # ---- collectives

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Wait so long for peers: they may wait for ranks of other domains, whose absence they shall tell of first."""
        usual = self._transport.timeout_s
        self._limit(seconds)
        try:
            yield
        finally:
            self._limit(usual)

    def _limit(self, seconds: float) -> None:
        self._transport.timeout_s = seconds
        self._lib.a2a_set_timeout(self._comm.handle, seconds)

    def dispatch(
        self,
        x_TH: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
    ) -> Dispatched:
        spec, request, num_tokens = self._spec, self._request("dispatch"), topk_ids_TK.shape[0]
        ids_bytes = topk_ids_TK.element_size()
        reserved = self._reserve()
        counts = (ctypes.c_int64 * (3 + self._local))()
        result = self._lib.a2a_moe_count(
            self._moe, request, topk_ids_TK.data_ptr(), ids_bytes, num_tokens, reserved[1] if reserved else 0, counts
        )
        if result:
            if reserved:
                self._unreserve(reserved[0])
            if result == cpu.INVALID:
                token, k, bad = counts[0], counts[1], counts[2]
                raise ValueError(
                    f"dispatch: topk_ids_TK[{token}, {k}] is {bad}; expert ids are 0 to {spec.num_experts - 1}, "
                    f"or -1 for none"
                )
            self._comm.raise_failure(result, "dispatch")
        # The context is locked from here to the end of a2a_moe_dispatch.
        try:
            padded, true, distinct = counts[0], counts[1], counts[2]
            if spec.max_rows is not None and padded > spec.max_rows and spec.overflow == "raise":
                message = (
                    f"dispatch: rank {self._comm.rank} received {true} rows ({padded} with padding), above "
                    f"max_rows={spec.max_rows}; raise max_rows, or pass overflow='drop'"
                )
                self._transport.fail(cpu.Cause.OVERFLOW, message)
                raise RowOverflowError(message)
            out, where = self._outputs(padded, distinct, reserved)
        except BaseException:
            self._lib.a2a_moe_abort(self._moe)
            if reserved:
                self._unreserve(reserved[0])
            raise
        result = self._lib.a2a_moe_dispatch(
            self._moe,
            x_TH.data_ptr(),
            scales.data_ptr() if scales is not None else None,
            topk_ids_TK.data_ptr(),
            ids_bytes,
            weights_TK.data_ptr() if weights_TK is not None else None,
            num_tokens,
            ctypes.byref(where),
        )
        if result:
            self._comm.raise_failure(result, "dispatch")
        true_counts = torch.tensor(counts[3 : 3 + self._local], dtype=torch.int32)
        return out._replace(rows_per_expert_L=true_counts, topk_ids_TK=topk_ids_TK.to(torch.int32, copy=True))

    def _outputs(self, padded: int, distinct: int, reserved: tuple[int, int] | None) -> tuple[Dispatched, cpu.MoeRows]:
        """Allocate what a dispatch returns, and say where its parts lie."""
        spec = self._spec
        capacity = padded if spec.max_rows is None else spec.max_rows
        compact = spec.layout == "compact"
        height = capacity
        if compact:
            height = distinct if spec.max_rows is None else spec.compact_rows(self._sources.count)
        wire_rows = spec.rows == "wire"
        scales = torch.empty(0)
        if wire_rows:
            assert spec.wire is not None
            rows = torch.empty(height, spec.hidden, dtype=torch.float8_e4m3fn)
            scales = torch.empty(height, spec.scale_blocks, dtype=SCALE_DTYPE[spec.wire])
        elif reserved is not None:
            rows = self._reserved(reserved[0], height)
        else:
            rows = self.matrix(height)
        ints = [torch.empty(capacity, dtype=torch.int32) for _ in range(3)]
        index = torch.empty(capacity if compact else 0, dtype=torch.int32)
        offsets = torch.empty(self._local, dtype=torch.int32)
        overflow = torch.zeros(1, dtype=torch.int32)
        weights = torch.empty(capacity)
        brought = torch.empty(2 * capacity if self._brings else 0, dtype=torch.int32)
        where = cpu.MoeRows(
            rows=rows.data_ptr(),
            scales=scales.data_ptr(),
            weights=weights.data_ptr(),
            rank=ints[0].data_ptr(),
            token=ints[1].data_ptr(),
            k=ints[2].data_ptr(),
            index=index.data_ptr(),
            offsets=offsets.data_ptr(),
            overflow=overflow.data_ptr(),
            capacity=capacity,
            compact_capacity=height,
            limit=-1 if spec.max_rows is None else spec.max_rows,
            rows_wire=wire_rows,
            compact=compact,
            direct=reserved is not None,
            bringer=brought.data_ptr() if self._brings else None,
            place=brought.data_ptr() + 4 * capacity if self._brings else None,
        )
        rank, token, k = ints
        return (
            Dispatched(rows, scales, offsets, offsets, weights, rank, token, k, index, overflow, offsets, brought),
            where,
        )

    def combine(self, rows_RH: torch.Tensor, weights_R: torch.Tensor | None, origins: Origins) -> torch.Tensor:
        num_tokens = origins.topk_ids_TK.shape[0]
        y = self.matrix(num_tokens + self.spare_rows, self.sum_dtype)
        result = self._lib.a2a_moe_combine(
            self._moe,
            self._request("combine"),
            rows_RH.data_ptr(),
            origins.row_rank_R.shape[0],
            _pointer(weights_R),
            origins.row_rank_R.data_ptr(),
            origins.row_token_R.data_ptr(),
            None,
            None,
            None,
            y.data_ptr(),
            None,
            num_tokens,
        )
        if result:
            self._comm.raise_failure(result, "combine")
        return y

    def combine_backward(
        self, grad_TH: torch.Tensor, rows_RH: torch.Tensor | None, weights_R: torch.Tensor | None, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = origins.row_rank_R.shape[0]
        grad_rows = self.matrix(num_rows)
        grad_weights = torch.zeros(num_rows) if rows_RH is None else torch.empty(num_rows)
        result = self._lib.a2a_moe_spread(
            self._moe,
            self._request("combine_backward"),
            grad_TH.data_ptr(),
            origins.topk_ids_TK.shape[0],
            _pointer(rows_RH),
            num_rows,
            _pointer(weights_R),
            origins.row_rank_R.data_ptr(),
            origins.row_token_R.data_ptr(),
            grad_rows.data_ptr(),
            None if rows_RH is None else grad_weights.data_ptr(),
        )
        if result:
            self._comm.raise_failure(result, "combine_backward")
        return grad_rows, grad_weights

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_weights_R: torch.Tensor, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank, token, k, index, ids, _ = origins
        num_tokens = ids.shape[0]
        grad_x = self.matrix(num_tokens + self.spare_rows, self.sum_dtype)
        grad_weights = torch.empty(num_tokens, self._spec.top_k)
        result = self._lib.a2a_moe_combine(
            self._moe,
            self._request("dispatch_backward"),
            grad_rows.data_ptr(),
            rank.shape[0],
            None,
            rank.data_ptr(),
            token.data_ptr(),
            k.data_ptr(),
            index.data_ptr() if self._spec.layout == "compact" else None,
            _pointer(grad_weights_R),
            grad_x.data_ptr(),
            _pointer(grad_weights),
            num_tokens,
        )
        if result:
            self._comm.raise_failure(result, "dispatch_backward")
        return grad_x, grad_weights

    def refuse(self, op: str, why: str) -> None:
        if self._moe is not None and not self._comm.closed:
            self._lib.a2a_refuse(self._comm.handle, self._request(op), why.encode()[:1000])

    def close(self) -> None:
        if self._moe is not None:
            self._lib.a2a_moe_destroy(self._moe)
            self._moe = None
            self._transport.release(self._counts)
            if self._private is not None:
                self._private.close()


def _pointer(tensor: torch.Tensor | None) -> Any:
    """Null for None, and never null for a tensor: an empty one has no address, but it is there."""
    return None if tensor is None else tensor.data_ptr() or 1


__all__ = ["MoeStaged", "SharedMemoryExchange"]
