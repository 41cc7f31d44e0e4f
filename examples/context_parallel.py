"""Causal attention over a sequence that is cut among the ranks, with a2a's Ulysses exchange, against one process.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Every rank holds a part of each sequence and all heads. For the attention itself, the ranks swap: each gets the whole of
every sequence for its share of the heads, so that any attention kernel for one GPU will do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import a2a  # noqa: F401  (registers the backend)
from a2a.integrations.context_parallel import heads_to_sequence, sequence_to_heads

BATCH, LENGTH, HEADS, WIDTH, STEPS = 2, 64, 4, 32, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        parts = [part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x_BSD).chunk(3, -1)]
        if group is not None:  # [B, S/P, H, D] -> [B, S, H/P, D]
            parts = [sequence_to_heads(part, group) for part in parts]
        q, k, v = (part.transpose(1, 2) for part in parts)
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if group is not None:  # and back
            y = heads_to_sequence(y, group)
        return self.project(y.flatten(2))


def train(group: dist.ProcessGroup | None) -> list[float]:
    """Losses of a few steps, on this rank's part of the sequences or, without a group, on all of them."""
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        data, target = torch.randn(2, BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        if group is not None:
            data, target = (t.chunk(group.size(), 1)[group.rank()] for t in (data, target))
        loss = (model(data, group) - target).square().sum() / (BATCH * LENGTH * WIDTH)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if group is not None:  # the ranks' losses and gradients are parts of sums
            for tensor in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor, group=group)
        optimizer.step()
        losses.append(total.item())
    return losses


def main() -> None:
    dist.init_process_group("a2a")
    losses, alone = train(dist.group.WORLD), train(None)
    if dist.get_rank() == 0:
        for step, (loss, reference) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}  loss {loss:.6f}  on one process {reference:.6f}")
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
