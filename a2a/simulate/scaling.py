"""Weak scaling: the same work a GPU on more GPUs; and what the answer hangs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from a2a.simulate.assumptions import Assumptions
from a2a.simulate.step import Step, simulate
from a2a.simulate.workload import Job, Model

# DeepSeek-V3 from 256 to 1,024 GB300 GPUs, as those projects published it; their layouts and networks are not known exactly.
PUBLISHED = (("Megatron", 0.985), ("TorchTitan, JAX", 0.97))
PUBLISHED_FOR = ("deepseek-v3", "gb300", 256, 1024)
CHANGE = 0.10  # of an assumption, up and down


@dataclass(frozen=True)
class Swing:
    """What an assumption's change by `CHANGE` does to the weak scaling from the first to the last number of GPUs."""

    name: str
    less: float  # scaling with the assumption that much lower
    more: float  # and higher
    moves: float  # the larger distance from the scaling as it is


def at(job: Job, gpus: int) -> Job:
    """The same work for each of another number of GPUs.

    Raises:
        ValueError: the global batch doesn't divide so.
    """
    if job.global_batch * gpus % job.gpus:
        raise ValueError(
            f"simulate: {job.global_batch} sequences a step on {job.gpus} GPUs are no whole number on {gpus}; "
            f"expected a multiple"
        )
    return replace(job, gpus=gpus, global_batch=job.global_batch * gpus // job.gpus)


def weak_scaling(first: Step, last: Step) -> float:
    """Throughput of a GPU in `last` as a part of that in `first`: tokens a GPU are the same, so times are enough."""
    return first.step_s / last.step_s


def sensitivity(
    model: Model, first: Job, last: Job, assume: Assumptions | None = None, began: Callable[[str], None] | None = None
) -> list[Swing]:
    """Vary each assumption alone, `CHANGE` down and up (fractions up to 1), the one that moves the scaling most first.

    Args:
        began: called with each assumption's name before it is varied.
    """
    assume = assume or Assumptions()

    def scaling(changed: Assumptions) -> float:
        return weak_scaling(simulate(model, first, changed), simulate(model, last, changed))

    def varied() -> Iterator[Swing]:
        usual = scaling(assume)
        for name in (field.name for field in fields(Assumptions)):
            if began is not None:
                began(name)
            value = getattr(assume, name)
            higher = value * (1 + CHANGE)
            higher = min(higher, 1.0) if name.endswith("_fraction") else higher
            less = scaling(replace(assume, **{name: value * (1 - CHANGE)}))
            more = scaling(replace(assume, **{name: higher}))
            yield Swing(name, less, more, max(abs(less - usual), abs(more - usual)))

    return sorted(varied(), key=lambda swing: (-swing.moves, swing.name))


def published(steps: Sequence[Step]) -> list[tuple[str, float]]:
    """(who, weak scaling) where somebody published what these steps model; else an empty list."""
    job = steps[0].job
    return list(PUBLISHED) if (steps[0].model.name, job.hardware, job.gpus, steps[-1].job.gpus) == PUBLISHED_FOR else []
