"""Buckets on their way: the legs of one bucket follow each other, those of different buckets run side by side.

Each leg takes the buckets one after the other, in the order in which they were submitted, which is the same on all
ranks: so no leg waits for a bucket that a peer has behind another one. On a CPU a leg is a thread, on a GPU a stream.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from a2a.errors import A2AError

LEGS = ("domain_reduce", "rail_reduce", "rail_gather", "domain_gather")
_GRACE_S, _JOIN_S = 0.5, 5.0  # for what is on its way when the pipeline is stopped: to land; to give up
_SLICE_S = 0.1  # how long a wait lasts before Python may run signal handlers

Broke = Callable[[str, str, BaseException], Exception]


def _ignore(_: BaseException | None) -> None:
    """Nobody wants to be told."""


@dataclass(eq=False)
class Flight:
    """One tensor on its way.

    Attributes:
        what: for errors: "bucket 3".
        legs: what each leg does; one that is missing does nothing.
        landed: called once with the first error or None: on a CPU by a leg's thread, on a GPU on the last leg's stream.
        submitted, spans, done: the pipeline's: when it was submitted, when each leg began and ended, and what waits for
            it.
    """

    what: str
    legs: Mapping[str, Callable[[], None]]
    landed: Callable[[BaseException | None], None] = _ignore
    submitted: Any = None
    spans: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    done: Any = None


class Pipeline(ABC):
    """Takes flights through the legs.

    `broke(leg, what, error)` is called for the first error; what it returns is raised here from then on.
    """

    def __init__(self, device: torch.device, broke: Broke) -> None:
        self.device, self._broke = device, broke
        self._lock = threading.Lock()
        self.error: Exception | None = None

    @abstractmethod
    def submit(self, flight: Flight) -> None:
        """Start a flight; returns at once."""

    @abstractmethod
    def wait(self, flight: Flight) -> None:
        """Until it has landed: on a CPU the caller waits, on a GPU its current stream.

        Raises: what the first leg that failed did.
        """

    @abstractmethod
    def mark(self) -> Any:
        """Now: on a GPU, in the current stream."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another. On a GPU, waits for the second."""

    @abstractmethod
    def stop(self) -> None:
        """Take no more flights, and let threads end."""

    def call(self, what: str, function: Callable[[], None]) -> None:
        """Have the first leg do something between two flights, and wait for it. For errors as in a flight."""
        flight = Flight(what, {LEGS[0]: function})
        self.submit(flight)
        self.wait(flight)

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error

    def fail(self, leg: str, what: str, error: BaseException) -> Exception:
        """Take note of an error; returns what is raised from now on."""
        with self._lock:
            if self.error is None:
                self.error = self._broke(leg, what, error)
            return self.error


class ThreadPipeline(Pipeline):
    """A thread a leg."""

    def __init__(self, device: torch.device, broke: Broke) -> None:
        super().__init__(device, broke)
        self._stopped = False
        self._queues: dict[str, queue.SimpleQueue[Flight | None]] = {leg: queue.SimpleQueue() for leg in LEGS}
        self._threads = [
            threading.Thread(target=self._work, args=(leg,), name=f"a2a {leg}", daemon=True) for leg in LEGS
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, flight: Flight) -> None:
        self.check()
        flight.submitted, flight.done = self.mark(), threading.Event()
        self._queues[LEGS[0]].put(flight)

    def wait(self, flight: Flight) -> None:
        while not flight.done.wait(_SLICE_S):
            pass
        self.check()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._queues[LEGS[0]].put(None)
        self._join(_GRACE_S)
        if any(thread.is_alive() for thread in self._threads):
            self.fail("close", "everything", A2AError("the reducer was closed with gradients on their way"))
            self._join(_JOIN_S)

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _work(self, leg: str) -> None:
        number = LEGS.index(leg)
        following = self._queues[LEGS[number + 1]] if number + 1 < len(LEGS) else None
        while (flight := self._queues[leg].get()) is not None:
            if self.error is None and leg in flight.legs:
                begin = self.mark()
                try:
                    with torch.no_grad():
                        flight.legs[leg]()
                except BaseException as error:  # whatever it is, those who wait must hear of it
                    self.fail(leg, flight.what, error)
                flight.spans[leg] = begin, self.mark()
            if following is not None:
                following.put(flight)
            else:
                flight.done.set()
                flight.landed(self.error)
            del flight  # while this thread waits for the next
        if following is not None:
            following.put(None)


class StreamPipeline(Pipeline):
    """A stream a leg. Everything is queued by the thread that submits, which is where errors of that are raised."""

    def __init__(self, device: torch.device, broke: Broke) -> None:
        super().__init__(device, broke)
        self._streams = {leg: torch.cuda.Stream(device) for leg in LEGS}  # type: ignore[no-untyped-call]

    def submit(self, flight: Flight) -> None:
        self.check()
        flight.submitted = before = self.mark()
        for leg in LEGS:
            if leg not in flight.legs:
                continue
            stream = self._streams[leg]
            stream.wait_event(before)
            with torch.cuda.stream(stream), torch.no_grad():
                begin = self.mark()
                try:
                    flight.legs[leg]()
                except BaseException as error:
                    told = self.fail(leg, flight.what, error)
                    flight.landed(told)
                    raise told from error
                before = self.mark()
            flight.spans[leg] = begin, before
        flight.done = before
        last = self._streams[LEGS[-1]]
        last.wait_event(before)
        with torch.cuda.stream(last):
            flight.landed(None)

    def wait(self, flight: Flight) -> None:
        self.check()
        torch.cuda.current_stream(self.device).wait_event(flight.done)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def stop(self) -> None:
        """Wait for what is queued, which rails that close would break off; unless something has failed."""
        if self.error is None:
            for stream in self._streams.values():
                stream.synchronize()


PIPELINES: dict[str, type[Pipeline]] = {"cpu": ThreadPipeline, "cuda": StreamPipeline}
