"""Detection between real processes: on one host, in network namespaces that pose as hosts, and where a system says no.

Processes are forked and never import torch. They exchange through pipes to the test process, which work in any namespace.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import platform
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import a2a.topology.detect as detection
from a2a.errors import MismatchError
from a2a.topology import Exchange, Topology, local_facts, presets, resolve

DEADLINE_S = 60.0
CLONE_NEWNET = 0x40000000
Main = Callable[[Exchange, int, int], Any]


# ---- ranks


def run_processes(mains: Sequence[Main]) -> tuple[list[Any], list[str]]:
    """Run `mains[rank](exchange, rank, world_size)` in one process each; return the results and the tags exchanged."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in mains]
    ranks = [
        context.Process(target=_process_main, args=(main, theirs, rank, len(mains)), daemon=True)
        for rank, (main, (_, theirs)) in enumerate(zip(mains, pipes, strict=True))
    ]
    for process, (_, theirs) in zip(ranks, pipes, strict=True):
        process.start()
        theirs.close()
    ours = [pipe for pipe, _ in pipes]
    tags: list[str] = []
    try:
        while True:
            messages = [_receive(pipe, rank) for rank, pipe in enumerate(ours)]
            failed = [text for kind, _, text in messages if kind == "error"]
            assert not failed, "\n".join(map(str, failed))
            ((kind, tag),) = {(kind, tag) for kind, tag, _ in messages}  # all ranks do the same thing
            if kind == "result":
                return [value for _, _, value in messages], tags
            tags.append(tag)
            for pipe in ours:
                pipe.send([payload for _, _, payload in messages])
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _receive(pipe: multiprocessing.connection.Connection, rank: int) -> tuple[str, str, Any]:
    assert pipe.poll(DEADLINE_S), f"rank {rank} is stuck"
    message: tuple[str, str, Any] = pipe.recv()
    return message


def _process_main(main: Main, pipe: multiprocessing.connection.Connection, rank: int, world_size: int) -> None:
    def exchange(tag: str, payload: bytes) -> list[bytes]:
        pipe.send(("exchange", tag, payload))
        payloads: list[bytes] = pipe.recv()
        return payloads

    try:
        pipe.send(("result", "", main(exchange, rank, world_size)))
    except BaseException:
        pipe.send(("error", "", f"rank {rank}:\n{traceback.format_exc()}"))


def run_threads(main: Main, world_size: int) -> list[Any]:
    """Run `main` on that many ranks, which are threads here; an exception is a result."""
    barrier = threading.Barrier(world_size, timeout=DEADLINE_S)
    slots: list[bytes] = [b""] * world_size
    results: list[Any] = [None] * world_size

    def body(rank: int) -> None:
        def exchange(tag: str, payload: bytes) -> list[bytes]:
            slots[rank] = payload
            barrier.wait()
            payloads = list(slots)
            barrier.wait()
            return payloads

        try:
            results[rank] = main(exchange, rank, world_size)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return results


def same(results: list[Topology]) -> Topology:
    """The topology that all ranks found, the notes included."""
    assert {topology.to_json() for topology in results} == {results[0].to_json()}
    return results[0]


def groups(topology: Topology) -> list[tuple[int, ...]]:
    return [domain.ranks for domain in topology.domains]


# ---- hosts


def plain(exchange: Exchange, rank: int, world_size: int) -> Topology:
    return detection.detect(exchange, rank, world_size)


def own_network() -> None:
    """Move this process into a network namespace of its own, as a container has one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"unshare(CLONE_NEWNET): {os.strerror(ctypes.get_errno())}")


def in_own_network(exchange: Exchange, rank: int, world_size: int) -> Topology:
    own_network()
    return plain(exchange, rank, world_size)


FACTS = local_facts()


def clone_of_this_host(exchange: Exchange, rank: int, world_size: int) -> Topology:
    """A virtual machine cloned from this one: nothing in its facts differs, but sockets don't reach it."""
    own_network()
    return detection.detect(exchange, rank, world_size, facts=dataclasses.replace(FACTS, pid=os.getpid()))


def _try_own_network(exchange: Exchange, rank: int, world_size: int) -> str:
    try:
        own_network()
    except OSError as error:
        return str(error)
    return ""


@pytest.fixture
def network_namespaces() -> None:
    (problem,), _ = run_processes([_try_own_network])
    if problem:
        pytest.skip(f"needs root, to make network namespaces: {problem}")


def test_four_processes_on_one_host_are_one_domain() -> None:
    results, tags = run_processes([plain] * 4)
    topology = same(results)
    assert groups(topology) == [(0, 1, 2, 3)]
    assert topology.domains[0].kind == "cpu_host"
    assert topology.domains[0].host == socket.gethostname()
    assert topology.domains[0].cores == FACTS.cores
    assert topology.notes == ()
    assert topology.scale_up == presets.CPU_SCALE_UP
    assert tags == ["topology/facts", "topology/offers", "topology/verdicts"]


def test_one_process_needs_no_exchange() -> None:
    topology = Topology.detect()
    assert groups(topology) == [(0,)]
    assert topology.domains[0].cores == FACTS.cores


def test_two_networks_that_share_host_name_and_dev_shm_are_two_domains(network_namespaces: None) -> None:
    shared = Path(f"/dev/shm/a2a-test-{os.getpid()}")

    def main(exchange: Exchange, rank: int, world_size: int) -> tuple[Topology, str, bool]:
        if rank == 1:
            own_network()
        pids = exchange("test/pids", str(os.getpid()).encode())
        if rank == 3:
            with open(f"/proc/{int(pids[1])}/ns/net") as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
        exchange("test/ready", b"")
        return plain(exchange, rank, world_size), socket.gethostname(), shared.exists()

    shared.touch()
    try:
        results, _ = run_processes([main] * 4)
    finally:
        shared.unlink()
    topology = same([found for found, _, _ in results])
    assert groups(topology) == [(0, 2), (1, 3)]
    assert {(name, seen) for _, name, seen in results} == {(socket.gethostname(), True)}
    assert {domain.host for domain in topology.domains} == {socket.gethostname()}
    (note,) = topology.notes
    assert note.startswith("ranks 1, 3 (")
    assert note.endswith("another network namespace on the same kernel")


def test_a_clone_with_equal_facts_is_its_own_domain(network_namespaces: None) -> None:
    results, _ = run_processes([plain, clone_of_this_host, plain])
    topology = same(results)
    assert groups(topology) == [(0, 2), (1,)]
    (note,) = topology.notes
    assert note.startswith("rank 1 (")
    assert "cannot share memory with rank 0: its socket is not here" in note


def test_many_clones_take_three_exchanges(network_namespaces: None) -> None:
    results, tags = run_processes([clone_of_this_host] * 6)
    assert groups(same(results)) == [(rank,) for rank in range(6)]
    assert len(results[0].notes) == 5  # one line a rank that was refused, not one a pair
    assert tags == ["topology/facts", "topology/offers", "topology/verdicts"]


def test_a_clone_of_two_ranks_is_a_domain_of_two(network_namespaces: None) -> None:
    def second(exchange: Exchange, rank: int, world_size: int) -> Topology:
        exchange("test/network", b"")
        pids = exchange("test/pids", b"")
        with open(f"/proc/{int(pids[1])}/ns/net") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
        return detection.detect(exchange, rank, world_size, facts=FACTS)

    def first(exchange: Exchange, rank: int, world_size: int) -> Topology:
        own_network()
        exchange("test/network", b"")
        exchange("test/pids", str(os.getpid()).encode())
        return detection.detect(exchange, rank, world_size, facts=FACTS)

    def original(exchange: Exchange, rank: int, world_size: int) -> Topology:
        exchange("test/network", b"")
        exchange("test/pids", b"")
        return plain(exchange, rank, world_size)

    results, _ = run_processes([original, first, second, original])
    assert groups(same(results)) == [(0, 3), (1, 2)]


def with_facts(**changes: Any) -> Main:
    def main(exchange: Exchange, rank: int, world_size: int) -> Topology:
        return detection.detect(exchange, rank, world_size, facts=dataclasses.replace(FACTS, **changes))

    return main


def test_other_facts_separate_even_where_sockets_would_connect() -> None:
    other_kernel, other_network = with_facts(boot_id="other", hostname="beta"), with_facts(net_ns="net:[1]")
    results, _ = run_processes([plain, other_kernel, other_network, other_kernel, plain])
    topology = same(results)
    assert groups(topology) == [(0, 4), (1, 3), (2,)]
    assert topology.domains[1].host == "beta"
    kernel_note, network_note = topology.notes
    assert kernel_note.startswith("ranks 1, 3 (beta) cannot share memory with rank 0 (")
    assert kernel_note.endswith("another kernel (boot id)")
    assert network_note.endswith("another network namespace on the same kernel")


def test_ranks_that_all_differ_exchange_their_facts_only() -> None:
    results, tags = run_processes([with_facts(boot_id="a"), with_facts(boot_id="b")])
    assert groups(same(results)) == [(0,), (1,)]
    assert tags == ["topology/facts"]


@pytest.mark.parametrize(
    ("hidden", "name"),
    [
        ({"boot_id": ""}, "boot id"),
        ({"net_ns": ""}, "network namespace"),
        ({"boot_id": "", "net_ns": ""}, "boot id and network namespace"),
    ],
)
def test_a_system_that_hides_its_identity_is_judged_by_its_sockets(hidden: dict[str, str], name: str) -> None:
    topology = same(run_processes([with_facts(**hidden)] * 3)[0])
    assert groups(topology) == [(0, 1, 2)]
    assert topology.notes == (f"ranks 0, 1, 2 ({FACTS.hostname}): the system hides its {name}; only sockets decided",)


def test_two_systems_that_hide_their_identity_are_two_domains(network_namespaces: None) -> None:
    hidden = with_facts(boot_id="", net_ns="")

    def elsewhere(exchange: Exchange, rank: int, world_size: int) -> Any:
        own_network()
        return hidden(exchange, rank, world_size)

    assert groups(same(run_processes([hidden, elsewhere, hidden])[0])) == [(0, 2), (1,)]


# ---- refusals


def deny_sockets() -> None:
    """Make `socket()` fail with EPERM in this process, as container runtimes' seccomp profiles can."""
    number = {"x86_64": 41, "aarch64": 198}.get(platform.machine())
    if number is None:
        raise OSError(f"the number of socket() is not known for {platform.machine()}")
    load_number, if_equal, give = 0x20, 0x15, 0x06
    rules = [(load_number, 0, 0, 0), (if_equal, 0, 1, number), (give, 0, 0, 0x50001), (give, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(seccomp, filter_mode, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
    with pytest.raises(PermissionError):
        socket.socket(socket.AF_UNIX)


def without_sockets(exchange: Exchange, rank: int, world_size: int) -> Any:
    try:
        deny_sockets()
        problem = ""
    except OSError as error:
        problem = str(error)
    if any(exchange("test/possible", problem.encode())):
        return problem
    return plain(exchange, rank, world_size)


def with_sockets(exchange: Exchange, rank: int, world_size: int) -> Any:
    return "" if any(exchange("test/possible", b"")) else plain(exchange, rank, world_size)


@pytest.mark.parametrize("denied", [0, 1, 2])
def test_a_rank_that_may_not_use_sockets_is_its_own_domain(denied: int) -> None:
    results, _ = run_processes([without_sockets if rank == denied else with_sockets for rank in range(3)])
    if isinstance(results[denied], str):
        pytest.skip(f"seccomp can't be used here: {results[denied]}")
    topology = same(results)
    others = tuple(rank for rank in range(3) if rank != denied)
    assert sorted(groups(topology)) == sorted([(denied,), others])
    assert "Operation not permitted" in " ".join(topology.notes)


def test_another_user_is_refused_by_both_sides() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")

    def nobody(exchange: Exchange, rank: int, world_size: int) -> Topology:
        os.setgid(65534)
        os.setuid(65534)
        return plain(exchange, rank, world_size)

    topology = same(run_processes([plain, nobody, plain, nobody])[0])
    assert groups(topology) == [(0, 2), (1, 3)]
    assert "it runs as user id 0, this rank as 65534" in " ".join(topology.notes)
    # A guest that does not check the owner's user id is turned away all the same.
    door = detection._Door(uid=os.geteuid() + 1, backlog=1)
    try:
        assert detection._knock(door.offer, os.geteuid(), 10.0) == f"it serves user id {os.geteuid() + 1} only"
    finally:
        door.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"ask": "00" * 16}, "it was shown a wrong token"),
        ({"ask": ""}, "wrong|closed"),
        ({"answer": "00" * 16}, "its socket closed or gave a wrong answer"),
        ({"name": "00" * 16}, "its socket is not here"),
    ],
)
def test_only_the_right_tokens_open_a_door(change: dict[str, str], reason: str | None) -> None:
    door = detection._Door(os.geteuid(), backlog=4)
    try:
        answer = detection._knock(door.offer | change, os.geteuid(), 10.0)
        assert answer is None if reason is None else answer is not None and any(r in answer for r in reason.split("|"))
        assert detection._knock(door.offer, os.geteuid(), 10.0) is None  # the door serves the next one
    finally:
        door.close()


def test_a_guest_who_says_nothing_holds_nobody_up() -> None:
    door = detection._Door(os.geteuid(), backlog=4)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        silent.connect(detection._address(door.offer["name"]))
        assert detection._knock(door.offer, os.geteuid(), 30.0) is None
    finally:
        silent.close()
        door.close()


def test_more_guests_than_the_backlog_holds_all_get_in() -> None:
    door = detection._Door(os.geteuid(), backlog=0)
    try:
        results = run_threads(lambda exchange, rank, size: detection._knock(door.offer, os.geteuid(), 30.0), 24)
        assert results == [None] * 24
    finally:
        door.close()


def hanging(exchange: Exchange, rank: int, world_size: int) -> Topology:
    """A rank whose door is there but never answers: stopped, or starved."""

    def serve(self: Any) -> None:
        self._wake.recv(1)

    detection._Door._serve = serve  # type: ignore[method-assign]  # this process ends with the test
    return detection.detect(exchange, rank, world_size, timeout_s=1.0)


def impatient(exchange: Exchange, rank: int, world_size: int) -> tuple[Topology, float]:
    start = time.monotonic()
    return detection.detect(exchange, rank, world_size, timeout_s=1.0), time.monotonic() - start


def test_a_rank_that_does_not_answer_is_left_alone_in_time() -> None:
    results, _ = run_processes([hanging, impatient, impatient])
    topology = same([results[0], *(found for found, _ in results[1:])])
    assert groups(topology) == [(0,), (1, 2)]
    assert [note for note in topology.notes if "its socket is here, but did not answer within 0.5 s" in note]
    assert all(seconds < 30 for _, seconds in results[1:])


def test_several_ranks_that_do_not_answer_share_one_timeout() -> None:
    results, _ = run_processes([hanging] * 5 + [impatient])
    assert groups(same([*results[:5], results[5][0]])) == [(rank,) for rank in range(6)]
    assert results[5][1] < 30


def test_a_rank_that_reaches_only_a_member_of_another_domain_is_its_own() -> None:
    def misled(exchange: Exchange, rank: int, world_size: int) -> Topology:
        def tampered(tag: str, payload: bytes) -> list[bytes]:
            payloads = exchange(tag, payload)
            if tag == "topology/offers":
                payloads[0] = json.dumps({"closed": "(made up)"}).encode()
            return payloads

        return plain(tampered, rank, world_size)

    topology = same(run_processes([plain, plain, misled])[0])
    assert groups(topology) == [(0, 1), (2,)]
    assert [note.split(": ", 1)[1] for note in topology.notes] == [
        "(made up)",
        "it is reachable, but joined rank 0, which is not",
    ]


def test_why_a_rank_is_apart_is_logged_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    offers = [b"", json.dumps({"closed": "(made up)"}).encode()]

    def exchange(tag: str, payload: bytes) -> list[bytes]:
        verdict = json.dumps([0, {}]).encode()
        return {
            "topology/facts": [payload, payload],
            "topology/offers": [offers[1], payload],
            "topology/verdicts": [verdict, payload],
        }[tag]

    with caplog.at_level(logging.INFO, logger="a2a"):
        topology = detection.detect(exchange, 1, 2)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"topology: {topology.notes[0]}"
    assert topology.notes[0].endswith("cannot share memory with rank 0: (made up)")


# ---- leaving no trace, and bad callers


def still_open(offers: Sequence[bytes]) -> list[str]:
    """The names of these doors that exist on this host."""
    names = [json.loads(offer).get("name", "none") for offer in offers]
    return [name for name in names if name in Path("/proc/net/unix").read_text()]


def test_detection_leaves_no_socket_thread_or_file_open() -> None:
    def main(exchange: Exchange, rank: int, world_size: int) -> tuple[int, int, int, list[str]]:
        offers: list[bytes] = []

        def listening(tag: str, payload: bytes) -> list[bytes]:
            payloads = exchange(tag, payload)
            if tag == "topology/offers":
                offers.extend(payloads)
            return payloads

        before = len(os.listdir("/proc/self/fd"))
        plain(listening, rank, world_size)
        exchange("test/end", b"")
        return len(offers), len(os.listdir("/proc/self/fd")) - before, threading.active_count(), still_open(offers)

    assert run_processes([main] * 3)[0] == [(3, 0, 1, [])] * 3


def test_an_exchange_that_fails_leaves_no_socket_open() -> None:
    offers: list[bytes] = []

    def exchange(tag: str, payload: bytes) -> list[bytes]:
        if tag == "topology/offers":
            offers.append(payload)
            assert len(still_open(offers)) == 1
            raise TimeoutError("the store is gone")
        return [payload, payload]

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TimeoutError, match="the store is gone"):
        detection.detect(exchange, 0, 2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not still_open(offers)


def test_a_caller_that_makes_no_sense_is_told() -> None:
    with pytest.raises(ValueError, match="rank 2 of world_size 2"):
        detection.detect(lambda tag, payload: [payload], 2, 2)
    with pytest.raises(ValueError, match="2 ranks need an exchange"):
        Topology.detect(None, 0, 2)
    with pytest.raises(ValueError, match="returned 1 payloads for 2 ranks"):
        Topology.detect(lambda tag, payload: [payload], 0, 2)


@pytest.mark.parametrize("payload", [b"", b"\xff", b"{}", b"[]", b"7", b'{"hostname": "x"}', b'{"cpus": 3}'])
def test_a_rank_that_sends_something_else_is_named(payload: bytes) -> None:
    with pytest.raises(
        MismatchError, match=r"rank 0 can't read what rank 1 sent .* install the same a2a on all ranks"
    ) as info:
        Topology.detect(lambda tag, mine: [mine, payload], 0, 2)
    assert (info.value.rank, info.value.peer) == (0, 1)


# ---- A2A_TOPOLOGY


def resolving(*overrides: str | None, **options: Any) -> list[Any]:
    """Resolve on as many ranks as there are overrides."""
    return run_threads(lambda x, rank, size: resolve(x, rank, size, overrides[rank], **options), len(overrides))


def test_without_an_override_the_topology_is_detected() -> None:
    assert groups(same(resolving(None, None, None))) == [(0, 1, 2)]
    assert resolve(None, 0, 1) == Topology.detect()


def test_an_override_is_taken_instead_of_what_is_there(tmp_path: Path) -> None:
    assert same(resolving("cpu:2x2", "cpu:2x2", "cpu:2x2", "cpu:2x2")) == presets.get("cpu:2x2")
    presets.get("cpu:3x1").save(tmp_path / "three.json")
    assert same(resolving(*[str(tmp_path / "three.json")] * 3)) == presets.get("cpu:3x1")
    assert resolve(None, 0, 1, "cpu:1") == presets.get("cpu:1")


def test_a_group_gets_its_part_of_the_jobs_override() -> None:
    part = same(resolving("cpu:2x2", "cpu:2x2", "cpu:2x2", job_ranks=[3, 0, 2], job_size=4))
    assert groups(part) == [(0, 2), (1,)]


def all_raise(results: list[Any], kind: type[Exception], *parts: str) -> None:
    assert [type(error) for error in results] == [kind] * len(results)
    for error in results:
        assert all(part in str(error) for part in parts), error


def test_an_override_for_another_number_of_ranks_is_refused_on_all() -> None:
    all_raise(resolving("cpu:4", "cpu:4"), ValueError, "A2A_TOPOLOGY=cpu:4 is for 4 ranks, but the job has 2")
    all_raise(resolving("cpu:4", "cpu:4", job_ranks=[0, 1], job_size=8), ValueError, "4 ranks, but the job has 8")
    with pytest.raises(ValueError, match="is for 2 ranks, but the job has 1"):
        resolve(None, 0, 1, "cpu:2")


def test_an_override_that_one_rank_can_not_load_is_refused_on_all(tmp_path: Path) -> None:
    presets.get("cpu:2").save(tmp_path / "two.json")
    results = resolving(str(tmp_path / "two.json"), str(tmp_path / "missing.json"))
    all_raise(results, ValueError, "rank 1: A2A_TOPOLOGY=", "missing.json", "neither a preset nor a readable file")


@pytest.mark.parametrize(
    "overrides", [("cpu:4", "cpu:2x2", "cpu:4", "cpu:4"), ("cpu:4", None, "cpu:4", "cpu:4"), (None, "cpu:2")]
)
def test_overrides_that_differ_are_refused_on_all(overrides: tuple[str | None, ...]) -> None:
    results = resolving(*overrides)
    all_raise(results, MismatchError, "rank 0 has", "rank 1 has", "set A2A_TOPOLOGY alike")
    assert [error.peer for error in results] == [1, *[0] * (len(results) - 1)]


def test_files_of_other_names_but_equal_content_agree(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for name in names:
        presets.get("cpu:2").save(name)
    assert same(resolving(*names)) == presets.get("cpu:2")
