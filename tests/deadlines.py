"""Limits on time that hold on a busy machine: what nobody could run in does not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_STEP_S = 0.02
_LATE_S = 0.08  # later than this, a thread that only sleeps was kept from running


class Stalls:
    """Adds up how long this process was kept from running, or the whole machine stood still, inside a `with` block."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._end.wait(_STEP_S):
            now = time.monotonic()
            if now - last > _STEP_S + _LATE_S:
                self.seconds += now - last
            last = now

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


@contextmanager
def soon(limit_s: float) -> Iterator[None]:
    """Fail if the block takes longer than `limit_s`."""
    start = time.monotonic()
    with Stalls() as stalls:
        yield
    took = time.monotonic() - start - stalls.seconds
    assert took < limit_s, f"took {took:.2f} s"
