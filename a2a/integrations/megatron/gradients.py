"""Megatron's gradient buckets on a2a.

A subclass of `_ParamAndGradBucketGroup` that overrides `start_grad_sync` and `finish_grad_sync`, which belong together: what
one starts the other waits for. With the distributed optimizer a bucket is reduce-scattered, otherwise all-reduced; with
several optimizer instances each shard is then all-reduced across them. `start_param_sync` gathers the parameters again.

Decisions:

* **Everything is asked of a2a by name**, on the groups that Megatron made: no group has to be of backend "a2a", and one
  that spans domains is reduced inside them first. So one optimizer instance will do, where Megatron's way to a hierarchy
  is one for each rack; both work.
* **No coalescing manager**: buckets of a group are calls of their own, first in first out on the group's communicator.
* **Across instances without a stream of Megatron's**: the all-reduce of a bucket starts when its reduce-scatter is done
  (a callback of its future), while the next bucket's reduce-scatter runs.
* **What these three methods don't know stays Megatron's** (`why_megatrons`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import a2a


class Pending:
    """Calls on their way, and those that begin when one of them is done. `wait()` as Megatron calls it on a handle."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._futures: list[Any] = []

    def add(self, work: Any) -> None:
        if work is not None:
            self._works.append(work)

    def then(self, work: Any, start: Any) -> None:
        """Call `start()`, which returns work, when `work` is done; on a GPU at once, on a stream that waits for it."""

        def begin(future: Any) -> None:
            future.value()  # raises what `work` ended with
            self._works.append(start())

        self._futures.append(work.get_future().then(begin))

    def wait(self) -> None:
        for future in self._futures:
            future.wait()
        for work in self._works:
            work.wait()
        self._futures, self._works = [], []


def why_megatrons(ddp_config: Any) -> str | None:
    """Why bucket groups of this configuration are left to Megatron; None: they aren't."""
    if getattr(ddp_config, "reduce_scatter_with_fp32_accumulation", False):
        return "reduce_scatter_with_fp32_accumulation, where Megatron sums by itself (a2a sums in float32 in any case)"
    if getattr(ddp_config, "nccl_ub", False):
        return "nccl_ub, whose buffers are registered with NCCL"
    return None


def bucket_group_class(base: Any, shard_buffer: Any) -> Any:
    """A subclass of Megatron's `_ParamAndGradBucketGroup`."""

    class A2ABucketGroup(base):  # type: ignore[misc]
        grad_reduce_handle: Any
        param_gather_handle: Any

        def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
            if why_megatrons(self.ddp_config) is not None:
                return super().start_grad_sync(force_all_reduce)  # type: ignore[no-any-return]
            if self.is_first_batch and self.grad_reduce_handle is not None:
                return None  # it was started in this first batch already
            assert self.grad_reduce_handle is None, "start_grad_sync: the last one was not finished"
            self._prepare_gradients()
            pending = self._reduce(bool(force_all_reduce))
            if self.ddp_config.overlap_grad_reduce:
                self.grad_reduce_handle = pending
            else:
                pending.wait()
            return None

        def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
            if why_megatrons(self.ddp_config) is not None:
                return super().finish_grad_sync(force_all_reduce)  # type: ignore[no-any-return]
            self.param_gather_dispatched = False
            overlaps = self.ddp_config.overlap_grad_reduce
            if overlaps and getattr(self, "grad_reduce_finished", False):
                return None
            if not overlaps or self.is_first_batch:
                self.start_grad_sync(force_all_reduce=force_all_reduce)
            if overlaps:
                assert self.grad_reduce_handle is not None, (
                    f"finish_grad_sync: nothing was started for this bucket group; {len(self.per_param_grad_ready_counts)} "
                    f"of {len(self.params)} parameters have a gradient"
                )
                self.grad_reduce_handle.wait()
                self.grad_reduce_handle = None
                if hasattr(self, "grad_reduce_finished"):  # from 0.18 on, where reset() clears it
                    self.grad_reduce_finished = True
            if hasattr(self, "_copy_back_extra_main_grads"):
                self._copy_back_extra_main_grads()
            return None

        def start_param_sync(self, force_sync: bool = False) -> None:
            if why_megatrons(self.ddp_config) is not None or not self.ddp_config.use_distributed_optimizer:
                return super().start_param_sync(force_sync)  # type: ignore[no-any-return]
            overlaps = self.ddp_config.overlap_param_gather
            if force_sync and self.param_gather_handle is not None:
                self.param_gather_handle.wait()
                self.param_gather_handle = None
                self._after_param_sync()
                return None
            assert self.param_gather_handle is None, "start_param_sync: the last one was not finished"
            pending = Pending()
            for bucket, shard in zip(self.buckets, self._shards("param"), strict=True):
                pending.add(
                    a2a.all_gather_into_tensor(
                        bucket.param_data, shard, self.intra_distributed_optimizer_instance_group, async_op=True
                    )
                )
            if overlaps and not force_sync:
                self.param_gather_handle = pending
            else:
                pending.wait()
                if overlaps:
                    self._after_param_sync()
            self.param_gather_dispatched = True
            return None

        def _after_param_sync(self) -> None:
            if hasattr(self, "_post_param_sync"):  # from 0.18 on; before, Megatron did it where it waited
                self._post_param_sync()

        def _prepare_gradients(self) -> None:
            """What Megatron does between backward and the reduction."""
            for param in self.params:
                event = getattr(param, "_cudagraph_wgrad_ready_event", None)
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
            for bucket in self.buckets:
                for param in getattr(bucket, "params_with_extra_main_grads", ()):
                    if getattr(param, "main_grad_copy_in_grad_buffer", None) is not None:
                        param.main_grad_copy_in_grad_buffer.copy_(param.main_grad)
            if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
                self.check_grads(
                    check_for_nan_or_inf=self.ddp_config.check_for_nan_in_grad,
                    check_for_large=self.ddp_config.check_for_large_grads,
                )
            with torch.no_grad():
                for bucket in self.buckets:
                    if bucket.gradient_scaling_factor != 1.0:
                        bucket.grad_data *= bucket.gradient_scaling_factor

        def _reduce(self, force_all_reduce: bool) -> Pending:
            config = self.ddp_config
            op = dist.ReduceOp.AVG if config.average_in_collective else dist.ReduceOp.SUM
            scatters = config.use_distributed_optimizer
            group = self.intra_distributed_optimizer_instance_group if scatters else self.data_parallel_group
            across = self.inter_distributed_optimizer_instance_group if self._across_instances() else None
            scatters = scatters and not force_all_reduce
            shards = self._shards("grad") if scatters else [bucket.grad_data for bucket in self.buckets]
            pending = Pending()
            for bucket, shard in zip(self.buckets, shards, strict=True):
                if scatters:
                    work = a2a.reduce_scatter_tensor(shard, bucket.grad_data, op, group, async_op=True)
                else:
                    work = a2a.all_reduce(shard, op, group, async_op=True)
                if across is None:
                    pending.add(work)
                else:
                    pending.then(work, lambda shard=shard: a2a.all_reduce(shard, op, across, async_op=True))
            return pending

        def _across_instances(self) -> bool:
            config = self.ddp_config
            several: bool = config.use_distributed_optimizer and config.num_distributed_optimizer_instances > 1
            return several

        def _shards(self, which: str) -> list[Any]:
            """This rank's part of each bucket, as Megatron caches it."""
            cached = getattr(self, f"cached_{which}_buffer_shard_list")
            for index, bucket in enumerate(self.buckets):
                if cached[index] is None:
                    whole = getattr(bucket, f"{which}_data")
                    cached[index] = shard_buffer(whole, self.intra_distributed_optimizer_instance_size)
            return [shards[self.intra_distributed_optimizer_instance_rank] for shards in cached]

    return A2ABucketGroup
