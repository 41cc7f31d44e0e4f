"""Ranks for tests of detection: processes that never import torch, or threads, which exchange through the test."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import a2a.topology.detect as detection
from a2a.topology import Exchange, Topology, local_facts

DEADLINE_S = 60.0
CLONE_NEWNET = 0x40000000
Main = Callable[[Exchange, int, int], Any]


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


def plain(exchange: Exchange, rank: int, world_size: int) -> Topology:
    return detection.detect(exchange, rank, world_size)


def own_network() -> None:
    """Move this process into a network namespace of its own, as a container has one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"unshare(CLONE_NEWNET): {os.strerror(ctypes.get_errno())}")


FACTS = local_facts()
