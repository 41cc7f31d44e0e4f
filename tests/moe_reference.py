"""What ExpertParallel must compute, in one process: slow and obviously right.

Every function takes what all ranks hold (a list with one entry a rank) and returns what all ranks get, so that a test
can run the real thing on several ranks and hold each rank's answer against the entry of that rank, bit for bit.

Shape suffixes: T tokens of one rank, K experts a token, H hidden, E experts, R received rows, B blocks of one scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

E4M3_MAX = 448.0
DOT_LANES = 256
WIRE_BLOCK = {"fp8": 128, "mxfp8": 32}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The arguments of ExpertParallel that can change a bit of its results."""

    world_size: int
    num_experts: int
    dtype: torch.dtype
    expert_alignment: int = 1
    max_rows: int | None = None
    wire: str | None = None
    wire_combine: str | None = None
    expert_to_rank: tuple[int, ...] | None = None
    domains: tuple[tuple[int, ...], ...] | None = (
        None  # the ranks of each, in the order of their lowest; None: one domain
    )


class Tokens(NamedTuple):
    """What one rank passes to `dispatch`."""

    x_TH: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor | None = None


class Origin(NamedTuple):
    """Where a received row comes from."""

    source: int
    token: int
    k: int


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What one rank gets from `dispatch`; `origins` has None for a row of padding."""

    rows_RH: Tensor
    rows_per_expert: Tensor
    offsets_E: Tensor
    row_weights_R: Tensor
    origins: list[Origin | None]
    overflow: int

    def origin_column(self, name: str) -> Tensor:
        """One of "source", "token", "k" for each row, as `routing` gives it: int32, -1 on padding."""
        return torch.tensor([-1 if o is None else getattr(o, name) for o in self.origins], dtype=torch.int32)


class Compact(NamedTuple):
    """What one rank gets under layout="compact": unique tokens, and the index of each expert-major row among them."""

    rows: Tensor
    row_index_R: Tensor
    origins: list[tuple[int, int]]


# ---- who owns what ---------------------------------------------------------------------------------------------------


def experts_of_ranks(layer: Layer) -> list[list[int]]:
    """The experts that each rank owns, ascending: contiguous blocks, the first E mod R ranks one more."""
    if layer.expert_to_rank is not None:
        return [[e for e, r in enumerate(layer.expert_to_rank) if r == rank] for rank in range(layer.world_size)]
    each, more = divmod(layer.num_experts, layer.world_size)
    owned, first = [], 0
    for rank in range(layer.world_size):
        count = each + (1 if rank < more else 0)
        owned.append(list(range(first, first + count)))
        first += count
    return owned


def rows_of_experts(tokens: Sequence[Tokens]) -> dict[int, list[Origin]]:
    """The rows of each expert, by (source rank, token, k). An id of -1 makes none, a repeated one makes two."""
    rows: dict[int, list[Origin]] = {}
    for source, (_, ids_TK, _) in enumerate(tokens):
        for token, ids in enumerate(ids_TK.tolist()):
            for k, expert in enumerate(ids):
                if expert != -1:
                    rows.setdefault(expert, []).append(Origin(source, token, k))
    return rows


# ---- what crosses the wire -------------------------------------------------------------------------------------------


def _e4m3_values() -> np.ndarray:
    """The value of every non-negative e4m3 code 0 ... 126; the largest is 448 and code 127 is NaN."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, (codes & 7).astype(np.float64)
    return np.where(exponent == 0, mantissa / 512.0, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7))


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """The e4m3 codes nearest to float32 `values`, ties to the even code, never beyond 448."""
    table = _e4m3_values()
    magnitude = np.minimum(np.abs(values.astype(np.float64)), E4M3_MAX)
    above = np.searchsorted(table, magnitude)
    below = np.maximum(above - 1, 0)
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return (np.where(take_above, above, below) + np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def quantise(x_TH: Tensor, wire: str) -> tuple[Tensor, Tensor]:
    """(q_TH e4m3, scales_TB): one scale for each 128 ("fp8", float32) or 32 ("mxfp8", e8m0) columns.

    scale = amax / 448, for mxfp8 raised to a power of two and to at least 2**-127; q = nearest even of x / scale. A
    block of zeros has scale 1; so has an fp8 block whose amax is too small for float32 to hold the scale.
    """
    block = WIRE_BLOCK[wire]
    x = x_TH.float().numpy()
    num_tokens, hidden = x.shape
    codes = np.zeros((num_tokens, hidden), np.uint8)
    scales = np.ones((num_tokens, -(-hidden // block)), np.float32)
    for b in range(scales.shape[1]):
        columns = slice(b * block, min((b + 1) * block, hidden))
        amax = np.abs(x[:, columns]).max(axis=1)
        scale = amax / np.float32(E4M3_MAX)
        if wire == "mxfp8":
            fraction, exponent = np.frexp(scale)
            exponent = np.where(fraction == 0.5, exponent - 1, exponent)
            scale = np.ldexp(np.float32(1), np.where(scale < 2.0**-127, -127, exponent))
        scales[:, b] = np.where((amax == 0) | (scale == 0), np.float32(1), scale)
        codes[:, columns] = e4m3_codes(x[:, columns] / scales[:, b : b + 1])
    q_TH = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    if wire == "fp8":
        return q_TH, torch.from_numpy(scales)
    _, exponents = np.frexp(scales)
    return q_TH, torch.from_numpy((exponents - 1 + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)


def dequantise(q_TH: Tensor, scales_TB: Tensor, wire: str, dtype: torch.dtype) -> Tensor:
    """float(q) * scale, rounded once to `dtype`."""
    scales_TH = scales_TB.float().repeat_interleave(WIRE_BLOCK[wire], dim=1)[:, : q_TH.shape[1]]
    return (q_TH.float() * scales_TH).to(dtype)


def through_wire(x_TH: Tensor, layer: Layer) -> Tensor:
    """`x_TH` as it arrives, also on the rank that sent it."""
    if layer.wire is None:
        return x_TH
    return dequantise(*quantise(x_TH, layer.wire), layer.wire, layer.dtype)


# ---- forward ---------------------------------------------------------------------------------------------------------


def dispatch(layer: Layer, tokens: Sequence[Tokens]) -> list[Dispatched]:
    """Expert-major rows on every rank."""
    arrived = [through_wire(t.x_TH, layer) for t in tokens]
    rows_by_expert = rows_of_experts(tokens)
    return [_dispatched(layer, tokens, arrived, rows_by_expert, owned) for owned in experts_of_ranks(layer)]


def _dispatched(
    layer: Layer,
    tokens: Sequence[Tokens],
    arrived: Sequence[Tensor],
    rows_by_expert: dict[int, list[Origin]],
    owned: list[int],
) -> Dispatched:
    origins: list[Origin | None] = []
    counts, ends = [], []
    for expert in owned:
        block = rows_by_expert.get(expert, [])
        origins += block
        origins += [None] * (-len(block) % layer.expert_alignment)
        counts.append(len(block))
        ends.append(len(origins))
    limit = len(origins) if layer.max_rows is None else layer.max_rows
    dropped, origins = origins[limit:], origins[:limit]
    rows_RH = torch.zeros(len(origins), tokens[0].x_TH.shape[1], dtype=layer.dtype)
    weights_R = torch.zeros(len(origins))
    for row, origin in enumerate(origins):
        if origin is None:
            continue
        rows_RH[row] = arrived[origin.source][origin.token]
        weights_TK = tokens[origin.source].topk_weights_TK
        weights_R[row] = 1.0 if weights_TK is None else weights_TK[origin.token, origin.k].float()
    return Dispatched(
        rows_RH=rows_RH,
        rows_per_expert=torch.tensor(counts, dtype=torch.int32),
        offsets_E=torch.tensor([min(end, limit) for end in ends], dtype=torch.int32),
        row_weights_R=weights_R,
        origins=origins,
        overflow=sum(origin is not None for origin in dropped),
    )


def combine(
    layer: Layer,
    tokens: Sequence[Tokens],
    received: Sequence[Dispatched],
    outs: Sequence[Tensor],
    weighted: bool = True,
) -> list[Tensor]:
    """y_TH of every rank: the rank with the experts sums in expert order, the token's owner in rank order."""
    terms = []
    for got, out_RH in zip(received, outs, strict=True):
        terms.append(got.row_weights_R[:, None] * out_RH.float() if weighted else out_RH.float())
    return _sum_to_tokens(layer, tokens, [_token_of_row(got) for got in received], terms)


def compact(layer: Layer, tokens: Sequence[Tokens], received: Sequence[Dispatched]) -> list[Compact]:
    """Each received token once, ordered by (source rank, token), on every rank."""
    arrived = [through_wire(t.x_TH, layer) for t in tokens]
    answers = []
    for got in received:
        keys = sorted({key for key in _token_of_row(got) if key is not None})
        rows = torch.zeros(len(keys), tokens[0].x_TH.shape[1], dtype=layer.dtype)
        for row, (source, token) in enumerate(keys):
            rows[row] = arrived[source][token]
        row_of_key = {key: row for row, key in enumerate(keys)}
        index = [0 if key is None else row_of_key[key] for key in _token_of_row(got)]
        answers.append(Compact(rows, torch.tensor(index, dtype=torch.int32), keys))
    return answers


def _token_of_row(got: Dispatched) -> list[tuple[int, int] | None]:
    return [None if o is None else (o.source, o.token) for o in got.origins]


def _sum_to_tokens(
    layer: Layer,
    tokens: Sequence[Tokens],
    token_of_row: Sequence[Sequence[tuple[int, int] | None]],
    terms: Sequence[Tensor],
) -> list[Tensor]:
    """Sum float32 `terms` (one a row, on every rank) into the tokens they belong to, in the order of the contract."""
    of_ranks = []
    for keys, terms_RH in zip(token_of_row, terms, strict=True):
        partials: dict[tuple[int, int], Tensor] = {}
        for key, term_H in zip(keys, terms_RH, strict=True):
            if key is not None:
                partials[key] = partials[key] + term_H if key in partials else term_H
        of_ranks.append({key: _sent(layer, partial_H) for key, partial_H in partials.items()})
    if layer.domains is None:
        sums = _summed(of_ranks)
    else:
        of_domains = [_summed([of_ranks[rank] for rank in ranks]) for ranks in layer.domains]
        for ranks, of_domain in zip(
            layer.domains, of_domains, strict=True
        ):  # one whose rows were dropped there adds zero
            for key in _tokens_sent_to(layer, tokens, ranks) - of_domain.keys():
                of_domain[key] = torch.zeros(tokens[0].x_TH.shape[1])
        sums = _summed([{key: _sent(layer, sum_H) for key, sum_H in each.items()} for each in of_domains])
    answers = [torch.zeros(x_TH.shape, dtype=layer.dtype) for x_TH, _, _ in tokens]
    for (source, token), sum_H in sums.items():
        answers[source][token] = sum_H.to(layer.dtype)
    return answers


def _sent(layer: Layer, sum_H: Tensor) -> Tensor:
    """A partial sum after its way: rounded to the dtype, unless it travels in float32."""
    return sum_H if layer.wire_combine == "float32" else sum_H.to(layer.dtype).float()


def _summed(parts: Sequence[dict[tuple[int, int], Tensor]]) -> dict[tuple[int, int], Tensor]:
    """The sum of each token's terms, in the order of the parts, from the first."""
    sums: dict[tuple[int, int], Tensor] = {}
    for part in parts:
        for key, term_H in part.items():
            sums[key] = sums[key] + term_H if key in sums else term_H
    return sums


def _tokens_sent_to(layer: Layer, tokens: Sequence[Tokens], ranks: Sequence[int]) -> set[tuple[int, int]]:
    owned = {e for rank in ranks for e in experts_of_ranks(layer)[rank]}
    rows = rows_of_experts(tokens)
    return {(origin.source, origin.token) for e in owned for origin in rows.get(e, [])}


# ---- backward --------------------------------------------------------------------------------------------------------


def dot(a_H: Tensor, b_H: Tensor) -> Tensor:
    """The float32 scalar product in the order of the contract: 256 lanes by column, then halves added pairwise."""
    products = a_H.float() * b_H.float()
    lanes = torch.zeros(DOT_LANES)
    for number, chunk in enumerate(torch.split(products, DOT_LANES)):
        lanes[: len(chunk)] = chunk if number == 0 else lanes[: len(chunk)] + chunk
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def combine_backward(
    layer: Layer,
    received: Sequence[Dispatched],
    outs: Sequence[Tensor],
    grads_y: Sequence[Tensor],
    weighted: bool = True,
) -> list[tuple[Tensor, Tensor]]:
    """(gradient of out_rows, gradient of row_weights_R) of every rank; zero on padding."""
    arrived = [through_wire(grad_TH, layer) for grad_TH in grads_y]
    answers = []
    for got, out_RH in zip(received, outs, strict=True):
        grad_RH, grad_weights_R = torch.zeros_like(out_RH), torch.zeros(len(got.origins))
        for row, origin in enumerate(got.origins):
            if origin is None:
                continue
            grad_H = arrived[origin.source][origin.token]
            grad_RH[row] = (got.row_weights_R[row] * grad_H.float()).to(layer.dtype) if weighted else grad_H
            grad_weights_R[row] = dot(out_RH[row], grad_H) if weighted else 0.0
        answers.append((grad_RH, grad_weights_R))
    return answers


def dispatch_backward(
    layer: Layer, tokens: Sequence[Tokens], received: Sequence[Dispatched], grads_rows: Sequence[Tensor]
) -> list[Tensor]:
    """The gradient of x of every rank, from that of its rows."""
    return _sum_to_tokens(layer, tokens, [_token_of_row(got) for got in received], [g.float() for g in grads_rows])


def compact_backward(
    layer: Layer, tokens: Sequence[Tokens], received: Sequence[Compact], grads: Sequence[Tensor]
) -> list[Tensor]:
    """The gradient of x of every rank, from that of compact rows."""
    return _sum_to_tokens(layer, tokens, [got.origins for got in received], [g.float() for g in grads])


def weights_backward(
    tokens: Sequence[Tokens], received: Sequence[Dispatched], grads_R: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradient of topk_weights in their dtype; 0 where an id made no row or its row was dropped."""
    answers = [None if t.topk_weights_TK is None else torch.zeros_like(t.topk_weights_TK) for t in tokens]
    for got, grad_R in zip(received, grads_R, strict=True):
        for row, origin in enumerate(got.origins):
            if origin is not None:
                grad_TK = answers[origin.source]
                if grad_TK is not None:
                    grad_TK[origin.token, origin.k] = grad_R[row]
    return answers
