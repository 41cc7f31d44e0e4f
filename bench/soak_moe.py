"""Soak of ExpertParallel on GPUs: 10,000 layers with fresh random routing, skewed and with empty ranks; no wrong element.

    python bench/soak_moe.py [--ranks 2] [--layers 10000] [--seed 0]

Forward and backward, in whole numbers, so that all that comes home is exact: experts do nothing, y is x times the number of
its ids that are not -1, and so is the gradient of x. Nothing waits between layers but the caller's stream; errors are
counted on the device. One layer in seven has a rank without tokens, one in three sends all to three experts.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from a2a.cli import show
from a2a.cli.ranks import Emit, RanksFailedError, run_ranks

HIDDEN, EXPERTS, TOP_K, TOKENS = 512, 32, 4, 450
LOOKS = 20


@dataclass(frozen=True)
class Options:
    layers: int
    seed: int
    device: str


def work(options: Options, emit: Emit) -> None:
    import torch
    import torch.distributed as dist

    import a2a

    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dtype = torch.bfloat16
    with a2a.communicator(device=device) as comm, contextlib.ExitStack() as stack:
        ep = a2a.ExpertParallel(
            num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, dtype=dtype, comm=comm,
            max_rows=TOKENS * TOP_K * comm.world_size,
        )  # fmt: skip
        stack.callback(ep.close)
        generator = torch.Generator(device=device).manual_seed(options.seed * 1009 + comm.rank)
        mine = random.Random(options.seed * 1009 + comm.rank)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for number in range(options.layers):
            empty = number % 7 == 0 and (number // 7) % comm.world_size == comm.rank
            tokens = 0 if empty else mine.randrange(TOKENS + 1)
            experts = EXPERTS if number % 3 else 3
            x = torch.randint(-8, 9, (tokens, HIDDEN), generator=generator, device=device).to(dtype).requires_grad_()
            ids = torch.randint(-1, experts, (tokens, TOP_K), generator=generator, device=device)
            times = (ids >= 0).sum(1, keepdim=True)
            rows, _, routing = ep.dispatch(x, ids)
            y = ep.combine(rows, routing)
            y.backward(torch.ones_like(y))
            assert x.grad is not None
            wrong += (y != x * times).sum() + (x.grad != times).sum()
            if (number + 1) % max(1, options.layers // LOOKS) == 0:
                comm.check()
                if int(wrong):
                    raise RuntimeError(f"{int(wrong)} elements are wrong on rank {comm.rank} after {number + 1} layers")
                emit({"begin": f"{number + 1:,} layers"})
        emit({"done": comm.world_size})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    done: list[int] = []
    begin = time.monotonic()
    with show.progress(LOOKS) as steps:

        def receive(message: dict[str, Any]) -> None:
            done.extend([message["done"]] if "done" in message else [])
            if "begin" in message:
                steps.begin(message["begin"])

        options = Options(arguments.layers, arguments.seed, arguments.device)
        try:
            run_ranks(work, options, arguments.ranks, receive)
        except RanksFailedError as error:
            print(f"soak failed: {error}", file=sys.stderr)
            return 1
    seconds = time.monotonic() - begin
    print(f"{arguments.layers:,} layers on {done[0]} ranks in {seconds:.1f} s, forward and backward: no wrong element")
    return 0


if __name__ == "__main__":
    sys.exit(main())
