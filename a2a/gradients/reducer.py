"""`GradientReducer`: gradients averaged over all ranks while the backward pass still runs.

Gradients are copied into buckets as autograd makes them. A bucket that is full starts on its way (hierarchy.py) at
once: while it crosses the rails, the next one is reduced in its domain and the backward pass goes on. When the backward
pass ends, what is still missing is sent, and all of it waited for: after `loss.backward()` gradients are final.

Which gradients share a bucket is learnt from the first backward pass: rank 0's order in that pass becomes everybody's,
and is kept. Nothing overlaps in that pass.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from a2a.comm import _resolve_group
from a2a.errors import A2AError
from a2a.gradients.agreement import Named, agree, broadcast_from_first, checked_parameters
from a2a.gradients.buckets import Buckets
from a2a.gradients.hierarchy import Hierarchy
from a2a.gradients.loose import Loose
from a2a.gradients.pipeline import PIPELINES, Flight, Pipeline
from a2a.gradients.wire import make_wire
from a2a.topology import Topology


class GradientReducer:
    """Averages a module's gradients over the ranks of a group, in a hierarchy, behind the backward pass.

        reducer = a2a.GradientReducer(model)     # after the model is on its device; before the first forward pass
        loss.backward()                          # gradients are averaged when this returns
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    Args:
        module: whose parameters' gradients are reduced, those with `requires_grad`; or (name, parameter) pairs, for a
            part of a module. All on one device; float32, bfloat16, float16 or float64.
        group: a ProcessGroup; None: the default one. Collective: all its ranks make their reducer together.
        topology: of the group's ranks, instead of what A2A_TOPOLOGY names or detection finds.
        wire: what gradients look like between domains: None (their own dtype), "bf16" or "fp8" (e4m3 with a float32
            scale for 128 elements). What a format loses is kept, in float32, and sent in the next step (error
            feedback).
        bucket_mb: MiB of gradients that travel together.
        average: the mean over all ranks; False: the sum. With False, zero gradients (or use `no_sync`) between backward
            passes: sums of the first would be summed again.
        scatter: leave each rank a part of the reduced gradients, for an optimizer that is distributed: see `shards`.
            Buckets are then filled in reverse order of the parameters from the first step on.
        broadcast: begin with rank 0's parameters and buffers on all ranks.
    Raises:
        MismatchError: ranks have other parameters (the first that differs is named) or settings.
        ValueError, TypeError: what can't be reduced; peers raise MismatchError.
        PeerTimeoutError: a rank did not come; a later one is raised by the backward pass, or `finish`.

    Sums are taken in one order, written down in a2a/gradients/hierarchy.py: the same bits on every rank and in every
    run. A parameter that a backward pass did not use counts as zeros on that rank, or as what its `.grad` holds, and
    has a gradient afterwards; it is sent when the pass ends. `.grad` are views of the buckets. Parameters of a part
    that is checkpointed want `use_reentrant=False`.

    Cost: one copy of each gradient, and the memory of all gradients once; across domains, payloads beside it, and with
        a format that loses something a float32 for each element of this rank's shards.
    Like: torch.nn.parallel.DistributedDataParallel. Differs: a domain's shared memory, then rails; the same bits
        everywhere; an unused parameter needs no option; `no_sync` counts where the backward pass runs.
    """

    def __init__(
        self,
        module: nn.Module | Iterable[tuple[str, nn.Parameter]],
        group: Any = None,
        topology: Topology | None = None,
        wire: str | None = None,
        bucket_mb: float = 25.0,
        *,
        average: bool = True,
        scatter: bool = False,
        broadcast: bool = True,
    ) -> None:
        problem: ValueError | TypeError | None = None
        named: Named = []
        try:
            named = checked_parameters(module)
            if not bucket_mb > 0:
                raise ValueError(f"GradientReducer: bucket_mb={bucket_mb}; expected a number above 0")
        except (ValueError, TypeError) as error:
            problem = error
        settings = {"wire": wire, "bucket_mb": bucket_mb, "average": average, "scatter": scatter}
        device = named[0][1].device if named else torch.device("cpu")
        self._open(named, group, topology, device, settings, problem)
        if broadcast and self._ways.group is not None:
            broadcast_from_first(module, [param for _, param in named], self._ways.group)
        self._buckets = Buckets(named, self._ways, self._pipeline, bucket_bytes=bucket_mb * 2**20, wire=wire,
                                average=average, scatter=scatter)  # fmt: skip
        own = weakref.ref(self)  # parameters keep their hooks
        self._hooks += [
            param.register_post_accumulate_grad_hook(_hook(own, index))  # type: ignore[no-untyped-call]
            for index, (_, param) in enumerate(named)
        ]

    @classmethod
    def of_tensors(
        cls, device: torch.device, group: Any = None, topology: Topology | None = None, wire: str | None = None
    ) -> GradientReducer:
        """A reducer without a module, for `reduce` and `reduce_across_domains` of tensors on `device`. Collective."""
        self = cls.__new__(cls)
        self._open([], group, topology, device, {"wire": wire}, None)
        self._buckets = Buckets([], self._ways, self._pipeline, bucket_bytes=1, wire=wire, average=True, scatter=False)
        return self

    def _open(
        self,
        named: Named,
        group: Any,
        topology: Topology | None,
        device: torch.device,
        settings: dict[str, Any],
        problem: ValueError | TypeError | None,
    ) -> None:
        if group is not None or dist.is_initialized():
            group = _resolve_group(group, "GradientReducer")
        try:
            make_wire(settings["wire"], torch.float32, device)
        except ValueError as error:
            problem = problem or error
        domains = "None" if topology is None else "/".join(str(list(domain.ranks)) for domain in topology.domains)
        said = ", ".join(f"{name}={value}" for name, value in {**settings, "topology": domains}.items())
        agree(group, named, said, problem)
        self._ways = Hierarchy(group, topology, device)
        self._pipeline = PIPELINES[device.type](device, self._ways.broke)
        self._ways.own(self._pipeline.stop)
        self._loose = Loose(self._ways, average=settings.get("average", True), wire=settings["wire"])
        self._sync, self._finished, self._closed = True, False, False
        self._task = -1  # autograd's number of the backward pass that is under way
        self._hooks: list[Any] = []
        self._closer = weakref.finalize(self, _close, self._pipeline, self._ways, self._hooks)

    # ---- what users call

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to this rank's gradients and send nothing; the next outside reduces the sum."""
        self._check("no_sync")
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Reduce now, if no backward pass has done so since the last call.

        Needed only where some rank's step may have no backward pass, or one that reaches no parameter: then every rank
        calls it once a step, after its backward pass.
        """
        self._check("finish")
        if not self._sync:
            raise RuntimeError("GradientReducer.finish: nothing is reduced inside no_sync(); call it outside")
        if not self._finished:
            self._buckets.begin()
            self._buckets.finish()
        self._finished = False

    @property
    def shards(self) -> list[nn.Parameter]:
        """With `scatter`: this rank's parts of all parameters, flat, for an optimizer that treats each element by
        itself.

        After a backward pass their `.grad` is reduced; call `gather_parameters` after a step. Which elements they are
        is the same in every run.
        """
        return self._buckets.scattered("shards").params

    def gather_parameters(self) -> None:
        """With `scatter`: fill the module's parameters from all ranks' shards. Collective."""
        self._check("gather_parameters")
        self._buckets.gather_parameters()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """With `scatter`: scale the gradients so that their 2-norm over all ranks is at most `max_norm`. Collective.

        Returns: the norm before, the same on all ranks.
        Like: torch.nn.utils.clip_grad_norm_, which does it where gradients are not scattered.
        """
        self._check("clip_grad_norm_")
        return self._buckets.scattered("clip_grad_norm_").clip_(max_norm, self._ways)

    def reduce(self, tensor: Tensor, name: Any) -> torch.futures.Future[Tensor]:
        """Average a tensor over all ranks, in place; the future holds it. Asynchronous; every rank makes the same
        calls.

        For those who have buckets of their own (`a2a.integrations.ddp`).

        Args:
            tensor: contiguous, on the group's device; not to be touched until the future is done.
            name: what it is known by in every step: what a wire format owes is kept by name, size and dtype.
        """
        self._check("reduce")
        _check_contiguous("reduce", tensor)
        devices: list[Any] = [] if tensor.device.type == "cpu" else [tensor.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

        def landed(error: BaseException | None) -> None:
            if error is None:
                future.set_result(tensor)
            else:
                future.set_exception(error)  # type: ignore[arg-type]  # torch says T, and takes an exception

        self._pipeline.submit(Flight(f"tensor {name!r}", self._loose.legs(tensor, name), landed))
        return future

    def reduce_across_domains(self, tensor: Tensor, name: Any) -> None:
        """Average over the domains, in place, a tensor that is the mean of this rank's domain already.

        For those who shard inside the domain themselves (`a2a.integrations.fsdp2`): each rank of a domain has another
        part, and the ranks of a rail have the same part. On a CPU it returns when done, on a GPU it is part of the
        current stream.

        Args:
            tensor, name: as in `reduce`.
        Raises:
            UnsupportedError: domains have different numbers of ranks.
        """
        self._check("reduce_across_domains")
        _check_contiguous("reduce_across_domains", tensor)
        flight = Flight(f"tensor {name!r}", self._loose.legs_across(tensor, name))
        self._pipeline.submit(flight)
        self._pipeline.wait(flight)

    @property
    def topology(self) -> Topology:
        """Of the group's ranks: which of them share memory."""
        return self._ways.topology

    def stats(self) -> dict[str, Any]:
        """Where the time of the latest reduced backward pass went, in microseconds. On a GPU, waits for it.

        Returns: "steps" so far; "bytes_sent" to other domains; "backward_us" from the first gradient to the end of the
            pass; "exposed_us", how long what came after that; "hidden_us" of all buckets; and "buckets", each with its
            "bytes", "dtype", "parameters", "ready_us" (when it was sent, counted from the first gradient), "legs" (how
            long each took), "hidden_us" and "exposed_us" (what of its way lay before and after the end of the pass).
        """
        self._check("stats")
        return {**self._buckets.stats.told(self._pipeline), "bytes_sent": self._ways.bytes_sent}

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on with the same bits: the gradients' order, and this rank's error feedback."""
        self._check("state_dict")
        return self._buckets.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Collective; before the first backward pass, each rank with its own `state_dict`.

        Raises:
            ValueError: it is of another model, other buckets, another topology or another rank.
        """
        self._check("load_state_dict")
        self._buckets.load(state)

    def close(self) -> None:
        """Let go of the module, whose backward passes reduce nothing then, and leave. Local and idempotent."""
        self._closed = True
        self._closer()

    def __enter__(self) -> GradientReducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what autograd calls

    def _came(self, index: int) -> None:
        """A parameter has its gradient."""
        if not self._sync:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._buckets.begin()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._pass_ended, task))
        self._buckets.take(index)

    def _pass_ended(self, task: int) -> None:
        if task != self._task:
            return  # one inside it has reduced everything
        self._task = -1
        self._buckets.finish()
        self._finished = True

    def _check(self, op: str) -> None:
        if self._closed:
            raise A2AError(f"GradientReducer.{op}: this reducer is closed on rank {self._ways.rank}; make a new one")
        self._pipeline.check()


def _hook(reducer: weakref.ref[GradientReducer], index: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        if (alive := reducer()) is not None:
            alive._came(index)

    return hook


def _close(pipeline: Pipeline, ways: Hierarchy, hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    if not ways.forked:
        pipeline.stop()
        ways.close()


def _check_contiguous(op: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"GradientReducer.{op}: a tensor of shape {list(tensor.shape)} is not contiguous")
