"""What the algorithms of ExpertParallel share: the specification of an instance, and what a dispatch returns.

Legend of shape suffixes: T tokens of this rank, K experts per token, H hidden, E experts, L experts of this rank, R
received rows (padding included), U distinct received tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from a2a.algorithms.base import Algorithm, Request

if TYPE_CHECKING:
    from a2a.algorithms.moe_ready import ReadyFlags
    from a2a.comm import Communicator

# Dtype and Wire of the kernels, on CPUs and GPUs.
DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WIRE_CODE = {None: 0, "fp8": 1, "mxfp8": 2}
OPS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
WIRE_BLOCK = {"fp8": 128, "mxfp8": 32}
SCALE_DTYPE = {"fp8": torch.float32, "mxfp8": torch.float8_e8m0fnu}


@dataclass(frozen=True)
class MoeSpec:
    """The arguments of an ExpertParallel, checked, equal on all ranks. See a2a.ExpertParallel for their meaning."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype
    expert_alignment: int
    max_rows: int | None
    overflow: str
    wire: str | None
    rows: str
    layout: str
    expert_to_rank: tuple[int, ...]
    wire_combine: str | None
    num_sms: int | None = None
    ready_rows: int | None = None

    def local_experts(self, rank: int) -> int:
        """How many experts `rank` holds."""
        return self.expert_to_rank.count(rank)

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    def most_rows(self, rank: int, world_size: int) -> int:
        """The most rows that `rank` can receive, padding included: all tokens of all ranks to its experts."""
        if self.max_rows is not None:
            return self.max_rows
        local = self.local_experts(rank)
        if local == 0:
            return 0
        return world_size * self.max_tokens * self.top_k + local * (self.expert_alignment - 1)

    def ready_words(self, rank: int, world_size: int) -> int:
        """Ready flags of `rank`, one for each `ready_rows` rows that it can receive."""
        assert self.ready_rows is not None
        return max(1, -(-self.most_rows(rank, world_size) // self.ready_rows))

    def compact_rows(self, world_size: int) -> int:
        """Rows of a compact matrix with `max_rows`: a token that came has one, also if `overflow` drops all its rows."""
        assert self.max_rows is not None
        most = world_size * self.max_tokens
        return most if self.overflow == "drop" else min(self.max_rows, most)

    @property
    def scale_blocks(self) -> int:
        """Scales of a row on the wire."""
        return -(-self.hidden // WIRE_BLOCK[self.wire]) if self.wire else 0

    @property
    def wide_sums(self) -> bool:
        """Whether the ranks' partial sums travel wider than rows are."""
        return self.wire_combine == "float32" and self.dtype != torch.float32

    def request(self) -> Request:
        """What the planner is asked."""
        detail = (
            ("layout", self.layout),
            ("max_rows", self.max_rows),
            ("most_row_bytes", self.row_bytes * max(self.max_rows or 0, self.max_tokens * self.top_k)),
            ("num_experts", self.num_experts),
            ("rows", self.rows),
            ("top_k", self.top_k),
            ("wire", self.wire),
        )
        return Request("moe", self.dtype, self.max_tokens * self.row_bytes, detail)

    def describe(self) -> str:
        """One line for errors that compare ranks."""
        short = str(self.dtype).removeprefix("torch.")
        text = f"ExpertParallel(num_experts={self.num_experts}, top_k={self.top_k}, hidden={self.hidden}, "
        text += f"max_tokens={self.max_tokens}, {short}"
        rest = {
            "alignment": self.expert_alignment if self.expert_alignment != 1 else None,
            "max_rows": self.max_rows,
            "overflow": self.overflow if self.overflow != "raise" else None,
            "wire": self.wire,
            "rows": self.rows if self.rows != "dtype" else None,
            "layout": self.layout if self.layout != "expert" else None,
            "wire_combine": self.wire_combine,
            "num_sms": self.num_sms,
            "ready_rows": self.ready_rows,
        }
        return text + "".join(f", {key}={value}" for key, value in rest.items() if value is not None) + ")"

    def identity(self) -> str:
        """What ranks must have in common; `describe` and all that it leaves out."""
        return f"{self.describe()} expert_to_rank {hash(self.expert_to_rank) & 0xFFFFFF:06x}"

    def asks(self) -> dict[str, tuple[str, str]]:
        """Of each collective: what ranks must agree on, and what it is called in errors."""
        return {op: (f"{op}|{self.identity()}", f"{op} of {self.describe()}") for op in OPS}


class Dispatched(NamedTuple):
    """What a dispatch returns, in the order of the torch.library op."""

    rows: torch.Tensor
    scales: torch.Tensor
    rows_per_expert_L: torch.Tensor
    offsets_L: torch.Tensor
    row_weights_R: torch.Tensor
    row_rank_R: torch.Tensor
    row_token_R: torch.Tensor
    row_k_R: torch.Tensor
    row_index_R: torch.Tensor
    overflow: torch.Tensor
    topk_ids_TK: torch.Tensor
    plan: torch.Tensor


class Origins(NamedTuple):
    """What the collectives after a dispatch get of its routing."""

    row_rank_R: torch.Tensor
    row_token_R: torch.Tensor
    row_k_R: torch.Tensor
    row_index_R: torch.Tensor
    topk_ids_TK: torch.Tensor
    plan: torch.Tensor


@dataclass(frozen=True)
class Sources:
    """Whose tokens the ranks of a domain bring to its dispatches: their own, and those that came to them over rails.

    Attributes:
        table: for each rank of the domain, the sources of its parts: first itself; -1 where a part has none. All ranks
            have as many parts, and a source is named once. Rows are ordered by source.
    """

    table: tuple[tuple[int, ...], ...]

    @property
    def parts(self) -> int:
        return len(self.table[0])

    @property
    def flat(self) -> list[int]:
        return [source for parts in self.table for source in parts]

    @property
    def count(self) -> int:
        """Number of sources."""
        return sum(source >= 0 for source in self.flat)


class Payload(NamedTuple):
    """Tokens of one source that a rank brings: rows (or e4m3 and scales), and their numbers there (None: 0, 1, ...)."""

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    numbers: torch.Tensor | None = None


class MoeExchange:
    """A live exchange of one ExpertParallel: its buffers and its four collectives. Arguments are contiguous and checked.

    Attributes:
        plan_size: int32 that a dispatch leaves in `Dispatched.plan` for the collectives that follow it; None: it varies.
        ready: with `ready_rows`, its ready flags; None: they are always true.
    """

    plan_size: int | None = 0
    ready: ReadyFlags | None = None

    @abstractmethod
    def dispatch(
        self,
        x_TH: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
    ) -> Dispatched:
        """Send every token to the ranks of its experts."""

    @abstractmethod
    def combine(self, rows_RH: torch.Tensor, weights_R: torch.Tensor | None, origins: Origins) -> torch.Tensor:
        """Sum every token's rows, wherever they are, into [T, hidden] on the rank that owns the token."""

    def combine_marked(self, rows_RH: torch.Tensor, weights_R: torch.Tensor | None, origins: Origins) -> torch.Tensor:
        """The same for rows that are still being made, as ready flags say: none are, where these are always true."""
        return self.combine(rows_RH, weights_R, origins)

    @abstractmethod
    def combine_backward(
        self, grad_TH: torch.Tensor, rows_RH: torch.Tensor | None, weights_R: torch.Tensor | None, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(grad_rows_RH, grad_weights_R); the second is zero where `rows_RH` is None."""

    @abstractmethod
    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_weights_R: torch.Tensor, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(grad_TH, grad_weights_TK in float32)."""

    @abstractmethod
    def refuse(self, op: str, why: str) -> None:
        """Tell the peers that this rank can't make its call."""

    @abstractmethod
    def close(self) -> None:
        """Give the buffers back. Idempotent, local."""


class Moe(Algorithm):
    """A way to move Mixture-of-Experts tokens."""

    op: ClassVar[str] = "moe"

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if reason := self.no_memory(comm):
            return reason
        if request.dtype not in DTYPE_CODE:
            return f"its kernels sum bfloat16, float16 and float32; this is {request.dtype}"
        return None

    @abstractmethod
    def open(self, comm: Communicator, spec: MoeSpec) -> MoeExchange:
        """Make the buffers. Collective; ranks whose specs differ raise MismatchError."""


def routed_bytes(request: Request, comm: Communicator) -> tuple[int, int]:
    """(bytes of expert-major rows, bytes of tokens sent once a rank) that a rank moves under uniform routing."""
    top_k, ranks = int(request.get("top_k")), comm.world_size
    distinct = ranks * (1 - (1 - 1 / ranks) ** top_k)
    return request.num_bytes * top_k, int(request.num_bytes * distinct)


__all__ = [
    *("DTYPE_CODE", "OPS", "SCALE_DTYPE", "WIRE_BLOCK", "WIRE_CODE"),
    *("Dispatched", "Moe", "MoeExchange", "MoeSpec", "Origins", "Payload", "Sources", "routed_bytes"),
]
