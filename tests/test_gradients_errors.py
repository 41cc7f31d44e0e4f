"""GradientReducer: ranks that differ, peers that die or do not come, and misuse are told by name; nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import a2a
from deadlines import Stalls, soon
from failure_cases import NOTICED_S
from gradient_reference import Planted, topology
from pool import World
from test_gradients import loss_of, network

F32 = torch.float32


def has_another_model() -> str:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 if rank != 1 else 5))
    with pytest.raises(a2a.MismatchError) as caught:
        a2a.GradientReducer(model, topology=topology(2, 1))
    assert caught.value.peer == (0 if rank == 1 else 1)
    return str(caught.value)


@pytest.mark.ranks(3)
def test_the_first_parameter_that_differs_is_named(world: World) -> None:
    texts = world.run(has_another_model)
    for rank, peer in ((0, 1), (1, 0), (2, 1)):
        for part in ("number 2", "1.weight float32 [4, 3]", "1.weight float32 [5, 3]", f"rank {rank}", f"rank {peer}"):
            assert part in texts[rank], texts[rank]


def disagrees(how: str) -> str:
    rank = dist.get_rank()
    model: Any = nn.Linear(2, 2)
    options: dict[str, Any] = {"topology": topology(1, 1)}
    error: type[Exception] = a2a.MismatchError
    if how == "settings":
        options["wire"] = "fp8" if rank else "bf16"
    elif how == "topology":
        options["topology"] = topology(2) if rank else topology(1, 1)
    elif how == "fewer":
        model = nn.Linear(2, 2, bias=rank == 0)
    elif rank == 1:
        model, error = {"none": (nn.Tanh(), ValueError), "int": (model, ValueError), "type": ([1], TypeError)}[how]
        if how == "int":
            options["bucket_mb"] = 0
    with pytest.raises(error) as caught:
        a2a.GradientReducer(model, **options)
    with a2a.GradientReducer(nn.Linear(2, 2), topology=topology(1, 1)):  # all are still in step
        pass
    return str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("settings", "rank 0 was made with wire=bf16.*rank 1 with wire=fp8"),
        ("topology", r"rank 0 was made with .*topology=\[0\]/\[1\]; rank 1 with .*topology=\[0, 1\]"),
        ("fewer", r"number 1: rank 0 has bias float32 \[2\]; rank 1 has none"),
        ("none", "rank 1 refused.*no parameter requires a gradient"),
        ("int", "rank 1 refused.*bucket_mb=0"),
        ("type", "rank 1 refused.*must be a torch.nn.Module"),
    ],
)
def test_ranks_that_disagree_all_hear_of_it(world: World, how: str, says: str) -> None:
    first, second = world.run(disagrees, how=how)
    assert re.search(says, first), first
    assert second


def dies(sizes: tuple[int, ...], victim: int, moment: str, died_at: str) -> dict[str, Any]:
    """Rank `victim` is killed before or while gradients are reduced; all others hear of it."""
    rank = dist.get_rank()
    os.environ["A2A_TIMEOUT_S"] = "60"
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    reducer = a2a.GradientReducer(model, topology=topology(*sizes), bucket_mb=0.02)
    x = torch.randn(16, 64)
    for _ in range(0 if moment == "first" else 2):
        model(x).sum().backward()
    if rank == victim:
        if moment == "middle":
            list(model.children())[3].weight.register_post_accumulate_grad_hook(lambda _: _kill(died_at))
            model(x).sum().backward()
        _kill(died_at)

    def train() -> None:
        while True:
            model(x).sum().backward()

    with pytest.raises(a2a.A2AError) as caught:
        train()
    raised_at, text = time.monotonic(), str(caught.value)
    with soon(1.0), pytest.raises(a2a.A2AError):  # on and on
        model(x).sum().backward()
    with soon(1.0), pytest.raises(a2a.A2AError):
        reducer.finish()
    with soon(3.0):
        reducer.close()
    model(x).sum().backward()  # the module is free
    return {"raised_at": raised_at, "text": text, "peer": getattr(caught.value, "peer", None)}


def _kill(died_at: str) -> None:
    with open(died_at, "w") as file:
        file.write(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("sizes", "moment"), [((2, 2), "first"), ((2, 2), "between"), ((2, 2), "middle"), ((4,), "middle")], ids=str
)
def test_a_killed_peer_is_named_on_every_rank(world: World, sizes: tuple[int, ...], moment: str, tmp_path: Any) -> None:
    note = tmp_path / "died_at"
    with Stalls() as stalls:
        results = world.run(dies, sizes=sizes, victim=3, moment=moment, died_at=str(note), expect_dead={3})
    died = float(note.read_text())
    for result in results[:3]:
        assert "rank 3" in result["text"], result["text"]
        assert result["raised_at"] - died < 2 * NOTICED_S + stalls.seconds, result


def comes_late(sizes: tuple[int, ...]) -> str:
    os.environ["A2A_TIMEOUT_S"] = "2.5"  # the first steps must do, on a busy machine
    try:
        model = network()
        with a2a.GradientReducer(model, topology=topology(*sizes)) as reducer:
            loss_of(model, 0, 0).backward()
            if dist.get_rank() == 1:
                dist.barrier()
            with soon(6.0), pytest.raises(a2a.A2AError) as caught:
                loss_of(model, 0, 1).backward()
            if dist.get_rank() != 1:
                dist.barrier()
            with pytest.raises(a2a.A2AError):
                reducer.finish()
    finally:
        del os.environ["A2A_TIMEOUT_S"]
    return str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [(2,), (1, 1)], ids=str)
def test_a_late_peer_is_named_after_the_deadline(world: World, sizes: tuple[int, ...]) -> None:
    first, _ = world.run(comes_late, sizes=sizes)
    assert "waited 2.5 s for rank 1" in first, first


def does_not_come() -> str:
    os.environ["A2A_TIMEOUT_S"] = "0.5"
    try:
        group = dist.new_group([0, 1])
        if dist.get_rank() == 1:
            return ""
        with soon(3.0), pytest.raises(a2a.PeerTimeoutError) as caught:
            a2a.GradientReducer(network(), group)
        return str(caught.value)
    finally:
        del os.environ["A2A_TIMEOUT_S"]


@pytest.mark.ranks(2)
def test_a_rank_that_makes_no_reducer_is_named(world: World) -> None:
    assert "rank 0 waited 0.5 s for rank 1 to make its reducer" in world.run(does_not_come)[0]


def is_misused() -> None:
    model = network()
    reducer = a2a.GradientReducer(model, topology=topology(1, 1))
    with reducer.no_sync(), pytest.raises(RuntimeError, match="inside no_sync"):
        reducer.finish()
    reducer.close()
    reducer.close()
    for call in (reducer.finish, reducer.stats, lambda: reducer.no_sync().__enter__(), reducer.gather_parameters):
        with pytest.raises(a2a.A2AError, match="is closed on rank"):
            call()
    loss_of(model, dist.get_rank(), 0).backward()  # reduces nothing
    with pytest.raises(ValueError, match="topology has 3 ranks, the group has 2"):
        a2a.GradientReducer(model, topology=topology(2, 1))
    sparse = nn.Embedding(4, 4, sparse=True)
    with (
        a2a.GradientReducer(sparse, topology=topology(1, 1)),
        pytest.raises(TypeError, match=r"'weight'.*sparse=False"),
    ):
        sparse(torch.tensor([1])).sum().backward()
    integers = nn.Module()
    integers.z = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"'z' is torch.complex64"):
        a2a.GradientReducer(integers)


@pytest.mark.ranks(2)
def test_misuse_is_explained(world: World) -> None:
    world.run(is_misused)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("half way")


def backward_raises() -> None:
    """Where nothing was sent yet, the next step is as any other; else ranks may be out of step, and that is said."""
    model = Planted([64, 64], [F32, F32])
    rank = dist.get_rank()
    with a2a.GradientReducer(model, topology=topology(1, 1), bucket_mb=1e-6) as reducer:
        ones = [torch.ones(64), torch.ones(64)]
        model.loss(ones).backward()
        with pytest.raises(ArithmeticError):
            Fails.apply(model.loss(ones)).backward()
        model.zero_grad()
        model.loss([torch.full((64,), float(rank)), None]).backward()
        torch.testing.assert_close(model.weights[0].grad, torch.full((64,), 0.5))
        with pytest.raises(ArithmeticError):
            (Fails.apply(model.weights[0].exp()).sum() + model.weights[1].sum()).backward()
        with pytest.raises(RuntimeError, match="last one has not ended: 1 of 2"):
            model.loss(ones).backward()
        assert reducer.stats()["steps"] == 2


@pytest.mark.ranks(2)
def test_a_backward_pass_that_raises(world: World) -> None:
    world.run(backward_raises)
