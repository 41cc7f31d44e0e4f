"""Every error a2a raises beyond `ValueError` and `TypeError`.

`ValueError` and `TypeError` are for mistakes that the calling rank can see by itself, before anything is sent. The classes
here are for what only shows between ranks. They leave the communicator broken: the first cause is kept, every later call
raises it again, and the way on is `comm.close()` and a new communicator. Two don't: `UnsupportedError`, and the
`MismatchError` of a peer that refused its own call, after which all ranks are still in step.
"""

from __future__ import annotations


class A2AError(RuntimeError):
    """Base of the errors that concern other ranks or this machine."""


class PeerTimeoutError(A2AError):
    """A peer did not arrive: it died, left, closed its communicator, or is later than the deadline.

    Attributes:
        rank: the rank that gave up waiting (group rank).
        peer: the rank that was missing (group rank).
        op: the collective that was waiting.
        cause: "timeout", "died", "closed", or "not_ready": rank and peer are one, whose own kernels did not do their part.
    """

    def __init__(self, message: str, *, rank: int = -1, peer: int = -1, op: str = "", cause: str = "timeout") -> None:
        super().__init__(message)
        self.rank, self.peer, self.op, self.cause = rank, peer, op, cause


class MismatchError(A2AError):
    """Ranks asked for different things: another op, dtype, row size or split, or one refused its own call.

    Attributes:
        rank: the rank that found it out (group rank).
        peer: the rank whose request differs (group rank).
        op: the collective that this rank was in.
    """

    def __init__(self, message: str, *, rank: int = -1, peer: int = -1, op: str = "") -> None:
        super().__init__(message)
        self.rank, self.peer, self.op = rank, peer, op


class RowOverflowError(A2AError):
    """A rank received more rows than `max_rows` allows, and `overflow="raise"` was asked for."""


class InterruptedRankError(A2AError):
    """A rank left a collective half way, on Ctrl-C or another signal that raised in it."""


class UnsupportedError(A2AError):
    """This machine, build or request can't be served; the message says why and what can be done.

    Attributes:
        rejected: (algorithm, reason) of each that can't, where the planner raised it.
    """

    def __init__(self, message: str, *, rejected: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.rejected = rejected
