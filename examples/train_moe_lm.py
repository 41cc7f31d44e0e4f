"""Train a byte-level Transformer language model whose experts live on several ranks.

    python examples/train_moe_lm.py                    # 4 CPU ranks: a2a, then gloo, and a table of both
    python examples/train_moe_lm.py --check            # also the same model on one process: the losses must agree
    torchrun --nproc-per-node 4 examples/train_moe_lm.py --backend a2a

Attention, router and embeddings are replicated: every rank has a slice of the batch, and their gradients are summed over
ranks. Experts are sharded: rank r owns a block of them, tokens travel there and back. The text is the source of Python's
standard library, which is on every machine that can run this.

Shape suffixes: B sequences, S bytes a sequence, T tokens of this rank (B * S), K experts a token, D model width, E experts
of this rank, F expert width, R rows received by this rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import a2a

LAYERS, WIDTH, HEADS, EXPERTS, TOP_K, EXPERT_WIDTH = 2, 128, 4, 16, 2, 256
SEQUENCES, LENGTH, LEARNING_RATE, WARM_UP_STEPS = 16, 128, 1e-3, 2
TOLERANCE = 1e-4  # between the losses of many processes and of one, relative


class Result(NamedTuple):
    losses: list[float]
    tokens_per_s: float
    dispatch_share: float  # of the step's time, forward and backward, waiting for other ranks included
    combine_share: float


# ---- where time goes -------------------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the time spent in named parts, in forward and in backward."""

    def __init__(self) -> None:
        self.seconds = {"dispatch": 0.0, "combine": 0.0}

    def start(self, name: str) -> None:
        self.seconds[name] -= time.perf_counter()

    def stop(self, name: str) -> None:
        self.seconds[name] += time.perf_counter()


class InBackward(torch.autograd.Function):
    """The identity; its backward calls `act(name)`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, act: Callable[[str], None], name: str) -> Tensor:
        ctx.act, ctx.name = act, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.act(ctx.name)
        return grad, None, None


# ---- two ways to take tokens to their experts and back ---------------------------------------------------------------


def experts_of(rank: int, world_size: int) -> range:
    """Contiguous blocks; the first EXPERTS mod world_size ranks have one more."""
    each, more = divmod(EXPERTS, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def with_a2a(world_size: int) -> a2a.ExpertParallel:
    """Rows arrive sorted by expert, a token crosses to a rank once however many of its experts live there."""
    max_tokens = -(-SEQUENCES // world_size) * LENGTH
    return a2a.ExpertParallel(
        num_experts=EXPERTS, top_k=TOP_K, hidden=WIDTH, max_tokens=max_tokens, dtype=torch.float32
    )


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.splits = sent, received
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllToAll.apply(grad, *ctx.splits), None, None


class ByHand:
    """The same by hand: sort by expert, exchange counts, then rows; with one rank nothing is exchanged."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.experts_of_ranks = [len(experts_of(r, world_size)) for r in range(world_size)]
        self.rank, self.world_size = rank, world_size

    def exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return AllToAll.apply(rows, received, sent) if self.world_size > 1 else rows

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        order = ids_TK.flatten().argsort(stable=True)
        sent_by_expert = ids_TK.flatten().bincount(minlength=EXPERTS)
        mine = self.experts_of_ranks[self.rank]
        received_WE = self.exchange(sent_by_expert, [mine] * self.world_size, self.experts_of_ranks).view(-1, mine)
        sent = [int(counts.sum()) for counts in sent_by_expert.split(self.experts_of_ranks)]
        received = received_WE.sum(1).tolist()
        arrived_RD = self.exchange(x_TD[order // TOP_K], received, sent)
        experts_R = torch.arange(mine).repeat(self.world_size).repeat_interleave(received_WE.flatten())
        by_expert = experts_R.argsort(stable=True)
        routing = (order, by_expert, received, sent, weights_TK)
        return arrived_RD[by_expert], received_WE.sum(0), routing

    def combine(self, out_RD: Tensor, routing: Any) -> Tensor:
        order, by_expert, received, sent, weights_TK = routing
        returned = self.exchange(out_RD[by_expert.argsort()], sent, received)
        weighted = returned * weights_TK.flatten()[order][:, None]
        return weighted.new_zeros(len(weights_TK), WIDTH).index_add(0, order // TOP_K, weighted)


# ---- the model -------------------------------------------------------------------------------------------------------


class MoE(nn.Module):
    """A router and this rank's experts. An expert's weights depend on its number only, not on who owns it."""

    def __init__(self, layer: int, mine: range, exchange: a2a.ExpertParallel | ByHand, stopwatch: Stopwatch) -> None:
        super().__init__()
        self.exchange, self.stopwatch = exchange, stopwatch
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        seeds = [torch.Generator().manual_seed(1000 * layer + expert) for expert in mine]
        w_in = torch.stack([torch.randn(WIDTH, EXPERT_WIDTH, generator=seed) for seed in seeds])
        w_out = torch.stack([torch.randn(EXPERT_WIDTH, WIDTH, generator=seed) for seed in seeds])
        self.w_in_EDF = nn.Parameter(w_in / WIDTH**0.5)
        self.w_out_EFD = nn.Parameter(w_out / EXPERT_WIDTH**0.5)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(-1).topk(TOP_K)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        x_TD = InBackward.apply(x_TD, self.stopwatch.stop, "dispatch")
        self.stopwatch.start("dispatch")
        rows_RD, rows_per_expert, routing = self.exchange.dispatch(x_TD, ids_TK, weights_TK)
        self.stopwatch.stop("dispatch")
        out_RD = self.experts(InBackward.apply(rows_RD, self.stopwatch.start, "dispatch"), rows_per_expert)
        out_RD = InBackward.apply(out_RD, self.stopwatch.stop, "combine")
        self.stopwatch.start("combine")
        y_TD = self.exchange.combine(out_RD, routing)
        self.stopwatch.stop("combine")
        return InBackward.apply(y_TD, self.stopwatch.start, "combine")

    def experts(self, rows_RD: Tensor, rows_per_expert: Tensor) -> Tensor:
        blocks = rows_RD.split(rows_per_expert.tolist())
        return torch.cat(
            [functional.gelu(x @ up) @ down for x, up, down in zip(blocks, self.w_in_EDF, self.w_out_EFD, strict=True)]
        )


class Block(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.norm_attention, self.norm_moe = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.moe = moe

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm_attention(x_BSD)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.project(attended.transpose(1, 2).flatten(2))
        return x_BSD + self.moe(self.norm_moe(x_BSD).flatten(0, 1)).view_as(x_BSD)


class LanguageModel(nn.Module):
    def __init__(self, mine: range, exchange: a2a.ExpertParallel | ByHand, stopwatch: Stopwatch) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(MoE(layer, mine, exchange, stopwatch)) for layer in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))

    def forward(self, bytes_BS: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(bytes_BS) + self.position.weight))


# ---- training --------------------------------------------------------------------------------------------------------


def read_text() -> Tensor:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


def train(backend: str, steps: int, rank: int, world_size: int) -> Result:
    """Train for `steps` steps; the sequences, and so the losses, don't depend on the number of ranks."""
    text, stopwatch = read_text(), Stopwatch()
    exchange = with_a2a(world_size) if backend == "a2a" else ByHand(rank, world_size)
    torch.manual_seed(0)
    model = LanguageModel(experts_of(rank, world_size), exchange, stopwatch)
    replicated = [p for name, p in model.named_parameters() if not name.endswith(("w_in_EDF", "w_out_EFD"))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, start = [], 0.0
    for step in range(steps):
        if step == min(WARM_UP_STEPS, steps - 1):
            start, stopwatch.seconds = time.perf_counter(), {"dispatch": 0.0, "combine": 0.0}
        starts = torch.randint(len(text) - LENGTH, (SEQUENCES,), generator=torch.Generator().manual_seed(step))
        batch = torch.stack([text[i : i + LENGTH + 1] for i in starts.tolist()[rank::world_size]]).long()
        logits = model(batch[:, :-1]).flatten(0, 1)
        # Divided by the tokens of all ranks: then gradients, and losses, only need to be summed.
        loss = functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum") / (SEQUENCES * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if world_size > 1:
            gradients = torch.cat([total.view(1), *(p.grad.flatten() for p in replicated)])
            dist.all_reduce(gradients)
            total, *parts = gradients.split([1, *(p.numel() for p in replicated)])
            for parameter, part in zip(replicated, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()
        losses.append(total.item())
        if rank == 0:
            print(f"{backend:>11}  step {step:3}  loss {losses[-1]:.6f}", flush=True)
    elapsed = time.perf_counter() - start
    timed_tokens = (steps - min(WARM_UP_STEPS, steps - 1)) * SEQUENCES * LENGTH
    if isinstance(exchange, a2a.ExpertParallel):
        exchange.close()
    return Result(losses, timed_tokens / elapsed, *(s / elapsed for s in stopwatch.seconds.values()))


def run(arguments: argparse.Namespace) -> None:
    """On every rank, in its process group: train with each backend; rank 0 prints the table."""
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {name: train(name, arguments.steps, rank, world_size) for name in arguments.backends}
    if rank != 0:
        return
    alone = train("one process", arguments.steps, 0, 1) if arguments.check else None
    print(f"\n{'':11}  tokens/s  dispatch  combine   (share of the time, forward and backward, waiting included)")
    for name, result in (results | ({"one process": alone} if alone else {})).items():
        print(f"{name:>11}  {result.tokens_per_s:8.0f}  {result.dispatch_share:8.1%}  {result.combine_share:7.1%}")
    for name, result in results.items() if alone else ():
        difference = max(abs(a - b) / b for a, b in zip(result.losses, alone.losses, strict=True))
        print(f"{name}: losses differ from those of one process by at most {difference:.1e}, relative")
        if not difference <= TOLERANCE:
            raise SystemExit(f"{name}: that is more than {TOLERANCE:.0e}")


def run_rank(arguments: argparse.Namespace, store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    run(arguments)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes to start; under torchrun those that are there")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", dest="backends", nargs="+", choices=["a2a", "gloo"], default=["a2a", "gloo"])
    parser.add_argument("--check", action="store_true", help="train on one process too; fail if the losses differ")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        run(arguments)
        dist.destroy_process_group()
        return
    context = multiprocessing.get_context("fork")  # spares each rank the import; nothing here has started a thread yet
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(arguments, f"{folder}/store", r)) for r in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if failed := [r for r, process in enumerate(ranks) if process.exitcode != 0]:
        raise SystemExit(f"ranks that failed: {failed}")


if __name__ == "__main__":
    main()
