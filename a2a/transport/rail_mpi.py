"""Rails over MPI, through mpi4py.

They carry CPU tensors. MPI moves on only inside its calls, so work advances when it is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from a2a.errors import UnsupportedError
from a2a.topology import Topology
from a2a.transport.rail import Rail, RailWork, tell_through

_POLL_S = 20e-6


class MpiRail(Rail):
    """Over a communicator of mpi4py."""

    engine: ClassVar[str] = "mpi"

    def __init__(self, comm: Any, ranks: Sequence[int], timeout_s: float, name: str = "rail") -> None:
        """`comm`: whose rank d is `ranks[d]`. The rail owns it."""
        super().__init__(ranks, comm.Get_rank(), timeout_s, name)
        if comm.Get_size() != len(ranks):
            raise UnsupportedError(
                f"{name}: mpi4py's communicator has {comm.Get_size()} ranks where {len(ranks)} were expected; were the "
                f"ranks started by the mpiexec of the MPI that mpi4py was built with?"
            )
        self._comm = comm
        self._calls = 0

    def _post(self, op: str, receive: list[torch.Tensor], send: list[torch.Tensor]) -> RailWork:
        if receive[0].is_cuda:
            raise UnsupportedError(f"{self.name}: MPI rails carry CPU tensors; CUDA tensors cross by NCCL")
        self._calls += 1
        tag = self._calls & 0x7FFF  # the largest tag that every MPI has
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        requests = [(d, self._comm.Irecv(receive[d].numpy(), d, tag)) for d in others if receive[d].numel()]
        requests += [(d, self._comm.Isend(send[d].numpy(), d, tag)) for d in others if send[d].numel()]
        return _MpiWork(self, op, requests, (receive, send))

    def tell(self, word: bytes, longer_s: float = 0.0) -> Callable[[], list[bytes]]:
        return tell_through(self, word, longer_s)

    def close(self, last_word: bytes = b"") -> None:
        if not self.closed:
            self.closed = True
            self._comm.Free()


class _MpiWork(RailWork):
    def __init__(self, rail: MpiRail, op: str, requests: list[tuple[int, Any]], keep: object) -> None:
        self._rail, self._op, self._requests, self._keep = rail, op, requests, keep
        self._start = time.monotonic()

    def wait(self, longer_s: float = 0.0) -> None:
        while self._requests:
            self._requests = [(place, request) for place, request in self._requests if not request.Test()]
            waited = time.monotonic() - self._start
            if self._requests and waited > self._rail.timeout_s + longer_s:
                raise self._rail.lost(self._requests[0][0], self._op, waited, "")
            if self._requests:
                time.sleep(_POLL_S)
        self._keep = None


def mpi_rails(world: Any, topology: Topology, timeout_s: float) -> dict[int, Rail]:
    """Make this rank's rails over MPI, by rail index. Collective over the ranks of the topology.

    Args:
        world: a communicator of mpi4py whose ranks are the topology's.
        timeout_s: how long a call waits for a peer.
    """
    rank, everyone, rails = world.Get_rank(), world.Get_group(), dict[int, Rail]()
    for index, ranks in enumerate(topology.rails()):
        if rank in ranks:
            comm = world.Create_group(everyone.Incl(ranks), index)
            rails[index] = MpiRail(comm, ranks, timeout_s, f"rail {index}")
    everyone.Free()
    return rails


__all__ = ["MpiRail", "mpi_rails"]
