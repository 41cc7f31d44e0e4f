"""Detection of hosts: which ranks can share memory, proven rather than guessed. `gpu.py` divides them further by GPUs.

Host names and `/dev/shm` are shared between containers, and a cloned virtual machine keeps its boot id, so equal facts prove
nothing. Ranks with equal hints (kernel's boot id, network namespace) therefore try to reach each other through a Unix
socket in the abstract name space, which exists once per kernel and network namespace: who reaches it is on the same kernel.

    1  facts     every rank tells its facts; ranks with equal hints are candidates for one domain
    2  offers    every candidate but the last opens a door: a socket under a random 128-bit name, with two secrets
    3  verdicts  every candidate knocks at the lower ranks' doors, lowest first, until one admits it, and tells the result

A knock shows one secret and must be answered with the other, and both sides check the other's user id (SO_PEERCRED). Ranks
admitted by the same rank are one domain, kept by its lowest rank. A rank that reaches nobody is a domain of its own, and so
is one that reaches only a rank which is itself in a lower rank's domain: that is odd, so nothing is concluded from it.

Decisions. Every candidate opens a door at once, rather than the lowest alone and then the lowest of those left: a hundred
clones of one machine take three exchanges, not a hundred rounds. Facts that can't be read (no boot id, no namespaces: some
sandboxes) do not separate ranks, since the sockets decide anyway; sockets that are denied do. Which facts separated whom is
kept in `Topology.notes`, the same on all ranks. Waiting is bounded: a rank knocks for at most `timeout_s` in all, however
many doors hang; how long an exchange may take is up to the caller's `exchange`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from a2a.errors import MismatchError
from a2a.topology.gpu import GpuFacts, assemble, gpu_facts
from a2a.topology.host import HostFacts, cores_together, local_facts
from a2a.topology.model import Domain, Topology
from a2a.topology.presets import CPU_SCALE_OUT, CPU_SCALE_UP

# A collective all-gather of small payloads: all ranks call it with the same tag and get every rank's payload, in rank order.
Exchange = Callable[[str, bytes], list[bytes]]

_T = TypeVar("_T")
_Refusals = dict[str, list[int]]  # reason -> the ranks it holds for

_log = logging.getLogger("a2a")


def detect(
    exchange: Exchange | None,
    rank: int,
    world_size: int,
    *,
    facts: HostFacts | None = None,
    gpu: GpuFacts | None = None,
    timeout_s: float = 10.0,
) -> Topology:
    """Group the ranks into domains: proven to be on one kernel, as one user, or GPUs that reach each other. Collective.

    Args:
        exchange: the all-gather to use; may be None for one rank. Called with the tags "topology/facts" and, if any two
            ranks look alike, "topology/offers" and "topology/verdicts"; for GPUs also "topology/gpus".
        rank, world_size: this rank, and the number of ranks.
        facts: instead of this host's own; for tests.
        gpu: this rank's GPU, if the topology shall be that of GPUs; on every rank or on none.
        timeout_s: how long this rank tries to reach others; what does not answer by then is another domain.
    Returns:
        The same topology on every rank, with the presets' or modelled links (measure them for better). `notes` says why
        ranks that might have shared a domain do not.
    Raises:
        ValueError: rank, world_size or exchange do not fit together.
        MismatchError: a rank sent what this version of a2a can't read.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"Topology.detect: rank {rank} of world_size {world_size}; expected 0 <= rank < world_size")
    facts = facts or local_facts()
    if world_size == 1:
        return _assemble([facts], [0], []) if gpu is None else assemble([gpu], [0], [facts.hostname], [])
    if exchange is None:
        raise ValueError(f"Topology.detect: {world_size} ranks need an exchange to find each other; got None")
    everyone = [
        _read_payload(HostFacts.from_json, payload, rank, peer)
        for peer, payload in enumerate(_gather(exchange, "topology/facts", facts.to_json().encode(), world_size))
    ]
    notes = _notes_on_hints(everyone)
    groups: dict[tuple[str, str], list[int]] = {}
    for peer, theirs in enumerate(everyone):
        groups.setdefault(theirs.hint, []).append(peer)
    hosts = list(range(world_size))
    if len(groups) < world_size:  # the same on every rank, so all take part in the exchanges or none
        hosts, refusals = _prove(exchange, rank, everyone, groups[facts.hint], timeout_s)
        for peer, reasons in enumerate(refusals):
            name = f"rank {peer} ({everyone[peer].hostname}, pid {everyone[peer].pid})"
            lines = [f"{name} cannot share memory with {_ranks(others)}: {why}" for why, others in reasons.items()]
            notes += lines
            if peer == rank:
                for line in lines:
                    _log.warning("topology: %s", line)
    if gpu is None:
        topology = _assemble(everyone, hosts, notes)
    else:
        gpus = [
            _read_payload(GpuFacts.from_json, payload, rank, peer)
            for peer, payload in enumerate(_gather(exchange, "topology/gpus", gpu.to_json().encode(), world_size))
        ]
        topology = assemble(gpus, hosts, [theirs.hostname for theirs in everyone], notes)
    if rank == 0:
        for note in topology.notes:
            _log.info("topology: %s", note)
    return topology


def resolve(
    exchange: Exchange | None,
    rank: int,
    world_size: int,
    override: str | None = None,
    *,
    job_ranks: Sequence[int] | None = None,
    job_size: int | None = None,
    gpu_uuid: str | None = None,
    timeout_s: float = 10.0,
) -> Topology:
    """Return the topology that the user asks for, or else the detected one. Collective.

    Args:
        exchange, rank, world_size, timeout_s: as in `detect`; also called with the tag "topology/source".
        override: a file or preset (the value of A2A_TOPOLOGY), or None for detection. It describes the whole job.
        job_ranks: where the ranks of this group are a part of a larger job: their ranks there, in group order.
        job_size: the number of ranks of that job; `world_size` if not given.
        gpu_uuid: of this rank's GPU, if GPUs shall be detected rather than hosts.
    Raises:
        ValueError: the override can't be loaded on some rank, or has another number of ranks than the job.
        MismatchError: the ranks were given different overrides, or only some were.
    """
    loaded, problem = None, ""
    if override is not None:
        size = world_size if job_size is None else job_size
        try:
            loaded = Topology.load(override)
            if loaded.world_size != size:
                problem = f"A2A_TOPOLOGY={override} is for {loaded.world_size} ranks, but the job has {size}"
            elif job_ranks is not None:
                loaded = loaded.restrict(job_ranks)
        except ValueError as error:
            problem = f"A2A_TOPOLOGY={override}: {error}"
    if world_size > 1:
        if exchange is None:
            raise ValueError(f"topology: {world_size} ranks need an exchange to agree on a topology; got None")
        digest = hashlib.sha256(loaded.to_json().encode()).hexdigest() if loaded and not problem else ""
        mine = json.dumps([override, digest, problem]).encode()
        sources = [
            _read_payload(json.loads, payload, rank, peer)
            for peer, payload in enumerate(_gather(exchange, "topology/source", mine, world_size))
        ]
        for peer, (_, _, theirs) in enumerate(sources):
            if theirs:  # every rank raises, so nobody goes on alone
                raise ValueError(f"topology: rank {peer}: {theirs}")
        for peer, (name, theirs, _) in enumerate(sources):
            if theirs != sources[0][1]:
                raise MismatchError(
                    f"topology: rank 0 has {_named(sources[0][0])} and rank {peer} has {_named(name)}, which differ; "
                    f"set A2A_TOPOLOGY alike on all ranks, to a preset or to equal files",
                    rank=rank,
                    peer=peer if rank == 0 else 0,
                    op="topology",
                )
    if problem:
        raise ValueError(f"topology: {problem}")
    if loaded is not None:
        return loaded
    return detect(
        exchange, rank, world_size, gpu=None if gpu_uuid is None else gpu_facts(gpu_uuid), timeout_s=timeout_s
    )


def _named(override: str | None) -> str:
    return "no A2A_TOPOLOGY" if override is None else f"A2A_TOPOLOGY={override}"


def _gather(exchange: Exchange, tag: str, payload: bytes, world_size: int) -> list[bytes]:
    payloads = exchange(tag, payload)
    if len(payloads) != world_size:
        raise ValueError(f"topology: the exchange returned {len(payloads)} payloads for {world_size} ranks ({tag})")
    return payloads


def _read_payload(parse: Callable[[bytes], _T], payload: bytes, rank: int, peer: int) -> _T:
    try:
        return parse(payload)
    except (ValueError, TypeError, KeyError) as error:
        raise MismatchError(
            f"topology: rank {rank} can't read what rank {peer} sent ({error}); install the same a2a on all ranks",
            rank=rank,
            peer=peer,
            op="topology",
        ) from error


def _prove(
    exchange: Exchange, rank: int, everyone: Sequence[HostFacts], candidates: Sequence[int], timeout_s: float
) -> tuple[list[int], list[_Refusals]]:
    """Find out, for every rank, which rank's host it is proven to be on (its own if no other), and who refused it why."""
    uid, world_size = everyone[rank].uid, len(everyone)
    door: _Door | None = None
    offer = {"closed": "it had no reason to open a socket"}
    if rank != candidates[-1]:  # nobody knocks at the last one's
        try:
            door = _Door(uid, backlog=world_size)
            offer = door.offer
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread to be had
            offer = {"closed": f"it could not open a Unix socket ({error})"}
    try:
        offers = [
            _read_payload(_parse_offer, payload, rank, peer)
            for peer, payload in enumerate(_gather(exchange, "topology/offers", json.dumps(offer).encode(), world_size))
        ]
        host, refusals = rank, _Refusals()
        deadline = time.monotonic() + timeout_s
        for other in candidates[: candidates.index(rank)]:
            # Half of what is left, so that one door that hangs leaves time for the next; a refusal takes none.
            reason = _knock(offers[other], uid, max((deadline - time.monotonic()) / 2, 0.001))
            if reason is None:
                host = other
                break
            refusals.setdefault(reason, []).append(other)
        verdict = json.dumps([host, refusals]).encode()
        payloads = _gather(exchange, "topology/verdicts", verdict, world_size)
    finally:
        if door is not None:  # everyone has knocked, or this rank gives up
            door.close()
    verdicts = [_read_payload(_parse_verdict, payload, rank, peer) for peer, payload in enumerate(payloads)]
    hosts, all_refusals = [host for host, _ in verdicts], [refusals for _, refusals in verdicts]
    for peer, (host, _) in enumerate(verdicts):
        if verdicts[host][0] != host:
            hosts[peer] = peer
            why = f"it is reachable, but joined rank {verdicts[host][0]}, which is not"
            all_refusals[peer].setdefault(why, []).append(host)
    return hosts, all_refusals


def _parse_offer(payload: bytes) -> dict[str, str]:
    return {str(key): str(value) for key, value in dict(json.loads(payload)).items()}


def _parse_verdict(payload: bytes) -> tuple[int, _Refusals]:
    host, refusals = json.loads(payload)
    return int(host), {str(why): [int(rank) for rank in ranks] for why, ranks in dict(refusals).items()}


class _Door:
    """A socket that only processes of this kernel and network namespace can reach, and a thread that admits the entitled."""

    def __init__(self, uid: int, backlog: int) -> None:
        self._uid = uid
        name, self._ask, self._answer = (secrets.token_bytes(16) for _ in range(3))
        self.offer = {"name": name.hex(), "ask": self._ask.hex(), "answer": self._answer.hex()}
        # Whole messages rather than a stream, so that a guest who says half a word holds nobody up.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_address(name.hex()))
            self._listener.listen(backlog)
            self._listener.setblocking(False)
            self._wake, self._stop = socket.socketpair()
            try:
                self._thread = threading.Thread(target=self._serve, name="a2a-topology", daemon=True)
                self._thread.start()
            except BaseException:
                self._wake.close()
                self._stop.close()
                raise
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        self._stop.close()  # wakes the thread
        self._thread.join()
        self._wake.close()

    def _serve(self) -> None:
        poll = select.poll()
        guests: dict[int, socket.socket] = {}
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd == self._wake.fileno():
                        return
                    if fd == self._listener.fileno():
                        guest, _ = self._listener.accept()
                        guest.setblocking(False)
                        guests[guest.fileno()] = guest
                        poll.register(guest, select.POLLIN)
                    else:
                        poll.unregister(fd)
                        with guests.pop(fd) as guest:
                            self._admit(guest)
        except OSError as error:  # out of file descriptors, say; who knocks from now on is told so by a closed socket
            _log.warning("topology: stopped answering the other ranks of this host: %s", error)
        finally:
            for sock in (self._listener, *guests.values()):
                sock.close()

    def _admit(self, guest: socket.socket) -> None:
        try:
            ask = guest.recv(64)
            if _peer_uid(guest) != self._uid:
                guest.send(b"no" + f"it serves user id {self._uid} only".encode())
            elif not hmac.compare_digest(ask, self._ask):
                guest.send(b"no" + b"it was shown a wrong token")
            else:
                guest.send(b"ok" + self._answer)
        except OSError:  # the guest is gone
            return


def _knock(offer: Mapping[str, str], uid: int, limit_s: float) -> str | None:
    """Try to be admitted at another rank's door within `limit_s`; return None, or the reason why not."""
    if "closed" in offer:
        return offer["closed"]
    deadline = time.monotonic() + limit_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            while True:
                door.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    door.connect(_address(offer["name"]))
                    break
                except BlockingIOError:  # its backlog is full: a connect to a Unix socket does not wait for that
                    if time.monotonic() > deadline:
                        return f"its socket was busy for {limit_s:.1f} s"
                    time.sleep(0.001)
            owner = _peer_uid(door)
            if owner != uid:
                return f"it runs as user id {owner}, this rank as {uid}"
            door.send(bytes.fromhex(offer["ask"]))
            reply = door.recv(256)
    except TimeoutError:
        return f"its socket is here, but did not answer within {limit_s:.1f} s"
    except ConnectionRefusedError:
        return "its socket is not here: it is on another machine or in another network namespace"
    except OSError as error:
        return f"no connection to its Unix socket: {error}"
    if reply[:2] == b"ok" and hmac.compare_digest(reply[2:], bytes.fromhex(offer["answer"])):
        return None
    return reply[2:].decode(errors="replace") if reply[:2] == b"no" else "its socket closed or gave a wrong answer"


def _address(name: str) -> str:
    return f"\0a2a-topology-{name}"  # the leading NUL makes it abstract: it is in no file system and vanishes with its owner


def _peer_uid(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _notes_on_hints(everyone: Sequence[HostFacts]) -> list[str]:
    """Say what tells ranks apart without any test, and which facts some system hides."""
    first, notes, members = everyone[0], list[str](), dict[tuple[str, str], list[int]]()
    for rank, facts in enumerate(everyone):
        members.setdefault(facts.hint, []).append(rank)
    for hint, ranks in members.items():
        facts = everyone[ranks[0]]
        if facts.boot_id != first.boot_id:
            why = "another kernel (boot id)"
        elif facts.net_ns != first.net_ns:
            why = "another network namespace on the same kernel"
        else:
            why = ""
        if why:
            notes.append(
                f"{_ranks(ranks)} ({facts.hostname}) cannot share memory with rank 0 ({first.hostname}): {why}"
            )
        if not all(hint):
            hidden = (
                "boot id" if facts.net_ns else "network namespace" if facts.boot_id else "boot id and network namespace"
            )
            notes.append(f"{_ranks(ranks)} ({facts.hostname}): the system hides its {hidden}; only sockets decided")
    return notes


def _assemble(everyone: Sequence[HostFacts], hosts: Sequence[int], notes: Sequence[str]) -> Topology:
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    domains = [
        Domain(tuple(ranks), "cpu_host", everyone[host].hostname, cores=cores_together([everyone[r] for r in ranks]))
        for host, ranks in members.items()
    ]
    return Topology(tuple(domains), CPU_SCALE_UP, CPU_SCALE_OUT, tuple(notes))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
