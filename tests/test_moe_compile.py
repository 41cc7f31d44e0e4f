"""A compiled MoE layer: one graph whatever the number of rows, the bits of the eager one, and no op removed."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import a2a
from moe_cases import assert_same_bits, topology_of

NUM_EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 2, 16, 6
COMPILE_S = 120.0  # the most that compiling may take on a busy machine
# Experts 2 and 3 live on rank 1 of 2. What each token of each rank asks for, as (expert, expert):
ROUTINGS = {
    "many": [(0, 2), (1, 3), (2, 3), (0, 1), (3, 0), (1, 2)],
    "none": [(0, 1)] * TOKENS,  # rank 1 gets no row
    "one": [(0, 1)] * TOKENS,  # and here one, from rank 0's last token
}


def ids_of(routing: str) -> Tensor:
    ids_TK = torch.tensor(ROUTINGS[routing])
    if routing == "one" and dist.get_rank() == 0:
        ids_TK[-1, 1] = 2
    return ids_TK


class MoE(torch.nn.Module):
    """Small integers everywhere: every sum is exact, so no backend may differ in a bit."""

    def __init__(self, ep: a2a.ExpertParallel, compact: bool = False) -> None:
        super().__init__()
        self.compact = compact
        generator = torch.Generator().manual_seed(0)
        self.ep = ep
        self.w_in = torch.nn.Parameter(torch.randint(-2, 3, (HIDDEN, HIDDEN), generator=generator).float())
        self.w_out = torch.nn.Parameter(torch.randint(-2, 3, (HIDDEN, HIDDEN), generator=generator).float())

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        rows_RH, _, routing = self.ep.dispatch(x_TH * 2, ids_TK, weights_TK)
        if self.compact:
            rows_RH = rows_RH[routing.row_index_R]
        out_RH = torch.relu(rows_RH @ self.w_in) @ self.w_out
        return self.ep.combine(out_RH, routing) + x_TH


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def forward_and_backward(layer: Any, module: MoE, ids_TK: Tensor) -> list[Tensor]:
    rank = dist.get_rank()
    x_TH = integers(len(ids_TK), HIDDEN, seed=rank).requires_grad_()
    weights_TK = integers(len(ids_TK), TOP_K, seed=rank + 10).requires_grad_()
    module.zero_grad()
    y_TH = layer(x_TH, ids_TK, weights_TK)
    y_TH.backward(integers(len(ids_TK), HIDDEN, seed=rank + 20))
    grads = [x_TH.grad, weights_TK.grad, module.w_in.grad, module.w_out.grad]
    return [y_TH.detach(), *(torch.zeros(0) if grad is None else grad.clone() for grad in grads)]


@contextlib.contextmanager
def expert_parallel(domains: Any = None, **options: Any) -> Any:
    """An instance whose peers may take long to compile, and an inductor that compiles here, in little."""
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}),
        a2a.communicator(timeout=COMPILE_S, topology=domains and topology_of(domains)) as comm,
    ):
        yield a2a.ExpertParallel(
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens=16,
            dtype=torch.float32,
            comm=comm,
            **options,
        )
    torch._dynamo.reset()


def compiled_equals_eager(backend: str, routings: list[str], **options: Any) -> None:
    with expert_parallel(**options) as ep:
        module = MoE(ep, compact=options.get("layout") == "compact")
        eager = [forward_and_backward(module, module, ids_of(routing)) for routing in routings]
        graphs = torch._dynamo.utils.counters["stats"]
        graphs.clear()
        layer = torch.compile(module, backend=backend, fullgraph=True)
        for routing, expected in zip(routings, eager, strict=True):
            actual = forward_and_backward(layer, module, ids_of(routing))
            for name, a, e in zip(("y", "x", "weights", "w_in", "w_out"), actual, expected, strict=True):
                assert torch.equal(a, e), f"{name} with {routing} rows on rank 1"
        assert graphs["unique_graphs"] == 1, "another number of rows compiled another graph"


@pytest.mark.parametrize("first", ["many", "none", "one"])
def test_one_full_graph_serves_any_number_of_rows(world: Any, first: str) -> None:
    world.run(
        compiled_equals_eager, backend="aot_eager", routings=[first, "none", "one", "many"], deadline_s=2 * COMPILE_S
    )


@pytest.mark.parametrize("options", [{"layout": "compact"}, {"max_rows": 40}, {"wire": "fp8"}], ids=str)
def test_every_kind_of_rows_compiles(world: Any, options: dict[str, Any]) -> None:
    world.run(compiled_equals_eager, backend="aot_eager", routings=["many", "one"], **options, deadline_s=2 * COMPILE_S)


def test_a_layer_across_domains_compiles(world: Any) -> None:
    options = {"backend": "aot_eager", "routings": ["many", "none", "one"], "domains": [[0], [1]]}
    world.run(compiled_equals_eager, **options, deadline_s=2 * COMPILE_S)


def compiled_and_checkpointed() -> None:
    with expert_parallel() as ep:
        module = MoE(ep)
        layer = torch.compile(module, backend="aot_eager", fullgraph=True)
        expected = forward_and_backward(module, module, ids_of("many"))
        actual = forward_and_backward(lambda *a: checkpoint(layer, *a, use_reentrant=False), module, ids_of("many"))
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e)


def test_a_compiled_layer_may_be_checkpointed(world: Any) -> None:
    world.run(compiled_and_checkpointed, deadline_s=2 * COMPILE_S)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_bits(world: Any) -> None:
    world.run(compiled_equals_eager, backend="inductor", routings=["many", "none", "one"], deadline_s=2 * COMPILE_S)


def other_numbers_of_tokens() -> None:
    with expert_parallel() as ep:
        module = MoE(ep)
        layer = torch.compile(module, backend="aot_eager", fullgraph=True)
        for counts in ((6, 5), (0, 3), (1, 0), (4, 6), (0, 0)):
            ids_TK = ids_of("many")[: counts[dist.get_rank()]]
            expected = forward_and_backward(module, module, ids_TK)
            for a, e in zip(forward_and_backward(layer, module, ids_TK), expected, strict=True):
                assert torch.equal(a, e), counts


def test_the_number_of_tokens_may_change_down_to_none(world: Any) -> None:
    world.run(other_numbers_of_tokens, deadline_s=2 * COMPILE_S)


def dispatch_for_nothing(ep: a2a.ExpertParallel, x_TH: Tensor, ids_TK: Tensor) -> Tensor:
    ep.dispatch(x_TH, ids_TK)
    return x_TH + 1


def combine_for_nothing(ep: a2a.ExpertParallel, x_TH: Tensor, ids_TK: Tensor) -> Tensor:
    rows_RH, _, routing = ep.dispatch(x_TH, ids_TK)
    ep.combine(rows_RH, routing)
    return x_TH + 1


def compiled_beside_eager(function: Any, backend: str) -> None:
    """Rank 0 runs it eagerly, rank 1 compiled: an op removed on rank 1 would leave rank 0 alone with it."""
    with expert_parallel() as ep, torch.no_grad():
        x_TH, ids_TK = integers(TOKENS, HIDDEN, seed=0), ids_of("many")
        if dist.get_rank() == 1:
            function = torch.compile(function, backend=backend, fullgraph=True)
        for _ in range(2):
            assert_same_bits(function(ep, x_TH, ids_TK), x_TH + 1, "x + 1")
        rows_RH, _, routing = ep.dispatch(x_TH, ids_TK)  # and still in step with each other
        assert torch.equal(ep.combine(rows_RH, routing), 2 * x_TH)


@pytest.mark.parametrize("function", [dispatch_for_nothing, combine_for_nothing], ids=["dispatch", "combine"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_op_whose_result_is_unused_still_runs(world: Any, function: Any, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    world.run(compiled_beside_eager, function=function, backend=backend, deadline_s=2 * COMPILE_S)


class Recorder(TorchDispatchMode):
    """Keeps the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if op.namespace == "a2a":
            self.calls.append((op, args))
        return op(*args, **(kwargs or {}))


def as_leaf(argument: Any, differentiable: bool) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().clone().requires_grad_(differentiable and argument.is_floating_point())


def checked_by_torch() -> list[str]:
    with expert_parallel() as ep:
        module = MoE(ep)
        with Recorder() as recorder:
            forward_and_backward(module, module, ids_of("many"))
        for op, args in recorder.calls:
            torch.library.opcheck(op, tuple(as_leaf(a, "backward" not in str(op)) for a in args))
    return [str(op) for op, _ in recorder.calls]


@pytest.mark.ranks(1)
def test_torch_finds_the_registration_of_every_op_right(world: Any) -> None:
    (names,) = world.run(checked_by_torch)
    assert len(names) == 4, "dispatch, combine and their backwards"


def profiled() -> list[str]:
    with expert_parallel() as ep:
        module = MoE(ep)
        with torch.profiler.profile() as profile:
            forward_and_backward(module, module, ids_of("many"))
    return [event.key for event in profile.key_averages()]


def test_the_profiler_shows_the_ops_by_name(world: Any) -> None:
    for names in world.run(profiled):
        ours = [name for name in names if name.startswith("a2a::")]
        assert any("dispatch" in name for name in ours)
        assert any("combine" in name for name in ours)
