"""A communicator: one process group's topology, transport and buffers, and their owner.

Explicit communicators (`communicator()`) are always new and are closed by who made them. The implicit one of a process
group is made with the group's first a2a call and goes when the group goes; it is found through a weak map keyed by the
group.

Set-up needs one thing of the group: its key-value store, through which the ranks find each other. So a group that has done
nothing yet will do, a subgroup too, and no collective of another engine runs. Where a group has no store that can be
reached, its own `all_gather_object` serves.
"""

from __future__ import annotations

import atexit
import datetime
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from a2a.config import config
from a2a.cost_cache import agreed
from a2a.errors import A2AError, PeerTimeoutError, UnsupportedError
from a2a.kernels import cpu
from a2a.kernels.prepared import prepared
from a2a.topology import Topology, resolve
from a2a.transport import candidates, why_not
from a2a.transport.base import Exchange, Transport, Wiring

if TYPE_CHECKING:
    from a2a.domains import Domains
    from a2a.work import Work

_log = logging.getLogger("a2a")

DEFAULT_TIMEOUT_S = 1800.0  # where neither the user nor the group says


class Communicator:
    """What the ranks of one group share. Made by all of them together; each closes its own.

    Attributes:
        rank, world_size: this rank's place in the group, and the number of ranks.
        topology: who shares memory with whom.
        costs: what primitives take here: measured, where all ranks hold the same table, or built in.
        transport: the shared memory, or None where no transport serves this topology (then `why_no_transport` says why
            and every op runs on torch.distributed).
        timeout_s: how long a rank waits for a peer.
        device: where the tensors are that it serves; `device_type` is its kind.
        group: the ProcessGroup that it stands for, or None.
        store: the group's key-value store, which rails between domains are made through, or None.
        deterministic: whether sums are taken in rank order wherever a2a takes them.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        world_size: int,
        *,
        topology: Topology | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        group: Any = None,
        device: Any = "cpu",
        refused: str = "",
        store: Any = None,
        prefix: str = "a2a",
        deterministic: bool = True,
    ) -> None:
        self.deterministic = deterministic
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.device = torch.empty(0, device=device).device  # with its index, where there is one
        self.device_type = self.device.type
        self._group = None if group is None else weakref.ref(group)
        self.store, self._prefix = store, prefix
        self._domains: Domains | None = None
        self.topology = topology or resolve(
            exchange, rank, world_size, config().topology, **_place_in_job(group), gpu_uuid=_gpu_uuid(self.device)
        )
        if self.topology.world_size != world_size:
            raise ValueError(
                f"communicator: the topology has {self.topology.world_size} ranks, the group has {world_size}; "
                f"pass topology.restrict(ranks of the group)"
            )
        self.costs = agreed(exchange, rank, self.topology)
        self.transport: Transport | None = None
        self.why_no_transport: dict[str, str] = {}
        self._closed = False
        self._ok: torch.Tensor | None = None
        self._inflight: set[Work] = set()
        self._completions: queue.SimpleQueue[Work | None] | None = None
        self._owned: list[Callable[[], None]] = []
        self.plans: dict[Any, Any] = {}  # of each op, once made
        self.prepared = prepared(self.device_type, rank)  # calls that were made before; void after a renewal
        self.repeated: dict[Any, Any] = {}  # those of all_reduce_rms_norm, by what tells them apart; void, too
        self.handed_over: dict[str, int] = {}
        for transport in candidates():
            reason = self.why_not(transport, self.topology) or refused or None
            if reason is None:
                self.transport = transport.open(Wiring(exchange, rank, self.topology, timeout_s, self.device))
                self.transport.on_renewal(self.prepared.clear)
                self.transport.on_renewal(self.repeated.clear)
                break
            self.why_no_transport[transport.name] = reason
        self.handle = self.transport.handle if self.transport else 0
        _open.add(self)

    @property
    def group(self) -> Any:
        return None if self._group is None else self._group()

    # ---- what users call

    def empty(self, *shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a symmetric tensor: one that peers can load and store directly. Collective.

        Args:
            shape: sizes, or one sequence of them; equal on all ranks.
            dtype: default: torch's default dtype; equal on all ranks.
        Returns: an uninitialised tensor. Its memory is used again once the tensors of all ranks are gone and `empty` is
            called again; tensors may outlive the communicator.
        Raises:
            MismatchError: ranks ask for different shapes or dtypes.
            UnsupportedError: no transport here, or no memory.
        Cost: a few hundred microseconds and one touch of every page. Not for the inner loop.
        Like: torch.distributed._symmetric_memory.empty.
        """
        transport = self.require_transport("comm.empty")
        sizes_given: tuple[Any, ...] = shape
        if len(shape) == 2 and isinstance(shape[1], torch.dtype):
            sizes_given, dtype = shape[:1], shape[1]
        dtype = torch.get_default_dtype() if dtype is None else dtype
        try:
            sizes = _sizes(sizes_given)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"comm.empty: dtype must be a torch.dtype; got {dtype!r}")
        except (ValueError, TypeError) as error:
            transport.refuse_alloc(f"{type(error).__name__}: {error}")
            raise
        num_bytes = math.prod(sizes) * dtype.itemsize
        buffer = transport.alloc(num_bytes, f"comm.empty({list(sizes)}, {_name(dtype)})")
        flat: torch.Tensor = transport.tensor(buffer)
        return flat[:num_bytes].view(dtype).view(sizes)

    def stats(self) -> dict[str, Any]:
        """Counters since the start: collectives, bytes per way, and for each peer how often and how long it was late."""
        self.check_open("stats")
        told = self.transport.stats() if self.transport else {"transport": None, "reasons": dict(self.why_no_transport)}
        across = {} if self._domains is None else {"domains": self._domains.stats()}
        return {**told, **across, "rank": self.rank, "handed_over": dict(self.handed_over)}

    def check(self) -> None:
        """Raise the communicator's first failure, if there was one on any rank. Does not wait for calls that still run."""
        self.check_open("check")
        if self.transport and self.transport.told():
            self.transport.raise_failure(cpu.FAILED, "check")
        if self._domains is not None:
            self._domains.check()

    @property
    def ok(self) -> torch.Tensor:
        """A 0-dimensional int32 tensor on the device: 1 until the first failure of any rank, then 0.

        Reading it costs a load.
        """
        if self._ok is None:
            self.check_open("ok")
            none_fails = torch.ones((), dtype=torch.int32, device=self.device)
            self._ok = self.transport.ok_word() if self.transport else none_fails
        return self._ok

    def close(self) -> None:
        """Leave the communicator. Local and idempotent: peers that still wait for this rank are told. Tensors stay valid."""
        if self._closed:
            return
        self._closed = True
        self.prepared.clear()  # they name the transport's handle
        self.repeated.clear()
        for release in reversed(self._owned):
            release()
        if self.transport:
            self.transport.close()
        for work in list(self._inflight):
            work._settle(1.0)  # the progress thread has ended: every result is there
        if self._completions is not None:
            self._completions.put(None)
        self._ok = None
        if self.transport and not self._inflight:
            self.transport.free()
        self.handle = 0

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = self.transport.name if self.transport else "no transport"
        state = "closed" if self._closed else name
        return f"Communicator(rank={self.rank}, world_size={self.world_size}, {state})"

    # ---- what ops call

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self, op: str) -> None:
        if self._closed:
            raise A2AError(f"{op}: this communicator is closed on rank {self.rank}; make a new one")

    @property
    def domains(self) -> Domains:
        """This rank's domain and rails, where the topology has several. Made now, collectively, if nobody has asked yet."""
        if self._domains is None:
            from a2a.domains import Domains

            self.check_open("domains")
            _not_while_capturing(self.device)
            self._domains = Domains(self, self.store, self._prefix)
            self.own(self._domains.close)
        return self._domains

    def why_not(self, transport: type[Transport], topology: Topology) -> str | None:
        """Why this transport can't serve `topology`, which may be that of one of its domains, or None."""
        return why_not(transport, topology, self.device_type)

    def broken(self) -> None:
        """An operation across domains has failed: `ok` tells it."""
        if not self._closed:
            self.ok.fill_(0)

    def require_transport(self, op: str) -> Any:
        self.check_open(op)
        if self.transport is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.why_no_transport.items())
            raise UnsupportedError(f"{op}: no transport serves this group ({reasons}). See `a2a doctor`")
        return self.transport

    def raise_failure(self, result: int, op: str, refusal: tuple[int, str] | None = None) -> None:
        """Raise the error behind a kernel's result; `refusal`: (peer, why), where it isn't the last one of a peer."""
        if self._closed or self.transport is None:
            raise A2AError(f"{op}: this communicator is closed on rank {self.rank}; make a new one")
        self.transport.raise_failure(result, op, refusal)

    def own(self, release: Callable[[], None]) -> None:
        """Call `release` when the communicator closes, last in first out."""
        self._owned.append(release)

    def keep(self, work: Work) -> None:
        """Hold on to asynchronous work, and through it to its tensors, until it is done."""
        if len(self._inflight) >= 32:
            for earlier in list(self._inflight):
                earlier._settle(0.0)  # forgets itself when done
        self._inflight.add(work)

    def forget(self, work: Work) -> None:
        self._inflight.discard(work)

    def complete_in_background(self, work: Work) -> None:
        """Resolve the work's future when it is done, on a thread of this communicator."""
        if self._completions is None:
            self._completions = queue.SimpleQueue()
            threading.Thread(target=_complete, args=(self._completions,), name="a2a futures", daemon=True).start()
        self._completions.put(work)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            try:
                self.close()
            except Exception:  # the interpreter may be half gone
                _log.debug("communicator: close at collection failed", exc_info=True)


def _complete(works: queue.SimpleQueue[Work | None]) -> None:
    while (work := works.get()) is not None:
        while not work._settle(0.05):
            pass
        work._resolve_future()
        del work


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def open_communicators() -> list[tuple[Communicator, list[int]]]:
    """The communicators of this process that are open, each with its ranks as the whole job counts them."""
    found = []
    for comm in list(_open):
        if not comm._closed:
            group = None if comm._group is None else comm._group()
            ranks = _place_in_job(group).get("job_ranks", range(comm.world_size))
            found.append((comm, list(ranks)))
    return found


@atexit.register
def _close_all() -> None:
    """Peers that still wait are told before the interpreter falls apart."""
    for comm in list(_open):
        comm.close()


# ---------------------------------------------------------------- from a process group to a communicator


def communicator(
    group: Any = None,
    topology: Topology | None = None,
    timeout: Any = None,
    device: Any = "cpu",
    deterministic: bool = True,
) -> Communicator:
    """Make a new communicator for `group`. Collective over the group; close it, or use it as a context manager.

    Waits for the GPU and can't be called while a CUDA graph is being captured.

    Args:
        group: a ProcessGroup; None: the default one.
        topology: instead of what A2A_TOPOLOGY names or detection finds; of the group's ranks.
        timeout: seconds or a timedelta that a rank waits for a peer; default: A2A_TIMEOUT_S, else the group's own.
        device: where its tensors are: "cpu", "cuda" (the current one) or a torch.device.
        deterministic: False: sums may be taken in another order than that of ranks where that is faster, which only an
            NVLink switch does. Equal on all ranks.
    Raises:
        PeerTimeoutError: a rank of the group did not come; names it.
        UnsupportedError: this machine refuses what the transport needs; says what.
    """
    return _made(_resolve_group(group, "communicator"), topology, timeout, device, deterministic=deterministic)


def _made(
    group: Any, topology: Topology | None, timeout: Any, device: Any, refused: str = "", deterministic: bool = True
) -> Communicator:
    _not_while_capturing(torch.device(device))
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if seconds is not None and not seconds > 0:
        raise ValueError(f"communicator: timeout={timeout} must be positive")
    limit = seconds or config().timeout_s or _group_timeout(group, device)
    serial = next(_serials.setdefault(group, itertools.count()))
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    store, prefix = _store_of(group), f"a2a/{serial}"
    exchange = _group_exchange(group, store, prefix, rank, world_size, limit)
    return Communicator(exchange, rank, world_size, topology=topology, timeout_s=limit, group=group, device=device,
                        refused=refused, store=store, prefix=prefix, deterministic=deterministic)  # fmt: skip


def _not_while_capturing(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a2a: a communicator can't be made while a CUDA graph is captured, as memory is shared and the GPU waited for; "
            "make it, or have the group's first a2a call on CUDA tensors, before the capture"
        )


def implicit(group: Any, op: str = "a2a", device_type: str = "cpu", device: Any = None) -> Communicator:
    """The communicator that belongs to `group` and kind of device; made now (collectively) if there is none.

    Where the machine refuses what a transport needs, which all ranks find out together, it has none, and torch.distributed
    serves; a warning says so once, `stats()` always.

    Args:
        op: for errors.
        device: which one, where it isn't the current one.
    """
    group = _resolve_group(group, op)
    key = implicit_key(group, device_type)
    known = _implicit.get(key)
    if known is not None and known[0]() is group and not known[1]._closed:
        return known[1]
    try:
        comm = _made(group, None, None, device or device_type)
    except UnsupportedError as error:
        _log.warning("a2a: torch.distributed serves %s tensors of this group instead: %s", device_type, error)
        comm = _made(group, None, None, device or device_type, refused=str(error))
    _implicit[key] = (weakref.ref(group, lambda _: _forget(key)), comm)
    return comm


def implicit_key(group: Any, device_type: str) -> Any:
    """A group has one implicit communicator for each kind of device; that of CPU tensors has the shortest key."""
    return id(group) if device_type == "cpu" else (id(group), device_type)


def _forget(key: Any) -> None:
    known = _implicit.pop(key, None)
    if known is not None and known[0]() is None:
        known[1].close()


# The implicit communicators by `implicit_key`, each with a weak reference that proves the id and drops the entry with its
# group: a lookup by id costs a fifth of one in a WeakKeyDictionary, and every call makes one.
_implicit: dict[Any, tuple[weakref.ref[Any], Communicator]] = {}
_serials: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


def _resolve_group(group: Any, op: str) -> Any:
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                f"{op}: torch.distributed is not initialised; call torch.distributed.init_process_group first"
            )
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: this rank is not in the group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: group must be a torch.distributed.ProcessGroup or an a2a.Communicator; got {type(group)}"
        )
    return group


def _group_timeout(group: Any, device: Any) -> float:
    try:
        backend = group._get_backend(torch.device(device))
        timeout: datetime.timedelta = backend.options._timeout
        return timeout.total_seconds()
    except (AttributeError, RuntimeError, NotImplementedError):
        return DEFAULT_TIMEOUT_S


def _gpu_uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _place_in_job(group: Any) -> dict[str, Any]:
    if group is None or group not in c10d._world.pg_group_ranks:
        return {}
    return {"job_ranks": dist.get_process_group_ranks(group), "job_size": dist.get_world_size()}


def _store_of(group: Any) -> Any:
    """The group's key-value store, or None where it can't be reached."""
    store = getattr(group, "_a2a_store", None)
    if store is None and group in c10d._world.pg_map:
        store = c10d._world.pg_map[group][1]
    return store


def _group_exchange(group: Any, store: Any, prefix: str, rank: int, world_size: int, timeout_s: float) -> Exchange:
    if store is not None:
        return store_exchange(store, rank, world_size, timeout_s, prefix)

    def exchange(tag: str, payload: bytes) -> list[bytes]:
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, payload, group=group)
        return everyone

    return exchange


def store_exchange(
    store: Any, rank: int, world_size: int, timeout_s: float, prefix: str = "a2a", names: Sequence[int] | None = None
) -> Exchange:
    """An all-gather of small payloads through a key-value store of torch.distributed.

    `names`: what errors call the ranks, where it isn't their numbers.

    A rank removes its payload of a round once the next round is complete, when everybody must have read it: a store that
    outlives its group (elastic restarts) holds nothing that a later communicator could take for its own.

    Raises (when called):
        PeerTimeoutError: a rank's payload did not come in time; names the rank.
    """
    rounds = itertools.count()
    earlier: list[str] = []
    called = range(world_size) if names is None else names

    def exchange(tag: str, payload: bytes) -> list[bytes]:
        key = f"{prefix}/{next(rounds)}/{tag}"
        store.set(f"{key}/{rank}", payload)
        deadline = time.monotonic() + timeout_s
        everyone = []
        for peer in range(world_size):
            left = max(0.01, deadline - time.monotonic())
            try:
                store.wait([f"{key}/{peer}"], datetime.timedelta(seconds=left))
            except (RuntimeError, ValueError) as error:
                raise PeerTimeoutError(
                    f"rank {called[rank]} waited {timeout_s:.1f} s for rank {called[peer]} to make its a2a communicator "
                    f"(step {tag}). "
                    f"Communicators are collective: every rank of the group makes them, in the same order",
                    rank=called[rank],
                    peer=called[peer],
                    op="communicator",
                ) from error
            everyone.append(bytes(store.get(f"{key}/{peer}")))
        while earlier:
            store.delete_key(earlier.pop())
        earlier.append(f"{key}/{rank}")
        return everyone

    return exchange


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    values = shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape
    try:
        sizes = tuple(n.__index__() for n in values)
    except (AttributeError, TypeError):
        raise TypeError(f"comm.empty: shape must be integers or one sequence of them; got {shape}") from None
    if any(n < 0 for n in sizes):
        raise ValueError(f"comm.empty: negative size in {sizes}")
    return sizes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
