"""Backend "a2a" where something is wrong, or nothing of a2a serves: errors as they are, gloo instead, and one warning."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import a2a
from a2a import comm, transport
from a2a_world import A2AWorld, exchange, received, same, sent

# ------------------------------------------------------------------------------------------------------------- errors


def check_mistakes() -> None:
    with pytest.raises(ValueError, match="split"):
        dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 1], [2, 2])
    with pytest.raises((ValueError, RuntimeError), match="type"):
        dist.all_to_all_single(torch.empty(4), torch.empty(4, dtype=torch.int32))


def test_a_callers_mistake_is_a_value_error(two: A2AWorld) -> None:
    two.run(exchange)
    two.run(check_mistakes)


def check_mismatch() -> None:
    group = dist.new_group()
    exchange(group)
    dtype = torch.float32 if dist.get_rank() == 0 else torch.float64
    with pytest.raises(a2a.MismatchError) as caught:
        dist.all_to_all_single(torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype), group=group)
    assert caught.value.peer in (0, 1)


def test_ranks_that_differ_get_a_mismatch_error(two: A2AWorld) -> None:
    two.run(check_mismatch)


def exchange_later() -> None:
    work = dist.all_to_all_single(torch.empty_like(received()), sent(), async_op=True)
    work.wait()


def exchange_functional() -> None:
    funcol.wait_tensor(funcol.all_to_all_single(sent(), None, None, dist.group.WORLD))


WAYS = {"sync": exchange, "async": exchange_later, "functional": exchange_functional}


def check_death(how: str) -> tuple[str, int, float]:
    WAYS[how]()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(a2a.PeerTimeoutError) as caught:
        WAYS[how]()
    return caught.value.cause, caught.value.peer, time.monotonic() - start


@pytest.mark.parametrize("how", WAYS)
def test_a_killed_peer_is_named(two: A2AWorld, how: str) -> None:
    cause, peer, seconds = two.run(check_death, how=how, expect_dead=(1,))[0]
    assert (cause, peer) == ("died", 1)
    assert seconds < 2


# --------------------------------------------------------------------------------------------------------- hand-overs


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def check_no_shared_memory() -> None:
    class Refusing(transport.Transport):
        name = "cpu_shm"
        device_type = "cpu"

        @classmethod
        def unavailable(cls, topology: a2a.Topology, device_type: str) -> None:
            return None

        @classmethod
        def open(cls, wiring: Any) -> Any:
            raise a2a.UnsupportedError("no memfd on this machine")

    heard = Records()
    logging.getLogger("a2a").addHandler(heard)
    group = dist.new_group()
    original, comm.candidates = comm.candidates, lambda: [Refusing]
    try:
        for _ in range(3):
            exchange(group)
        rank, size = dist.get_rank(), dist.get_world_size()
        outputs = [torch.empty(rank + 1, 2) for _ in range(size)]  # uneven: gloo refuses these
        dist.all_to_all(outputs, [torch.full((peer + 1, 2), float(rank)) for peer in range(size)], group=group)
        for peer, output in enumerate(outputs):
            same(output, torch.full((rank + 1, 2), float(peer)))
    finally:
        comm.candidates = original
        logging.getLogger("a2a").removeHandler(heard)
    told = group.stats()["communicators"]["cpu"]
    assert told["transport"] is None
    assert told["reasons"] == {"cpu_shm": "no memfd on this machine"}
    assert told["handed_over"] == {"all_to_all_single": 3, "all_to_all": 1}
    warnings = [record.getMessage() for record in heard.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "torch.distributed serves cpu tensors of this group instead: no memfd on this machine" in warnings[0]


def test_without_shared_memory_gloo_serves_and_one_warning_says_why(two: A2AWorld) -> None:
    two.run(check_no_shared_memory)


def check_baseline(environment: dict[str, str]) -> None:
    heard = Records()
    logging.getLogger("a2a").addHandler(heard)
    logging.getLogger("a2a").setLevel(logging.INFO)
    os.environ |= environment
    try:
        group = dist.new_group()
        for _ in range(3):
            exchange(group)
        rank, size = dist.get_rank(), dist.get_world_size()
        outputs = [torch.empty(rank + 1, dtype=torch.int16) for _ in range(size)]  # gloo takes neither this nor that
        dist.all_to_all(
            outputs, [torch.full((peer + 1,), rank, dtype=torch.int16) for peer in range(size)], group=group
        )
        same(torch.cat(outputs), torch.arange(size, dtype=torch.int16).repeat_interleave(rank + 1))
        work = dist.all_to_all_single(output := torch.empty_like(received()), sent(), group=group, async_op=True)
        assert work.wait()
        same(output, received())
    finally:
        for name in environment:
            del os.environ[name]
        logging.getLogger("a2a").removeHandler(heard)
        logging.getLogger("a2a").setLevel(logging.NOTSET)
    assert sum(group.stats()["communicators"]["cpu"]["handed_over"].values()) == 5
    if "A2A_TOPOLOGY" in environment:
        told = [text for record in heard.records if "go to gloo" in (text := record.getMessage())]
        assert len(told) == 1
        assert "2 domains" in told[0]


@pytest.mark.parametrize(
    "environment",
    [{"A2A_TOPOLOGY": "cpu:2x1"}, {"A2A_ALGORITHM": "all_to_all=c10d"}],
    ids=["no shared memory", "asked for"],
)
def test_what_the_planner_gives_to_torch_runs_on_gloo_and_is_counted(
    two: A2AWorld, environment: dict[str, str]
) -> None:
    two.run(check_baseline, environment=environment)
