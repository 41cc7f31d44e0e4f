"""Kills: `kill -9` of a rank in the middle of collectives, 50 times at random moments.

    python bench/kills.py [--ranks 4] [--rounds 50] [--short]

Each time every survivor must raise PeerTimeoutError within 2 s of the kill, naming the rank that is gone, then be able to
close its communicator and leave with exit code 0; nothing may be left in /dev/shm. The ranks run all_to_all_single of 64
bytes to 4 MiB and MoE layers as fast as they can, so that the moment falls anywhere in a call.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROUNDS, SHORT_ROUNDS = 50, 3
LIMIT_S = 2.0
START_S = 60.0
LEAVE_S = 15.0
DEVICE_TIMEOUT_S = (
    60.0  # the communicator's own deadline: far beyond the limit, so that only noticing the death can meet it
)
FOREIGN = ("sem.mp-", "pym-", "torch_", "mpich_", "vader_", "sm_segment")  # other programs' names, as they come and go
SIZES = (64, 4096, 1 << 16, 1 << 20, 1 << 22)


@dataclass(frozen=True)
class Seen:
    """What a survivor reports."""

    rank: int
    peer: int
    cause: str
    at: float  # time.monotonic, which all processes of a host share
    text: str


def rank_main(rank: int, ranks: int, seed: int, pipe: Connection, ports: Any) -> None:
    import torch
    import torch.distributed as dist

    import a2a
    from a2a.errors import PeerTimeoutError

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=DEVICE_TIMEOUT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, True, limit, wait_for_workers=False)
        for _ in range(ranks - 1):
            ports.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", ports.get(), ranks, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    comm = a2a.communicator()
    layer = a2a.ExpertParallel(num_experts=8, top_k=2, hidden=256, max_tokens=256, dtype=torch.float32, comm=comm)
    room = max(SIZES) // 4
    tensors = [torch.ones(room), torch.empty(room)], [comm.empty((room,), torch.float32) for _ in range(2)]
    order = random.Random(seed)  # the same on all ranks: a collective's size is
    try:
        for call in range(10**9):
            if call == 1:
                pipe.send("ready")
            what = order.randrange(len(SIZES) + 1)
            if what == len(SIZES):
                ids = torch.randint(0, 8, (256, 2))
                rows, _, routing = layer.dispatch(torch.ones(256, 256), ids)
                layer.combine(rows, routing)
            else:
                source, output = tensors[order.randrange(2)]
                count = SIZES[what] // 4 // ranks * ranks
                a2a.all_to_all_single(output[:count], source[:count], group=comm)
    except PeerTimeoutError as error:
        pipe.send(Seen(rank, error.peer, error.cause, time.monotonic(), str(error)))
    layer.close()
    comm.close()
    with contextlib.suppress(Exception):  # gloo may complain that a peer or the store is gone
        dist.destroy_process_group()


def one_round(context: Any, ranks: int, seed: int) -> str:
    """Start ranks, kill one, hold the survivors to it. Returns what was seen; raises AssertionError for what was wrong."""
    generator = random.Random(seed)
    ports = context.SimpleQueue()
    processes, pipes = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(rank, ranks, seed, theirs, ports), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(START_S), f"rank {rank} did not start within {START_S:g} s"
            assert received(pipe) == "ready", f"rank {rank} could not start; what it said is above"
        victim = generator.randrange(ranks)
        time.sleep(generator.random() * 0.05)
        os.kill(processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        slowest = 0.0
        for rank, pipe in enumerate(pipes):
            if rank == victim:
                continue
            assert pipe.poll(LIMIT_S + 3), (
                f"rank {rank} did not notice within {LIMIT_S + 3:g} s that rank {victim} is gone"
            )
            seen = received(pipe)
            assert isinstance(seen, Seen), f"rank {rank} ended without PeerTimeoutError"
            assert seen.peer == victim, f"rank {rank} named rank {seen.peer} instead of {victim}: {seen.text}"
            assert seen.cause == "died", f"rank {rank} gave {seen.cause!r} as the cause: {seen.text}"
            assert seen.at - killed <= LIMIT_S, f"rank {rank} took {seen.at - killed:.2f} s"
            slowest = max(slowest, seen.at - killed)
        for rank, process in enumerate(processes):
            process.join(LEAVE_S)
            wanted = -signal.SIGKILL if rank == victim else 0
            assert process.exitcode == wanted, f"rank {rank} left with exit code {process.exitcode}, not {wanted}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return f"rank {victim} killed, noticed by all within {slowest * 1e3:.0f} ms"


def received(pipe: Connection) -> Any:
    """What a rank sent, or None if it is gone."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def left_behind(before: set[str]) -> set[str]:
    """What is new in /dev/shm and stays there: other processes' files come and go."""
    for _ in range(20):
        new = {name for name in shared_files() - before if not name.startswith(FOREIGN)}
        if not new:
            return set()
        time.sleep(0.1)
    return new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_ROUNDS} rounds: seconds")
    arguments = parser.parse_args()
    rounds = SHORT_ROUNDS if arguments.short else arguments.rounds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "a2a"])
    before = shared_files()
    for number in range(rounds):
        try:
            seen = one_round(context, arguments.ranks, arguments.seed * 1000 + number)
            new = left_behind(before)
            assert not new, f"left in /dev/shm: {', '.join(sorted(new))}"
        except AssertionError as error:
            print(f"round {number + 1} of {rounds} failed: {error}", file=sys.stderr)
            return 1
        print(f"round {number + 1} of {rounds}: {seen}", flush=True)
    print(
        f"{rounds} kills of one of {arguments.ranks} ranks: every survivor named it in time; nothing left in /dev/shm"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
