"""One shard on its rail: payloads, the sum of the domains' pieces, and what the payloads owe."""

from __future__ import annotations

import torch
from torch import Tensor

from a2a.gradients.layout import Layout
from a2a.gradients.wire import Feedback, Wire, sum_dtype
from a2a.transport.rail import Rail


class RailShard:
    """One shard on its rail: payloads, the sum, and what the payloads owe."""

    def __init__(self, wire: Wire, layout: Layout, piece: int, dtype: torch.dtype, device: torch.device) -> None:
        self._wire, self._piece, self._mine = wire, piece, layout.domain
        domains = range(layout.num_domains)
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._others = [d for d in domains if d != layout.domain]
        self._send = [wire.empty(piece, device) if d != layout.domain else nothing for d in domains]
        self._received = [wire.empty(piece, device) if d != layout.domain else nothing for d in domains]
        self._feedback = {d: Feedback(wire, piece, dtype, device) for d in self._others}
        self._sum = torch.empty(piece, dtype=sum_dtype(dtype), device=device)
        self._result, self._result_feedback = wire.empty(piece, device), Feedback(wire, piece, dtype, device)
        self._results = wire.empty(piece, device).new_empty(layout.num_domains * self._result.numel())

    def reduce(self, rail: Rail, shard: Tensor, weights: tuple[int, ...], divisor: int) -> Tensor:
        pieces = torch.split(shard, self._piece)
        for domain in self._others:
            self._feedback[domain].encode(self._send[domain], pieces[domain])
        rail.all_to_all(self._received, self._send)
        total = self._sum
        for domain, weight in enumerate(weights):
            mine = domain == self._mine
            term = pieces[domain] if mine else self._wire.decode(self._received[domain], self._piece)
            if weight != 1:
                term = term.to(total.dtype) * weight
            if domain == 0:
                total.copy_(term)
            else:
                total.add_(term)
        return total if divisor == 1 else total.div_(divisor)

    def gather(self, rail: Rail, shard: Tensor, reduced: Tensor) -> None:
        self._result_feedback.encode(self._result, reduced)
        rail.all_gather(self._results, self._result)
        payloads = self._results.view(-1, self._result.numel())
        for payload, piece in zip(payloads, torch.split(shard, self._piece), strict=True):
            piece.copy_(self._wire.decode(payload, self._piece))

    def owed(self) -> dict[str, Tensor]:
        """What its payloads owe, by whom they are for; nothing for formats that lose nothing."""
        kept = {**{f"domain {d}": feedback for d, feedback in self._feedback.items()}, "result": self._result_feedback}
        return {name: feedback.owed for name, feedback in kept.items() if feedback.owed is not None}
