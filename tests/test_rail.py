"""Rails: what crosses between domains, piece by piece, and who is named when it doesn't."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import a2a
from a2a.cli.ranks import find_mpi
from a2a.topology import Domain, Topology
from a2a.topology.presets import CPU_SCALE_OUT, CPU_SCALE_UP
from a2a.transport.rail import Rail, torch_rails
from deadlines import soon
from exchange_cases import as_dtype, assert_same_bits, pattern
from pool import World

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
_numbers = itertools.count()


def topology(*domains: tuple[int, ...]) -> Topology:
    return Topology(tuple(Domain(ranks, "cpu_host") for ranks in domains), CPU_SCALE_UP, CPU_SCALE_OUT)


BLOCKS, CYCLIC = topology((0, 1), (2, 3)), topology((0, 2), (1, 3))
UNEVEN, THREE = topology((0, 1, 2), (3, 4)), topology((0, 3), (1,), (2,))


def prefix() -> str:
    """A new one, of rank 0's choice; collective."""
    chosen = [f"test_rail/{next(_numbers)}"]
    dist.broadcast_object_list(chosen, 0)
    return chosen[0]


def rails_of(top: Topology, timeout_s: float = 20.0, under: str | None = None) -> dict[int, Rail]:
    store = c10d._world.pg_map[dist.group.WORLD][1]
    return torch_rails(store, top, dist.get_rank(), torch.device("cpu"), timeout_s, under or prefix())


def piece(sender: int, receiver: int, call: int, dtype: torch.dtype) -> torch.Tensor:
    """What one rank sends another in a call: of any size, often none."""
    count = [0, 1, 3, 1000, 40_000][(3 * sender + 5 * receiver + call) % 5]
    return as_dtype(pattern(sender, receiver + call, count * dtype.itemsize), dtype, (count,))


def exchanges(top: Topology, calls: int, at_once: int) -> int:
    """All-to-alls of uneven and empty pieces, several under way at once on every rail."""
    rank, sent = dist.get_rank(), 0
    rails = rails_of(top)
    assert sorted(rails) == [i for i, ranks in enumerate(top.rails()) if rank in ranks]
    under_way: list[tuple[Any, list[torch.Tensor], list[torch.Tensor]]] = []
    for call in range(calls):
        dtype = DTYPES[call % len(DTYPES)]
        for rail in rails.values():
            assert (rail.rank, rail.size) == (top.domain_index(rank), len(top.domains))
            inputs = [piece(rank, peer, call, dtype) for peer in rail.ranks]
            expected = [piece(peer, rank, call, dtype) for peer in rail.ranks]
            outputs = [torch.zeros_like(t) for t in expected]
            sent += sum(t.nbytes for peer, t in zip(rail.ranks, inputs, strict=True) if peer != rank)
            under_way.append((rail.all_to_all(outputs, inputs, async_op=True), outputs, expected))
        while len(under_way) > at_once or (under_way and call == calls - 1):
            work, outputs, expected = under_way.pop(0)
            work.wait()
            for got, want in zip(outputs, expected, strict=True):
                assert_same_bits(got, want)
    assert sum(rail.bytes_sent for rail in rails.values()) == sent
    dist.barrier()
    for rail in rails.values():
        rail.close()
    return sent


def gathers(top: Topology) -> None:
    rank = dist.get_rank()
    rails = rails_of(top)
    for count, rail in itertools.product([0, 1, 1000, 300_000], rails.values()):
        parts = [torch.arange(count, dtype=torch.int32) + peer for peer in rail.ranks]
        output = torch.zeros(rail.size, count, dtype=torch.int32)
        rail.all_gather(output, parts[rail.rank])
        assert torch.equal(output, torch.stack(parts))
        output.fill_(-1)
        output[rail.rank] = parts[rail.rank]
        rail.all_gather(output, output[rail.rank], async_op=True).wait()  # in place
        assert torch.equal(output, torch.stack(parts))
        words = rail.tell(f"rank {rank}".encode())()
        assert words == [f"rank {peer}".encode() for peer in rail.ranks]
    dist.barrier()
    for rail in rails.values():
        rail.close()


def refuses() -> None:
    (rail,) = rails_of(BLOCKS).values()
    one = torch.ones(2)
    with pytest.raises(ValueError, match=r"one piece for each of 2 domains; got 1 outputs and 2 inputs"):
        rail.all_to_all([one], [one, one])
    with pytest.raises(ValueError, match="not contiguous"):
        rail.all_to_all([one, one], [torch.ones(4)[::2], one])
    with pytest.raises(ValueError, match="expected 2 times as many"):
        rail.all_gather(torch.ones(3), one)
    pieces = [torch.ones(n) for n in (3, 4)]
    with pytest.raises(ValueError, match="sends its own domain"):
        rail.all_to_all(pieces[::-1], pieces)
    rail.close()
    rail.close()
    with pytest.raises(a2a.A2AError, match=r"rail . is closed on rank"):
        rail.all_gather(torch.ones(4), one)
    dist.barrier()


def absent(how: str) -> None:
    """Rank 2 doesn't come: rank 0, on its rail, names it; the other rail goes on."""
    rank = dist.get_rank()
    (rail,) = rails_of(BLOCKS, timeout_s=1.0 if how == "late" else 20.0).values()
    output = torch.empty(2, 1000)
    rail.all_gather(output, torch.ones(1000))
    if rank == 2:
        if how == "dead":
            time.sleep(0.2)
            raise SystemExit(0)
        if how == "last word":
            rail.close(b"the disk is full")
        dist.barrier()
        return
    if rank == 0:
        with (
            soon(3.0),
            pytest.raises(a2a.PeerTimeoutError, match=r"rank 0 .*rank 2 in all_gather on leg rail") as caught,
        ):
            rail.all_gather(output, torch.ones(1000))
        assert (caught.value.rank, caught.value.peer) == (0, 2)
        assert caught.value.cause == ("timeout" if how == "late" else "died")
        assert rail.last_words() == ([b"the disk is full"] if how == "last word" else [])
    else:
        rail.all_gather(output, torch.ones(1000))
    if how != "dead":
        dist.barrier()
    rail.close()


def a_rail_that_never_comes() -> None:
    under = prefix()
    if dist.get_rank() == 3:
        dist.barrier()
        return
    if dist.get_rank() == 1:
        with pytest.raises(a2a.PeerTimeoutError, match=r"rank 1 waited 0.5 s for rank 3 to make rail 1"):
            rails_of(BLOCKS, 0.5, under)
    else:
        rails_of(BLOCKS, 20, under)
    dist.barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("top", [BLOCKS, CYCLIC, THREE], ids=["blocks", "cyclic", "three"])
def test_pieces_of_any_size_cross_with_several_calls_under_way(world: World, top: Topology) -> None:
    world.run(exchanges, top=top, calls=40, at_once=4)


@pytest.mark.ranks(5)
def test_a_rank_of_a_small_domain_serves_several_rails(world: World) -> None:
    sent = world.run(exchanges, top=UNEVEN, calls=20, at_once=2)
    assert all(sent)
    world.run(gathers, top=UNEVEN)


@pytest.mark.ranks(4)
def test_every_domain_gets_every_part(world: World) -> None:
    world.run(gathers, top=BLOCKS)
    world.run(gathers, top=THREE)


@pytest.mark.ranks(4)
def test_wrong_pieces_are_told_before_anything_is_sent(world: World) -> None:
    world.run(refuses)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["late", "last word", "dead"])
def test_an_absent_rank_is_named_with_the_leg(world: World, how: str) -> None:
    world.run(absent, expect_dead=(2,) if how == "dead" else (), how=how)


@pytest.mark.ranks(4)
def test_a_rank_that_does_not_make_its_rail_is_named(world: World) -> None:
    world.run(a_rail_that_never_comes)


MPI_SCRIPT = """
import json, sys
from mpi4py import MPI
import torch
sys.path[:0] = {paths!r}
from a2a.transport.rail_mpi import mpi_rails
from test_rail import piece, topology
world, top = MPI.COMM_WORLD, topology((0, 1), (2,))
rank = world.Get_rank()
rails = mpi_rails(world, top, 20.0)
for call in range(12):
    waiting = []
    for rail in rails.values():
        inputs = [piece(rank, peer, call, torch.bfloat16) for peer in rail.ranks]
        expected = [piece(peer, rank, call, torch.bfloat16) for peer in rail.ranks]
        outputs = [torch.zeros_like(t) for t in expected]
        waiting.append((rail.all_to_all(outputs, inputs, async_op=True), outputs, expected))
    for work, outputs, expected in waiting:
        work.wait()
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(outputs, expected))
    for rail in rails.values():
        output = torch.zeros(2, 1000)
        rail.all_gather(output, torch.full((1000,), float(rank)))
        assert output[:, 0].tolist() == list(rail.ranks)
        assert rail.tell(b"x")() == [b"x", b"x"]
world.Barrier()
for rail in rails.values():
    rail.close()
print(json.dumps([rank, sorted(rails), world.Get_size()]), flush=True)
"""


def test_rails_over_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    try:
        mpi = find_mpi()
    except a2a.UnsupportedError as error:
        pytest.skip(str(error))
    script = tmp_path / "ranks.py"
    script.write_text(MPI_SCRIPT.format(paths=[str(Path(a2a.__file__).parents[1]), str(Path(__file__).parent)]))
    done = subprocess.run([*mpi.mpiexec, "-n", "3", sys.executable, str(script)], capture_output=True, text=True,
                          timeout=90, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"\[\d+, \[[^]]*\], \d+\]", done.stdout)  # ranks may print into each other's lines
    lines = sorted(map(json.loads, found))
    assert lines == [[0, [0], 3], [1, [1], 3], [2, [0, 1], 3]]
