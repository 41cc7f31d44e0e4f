"""Collectives across domains: exact, in the documented order, and one failure for all ranks.

The domains are made up: ranks of one host under a topology that says they are on several.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.algorithms import all_gather_hierarchical, all_reduce_hierarchical, reduce_scatter_hierarchical
from a2a.algorithms.base import Request
from a2a.plan import choose
from a2a.topology import Topology
from a2a_world import A2AWorld
from deadlines import soon
from exchange_cases import as_dtype, assert_same_bits, pattern
from failure_cases import finished
from pool import World
from test_rail import BLOCKS, CYCLIC, THREE, UNEVEN, topology
from test_reductions import in_rank_order, values

SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN
MIXED = topology((0, 3), (1, 2, 4))
FOUR = {"blocks": BLOCKS, "cyclic": CYCLIC, "three": THREE}
FIVE = {"uneven": UNEVEN, "mixed": MIXED}
CASES = [(dtype, op) for dtype in (torch.float32, torch.bfloat16, torch.float16) for op in (SUM, AVG, MAX, MIN)]
CASES += [(torch.float64, SUM), (torch.int32, SUM), (torch.int64, MAX), (torch.uint8, SUM), (torch.int16, MIN)]
COUNTS = [0, 1, 3, 17, 1000, 16384, 33_001]  # each case takes two or three of them
LARGE = 400_001  # elements: many chunks, where these are small
DEADLINE_S = 150.0  # many calls, on a machine that others may be using
LIMIT_S = 8.0  # to hear of a failure: far below the communicators' own limits, far above what it takes


def hierarchical(top: Topology, terms: list[torch.Tensor], op: Any) -> torch.Tensor:
    """The result in the documented order, term by term: ranks of a domain, rounded; domains, rounded."""
    sums = [in_rank_order([terms[r] for r in domain.ranks], SUM if op == AVG else op) for domain in top.domains]
    if op != AVG:
        return in_rank_order(sums, op)
    dtype = sums[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = sums[0].to(wide).numpy()
    for term in sums[1:]:
        total = total + term.to(wide).numpy()
    return torch.empty(len(total), dtype=dtype).copy_(torch.from_numpy(total / total.dtype.type(len(terms))))


@contextmanager
def forced() -> Iterator[None]:
    """With so few ranks, and some domains of one, others may be planned."""
    ops = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
    os.environ["A2A_ALGORITHM"] = ",".join(f"{op}=hierarchical" for op in ops)
    try:
        yield
    finally:
        del os.environ["A2A_ALGORITHM"]


@contextmanager
def across(top: Topology, timeout: float = 20) -> Iterator[Any]:
    """A communicator of several domains, all of whose calls cross them by our own algorithms."""
    with forced(), a2a.communicator(topology=top, timeout=timeout) as comm:
        yield comm
        assert comm.stats()["handed_over"] == {}
        assert {plan.algorithm.name for plan in comm.plans.values()} <= {"hierarchical"}
        dist.barrier()  # a rank that closes is told to those that still wait


@contextmanager
def small_chunks() -> Iterator[None]:
    modules = (all_reduce_hierarchical, reduce_scatter_hierarchical, all_gather_hierarchical)
    before = [module.CHUNK_BYTES for module in modules]
    for module in modules:
        module.CHUNK_BYTES = 100_000  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, num_bytes in zip(modules, before, strict=True):
            module.CHUNK_BYTES = num_bytes  # type: ignore[attr-defined]


def reduced(comm: Any, top: Topology, count: int, dtype: torch.dtype, op: Any, async_op: bool) -> None:
    rank, world_size = comm.rank, comm.world_size
    terms = [values(r, count, dtype) for r in range(world_size)]
    tensor = terms[rank].clone()
    finished(a2a.all_reduce(tensor, op, comm, async_op))
    assert_same_bits(tensor, hierarchical(top, terms, op))
    whole = [values(r, count * world_size, dtype, 1) for r in range(world_size)]
    output = torch.empty(count, dtype=dtype)
    finished(a2a.reduce_scatter_tensor(output, whole[rank], op, comm, async_op))
    assert_same_bits(whole[rank], values(rank, count * world_size, dtype, 1))  # it is only read
    assert_same_bits(output, hierarchical(top, [w[rank * count :][:count] for w in whole], op))


def gathered(comm: Any, count: int, dtype: torch.dtype, async_op: bool) -> None:
    parts = [as_dtype(pattern(r, 0, count * dtype.itemsize), dtype, (count,)) for r in range(comm.world_size)]
    output = torch.empty(count * comm.world_size, dtype=dtype)
    finished(a2a.all_gather_into_tensor(output, parts[comm.rank], comm, async_op))
    assert_same_bits(output, torch.cat(parts))
    output.view(torch.uint8).fill_(0)
    mine = output[comm.rank * count : (comm.rank + 1) * count].copy_(parts[comm.rank])  # in place
    finished(a2a.all_gather_into_tensor(output, mine, comm, async_op))
    assert_same_bits(output, torch.cat(parts))


def exchanged(comm: Any, call: int, dtype: torch.dtype, async_op: bool, largest: int = 3000) -> None:
    """An all-to-all of uneven rows, some of them none, and one of equal rows."""
    rank, world_size = comm.rank, comm.world_size

    def rows(a: int, b: int) -> int:
        return [0, 1, 7, largest, 20][(a * 3 + b * 2 + call) % 5]

    def row(a: int, b: int, n: int) -> torch.Tensor:
        return as_dtype(pattern(a, b, n * 3 * dtype.itemsize, call), dtype, (n, 3))

    sent, expected = [rows(rank, p) for p in range(world_size)], [rows(p, rank) for p in range(world_size)]
    input = torch.cat([row(rank, p, n) for p, n in enumerate(sent)])
    output = torch.empty(sum(expected), 3, dtype=dtype)
    finished(a2a.all_to_all_single(output, input, expected, sent, comm, async_op))
    assert_same_bits(output, torch.cat([row(p, rank, n) for p, n in enumerate(expected)]))
    even = torch.cat([row(rank, p, 2) for p in range(world_size)])
    finished(a2a.all_to_all_single(result := torch.empty_like(even), even, group=comm, async_op=async_op))
    assert_same_bits(result, torch.cat([row(p, rank, 2) for p in range(world_size)]))
    lists = [torch.full((p + 1,), rank, dtype=torch.int16) for p in range(world_size)]
    taken = [torch.empty(rank + 1, dtype=torch.int16) for _ in range(world_size)]
    finished(a2a.all_to_all(taken, lists, comm, async_op))
    assert [t.tolist() for t in taken] == [[p] * (rank + 1) for p in range(world_size)]


def all_ops(top: Topology, async_op: bool, every: int) -> None:
    """`every`: which of the cases: each, or each second or third."""
    with across(top) as comm:
        for number, (dtype, op) in enumerate(CASES):
            for count in COUNTS[number % 3 :: 3] if number % every == 0 else ():
                reduced(comm, top, count, dtype, op, async_op)
        for number, dtype in enumerate((torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn)):
            for count in COUNTS[number % 3 :: 3]:
                gathered(comm, count, dtype, async_op)
        for call, dtype in enumerate([torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.int64]):
            exchanged(comm, call, dtype, async_op)


def large(top: Topology) -> dict[str, int]:
    """Many chunks; returns what crossed for one all-reduce of LARGE float32."""
    with small_chunks(), across(top) as comm:
        reduced(comm, top, LARGE // 2, torch.bfloat16, SUM, False)
        gathered(comm, LARGE // 4, torch.int32, True)
        exchanged(comm, 0, torch.float64, True, largest=20_000)
        terms = [values(r, LARGE, torch.float32) for r in range(comm.world_size)]
        before = comm.domains.bytes_sent
        for _ in range(2):  # the same bits again
            tensor = terms[comm.rank].clone()
            a2a.all_reduce(tensor, group=comm)
            assert_same_bits(tensor, hierarchical(top, terms, SUM))
        return {"crossed": (comm.domains.bytes_sent - before) // 2, "domain": comm.domains.index}


def in_order(top: Topology, calls: int, jitter_ms: float) -> None:
    """Asynchronous calls of all kinds under way together, synchronous ones between them, new data in the same memory."""
    rng, shared = random.Random(dist.get_rank()), random.Random(7)
    with across(top) as comm:
        rank, n = comm.rank, comm.world_size
        total = n * (n - 1) // 2
        under_way: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        for call in range(calls):
            count = shared.choice([1, 100, 5000, 300_000])
            if rng.random() < 0.3:
                time.sleep(rng.random() * jitter_ms / 1000)
            tensor = torch.full((count,), float(rank + call))
            expected = torch.full((count,), float(total + call * n))
            under_way.append((a2a.all_reduce(tensor, group=comm, async_op=True), tensor, expected))
            if call % 3 == 0:
                whole = torch.empty(n * 10)
                work = a2a.all_gather_into_tensor(whole, torch.full((10,), float(rank + call)), comm, async_op=True)
                under_way.append((work, whole, (torch.arange(n) + call).repeat_interleave(10).float()))
            if call % 4 == 3:
                received = torch.empty(n)
                a2a.all_to_all_single(received, torch.full((n,), float(rank)), group=comm)
                assert torch.equal(received, torch.arange(n).float())
        future = under_way[-1][0].get_future()
        for work, tensor, expected in under_way:
            assert work.wait() and work.is_completed()
            assert torch.equal(tensor, expected)
        assert torch.equal(future.wait()[0], under_way[-1][2])


MISTAKES: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "average of integers": (lambda c: a2a.all_reduce(torch.ones(3).int(), AVG, c), TypeError),
    "scatter size": (lambda c: a2a.reduce_scatter_tensor(torch.ones(3), torch.ones(7), SUM, c), ValueError),
    "gather size": (lambda c: a2a.all_gather_into_tensor(torch.ones(5), torch.ones(3), c), ValueError),
    "splits": (lambda c: a2a.all_to_all_single(torch.ones(4), torch.ones(3), group=c), ValueError),
}


def a_mistake(name: str, top: Topology) -> None:
    """One rank refuses its own call: every rank of every domain is told whose it was, and all go on."""
    call, error = MISTAKES[name]
    with across(top) as comm:
        for _ in range(2):
            if comm.rank == 1:
                with pytest.raises(error):
                    call(comm)
            else:
                with soon(LIMIT_S), pytest.raises(a2a.MismatchError, match=r"rank 1 refused its own call") as caught:
                    a2a.all_reduce(torch.ones(3), group=comm)
                assert caught.value.peer == 1
            tensor = torch.ones(3)
            a2a.all_reduce(tensor, group=comm)
            assert tensor.tolist() == [comm.world_size] * 3


DIFFERENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another op": (lambda c: a2a.all_reduce(torch.ones(40_000), MAX, c), "max"),
    "another count": (lambda c: a2a.all_reduce(torch.ones(40_001), SUM, c), "40001 elements"),
    "another collective": (
        lambda c: a2a.all_gather_into_tensor(torch.ones(160_000), torch.ones(40_000), c),
        "all_gather_into_tensor",
    ),
    "an all-to-all": (lambda c: a2a.all_to_all_single(torch.ones(4), torch.ones(4), group=c), "all_to_all_single"),
}


def different(name: str, ranks: list[int], async_op: bool) -> str:
    """Some ranks ask for something else: everybody is told, whichever domain they are in."""
    call, says = DIFFERENT[name]
    comm = a2a.communicator(topology=BLOCKS, timeout=20)

    def asks() -> None:
        if comm.rank in ranks:
            with forced():
                call(comm)
        else:
            finished(a2a.all_reduce(torch.ones(40_000), SUM, comm, async_op))

    with soon(LIMIT_S), pytest.raises(a2a.MismatchError, match=says) as caught:
        asks()
    assert int(comm.ok) == 0
    with soon(1.0), pytest.raises(a2a.MismatchError, match=says):  # it stays broken
        a2a.all_reduce(torch.ones(4), group=comm)
    with pytest.raises(a2a.MismatchError, match=says):
        comm.check()
    comm.close()
    return str(caught.value)


def wrong_sizes() -> None:
    """Rank 0 sends rank 3 other sizes than it expects; its own domain, done by then, is told with the next call."""
    comm = a2a.communicator(topology=BLOCKS, timeout=20)
    sends = [2, 2, 2, 5] if comm.rank == 0 else [2, 2, 2, 2]

    def exchange_twice() -> None:
        a2a.all_to_all_single(torch.empty(8), torch.ones(sum(sends)), [2] * 4, sends, comm)
        a2a.all_to_all_single(torch.empty(8), torch.ones(8), group=comm)

    says = r"rank 0 sends 20 bytes to rank 3, which expects 8"
    with forced(), soon(LIMIT_S), pytest.raises(a2a.MismatchError, match=says):
        exchange_twice()
    comm.close()


def absent(how: str, top: Topology, count: int) -> tuple[str, int]:
    """Rank 1 dies or doesn't come: everybody names it, within the limit."""
    comm = a2a.communicator(topology=top, timeout=1.0 if how == "late" else 30)
    a2a.all_reduce(torch.ones(count), group=comm)
    if comm.rank == 1:
        if how == "dead":
            raise SystemExit(0)
        if how == "closed":
            comm.close()
        dist.barrier()
        if how == "late":
            with pytest.raises(a2a.PeerTimeoutError, match="rank 1"):
                a2a.all_reduce(torch.ones(count), group=comm)
        dist.barrier()
        return "rank 1 [leg domain]", 1
    with soon(LIMIT_S), pytest.raises(a2a.PeerTimeoutError, match=r"rank 1\b.*leg (rail|domain)") as caught:
        a2a.all_reduce(torch.ones(count), group=comm)
    if how != "dead":
        dist.barrier()
    with soon(1.0), pytest.raises(a2a.PeerTimeoutError, match="rank 1"):  # it stays broken
        a2a.all_gather_into_tensor(torch.ones(2 * comm.world_size), torch.ones(2), comm)
    if how != "dead":
        dist.barrier()
    comm.close()
    return str(caught.value), caught.value.peer


def killed_in_the_middle(delay_s: float) -> None:
    """Rank 1 is killed while data crosses; until then every result is right."""
    rng = random.Random(1)
    comm = a2a.communicator(topology=CYCLIC, timeout=30)
    rank, n = comm.rank, comm.world_size
    a2a.all_reduce(torch.ones(4), group=comm)  # which makes the domains
    if rank == 1:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    last = time.monotonic()

    def until_it_fails() -> None:
        nonlocal last
        while True:
            tensor = torch.full((rng.choice([10, 20_000, 2_000_000]),), float(rank))
            last = time.monotonic()
            a2a.all_reduce(tensor, group=comm)
            assert torch.equal(tensor, torch.full_like(tensor, float(n * (n - 1) // 2)))

    with pytest.raises(a2a.PeerTimeoutError, match=r"rank 1\b.*leg (rail|domain)") as caught:
        until_it_fails()
    assert time.monotonic() - last < LIMIT_S
    assert caught.value.peer == 1
    comm.close()


def lifetimes() -> None:
    """Domains are made with the first call, again after a failure, side by side, and go with their communicator."""
    before = threading.active_count()
    with a2a.communicator(topology=BLOCKS) as first, a2a.communicator(topology=CYCLIC) as second:
        assert first._domains is None
        for comm in (first, second, first):
            tensor = torch.ones(1000)
            a2a.all_reduce(tensor, group=comm, async_op=True).wait()
            assert tensor.tolist() == [4] * 1000
        assert first.stats()["domains"]["inside"]["transport"] == "cpu_shm"
        work = a2a.all_reduce(tensor, group=first, async_op=True)
        work.wait()
        dist.barrier()
    assert threading.active_count() <= before + 2  # c10d's own
    with pytest.raises(a2a.A2AError, match="closed"):
        a2a.all_reduce(tensor, group=first)
    dist.barrier()


def planned(text: str) -> list[str]:
    with a2a.communicator(topology=Topology.load(text)) as comm:
        detail = (("reduce_op", "sum"),)
        plans = [
            choose(Request("all_reduce", torch.float32, 1 << 20, detail), comm),
            choose(Request("all_reduce", torch.float32, 1 << 20, (("reduce_op", "band"),)), comm),
            choose(Request("all_gather", torch.float32, 64), comm),
        ]
        assert all("hierarchical" in str(plan) for plan in plans)
        return [plan.algorithm.name for plan in plans]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("name", "async_op", "every"), [("blocks", True, 2), ("cyclic", False, 1), ("three", False, 3)]
)
def test_every_op_is_exact_in_the_documented_order(world: World, name: str, async_op: bool, every: int) -> None:
    world.run(all_ops, top=FOUR[name], async_op=async_op, every=every, deadline_s=DEADLINE_S)


@pytest.mark.ranks(5)
@pytest.mark.parametrize(("name", "async_op"), [("uneven", False), ("mixed", True)])
def test_domains_of_different_sizes(world: World, name: str, async_op: bool) -> None:
    world.run(all_ops, top=FIVE[name], async_op=async_op, every=2, deadline_s=DEADLINE_S)


@pytest.mark.ranks(4)
def test_large_tensors_cross_in_chunks_and_no_byte_twice(world: World) -> None:
    for told in world.run(large, top=CYCLIC, deadline_s=DEADLINE_S):
        assert told["crossed"] == pytest.approx(LARGE * 4 / 2, rel=0.005)  # of 2 domains: half of 2 / 2 of the tensor


@pytest.mark.ranks(5)
def test_large_tensors_on_domains_of_different_sizes(world: World) -> None:
    told = world.run(large, top=MIXED, deadline_s=DEADLINE_S)
    for domain in (0, 1):
        crossed = sum(t["crossed"] for t in told if t["domain"] == domain)
        assert crossed == pytest.approx(LARGE * 4, rel=0.005)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["cyclic", "three"])
def test_calls_follow_each_other(world: World, name: str) -> None:
    world.run(in_order, top=FOUR[name], calls=40, jitter_ms=3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_reaches_every_domain_and_breaks_nothing(world: World, name: str) -> None:
    world.run(a_mistake, name=name, top=CYCLIC if "size" in name else BLOCKS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("ranks", [[2], [2, 3]], ids=["one rank", "one domain"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_ask_for_something_else_are_found_out_by_all(world: World, name: str, ranks: list[int]) -> None:
    told = world.run(different, name=name, ranks=ranks, async_op=ranks == [2])
    assert all(("leg domain" if ranks == [2] else "leg rail") in text for text in told)


@pytest.mark.ranks(4)
def test_sizes_that_disagree_across_domains_name_the_sender(world: World) -> None:
    world.run(wrong_sizes)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("count", [4, 500_000])
@pytest.mark.parametrize("how", ["dead", "late", "closed"])
def test_an_absent_rank_is_named_in_every_domain(world: World, how: str, count: int) -> None:
    top = BLOCKS if count == 4 else THREE
    told = world.run(absent, expect_dead=(1,) if how == "dead" else (), how=how, top=top, count=count)
    assert {peer for text, peer in filter(None, told)} == {1}


@pytest.mark.ranks(4)
def test_a_rank_that_is_killed_while_data_crosses_is_named(world: World) -> None:
    for delay_s in (0.05, 0.25):
        world.run(killed_in_the_middle, expect_dead=(1,), delay_s=delay_s)


@pytest.mark.ranks(4)
def test_domains_live_with_their_communicator(world: World) -> None:
    world.run(lifetimes)


@pytest.mark.ranks(4)
def test_the_planner_explains_what_crosses_domains(world: World) -> None:
    assert world.run(planned, text="cpu:2x2") == [["hierarchical", "c10d", "hierarchical"]] * 4


def on_the_backend() -> None:
    """torch.distributed's own functions on backend "a2a", in a job of two domains: DDP's reductions among them."""
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.full((1000,), float(dist.get_rank()))
    os.environ["A2A_TOPOLOGY"] = "cpu:2x2"
    try:
        dist.all_reduce(tensor)
    finally:
        del os.environ["A2A_TOPOLOGY"]
    assert tensor.tolist() == [6.0] * 1000
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    assert model.module.weight.grad is not None
    assert torch.equal(model.module.weight.grad, torch.full((4, 4), 3.0))
    stats: Any = group.stats()["communicators"]["cpu"]  # type: ignore[attr-defined]
    assert stats["handed_over"] == {}
    assert sum(rail["bytes_sent"] for rail in stats["domains"]["rails"].values()) > 4000


def test_the_backend_reduces_across_domains(four: A2AWorld) -> None:
    four.run(on_the_backend)
