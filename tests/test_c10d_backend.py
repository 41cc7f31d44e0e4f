"""Backend "a2a": all of torch.distributed works on it, all-to-alls go through a2a, whose errors come out as they are."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import a2a
from a2a import comm, transport
from a2a.integrations import c10d_backend
from a2a_world import A2AWorld, default_group, exchange, received, same, sent, served

# ------------------------------------------------------------------------------------------------- names and strings


def test_importing_a2a_registers_the_backend() -> None:
    assert dist.Backend("a2a") == "a2a"
    devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
    assert dist.BackendConfig("a2a").get_device_backend_map() == dict.fromkeys(devices, "a2a")


def test_what_torch_was_asked_for_is_read_from_its_frame() -> None:
    def torchs_function(config: dist.BackendConfig, device_id: torch.device | None) -> Any:
        return c10d_backend._requested()

    device = torch.device("cuda", 1)
    asked = torchs_function(dist.BackendConfig(dist.Backend("cpu:gloo,cuda:a2a")), device)
    assert asked == ({"cpu": "gloo", "cuda": "a2a"}, device)
    assert torchs_function(dist.BackendConfig(dist.Backend("cuda:a2a")), None) == ({"cuda": "a2a"}, None)


def check_backend_string(cpu_is_a2as: bool) -> None:
    exchange()
    total = torch.ones(3)
    dist.all_reduce(total)
    same(total, torch.full((3,), float(dist.get_world_size())))
    handed_over = default_group().stats()["handed_over"]
    assert handed_over == {} if cpu_is_a2as else list(handed_over.values()) == [1]


@pytest.mark.parametrize(
    ("backend", "cpu_is_a2as"),
    [("a2a", True), ("cpu:a2a", True), ("cpu:a2a,cuda:nccl", True), ("cpu:gloo,cuda:a2a", False)],
)
def test_a_backend_string_says_which_device_is_a2as(two: A2AWorld, backend: str, cpu_is_a2as: bool) -> None:
    two.run(check_backend_string, backend=backend, cpu_is_a2as=cpu_is_a2as)


def check_unknown_partner() -> None:
    with pytest.raises(ValueError, match="can't set up cuda:ucc"):
        dist.new_group(backend="cpu:a2a,cuda:ucc")


def test_a_backend_that_cannot_share_a_group_with_a2a_is_refused(two: A2AWorld) -> None:
    two.run(check_unknown_partner)


def check_group_of_gloo_world() -> None:
    group = dist.new_group(backend="a2a")
    assert dist.get_backend(group) == "a2a" and dist.get_backend() == "gloo"
    exchange(group)
    assert served(group) == 1
    dist.destroy_process_group(group)


def test_a_group_on_a2a_lives_beside_a_world_on_gloo(world: Any) -> None:
    world.run(check_group_of_gloo_world)


# --------------------------------------------------------------------------------------------- a2a serves all-to-alls


def check_dtypes() -> None:
    for dtype in (torch.int16, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        output = torch.empty_like(received(dtype))
        dist.all_to_all_single(output, sent(dtype))
        assert torch.equal(output.view(torch.uint8), received(dtype).view(torch.uint8)), dtype


def test_dtypes_that_gloo_lacks_are_exchanged(two: A2AWorld) -> None:
    two.run(check_dtypes)


def check_splits() -> None:
    rank = dist.get_rank()
    source = torch.arange(4) + 10 * rank
    target = torch.empty(3 if rank == 0 else 5, dtype=torch.int64)
    dist.all_to_all_single(target, source, [1, 2] if rank == 0 else [3, 2], [1, 3] if rank == 0 else [2, 2])
    same(target, torch.tensor([0, 10, 11] if rank == 0 else [1, 2, 3, 12, 13]))
    empty = torch.empty(0, 3)
    dist.all_to_all_single(empty, torch.empty(0, 3))
    strided = torch.arange(8.0).view(2, 4).t() + 100 * rank
    target = torch.empty(2, 4).t()
    dist.all_to_all_single(target, strided)
    parts = [(torch.arange(8.0).view(2, 4).t() + 100 * peer)[2 * rank : 2 * rank + 2] for peer in range(2)]
    same(target, torch.cat(parts))


def test_uneven_splits_no_rows_and_strided_tensors(two: A2AWorld) -> None:
    two.run(check_splits)


def check_own_method() -> None:
    for name in ("all_to_all_single", "alltoall_base"):
        output = torch.empty_like(received())
        assert getattr(default_group(), name)(output, sent(), [], []).wait()
        same(output, received())
    outputs = list(torch.empty_like(received()).chunk(2))
    assert default_group().alltoall(outputs, list(sent().chunk(2))).wait()
    same(torch.cat(outputs), received())


def test_both_spellings_of_the_method_and_the_list_form(two: A2AWorld) -> None:
    two.run(check_own_method)


def check_async() -> None:
    before = served()
    outputs = [torch.empty_like(received()) for _ in range(5)]
    works = [dist.all_to_all_single(output, sent() + i, async_op=True) for i, output in enumerate(outputs)]
    pieces = list(torch.empty_like(received()).chunk(2))
    works.append(dist.all_to_all(pieces, list(sent().chunk(2)), async_op=True))
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed() and work.is_success()
        work.synchronize()
    for i, output in enumerate(outputs):
        same(output, received() + i)
    same(torch.cat(pieces), received())
    assert served() == before + 6


def test_async_calls_in_flight_together_and_awaited_backwards(two: A2AWorld) -> None:
    two.run(check_async)


def check_future() -> None:
    output = torch.empty_like(received())
    work = dist.all_to_all_single(output, sent(), async_op=True)
    doubled = work.get_future().then(lambda done: (done.value(), output * 2)[1])
    same(doubled.wait(), received() * 2)
    assert work.wait(timedelta(seconds=5))


def test_the_future_of_a_call_takes_callbacks(two: A2AWorld) -> None:
    two.run(check_future)


def check_late_peer() -> None:
    store = default_group().get_group_store()
    if dist.get_rank() == 1:
        store.wait(["returned"])
    output = torch.empty_like(received())
    work = dist.all_to_all_single(output, sent(), async_op=True)
    if dist.get_rank() == 0:
        assert not work.is_completed()
        store.set("returned", "")
    work.wait()
    same(output, received())


def test_an_async_call_returns_before_its_peers_arrive(two: A2AWorld) -> None:
    two.run(exchange)
    two.run(check_late_peer)


# ------------------------------------------------------------------------------------------- torch serves the rest


def check_delegated() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    peer = (rank + 1) % size
    mine = torch.full((2,), float(rank))
    every = torch.arange(size, dtype=torch.float32).repeat_interleave(2)

    value = mine.clone()
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    same(value, torch.full((2,), size - 1.0))
    dist.broadcast(value.fill_(rank), src=1)
    same(value, torch.ones(2))
    dist.reduce(value, dst=0)
    gathered = torch.empty(2 * size)
    group = default_group()
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(gathered, mine)
    same(gathered, every)
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, mine)
    same(torch.cat(parts), every)
    shard = torch.empty(2)
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(shard, every)
    same(shard, mine * size)
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    dist.scatter(shard, list(every.chunk(size)) if rank == 0 else None, src=0)
    same(shard, mine)

    got = torch.empty(2)
    requests = [dist.isend(mine, peer), dist.irecv(got, (rank - 1) % size)]
    for request in requests:
        request.wait()
    same(got, torch.full((2,), float((rank - 1) % size)))
    operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, got.zero_(), (rank - 1) % size)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    same(got, torch.full((2,), float((rank - 1) % size)))
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        dist.recv(got, 0)
        same(got, torch.zeros(2))

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    named = [f"from {rank}"]
    dist.broadcast_object_list(named, src=1)
    assert named == ["from 1"]

    with dist._coalescing_manager():
        first, second = mine.clone(), mine + 1
        dist.all_reduce(first)
        dist.all_reduce(second)
    total = float(sum(range(size)))
    same((first, second), (torch.full((2,), total), torch.full((2,), total + size)))
    with dist._coalescing_manager(async_ops=True) as manager:
        again = mine.clone()
        dist.all_reduce(again)
    manager.wait()
    same(again, first)

    dist.barrier()
    group.monitored_barrier(timedelta(seconds=10))
    assert dist.get_process_group_ranks(group) == list(range(size))
    assert group.name() == "a2a"


def test_everything_else_is_delegated(two: A2AWorld) -> None:
    two.run(check_delegated)


def check_in_a_row() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for i in range(1500):  # tensors that only the inner backend's thread still knows when the next call comes
        parts = [torch.empty(1) for _ in range(size)]
        dist.all_gather(parts, torch.full((1,), float(rank)))
        if i % 3 == 0:
            dist.broadcast(torch.ones(3), 0)
    same(torch.cat(parts), torch.arange(float(size)))


def test_delegated_calls_in_a_row_do_not_deadlock(two: A2AWorld) -> None:
    two.run(check_in_a_row)


def test_no_method_that_communicates_is_left_to_the_base_class() -> None:
    silent = {
        *("BackendType", "abort", "bound_device_id", "boxed", "get_group_store", "group_desc", "group_name", "name"),
        *("merge_remote_group", "monitored_barrier", "rank", "set_timeout", "shutdown", "size", "split_group", "unbox"),
        *("use_pg_for_symm_mem_rendezvous", *dist.ProcessGroup.BackendType.__members__),
    }
    offered = {name for name in vars(dist.ProcessGroup) if not name.startswith("_")}
    assert offered - silent - set(vars(c10d_backend.A2AProcessGroup)) == set()


# ---------------------------------------------------------------------------------------------------------- lifetimes


def check_any_order(seed: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    works = []
    for i, group in enumerate(groups):  # all at once, each with its own communicator
        output = torch.empty_like(received())
        works.append((dist.all_to_all_single(output, sent() + i, group=group, async_op=True), output, i))
    for work, output, i in reversed(works):
        work.wait()
        same(output, received() + i)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed + dist.get_rank())).tolist()
    for i in order:
        dist.destroy_process_group(groups[i])
    exchange()


@pytest.mark.parametrize("seed", range(3))
def test_several_groups_at_once_leave_in_any_order(two: A2AWorld, seed: int) -> None:
    two.run(check_any_order, seed=seed)


def check_subgroups() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3], [1, 2])]
    exchange()
    for members, group in zip(([0, 1], [2, 3], [1, 2]), pairs, strict=True):
        output = torch.full((2,), -1)
        if rank in members:
            dist.all_to_all_single(output, torch.full((2,), rank), group=group)
            same(output, torch.tensor(members))
        else:
            with pytest.warns(UserWarning, match="does not belong"):
                assert dist.all_to_all_single(output, torch.full((2,), rank), group=group) is None
            same(output, torch.full((2,), -1))


def test_overlapping_groups_and_ranks_outside_them(four: A2AWorld) -> None:
    four.run(check_subgroups)


def check_destroyed() -> None:
    group = dist.new_group()
    exchange(group)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="was destroyed"):
        group.all_to_all_single(torch.empty(2), torch.empty(2), [], [])


def test_a_destroyed_group_says_so(two: A2AWorld) -> None:
    two.run(check_destroyed)


def check_dropped() -> int:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    exchange()
    dist.barrier()
    counts = []
    for _ in range(4):
        group = dist.new_group()
        exchange(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(open_files())
    assert counts[-1] <= counts[0], counts
    return len(counts)


def test_destroyed_groups_leave_no_open_files(two: A2AWorld) -> None:
    two.run(check_dropped)


def check_elastic(port: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for again in range(3):
        exchange()
        dist.destroy_process_group()
        store = dist.PrefixStore(f"again{again}", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("a2a", store=store, rank=rank, world_size=size)
    exchange()


def test_a_world_is_made_again_in_the_same_processes(two: A2AWorld) -> None:
    two.run(check_elastic, port=two.port)


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
