"""The clock of GPUs, on a GPU that is played: work takes the time that it says, one stream, and nothing runs by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from a2a.cli import beside
from a2a.clocks import CudaClock, HostClock
from a2a.measure import Contender, Control, alternate


class Device:
    """What has been queued takes effect at once, on a clock of its own, in us."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.recording: list[Callable[[], None]] | None = None

    def queue(self, name: str, us: float) -> None:
        def work() -> None:
            self.now += us
            self.done.append(name)

        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                self.device = device

            def synchronize(self) -> None:
                assert device.recording is None, "a stream that is captured can't be waited for"

            def wait_stream(self, other: Any) -> None: ...

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                self.at = device.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, other: Any) -> float:
                return (other.at - self.at) / 1e3

        class Graph:
            def replay(self) -> None:
                assert device.recording is None
                for work in self.works:
                    work()

        @contextlib.contextmanager
        def graph(graph: Any, **_: Any) -> Iterator[None]:
            device.recording = graph.works = []
            yield
            device.recording = None

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    device.install(monkeypatch)
    return device


def clock(gpu: Device, graph: bool) -> CudaClock:
    return CudaClock(torch.device("cpu"), lambda: None, lambda: gpu.queue("meet", 7.0), graph=graph)


@pytest.mark.parametrize("graph", [False, True])
def test_a_call_takes_what_its_events_say(gpu: Device, graph: bool) -> None:
    contender = Contender("a", lambda: gpu.queue("a", 30.0), lambda: 0)
    timing = alternate([contender], Control(), repeat=3, clock=clock(gpu, graph))["a"]["total"]
    assert timing.samples_us == pytest.approx((30.0,) * 3)
    assert timing.calls == 34  # which fill a millisecond


@pytest.mark.parametrize(("us", "calls"), [(2.0, 50), (40.0, 25), (5000.0, 10)])
def test_a_graph_has_between_10_and_50_calls(gpu: Device, us: float, calls: int) -> None:
    contender = Contender("a", lambda: gpu.queue("a", us), lambda: 0)
    timing = alternate([contender], Control(), repeat=1, clock=clock(gpu, True))["a"]["total"]
    assert timing.calls == calls
    assert gpu.done[-2 * calls - 1 :] == ["meet"] + ["a"] * 2 * calls  # one replay untimed, and one timed


def test_phases_are_rows_of_their_own(gpu: Device) -> None:
    phases = {name: lambda name=name, us=us: gpu.queue(name, us) for name, us in (("there", 10.0), ("back", 20.0))}

    def round_trip() -> None:
        for phase in phases.values():
            phase()

    contender = Contender("a", round_trip, lambda: 0, phases=phases)
    timings = alternate([contender], Control(), repeat=2, clock=clock(gpu, True))["a"]
    assert {name: round(timing.p50_us) for name, timing in timings.items()} == {"there": 10, "back": 20, "total": 30}


def test_what_was_captured_holds_values_before_anything_uses_it(gpu: Device) -> None:
    made = clock(gpu, True)
    made.row(lambda: gpu.queue("a", 1.0), 4)
    assert gpu.done == ["a"] * 4


def test_after_the_timing_the_graphs_own_results_are_checked(gpu: Device) -> None:
    asked: list[str] = []

    def check_call(call: Callable[[], object]) -> int:
        asked.append("poison")
        call()
        return 5

    contender = Contender("a", lambda: gpu.queue("a", 50.0), lambda: 0, check_call=check_call)
    timing = alternate([contender], Control(), repeat=1, clock=clock(gpu, True))["a"]["total"]
    assert asked == ["poison"]
    assert timing.wrong == 5


def test_what_cannot_be_captured_is_left_out_with_its_reason(gpu: Device) -> None:
    contender = Contender("a", lambda: None, lambda: 0, optional=True, phases={"p": lambda: None}, why_not="it waits")
    timings = alternate([contender], Control(), repeat=1, clock=clock(gpu, True))["a"]
    assert {name: timing.why for name, timing in timings.items()} == {"p": "it waits", "total": "it waits"}


def test_a_check_in_a_graph_is_made_of_a_replay(gpu: Device) -> None:
    clock(gpu, True).perform(lambda: gpu.queue("step", 1.0))
    assert gpu.done == ["step"] * 3  # once to warm up, and twice from the graph
    gpu.done.clear()
    clock(gpu, False).perform(lambda: gpu.queue("step", 1.0))
    assert gpu.done == ["step"]


def test_the_host_clock_has_no_graphs() -> None:
    assert not HostClock(lambda: None).row(lambda: None, 3).is_graph


def test_beside_a_product_both_are_timed(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "SIZE", 2)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: gpu.queue("product", 1500.0))
    contender = Contender("a", lambda: gpu.queue("a", 100.0), lambda: 0)
    made = clock(gpu, True)
    timings = alternate([contender], Control(), repeat=1, clock=made)
    found = beside.measure([contender], timings, Control(), made)["a", "total"]
    # One after the other here: the product loses nothing, and no call ends before it does.
    assert found["gemm_us"] == found["gemm_beside_us"] == 1500.0
    assert found["gemm_slowdown"] == 1.0
    assert found["beside_p50_us"] == 100.0
    sample = gpu.done[-(beside.PRODUCTS + 10 * 24) :]
    assert sample == ["product"] * beside.PRODUCTS + ["a"] * 240  # calls for twice as long as the products take
