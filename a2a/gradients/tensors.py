"""A bucket's memory, and what each leg does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from a2a.gradients.hierarchy import Hierarchy
from a2a.gradients.rails import RailShard
from a2a.gradients.wire import CastWire, Wire, make_wire
from a2a.reductions import all_gather_into_tensor, all_reduce, reduce_scatter_tensor


class Tensors:
    """A bucket on this rank.

    Attributes:
        count: elements that mean something; behind them are zeros.
        flat: the gradients, and after the legs what they are reduced to. Symmetric memory of the first leg, where there
            is some.
        reduced: by rail, this rank's piece after `rail_reduce`, in the dtype of sums.
    """

    def __init__(
        self, ways: Hierarchy, count: int, dtype: torch.dtype, *, average: bool, wire: str | None = None
    ) -> None:
        """Collective inside the domain. `wire`: its format on the rails."""
        self.ways, self.count, self.dtype, self.average = ways, count, dtype, average
        layout = ways.layout
        self._wire: Wire = make_wire(wire, dtype, ways.device) if ways.spans_domains else CastWire(dtype, loses=False)
        self._piece = layout.piece(count, self._wire.unit)
        self._shard = self._piece * layout.num_domains
        padded = layout.padded(self._piece)
        comm = ways.comm("domain_reduce")
        if comm is not None and comm.transport is not None:
            self.flat = comm.empty((padded,), dtype).zero_()
        else:
            self.flat = torch.zeros(padded, dtype=dtype, device=ways.device)
        self.reduced: dict[int, Tensor] = {}
        self._rails: dict[int, RailShard] = {}
        if ways.spans_domains:
            self._rails = {i: RailShard(self._wire, layout, self._piece, dtype, ways.device) for i in layout.rails}

    def legs(self, *, scatter: bool = False) -> dict[str, Callable[[], None]]:
        """What there is to do so that every rank has the result in `flat`; with `scatter`, its own pieces."""
        if self.ways.world_size == 1:
            return {}
        if not self.ways.spans_domains:
            return {"domain_reduce": self.domain_reduce if scatter else self._domain_all_reduce}
        legs = {"domain_reduce": self.domain_reduce, "rail_reduce": self.rail_reduce}
        return legs if scatter else {**legs, "rail_gather": self.rail_gather, "domain_gather": self.domain_gather}

    def legs_of_parts(self) -> dict[str, Callable[[], None]]:
        """What there is to do so that every rank has in `flat` what each has put into its own pieces, bit for bit."""
        if self.ways.world_size == 1:
            return {}
        across: dict[str, Callable[[], None]] = {"rail_gather": self._rail_gather_exact} if self._rails else {}
        return {**across, "domain_gather": self.domain_gather}

    def own_pieces(self) -> Iterator[tuple[int, int, int]]:
        """(rail, where this rank's piece of its shard begins in `flat`, its elements that mean something, if any)."""
        layout = self.ways.layout
        for rail in layout.rails:
            begin = rail * self._shard + layout.domain * self._piece
            yield rail, begin, max(0, min(self._piece, self.count - begin))

    def owed(self) -> dict[str, Tensor]:
        """What this rank's payloads of it owe."""
        return {f"rail {i}, {name}": owed for i, shard in self._rails.items() for name, owed in shard.owed().items()}

    # ---- the legs

    def domain_reduce(self) -> None:
        """Sum inside the domain; each rank then has the shards of its rails."""
        comm = self.ways.comm("domain_reduce")
        if comm is not None:
            for block, mine in self._rounds():
                reduce_scatter_tensor(mine, block, self._domain_op(), comm)

    def rail_reduce(self) -> None:
        """Sum this rank's pieces over the domains, in their order."""
        weighted = self.dtype == torch.float16  # whose domains have sent means
        sizes = self.ways.layout.sizes
        weights, divisor = sizes if weighted else (1,) * len(sizes), self.ways.world_size if self.average else 1
        for rail, shard in self._rails.items():
            way = self.ways.rails["rail_reduce"][rail]
            self.reduced[rail] = shard.reduce(way, self._shard_of(rail), weights, divisor)

    def rail_gather(self) -> None:
        """Collect the pieces of this rank's shards."""
        for rail, shard in self._rails.items():
            shard.gather(self.ways.rails["rail_gather"][rail], self._shard_of(rail), self.reduced[rail])

    def domain_gather(self) -> None:
        """Collect the domain's shards."""
        comm = self.ways.comm("domain_gather")
        if comm is not None:
            for block, mine in self._rounds():
                all_gather_into_tensor(block, mine, comm)

    def _domain_all_reduce(self) -> None:
        comm = self.ways.comm("domain_reduce")
        assert comm is not None
        all_reduce(self.flat, self._domain_op(), comm)

    def _rail_gather_exact(self) -> None:
        """As `rail_gather`, of what lies in `flat`, in no format."""
        for rail in self._rails:
            shard = self._shard_of(rail)
            mine = torch.split(shard, self._piece)[self.ways.layout.domain]
            self.ways.rails["rail_gather"][rail].all_gather(shard, mine)

    def _shard_of(self, rail: int) -> Tensor:
        return self.flat[rail * self._shard : (rail + 1) * self._shard]

    def _rounds(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each round of a leg inside the domain, its part of `flat` and this rank's share of that."""
        layout, shard = self.ways.layout, self._shard
        for block in torch.split(self.flat, layout.domain_size * shard):
            yield block, block[layout.place * shard : (layout.place + 1) * shard]

    def _domain_op(self) -> Any:
        mean = self.dtype == torch.float16 if self.ways.spans_domains else self.average
        return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
