"""The handle of an asynchronous collective: `wait`, `is_completed`, `get_future`, as torch.distributed's Work."""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from a2a.errors import PeerTimeoutError
from a2a.kernels import cpu

if TYPE_CHECKING:
    from a2a.comm import Communicator

_SLICE_S = 0.05  # how long a wait stays in C before Python may run signal handlers


class Work:
    """An operation that is on its way. It keeps its tensors alive until it is done, also if you drop it.

    Like: torch.distributed.Work. Differs: the deadline is the communicator's, and errors are a2a's own.
    """

    def __init__(
        self,
        comm: Communicator,
        ticket: int,
        op: str,
        outputs: list[torch.Tensor],
        keep: object,
        finish: Callable[[], None] | None,
    ) -> None:
        self._comm, self._op, self._outputs, self._keep, self._finish = comm, op, outputs, keep, finish
        self._ticket: int | None = ticket
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def is_completed(self) -> bool:
        """Whether it is done, well or not. Never blocks."""
        return self._settle(0.0)

    def is_success(self) -> bool:
        """Whether it is done and went well."""
        return self._settle(0.0) and self._error is None

    def exception(self) -> BaseException | None:
        """The error it ended with, or None."""
        return self._error

    def wait(self, timeout: datetime.timedelta | float | None = None) -> bool:
        """Block until the outputs are there.

        Args:
            timeout: seconds or a timedelta; the communicator's own deadline applies in any case.
        Returns: True.
        Raises:
            PeerTimeoutError: `timeout` is over (the operation goes on), or a peer did not come.
            MismatchError: another rank asked for something else.
        """
        limit = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        start = time.monotonic()
        while not self._settle(_SLICE_S):
            if limit and time.monotonic() - start > limit:
                raise PeerTimeoutError(
                    f"{self._op}: not done after the {limit:g} s that wait() was given; it goes on",
                    rank=self._comm.rank,
                    op=self._op,
                )
        if self._error is not None:
            raise self._error
        return True

    def result(self) -> list[torch.Tensor]:
        """The outputs, once done."""
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the outputs; its callbacks run on a thread of the communicator."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._comm.complete_in_background(self)
        return self._future

    # ---- for the communicator

    def holding(self, comm: Communicator, tensors: list[torch.Tensor]) -> Work:
        """This work, which keeps also these tensors of other libraries' memory until it is done."""
        return self  # it keeps all its tensors

    def _settle(self, seconds: float) -> bool:
        """Take over the result if it is there within `seconds`."""
        if not self._lock.acquire(blocking=seconds > 0):
            return False  # another thread is at it
        try:
            if self._ticket is None:
                return True
            library = cpu.lib()
            result = library.a2a_wait(self._ticket, seconds) if seconds else library.a2a_test(self._ticket)
            if result == cpu.PENDING:
                return False
            peer = library.a2a_ticket_peer(self._ticket)
            why = library.a2a_ticket_refusal(self._ticket).decode(errors="replace")  # a copy: the ticket goes now
            library.a2a_release(self._ticket)
            self._ticket = None
            try:
                if result:
                    self._comm.raise_failure(result, self._op, (peer, why))
                elif self._finish is not None:
                    self._finish()
            except Exception as error:
                self._error = error
            self._keep = self._finish = None
        finally:
            self._lock.release()
        self._comm.forget(self)
        return True

    def _resolve_future(self) -> None:
        future = self._future
        assert future is not None
        with contextlib.suppress(RuntimeError):  # somebody else set it
            if self._error is not None:
                future.set_exception(self._error)  # type: ignore[arg-type]  # torch says T, and takes an exception
            else:
                future.set_result(self._outputs)


class DoneWork(Work):
    """Work that was done before it was asked for, or that failed so."""

    def __init__(self, outputs: list[torch.Tensor], error: BaseException | None = None) -> None:
        self._outputs, self._error, self._future = outputs, error, None

    def _settle(self, seconds: float) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Any]]:
        if self._future is None:
            self._future = torch.futures.Future()
            self._resolve_future()
        return self._future


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StreamWork(DoneWork):
    """Work on a GPU stream. `wait()` makes the current stream wait, not the host.

    An error shows in a later call or `comm.check()`.
    """

    def __init__(self, outputs: list[torch.Tensor], done: torch.cuda.Event, device: torch.device) -> None:
        super().__init__(outputs)
        self._done, self._device = done, device
        self._held: list[torch.Tensor] = []  # torch's allocator knows which streams use its memory, but of no other

    def holding(self, comm: Communicator, tensors: list[torch.Tensor]) -> Work:
        if not torch.cuda.is_current_stream_capturing():  # what a graph uses, its user keeps; and events can't be asked
            self._held, self._comm = tensors, comm
            comm.keep(self)
        return self

    def _settle(self, seconds: float) -> bool:
        if self._held and self._done.query():  # type: ignore[no-untyped-call]
            self._held = []
            self._comm.forget(self)
        return True

    def is_completed(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def is_success(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self, timeout: datetime.timedelta | float | None = None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._done)
        return True

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """A future of the outputs, as torch has them for GPUs: callbacks run now, on streams that wait for the work."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._device])
            with torch.cuda.device(self._device), torch.cuda.stream(_side_stream(self._device)):
                self.wait()
                self._future.set_result(self._outputs)
        return self._future


class Lane:
    """Calls of one communicator, one after the other: first in, first out.

    A synchronous call runs where it is made if nothing is under way; others run on a thread, which the first of them starts.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm, self._name = weakref.ref(comm), name
        self._waiting: queue.SimpleQueue[LaneWork | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # held by the call that runs
        self._last: LaneWork | None = None
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], None]) -> None:
        """Make the call after all that came before it, and return when it is done."""
        if self._last is not None and not self._last.is_completed():
            self.submit(call, []).wait()
            return
        with self._turn:
            call()

    def submit(self, call: Callable[[], None], outputs: list[torch.Tensor], op: str = "") -> LaneWork:
        """Make the call after all that came before it, and return at once."""
        comm = self._comm()
        assert comm is not None
        work = self._last = LaneWork(comm, op, call, outputs)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_lane, args=(self._waiting, self._turn), name=self._name, daemon=True
            )
            self._thread.start()
        comm.keep(work)
        self._waiting.put(work)
        return work

    def close(self) -> None:
        """Let calls that wait run, and fail, and end the thread. What they would wait for has been closed before."""
        if self._thread is not None:
            self._waiting.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None


def _run_lane(waiting: queue.SimpleQueue[LaneWork | None], turn: threading.Lock) -> None:
    while (work := waiting.get()) is not None:
        with turn:
            work.run()
        del work


class LaneWork(Work):
    """Work on a lane."""

    def __init__(self, comm: Communicator, op: str, call: Callable[[], None], outputs: list[torch.Tensor]) -> None:
        super().__init__(comm, 0, op, outputs, None, None)
        self._call: Callable[[], None] | None = call
        self._done = threading.Event()

    def run(self) -> None:
        assert self._call is not None
        try:
            self._call()
        except Exception as error:
            self._error = error
        self._call = None  # and what it holds
        self._done.set()

    def _settle(self, seconds: float) -> bool:
        if not (self._done.wait(seconds) if seconds else self._done.is_set()):
            return False
        self._comm.forget(self)
        return True


class Aside:
    """Where calls run beside their caller: on a GPU, on a stream of their own; on a CPU, on `lane` if there is one.

    Without a lane they block on a CPU.
    """

    def __init__(self, device: torch.device, lane: Lane | None = None) -> None:
        self._device, self._lane = device, lane
        self._stream = _side_stream(device) if device.type == "cuda" else None

    def run(self, call: Callable[[], None], outputs: list[torch.Tensor], used: Iterable[torch.Tensor]) -> Work:
        """Make the call, which is ordered after the current stream's work, and return what stands for it.

        `used`: tensors whose memory it needs, dropped by the caller or not.
        """
        if self._stream is None:
            if self._lane is not None:
                return self._lane.submit(call, outputs)
            call()
            return DoneWork(outputs)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            call()
            done = self._stream.record_event()
        for tensor in used:
            tensor.record_stream(self._stream)
        return StreamWork(outputs, done, self._device)
