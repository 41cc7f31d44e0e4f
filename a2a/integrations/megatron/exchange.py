"""Megatron's routing maps on `a2a.ExpertParallel`: what both dispatchers share.

Megatron says with a bool map [T, E] which experts a token goes to, and with a float map [T, E] with which probability.
Experts lie in equal contiguous blocks over the ranks of the group, as in `ExpertParallel`. Rows come back by expert, and
combine is a plain sum, since Megatron's experts multiply by the probabilities themselves.

Legend: T tokens of this rank, E experts of the group, K most experts of a token, L experts of this rank, R rows, C rows of
an expert that is padded to capacity.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import a2a

_log = logging.getLogger("a2a")
_RECIPES = {"mxfp8": "mxfp8", "blockwise": "fp8"}  # Megatron's --fp8-recipe -> a wire format of the same blocks


@dataclass(frozen=True)
class Settings:
    """What `install()` was given, and the functions of Megatron that the exchange needs.

    Attributes:
        max_tokens: the most tokens that a rank brings to a layer; None: agreed at the first dispatch.
        wire: as in `install`.
        num_sms: as in `ExpertParallel`.
        align_size: Megatron's `get_align_size_for_quantization`.
        capacity: Megatron's `get_capacity`.
    """

    max_tokens: int | None
    wire: str | None
    num_sms: int | None
    align_size: Callable[[Any], int]
    capacity: Callable[..., int]


class Exchanges:
    """The ExpertParallel instances of this process: layers that exchange alike on one group share one.

    An instance stays when a larger one takes its place, as graphs that were made with it may still run backward.
    """

    def __init__(self) -> None:
        self._by_group: weakref.WeakKeyDictionary[Any, dict[Any, list[a2a.ExpertParallel]]] = (
            weakref.WeakKeyDictionary()
        )

    def get(
        self, group: Any, num_tokens: int, max_tokens: int | None, agree: bool, device: torch.device, **options: Any
    ) -> a2a.ExpertParallel:
        """The instance with these options for `num_tokens` tokens; made now, by all ranks of the group together, if there is
        none.

        Args:
            max_tokens: how many tokens it must hold; None: as many as any rank brings.
            agree: the ranks may bring different numbers of tokens: they compare theirs in each call. Without it they bring
                equally many, and compare only where one is made.
        """
        known = self._by_group.setdefault(group, {}).setdefault(tuple(sorted(options.items(), key=str)), [])
        most = num_tokens
        if max_tokens is None and (agree or not known):
            most = _largest(num_tokens, group, device)
        if not known or (max_tokens is None and most > known[-1].spec.max_tokens):
            room = max_tokens if max_tokens is not None else max(most, 2 * known[-1].spec.max_tokens if known else 1)
            known.append(a2a.ExpertParallel(group, max_tokens=room, device=device, **options))
            _log.info("a2a in Megatron: %s on %d ranks", known[-1].plan, dist.get_world_size(group))
        return known[-1]


def _largest(value: int, group: Any, device: torch.device) -> int:
    most = torch.tensor([value], device=device)
    a2a.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most.item())


def expert_ids(routing_map_TE: Tensor, top_k: int) -> Tensor:
    """The experts of each token in ascending order, [T, K]; -1 where it has fewer. Nothing waits for the device."""
    num_experts = routing_map_TE.shape[1]
    numbers_E = torch.arange(num_experts, device=routing_map_TE.device)
    chosen_TE = torch.where(routing_map_TE, numbers_E, num_experts)
    ids_TK = chosen_TE.topk(top_k, dim=1, largest=False, sorted=True).values
    return ids_TK.masked_fill(ids_TK == num_experts, -1)


class Capacity:
    """Rows by expert, spread so that every expert's block has C of them, and back."""

    def __init__(self, offsets_L: Tensor, rows_per_expert: int) -> None:
        ends_L = offsets_L.long()
        starts_L = torch.cat([ends_L.new_zeros(1), ends_L[:-1]])
        position_C = torch.arange(rows_per_expert, device=ends_L.device)
        self._filled = (position_C < (ends_L - starts_L)[:, None]).flatten()
        self._source = torch.where(self._filled, (starts_L[:, None] + position_C).flatten(), 0)
        row_R = torch.arange(len(ends_L) * rows_per_expert, device=ends_L.device)
        expert_R = torch.searchsorted(ends_L, row_R, right=True).clamp(max=len(ends_L) - 1)
        self._slot = (expert_R * rows_per_expert + row_R - starts_L[expert_R]).clamp(max=len(row_R) - 1)

    def spread(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [L * C, ...], zero where an expert has no row."""
        filled = self._filled.view(-1, *[1] * (rows.dim() - 1))
        return torch.where(filled, rows.index_select(0, self._source), 0)

    def gather(self, slots: Tensor) -> Tensor:
        """[L * C, ...] -> [R, ...]; what lies past the last row is read by nobody."""
        return slots.index_select(0, self._slot)


class ExpertExchange:
    """Dispatch and combine of one MoE layer, with the methods that MoEFlexTokenDispatcher expects of `_HybridEPManager`.

    The rows of `dispatch` are where the experts want them: by expert, each block padded for quantised matrix products. So
    `get_permuted_hidden_states_by_experts` and `get_restored_hidden_states_by_experts` have nothing to do.

    Attributes:
        token_probs: [T, E]. Megatron's 1F1B schedule puts a detached copy here between two calls.
        dispatched_probs: float32 [R]; likewise.
        tokens_per_expert: int64 [L], rows of each expert, padding included.
        over_budget: bool [1], set once rows were dropped for `moe_expert_rank_capacity_factor`; Megatron's to reset.
    """

    settings: Settings
    exchanges: Exchanges

    def __init__(self, group: Any, num_local_experts: int, num_experts: int, config: Any) -> None:
        self.group, self.num_local_experts, self.num_experts, self.config = (
            group,
            num_local_experts,
            num_experts,
            config,
        )
        copies = (
            num_experts // config.num_moe_experts
        )  # each rank of an expert's tensor-parallel group holds a part of it
        self.top_k = copies * config.moe_router_topk
        self.drop_and_pad = bool(config.moe_pad_expert_input_to_capacity)
        self.budget_factor = getattr(config, "moe_expert_rank_capacity_factor", None)
        self.agree = bool(
            getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False) or config.variable_seq_lengths
        )
        self.pad_multiple = self.settings.align_size(config) if config.fp8 or getattr(config, "fp4", None) else 1
        self.wire = wire_format(self.settings.wire, config)
        self.over_budget = torch.zeros(1, dtype=torch.bool, device="cuda" if torch.cuda.is_available() else "cpu")
        self.token_probs: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self.tokens_per_expert: Tensor | None = None
        self._sent: tuple[a2a.ExpertParallel, a2a.Routing, Capacity | None] | None = None

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Take a routing; nothing is sent yet. Both [T, ranks, L] or [T, E]."""
        self.routing_map = routing_map.reshape(-1, self.num_experts)
        self.token_probs = probs.reshape(-1, self.num_experts)

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """[T, H] -> rows by expert, on the current stream. Collective; sets the attributes above."""
        assert self.token_probs is not None, "dispatch: setup_metadata comes first"
        num_tokens, hidden = hidden_states.shape
        routing_map, capacity, max_rows = self.routing_map, 0, None
        if self.drop_and_pad:
            # What only fills an expert up to its capacity has probability 0: it stays at home, and zero rows stand for it.
            routing_map = routing_map & (self.token_probs != 0)
            capacity = self._rows_of_an_expert(num_tokens)
            max_rows = capacity * self.num_local_experts
        elif self.budget_factor is not None:
            max_rows = self._budget(num_tokens)
        ep = self.exchanges.get(
            self.group,
            num_tokens,
            self.settings.max_tokens,
            self.agree,
            hidden_states.device,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=hidden,
            dtype=hidden_states.dtype,
            expert_alignment=1 if self.drop_and_pad else self.pad_multiple,
            max_rows=max_rows,
            overflow="raise" if max_rows is None else "drop",
            wire=self.wire,
            num_sms=self.settings.num_sms,
        )
        ids_TK = expert_ids(routing_map, self.top_k)
        weights_TK = self.token_probs.float().gather(1, ids_TK.clamp(min=0))
        routing: a2a.Routing
        rows: Tensor
        rows, _, routing = ep.dispatch(hidden_states, ids_TK, weights_TK)
        blocks = Capacity(routing.offsets_E, capacity) if self.drop_and_pad else None
        if blocks is not None:
            rows, self.dispatched_probs = blocks.spread(rows), blocks.spread(routing.row_weights_R)
            self.tokens_per_expert = torch.full((self.num_local_experts,), capacity, dtype=torch.long)
        else:
            self.dispatched_probs = routing.row_weights_R
            self.tokens_per_expert = torch.diff(routing.offsets_E, prepend=routing.offsets_E.new_zeros(1)).long()
        if self.budget_factor is not None:
            self.over_budget |= routing.overflow > 0
        if getattr(self.config, "overlap_moe_expert_parallel_comm", False):
            # The 1F1B schedule runs the backward of combine and of dispatch each by itself: no edge may join them.
            routing = routing._replace(row_weights_R=routing.row_weights_R.detach())
        self._sent = ep, routing, blocks
        return rows

    def combine(self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True) -> Tensor:
        """Rows by expert -> [T, H], each token the sum of its rows. Collective."""
        assert self._sent is not None, "combine: dispatch comes first"
        ep, routing, blocks = self._sent
        self._sent = None
        rows = hidden_states if blocks is None else blocks.gather(hidden_states)
        y: Tensor = ep.combine(rows, routing, apply_weights=False)
        return y

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> Tensor | None:
        return self.tokens_per_expert

    def _rows_of_an_expert(self, num_tokens: int) -> int:
        """What the router's capacity comes to: as many rows from each rank of the group."""
        each: int = self.settings.capacity(
            num_tokens=num_tokens * self.config.moe_router_topk,
            num_experts=self.config.num_moe_experts,
            capacity_factor=self.config.moe_expert_capacity_factor,
        )
        return each * dist.get_world_size(self.group)

    def _budget(self, num_tokens: int) -> int:
        budget = int(num_tokens * self.config.moe_router_topk * self.budget_factor)
        return budget + -budget % (self.settings.align_size(self.config) or 1)


def wire_format(asked: str | None, config: Any) -> str | None:
    """The wire format that `install(wire=...)` stands for in a model of this configuration."""
    if asked != "recipe":
        return asked
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe) if config.fp8 else None
    return _RECIPES.get(str(recipe))
