"""Soak: 100,000 small collectives back to back, with random sleeps; no wrong element, flat memory.

    python bench/soak.py [--ranks 4] [--calls 100000] [--short]

Every call's sizes and contents follow from its number, so each rank knows what it must receive. Tensors are symmetric or
ordinary by turns and differently on each rank; some calls are asynchronous, every fiftieth is a MoE dispatch and combine. A
rank sleeps now and then, for up to 2 ms, before it joins. Memory and open files are looked at ten times on the way: between
the second look and the last they must not grow.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from a2a.cli import show
from a2a.cli.ranks import Emit, RanksFailedError, run_ranks

CALLS, SHORT_CALLS = 100_000, 1_500
LOOKS = 10
GROWTH_KIB = 4096  # allowed from the second look to the last: the allocator's own restlessness
MAX_COUNT = 96  # elements from one rank to another
SLEEP_EVERY = 60
MOE_EVERY = 50
HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 5, 2, 12


@dataclass(frozen=True)
class Options:
    calls: int
    seed: int = 0


def counts(call: int, ranks: int, seed: int) -> np.ndarray[Any, Any]:
    """counts[s, d]: elements from s to d in that call; one call in four is even, some send nothing at all."""
    generator = np.random.default_rng((seed, call))
    if generator.random() < 0.25:
        return np.full((ranks, ranks), generator.integers(0, MAX_COUNT))
    return generator.integers(0, MAX_COUNT, (ranks, ranks)) * (generator.random((ranks, ranks)) < 0.9)


def content(call: int, source: int, destination: int, count: int) -> np.ndarray[Any, Any]:
    """What is sent: numbers that tell call, source, destination and place apart."""
    return np.arange(count, dtype=np.int32) + (call * 1009 + source * 131 + destination * 17) % 1_000_003


def work(options: Options, emit: Emit) -> None:
    import torch

    import a2a

    with torch.no_grad(), a2a.communicator() as comm:
        ranks, rank = comm.world_size, comm.rank
        room = ranks * MAX_COUNT
        pools = {
            "symmetric": (comm.empty((room,), torch.int32), comm.empty((room,), torch.int32)),
            "ordinary": (torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=torch.int32)),
        }
        layer = a2a.ExpertParallel(
            num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, dtype=torch.float32, comm=comm
        )
        mine = random.Random((options.seed << 8) + rank)  # how this rank behaves, unlike the others
        memory: list[dict[str, int]] = []
        for call in range(options.calls):
            if mine.random() < 1 / SLEEP_EVERY:
                time.sleep(mine.random() * 2e-3)
            if call % MOE_EVERY == MOE_EVERY - 1:
                moe_call(layer, call, rank, options.seed)
            else:
                source, output = pools[mine.choice(("symmetric", "ordinary"))]
                exchange_call(comm, source, output, call, options.seed, asynchronous=mine.random() < 0.1)
            if (call + 1) % max(1, options.calls // LOOKS) == 0:
                memory.append(footprint())
                emit({"begin": f"{call + 1:,} calls, rank 0 holds {memory[-1]['rss_kib']:,} KiB"})
        growth = {key: memory[-1][key] - memory[min(1, len(memory) - 1)][key] for key in memory[-1]}
        if growth["rss_kib"] > GROWTH_KIB or growth["files"] > 0:
            raise RuntimeError(
                f"rank {rank} grew by {growth['rss_kib']} KiB and {growth['files']} open files: {memory}"
            )
        emit({"done": {"ranks": ranks, "growth_kib": growth["rss_kib"]}})


def exchange_call(comm: Any, source: Any, output: Any, call: int, seed: int, *, asynchronous: bool) -> None:
    import torch

    import a2a

    ranks, rank = comm.world_size, comm.rank
    table = counts(call, ranks, seed)
    sends, receives = table[rank].tolist(), table[:, rank].tolist()
    outgoing = [content(call, rank, peer, count) for peer, count in enumerate(sends)]
    source[: sum(sends)] = torch.from_numpy(np.concatenate(outgoing))
    got = output[: sum(receives)]
    got.fill_(-1)
    done = a2a.all_to_all_single(got, source[: sum(sends)], receives, sends, group=comm, async_op=asynchronous)
    if asynchronous:
        done.wait()
    expected = np.concatenate([content(call, peer, rank, count) for peer, count in enumerate(receives)])
    wrong = int((got.numpy() != expected).sum())
    if wrong:
        raise RuntimeError(f"call {call}: {wrong} of {len(expected)} elements are wrong on rank {rank}")


def moe_call(layer: Any, call: int, rank: int, seed: int) -> None:
    """Dispatch and combine whole numbers with experts that do nothing and weights of 1: y is top_k times x, exactly."""
    import torch

    generator = torch.Generator().manual_seed((seed << 40) + (call << 8) + rank)
    tokens = int(torch.randint(0, TOKENS + 1, (1,), generator=generator))
    x = torch.randint(-1000, 1000, (tokens, HIDDEN), generator=generator).float()
    ids = torch.randint(0, EXPERTS, (tokens, TOP_K), generator=generator)
    rows, _, routing = layer.dispatch(x, ids)
    y = layer.combine(rows, routing)
    wrong = int((y != TOP_K * x).sum())
    if wrong:
        raise RuntimeError(f"call {call}: {wrong} of {x.numel()} elements came home wrong on rank {rank}")


def footprint() -> dict[str, int]:
    """Resident memory and open files of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return {"rss_kib": int(line.split()[1]), "files": len(os.listdir("/proc/self/fd"))}
    raise RuntimeError("/proc/self/status has no VmRSS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_CALLS:,} calls: seconds")
    arguments = parser.parse_args()
    calls = SHORT_CALLS if arguments.short else arguments.calls
    done: dict[str, Any] = {}
    begin = time.monotonic()
    with show.progress(LOOKS) as steps:

        def receive(message: dict[str, Any]) -> None:
            done.update(message.get("done", {}))
            if "begin" in message:
                steps.begin(message["begin"])

        try:
            run_ranks(work, Options(calls, arguments.seed), arguments.ranks, receive)
        except RanksFailedError as error:
            print(f"soak failed: {error}", file=sys.stderr)
            return 1
    if done:
        seconds, grown = time.monotonic() - begin, done["growth_kib"]
        print(
            f"{calls:,} collectives on {done['ranks']} ranks in {seconds:.1f} s: no wrong element; memory of rank 0 grew by "
            f"{grown} KiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
