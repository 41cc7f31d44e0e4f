"""What tests of failures have in common: an exchange that is checked, and what a broken communicator must go on saying."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import a2a
from deadlines import soon

NOTICED_S = 2.0  # how soon after a death every survivor must have raised


def finished(work: Any) -> None:
    """Wait for an asynchronous call; a synchronous one gave None."""
    if work is not None:
        work.wait()


def heard(comm: Any) -> None:
    """Raise the failure of other ranks as soon as it is known here."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        comm.check()
        time.sleep(0.001)


def raises_on_and_on(comm: Any, error: type[Exception], says: str) -> None:
    """The communicator is broken: whatever is called raises the first cause again."""
    assert int(comm.ok) == 0
    calls: list[Callable[[], Any]] = [
        lambda: a2a.all_to_all_single(torch.empty(comm.world_size), torch.empty(comm.world_size), group=comm),
        lambda: a2a.all_to_all_single(
            torch.empty(comm.world_size), torch.empty(comm.world_size), group=comm, async_op=True
        ).wait(),
        lambda: comm.empty((4,), torch.float32),
        comm.check,
    ]
    for call in calls:
        with soon(1.0), pytest.raises(error, match=says):  # the cause is known: nothing to wait for
            call()
