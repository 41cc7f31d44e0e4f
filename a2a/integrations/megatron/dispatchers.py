"""Megatron's MoE dispatchers on a2a.

* **Flex, backend "hybridep"**: `token_dispatcher._HybridEPManager` is an `ExpertExchange`.
* **All-to-all**: a subclass whose steps are an `ExpertExchange`: tokens cross once to a rank however many of its experts
  they go to, and neither permutations nor counts are exchanged apart. Where a step of Megatron's own is needed
  (`why_stepwise`), Megatron's steps run, and their all-to-alls are a2a's (`mappings`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from a2a.integrations.megatron.exchange import Exchanges, ExpertExchange, Settings

_log = logging.getLogger("a2a")


def exchange_class(settings: Settings, exchanges: Exchanges) -> type[ExpertExchange]:
    """What takes the place of `_HybridEPManager`."""
    return type("A2AExpertExchange", (ExpertExchange,), {"settings": settings, "exchanges": exchanges})


def why_stepwise(config: Any) -> str | None:
    """Why a layer of this configuration keeps the all-to-all dispatcher's own steps; None: it needn't."""
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "the 1F1B schedule frees the inputs of each step, which an exchange in one piece shares"
    if getattr(config, "moe_shared_expert_overlap", False):
        return "shared experts run between its steps"
    if getattr(config, "moe_router_padding_for_quantization", False) or getattr(
        config, "moe_router_padding_for_fp8", False
    ):
        return "the router pads its map with tokens that no expert asked for"
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "cuda_graph_impl", "none") != "none":
        return "CUDA graphs capture the attributes of its steps"
    return None


def all_to_all_class(base: Any, exchange: type[ExpertExchange]) -> Any:
    """A subclass of Megatron's MoEAlltoAllTokenDispatcher."""

    class A2AAlltoAllTokenDispatcher(base):  # type: ignore[misc]
        def __init__(
            self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
        ) -> None:
            super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
            reason = why_stepwise(config)
            if reason is not None:
                _log.info("a2a in Megatron: an all-to-all dispatcher keeps its steps, on a2a's all-to-all: %s", reason)
            ranks = self.tp_size * self.ep_size
            self.exchange = (
                exchange(self.tp_ep_group, num_local_experts, self.tp_size * config.num_moe_experts, config)
                if reason is None and ranks > 1
                else None
            )

        def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
            if self.exchange is None:
                return super().dispatch_preprocess(hidden_states, routing_map, probs)
            self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
            self.exchange.setup_metadata(self._to_all_parts(routing_map), self._to_all_parts(probs))
            return hidden_states.view(-1, self.hidden_shape[-1]), self.exchange.token_probs

        def _to_all_parts(self, map_TE: Tensor) -> Tensor:
            """A token goes to all ranks of an expert's tensor-parallel group, each of which holds a part of the expert."""
            by_rank = map_TE.reshape(-1, self.ep_size, 1, self.num_local_experts)
            return by_rank.expand(-1, -1, self.tp_size, -1)

        def token_dispatch(self, tokens: Tensor, probs: Tensor) -> Any:
            if self.exchange is None:
                return super().token_dispatch(tokens, probs)
            return self.exchange.dispatch(tokens), self.exchange.dispatched_probs

        def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> Any:
            if self.exchange is None:
                return super().dispatch_postprocess(rows, probs)
            assert self.exchange.tokens_per_expert is not None
            counts = self.exchange.tokens_per_expert.to(
                torch.device("cpu")
            )  # where Megatron's own steps leave them, too
            return rows, counts, probs.to(self.probs.dtype)

        def combine_preprocess(self, hidden_states: Tensor) -> Any:
            return super().combine_preprocess(hidden_states) if self.exchange is None else hidden_states

        def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.exchange is None:
                return super().token_combine(hidden_states, *args, **kwargs)
            return self.exchange.combine(hidden_states)

        def combine_postprocess(self, tokens: Tensor) -> Any:
            return super().combine_postprocess(tokens) if self.exchange is None else tokens.view(self.hidden_shape)

    return A2AAlltoAllTokenDispatcher
