"""GradientReducer's legs on streams, as GPUs have them, with made-up streams on a CPU: what waits for what.

A made-up stream does at once what it is given, and notes what it was told to wait for. So the results show that nothing
is left out, and the notes that everything that must be waited for is.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.gradients import reducer as reducer_module
from a2a.gradients.pipeline import LEGS, StreamPipeline
from gradient_reference import Planted, Reference, topology, values
from pool import World

F32 = torch.float32
MAIN = "main"


class Stream:
    """`seen`: for every stream, up to which of its events this one is ordered behind it."""

    def __init__(self, name: Any = None) -> None:
        self.name = name
        self.seen: dict[int, int] = {}
        self.made = 0

    def wait_event(self, event: Event) -> None:
        for stream, number in event.after.items():
            self.seen[stream] = max(self.seen.get(stream, 0), number)

    def synchronize(self) -> None:
        """All of it has happened."""


class Event:
    def __init__(self, **_: Any) -> None:
        self.after: dict[int, int] = {}

    def record(self, stream: Stream) -> None:
        stream.made += 1
        stream.seen[id(stream)] = stream.made
        self.after, self.time = dict(stream.seen), time.perf_counter()

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) * 1e3


@contextlib.contextmanager
def made_up_streams() -> Iterator[list[Stream]]:
    stack = [Stream(MAIN)]

    @contextlib.contextmanager
    def stream(on: Stream) -> Iterator[None]:
        stack.append(on)
        yield
        stack.pop()

    parts: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda _=None: stack[-1],
    }
    with mock.patch.multiple(torch.cuda, **parts), mock.patch.dict(reducer_module.PIPELINES, cpu=StreamPipeline):
        yield stack


def runs_on_streams(wire: str | None) -> None:
    rank, sizes = dist.get_rank(), (2, 2)
    counts = (300, 5000, 700)
    references = [Reference(sizes, count, F32, wire) for count in counts]
    with made_up_streams() as stack:
        model = Planted(counts, [F32] * 3)
        with a2a.GradientReducer(model, topology=topology(*sizes), wire=wire, bucket_mb=1e-6) as reducer:
            for step in range(3):
                model.zero_grad()
                given = [[values(r, count, F32, step) for count in counts] for r in range(4)]
                model.loss(given[rank]).backward()
                for n, (weight, reference) in enumerate(zip(model.weights, references, strict=True)):
                    expected = reference.step([one[n] for one in given])
                    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)
            legs = reducer._pipeline._streams  # type: ignore[attr-defined]
            assert list(legs) == list(LEGS)
            for earlier, later in itertools.pairwise(LEGS):  # a leg goes behind the one before it
                assert legs[later].seen[id(legs[earlier])] == legs[earlier].made
            main = stack[0]
            assert legs[LEGS[0]].seen[id(main)] > 0  # and the first behind the gradients
            assert main.seen[id(legs[LEGS[-1]])] == legs[LEGS[-1]].made  # what comes after the pass, behind the last
            told = reducer.stats()
            assert told["steps"] == 3
            assert len(told["buckets"]) == 3
            assert all(set(bucket["legs"]) == set(LEGS) for bucket in told["buckets"])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wire", [None, "fp8"])
def test_legs_on_streams_wait_for_each_other(world: World, wire: str | None) -> None:
    world.run(runs_on_streams, wire=wire)


def fails_on_streams() -> None:
    """An error is raised where the leg is queued, and from then on."""
    with made_up_streams(), a2a.GradientReducer.of_tensors(torch.device("cpu"), None, topology(1, 1)) as reducer:
        value = torch.full((100,), float(dist.get_rank()))
        assert reducer.reduce(value, "a").wait()[0].item() == 0.5
        reducer.reduce_across_domains(value.fill_(dist.get_rank()), "b")
        torch.testing.assert_close(value, torch.full((100,), 0.5), rtol=0, atol=0)
        for rail in reducer._ways.rails["rail_reduce"].values():
            rail.close()
        for _ in range(2):
            with pytest.raises(a2a.A2AError, match="GradientReducer on rank"):
                reducer.reduce(value, "a")


@pytest.mark.ranks(2)
def test_an_error_on_streams_is_raised_at_once(world: World) -> None:
    world.run(fails_on_streams)
