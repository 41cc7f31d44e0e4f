"""One training step as a timeline: which GPU computes and which link carries what, when.

All replicas of a pipeline stage do the same at the same time, so one GPU stands for each stage, and 1,024 GPUs take as
long as 32. It has a link of each kind each way (NVLink, NIC) and runs its work in program order, as a stream does:

    parameters   all-gather at the start, a layer before its first use    forward   attention, dispatch, experts, combine
    pipeline     activations and their gradients between stages            backward  the same in reverse
    gradients    reduce-scatter in buckets after a layer's last backward   optimizer its share of the weights, in HBM

A blocking exchange holds the program up; one that overlaps only holds up those who need its result. With `overlap="full"`
the forward of one micro-batch and the backward of an earlier one take turns, a piece each (interleaved 1F1B with one more
warm-up micro-batch, as Megatron orders it), so that either's exchange runs beside the other's compute.

With a NIC a GPU and expert parallelism inside a domain, overlap doesn't lengthen a step. Where dispatch and combine cross
the network or GPUs share a NIC it can: sends and gradients that run beside an exchange take bandwidth from it.

Not modelled: stragglers and jitter, uneven routing, SMs that communication takes from compute, host launch gaps, congestion
inside the network, gradient-norm and other small collectives, gradients of the embedding and the logits. Multi-token
prediction counts as compute alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from a2a.simulate.accounts import COMPUTE, LINKS, Share, accounts
from a2a.simulate.assumptions import Assumptions
from a2a.simulate.timeline import Played, Task, play
from a2a.simulate.workload import WIRE_BYTES, Job, Model, spread
from a2a.topology.presets import HARDWARE


@dataclass(frozen=True)
class Step:
    """A simulated step. All times are modelled; means are over the stages' GPUs."""

    job: Job
    model: Model
    step_s: float
    compute_s: float
    bubble_s: float  # neither computing nor communicating
    shares: dict[str, Share]
    tflops: float  # a GPU, from the model's FLOP without multi-token prediction
    tasks: tuple[Task, ...] = field(repr=False)
    played: Played = field(repr=False)

    @property
    def efficiency(self) -> float:
        """Part of the step in which a GPU computes."""
        return self.compute_s / self.step_s

    @property
    def exposed_s(self) -> float:
        """Seconds of the step in which a GPU communicates and doesn't compute."""
        return self.step_s - self.compute_s - self.bubble_s


@dataclass(frozen=True)
class _Op:
    """A task before it has a number: it waits for the one before it in its list and for those that `needs` names."""

    name: str
    category: str
    seconds: float = 0.0
    moves: tuple[tuple[str, float, float], ...] = ()  # ("up" or "out", bytes, latency): flows that run at once
    needs: tuple[Hashable, ...] = ()
    gives: tuple[Hashable, ...] = ()  # names for what exists once it has ended
    to_stage: int = -1


def _needing(needs: tuple[Hashable, ...], ops: Sequence[_Op]) -> list[_Op]:
    """The ops, of which the first waits for `needs`."""
    return [replace(ops[0], needs=needs), *ops[1:]] if needs else list(ops)


def rows_crossing(model: Model, job: Job, tokens: float) -> tuple[float, float]:
    """Rows that a rank sends to others in a dispatch, uniform routing: (inside the domain, to other domains)."""
    if job.once_per == "copy":
        to_each = tokens * model.top_k / job.ep
    else:
        here = model.experts // job.ep
        none = math.comb(model.experts - here, model.top_k) / math.comb(model.experts, model.top_k)
        to_each = tokens * (1 - none)
    local, _ = spread(job.ep, 1, job.domain)
    return to_each * (local - 1), to_each * (job.ep - local)


class _Builder:
    """Turns a job into tasks."""

    def __init__(self, model: Model, job: Job, assume: Assumptions) -> None:
        self.model, self.job, self.assume = model, job, assume
        self.hardware = HARDWARE[job.hardware]
        self.tasks: list[Task] = []
        self.waits: list[tuple[int, tuple[Hashable, ...]]] = []  # names a task waits for, until all are known
        self.named: dict[Hashable, list[int]] = {}
        self.program = [-1] * job.pp  # the last task that holds each stage's GPU up
        self.tokens = job.micro_batch * model.sequence / job.tp  # of a GPU, sequence-parallel
        peak = self.hardware.fp8_TFLOPS if job.precision == "fp8" else self.hardware.bf16_TFLOPS
        self.flop_per_s = peak * 1e12 * assume.compute_fraction
        self.chunk_starts = [0]
        for count in job.layers_of_chunks(model):
            self.chunk_starts.append(self.chunk_starts[-1] + count)

    # ---- tasks

    def add(self, stage: int, op: _Op, before: int, *, blocks: bool) -> int:
        """Add an op's tasks at a stage after task `before`; returns the number of the last, for the next of its list."""
        after = {number for number in (before, self.program[stage] if blocks else -1) if number >= 0}
        numbers = []
        for kind, num_bytes, seconds in op.moves or (("", 0.0, op.seconds),):
            links = self._links(stage, kind, op.to_stage)
            numbers.append(len(self.tasks))
            self.tasks.append(Task(op.name, op.category, tuple(sorted(after)), seconds, num_bytes, links, stage))
            if op.needs:
                self.waits.append((numbers[-1], op.needs))
        if len(numbers) > 1:  # one that ends with all of them
            self.tasks.append(Task(op.name, "join", tuple(numbers), 0.0, owner=stage))
            numbers.append(len(self.tasks) - 1)
        for name in op.gives:
            self.named.setdefault(name, []).append(numbers[-1])
        if blocks:
            self.program[stage] = numbers[-1]
        return numbers[-1]

    def _links(self, stage: int, kind: str, to_stage: int) -> tuple[int, ...]:
        if not kind:
            return ()
        first = 0 if kind == "up" else 2
        there = stage if to_stage < 0 else to_stage
        return (stage * len(LINKS) + first, there * len(LINKS) + first + 1)

    def blocks(self, op: _Op) -> bool:
        """Whether the GPU's program stands still for an op."""
        if op.category in (COMPUTE, "tensor") or self.job.overlap == "none":
            return True
        return op.category in ("dispatch", "combine") and self.job.overlap != "full"

    def finish(self) -> list[Task]:
        """All tasks, their waits resolved."""
        more: dict[int, set[int]] = {}
        for number, names in self.waits:
            for name in names:
                more.setdefault(number, set()).update(self.named[name])
        return [
            Task(t.name, t.category, tuple(sorted({*t.after, *more[n]})), t.seconds, t.num_bytes, t.links, t.owner)
            if n in more
            else t
            for n, t in enumerate(self.tasks)
        ]

    # ---- pieces of a step

    def compute(
        self, name: str, flop: float, *, needs: tuple[Hashable, ...] = (), gives: tuple[Hashable, ...] = ()
    ) -> _Op:
        return _Op(name, COMPUTE, flop * self.tokens / self.flop_per_s, needs=needs, gives=gives)

    def moving(self, name: str, category: str, up: float, out: float, out_steps: int = 1) -> _Op:
        """An exchange of `up` and `out` bytes a GPU; GPUs that share a NIC share its rate."""
        flows = (("up", up, self.assume.scale_up_latency_us * 1e-6),
                 ("out", out * self.job.gpus_per_nic, self.assume.scale_out_latency_us * 1e-6 * out_steps))  # fmt: skip
        return _Op(name, category, moves=tuple(flow for flow in flows if flow[1]))

    def exchange(self, name: str, category: str, wire: str) -> _Op:
        """A dispatch or combine of the expert-parallel group."""
        up, out = rows_crossing(self.model, self.job, self.tokens)
        row = self.model.hidden * WIRE_BYTES[wire]
        return self.moving(name, category, up * row, out * row)

    def tensor(self, name: str) -> list[_Op]:
        """All-gather and reduce-scatter around a tensor-parallel block."""
        if self.job.tp == 1:
            return []
        to_each = 2 * self.tokens * self.model.hidden * 2  # there and back, bf16; tokens are a rank's share
        local, _ = spread(self.job.tp, 1, self.job.domain)
        return [self.moving(name, "tensor", to_each * (local - 1), to_each * (self.job.tp - local))]

    def send(self, name: str, stage: int, to_stage: int, gives: Hashable) -> _Op:
        """Activations, or their gradients, to another stage's GPU."""
        num_bytes = self.tokens * self.model.hidden * 2
        near = self.job.gpus <= self.job.domain
        op = self.moving(name, "pipeline", num_bytes if near else 0.0, 0.0 if near else num_bytes)
        moves = () if stage == to_stage else op.moves
        return _Op(name, "pipeline", moves=moves, gives=(gives,), to_stage=to_stage)

    def is_moe(self, layer: int) -> bool:
        return layer >= self.model.dense_layers

    def layers(self, chunk: int) -> range:
        return range(self.chunk_starts[chunk], self.chunk_starts[chunk + 1])

    def tail_flop(self, chunk: int) -> float:
        """Logits and multi-token prediction (a layer, its projection, logits again), forward, on the last virtual stage."""
        model = self.model
        if chunk < self.job.pp * self.job.vp - 1:
            return 0.0
        mtp = model.attention_flop() + model.mlp_flop(moe=True) + 4 * model.hidden**2 + model.head_flop()
        return model.head_flop() + model.mtp_layers * mtp

    def forward(self, chunk: int, batch: int) -> Iterator[_Op]:
        model, job, stage = self.model, self.job, chunk % self.job.pp
        what = f"F{batch}"
        for index, layer in enumerate(self.layers(chunk)):
            needs: tuple[Hashable, ...] = (("input", chunk, batch),) if index == 0 and chunk else ()
            needs += (("weights", layer),) if batch == 0 else ()
            attention = self.compute(f"{what} L{layer} attention", model.attention_flop())
            yield from _needing(needs, [*self.tensor(f"{what} L{layer} attention TP"), attention])
            yield from self._mlp(
                f"{what} L{layer}", self.is_moe(layer), model.mlp_flop(moe=self.is_moe(layer)), job.wire
            )
        if tail := self.tail_flop(chunk):
            yield self.compute(f"{what} logits", tail, gives=(("forward", batch),))
        else:
            yield self.send(f"{what} to next", stage, (chunk + 1) % job.pp, ("input", chunk + 1, batch))

    def _mlp(self, name: str, moe: bool, flop: float, wire: str) -> Iterator[_Op]:
        yield from self.tensor(f"{name} MLP TP") if not moe else ()
        yield from (self.exchange(f"{name} dispatch", "dispatch", wire),) if moe else ()
        yield self.compute(f"{name} {'experts' if moe else 'MLP'}", flop)
        yield from (self.exchange(f"{name} combine", "combine", "bf16"),) if moe else ()

    def backward(self, chunk: int, batch: int) -> Iterator[_Op]:
        """Combine's backward sends rows as a dispatch does, and dispatch's as a combine."""
        model, job, stage = self.model, self.job, chunk % self.job.pp
        what, last = f"B{batch}", batch == job.micro_batches - 1
        if tail := self.tail_flop(chunk):
            yield self.compute(f"{what} logits", 2 * tail, needs=(("forward", batch),))
        for index, layer in enumerate(reversed(self.layers(chunk))):
            name, moe = f"{what} L{layer}", self.is_moe(layer)
            needs: tuple[Hashable, ...] = (("gradient", chunk, batch),) if index == 0 and not tail else ()
            part = "experts" if moe else "MLP"
            gives = (("done", layer, "mlp"),) if last else ()
            first = (
                [self.exchange(f"{name} combine backward", "combine", job.wire)]
                if moe
                else self.tensor(f"{name} MLP TP")
            )
            compute = self.compute(f"{name} {part} backward", 2 * model.mlp_flop(moe=moe), gives=gives)
            yield from _needing(needs, [*first, compute])
            if moe:
                yield self.exchange(f"{name} dispatch backward", "dispatch", "bf16")
            yield from self.tensor(f"{name} attention TP")
            gives = (("done", layer, "attention"),) if last else ()
            yield self.compute(f"{name} attention backward", 2 * model.attention_flop(), gives=gives)
        if chunk:
            yield self.send(f"{what} to previous", stage, (chunk - 1) % job.pp, ("gradient", chunk - 1, batch))

    # ---- weights

    def weights(self, layer: int) -> list[tuple[str, float, int, int]]:
        """Of a layer, a GPU: (part that is done when they are, parameters, replicas, ranks between two replicas)."""
        model, job = self.model, self.job
        other = model.attention_params + (0 if self.is_moe(layer) else 3 * model.hidden * model.dense_intermediate)
        if not self.is_moe(layer):
            return [("attention", other / job.tp, job.dp, job.tp)]
        other += model.shared_experts * model.expert_params() + model.hidden * model.experts
        experts = model.experts // job.ep * model.expert_params()
        return [("mlp", experts, job.expert_dp, job.ep), ("attention", other / job.tp, job.dp, job.tp)]

    def reduction(self, name: str, category: str, num_bytes: float, replicas: int, stride: int) -> list[_Op]:
        """A reduce-scatter (or, backwards, an all-gather) of one bucket: inside the domain, then across."""
        local, domains = spread(replicas, stride, self.job.domain)
        if self.job.gradients == "flat":
            ring = (
                num_bytes * (replicas - 1) / replicas
            )  # over every hop; the slowest one, between domains, sets the pace
            op = self.moving(name, category, ring if domains == 1 else 0.0, ring if domains > 1 else 0.0, replicas - 1)
            if not op.moves:
                return []
            # The rank at the domain's edge has its NIC for itself.
            return [replace(op, moves=tuple((kind, ring, latency_s) for kind, _, latency_s in op.moves))]
        inside = self.moving(f"{name} inside", category, num_bytes * (local - 1) / local, 0.0)
        part = num_bytes / local
        across = self.moving(f"{name} across", category, 0.0, part * (domains - 1) / domains, domains - 1)
        return [op for op in (inside, across) if op.moves]

    def stage_layers(self, stage: int) -> list[int]:
        """In the order in which the stage's forward first needs them."""
        return [layer for v in range(self.job.vp) for layer in self.layers(v * self.job.pp + stage)]

    def buckets(self, stage: int, category: str) -> None:
        """Gather a stage's parameters, or reduce its gradients, bucket by bucket: two lanes, inside and across."""
        gathering = category == "parameters"
        width = self.assume.parameter_bytes if gathering else self.assume.gradient_bytes
        lanes: dict[str, int] = {}
        order = self.stage_layers(stage)
        for layer in order if gathering else reversed(order):
            for part, parameters, replicas, stride in self.weights(layer):
                total = parameters * width
                count = max(1, math.ceil(total / (self.job.bucket_mb * 1e6)))
                for index in range(count):
                    ops = self.reduction(
                        f"L{layer} {part} {category} {index}", category, total / count, replicas, stride
                    )
                    last = -1
                    for op in reversed(ops) if gathering else ops:
                        lane = op.moves[0][0]
                        needs = () if gathering or last >= 0 else (("done", layer, part),)
                        queued = replace(op, needs=needs)
                        joined = self._after(stage, last, lanes.get(lane, -1))
                        last = lanes[lane] = self.add(stage, queued, joined, blocks=self.blocks(queued))
                    if last >= 0:
                        self.named.setdefault(("weights", layer) if gathering else ("reduced", stage), []).append(last)
            self.named.setdefault(("weights", layer), [])
        self.named.setdefault(("reduced", stage), [])

    def _after(self, stage: int, a: int, b: int) -> int:
        """One task that ends with both."""
        if a < 0 or b < 0 or a == b:
            return max(a, b)
        self.tasks.append(Task("", "join", (a, b), 0.0, owner=stage))
        return len(self.tasks) - 1

    def optimizer(self, stage: int) -> None:
        kinds = [kind for layer in self.stage_layers(stage) for kind in self.weights(layer)]
        num_bytes = sum(p / replicas for _, p, replicas, _ in kinds) * self.assume.optimizer_bytes
        seconds = num_bytes / (self.hardware.hbm_GBps * 1e9 * self.assume.hbm_fraction)
        self.add(stage, _Op("optimizer", COMPUTE, seconds, needs=(("reduced", stage),)), -1, blocks=True)

    # ---- the whole

    def stage(self, stage: int) -> None:
        """A stage's program."""
        self.buckets(stage, "parameters")
        full = self.job.overlap == "full"
        order = schedule(self.job.pp, self.job.vp, self.job.micro_batches, stage, extra=1 if full else 0)
        for ahead, back in order:
            forward = [] if ahead is None else list(self.forward(*ahead))
            backward = [] if back is None else list(self.backward(*back))
            self.take_turns(stage, forward, backward) if full else self.one_by_one(stage, forward, backward)
        self.buckets(stage, "gradients")
        self.optimizer(stage)

    def one_by_one(self, stage: int, *lists: Sequence[_Op]) -> None:
        for ops in lists:
            before = -1
            for op in ops:
                before = self.add(stage, op, before, blocks=self.blocks(op))

    def take_turns(self, stage: int, *lists: Sequence[_Op]) -> None:
        """A compute op of one list and what follows it up to the next, then of the other."""
        waiting = [list(reversed(ops)) for ops in lists]
        before = [-1] * len(waiting)
        while any(waiting):
            for index, ops in enumerate(waiting):
                computed = False
                while ops and not (computed and ops[-1].category in (COMPUTE, "tensor")):
                    op = ops.pop()
                    computed = computed or op.category == COMPUTE
                    before[index] = self.add(stage, op, before[index], blocks=self.blocks(op))


Piece = tuple[int, int]  # (virtual stage in model order, micro-batch)


def schedule(pp: int, vp: int, batches: int, stage: int, *, extra: int = 0) -> list[tuple[Piece | None, Piece | None]]:
    """Interleaved 1F1B, as Megatron orders it: pairs of a forward and a backward, either of which may be missing.

    `extra`: more warm-up forwards, so that a pair's two pieces are of different micro-batches. Without virtual stages,
    stages then start twice as far apart too: pairs that run as one would otherwise wait for their neighbours' in turn.
    """
    total = batches * vp
    warm = (pp - stage - 1) * (2 if vp > 1 or extra else 1) + (vp - 1) * pp
    warm = min(warm + extra, total)

    def piece(index: int, *, backward: bool) -> Piece:
        if vp == 1:
            return stage, index
        group, inside = divmod(index, pp * vp)
        virtual = vp - 1 - inside // pp if backward else inside // pp
        return virtual * pp + stage, group * pp + inside % pp

    pairs: list[tuple[Piece | None, Piece | None]] = [(piece(k, backward=False), None) for k in range(warm)]
    pairs += [(piece(k + warm, backward=False), piece(k, backward=True)) for k in range(total - warm)]
    return pairs + [(None, piece(k, backward=True)) for k in range(total - warm, total)]


def simulate(model: Model, job: Job, assume: Assumptions | None = None) -> Step:
    """Play one step.

    Raises:
        ValueError: the job's layout can't be, or doesn't lie evenly over the domains.
    """
    job.check(model)
    assume = assume or Assumptions()
    builder = _Builder(model, job, assume)
    for stage in range(job.pp):
        builder.stage(stage)
    tasks = builder.finish()
    up = builder.hardware.scale_up.bandwidth_GBps * 1e9 * assume.scale_up_fraction
    out = builder.hardware.scale_out.bandwidth_GBps * 1e9 * assume.scale_out_fraction
    played = play(tasks, [up, up, out, out] * job.pp)
    step_s = played.length_s
    compute_s, bubble_s, shares = accounts(tasks, played, job.pp)
    tokens = job.global_batch * model.sequence / job.gpus
    tflops = model.token_flop() * tokens / step_s / 1e12
    return Step(job, model, step_s, compute_s, bubble_s, shares, tflops, tuple(tasks), played)
