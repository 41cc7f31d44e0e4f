"""What the parts of a collective cost: a curve over bytes for each of them, measured where it runs, or built in.

Algorithms say of which primitives a request is made (`Cost.parts`); `Costs` says what those take, with all ranks at it at
once. Bytes are those that a rank gets from others, unless said otherwise. On CPUs:

    call_OP        a collective of a few bytes, called from Python: its first round of signals included
    signal         one more round in which every rank signals every other
    copy, stream   own memory to own memory, through the caches or past them; bytes copied
    eager          through slots beside the first signal, one copy in and one out
    push           stored into peers' memory
    read           read from peers' processes by the system
    stage          through rings of slots, one copy in and one out
    gather         the same, each slot taken by all
    one_shot       sums of float32 that all ranks make of all inputs
    reduce_staged  sums of float32 that come through rings, reduce_loaded: that are loaded from peers' memory
    reduce_gather  both halves of an all-reduce, through rings; reduce_push: from and to peers' memory
    reduce_DTYPE   sums in own memory, in cache; bytes of all terms. What other dtypes cost beyond float32
    c10d_OP        the group's own engine; bytes of the request

and on GPUs:

    launch         of a kernel, signal: one round among the GPUs
    push           stored over the link, by the few SMs that a collective takes
    engine         the same by a copy engine
    copy           within a GPU's memory; bytes copied
    c10d_OP        as above

Decisions. Curves go through a point every factor of two, since caches make them bend, and are straight between two points in
logarithms. Times are the slowest rank's, with noise: a curve that falls with size is levelled. What a table lacks
is taken from the built-in curves, so that any two tables answer the same questions.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

VERSION = 1
ALIKE = 0.02  # a point that its neighbours tell to within this share is left out


@dataclass(frozen=True)
class Curve:
    """Time over size: (bytes, us), by size. One point at 0 bytes is a constant."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] < 0 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"Curve: sizes are {sizes}; expected at least one, each larger than the one before")
        for size, us in self.points:
            if not (math.isfinite(us) and us >= 0):
                raise ValueError(f"Curve: {us!r} us for {size} bytes; expected a finite number, 0 or more")

    def us(self, num_bytes: float) -> float:
        """The time of so many bytes: nothing for none, else at least the first point's; beyond the last, in proportion."""
        sizes = self._sizes
        if sizes == (0,):
            return self.points[0][1]
        if num_bytes <= 0:
            return 0.0
        after = bisect.bisect_left(sizes, num_bytes)
        if after == 0:
            return self.points[0][1]
        if after == len(sizes):
            size, us = self.points[-1]
            return us * num_bytes / size
        (low, low_us), (high, high_us) = self.points[after - 1], self.points[after]
        if min(low, low_us, high_us) <= 0:
            return low_us + (high_us - low_us) * (num_bytes - low) / (high - low)
        part = math.log(num_bytes / low) / math.log(high / low)
        return low_us * math.exp(part * math.log(high_us / low_us))

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.points)

    def times(self, factor: float) -> Curve:
        """The same curve, so many times as dear."""
        return Curve(tuple((size, us * factor) for size, us in self.points))

    @staticmethod
    def fitted(samples: Iterable[tuple[int, float]]) -> Curve:
        """The curve through measured medians: never falling, and without points that its neighbours tell."""
        blocks: list[list[tuple[int, float]]] = []
        for size, us in sorted(samples):
            blocks.append([(size, us)])
            while len(blocks) > 1 and _level(blocks[-2]) > _level(blocks[-1]):
                last = blocks.pop()
                blocks[-1] += last
        points = [(size, float(f"{_level(block):.4g}")) for block in blocks for size, _ in block]
        kept = points[:1]
        for index in range(1, len(points) - 1):
            told = Curve((kept[-1], points[index + 1])).us(points[index][0])
            if abs(told - points[index][1]) > ALIKE * points[index][1]:
                kept.append(points[index])
        return Curve(tuple(kept + points[1:][-1:]))


def _level(block: list[tuple[int, float]]) -> float:
    return sum(us for _, us in block) / len(block)


@dataclass(frozen=True)
class Costs:
    """The curves of all primitives, and where they come from.

    Attributes:
        curves: of each primitive.
        source: of the curves in general, for people: "built-in" or "measured on DATE ...".
        measured: which of them were measured; the others are built in.
    """

    curves: Mapping[str, Curve]
    source: str
    measured: frozenset[str] = field(default_factory=frozenset)

    def us(self, name: str, num_bytes: float = 0) -> float:
        """What a primitive takes for so many bytes.

        Raises:
            KeyError: there is none of that name.
        """
        return self.curves[name].us(num_bytes)

    def told(self, names: Collection[str]) -> str:
        """Where the curves of these primitives come from, for people."""
        built_in = sorted(name for name in names if name not in self.measured)
        if not self.measured or not built_in:
            return self.source
        return f"{self.source}; built-in: {', '.join(built_in)}"

    def over(self, others: Costs) -> Costs:
        """These, and of `others` what is missing here."""
        return Costs({**others.curves, **self.curves}, self.source, self.measured)

    def to_json(self) -> str:
        """What was measured, as `from_json` reads it: one line a curve, equal text for equal tables."""
        lines = [f'"{name}": {json.dumps(self.curves[name].points)}' for name in sorted(self.measured)]
        head = f'"a2a_costs": {VERSION},\n "source": {json.dumps(self.source)}'
        return "{" + head + ',\n "curves": {\n  ' + ",\n  ".join(lines) + "\n }}\n"

    @staticmethod
    def from_json(text: str) -> Costs:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else; says what.
        """
        try:
            data: Any = json.loads(text)
            if data["a2a_costs"] != VERSION:
                raise ValueError(f"its version is {data['a2a_costs']!r}; this a2a reads {VERSION}")
            curves = {
                str(name): Curve(tuple((int(size), float(us)) for size, us in points))
                for name, points in data["curves"].items()
            }
            return Costs(curves, str(data["source"]), frozenset(curves))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no table of costs: {type(error).__name__}: {error}") from error

    @property
    def digest(self) -> str:
        """Of what was measured: equal on ranks that hold the same table."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
