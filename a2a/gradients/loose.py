"""Tensors that are no bucket of the reducer's own: DDP's buckets, and shards that FSDP2 has reduced in a domain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from a2a.errors import UnsupportedError
from a2a.gradients.hierarchy import Hierarchy
from a2a.gradients.rails import RailShard
from a2a.gradients.tensors import Tensors
from a2a.gradients.wire import make_wire
from a2a.reductions import all_reduce


class Loose:
    """What is kept for tensors of other owners between steps, by the name that these give them.

    Memory is made by the leg that first needs it: legs take tensors in the same order on all ranks, so it is made in
        one
    order too, while others are on their way.
    """

    def __init__(self, ways: Hierarchy, average: bool, wire: str | None) -> None:
        self._ways, self._average, self._wire = ways, average, wire
        self._known: dict[Any, tuple[int, torch.dtype, Any]] = {}

    def legs(self, tensor: Tensor, name: Any) -> dict[str, Callable[[], None]]:
        """The legs that reduce a tensor over all ranks."""
        ways = self._ways
        if ways.world_size == 1:
            return {}
        if not ways.spans_domains:
            op = dist.ReduceOp.AVG if self._average else dist.ReduceOp.SUM
            return {"domain_reduce": lambda: _done(all_reduce(tensor, op, ways.comm("domain_reduce")))}
        made: list[Tensors] = []

        def domain_reduce() -> None:
            own: Tensors = self._kept(name, tensor, lambda: self._tensors(tensor))
            made.append(own)
            own.flat[: own.count].copy_(tensor.view(-1))
            own.domain_reduce()

        def domain_gather() -> None:
            made[0].domain_gather()
            tensor.view(-1).copy_(made[0].flat[: made[0].count])

        return {
            "domain_reduce": domain_reduce,
            "rail_reduce": lambda: made[0].rail_reduce(),
            "rail_gather": lambda: made[0].rail_gather(),
            "domain_gather": domain_gather,
        }

    def legs_across(self, tensor: Tensor, name: Any) -> dict[str, Callable[[], None]]:
        """The legs that average a tensor over the domains."""
        ways, layout = self._ways, self._ways.layout
        if len(set(layout.sizes)) > 1:
            raise UnsupportedError(
                f"GradientReducer.reduce_across_domains: domains have {', '.join(map(str, layout.sizes))} ranks; parts of "
                f"different sizes can't be averaged with each other"
            )
        if not ways.spans_domains:
            return {}

        def rail_reduce() -> None:
            shard: _Across = self._kept(name, tensor, lambda: _Across(ways, tensor, self._wire))
            shard.reduce(tensor)

        return {"rail_reduce": rail_reduce, "rail_gather": lambda: self._known[name][2].gather(tensor)}

    def _tensors(self, tensor: Tensor) -> Tensors:
        return Tensors(self._ways, tensor.numel(), tensor.dtype, average=self._average, wire=self._wire)

    def _kept(self, name: Any, tensor: Tensor, make: Callable[[], Any]) -> Any:
        """What there is for a tensor of that name, size and dtype; else made now."""
        known = self._known.get(name)
        if known is None or known[:2] != (tensor.numel(), tensor.dtype):
            self._known.pop(name, None)
            known = self._known[name] = (tensor.numel(), tensor.dtype, make())
        return known[2]


class _Across:
    """A shard that a domain's ranks have made themselves."""

    def __init__(self, ways: Hierarchy, tensor: Tensor, wire_name: str | None) -> None:
        layout = ways.layout
        self._rail, self._ways, self._domains = layout.place, ways, layout.num_domains
        wire = make_wire(wire_name, tensor.dtype, tensor.device)
        piece = -(-tensor.numel() // (layout.num_domains * wire.unit)) * wire.unit
        self._padded = torch.zeros(piece * layout.num_domains, dtype=tensor.dtype, device=tensor.device)
        self._shard = RailShard(wire, layout, piece, tensor.dtype, tensor.device)
        self._reduced: Tensor | None = None

    def reduce(self, tensor: Tensor) -> None:
        self._padded[: tensor.numel()].copy_(tensor.view(-1))
        rail = self._ways.rails["rail_reduce"][self._rail]
        self._reduced = self._shard.reduce(rail, self._padded, (1,) * self._domains, self._domains)

    def gather(self, tensor: Tensor) -> None:
        assert self._reduced is not None
        self._shard.gather(self._ways.rails["rail_gather"][self._rail], self._padded, self._reduced)
        tensor.view(-1).copy_(self._padded[: tensor.numel()])


def _done(_: object) -> None:
    """A leg returns nothing."""
