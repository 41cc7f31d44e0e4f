"""`a2a.patched()`: torch.distributed's names are a2a's inside the block, and torch's in every case where they must be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d

import a2a
from a2a.comm import implicit
from a2a.integrations import patch

TORCHS_NAMES = {
    "all_to_all_single": ["all_to_all_single"],
    "all_to_all": ["all_to_all"],
    "all_reduce": ["all_reduce"],
    "reduce_scatter_tensor": ["reduce_scatter_tensor", "reduce_scatter_single"],
    "all_gather_into_tensor": ["all_gather_into_tensor", "all_gather_single"],
}


def expected_names() -> set[str]:
    """What a patch must rebind here: the functions that a2a has, by the names that this torch has."""
    names = [name for own, torchs in TORCHS_NAMES.items() if hasattr(a2a, own) for name in torchs]
    return {name for name in names if hasattr(dist, name)}


def names_now() -> dict[tuple[str, str], Any]:
    return {(module.__name__, name): value for module in (dist, c10d) for name, value in vars(module).items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls that reach a2a's all_to_all_single, which answers "a2a" and moves nothing."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "a2a"

    monkeypatch.setattr(a2a, "all_to_all_single", record)
    return seen


# -------------------------------------------------------------------------------------------------------- the names


def test_exactly_these_names_are_rebound_and_all_are_restored() -> None:
    before = names_now()
    with a2a.patched():
        inside = names_now()
        for name in expected_names():
            assert getattr(dist, name) is getattr(c10d, name)
    changed = {name for (_, name), value in inside.items() if value is not before[(_, name)]}
    assert changed == expected_names()
    assert {"all_to_all_single", "all_to_all"} <= changed
    assert names_now() == before


def test_an_exception_restores_the_names() -> None:
    before = names_now()
    with pytest.raises(KeyError), a2a.patched():
        raise KeyError
    assert names_now() == before


def test_blocks_nest() -> None:
    before = names_now()
    with a2a.patched():
        inside = names_now()
        with a2a.patched():
            assert names_now() == inside
        assert names_now() == inside
    assert names_now() == before


def test_it_decorates_functions() -> None:
    before = dist.all_to_all_single

    @a2a.patched()
    def inside() -> bool:
        return dist.all_to_all_single is not before

    assert inside()
    assert dist.all_to_all_single is before
    assert inside()


def test_threads_share_the_patch_and_the_last_to_leave_restores() -> None:
    before = names_now()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with a2a.patched():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with a2a.patched():
        thread.start()
        assert entered.wait(10)
    assert dist.all_to_all_single is not before[("torch.distributed", "all_to_all_single")]
    leave.set()
    thread.join()
    assert names_now() == before


def test_somebody_elses_wrapper_stays_and_is_torchs_again(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[str] = []
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_: reached.append("torch"))
    with a2a.patched():
        ours = dist.all_to_all_single

        def theirs(*args: Any) -> Any:
            return ours(*args)

        dist.all_to_all_single = theirs
        assert dist.all_to_all_single(torch.empty(2), torch.empty(2)) == "a2a"
    assert dist.all_to_all_single is theirs
    dist.all_to_all_single(torch.empty(2), torch.empty(2))
    assert (len(calls), reached) == (1, ["torch"])


def test_arguments_travel_as_they_are(calls: list[Any]) -> None:
    output, source = torch.empty(2), torch.empty(2)
    with a2a.patched():
        assert dist.all_to_all_single(output, source, [1, 1], input_split_sizes=[1, 1], async_op=True) == "a2a"
    assert calls == [((output, source, [1, 1]), {"input_split_sizes": [1, 1], "async_op": True})]


# ----------------------------------------------------------------------------------------------- when torch's is called


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that reach torch's all_to_all_single, which answers "torch"."""
    seen: list[str] = []

    def record(*_: Any, **__: Any) -> str:
        seen.append("torch")
        return "torch"

    monkeypatch.setattr(dist, "all_to_all_single", record)
    return seen


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.empty(2), torch.empty(2).as_subclass(Subclass)),
        (torch.empty(2), [torch.empty(2).as_subclass(Subclass)]),
        (torch.empty(2), torch.empty(2), None, None, dist.GroupMember.NON_GROUP_MEMBER),
    ],
    ids=["subclass", "list of a subclass", "no member"],
)
def test_torchs_own_is_called_for(arguments: tuple[Any, ...], calls: list[Any], originals: list[str]) -> None:
    with a2a.patched():
        assert dist.all_to_all_single(*arguments) == "torch"
    assert (calls, originals) == ([], ["torch"])


def test_parameters_and_arrays_are_no_reason_for_torchs_own(calls: list[Any]) -> None:
    with a2a.patched():
        dist.all_to_all_single(torch.empty(2), torch.nn.Parameter(torch.empty(2)), torch.tensor([1, 1]), (1, 1))
        dist.all_to_all_single(torch.empty(2), torch.empty(2).numpy(), [], ())
    assert len(calls) == 2


def test_inside_a_call_of_a2as_torchs_own_is_called(monkeypatch: pytest.MonkeyPatch, originals: list[str]) -> None:
    def baseline(*args: Any) -> Any:
        return dist.all_to_all_single(*args)

    monkeypatch.setattr(a2a, "all_to_all_single", baseline)
    with a2a.patched():
        for _ in range(2):
            assert dist.all_to_all_single(torch.empty(2), torch.empty(2)) == "torch"
    assert len(originals) == 2


def test_after_an_error_of_a2as_the_next_call_is_a2as(monkeypatch: pytest.MonkeyPatch, originals: list[str]) -> None:
    def fail(*_: Any) -> None:
        raise a2a.UnsupportedError("no")

    monkeypatch.setattr(a2a, "all_to_all_single", fail)
    with a2a.patched():
        for _ in range(2):
            with pytest.raises(a2a.UnsupportedError):
                dist.all_to_all_single(torch.empty(2), torch.empty(2))
    assert originals == []


# ------------------------------------------------------------------------------------------------------------ on ranks


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def exchange(call: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """One all-to-all of WORLD by whatever the name says now, checked."""
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(size, dtype=torch.int64)
    work = (call or dist.all_to_all_single)(output, 10 * rank + torch.arange(size), **kwargs)
    if work is not None:
        work.wait()
    same(output, 10 * torch.arange(size) + rank)


def served() -> int:
    """How many calls a2a has run on WORLD."""
    return a2a.comm.implicit(dist.group.WORLD).stats()["collectives"]


def check_exchanges() -> None:
    exchange()
    with a2a.patched():
        before = served()
        exchange()
        exchange(async_op=True)
        rank, size = dist.get_rank(), dist.get_world_size()
        outputs = [torch.empty(rank + 1) for _ in range(size)]  # uneven: gloo refuses these
        dist.all_to_all(outputs, [torch.full((peer + 1,), float(rank)) for peer in range(size)])
        for peer, output in enumerate(outputs):
            same(output, torch.full((rank + 1,), float(peer)))
        assert served() == before + 3
    exchange()
    assert served() == before + 3


@pytest.mark.ranks(2, 3)
def test_a_world_on_gloo_exchanges_through_a2a(world: Any) -> None:
    world.run(check_exchanges)


def check_compiled() -> None:
    import torch._dynamo.testing

    def step(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(output, x * 2)
        return output + 1

    size = dist.get_world_size()
    x = torch.full((size,), float(dist.get_rank()))
    expected = torch.arange(size) * 2.0 + 1
    with a2a.patched():
        graphs = torch._dynamo.testing.EagerAndRecordGraphs()
        same(torch.compile(step, backend=graphs, fullgraph=True)(torch.empty(size), x), expected)
        targets = [str(node.target) for graph in graphs.graphs for node in graph.graph.nodes]
        assert any("all_to_all" in target for target in targets), targets
        same(step(torch.empty(size), x), expected)
    torch._dynamo.reset()
    same(torch.compile(step, backend="aot_eager", fullgraph=True)(torch.empty(size), x), expected)


def test_compiled_code_keeps_the_functional_collective(world: Any) -> None:
    world.run(check_compiled)


def test_torchs_map_of_functions_to_trace_holds_the_originals() -> None:
    assert dist.all_to_all_single in funcol.traceable_collective_remaps


def check_coalescing() -> None:
    size = dist.get_world_size()
    with a2a.patched(), dist._coalescing_manager():
        tensors = [torch.ones(2), torch.full((2,), 2.0)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    same(tensors[0], torch.full((2,), float(size)))
    same(tensors[1], torch.full((2,), 2.0 * size))


def test_a_coalescing_manager_still_coalesces(world: Any) -> None:
    world.run(check_coalescing)


def check_baseline(topology: str) -> None:
    """Ranks that share no memory go to c10d, which must not come back to a2a."""
    import os

    os.environ["A2A_TOPOLOGY"] = topology
    try:
        group = dist.new_group()
        with a2a.patched():
            for _ in range(2):
                exchange(group=group)
    finally:
        del os.environ["A2A_TOPOLOGY"]


def check_reductions_are_a2as() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    with a2a.patched():
        total = torch.full((3,), float(rank))
        dist.all_reduce(total, group=group)
        same(total, torch.full((3,), float(sum(range(size)))))
        work = dist.all_reduce(total.fill_(rank), op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert isinstance(work, a2a.Work)
        work.wait()
        same(total, torch.full((3,), size - 1.0))
        gathered, share = torch.empty(size * 3), torch.empty(3)
        dist.all_gather_into_tensor(output_tensor=gathered, input_tensor=total.fill_(rank), group=group)
        same(gathered, torch.arange(float(size)).repeat_interleave(3))
        dist.reduce_scatter_tensor(share, gathered, group=group)
        same(share, torch.full((3,), float(rank) * size))
        bits = torch.tensor([1 << rank])
        dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=group)
        assert bits.item() == (1 << size) - 1
    stats = implicit(group).stats()
    assert stats["collectives"] == 4
    assert stats["handed_over"] == {"all_reduce": 1}


def test_reductions_and_gathers_are_a2as(world: Any) -> None:
    world.run(check_reductions_are_a2as)


def test_what_a2a_hands_over_does_not_come_back(world: Any) -> None:
    world.run(check_baseline, topology="cpu:2x1")


def test_every_function_of_the_patch_is_one_of_a2as_five() -> None:
    assert set(patch.NAMES) == set(TORCHS_NAMES)
