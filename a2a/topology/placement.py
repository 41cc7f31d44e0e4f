"""Which groups of ranks a rank order puts across domains, and an order that doesn't.

A trainer cuts its ranks into expert- or tensor-parallel groups by number alone: Megatron and TorchTitan take `size`
consecutive ranks, or ranks a `stride` apart where an inner dimension (tensor parallelism below expert parallelism) varies
faster. Where those ranks run is the launcher's choice. A group inside one domain exchanges over NVLink or shared memory; one
rank placed elsewhere and the whole group waits for the network.

An order is a tuple: rank r is to run where rank `order[r]` runs now. Orders that a launcher can be told in one word (block,
cyclic, plane) are tried first; then groups are packed into domains, those that are well placed staying where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from a2a.topology.model import Topology

Groups = tuple[tuple[int, ...], ...]
Order = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """What is wrong with a rank order, and a better one.

    Args:
        groups: the groups that were checked.
        split: indices of the groups that are in several domains.
        order: the better order; None where the present one is as good as any that was found.
        split_after: indices of the groups that are in several domains even so.
        distribution: the better order as a word for Slurm's `--distribution`, where nodes are the domains; "" if none.
        reason: why `split_after` isn't empty; "" if it is.
    """

    groups: Groups
    split: tuple[int, ...]
    order: Order | None = None
    split_after: tuple[int, ...] = ()
    distribution: str = ""
    reason: str = ""


def regular_groups(world_size: int, size: int, stride: int = 1) -> Groups:
    """Cut ranks 0 to world_size - 1 into groups of `size` ranks that are `stride` apart.

    Raises:
        ValueError: the ranks don't divide into such groups.
    """
    if size < 1 or stride < 1:
        raise ValueError(f"groups of {size} ranks, {stride} apart: both are whole numbers from 1")
    block = size * stride
    if world_size % block:
        apart = f" that are {stride} apart" if stride > 1 else ""
        raise ValueError(
            f"{world_size} ranks don't divide into groups of {size}{apart}; expected a multiple of {block} ranks"
        )
    starts = (base + first for base in range(0, world_size, block) for first in range(stride))
    return tuple(tuple(range(start, start + block, stride)) for start in starts)


def check(topology: Topology, groups: Sequence[Sequence[int]]) -> Placement:
    """Find the groups that are in several domains and, if there are any, the order that leaves the fewest of them so.

    Raises:
        ValueError: a group is empty or names a rank that isn't there, or a rank is in two groups.
    """
    checked = tuple(tuple(group) for group in groups)
    listed = Counter(rank for group in checked for rank in group)
    if not all(checked):
        raise ValueError("groups: a group is empty; each holds at least one rank")
    for rank, times in listed.items():
        if not 0 <= rank < topology.world_size:
            raise ValueError(f"groups: rank {rank} is not in this topology of ranks 0 to {topology.world_size - 1}")
        if times > 1:
            raise ValueError(f"groups: rank {rank} is listed {times} times; a rank is in one group of a kind")
    home = tuple(topology.domain_index(rank) for rank in range(topology.world_size))
    split = _split(checked, home)
    if not split:
        return Placement(checked, ())
    best, left, word = home, split, ""
    for candidate, name in _candidates(topology, checked):
        still = _split(checked, candidate)
        if len(still) < len(left):
            best, left, word = candidate, still, name
        if not left:
            break
    order = None if best is home else _order(topology, best)
    return Placement(checked, split, order, left, word, _reason(topology, checked, left) if left else "")


def _split(groups: Groups, home: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i, group in enumerate(groups) if any(home[rank] != home[group[0]] for rank in group))


def _candidates(topology: Topology, groups: Groups) -> Iterator[tuple[tuple[int, ...], str]]:
    """Homes of all ranks (indices of domains) to try, each with Slurm's word for it."""
    sizes = [len(domain.ranks) for domain in topology.domains]
    yield tuple(index for index, size in enumerate(sizes) for _ in range(size)), "block"
    if len(set(sizes)) == 1:
        ranks, count = range(topology.world_size), len(sizes)
        yield tuple(rank % count for rank in ranks), "cyclic"
        for plane in (n for n in range(2, sizes[0]) if sizes[0] % n == 0):
            yield tuple(rank // plane % count for rank in ranks), f"plane={plane}"
    yield _pack(topology, groups, keep=True), ""
    yield _pack(topology, groups, keep=False), ""


def _pack(topology: Topology, groups: Groups, *, keep: bool) -> tuple[int, ...]:
    """Put whole groups into domains, the largest first; what fits nowhere is spread over the emptiest domains.

    `keep`: groups that are in one domain now stay there. Equal groups then still fill every domain as far as they can;
    unequal ones may not.
    """
    free = [len(domain.ranks) for domain in topology.domains]
    home = [-1] * topology.world_size

    def settle(ranks: Sequence[int], index: int) -> None:
        free[index] -= len(ranks)
        for rank in ranks:
            home[rank] = index

    waiting = []
    for group in sorted(groups, key=len, reverse=True):
        where = Counter(topology.domain_index(rank) for rank in group)
        if keep and len(where) == 1:
            settle(group, topology.domain_index(group[0]))
        else:
            waiting.append((group, where))
    spread = []
    for group, where in waiting:
        fitting = [index for index, room in enumerate(free) if room >= len(group)]
        if fitting:  # where most of it is; then where least is left over
            settle(group, max(fitting, key=lambda index: (where[index], -free[index])))
        else:
            spread.append(group)
    for group in spread:
        rest = list(group)
        while rest:
            index = max(range(len(free)), key=lambda i: free[i])
            part, rest = rest[: free[index]], rest[free[index] :]
            settle(part, index)
    for rank in (r for r, index in enumerate(home) if index < 0):  # in no group: stay, or fill up
        stay = topology.domain_index(rank)
        settle([rank], stay if free[stay] else max(range(len(free)), key=lambda i: free[i]))
    return tuple(home)


def _order(topology: Topology, home: Sequence[int]) -> Order:
    """Give each domain's places, in their present order, to its new ranks in theirs: what launchers do on a host."""
    places = [iter(domain.ranks) for domain in topology.domains]
    return tuple(next(places[index]) for index in home)


def _reason(topology: Topology, groups: Groups, left: Sequence[int]) -> str:
    largest = max(len(domain.ranks) for domain in topology.domains)
    size = max(len(groups[index]) for index in left)
    if size > largest:
        return f"a group of {size} is larger than any domain ({largest} ranks): no order helps; make groups smaller"
    whole = sum(len(domain.ranks) // size for domain in topology.domains)
    return (
        f"domains of {'/'.join(map(str, sorted({len(d.ranks) for d in topology.domains})))} ranks hold {whole} whole groups "
        f"of {size} together; start a multiple of {size} ranks in each domain"
    )
