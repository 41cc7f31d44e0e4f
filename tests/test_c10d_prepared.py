"""Calls of torch.distributed on backend "a2a" that were made before take the short way of tests/test_prepared.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from a2a.kernels import prepared
from a2a.reductions import reduce_op_of
from a2a_world import A2AWorld, received, same, sent, served
from exchange_cases import random_splits

SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN


class Watched:
    """What the short way of a group's calls gives, while it is watched."""

    def __init__(self, group: Any) -> None:
        self.results: list[int] = []
        self._table: Any = group._cpu.prepared
        self._functions = {name: getattr(self._table, name) for name in prepared.KINDS}

    def __enter__(self) -> Watched:
        for name, function in self._functions.items():
            setattr(self._table, name, self._watched(function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._functions.items():
            setattr(self._table, name, function)

    def _watched(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.results.append(function(*arguments))
            return self.results[-1]

        return call

    def made(self) -> int:
        """How many calls it made since this was last asked."""
        count, self.results = self.results.count(0), []
        return count


def group_with_a_communicator() -> Any:
    group = dist.new_group(backend="a2a")
    dist.all_to_all_single(torch.empty_like(received()), sent(), group=group)
    return group


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def every_collective() -> None:
    rank, size = rank_and_size()
    group = group_with_a_communicator()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with Watched(group) as watched:
        for round_ in range(4):
            output = torch.empty_like(received())
            dist.all_to_all_single(output, sent() + round_, group=group)
            same(output, received() + round_)
            assert watched.made() == 1
            for op, expected in ((SUM, sum(range(size)) + size * round_), (MAX, size - 1 + round_), (MIN, round_)):
                tensor = torch.full((5,), float(rank + round_))
                dist.all_reduce(tensor, op, group=group)
                same(tensor, torch.full((5,), float(expected)))
                assert watched.made() == (round_ > 0)
            share = torch.empty(2)
            scatter(share, torch.arange(2.0 * size) + round_, op=AVG, group=group)
            same(share, torch.arange(2.0) + 2 * rank + round_)
            assert watched.made() == (round_ > 0)
            whole = torch.empty(2 * size)
            gather(whole, torch.full((2,), float(rank + round_)), group=group)
            same(whole, torch.arange(size).repeat_interleave(2) + float(round_))
            assert watched.made() == (round_ > 0)
    assert served(group) == 1 + 4 * 6
    assert group.stats()["communicators"]["cpu"]["collectives"] == 1 + 4 * 6


def new_splits() -> None:
    rank, size = rank_and_size()
    group = group_with_a_communicator()
    with Watched(group) as watched:
        for seed in range(1, 9):
            splits = tuple((*row[:-1], row[-1] or 1) for row in random_splits(size, seed))
            source = torch.full((sum(splits[rank]),), 10.0 * rank + seed)
            parts = [torch.full((splits[peer][rank],), 10.0 * peer + seed) for peer in range(size)]
            output, came = torch.empty_like(torch.cat(parts)), [row[rank] for row in splits]
            form = (list, tuple, np.array)[seed % 3]
            dist.all_to_all_single(output, source, form(came), form(splits[rank]), group=group)
            same(output, torch.cat(parts))
            assert watched.made() == 1
        with pytest.raises(ValueError, match="add up to"):
            dist.all_to_all_single(output, source, [len(output) + 1] + [0] * (size - 1), [], group=group)
    assert served(group) == 1 + 8 + 1


def the_long_way() -> None:
    """What is asynchronous, profiled, of a kind of its own or strided, and ops that a2a doesn't do."""
    rank, size = rank_and_size()
    group = group_with_a_communicator()
    tensor, total = torch.full((6,), float(rank)), float(sum(range(size)))
    dist.all_reduce(tensor.clone(), group=group)
    with Watched(group) as watched:

        def reduced(given: torch.Tensor, **options: Any) -> None:
            with torch.no_grad():
                work = dist.all_reduce(given, group=group, **options)
                if work is not None:
                    work.wait()
            same(given.detach().clone(), torch.full((6,), total))
            assert watched.made() == 0

        reduced(tensor.clone(), async_op=True)
        reduced(torch.nn.Parameter(tensor.clone()))
        reduced(torch.stack([tensor, tensor], 1)[:, 0])
        with torch.profiler.profile() as profile:
            reduced(tensor.clone())
        assert "a2a::all_reduce" in {event.key for event in profile.key_averages()}
        with dist._coalescing_manager(group):
            coalesced = [tensor.clone(), tensor.clone()]
            for each in coalesced:
                dist.all_reduce(each, group=group)
        same(torch.cat(coalesced), torch.full((12,), total))
        assert watched.made() == 2  # by a2a.all_reduce
        whole = torch.full((3,), 2, dtype=torch.int64)
        for _ in range(2):
            dist.all_reduce(whole.fill_(2), dist.ReduceOp.PRODUCT, group=group)
            assert whole.tolist() == [2**size] * 3
        assert watched.made() == 0
        given = tensor.clone()
        group.allreduce([given]).wait()
        group.allreduce(given, SUM).wait()
        same(given, torch.full((6,), total * size))
        assert watched.made() == 0
        dist.all_reduce(tensor, group=group)
        assert watched.made() == 1
    assert sum(group.stats()["handed_over"].values()) == 2


def after_the_end() -> None:
    group = group_with_a_communicator()
    dist.barrier()
    method, options = group.all_to_all_single, dist.AllToAllOptions()
    options.asyncOp = False
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="was destroyed"):
        method(torch.empty_like(received()), sent(), [], [], options)


@pytest.mark.parametrize("check", [every_collective, new_splits, the_long_way, after_the_end])
def test_calls_made_before_on_backend_a2a(two: A2AWorld, check: Callable[[], None]) -> None:
    two.run(check)


def test_the_op_of_options_is_found() -> None:
    options = dist.AllreduceOptions()
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"):
        options.reduceOp = op = getattr(dist.ReduceOp, name)
        for given in (options.reduceOp, dist.ReduceOp(op), op):
            assert reduce_op_of(given) is op
    assert reduce_op_of(None) is SUM
    scaled = dist._make_nccl_premul_sum(2.0)
    assert reduce_op_of(scaled) is scaled
