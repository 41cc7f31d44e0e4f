"""Backend "a2a": all of torch.distributed works on it, all-to-alls go through a2a, whose errors come out as they are."""

from __future__ import annotations

import importlib
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from a2a.integrations import c10d_backend
from a2a_world import A2AWorld, default_group, exchange, received, same, sent, served

# ------------------------------------------------------------------------------------------------- names and strings


def test_importing_a2a_registers_the_backend() -> None:
    assert dist.Backend("a2a") == "a2a"
    devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
    assert dist.BackendConfig("a2a").get_device_backend_map() == dict.fromkeys(devices, "a2a")


def test_the_entry_point_registers_nothing_twice() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (entry,) = re.findall(r'entry-points\."torch\.distributed\.backends"\].*\na2a = "(.+)"\n', text)
    module, _, name = entry.partition(":")
    before = dist.Backend._plugins["A2A"]
    for _ in range(2):  # as torch 2.14 calls it when somebody asks for "a2a", here behind `import a2a`
        getattr(importlib.import_module(module), name)()
    assert dist.Backend._plugins["A2A"] is before
    assert dist.Backend.backend_list.count("a2a") == 1


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
    assert handed_over == {} if cpu_is_a2as else list(handed_over.values()) == [1, 1]


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


def check_reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    before = served()
    value = torch.full((70_000,), float(rank))
    dist.all_reduce(value, op=dist.ReduceOp.AVG)  # which gloo doesn't have
    same(value, torch.full((70_000,), (size - 1) / 2))
    work = dist.all_reduce(value.fill_(rank), async_op=True)
    work.wait()
    same(work.get_future().wait()[0], torch.full((70_000,), float(sum(range(size)))))
    gathered = torch.empty(2 * size, dtype=torch.float8_e4m3fn)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)).to(gathered.dtype), async_op=True).wait()
    same(gathered.float(), torch.arange(float(size)).repeat_interleave(2))
    share = torch.empty(2)
    dist.reduce_scatter_tensor(share, torch.arange(2.0 * size), op=dist.ReduceOp.MAX, async_op=True).wait()
    same(share, torch.arange(2.0) + 2 * rank)
    default_group().allreduce([share.fill_(1)]).wait()
    default_group().allreduce(share, dist.ReduceOp.SUM).wait()
    same(share, torch.full((2,), float(size * size)))
    assert served() == before + 6


def test_reductions_and_gathers_of_cpu_tensors_are_a2as(two: A2AWorld) -> None:
    two.run(check_reductions)


def check_reductions_for_gloo() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="a2a")
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=group, async_op=True).wait()
    assert bits.item() == (1 << size) - 1
    small = torch.full((2,), 2, dtype=torch.int64)
    dist.all_reduce(small, op=dist.ReduceOp.PRODUCT, group=group)
    assert small.tolist() == [2**size] * 2
    stats = group.stats()
    assert stats["calls"]["cpu"] == 0
    assert sorted(stats["handed_over"].values()) == [1, 1]
    assert all(key.startswith("all_reduce, cpu: it reduces") for key in stats["handed_over"])


def test_what_a2a_does_not_reduce_goes_to_gloo_and_is_counted(two: A2AWorld) -> None:
    two.run(check_reductions_for_gloo)


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
    ours = [base for base in c10d_backend.A2AProcessGroup.__mro__ if base.__module__.startswith("a2a.")]
    assert offered - silent - {name for base in ours for name in vars(base)} == set()
