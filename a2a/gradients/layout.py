"""How a flat tensor of gradients is cut, and which parameters go into which bucket.

A tensor is cut into shards, one for each rail, and each shard into pieces, one for each domain:

    | shard 0                    | shard 1                    | ...     shard i belongs to rail i
    | piece 0 | piece 1 | ...    |                                      piece d is summed by the rail's rank of domain d

A domain's ranks reduce their tensors among themselves so that each holds the shards of its rails; on the rails each
rank gets its piece of all domains and sums them. In a domain of fewer ranks than there are rails, rank j is on rails j,
j + m, ... for its m ranks, and the domain's legs take that many rounds; behind the last shard there may then be room
that holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from a2a.topology import Topology

_ALIGNED_BYTES = 64  # where gradients begin: a cache line


@dataclass(frozen=True)
class Layout:
    """How one rank cuts tensors.

    Attributes:
        domain, num_domains: this rank's domain, and how many there are.
        place, domain_size: this rank's place in its domain, and how many ranks that has.
        num_rails: of the topology: the ranks of its largest domain.
        sizes: ranks of every domain.
    """

    domain: int
    num_domains: int
    place: int
    domain_size: int
    num_rails: int
    sizes: tuple[int, ...]

    @staticmethod
    def of(topology: Topology, rank: int) -> Layout:
        domain = topology.domain_index(rank)
        ranks, sizes = topology.domains[domain].ranks, tuple(len(d.ranks) for d in topology.domains)
        return Layout(domain, len(sizes), ranks.index(rank), len(ranks), max(sizes), sizes)

    @property
    def world_size(self) -> int:
        return sum(self.sizes)

    @property
    def rounds(self) -> int:
        """How many calls a leg inside this domain takes."""
        return -(-self.num_rails // self.domain_size)

    @property
    def rails(self) -> range:
        """The rails that this rank is on."""
        return range(self.place, self.num_rails, self.domain_size)

    def piece(self, count: int, unit: int) -> int:
        """Elements of a piece of a tensor of `count`, a multiple of `unit`."""
        pieces = self.num_rails * self.num_domains
        return -(-count // (pieces * unit)) * unit

    def padded(self, piece: int) -> int:
        """Elements of a tensor with pieces of that size, with what is behind the last shard."""
        return self.rounds * self.domain_size * piece * self.num_domains


@dataclass(frozen=True)
class Slot:
    """Where a parameter's gradient lies in its bucket."""

    param: int  # its place in the list of parameters
    offset: int
    count: int


@dataclass(frozen=True)
class BucketPlan:
    """The gradients that travel together."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]

    @property
    def count(self) -> int:
        return self.slots[-1].offset + self.slots[-1].count


def plan_buckets(params: Sequence[torch.Tensor], order: Sequence[int], bucket_bytes: float) -> list[BucketPlan]:
    """Fill buckets with gradients in the order in which they come, each dtype its own; in the order in which they get
    full.

    Args:
        params: the parameters.
        order: each one's place in `params`, in the order in which their gradients come.
        bucket_bytes: a bucket takes no more once it holds so many. A larger gradient has one to itself.
    """
    filling: dict[torch.dtype, list[tuple[int, Slot]]] = {}  # with the turn in which each gradient comes
    full: list[tuple[int, BucketPlan]] = []

    def close(dtype: torch.dtype) -> None:
        slots = filling.pop(dtype)
        full.append((slots[-1][0], BucketPlan(dtype, tuple(slot for _, slot in slots))))

    for turn, index in enumerate(order):
        dtype, count = params[index].dtype, params[index].numel()
        aligned = _ALIGNED_BYTES // dtype.itemsize
        if dtype in filling:
            last = filling[dtype][-1][1]
            offset = -(-(last.offset + last.count) // aligned) * aligned
            if (offset + count) * dtype.itemsize > bucket_bytes:
                close(dtype)
        if dtype not in filling:
            filling[dtype], offset = [], 0
        filling[dtype].append((turn, Slot(index, offset, count)))
    for dtype in list(filling):
        close(dtype)
    return [plan for _, plan in sorted(full, key=lambda entry: entry[0])]
