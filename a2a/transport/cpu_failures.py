"""From the record of a failure, which all ranks share, to the error that tells of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from a2a.errors import A2AError, InterruptedRankError, MismatchError, PeerTimeoutError, RowOverflowError
from a2a.kernels import cpu
from a2a.kernels.cpu import Cause

if TYPE_CHECKING:
    from a2a.transport.cpu_shm import CpuShm

# The causes that are a peer's absence, and what PeerTimeoutError calls them.
_GONE = {Cause.TIMEOUT: "timeout", Cause.DIED: "died", Cause.CLOSED: "closed", Cause.UNREADABLE: "died"}
_DIED = "It may have been killed; its own output or the system's log says more."
_LATE = "Rank {0} may have died or taken another branch. See `a2a doctor`; the limit is A2A_TIMEOUT_S."


def error_of(transport: CpuShm, cause: Cause, by: int, peer: int, asked: str, op: str) -> A2AError:
    """The error for a recorded failure.

    Args:
        by: the rank that noticed it, while it was in `asked`.
        peer: the rank that it is about.
        op: what this rank calls now.
    """
    again = f" Raised in {op}: the communicator is broken since then; close it and make a new one."
    if cause in _GONE:
        what = _absence(transport, cause, by, peer, asked)
        return PeerTimeoutError(what + again, rank=transport.rank, peer=peer, op=asked, cause=_GONE[cause])
    if cause == Cause.INTERRUPTED:
        return InterruptedRankError(f"rank {by} was interrupted in {asked}." + again)
    told = cpu.lib().a2a_cause_text(transport.handle, by).decode(errors="replace") + "." + again
    if cause in (Cause.MISMATCH, Cause.SPLITS):
        other = peer if by == transport.rank else by
        return MismatchError(told, rank=transport.rank, peer=other, op=op)
    if cause == Cause.OVERFLOW:
        return RowOverflowError(told)
    return A2AError(f"rank {by}: {told}")


def _absence(transport: CpuShm, cause: Cause, by: int, peer: int, asked: str) -> str:
    if cause == Cause.TIMEOUT:
        seen = f" This rank, {transport.rank}, is at epoch {cpu.lib().a2a_epoch(transport.handle)}"
        if peer != transport.rank:
            seen += f" and has seen rank {peer} at {cpu.lib().a2a_peer_epoch(transport.handle, peer)}"
        return f"rank {by} waited {transport.timeout_s:.1f} s for rank {peer} in {asked}.{seen}. " + _LATE.format(peer)
    if cause == Cause.CLOSED:
        closed = f"rank {peer} has closed this communicator"
        return closed + (
            f": rank {by} was waiting for it in {asked}." if by != peer else " with work of its own in flight."
        )
    how = "was waiting for it" if cause == Cause.DIED else "could not read its memory any more"
    return f"rank {peer} died: rank {by} {how} in {asked}. {_DIED}"


__all__ = ["error_of"]
