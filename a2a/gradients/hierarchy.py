"""The ways that gradients take: shared memory inside a domain, rails between domains. One way a leg.

    domain_reduce   reduce-scatter inside the domain: each rank holds the sum of the shards of its rails
    rail_reduce     all-to-all on the rail: each piece goes to the domain that owns it, which sums the domains' in order
    rail_gather     all-gather on the rail
    domain_gather   all-gather inside the domain

Every leg has a communicator or a rail of its own, so that those of several buckets are under way at once and yet each
way carries them in one order on all ranks. Among the ranks of one domain the only leg is an all-reduce, or a
reduce-scatter where every rank wants its own part alone.

The order of sums: inside a domain in rank order, rounded once to the gradients' dtype; between domains in domain order,
one true division by the number of ranks for the mean, rounded once. All of it is in float32 (float64 for float64),
starting from the first term. A rank takes its own domain's term as it is and the others' as their wire format has left
them. float16 gradients are averaged inside the domain instead of summed, so that nothing overflows, and multiplied with
the domain's number of ranks when domains are summed. In one domain: the sum in rank order, one division, rounded once.
Where GPUs of a domain can't reach each other's memory, the domain's sums are NCCL's, in its order.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from a2a.comm import (
    Communicator,
    _gpu_uuid,
    _group_exchange,
    _group_timeout,
    _place_in_job,
    _store_of,
    store_exchange,
)
from a2a.config import config
from a2a.errors import A2AError, MismatchError, PeerTimeoutError, UnsupportedError
from a2a.gradients.layout import Layout
from a2a.kernels.cpu import Cause
from a2a.topology import Topology, resolve
from a2a.transport.rail import Rail, torch_rails

_log = logging.getLogger("a2a")
_MOST_TOLD = 600  # characters of an error that others are told
_SAME = 40  # characters by which one cause is known again in two errors
_serials: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


class Hierarchy:
    """The communicators and rails of one rank. Made by all ranks of a group together; each closes its own.

    Attributes:
        rank, world_size: of the group.
        topology, layout: who shares memory, and how tensors are cut.
        rails: those of `rail_reduce` and those of `rail_gather`, by rail index.
    """

    def __init__(self, group: Any, topology: Topology | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.rails: dict[str, dict[int, Rail]] = {"rail_reduce": {}, "rail_gather": {}}
        self._comms: dict[str, Communicator] = {}
        self._lock, self._closed, self._pid = threading.Lock(), False, os.getpid()
        self._timeout_s = 0.0 if group is None else config().timeout_s or _group_timeout(group, device)
        self._store: Any = None
        self._engine: Any = None  # of the domain, which its communicators hold weakly
        if topology is None:
            topology = Topology.detect() if self.world_size == 1 else self._resolved()
        elif topology.world_size != self.world_size:
            raise ValueError(
                f"GradientReducer: the topology has {topology.world_size} ranks, the group has {self.world_size}; pass "
                f"topology.restrict(ranks of the group)"
            )
        self.topology, self.layout = topology, Layout.of(topology, self.rank)
        if self.world_size == 1:
            return
        try:
            self._open(topology)
        except BaseException:
            self.close()
            raise

    def _resolved(self) -> Topology:
        """What A2A_TOPOLOGY names or detection finds."""
        prefix = f"{self._prefix()}/topology"
        exchange = _group_exchange(
            self.group, _store_of(self.group), prefix, self.rank, self.world_size, self._timeout_s
        )
        place, gpu = _place_in_job(self.group), _gpu_uuid(self.device)
        return resolve(exchange, self.rank, self.world_size, config().topology, **place, gpu_uuid=gpu)

    def _prefix(self) -> str:
        return f"a2a/gradients/{next(_serials.setdefault(self.group, itertools.count()))}"

    def _open(self, topology: Topology) -> None:
        prefix = self._prefix()
        self._store, self._failure_key = _store_of(self.group), f"{prefix}/failure"
        if self._store is None:
            raise UnsupportedError(
                "GradientReducer: the group has no key-value store through which its ranks could meet; use a group of "
                "torch.distributed.init_process_group or new_group"
            )
        ranks = topology.domain_of(self.rank).ranks
        if len(ranks) > 1:
            for leg in ("domain_reduce", "domain_gather"):
                self._comms[leg] = self._domain(topology, f"{prefix}/{self.layout.domain}/{leg}")
        if self.spans_domains:
            for leg in self.rails:
                where = f"{prefix}/{leg}"
                self.rails[leg] = torch_rails(self._store, topology, self.rank, self.device, self._timeout_s, where)

    def _domain(self, topology: Topology, prefix: str) -> Communicator:
        """A communicator of this rank's domain; if possible without an engine, whose sums have their own order."""
        ranks = topology.domain_of(self.rank).ranks
        place, inner = self.layout.place, topology.restrict(ranks)

        def make(prefix: str, engine: Any = None, refused: str = "") -> Communicator:
            exchange = store_exchange(self._store, place, len(ranks), self._timeout_s, prefix, names=ranks)
            options: dict[str, Any] = {"topology": inner, "timeout_s": self._timeout_s, "device": self.device}
            return Communicator(exchange, place, len(ranks), group=engine, refused=refused, **options)

        try:
            comm = make(prefix)
            comm.require_transport("GradientReducer")
            return comm
        except UnsupportedError as error:  # on all ranks of the domain alike
            if self.device.type != "cuda":
                raise
            _log.warning("a2a: NCCL reduces gradients inside the domain of ranks %s: %s", ranks, error)
            self._engine = self._engine or _nccl_group(self.group, ranks)
            return make(f"{prefix}/engine", self._engine, str(error))

    @property
    def spans_domains(self) -> bool:
        return self.layout.num_domains > 1

    @property
    def domain_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's domain, as the group counts them."""
        return self.topology.domain_of(self.rank).ranks

    @property
    def bytes_sent(self) -> int:
        """To other domains so far."""
        return sum(rail.bytes_sent for rails in self.rails.values() for rail in rails.values())

    def comm(self, leg: str) -> Communicator | None:
        """The communicator of a leg inside the domain; None where this rank is alone in it."""
        return self._comms.get(leg)

    def own(self, release: Callable[[], None]) -> None:
        """Call `release` before any of the communicators closes."""
        for comm in self._comms.values():
            comm.own(release)

    def close(self) -> None:
        """Leave. Local and idempotent; peers that still wait for this rank are told."""
        if self._closed or self.forked:
            return
        self._closed = True
        for rails in self.rails.values():
            for rail in rails.values():
                rail.close()
        for comm in self._comms.values():
            comm.close()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made it, and owns nothing of it."""
        return self._pid != os.getpid()

    # ---- failures

    def check(self) -> None:
        """Raise the first failure of this rank's domain, if there was one. Does not wait."""
        for comm in self._comms.values():
            comm.check()

    def broke(self, leg: str, what: str, error: BaseException) -> Exception:
        """Let everybody know that this rank can't go on, so that no leg of any rank waits any longer.

        Returns: the error to raise here, in the group's ranks.
        """
        with self._lock:
            told = self._in_group_ranks(leg, what, error)
            first = self._first_cause(str(told))
            for comm in self._comms.values():
                fail = getattr(comm.transport, "fail", None)
                if fail is not None and comm.handle:  # of no effect on a communicator that has failed already
                    fail(Cause.REFUSED, str(told)[:_MOST_TOLD])
            for rails in self.rails.values():
                for rail in rails.values():
                    rail.close()
        if first.partition(": ")[2][:_SAME] not in str(told) and isinstance(told, A2AError):
            told.args = (f"{str(told).rstrip('. ')}. What failed first: {first}",)
        return told

    def _in_group_ranks(self, leg: str, what: str, error: BaseException) -> Exception:
        """The error with the place where it happened; those of a domain's communicator count the domain's ranks."""
        domain = self.domain_ranks if leg.startswith("domain") else tuple(range(self.world_size))

        def rank(number: int) -> int:
            return domain[number] if 0 <= number < len(domain) else number

        said = re.sub(r"\b([Rr]ank) (\d+)\b", lambda found: f"{found[1]} {rank(int(found[2]))}", str(error))
        where = f"GradientReducer on rank {self.rank}, {leg} of {what}: {said}"
        if isinstance(error, PeerTimeoutError):
            return PeerTimeoutError(where, rank=self.rank, peer=rank(error.peer), op=error.op, cause=error.cause)
        if isinstance(error, MismatchError):
            return MismatchError(where, rank=self.rank, peer=rank(error.peer), op=error.op)
        if isinstance(error, A2AError) or not isinstance(error, Exception):
            return A2AError(where)
        return error

    def _first_cause(self, mine: str) -> str:
        """What the first rank that failed said, if it was another one."""
        own = mine[:_MOST_TOLD]
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone with the rank that kept it
            first = self._store.compare_set(self._failure_key, "", own).decode(errors="replace")
            return "" if first == own else str(first)
        return ""


def _nccl_group(group: Any, ranks: tuple[int, ...]) -> Any:
    """A process group of some ranks of a group, made by these alone."""
    everyone = dist.get_process_group_ranks(group)
    return dist.new_group([everyone[rank] for rank in ranks], use_local_synchronization=True, backend="nccl")
