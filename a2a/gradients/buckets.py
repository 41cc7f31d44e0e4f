"""Buckets of one module's gradients in the course of a step: filled by hooks, sent in order, waited for at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from a2a.errors import A2AError
from a2a.gradients.agreement import Named
from a2a.gradients.hierarchy import Hierarchy
from a2a.gradients.layout import BucketPlan, Slot, plan_buckets
from a2a.gradients.pipeline import LEGS, Flight, Pipeline
from a2a.gradients.shards import Shards
from a2a.gradients.stats import Stats
from a2a.gradients.tensors import Tensors


class Bucket:
    """Gradients that travel together, and where they are in this step.

    Attributes:
        views: of each slot, in the shape of its parameter.
        here: slots whose gradients have come.
        flight: once it was sent.
    """

    def __init__(self, number: int, plan: BucketPlan, tensors: Tensors, params: Sequence[Tensor]) -> None:
        self.number, self.plan, self.tensors = number, plan, tensors
        self.views = [_view(tensors.flat, slot, params[slot.param]) for slot in plan.slots]
        self.here: set[int] = set()
        self.flight: Flight | None = None
        self.told = {
            "bytes": plan.count * plan.dtype.itemsize,
            "dtype": str(plan.dtype).removeprefix("torch."),
            "parameters": len(plan.slots),
        }


class Buckets:
    """All buckets of a module; not known before the first backward pass has ended, unless they are scattered."""

    def __init__(
        self,
        named: Named,
        ways: Hierarchy,
        pipeline: Pipeline,
        *,
        bucket_bytes: float,
        wire: str | None,
        average: bool,
        scatter: bool,
    ) -> None:
        self._names, self._params = [name for name, _ in named], [param for _, param in named]
        self._ways, self._pipeline, self._bucket_bytes = ways, pipeline, bucket_bytes
        self._average, self._scatter, self._wire = average, scatter, wire
        self._buckets: list[Bucket] | None = None
        self._where: dict[int, tuple[Bucket, int]] = {}
        self._order: list[int] = []
        self._next = 0  # the bucket that is to be sent next
        self._first: Any = None  # when this pass's first gradient came
        self._shards: Shards | None = None
        self.stats = Stats()
        if scatter and named:
            self._make(range(len(named))[::-1])
            self._store_parameters()
            self._shards = Shards([bucket.tensors for bucket in self._known])
            for bucket in self._known:
                bucket.tensors.flat.zero_()

    def scattered(self, op: str) -> Shards:
        if self._shards is None:
            raise ValueError(f"GradientReducer.{op}: only a reducer made with scatter=True has shards")
        return self._shards

    # ---- a backward pass

    def begin(self) -> None:
        """A backward pass has its first gradient.

        Raises:
            A2AError: a peer has failed.
            RuntimeError: the last one ended with an error after it had sent something.
        """
        self._pipeline.check()
        try:
            self._ways.check()  # on a GPU a peer's failure shows in nothing that is queued
        except A2AError as error:
            raise self._pipeline.fail(LEGS[0], "a backward pass", error) from error
        if self._next:
            raise RuntimeError(
                f"GradientReducer: a backward pass begins, and the last one has not ended: {self._next} of "
                f"{len(self._known)} buckets were sent. Did it raise an error? Ranks may be out of step then; close this "
                f"reducer and make a new one. Is one inside the other, by a reentrant checkpoint? Pass use_reentrant=False "
                f"to torch.utils.checkpoint"
            )
        for bucket in self._buckets or ():
            bucket.here.clear()
        self._order.clear()
        self._first = self._pipeline.mark()

    def take(self, index: int) -> None:
        """Take a parameter's gradient, and send what can be sent."""
        if self._buckets is None:
            if index not in self._order:
                self._order.append(index)
            return
        bucket, number = self._where[index]
        if bucket.flight is not None:
            raise RuntimeError(
                f"GradientReducer: parameter {self._names[index]!r} had another gradient in this backward pass after its "
                f"bucket was sent. Is it part of a reentrant checkpoint? Pass use_reentrant=False to torch.utils.checkpoint"
            )
        self._copy_in(bucket, number)
        bucket.here.add(number)
        while self._next < len(self._buckets) and len((ready := self._buckets[self._next]).here) == len(ready.views):
            self._send(ready)

    def finish(self) -> None:
        """Send what was not, wait for all, and hand out the result."""
        last = self._pipeline.mark()
        if self._buckets is None:
            self._learn()
        for bucket in self._known[self._next :]:
            for number in range(len(bucket.views)):
                if number not in bucket.here:
                    self._copy_in(bucket, number)
            self._send(bucket)
        flights = []
        for bucket in self._known:
            assert bucket.flight is not None
            self._pipeline.wait(bucket.flight)
            self._hand_out(bucket)
            flights.append((bucket.flight, bucket.told))
            bucket.flight = None
        self._next = 0
        self.stats = Stats(self.stats.steps + 1, self._first, last, flights)

    def _send(self, bucket: Bucket) -> None:
        self._next += 1
        bucket.flight = Flight(f"bucket {bucket.number}", bucket.tensors.legs(scatter=self._scatter))
        self._pipeline.submit(bucket.flight)

    @torch.no_grad()
    def _copy_in(self, bucket: Bucket, number: int) -> None:
        """Have a gradient in its slot; one that is a view of the bucket is there already."""
        param, view = self._params[bucket.plan.slots[number].param], bucket.views[number]
        grad = param.grad
        if grad is None:
            if number not in bucket.here:  # scattered gradients are taken away from parameters
                view.zero_()
        elif grad.layout != torch.strided:
            raise TypeError(
                f"GradientReducer: the gradient of {self._names[bucket.plan.slots[number].param]!r} is {grad.layout}; only "
                f"dense ones can be reduced (an Embedding has those with sparse=False)"
            )
        elif self._scatter:
            if number in bucket.here:
                view.add_(grad)
            else:
                view.copy_(grad)
            param.grad = None
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
            param.grad = view

    @torch.no_grad()
    def _hand_out(self, bucket: Bucket) -> None:
        if self._shards is not None:
            self._shards.take(bucket.tensors)
            return
        for slot, view in zip(bucket.plan.slots, bucket.views, strict=True):
            param = self._params[slot.param]
            if param.grad is None or param.grad.data_ptr() != view.data_ptr():
                param.grad = view

    # ---- how buckets come to be

    @property
    def _known(self) -> list[Bucket]:
        assert self._buckets is not None
        return self._buckets

    def _learn(self) -> None:
        """Make buckets for the order of rank 0's gradients, which all ranks receive as gradients are: as a sum.

        Parameters that had none there come last, in reverse order.
        """
        count = len(self._params)
        came = set(self._order)
        order = self._order + [index for index in reversed(range(count)) if index not in came]
        told = self._memory("the order of gradients", count, torch.float64, average=False)  # whole numbers, so exact
        if self._ways.rank == 0:
            told.flat[:count].copy_(torch.tensor(order, dtype=torch.float64))
        flight = Flight("the order of gradients", told.legs())
        self._pipeline.submit(flight)
        self._pipeline.wait(flight)
        self._make([int(index) for index in told.flat[:count].tolist()])

    def _make(self, order: Sequence[int]) -> None:
        plans = plan_buckets(self._params, order, self._bucket_bytes)
        self._buckets = []
        for number, plan in enumerate(plans):
            tensors = self._memory(f"bucket {number}", plan.count, plan.dtype, average=self._average, wire=self._wire)
            bucket = Bucket(number, plan, tensors, self._params)
            self._buckets.append(bucket)
            for place, slot in enumerate(plan.slots):
                self._where[slot.param] = bucket, place

    def _memory(self, what: str, count: int, dtype: torch.dtype, **options: Any) -> Tensors:
        """A bucket's; made by the leg that uses it, which can tell of peers that don't come."""
        made: list[Tensors] = []
        self._pipeline.call(f"the memory of {what}", lambda: made.append(Tensors(self._ways, count, dtype, **options)))
        return made[0]

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """See `GradientReducer.state_dict`."""
        if self._buckets is None:
            return {"order": [], "owed": []}
        order = [self._names[slot.param] for bucket in self._buckets for slot in bucket.plan.slots]
        return {"order": order, "owed": [_copied(bucket.tensors.owed()) for bucket in self._buckets]}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See `GradientReducer.load_state_dict`."""
        if not state["order"]:
            return
        if sorted(state["order"]) != sorted(self._names):
            other = sorted(set(state["order"]) ^ set(self._names))
            raise ValueError(f"GradientReducer.load_state_dict: the state is of another model; {other[:3]} differ")
        if self._buckets is None:
            index = {name: number for number, name in enumerate(self._names)}
            self._make([index[name] for name in state["order"]])
        mine = self.state()
        shapes = [[{name: owed.shape for name, owed in b.items()} for b in one["owed"]] for one in (mine, state)]
        if mine["order"] != state["order"] or shapes[0] != shapes[1]:
            raise ValueError(
                "GradientReducer.load_state_dict: the state is of other buckets, another wire format, another topology or "
                "another rank; make the reducer as it was then, and load before the first backward pass"
            )
        for bucket, owed in zip(self._known, state["owed"], strict=True):
            for name, tensor in bucket.tensors.owed().items():
                tensor.copy_(owed[name])

    # ---- parameters of scattered gradients

    @torch.no_grad()
    def _store_parameters(self) -> None:
        for bucket in self._known:
            for slot, view in zip(bucket.plan.slots, bucket.views, strict=True):
                view.copy_(self._params[slot.param])

    @torch.no_grad()
    def gather_parameters(self) -> None:
        shards = self.scattered("gather_parameters")
        flights = []
        for bucket in self._known:
            shards.fill(bucket.tensors)
            flights.append(Flight(f"the parameters of bucket {bucket.number}", bucket.tensors.legs_of_parts()))
            self._pipeline.submit(flights[-1])
        for bucket, flight in zip(self._known, flights, strict=True):
            self._pipeline.wait(flight)
            for slot, view in zip(bucket.plan.slots, bucket.views, strict=True):
                self._params[slot.param].copy_(view)


def _copied(owed: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in owed.items()}


def _view(flat: Tensor, slot: Slot, param: nn.Parameter | Tensor) -> Tensor:
    """A slot in its parameter's shape, and strides where these leave no holes, so that autograd adds to it in place."""
    part = flat[slot.offset : slot.offset + slot.count]
    if torch._prims_common.is_non_overlapping_and_dense_or_false(param):
        return part.as_strided(param.shape, param.stride(), part.storage_offset())
    return part.view(param.shape)
