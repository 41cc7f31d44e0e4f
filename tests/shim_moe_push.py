"""csrc/cuda/moe_push_*.cu on the emulated machine, behind their own host code: a2a/algorithms/moe_push.py as it is.

A layer is compiled small and gets rounds of random calls. Every tensor that a rank gets is compared with moe_reference, bit
for bit. `python tests/shim_moe_push.py LAYER FIRST SEEDS [SCENARIO ...]` runs one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from a2a.algorithms import moe_push, moe_push_geometry, moe_push_order, moe_push_ready
from a2a.algorithms.moe_base import Dispatched, Origins
from moe_reference import Tokens
from pool import PRELOADED
from shim_build import Replacement, library, located
from shim_host import CLOSED_AT, OK_AT, FailedError, FakeCuda, FakeTorch, Machine, Rank
from shim_moe_rounds import F16, F32, OPS, Layer, Round, compare, make_round

SOURCES = ("moe_push_send", "moe_push_expand", "moe_push_dots", "moe_push_sum")
SMALL = (
    *(Replacement(f"{name}.cu", "kDeep = 8", "kDeep = 2") for name in SOURCES[:2]),
    Replacement("moe_push_dots.cu", "kDeep = 4", "kDeep = 2"),
    Replacement("moe_push_dots.cu", "kDotThreads = 320", "kDotThreads = 64"),
    Replacement("moe_push_sum.cuh", "kThreads = 128", "kThreads = 64"),
)


def replacements(layer: Layer) -> tuple[Replacement, ...]:
    apart = Replacement("moe_push_send.cu", "kTopK <= 16 * kTeam", "kTopK < kTeam / 4")
    return (*SMALL, apart) if layer.planned_apart else SMALL


# ---- the op, made small


def set_up(layer: Layer) -> dict[str, int]:
    """Have a2a/algorithms/moe_push.py run on the machine, cut as this layer says. Returns its kernels' defines."""
    m: Any = moe_push
    g: Any = moe_push_geometry
    m.torch, m._TEAM, m._TILE_BYTES = FakeTorch(sms=2), layer.team, (64, 64, 128)
    moe_push_ready.torch = m.torch
    m._SUM_DEEP, m._SUM_THREADS, m._DOT_DEEP, m._DOT_THREADS = 1, 64, 2, 64
    spec, world = layer.spec(), layer.world_size
    g.SENDERS, g.STAGING_BYTES = layer.senders, _STAGING_BYTES
    g.CHUNK_BYTES = max(1, spec.max_tokens * spec.row_bytes // layer.chunks)
    cut = _GEOMETRY_OF(spec, world)
    if layer.ring is not None:
        g.STAGING_BYTES = 2 * cut.ranges * layer.ring * (cut.slot_bytes + cut.meta_bytes)
    m.Geometry.of = staticmethod(lambda s, w: dataclasses.replace(_GEOMETRY_OF(s, w), summers=layer.summers))
    m.cuda = asks = _Asks()
    exchange: Any = object.__new__(moe_push.PushExchange)
    exchange._spec, exchange._geometry, exchange._comm = (
        spec,
        m.Geometry.of(spec, world),
        SimpleNamespace(world_size=world),
    )
    exchange._transport = SimpleNamespace(place=SimpleNamespace(device=None, arch="", context=0, host=0))
    with contextlib.suppress(_AskedError):
        exchange._load(0)
    m.cuda = moe_push_ready.cuda = FakeCuda(asks.defines)  # type: ignore[assignment]
    return asks.defines


_GEOMETRY_OF, _STAGING_BYTES = moe_push_geometry.Geometry.of, moe_push_geometry.STAGING_BYTES


class _AskedError(Exception):
    pass


class _Asks:
    """Notes the defines of the modules that are asked for."""

    def __init__(self) -> None:
        self.defines: dict[str, int] = {}

    def modules(self, names: list[str], target: Any, defines: dict[str, int]) -> None:
        assert tuple(names) == SOURCES
        self.defines = dict(defines)
        raise _AskedError


# ---- on a rank


class Calls:
    """A rank's calls: `got` has what came of each round, filled when the program has ended."""

    def __init__(self, rank: Rank, layer: Layer) -> None:
        self.rank, self.layer = rank, layer
        self.exchange = moe_push.PushExchange(rank, layer.spec())  # type: ignore[arg-type]
        rank.whole_blocks = frozenset(
            call.function
            for name, (call, _) in self.exchange._calls.items()
            if name.startswith(("send", "sum", "finish"))
        )

    def round(self, made: Round) -> dict[str, Tensor]:
        rank, me = self.rank, self.rank.rank
        tokens, (x, scales) = made.tokens[me], made.payloads[me]
        given = [rank.put(t) for t in (x, scales, tokens.topk_ids_TK, tokens.topk_weights_TK)]
        out = self.exchange.dispatch(*given)  # type: ignore[arg-type]
        self.begun(made, out, given)
        del given
        origins = Origins(out.row_rank_R, out.row_token_R, out.row_k_R, out.row_index_R, out.topk_ids_TK, out.plan)
        weights = out.row_weights_R
        answers = {"rows": out.rows, "rows_per_expert": out.rows_per_expert_L, "offsets": out.offsets_L,
                   "weights": weights, "rank": out.row_rank_R, "token": out.row_token_R, "k": out.row_k_R,
                   "overflow": out.overflow, "index": out.row_index_R, "scales": out.scales}  # fmt: skip
        got = {name: rank.get(tensor) for name, tensor in answers.items() if name in made.expected[me]}
        self.routing = origins, weights
        del out, answers, origins, weights
        for call in made.calls:
            self.call(made, call, got)
        return got

    def begun(self, made: Round, out: Dispatched, given: list[Tensor | None]) -> None:
        """A dispatch has been asked for."""

    def combine(self, made: Round, weights: Tensor | None, origins: Origins) -> Tensor:
        return self.exchange.combine(self.rank.put(made.out_rows[self.rank.rank]), weights, origins)  # type: ignore[arg-type]

    def call(self, made: Round, call: str, got: dict[str, Tensor]) -> None:
        """One of those that follow a dispatch."""
        rank, me, (origins, weights) = self.rank, self.rank.rank, self.routing
        if call == "combine":
            got["y"] = rank.get(self.combine(made, weights if made.weighted else None, origins))
        elif call == "combine_backward":
            rows = rank.put(made.out_rows[me]) if made.variant == "dots" else None
            used = None if made.variant == "plain" else weights
            of_rows, of_weights = self.exchange.combine_backward(rank.put(made.grads_y[me]), rows, used, origins)
            got["grad_rows"], got["grad_weights"] = rank.get(of_rows), rank.get(of_weights)
        else:
            grads, of_rows = rank.put(made.grads_rows[me]), rank.put(made.grads_weights[me])
            of_x, of_weights = self.exchange.dispatch_backward(grads, of_rows, origins)
            got["grad_x"], got["grad_topk_weights"] = rank.get(of_x), rank.get(of_weights)


def rounds_of(
    layer: Layer, path: Path, seed: int, scenario: str, calls_of: Callable[[Rank, Layer], Any]
) -> Iterator[tuple[Round, list[dict[str, Tensor]]]]:
    """Rounds one after the other, without a wait between them unless the layer needs it; and what each rank got of them."""
    rounds = [make_round(layer, 1000 * seed + i) for i in range(layer.rounds)]
    answers: list[list[dict[str, Tensor]]] = [[] for _ in range(layer.world_size)]

    def program(rank: Rank) -> None:
        calls = calls_of(rank, layer)
        for made in rounds:
            if rank.random.random() < 0.3:
                rank.be_late(rank.random.randrange(3000))
            answers[rank.rank].append(calls.round(made))
        rank.synchronize()
        assert not rank.record, f"rank {rank.rank}: a failure was recorded: {rank.record:x}"

    Machine(path, scenario, seed, layer.world_size).run(program)
    return zip(rounds, map(list, zip(*answers, strict=True)), strict=True)


def exchanges(layer: Layer, path: Path, seed: int) -> None:
    for number, (made, answers) in enumerate(rounds_of(layer, path, seed, "exchanges", Calls)):
        for rank, got in enumerate(answers):
            compare(made, rank, got, f"seed {seed}, round {number}")


# ---- failures


CAUSES = {"absent": 1, "closed": 3, "mismatch": 4, "overflow": 6, "refused": 8, "out_of_range": 10}


class Failing:
    """A call in which one rank, the culprit, does otherwise; then one more of everybody."""

    def __init__(self, layer: Layer, how: str, seed: int) -> None:
        r = random.Random(seed)
        self.layer, self.how, self.culprit = layer, how, r.randrange(layer.world_size)
        self.op = "dispatch" if how in ("overflow", "out_of_range") else r.choice(OPS)
        rounds = (make_round(layer, seed + i) for i in itertools.count())
        made = next(m for m in rounds if not any(e["overflow"] for e in m.expected))
        self.made = dataclasses.replace(made, calls=("combine",), variant="dots")

    def program(self, rank: Rank) -> None:
        calls = Calls(rank, self.layer)
        made = self.made
        calls.round(made)  # all goes well
        rank.synchronize()
        assert not rank.record, f"{rank.record:x}"
        if rank.random.random() < 0.5:
            rank.be_late(rank.random.randrange(5000))
        if rank.rank == self.culprit and not self.otherwise(rank, calls):
            return
        with contextlib.suppress(FailedError):
            self.call(calls, self.op)
        rank.synchronize()
        record = rank.record
        if record or self.how != "overflow":  # whose others may be through with the call before they are told
            self.check(rank, record)
        with contextlib.suppress(FailedError):
            self.call(calls, "combine")
        rank.synchronize()
        self.check(rank, rank.record)
        assert rank.record == record or not record, "the record has changed"

    def otherwise(self, rank: Rank, calls: Calls) -> bool:
        """What the culprit does; whether it goes on with the call."""
        if self.how == "closed":
            for peer in range(rank.world_size):
                rank.store(peer, CLOSED_AT + 8 * rank.rank, 1)
        elif self.how == "refused":
            calls.exchange.refuse(self.op, "")
        elif self.how == "mismatch":
            calls.exchange._asks[self.op] = ("something else", "something else")
        return self.how in ("mismatch", "overflow", "out_of_range")

    def call(self, calls: Calls, op: str) -> None:
        rank, me, made = calls.rank, calls.rank.rank, self.made
        if op == "dispatch":
            tokens, ids = made.tokens[me], made.tokens[me].topk_ids_TK
            x, scales = made.payloads[me]
            if self.how == "out_of_range" and me == self.culprit:
                ids, x = (
                    torch.full((1, self.layer.top_k), self.layer.num_experts),
                    torch.zeros(1, self.layer.hidden, dtype=x.dtype),
                )
                tokens = Tokens(x, ids)
            elif self.how == "overflow":  # all tokens to one expert of the culprit's
                expert = self.layer.spec().expert_to_rank.index(self.culprit)
                x = torch.zeros(self.layer.max_tokens, self.layer.hidden, dtype=x.dtype)
                tokens = Tokens(x, torch.full((self.layer.max_tokens, self.layer.top_k), expert))
                ids = tokens.topk_ids_TK
            calls.exchange.dispatch(rank.put(x), rank.put(scales), rank.put(ids), rank.put(tokens.topk_weights_TK))  # type: ignore[arg-type]
        else:
            calls.call(dataclasses.replace(made, calls=(op,)), op, {})

    def check(self, rank: Rank, record: int) -> None:
        cause, by, who = record >> 48, record >> 32 & 0xFFFF, record >> 16 & 0xFFFF
        told = (
            f"rank {rank.rank} was told cause {cause} of rank {who} by {by}; the culprit is {self.culprit}: {self.how}"
        )
        mutual = self.how == "mismatch" and by == self.culprit
        assert cause == CAUSES[self.how] and (who == self.culprit or mutual), told
        assert rank.word(OK_AT, ctypes.c_uint32).value == 0, "ok is still set"


def failures(layer: Layer, path: Path, seed: int, how: str) -> None:
    machine = Machine(path, how, seed, layer.world_size)
    machine.run(Failing(layer, how, seed).program)


LAYERS = {
    "one_chunk": Layer(),
    "chunks": Layer(world_size=3, chunks=4, max_tokens=30, planned_apart=True),
    "one_rank": Layer(world_size=1, chunks=3, max_tokens=20, alignment=4),
    "eight_ranks": Layer(world_size=8, max_tokens=9, num_experts=17, top_k=4, hidden=16, summers=1, rounds=2),
    "two_warps": Layer(max_tokens=40, max_rows=400, chunks=2, team=64),
    "max_rows": Layer(world_size=3, max_tokens=6, max_rows=80, top_k=2, rounds=5),
    "dispatches": Layer(max_tokens=2, max_rows=20, top_k=1, hidden=8, rounds=20, only_dispatch=True),
    "overflows": Layer(max_tokens=20, max_rows=100),
    "short_ring": Layer(world_size=3, chunks=5, ring=2, max_tokens=14, num_experts=4, top_k=2, hidden=24, rounds=2),
    "ring_of_a_chunk": Layer(world_size=2, chunks=6, ring=5, max_tokens=48, hidden=16, max_rows=400, alignment=8),
    "ranges": Layer(
        world_size=2, senders=2, chunks=3, max_tokens=50, planned_apart=True, max_rows=200, overflow="drop"
    ),
    "many_ranges": Layer(world_size=2, senders=16, max_tokens=60, hidden=16, top_k=2, rounds=2, planned_apart=True),
    "pieces": Layer(world_size=3, hidden=520, max_tokens=7, max_rows=80, dtype=F16),
    "wide": Layer(
        world_size=3, hidden=264, max_tokens=9, wire_combine="float32", max_rows=25, overflow="drop", chunks=3
    ),
    "float32": Layer(world_size=2, hidden=260, max_tokens=12, dtype=F32, scattered=True, chunks=2),
    "compact": Layer(world_size=3, layout="compact", max_tokens=20, alignment=4, planned_apart=True),
    "compact_rows": Layer(world_size=2, layout="compact", max_rows=60, overflow="drop", chunks=3, num_experts=12),
    "top_1": Layer(world_size=3, top_k=1, num_experts=2, chunks=2, max_rows=100),
    "top_32": Layer(world_size=3, top_k=32, num_experts=40, max_tokens=8, hidden=8, rounds=2),
    "top_8": Layer(world_size=2, top_k=8, num_experts=3, max_tokens=20, hidden=72, chunks=7, planned_apart=True),
    "one_expert": Layer(world_size=3, num_experts=1, top_k=2, chunks=2, alignment=16),
    "fp8": Layer(world_size=2, wire="fp8", hidden=264, max_tokens=10, max_rows=200),
    "fp8_rows": Layer(
        world_size=3, wire="fp8", rows="wire", hidden=136, max_tokens=10, alignment=4, dtype=F16, scale=100.0
    ),
    "mxfp8": Layer(world_size=3, wire="mxfp8", hidden=72, max_tokens=20, chunks=3, dtype=F16, scale=0.01),
    "mxfp8_rows": Layer(
        world_size=2, wire="mxfp8", rows="wire", layout="compact", hidden=264, dtype=F32, max_tokens=12
    ),
    # With ready flags: shim_moe_ready.py
    "ready": Layer(chunks=3, max_tokens=12, max_rows=100, alignment=4, ready_rows=4, rounds=2),
    "ready_chunks": Layer(world_size=3, chunks=4, max_tokens=30, max_rows=400, alignment=8, ready_rows=8, hidden=72),
    "ready_exact": Layer(ready_rows=3, rounds=4),
    "ready_compact": Layer(layout="compact", max_rows=60, overflow="drop", chunks=3, num_experts=12, ready_rows=5),
    "ready_wire": Layer(
        wire="mxfp8",
        rows="wire",
        layout="compact",
        hidden=264,
        dtype=F16,
        alignment=4,
        max_tokens=8,
        ready_rows=4,
        rounds=2,
    ),
    "ready_ring": Layer(world_size=3, chunks=5, ring=2, max_tokens=14, num_experts=4, top_k=2, hidden=24, ready_rows=6),
}

FAILURES = [("one_chunk", how) for how in CAUSES if how != "overflow"]
FAILURES += [
    ("short_ring", "absent"),
    ("chunks", "closed"),
    ("chunks", "refused"),
    ("chunks", "out_of_range"),
    ("overflows", "overflow"),
    ("ready", "unmarked"),
    ("ready", "missing"),
]


# ---- jobs: a process each, since whatever is noticed ends it


def _job(
    folder: Path,
    layer: Layer,
    scenarios: Sequence[str],
    first: int,
    seeds: int,
    mutations: Sequence[Replacement],
    log: Path,
) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    host = [m for m in mutations if m.file.endswith(".py")]
    for module in (moe_push_order, moe_push) if host else ():
        source = Path(module.__file__)
        text = functools.reduce(
            lambda text, m: m.apply(text) if m.file == source.name else text, host, source.read_text()
        )
        exec(compile(text, str(source), "exec"), module.__dict__)
    defines = set_up(layer)
    kernels = [m for m in mutations if m not in host]
    import shim_moe_ready  # which knows this module

    names = SOURCES if layer.ready_rows is None else (*SOURCES, "make_rows")
    path = library(folder, names, defines, (*replacements(layer), *kernels))
    kind: Any = sys.modules[__name__] if layer.ready_rows is None else shim_moe_ready
    for seed in range(first, first + seeds):
        for scenario in scenarios:
            if scenario == "exchanges":
                kind.exchanges(layer, path, seed)
            else:
                kind.failures(layer, path, seed, scenario)


def run(
    folder: Path,
    layer: Layer,
    scenarios: Sequence[str],
    seeds: int,
    mutations: Sequence[Replacement] = (),
    first: int = 1,
    timeout_s: float | None = 600,
) -> tuple[int, str]:
    """Run scenarios; the exit code, and what was said, with lines of the sources in the place of addresses."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    log = Path(tempfile.mkstemp(prefix="job-", dir=folder)[1])
    process = context.Process(target=_job, args=(folder, layer, scenarios, first, seeds, mutations, log))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        return -9, f"not over within {timeout_s} s; {log.read_text()}"
    return process.exitcode, located(log.read_text())


def run_all(folder: Path, seeds: int) -> int:
    """Every layer and every failure; one a core at a time. The first exit code that is not 0."""

    def one(job: tuple[str, str]) -> int:
        name, scenario = job
        code, said = run(folder, LAYERS[name], (scenario,), seeds, timeout_s=None)
        print(f"moe_push, {name}, {scenario}: {said or 'ok'}", flush=True)
        return code

    jobs = [(name, "exchanges") for name in LAYERS if name != "overflows"] + FAILURES
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return next((code for code in pool.map(one, jobs) if code), 0)


def main(name: str, first: str, seeds: str, *scenarios: str) -> int:
    """Some seeds of one layer."""
    with tempfile.TemporaryDirectory() as folder:
        code, said = run(
            Path(folder), LAYERS[name], scenarios or ("exchanges",), int(seeds), first=int(first), timeout_s=None
        )
    print(said)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
