"""Backend "a2a" and `a2a.patched()` on GPUs: all-to-alls are a2a's, all else is NCCL's, CPU tensors are gloo's.

Each rank takes GPU (rank mod the number of GPUs). What NCCL does needs a GPU a rank, which two ranks have here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import a2a
from a2a_world import A2AWorld, default_group, received, same, sent, served
from exchange_cases import DTYPES, Exchange, assert_same_bits, even_splits, random_splits
from pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs 2 CUDA GPUs; here are {torch.cuda.device_count()}"
    ),
]
LONG = 400_000_000  # cycles: about a quarter of a second


def take_gpu() -> torch.device:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def exchange(group: dist.ProcessGroup | None = None, add: float = 0.0) -> None:
    """One all-to-all of CUDA tensors on a group of all ranks, checked."""
    output = torch.empty_like(received(), device="cuda")
    dist.all_to_all_single(output, sent().cuda() + add, group=group)
    same(output.cpu(), received() + add)


@contextlib.contextmanager
def group_of_its_own(**kwargs: Any) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(**kwargs)
    yield group
    dist.destroy_process_group(group)


def run_exchange(case: Exchange, group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
    rank = dist.get_rank(group)
    source, expected = case.input(rank).cuda(), case.expected(rank)
    output = torch.empty(expected.shape, dtype=expected.dtype, device="cuda")
    dist.all_to_all_single(output, source, case.received(rank), case.sent(rank), group=group, **kwargs)
    assert_same_bits(output.cpu(), expected)


# ------------------------------------------------------------------------------------------------------ what is served


def check_spelling(cpu: str | None) -> None:
    take_gpu()
    before = default_group().stats()["calls"]["cuda"]
    exchange()
    stats = default_group().stats()
    assert stats["calls"]["cuda"] == before + 1
    assert stats["communicators"]["cuda"]["transport"] == "cuda_vmm"
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    same(total.cpu(), torch.full((3,), float(dist.get_world_size())))
    dist.barrier()
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == list(range(dist.get_world_size()))
    if cpu is not None:
        output = torch.empty_like(received())
        dist.all_to_all_single(output, sent())
        same(output, received())
        gloos = default_group().stats()["handed_over"]
        assert list(gloos.values()) == ([] if cpu == "a2a" else [1])
        value = torch.ones(2)
        dist.all_reduce(value)
        same(value, torch.full((2,), float(dist.get_world_size())))


@pytest.mark.parametrize(
    ("backend", "cpu"),
    [("a2a", "a2a"), ("cpu:a2a,cuda:a2a", "a2a"), ("cpu:gloo,cuda:a2a", "gloo"), ("cuda:a2a", None)],
)
def test_a_backend_string_says_what_serves_which_device(two: A2AWorld, backend: str, cpu: str | None) -> None:
    two.run(check_spelling, backend=backend, cpu=cpu)


def check_dtypes() -> None:
    take_gpu()
    ranks = dist.get_world_size()
    for salt, dtype in enumerate(DTYPES):
        run_exchange(Exchange(even_splits(ranks, 3), (5,), dtype, salt))
        run_exchange(Exchange(random_splits(ranks, salt), (2, 3), dtype, salt))
    assert served() >= 2 * len(DTYPES)


def test_every_dtype_even_and_uneven(two: A2AWorld) -> None:
    two.run(check_dtypes)


def check_shapes() -> None:
    device, rank = take_gpu(), dist.get_rank()
    run_exchange(Exchange(((0, 0), (0, 0))))
    run_exchange(Exchange(((0, 4), (0, 0))))
    run_exchange(Exchange(((300_000, 1), (70_000, 0)), (4,)))
    strided = torch.arange(8.0, device=device).view(2, 4).t() + 100 * rank
    target = torch.full((2, 4), -1.0, device=device).t()
    dist.all_to_all_single(target, strided)
    parts = [(torch.arange(8.0).view(2, 4).t() + 100 * peer)[2 * rank : 2 * rank + 2] for peer in range(2)]
    same(target.cpu(), torch.cat(parts))
    for name in ("all_to_all_single", "alltoall_base"):
        if hasattr(dist.ProcessGroup, name):
            output = torch.empty_like(received(), device=device)
            assert getattr(default_group(), name)(output, sent().to(device), [], []).wait()
            same(output.cpu(), received())
    outputs = [torch.full((peer + 1, 2), -1.0, device=device) for peer in range(2)]
    dist.all_to_all(outputs, [torch.full((rank + 1, 2), float(rank), device=device) for _ in range(2)])
    for peer, output in enumerate(outputs):
        same(output.cpu(), torch.full((peer + 1, 2), float(peer)))
    served()


def test_no_rows_large_rows_strides_lists_and_torchs_method_names(two: A2AWorld) -> None:
    two.run(check_shapes)


def check_interleaved() -> None:
    take_gpu()
    before = default_group().stats()["calls"]
    for add in range(20):
        exchange(add=add)
        output = torch.empty_like(received())
        dist.all_to_all_single(output, sent() + add)
        same(output, received() + add)
    after = default_group().stats()["calls"]
    assert [after[device] - before[device] for device in ("cpu", "cuda")] == [20, 20]


def test_cpu_and_cuda_tensors_take_turns_on_one_group(two: A2AWorld) -> None:
    two.run(check_interleaved)


def check_fresh() -> None:
    take_gpu()
    with group_of_its_own(backend="a2a") as group:
        exchange(group)  # the first thing that this group does
        assert served(group) == 1
    with group_of_its_own() as group, pytest.raises(RuntimeError, match="CUDA tensors, before the capture"):
        capture_the_first_call(group)


def capture_the_first_call(group: dist.ProcessGroup) -> None:
    output, source = torch.empty_like(received(), device="cuda"), sent().cuda()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        dist.all_to_all_single(output, source, group=group)


def test_a_group_that_has_done_nothing_yet(two: A2AWorld) -> None:
    two.run(check_fresh)


# ------------------------------------------------------------------------------------------------- streams and graphs


def consumed_elsewhere(sleep: int) -> tuple[bool, bool]:
    """An asynchronous call whose input comes late, awaited on another stream; what was done when all was queued."""
    there, consumer = sent().cuda(), torch.cuda.Stream()
    source, output = torch.zeros_like(there), torch.empty_like(received(), device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(sleep)
    source.copy_(there)  # what the call must wait for
    work = dist.all_to_all_single(output, source, async_op=True)
    del source
    torch.full_like(there, -7.0)  # may take the freed memory, in the order of this stream
    with torch.cuda.stream(consumer):
        assert work.wait()
        copy = output + 1
        last = consumer.record_event()
    done = work.is_completed(), last.query()
    consumer.synchronize()
    same(copy.cpu(), received() + 1)
    assert work.is_completed() and work.is_success()
    return done


def check_async() -> None:
    take_gpu()
    consumed_elsewhere(1)  # loads all kernels, for which CUDA may wait for the device
    assert consumed_elsewhere(LONG) == (False, False)  # the host is ahead of the GPU


def check_many_async() -> None:
    device = take_gpu()
    outputs = [torch.empty_like(received(), device=device) for _ in range(8)]
    works = [dist.all_to_all_single(out, sent().to(device) + i, async_op=True) for i, out in enumerate(outputs)]
    pieces = list(torch.empty_like(received(), device=device).chunk(2))
    works.append(dist.all_to_all(pieces, list(sent().to(device).chunk(2)), async_op=True))
    for work in reversed(works):
        work.wait()
    for i, output in enumerate(outputs):
        same(output.cpu(), received() + i)
    same(torch.cat(pieces).cpu(), received())
    work = dist.all_to_all_single(outputs[0], sent().to(device) + 50, async_op=True)
    doubled = work.get_future().then(lambda done: (done.value(), outputs[0] * 2)[1])
    same(doubled.wait().cpu(), (received() + 50) * 2)


@pytest.mark.parametrize("check", [check_async, check_many_async])
def test_async_calls_are_ordered_by_streams(two: A2AWorld, check: Callable[[], None]) -> None:
    two.run(check)


def check_captured() -> None:
    device, rank = take_gpu(), dist.get_rank()
    steps = torch.zeros((), device=device)
    source, even = torch.empty_like(sent(), device=device), torch.empty_like(received(), device=device)
    later, uneven = torch.empty_like(even), torch.empty(10, device=device)
    there, splits = sent().to(device), [3, 7] if rank == 0 else [7, 3]
    long = torch.full((10,), 10.0 * rank, device=device)

    def step() -> None:
        steps.add_(1)
        source.copy_(there + steps)
        dist.all_to_all_single(even, source)
        work = dist.all_to_all_single(later, source * 2, async_op=True)
        dist.all_to_all_single(uneven, long + steps, splits, splits)
        work.wait()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
        step()
    for replay in range(10):
        graph.replay()
        done = 1 + 2 * (replay + 1)
        same(even.cpu(), received() + done)
        same(later.cpu(), (received() + done) * 2)
        same(uneven.cpu(), torch.tensor([0.0, 10.0]).repeat_interleave(torch.tensor(splits)) + done)
    assert default_group().stats()["handed_over"] == {}


def test_a_cuda_graph_replays_calls(two: A2AWorld) -> None:
    two.run(check_captured, deadline_s=120)


def functional_step(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_to_all_single_autograd(x * 2, None, None, dist.group.WORLD) + 1


def imperative_step(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dist.all_to_all_single(output, x * 2)
    return output + 1


def check_functional() -> None:
    device, size = take_gpu(), dist.get_world_size()
    before = served()
    mine = sent().to(device)
    same(funcol.wait_tensor(funcol.all_to_all_single(mine, None, None, dist.group.WORLD)).cpu(), received())
    same((funcol.all_to_all_single(mine, [2] * size, [2] * size, dist.group.WORLD) + 0).cpu(), received())
    leaf = mine.clone().requires_grad_()
    out = funcol.all_to_all_single_autograd(leaf, None, None, dist.group.WORLD)
    (out * received().to(device)).sum().backward()
    same(leaf.grad.cpu(), sent())
    assert served() == before + 4


def check_compiled(compiler: str) -> None:
    device = take_gpu()
    torch._dynamo.reset()
    before = served()
    leaf = sent().to(device).requires_grad_()
    result = torch.compile(functional_step, backend=compiler, fullgraph=True)(leaf)
    same(result.detach().cpu(), received() * 2 + 1)
    result.sum().backward()
    same(leaf.grad.cpu(), torch.full_like(sent(), 2.0))
    compiled = torch.compile(imperative_step, backend=compiler, fullgraph=True)
    same(compiled(torch.empty_like(leaf), leaf.detach()).cpu(), received() * 2 + 1)
    assert served() == before + 3


def test_functional_collectives_and_their_gradient(two: A2AWorld) -> None:
    two.run(check_functional)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_with_fullgraph(two: A2AWorld, compiler: str) -> None:
    if compiler == "inductor" and importlib.util.find_spec("triton") is None:
        pytest.skip("inductor needs triton for GPUs")
    two.run(check_compiled, compiler=compiler, deadline_s=180)


# ---------------------------------------------------------------------------------------------- what torch builds on it


def trained(model: torch.nn.Module, x: torch.Tensor) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).cuda()


def check_training(how: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device, rank, size = take_gpu(), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    x = torch.randn(4 * size, 8, device=device)
    model = small_model()
    if how == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device])
    else:
        mesh = init_device_mesh("cuda", (size,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    trained(model, x.chunk(size)[rank])
    for ours, whole in zip(model.parameters(), trained(small_model(), x).parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor() if how == "fsdp2" else ours, whole)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_model_trains_on_it(two: A2AWorld, how: str) -> None:
    two.run(check_training, how=how, deadline_s=120)


def check_coalescing() -> None:
    device, rank, size = take_gpu(), dist.get_rank(), dist.get_world_size()
    first, second = torch.ones(2, device=device), torch.full((2,), 2.0, device=device)
    with dist._coalescing_manager():
        dist.all_reduce(first)
        dist.all_reduce(second)
    same((first.cpu(), second.cpu()), (torch.full((2,), float(size)), torch.full((2,), 2.0 * size)))
    mine, theirs = torch.full((2,), float(rank), device=device), torch.empty(2, device=device)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.isend(mine, (rank + 1) % size)
        dist.irecv(theirs, (rank - 1) % size)
    manager.wait()
    same(theirs.cpu(), torch.full((2,), float((rank - 1) % size)))
    exchange()


def test_coalesced_calls_go_to_nccl_together(two: A2AWorld) -> None:
    two.run(check_coalescing)


def check_handed_over() -> None:
    device, rank, size = take_gpu(), dist.get_rank(), dist.get_world_size()
    os.environ["A2A_TOPOLOGY"] = f"h200:{size}x1"
    try:
        with group_of_its_own(backend="a2a") as group:
            exchange(group)
            outputs = [
                torch.empty(rank + 1, dtype=torch.int16, device=device) for _ in range(size)
            ]  # not a type of NCCL's
            mine = [torch.full((peer + 1,), rank, dtype=torch.int16, device=device) for peer in range(size)]
            dist.all_to_all(outputs, mine, group=group)
            same(torch.cat(outputs).cpu(), torch.arange(size, dtype=torch.int16).repeat_interleave(rank + 1))
            output, late = torch.empty_like(received(), device=device), sent().to(device)
            torch.cuda._sleep(LONG // 4)
            work = dist.all_to_all_single(output, late + 3, group=group, async_op=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                work.wait()
                same(output.cpu(), received() + 3)
            run_exchange(Exchange(random_splits(size, 5), (3,), torch.bfloat16), group)
            stats = group.stats()["communicators"]["cuda"]
            assert stats["transport"] is None
            assert "2 domains" in stats["reasons"]["cuda_vmm"]
            assert stats["handed_over"] == {"all_to_all_single": 3, "all_to_all": 1}
    finally:
        del os.environ["A2A_TOPOLOGY"]


def test_what_no_transport_serves_goes_to_nccl_and_is_counted(two: A2AWorld) -> None:
    two.run(check_handed_over)


def check_patched() -> None:
    take_gpu()
    with group_of_its_own(backend="nccl") as group:
        with a2a.patched():
            exchange(group)
            exchange(group, add=1)
        comm = a2a.comm.implicit(group, device_type="cuda")
        assert comm.stats()["transport"] == "cuda_vmm"
        assert comm.stats()["handed_over"] == {}
        exchange(group)  # NCCL's again


def test_patched_serves_plain_nccl_groups(two: A2AWorld) -> None:
    two.run(check_patched)


# ------------------------------------------------------------------------------------------------ other libraries' arrays


class OverInterface:
    """An array of some other library, filled on a stream of its own, that speaks the CUDA array interface alone."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, "stream": stream.cuda_stream, "version": 3}


class OverDLPack:
    """The same, with DLPack."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._tensor, self._stream = tensor, stream

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, stream: int | None = None, **kwargs: Any) -> Any:
        consumer = torch.cuda.current_stream()
        assert stream == (consumer.cuda_stream or 1)
        consumer.wait_stream(self._stream)  # as a producer owes it
        return self._tensor.__dlpack__(**kwargs)


def check_arrays(kind: type) -> None:
    take_gpu()
    theirs = torch.cuda.Stream()
    source, output = torch.zeros_like(sent(), device="cuda"), torch.zeros_like(received(), device="cuda")
    there = sent().cuda()
    torch.cuda.synchronize()
    for async_op in (False, True):
        with torch.cuda.stream(theirs):
            torch.cuda._sleep(LONG // 4)
            source.copy_(there)
        arrays = [kind(t, theirs) for t in (output, source)]
        work = a2a.all_to_all_single(*arrays, async_op=async_op)
        if work is not None:
            work.wait()
        same(output.cpu(), received())
        source.zero_()
        output.zero_()
        torch.cuda.synchronize()
    pieces = [kind(t, theirs) for t in output.chunk(2)]
    a2a.all_to_all(pieces, [kind(t, theirs) for t in there.chunk(2)])
    same(output.cpu(), received())


@pytest.mark.parametrize("kind", [OverInterface, OverDLPack])
def test_arrays_of_other_libraries_keep_their_streams_order(two: A2AWorld, kind: type) -> None:
    two.run(check_arrays, kind=kind)


def check_cupy() -> None:
    import cupy

    device, rank = take_gpu(), dist.get_rank()
    cupy.cuda.Device(device.index).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(LONG // 4)
        source = (cupy.arange(2) + 10 * rank).astype(cupy.complex64)
        output = cupy.zeros(2, cupy.complex64)
        a2a.all_to_all_single(output, source)
        pieces = [cupy.zeros(1, cupy.complex64) for _ in range(2)]
        a2a.all_to_all(pieces, [source[:1], source[1:]])
    torch.cuda.synchronize()
    assert output.tolist() == [rank, 10 + rank]
    assert [piece.tolist() for piece in pieces] == [[rank], [10 + rank]]


def test_cupy_arrays_are_exchanged(two: A2AWorld) -> None:
    pytest.importorskip("cupy", reason="needs CuPy (extra cu12 or cu13)")
    two.run(check_cupy, deadline_s=120)


# -------------------------------------------------------------------------------------------- ranks, GPUs and processes


def check_shared() -> None:
    take_gpu()
    ranks = dist.get_world_size()
    for seed in range(4):
        run_exchange(Exchange(random_splits(ranks, seed, most=2000), (7,), torch.bfloat16, seed))
        exchange(add=seed)
    with group_of_its_own() as group:
        exchange(group)
    assert default_group().stats()["communicators"]["cuda"]["transport"] == "cuda_vmm"


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_share_gpus(own_pool: Pool, ranks: int) -> None:
    A2AWorld(own_pool, ranks).run(check_shared, deadline_s=120)


def check_subgroups() -> None:
    take_gpu()
    rank = dist.get_rank()
    members_of = ([0, 1], [2, 3], [1, 2], [3, 0, 1])
    groups = [dist.new_group(members) for members in members_of]
    for members, group in zip(members_of, groups, strict=True):
        if rank in members:
            output = torch.full((len(members),), -1, device="cuda")
            dist.all_to_all_single(output, torch.full((len(members),), rank, device="cuda"), group=group)
            same(output.cpu(), torch.tensor(sorted(members)))
    exchange()


def test_overlapping_groups(own_pool: Pool) -> None:
    A2AWorld(own_pool, 4).run(check_subgroups, deadline_s=120)


def alone(check: str, environment: Callable[[int], dict[str, str]], ranks: int = 2) -> None:
    """Run a check of cuda_alone.py in new processes and show what they wrote if one fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = Path(__file__).parent
    path = os.pathsep.join(map(str, (folder.parent, folder)))
    processes = [
        subprocess.Popen(
            [sys.executable, folder / "cuda_alone.py", check, str(rank), str(ranks), str(store.port)],
            env={**os.environ, "PYTHONPATH": path, **environment(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)


def device_name(rank: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls this process's GPU number `rank`."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[rank] if named else str(rank)


def test_each_rank_sees_one_gpu_only() -> None:
    alone("visible", lambda rank: {"CUDA_VISIBLE_DEVICES": device_name(rank)})


def test_device_id_chooses_the_gpu() -> None:
    alone("bound", lambda rank: {})


def test_expandable_segments() -> None:
    setting = "expandable_segments:True"
    alone("expandable", lambda rank: {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting})
