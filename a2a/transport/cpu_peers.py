"""What a rank knows of the processes behind its peers: when they die, and whether they may read each other's memory."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets

from a2a.kernels import cpu
from a2a.transport.base import Wiring
from a2a.transport.fd_link import FdLink

_log = logging.getLogger("a2a")


def exchange_pidfds(link: FdLink) -> list[int]:
    """A pidfd of every rank, -1 for those that have none. It tells of a death at once."""
    fd = -1
    try:
        fd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError) as error:  # Linux before 5.3, or a container that forbids it
        _log.warning("cpu_shm: pidfd_open: %s; a killed rank is noticed by the deadline only", error)
    gathered = link.gather(fd)
    everyone = link.broadcast(gathered)
    for own in (fd, *gathered):
        if own >= 0:
            os.close(own)
    return everyone


def try_reads(wiring: Wiring, pidfds: list[int]) -> tuple[str, list[int]]:
    """Whether the system lets every rank read every other's ordinary memory: why not, or "", and the ranks' process ids."""
    rank, world_size = wiring.rank, wiring.world_size
    secret = secrets.token_bytes(32)
    here = ctypes.create_string_buffer(secret, 32)
    offers = wiring.exchange("cpu_shm/read", ctypes.addressof(here).to_bytes(8, "little") + secret)
    pids, problem = [0] * world_size, ""
    for peer, offer in enumerate(offers):
        pids[peer] = os.getpid() if peer == rank else _pid_of(pidfds[peer])
        found = ctypes.create_string_buffer(32)
        error = errno.ESRCH
        if pids[peer] > 0:
            error = cpu.lib().a2a_read(pids[peer], int.from_bytes(offer[:8], "little"), found, 32)
        if error or found.raw != offer[8:]:
            reason = os.strerror(error) if error else "the wrong process answers"
            problem = problem or f"rank {rank} may not read rank {peer}'s memory (process_vm_readv: {reason})"
    told = [t.decode() for t in wiring.exchange("cpu_shm/ready", problem.encode())]
    del here
    why = next((t for t in told if t), "")
    if why:
        _log.info("cpu_shm: %s; ordinary tensors are copied twice. In a container, allow ptrace between the ranks", why)
    return why, pids


def _pid_of(pidfd: int) -> int:
    """The process behind a pidfd, by the number that this process's namespace has for it; 0 if it has none."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as info:
            return next((int(line.split()[1]) for line in info if line.startswith("Pid:")), 0)
    except (OSError, ValueError):
        return 0


__all__ = ["exchange_pidfds", "try_reads"]
