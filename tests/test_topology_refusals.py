"""Detection where a system says no: ranks that may not use sockets, other users, guests without the right token, silence."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import socket
import struct
import time
from typing import Any

import pytest

import a2a.topology.detect as detection
from a2a.topology import Exchange, Topology
from topology_ranks import (
    groups,
    plain,
    run_processes,
    run_threads,
    same,
)


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
