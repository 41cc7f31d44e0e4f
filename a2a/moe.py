"""ExpertParallel: Mixture-of-Experts dispatch and combine.

Legend of shape suffixes: T tokens of this rank, K experts per token, H hidden, E experts, L experts of this rank, R
received rows (padding included), U distinct received tokens.

How rows lie. Two ranks, four experts, top-2, alignment 4. Rank 0 holds experts 0 and 1, rank 1 holds 2 and 3.

    rank 0:  token a -> experts 0, 2        rank 1:  token c -> experts 0, 1
             token b -> experts 0, 1                 token d -> experts 3, 0

    rows on rank 0                              row_rank  row_token  row_k
      expert 0   0  a   (rank 0, token 0, k 0)      0         0        0      rows are ordered by
                 1  b   (rank 0, token 1, k 0)      0         1        0      (expert, source rank, token, k)
                 2  c   (rank 1, token 0, k 0)      1         0        0
                 3  d   (rank 1, token 1, k 1)      1         1        1
      expert 1   4  b   (rank 0, token 1, k 1)      0         1        1      rows_per_expert = [4, 2]
                 5  c   (rank 1, token 0, k 1)      1         0        1      offsets_E       = [4, 8]
                 6  0   padding                    -1        -1       -1      (padded, inclusive ends)
                 7  0   padding                    -1        -1       -1

    layout="compact" on rank 0: rows = [a, b, c, d], each once; row_index = [0, 1, 2, 3, 1, 2, 0, 0]: rows[row_index] are
    the rows above (padding points at row 0, whose product nobody reads).

    combine: rank 0 sums its rows of b (rows 1 and 4, in expert order, times their weights) in float32 and rounds once; the
    owner of b adds what the ranks send, in rank order, in float32, and rounds once.

A token's rows are summed on the rank that holds them before they go home: b above crosses back once, not twice. On its
way there it crosses once with the `staged` algorithm; `direct` stores each row where it belongs, which on one host is
one copy less. A group of several domains takes `hierarchical`: between domains a token crosses once for each domain that has
experts of it, and so does its sum on the way back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from a2a import moe_ops
from a2a.algorithms.moe_base import SCALE_DTYPE, Dispatched, Moe, MoeSpec, Origins
from a2a.algorithms.moe_checks import ROW_MULTIPLE, checked, owners_of
from a2a.algorithms.moe_ready import ReadyFlags
from a2a.comm import Communicator, implicit
from a2a.plan import Plan, choose


class Routing(NamedTuple):
    """Where the rows of a dispatch came from. It owns its tensors: any number of routings may be in flight.

    Attributes:
        offsets_E: int32 [L], where each local expert's padded block ends; what torch._grouped_mm takes as `offs`.
        row_weights_R: float32 [R], the weight of each row, 1 where none were given, 0 on padding. Differentiable.
        row_rank_R, row_token_R, row_k_R: int32 [R], the row's source rank, token and position in its top-k; -1 on padding.
        overflow: int32 [1], rows that were dropped here for `max_rows`.
        topk_ids_TK: int32 [T, K], what this rank asked for.
        row_index_R: int32 [R] with layout="compact": which distinct token each row is, 0 on padding. Else empty.
        plan: int32, what combine needs beside; its content is the algorithm's own. Empty on a CPU in one domain.
    """

    offsets_E: torch.Tensor
    row_weights_R: torch.Tensor
    row_rank_R: torch.Tensor
    row_token_R: torch.Tensor
    row_k_R: torch.Tensor
    overflow: torch.Tensor
    topk_ids_TK: torch.Tensor
    row_index_R: torch.Tensor
    plan: torch.Tensor


class ExpertParallel:
    """Sends tokens to the ranks of their experts and brings the sums back, differentiably. Made by all ranks of a
    group together.

    Args:
        group: a ProcessGroup, or None for the default one.
        num_experts: E, over all ranks. Rank r holds a contiguous block, the first E mod (number of ranks) ranks one more.
        top_k: K, experts per token, 1 to 32.
        hidden: H, elements of a row; any whose row is a multiple of 16 bytes.
        max_tokens: the most tokens that a rank brings to a dispatch.
        dtype: of rows: bfloat16, float16 or float32. Sums are taken in float32 in any case.
        device: where the tensors are; None: CUDA where the group's default backend is for CUDA alone, else the CPU.
        expert_alignment: each expert's block of rows is padded with zero rows to a multiple of this; an empty one is not.
        max_rows: None: the tensors have as many rows as came, and the host waits for their number. N: they have N rows,
            padding included, whatever came; what lies past the end is unspecified.
        overflow: with more than `max_rows` rows: "raise", or "drop" the last ones and count them in `routing.overflow`.
        wire: how rows travel in dispatch, and gradients in combine's backward: None (as they are), "fp8" (e4m3, one float32
            scale for 128 columns) or "mxfp8" (e4m3, one power of two for 32 columns). Gradients pass straight through.
        rows: "dtype": rows arrive in `dtype`. "wire": as (e4m3, scales), not differentiable; see `dispatch_backward`.
        layout: "expert": one row for each (token, expert), ordered by expert. "compact": each distinct token once.
        expert_to_rank: E ranks, instead of contiguous blocks. A rank's experts are ordered by id.
        wire_combine: "float32" carries the ranks' partial sums unrounded.
        num_sms: on a GPU, the most SMs that may be used, at least 2; without meaning on a CPU.
        ready_rows: n: ready flags, one for each n rows, by which kernels of yours start on rows that have arrived while
            others travel, and `combine` on rows that have been made; see `ready`. A tile of a grouped product is a good n.
        comm: a Communicator to use instead of the group's own. Instances on one communicator share its staging and
            follow one another; for concurrent streams use two.
    Raises:
        ValueError, TypeError: an argument is impossible.
        MismatchError: the ranks' arguments differ. On all of them.
        UnsupportedError: no transport or algorithm serves this group; lists the reasons.
    Several domains: rows, their order and their bits are those of one domain; sums are rounded once more (see
        `combine`). With `max_rows`, what crosses between domains has the size of `max_tokens`, whatever the routing. A
        RowOverflowError reaches the ranks of other domains with their next call.
    Cost: buffers for the counts and a pool of symmetric address space, whose pages come as they are used.
    Source: the exchange that DeepEP, HybridEP and FlashInfer do on GPUs; the order of sums is documented in `combine`.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
        expert_alignment: int = 1,
        max_rows: int | None = None,
        overflow: str = "raise",
        wire: str | None = None,
        rows: str = "dtype",
        layout: str = "expert",
        expert_to_rank: Sequence[int] | torch.Tensor | None = None,
        wire_combine: str | None = None,
        num_sms: int | None = None,
        ready_rows: int | None = None,
        comm: Communicator | None = None,
    ) -> None:
        if comm is None:
            comm = group if isinstance(group, Communicator) else _communicator_of(group, device)
        comm.check_open("ExpertParallel")
        if device is not None and torch.device(device).type != comm.device_type:
            raise ValueError(
                f"ExpertParallel: device={device}, but this group's ranks share memory of {comm.device_type}"
            )
        self.comm = comm
        self.spec = checked(
            MoeSpec(
                num_experts,
                top_k,
                hidden,
                max_tokens,
                dtype,
                expert_alignment,
                max_rows,
                overflow,
                wire,
                rows,
                layout,
                owners_of(expert_to_rank, num_experts, comm.world_size),
                wire_combine,
                num_sms,
                ready_rows,
            )
        )
        self.plan: Plan = choose(self.spec.request(), comm)
        assert isinstance(self.plan.algorithm, Moe)
        self._exchange = self.plan.algorithm.open(comm, self.spec)
        self._ready = self._exchange.ready
        if self._ready is None and ready_rows is not None:
            self._ready = ReadyFlags.of_cpu(self.spec, comm.rank, comm.world_size)
        with torch.inference_mode(False):
            self._anchor = torch.zeros((), device=comm.device, requires_grad=True) if rows == "dtype" else None
        self._number = moe_ops.register(self)
        exchange = self._exchange
        self._release = weakref.finalize(self, exchange.close)
        self._release.atexit = False
        comm.own(exchange.close)

    # ---- what users call

    def dispatch(
        self, x_TH: Any, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor | None = None
    ) -> tuple[Any, torch.Tensor, Routing]:
        """Send every token to the ranks of its experts. Collective; T may differ between ranks, down to zero everywhere.

        Args:
            x_TH: [T, H] tokens of the instance's dtype; or, with a wire format, a pair (e4m3 [T, H], scales
                [T, blocks]) that was quantised before and travels as it is.
            topk_ids_TK: [T, K] integers, expert ids; -1 makes no row. A repeated id makes two rows.
            topk_weights_TK: [T, K] floating point, or None. They travel in float32.
        Returns:
            rows: [R, H], expert-major: ordered by (expert, source rank, token, k), each expert padded with zero rows to
                `expert_alignment`. With rows="wire" a pair (e4m3, scales). With layout="compact" [U, H].
            rows_per_expert: int32 [L], true counts.
            routing: see `Routing`.
        Raises:
            ValueError, TypeError: an id out of range, too many tokens, a shape or dtype that is not the instance's; the
                other ranks raise MismatchError.
            RowOverflowError: more than max_rows came to a rank, with overflow="raise". On all ranks.
            PeerTimeoutError: a peer died or is late. Names it.
        Ready flags: on a GPU the current stream goes on when all rows are here, as without; a stream that `ready.start`
            lets go on may begin with rows whose words say so.
        Cost: each row is written once; the host waits for the slowest peer's counts and rows.
        """
        x, scales = (x_TH[0], x_TH[1]) if isinstance(x_TH, (tuple, list)) else (x_TH, None)
        if torch.is_autocast_enabled(self.comm.device_type) and scales is None and x.dtype != self.spec.dtype:
            x = x.to(self.spec.dtype)
        out = Dispatched(
            *torch.ops.a2a.moe_dispatch(self._number, x, scales, topk_ids_TK, topk_weights_TK, self._anchor)
        )
        rows = (out.rows, out.scales) if self.spec.rows == "wire" else out.rows
        routing = Routing(
            out.offsets_L,
            out.row_weights_R,
            out.row_rank_R,
            out.row_token_R,
            out.row_k_R,
            out.overflow,
            out.topk_ids_TK,
            out.row_index_R,
            out.plan,
        )
        return rows, out.rows_per_expert_L, routing

    def combine(
        self, out_rows: torch.Tensor, routing: Routing, apply_weights: bool = True, ready: bool = False
    ) -> torch.Tensor:
        """Bring the experts' rows home and sum them. Collective.

        Args:
            out_rows: [R, H], one row for each row of the routing (expert-major in either layout), of the instance's dtype.
            routing: what the dispatch returned.
            apply_weights: multiply each row by `routing.row_weights_R`.
            ready: the rows are still being made by a kernel that has been launched, and `ready.sendable` says which are
                there; a rank's own affair. Rows that are made in ascending order are sent the earliest. They must all be
                marked within the communicator's timeout. `out_rows` is contiguous, and 16-byte aligned.
        Returns: [T, H] on the rank that dispatched the tokens; 0 for a token without rows.
        Order: the rank that holds a token's experts sums the token's rows in expert order, then k, in float32: each product
            rounded, then added, starting from the first; and rounds once to the dtype (not at all with
            wire_combine="float32"). The owner adds the ranks' sums in rank order in float32, starting from the first,
            and rounds once. So the bits are the same in every run and on every machine. In a group of several domains
            each domain sums its ranks' sums so (rounded once to the dtype, or not at all), and the owner the domains'
            in the order of their lowest ranks.
        Raises: as `dispatch`; MismatchError if the routing belongs to another dispatch.
        """
        if not ready and torch.is_autocast_enabled(self.comm.device_type) and out_rows.dtype != self.spec.dtype:
            out_rows = out_rows.to(self.spec.dtype)
        y: torch.Tensor = torch.ops.a2a.moe_combine(
            self._number, out_rows, routing.row_weights_R, *_origins(routing), apply_weights, ready
        )
        return y

    def combine_backward(
        self, grad_TH: torch.Tensor, out_rows: torch.Tensor | None, routing: Routing, apply_weights: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of `combine` by hand: (grad_rows [R, H], grad_row_weights float32 [R]). Collective.

        Pass the `out_rows` of the combine for the weights' gradient, or None to do without (then it is zero). It travels in
        the wire format, if there is one.
        """
        weights = routing.row_weights_R if apply_weights else None
        grads: tuple[torch.Tensor, torch.Tensor] = torch.ops.a2a.moe_combine_backward(
            self._number, grad_TH, out_rows if apply_weights else None, weights, *_origins(routing)
        )
        return grads

    def dispatch_backward(
        self, grad_rows: torch.Tensor, routing: Routing, grad_row_weights_R: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of `dispatch` by hand: (grad_TH, grad_topk_weights_TK in float32). Collective.

        `grad_rows` has the shape of the dispatched rows and the instance's dtype.
        """
        if grad_row_weights_R is None:
            grad_row_weights_R = torch.zeros_like(routing.row_weights_R)
        grads: tuple[torch.Tensor, torch.Tensor] = torch.ops.a2a.moe_dispatch_backward(
            self._number, grad_rows, grad_row_weights_R, *_origins(routing)
        )
        return grads

    @property
    def ready(self) -> ReadyFlags:
        """The ready flags of an instance with `ready_rows`.

        Raises:
            ValueError: it has none.
        """
        if self._ready is None:
            raise ValueError("ExpertParallel.ready: this instance has no ready flags; make it with ready_rows=n")
        return self._ready

    def close(self) -> None:
        """Give the buffers back; they are used again once every rank has done so. Rows that were handed out stay valid."""
        self._release()

    @property
    def num_local_experts(self) -> int:
        """L, the experts of this rank."""
        return self.spec.local_experts(self.comm.rank)

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what the torch.library ops run

    def _run_dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> Dispatched:
        spec = self.spec
        self._check_open("dispatch")
        try:
            num_tokens = ids.shape[0] if ids.dim() == 2 else -1
            if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
                raise TypeError(f"dispatch: topk_ids_TK must hold integers; got {ids.dtype}")
            if ids.device != self.comm.device:
                raise ValueError(
                    f"dispatch: topk_ids_TK is on {ids.device}; this ExpertParallel's tensors are on {self.comm.device}"
                )
            if ids.dim() != 2 or ids.shape[1] != spec.top_k:
                raise ValueError(f"dispatch: topk_ids_TK must be [T, {spec.top_k}] (top_k); got {list(ids.shape)}")
            if num_tokens > spec.max_tokens:
                raise ValueError(
                    f"dispatch: {num_tokens} tokens on rank {self.comm.rank}, above max_tokens={spec.max_tokens} of this "
                    f"ExpertParallel; make one with a larger max_tokens"
                )
            expected = spec.dtype if scales is None else torch.float8_e4m3fn
            self._check_matrix("dispatch: x_TH", x, num_tokens, spec.hidden, expected)
            if scales is not None:
                if spec.wire is None:
                    raise ValueError("dispatch: a quantised payload (pair) needs wire='fp8' or 'mxfp8'")
                self._check_matrix("dispatch: scales", scales, num_tokens, spec.scale_blocks, SCALE_DTYPE[spec.wire])
            if weights is not None:
                if not weights.dtype.is_floating_point:
                    raise TypeError(f"dispatch: topk_weights_TK must be floating point; got {weights.dtype}")
                if weights.shape != ids.shape:
                    raise ValueError(
                        f"dispatch: topk_weights_TK is {list(weights.shape)}, topk_ids_TK {list(ids.shape)}; must be equal"
                    )
                weights = weights.to(torch.float32).contiguous()
            if ids.dtype not in (torch.int32, torch.int64):
                ids = ids.to(torch.int64)
            scales = None if scales is None else scales.contiguous()
            return self._exchange.dispatch(x.contiguous(), scales, ids.contiguous(), weights)
        except (ValueError, TypeError) as error:
            self._exchange.refuse("dispatch", f"{type(error).__name__}: {error}")
            raise

    def _run_combine(
        self, rows: torch.Tensor, weights: torch.Tensor | None, origins: Origins, ready: bool
    ) -> torch.Tensor:
        self._check_open("combine")
        num_rows = origins.row_rank_R.shape[0]
        with self._refusing("combine"):
            self._check_matrix("combine: out_rows", rows, num_rows, self.spec.hidden, self.spec.dtype)
            weights = None if weights is None else _check_weights("combine", weights, num_rows)
            if ready:
                self._check_marked(rows)
        if ready:
            return self._exchange.combine_marked(rows, weights, origins)
        return self._exchange.combine(rows.contiguous(), weights, origins)

    def _check_marked(self, rows: torch.Tensor) -> None:
        """They are read where they are made: a copy would be made too early."""
        if self._ready is None:
            raise ValueError(
                "combine: ready=True needs an ExpertParallel with ready_rows=n; this one has no ready flags"
            )
        if not rows.is_contiguous() or rows.data_ptr() % ROW_MULTIPLE:
            raise ValueError(
                f"combine: ready=True needs out_rows that are contiguous and {ROW_MULTIPLE}-byte aligned; their strides are "
                f"{list(rows.stride())} and their address is {rows.data_ptr():#x}"
            )

    def _run_combine_backward(
        self, grad: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op, spec, num_rows = "combine_backward", self.spec, origins.row_rank_R.shape[0]
        self._check_open(op)
        with self._refusing(op):
            self._check_matrix(f"{op}: grad", grad, origins.topk_ids_TK.shape[0], spec.hidden, spec.dtype)
            if rows is not None:
                self._check_matrix(f"{op}: out_rows", rows, num_rows, spec.hidden, spec.dtype)
            weights = None if weights is None else _check_weights(op, weights, num_rows)
        rows = None if rows is None else rows.contiguous()
        return self._exchange.combine_backward(grad.contiguous(), rows, weights, origins)

    def _run_dispatch_backward(
        self, grad_rows: torch.Tensor, grad_weights: torch.Tensor, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op, num_rows = "dispatch_backward", origins.row_rank_R.shape[0]
        self._check_open(op)
        with self._refusing(op):
            height = grad_rows.shape[0] if self.spec.layout == "compact" else num_rows
            self._check_matrix(f"{op}: grad_rows", grad_rows, height, self.spec.hidden, self.spec.dtype)
            grad_weights = _check_weights(op, grad_weights, num_rows)
        return self._exchange.dispatch_backward(grad_rows.contiguous(), grad_weights, origins)

    def _check_matrix(self, what: str, tensor: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype:
            raise TypeError(f"{what} is {tensor.dtype}; expected {dtype}")
        if tensor.dim() != 2 or tensor.shape[0] != rows or tensor.shape[1] != columns:
            raise ValueError(f"{what} has shape {list(tensor.shape)}; expected [{rows}, {columns}]")
        if tensor.device != self.comm.device:
            raise ValueError(f"{what} is on {tensor.device}; this ExpertParallel's tensors are on {self.comm.device}")

    def _check_open(self, op: str) -> None:
        self.comm.check_open(op)
        if not self._release.alive:
            raise ValueError(f"{op}: this ExpertParallel is closed")

    def _refusing(self, op: str) -> _Refusing:
        return _Refusing(self, op)


class _Refusing:
    """What raises inside is told to the peers, whose calls then raise too instead of waiting."""

    def __init__(self, owner: ExpertParallel, op: str) -> None:
        self._owner, self._op = owner, op

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (ValueError, TypeError)):
            self._owner._exchange.refuse(self._op, f"{type(error).__name__}: {error}")


def _communicator_of(group: Any, device: Any) -> Communicator:
    if device is None:
        world = dist.group.WORLD if group is None else group
        kinds = {kind.type for kind in getattr(world, "_device_types", [])}
        device = "cuda" if kinds == {"cuda"} else "cpu"
    chosen = torch.device(device)
    return implicit(group, "ExpertParallel", chosen.type, chosen)


def _origins(routing: Routing) -> Origins:
    return Origins(
        routing.row_rank_R,
        routing.row_token_R,
        routing.row_k_R,
        routing.row_index_R,
        routing.topk_ids_TK,
        routing.plan,
    )


def _check_weights(op: str, weights: torch.Tensor, rows: int) -> torch.Tensor:
    if weights.dtype != torch.float32 or weights.shape != (rows,):
        raise ValueError(f"{op}: row weights must be float32 [{rows}]; got {weights.dtype} {list(weights.shape)}")
    return weights.contiguous()


__all__ = ["ExpertParallel", "ReadyFlags", "Routing"]
