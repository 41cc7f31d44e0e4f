"""What of a dispatch crosses rails: which tokens go to which domain, how they are packed, and how their sums come together.

A token goes to a domain once, however many of its experts are there, with a mask of the k that are, and for each of
these its expert (as the domain counts them) and weight, in the order of (token, k). All the rest follows from lists and
masks, which the routing keeps for the collectives that follow the dispatch.

Messages are as large as what they carry. With `max_rows` they are as large as what they could carry, whatever the
routing, so that nobody needs to know a count to send or receive one.

Legend of shape suffixes: T tokens of this rank, K experts per token, H hidden, R received rows, N tokens of a list, P
pairs of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from a2a.algorithms.moe_base import DTYPE_CODE, SCALE_DTYPE, WIRE_CODE, MoeSpec, Origins, Payload
from a2a.kernels import cpu

_INDEX_BYTES = 8  # number and mask of a token
_WEIGHT_BYTES = 4


class Crossers(NamedTuple):
    """Tokens of one rank that a domain needs: their numbers (none are kept of what came from elsewhere) and masks of k."""

    list_N: torch.Tensor
    masks_N: torch.Tensor
    pairs: int

    @property
    def tokens(self) -> int:
        return len(self.masks_N)

    @property
    def size(self) -> tuple[int, int]:
        return self.tokens, self.pairs


class Crossing(NamedTuple):
    """What a routing remembers: who brought each row to this domain and where it lay there, and who crossed.

    Attributes:
        bringer_R, place_R: int32, -1 on padding.
        went: this rank's tokens to each domain, its own domain among them.
        came: tokens that other domains' ranks sent here, by arrival.
    """

    bringer_R: torch.Tensor
    place_R: torch.Tensor
    went: tuple[Crossers, ...]
    came: tuple[Crossers, ...]

    def pack(self) -> torch.Tensor:
        """One flat int32 tensor."""
        sizes = [(c.tokens, c.pairs) for c in (*self.went, *self.came)]
        head = torch.tensor([len(self.bringer_R), *(n for pair in sizes for n in pair)], dtype=torch.int32)
        lists = [t for c in self.went for t in (c.list_N, c.masks_N)]
        return torch.cat([head, self.bringer_R, self.place_R, *lists, *(c.masks_N for c in self.came)])

    @classmethod
    def unpack(cls, plan: torch.Tensor, domains: int, arrivals: int) -> Crossing:
        """The views of a tensor that `pack` made on a rank of as many domains and arrivals."""
        num_sizes = 1 + 2 * (domains + arrivals)
        num_rows, *sizes = plan[:num_sizes].tolist()
        tokens, pairs = sizes[::2], sizes[1::2]
        went, came = tokens[:domains], tokens[domains:]
        parts = torch.split(plan, [num_sizes, num_rows, num_rows, *(n for n in went for _ in range(2)), *came])
        lists, rest = parts[3 : 3 + 2 * domains], parts[3 + 2 * domains :]
        return cls(
            parts[1],
            parts[2],
            tuple(map(Crossers, lists[::2], lists[1::2], pairs)),
            tuple(Crossers(masks[:0], masks, p) for masks, p in zip(rest, pairs[domains:], strict=True)),
        )

    def inside(self, origins: Origins, tokens: int) -> Origins:
        """The origins of this domain's exchange, to which `tokens` came in all through this rank."""
        shape = origins.topk_ids_TK.new_empty((tokens, 0))
        return origins._replace(
            row_rank_R=self.bringer_R, row_token_R=self.place_R, topk_ids_TK=shape, plan=origins.plan[:0]
        )


class Packing:
    """How tokens lie in a message, and the work that packs and unpacks them, in a CPU's memory.

    Args:
        spec: of the whole ExpertParallel.
        experts: of each domain, ascending.
        mine: this rank's domain.
    """

    def __init__(self, spec: MoeSpec, experts: Sequence[Sequence[int]], mine: int) -> None:
        self._lib, self._spec, self._num_domains = cpu.lib(), spec, len(experts)
        tables = ctypes.c_int32 * spec.num_experts
        domain_of_expert, index_in_domain = tables(), tables()
        for domain, here in enumerate(experts):
            for index, expert in enumerate(here):
                domain_of_expert[expert], index_in_domain[expert] = domain, index
        self._c = cpu.MoeDomains(
            spec.num_experts, spec.top_k, len(experts), mine, domain_of_expert, index_in_domain
        )  # which keeps the tables alive
        self._id_dtype = torch.int16 if max(map(len, experts)) <= 1 << 16 else torch.int32  # its bits: unsigned
        self._fixed = spec.max_rows is not None
        self.row_bytes = spec.hidden if spec.wire else spec.row_bytes
        self.scale_bytes = spec.scale_blocks * (SCALE_DTYPE[spec.wire].itemsize if spec.wire else 0)

    def _room(self, tokens: int, pairs: int = 0) -> tuple[int, int]:
        """What a message for so many tokens and pairs has room for."""
        most = self._spec.max_tokens
        return (most, most * self._spec.top_k) if self._fixed else (tokens, pairs)

    @property
    def most_spare(self) -> int:
        """How many tokens more than it carries a message may have room for."""
        return self._spec.max_tokens if self._fixed else 0

    # ---- dispatch

    def select(self, ids_TK: torch.Tensor) -> tuple[torch.Tensor, tuple[Crossers, ...]]:
        """(ids within this rank's domain, -1 elsewhere; this rank's tokens to each domain).

        Raises:
            ValueError: an id out of range.
        """
        (tokens, top_k), num_domains = ids_TK.shape, self._num_domains
        own_TK = torch.empty(tokens, top_k, dtype=torch.int32)
        lists = torch.empty(2, num_domains, tokens, dtype=torch.int32)
        counts = (ctypes.c_int64 * max(3, 2 * num_domains))()
        result = self._lib.a2a_moe_rail_select(
            ctypes.byref(self._c),
            ids_TK.data_ptr(),
            ids_TK.element_size(),
            tokens,
            own_TK.data_ptr(),
            lists[0].data_ptr(),
            lists[1].data_ptr(),
            counts,
        )
        if result == cpu.INVALID:
            raise ValueError(
                f"dispatch: topk_ids_TK[{counts[0]}, {counts[1]}] is {counts[2]}; expert ids are 0 to "
                f"{self._spec.num_experts - 1}, or -1 for none"
            )
        went = []
        for d in range(num_domains):
            there, pairs = counts[2 * d : 2 * d + 2]
            went.append(Crossers(lists[0, d, :there], lists[1, d, :there], pairs))
        return own_TK, tuple(went)

    def quantised(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(e4m3, scales) of the wire format."""
        spec = self._spec
        assert spec.wire is not None
        q_TH = torch.empty(x_TH.shape, dtype=torch.float8_e4m3fn)
        scales = torch.empty(len(x_TH), spec.scale_blocks, dtype=SCALE_DTYPE[spec.wire])
        self._lib.a2a_moe_rail_quantize(
            DTYPE_CODE[spec.dtype],
            WIRE_CODE[spec.wire],
            x_TH.data_ptr(),
            len(x_TH),
            spec.hidden,
            q_TH.data_ptr(),
            scales.data_ptr(),
        )
        return q_TH, scales

    def payload_bytes(self, tokens: int) -> int:
        """Of a message with the rows of so many tokens, and their scales."""
        return self._room(tokens)[0] * (self.row_bytes + self.scale_bytes)

    def pack_rows(self, out: torch.Tensor, source: Payload, list_N: torch.Tensor) -> None:
        """Store the rows of some tokens, then their scales."""
        self._gather(out, source.rows, list_N, self.row_bytes)
        if source.scales is not None:
            room, _ = self._room(len(list_N))
            self._gather(out[room * self.row_bytes :], source.scales, list_N, self.scale_bytes)

    def rows(self, packed: torch.Tensor, tokens: int) -> Payload:
        """The rows of a message, where they lie."""
        spec, (room, _) = self._spec, self._room(tokens)
        flat = packed[: tokens * self.row_bytes]
        if spec.wire is None:
            return Payload(flat.view(spec.dtype).view(tokens, spec.hidden))
        scales = packed[room * self.row_bytes :][: tokens * self.scale_bytes]
        return Payload(
            flat.view(torch.float8_e4m3fn).view(tokens, spec.hidden),
            scales.view(SCALE_DTYPE[spec.wire]).view(tokens, spec.scale_blocks),
        )

    def _gather(self, out: torch.Tensor, source: torch.Tensor, list_N: torch.Tensor, row_bytes: int) -> None:
        self._lib.a2a_moe_rail_gather(out.data_ptr(), source.data_ptr(), list_N.data_ptr(), len(list_N), row_bytes)

    def index_bytes(self, tokens: int, pairs: int, weighted: bool) -> int:
        """Of a message with the numbers, masks and pairs of so many tokens."""
        tokens, pairs = self._room(tokens, pairs)
        return tokens * _INDEX_BYTES + pairs * (_WEIGHT_BYTES * (weighted or self._fixed) + self._id_dtype.itemsize)

    def pack_index(
        self, out: torch.Tensor, crossers: Crossers, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None
    ) -> None:
        """Store numbers, masks, weights (if there are any) and experts."""
        numbers, masks, weights, ids = self._index(out, crossers.tokens, crossers.pairs, weights_TK is not None)
        numbers[: crossers.tokens] = crossers.list_N
        masks[: crossers.tokens] = crossers.masks_N
        self._lib.a2a_moe_rail_pairs(
            ctypes.byref(self._c),
            ids_TK.data_ptr(),
            ids_TK.element_size(),
            None if weights_TK is None else weights_TK.data_ptr(),
            crossers.list_N.data_ptr(),
            crossers.masks_N.data_ptr(),
            crossers.tokens,
            ids.data_ptr(),
            ids.element_size(),
            weights.data_ptr(),
        )

    def unpack_index(
        self,
        packed: torch.Tensor,
        tokens: int,
        pairs: int,
        weighted: bool,
        experts: int,
        ids_NK: torch.Tensor,
        weights_NK: torch.Tensor,
    ) -> tuple[Crossers, torch.Tensor] | None:
        """(who came, their numbers at their source); fills ids and weights. None: it makes no sense."""
        numbers, masks, weights, ids = self._index(packed, tokens, pairs, weighted)
        masks_N = masks[:tokens].clone()
        result = self._lib.a2a_moe_rail_unpair(
            ids.data_ptr(),
            ids.element_size(),
            weights.data_ptr() if weighted else None,
            masks_N.data_ptr(),
            tokens,
            pairs,
            self._spec.top_k,
            experts,
            ids_NK.data_ptr(),
            weights_NK.data_ptr(),
        )
        return None if result else (Crossers(masks_N[:0], masks_N, pairs), numbers[:tokens])

    def _index(self, packed: torch.Tensor, tokens: int, pairs: int, weighted: bool) -> tuple[torch.Tensor, ...]:
        tokens, pairs = self._room(tokens, pairs)
        each = _WEIGHT_BYTES * (weighted or self._fixed)
        sizes = [4 * tokens, 4 * tokens, each * pairs, self._id_dtype.itemsize * pairs]
        numbers, masks, weights, ids = torch.split(packed, sizes)
        return numbers.view(torch.int32), masks.view(torch.int32), weights.view(torch.float32), ids.view(self._id_dtype)

    # ---- the way home

    def home_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Of a message with the sums of so many tokens."""
        return self._room(tokens)[0] * self._spec.hidden * dtype.itemsize

    def grads_bytes(self, pairs: int) -> int:
        """Of a message with a float for each of so many pairs."""
        return self._room(0, pairs)[1] * 4

    def pack_grads(self, out_P: torch.Tensor, grads_NK: torch.Tensor, crossers: Crossers) -> None:
        """One float a pair, of tokens that came from elsewhere."""
        self._grads(out_P, grads_NK, None, crossers, False)

    def unpack_grads(self, packed_P: torch.Tensor, grads_TK: torch.Tensor, crossers: Crossers) -> None:
        """The same at the tokens' owner."""
        self._grads(packed_P, grads_TK, crossers.list_N, crossers, True)

    def _grads(
        self,
        packed_P: torch.Tensor,
        grads: torch.Tensor,
        list_N: torch.Tensor | None,
        crossers: Crossers,
        unpack: bool,
    ) -> None:
        self._lib.a2a_moe_rail_grads(
            packed_P.data_ptr(),
            grads.data_ptr(),
            None if list_N is None else list_N.data_ptr(),
            crossers.masks_N.data_ptr(),
            crossers.tokens,
            self._spec.top_k,
            unpack,
        )

    def merge(self, y_TH: torch.Tensor, sums: Sequence[torch.Tensor], went: Sequence[Crossers], mine: int) -> None:
        """Sum what the domains give, in their order: sums of the tokens that went there; of `mine`, of all tokens."""
        terms = [
            cpu.MoeSums(rows.data_ptr(), c.list_N.data_ptr(), c.tokens, d == mine)
            for d, (rows, c) in enumerate(zip(sums, went, strict=True))
        ]
        self._lib.a2a_moe_rail_merge(
            DTYPE_CODE[sums[mine].dtype],
            DTYPE_CODE[y_TH.dtype],
            self._spec.hidden,
            len(y_TH),
            len(terms),
            (cpu.MoeSums * len(terms))(*terms),
            y_TH.data_ptr(),
        )


__all__ = ["Crossers", "Crossing", "Packing"]
