"""Two hosts made of network namespaces: detection tells them apart, and what crosses crosses a real, slow network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.cli.demo_hosts import on_hosts
from a2a.cli.hosts import Hosts, spread, why_not
from a2a.cli.ranks import run_ranks


def _refused() -> str | None:
    if reason := why_not():
        return reason
    try:
        Hosts().close()
    except a2a.UnsupportedError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif((REFUSED := _refused()) is not None, reason=str(REFUSED))


def crosses(options: dict[str, Any], emit: Any) -> None:
    """An all-reduce in a communicator whose topology was detected: right, and no faster than the cable allows."""
    with a2a.communicator() as comm:
        rank, count = comm.rank, options["count"]
        tensor = torch.full((count,), float(rank))
        a2a.all_reduce(tensor, group=comm)
        assert torch.equal(tensor, torch.full((count,), float(sum(range(comm.world_size)))))
        before = comm.domains.bytes_sent
        dist.barrier()
        start = time.monotonic()
        a2a.all_reduce(tensor, group=comm)
        took = time.monotonic() - start
        crossed = [0] * comm.world_size
        dist.all_gather_object(crossed, comm.domains.bytes_sent - before)
        domains = [list(domain.ranks) for domain in comm.topology.domains]
        names = {plan.algorithm.name for plan in comm.plans.values()}
        emit({"domains": domains, "names": sorted(names), "took": took, "crossed": crossed})
        dist.barrier()


def cut_off(options: dict[str, Any], emit: Any) -> None:
    """The cable is cut in the middle: every rank raises within the limit and names a rank on the other side."""
    comm = a2a.communicator(timeout=2.0)
    told: Any = None
    tensor = torch.ones(options["count"])
    a2a.all_reduce(tensor, group=comm)
    emit({"up": True})
    start = last = time.monotonic()
    try:
        while time.monotonic() - start < 30:
            last = time.monotonic()
            a2a.all_reduce(tensor, group=comm)
    except a2a.PeerTimeoutError as error:
        told = (time.monotonic() - last, error.peer, str(error))
    path = Path(options["folder"]) / f"rank{comm.rank}"
    path.with_suffix(".part").write_text(repr(told))
    path.with_suffix(".part").rename(path)
    time.sleep(60)  # the group can't be left: its other half is gone


@pytest.mark.parametrize("order", ["blocks", "cyclic"])
def test_ranks_on_two_hosts_cross_by_their_rails(order: str) -> None:
    told: dict[str, Any] = {}
    count = 1 << 20
    on_hosts(crosses, {"count": count}, 4, order, told.update, mbit_per_s=400)
    of_host = spread(4, order)
    assert told["domains"] == [[r for r in range(4) if of_host[r] == host] for host in (0, 1)]
    assert told["names"] == ["hierarchical"]
    for host in (0, 1):
        crossed = sum(n for rank, n in enumerate(told["crossed"]) if of_host[rank] == host)
        assert crossed == pytest.approx(count * 4, rel=0.01)  # the tensor, once
    assert told["took"] > 0.8 * count * 4 * 8 / 400e6  # so it did cross the cable


def test_a_cut_cable_is_told_by_every_rank(tmp_path: Path) -> None:
    files = [tmp_path / f"rank{rank}" for rank in range(4)]
    with Hosts(400) as hosts:

        def receive(message: dict[str, Any]) -> None:
            if "up" in message:
                time.sleep(0.3)
                hosts.cut()
                end = time.monotonic() + 20
                while time.monotonic() < end and not all(path.exists() for path in files):
                    time.sleep(0.05)
                raise _EnoughError

        options = {"count": 500_000, "folder": str(tmp_path)}
        with pytest.raises(_EnoughError):
            run_ranks(cut_off, options, 4, receive, places=[hosts.places[host] for host in spread(4, "blocks")])
    for rank, path in enumerate(files):
        took, peer, text = eval(path.read_text())
        assert took < 2.0 + 2.0, text
        assert peer in ((2, 3) if rank < 2 else (0, 1)), text
        assert f"rank {peer}" in text and "leg rail" in text


class _EnoughError(Exception):
    pass


def test_hosts_vanish_with_their_maker() -> None:
    code = "from a2a.cli.hosts import Hosts; h = Hosts(); print(*(k.pid for k in h._keepers), flush=True); input()"
    maker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             cwd=Path(a2a.__file__).parents[1])  # fmt: skip
    assert maker.stdout is not None
    keepers = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(keepers) == 2
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    end = time.monotonic() + 5
    while any(_alive(pid) for pid in keepers):
        assert time.monotonic() < end, "a namespace outlives the process that made it"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def test_who_may_not_make_hosts_is_told_why() -> None:
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        os._exit(7 if "root" in (why_not() or "") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_bench_times_a_moe_layer_against_a_flat_one(here: Any) -> None:
    told = here(
        "bench", "moe", "--device", "cpu", "--hosts", "2", "--ranks", "4", "--order", "cyclic", "--tokens", "32", "--hidden",
        "256", "--experts", "16", "--top-k", "8", "--dtype", "bf16", "--repeat", "3", "--json", "-",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    lines = [json.loads(text) for text in told.stdout.splitlines()]
    assert {line["impl"] for line in lines} == {"a2a", "gloo", "copies"}
    assert {line["algorithm"] for line in lines if line["impl"] == "a2a"} == {"hierarchical"}
    assert all(
        line["wrong"] == 0 and line["case"]["hosts"] == 2 and line["case"]["order"] == "cyclic" for line in lines
    )
