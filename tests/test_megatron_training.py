"""Megatron Core trains on a2a as it does without: gradient buckets, and ten steps of a small MoE model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cpu import config, model_parallel, moe_config, moe_layer, needs_megatron, on_cpu, weight
from pool import World
from test_megatron import DEADLINE_S, RELATIVE, calls, close, compare_moe, on_a2a, parallel

pytestmark = needs_megatron


# ---------------------------------------------------------------- gradient buckets


def small_model() -> Any:
    """Five linears, the same on every rank."""
    from megatron.core.transformer.module import MegatronModule

    class Small(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config())
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))
            with torch.no_grad():
                for number, parameter in enumerate(self.parameters()):
                    parameter.copy_(weight(20, number, shape=tuple(parameter.shape)))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    return Small()


def data_parallel(**options: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # Buckets of a few dozen parameters, so that there are several.
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=100, **options)
    return DistributedDataParallel(config(), settings, small_model())


def backward(ddp: Any, seeds: range, alone: bool = False) -> None:
    """A micro-batch of this rank's for each seed; the last one's gradients are on their way afterwards, unless `alone`."""
    for seed in seeds:
        with ddp.no_sync() if alone or seed != seeds[-1] else contextlib.nullcontext():
            ddp(weight(21, dist.get_rank(), seed, shape=(5, 8))).square().sum().backward()


def buckets(ddp: Any) -> list[Any]:
    return [bucket for group in ddp.bucket_groups for bucket in group.buckets]


def expected_gradients(options: dict[str, Any], seeds: range) -> list[Tensor]:
    """Of each bucket the mean over the ranks, by gloo, of what each computes by itself."""
    alone = data_parallel(**options)
    backward(alone, seeds, alone=True)
    means = []
    for bucket in buckets(alone):
        mean = bucket.grad_data.clone()
        dist.all_reduce(mean)
        means.append(mean / dist.get_world_size())
    return means


def check_buckets(instances: int) -> None:
    size = dist.get_world_size()
    for overlap in (False, True):
        for optimizer in (False, True) if instances == 1 else (True,):
            for average in (False, True):
                options = {
                    "overlap_grad_reduce": overlap,
                    "use_distributed_optimizer": optimizer,
                    "average_in_collective": average,
                    "num_distributed_optimizer_instances": instances,
                }
                with on_a2a(), model_parallel(num_distributed_optimizer_instances=instances):
                    ddp = data_parallel(**options)
                    assert type(ddp.bucket_groups[0]).__name__ == "A2ABucketGroup"
                    assert len(buckets(ddp)) >= (3 if overlap else 1)
                    check_steps(ddp, options, size // instances if optimizer else 1)


def check_steps(ddp: Any, options: dict[str, Any], shards: int) -> None:
    """Three steps, the first of which finds out the order of gradients, each of two micro-batches."""
    group = ddp.bucket_groups[0]
    reducing = group.intra_distributed_optimizer_instance_group if shards > 1 else group.data_parallel_group
    for step in range(3):
        seeds = range(2 * step, 2 * step + 2)
        ddp.zero_grad_buffer()
        before = calls(reducing)
        backward(ddp, seeds)
        ddp.finish_grad_sync()
        assert calls(reducing) == before + len(buckets(ddp)), "one call for each bucket, on the last micro-batch only"
        for bucket, mean in zip(buckets(ddp), expected_gradients(options, seeds), strict=True):
            mine = dist.get_rank(reducing) if shards > 1 else 0
            close(bucket.grad_data.chunk(shards)[mine], mean.chunk(shards)[mine])


@pytest.mark.ranks(2)
def test_buckets_are_reduced(world: World) -> None:
    world.run(check_buckets, instances=1, deadline_s=DEADLINE_S)


@pytest.mark.ranks(4)
def test_buckets_are_reduced_over_two_optimizer_instances(world: World) -> None:
    world.run(check_buckets, instances=2, deadline_s=DEADLINE_S)


def check_two_domains() -> None:
    """Two hosts of two ranks, as it were."""
    with mock.patch.dict(os.environ, {"A2A_TOPOLOGY": "cpu:2x2"}):
        for optimizer in (False, True):
            options = {"overlap_grad_reduce": True, "use_distributed_optimizer": optimizer}
            with on_a2a(), model_parallel():
                ddp = data_parallel(**options)
                for step in range(3):
                    ddp.zero_grad_buffer()
                    backward(ddp, range(step, step + 2))
                    ddp.finish_grad_sync()
                    shards = dist.get_world_size() if optimizer else 1
                    mine = dist.get_rank() if optimizer else 0
                    expected = expected_gradients(options, range(step, step + 2))
                    for bucket, mean in zip(buckets(ddp), expected, strict=True):
                        close(bucket.grad_data.chunk(shards)[mine], mean.chunk(shards)[mine])
                group = ddp.bucket_groups[0]
                crossed(group.intra_distributed_optimizer_instance_group if optimizer else group.data_parallel_group)
        with on_a2a(), model_parallel(**parallel(4)):
            layer = moe_layer(moe_config("flex", **parallel(4)))
            compare_moe(layer)
            crossed(layer.token_dispatcher.tp_ep_group)


def crossed(group: Any) -> None:
    """This group's calls went inside domains by shared memory and between them by rails, and none was handed over."""
    from a2a.comm import implicit

    stats = implicit(group).stats()
    assert stats["domains"]["inside"]["collectives"] > 0
    assert all(rail["bytes_sent"] > 0 for rail in stats["domains"]["rails"].values())
    assert stats["handed_over"] == {}


@pytest.mark.ranks(4)
def test_gradients_and_tokens_cross_domains(world: World) -> None:
    world.run(check_two_domains, deadline_s=DEADLINE_S)


def check_parameters() -> None:
    """Each rank updates its part of the parameters; afterwards everybody has all of them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for overlap in (False, True):
        with on_a2a(), model_parallel():
            ddp = data_parallel(
                use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
            )
            backward(ddp, range(2))
            ddp.finish_grad_sync()
            for bucket in buckets(ddp):
                shards = bucket.param_data.chunk(size)
                for other, shard in enumerate(shards):
                    shard.fill_(10 + rank if other == rank else -1)
            if overlap:
                ddp(torch.zeros(1, 8))  # the hooks before each layer wait for its parameters
            else:
                ddp.start_param_sync()
            for bucket in buckets(ddp):
                for other, shard in enumerate(bucket.param_data.chunk(size)):
                    assert torch.equal(shard, torch.full_like(shard, 10 + other))


def test_parameters_are_gathered(world: World) -> None:
    world.run(check_parameters, deadline_s=DEADLINE_S)


# ---------------------------------------------------------------- ten steps


class NoCoalescing:
    """torch's coalescing manager, which gloo lacks: calls are made one by one, and are done when they return."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> NoCoalescing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_all_to_all_single = dist.all_to_all_single


def all_to_all_by_lists(
    output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, **options: Any
) -> Any:
    """torch's function, which on gloo refuses the NumPy arrays that Megatron has."""
    return _all_to_all_single(output, input, list(output_split_sizes), list(input_split_sizes), **options)


@contextlib.contextmanager
def on_gloo() -> Iterator[None]:
    """Megatron as it is, on a CPU."""
    with on_cpu():
        from megatron.core.distributed import param_and_grad_buffer

        with (
            mock.patch.object(param_and_grad_buffer, "_coalescing_manager", NoCoalescing),
            mock.patch.object(dist, "all_to_all_single", all_to_all_by_lists),
        ):
            yield


def language_model(settings: Any) -> Any:
    """The same on every rank, but for the experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(num_experts=settings.num_moe_experts, moe_grouped_gemm=False)
    return GPTModel(settings, spec, vocab_size=32, max_sequence_length=8)


def batch(replica: int, step: int) -> dict[str, Tensor]:
    """Sequences that are easily learnt."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    tokens = (torch.randint(0, 32, (4, 1), generator=generator) + 5 * torch.arange(9)) % 32
    return {
        "input_ids": tokens[:, :-1],
        "position_ids": torch.arange(8).expand(4, -1),
        "attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1),
        "labels": tokens[:, 1:],
    }


def train(dispatcher: str, size: dict[str, Any], steps: int = 10, **ddp_options: Any) -> list[float]:
    """Losses of a language model of two MoE layers under Megatron's DDP and torch's Adam."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = moe_config(dispatcher, num_layers=2, moe_router_dtype="fp32", **size)
    model = language_model(settings)
    ddp = DistributedDataParallel(settings, DistributedDataParallelConfig(bucket_size=2000, **ddp_options), model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)  # so large that rounding stays rounding
    losses = []
    replica = dist.get_rank(parallel_state.get_data_parallel_group())
    for step in range(steps):
        ddp.zero_grad_buffer()
        loss = ddp(**batch(replica, step)).mean()
        loss.backward()
        ddp.finish_grad_sync()
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_ten_steps(size: dict[str, Any]) -> dict[str, list[float]]:
    losses = {}
    with on_gloo(), model_parallel(**size):
        losses["megatron"] = train("alltoall", size)
    for dispatcher in ("alltoall", "flex"):
        with on_a2a(), model_parallel(**size):
            losses[dispatcher] = train(dispatcher, size, overlap_grad_reduce=True)
    return losses


@pytest.mark.ranks(4)
def test_ten_steps_have_the_same_losses(world: World) -> None:
    """Experts over two ranks, each pair twice, so that experts' gradients are reduced too."""
    for losses in world.run(check_ten_steps, size=parallel(2), deadline_s=DEADLINE_S):
        assert losses["megatron"][-1] < 0.9 * losses["megatron"][0], "it learns"
        for dispatcher in ("alltoall", "flex"):
            assert losses[dispatcher] == pytest.approx(losses["megatron"], rel=RELATIVE)


# ---------------------------------------------------------------- the 1F1B schedule


def check_schedule() -> None:
    """One micro-batch's backward between the steps of another's forward, as Megatron's own schedule has it."""
    for dispatcher in ("flex", "alltoall"):
        with on_a2a(), model_parallel(**parallel(2)):
            from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
            from megatron.core.pipeline_parallel.utils import set_streams

            set_streams()
            settings = moe_config(dispatcher, num_layers=2, **parallel(2))
            batches = [batch(dist.get_rank(), step) for step in range(3)]
            plain = language_model(settings)
            expected = [plain(**given) for given in batches]
            torch.autograd.backward(expected, [torch.ones_like(loss) for loss in expected])
            settings.overlap_moe_expert_parallel_comm = True  # asked for at the start it insists on 16 bits
            model = language_model(settings)
            run = TransformerModelChunkSchedulePlan.run
            losses, earlier = [], None
            for given in [*batches, None]:
                plan = None if given is None else model.build_schedule_plan(**given)
                loss = run(plan, earlier, b_grad=torch.ones_like(losses[-1]) if losses else None)
                earlier = plan
                if loss is not None:
                    losses.append(loss)
            for loss, wanted in zip(losses, expected, strict=True):
                close(loss, wanted)
            for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                close(got.grad, wanted.grad)


def test_interleaved_forward_and_backward(world: World) -> None:
    world.run(check_schedule, deadline_s=DEADLINE_S)
