"""Where the time of a step went: what of the legs the backward pass hid, and what it did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from a2a.gradients.pipeline import Flight, Pipeline


@dataclass
class Stats:
    """The latest reduced backward pass, in marks of the pipeline.

    Attributes:
        steps: how many were reduced so far.
        first, last: when its first gradient came, and when it ended.
        flights: its buckets, with what is told of each.
    """

    steps: int = 0
    first: Any = None
    last: Any = None
    flights: Sequence[tuple[Flight, dict[str, Any]]] = field(default_factory=list)

    def told(self, pipeline: Pipeline) -> dict[str, Any]:
        """What `GradientReducer.stats` returns."""
        if not self.flights:
            return {"steps": self.steps, "buckets": []}

        def at(mark: Any) -> float:
            return pipeline.seconds(self.first, mark) * 1e6

        end = at(self.last)
        buckets, arrived = [], end
        for flight, told in self.flights:
            spans = {leg: (at(begin), at(finish)) for leg, (begin, finish) in flight.spans.items()}
            sent = at(flight.submitted)
            there = max((finish for _, finish in spans.values()), default=sent)
            arrived = max(arrived, there)
            buckets.append(
                {
                    **told,
                    "ready_us": round(sent, 1),
                    "legs": {leg: round(finish - begin, 1) for leg, (begin, finish) in spans.items()},
                    "hidden_us": round(max(0.0, min(there, end) - sent), 1),
                    "exposed_us": round(max(0.0, there - max(sent, end)), 1),
                }
            )
        return {
            "steps": self.steps,
            "buckets": buckets,
            "backward_us": round(end, 1),
            "hidden_us": round(sum(bucket["hidden_us"] for bucket in buckets), 1),
            "exposed_us": round(arrived - end, 1),
        }
