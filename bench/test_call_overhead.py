"""What a call costs its user before any byte moves: `pytest bench` (pytest-benchmark).

One rank alone: no peer to wait for and next to nothing to copy, so that what remains is the price of the call itself, in
Python and in the library. `--benchmark-json out.json` keeps the numbers, `--benchmark-compare` holds two runs against each
other. gloo's call is here for scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.plan import Request, choose

ELEMENTS = 16
HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 4, 2, 4


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def comm(group: None) -> Iterator[Any]:
    with a2a.communicator() as made:
        yield made


@pytest.fixture(scope="module")
def layer(comm: Any) -> Iterator[Any]:
    made = a2a.ExpertParallel(
        num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, dtype=torch.float32, comm=comm
    )
    yield made
    made.close()


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % EXPERTS
    return torch.ones(TOKENS, HIDDEN), ids, torch.full((TOKENS, TOP_K), 0.5)


def test_plan(benchmark: Any, comm: Any) -> None:
    assert benchmark(choose, Request("all_to_all", torch.float32), comm).algorithm.name


def test_communicator(benchmark: Any, group: None) -> None:
    """Making one and closing it: not for the inner loop."""
    benchmark.pedantic(lambda: a2a.communicator().close(), rounds=5)


def test_all_to_all_single_on_ordinary_tensors(benchmark: Any, comm: Any) -> None:
    source, output = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS)
    benchmark(a2a.all_to_all_single, output, source, group=comm)
    assert torch.equal(output, source)


def test_all_to_all_single_on_symmetric_tensors(benchmark: Any, comm: Any) -> None:
    source, output = comm.empty((ELEMENTS,), torch.float32), comm.empty((ELEMENTS,), torch.float32)
    source.copy_(torch.arange(float(ELEMENTS)))
    benchmark(a2a.all_to_all_single, output, source, group=comm)
    assert torch.equal(output, source)


def test_all_to_all_single_with_new_splits(benchmark: Any, comm: Any) -> None:
    source, output = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS)
    rows = itertools.cycle(range(1, ELEMENTS + 1))

    def exchange() -> None:
        n = next(rows)
        a2a.all_to_all_single(output[:n], source[:n], [n], [n], group=comm)

    benchmark(exchange)
    exchange()
    a2a.all_to_all_single(output, source, [ELEMENTS], [ELEMENTS], group=comm)
    assert torch.equal(output, source)


def test_all_to_all_single_with_splits_in_an_array(benchmark: Any, comm: Any) -> None:
    source, output, splits = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS), np.array([ELEMENTS])
    benchmark(a2a.all_to_all_single, output, source, splits, splits, group=comm)
    assert torch.equal(output, source)


def test_all_to_all_single_on_the_implicit_communicator(benchmark: Any, group: None) -> None:
    source, output = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS)
    benchmark(a2a.all_to_all_single, output, source)
    assert torch.equal(output, source)


def test_all_to_all_single_asynchronously(benchmark: Any, comm: Any) -> None:
    source, output = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS)
    benchmark(lambda: a2a.all_to_all_single(output, source, group=comm, async_op=True).wait())
    assert torch.equal(output, source)


def test_all_reduce(benchmark: Any, comm: Any) -> None:
    tensor = torch.arange(float(ELEMENTS))
    benchmark(a2a.all_reduce, tensor, group=comm)
    assert torch.equal(tensor, torch.arange(float(ELEMENTS)))


def test_reduce_scatter_tensor(benchmark: Any, comm: Any) -> None:
    source, output = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS)
    benchmark(a2a.reduce_scatter_tensor, output, source, group=comm)
    assert torch.equal(output, source)


def test_all_gather_into_tensor(benchmark: Any, comm: Any) -> None:
    source, output = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS)
    benchmark(a2a.all_gather_into_tensor, output, source, group=comm)
    assert torch.equal(output, source)


def test_all_reduce_asynchronously(benchmark: Any, comm: Any) -> None:
    tensor = torch.arange(float(ELEMENTS))
    benchmark(lambda: a2a.all_reduce(tensor, group=comm, async_op=True).wait())
    assert torch.equal(tensor, torch.arange(float(ELEMENTS)))


@pytest.mark.parametrize("backend", ["a2a", "gloo"])
def test_dist_all_to_all_single(benchmark: Any, group: None, backend: str) -> None:
    source, output = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS)
    benchmark(dist.all_to_all_single, output, source, group=dist.new_group(backend=backend))
    assert torch.equal(output, source)


@pytest.mark.parametrize("backend", ["a2a", "gloo"])
def test_dist_all_to_all_single_with_splits(benchmark: Any, group: None, backend: str) -> None:
    source, output, splits = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS), [ELEMENTS]
    benchmark(dist.all_to_all_single, output, source, splits, splits, group=dist.new_group(backend=backend))
    assert torch.equal(output, source)


@pytest.mark.parametrize("backend", ["a2a", "gloo"])
def test_dist_all_reduce(benchmark: Any, group: None, backend: str) -> None:
    tensor = torch.arange(float(ELEMENTS))
    benchmark(dist.all_reduce, tensor, group=dist.new_group(backend=backend))
    assert torch.equal(tensor, torch.arange(float(ELEMENTS)))


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
@pytest.mark.parametrize("backend", ["a2a", "gloo"])
def test_dist_all_gather_into_tensor(benchmark: Any, group: None, backend: str) -> None:
    source, output = torch.arange(float(ELEMENTS)), torch.zeros(ELEMENTS)
    benchmark(dist.all_gather_into_tensor, output, source, group=dist.new_group(backend=backend))
    assert torch.equal(output, source)


def test_dispatch(benchmark: Any, layer: Any) -> None:
    x, ids, weights = tokens()
    with torch.no_grad():
        rows, _, _ = benchmark(layer.dispatch, x, ids, weights)
    assert rows.shape == (TOKENS * TOP_K, HIDDEN)


def test_combine(benchmark: Any, layer: Any) -> None:
    x, ids, weights = tokens()
    with torch.no_grad():
        rows, _, routing = layer.dispatch(x, ids, weights)
        assert torch.equal(benchmark(layer.combine, rows, routing), x)


def test_dispatch_and_combine_with_backward(benchmark: Any, layer: Any) -> None:
    x, ids, weights = tokens()
    x.requires_grad_()
    weights.requires_grad_()
    grad = torch.ones_like(x)

    def step() -> None:
        rows, _, routing = layer.dispatch(x, ids, weights)
        torch.autograd.grad(layer.combine(rows, routing), (x, weights), grad)

    step()  # the first backward imports a good part of torch
    benchmark(step)
