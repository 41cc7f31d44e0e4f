"""Detection between real processes: on one host, in network namespaces that pose as hosts, and where a system says no.

Processes are forked and never import torch. They exchange through pipes to the test process, which work in any namespace.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import a2a.topology.detect as detection
from a2a.errors import MismatchError
from a2a.topology import Exchange, Topology, presets
from topology_ranks import (
    CLONE_NEWNET,
    FACTS,
    Main,
    groups,
    own_network,
    plain,
    run_processes,
    same,
)


def in_own_network(exchange: Exchange, rank: int, world_size: int) -> Topology:
    own_network()
    return plain(exchange, rank, world_size)


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
