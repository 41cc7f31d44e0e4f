"""A tensor-parallel block, planned with torch's DTensor, whose collectives are a2a's: all it takes is the backend's name.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

The embedding, the linear layers and the head are cut among the ranks, and so is the sequence between them; the losses are
those of the uncut block.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import a2a  # noqa: F401  (registers the backend)

WORDS, WIDTH, STEPS = 32, 64, 5
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),  # all-gathers the sequence
    "down": RowwiseParallel(output_layouts=Shard(1)),  # reduce-scatters it
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(WORDS, (16, 16), generator=torch.Generator().manual_seed(step))
        targets = (5 * ids + 1) % WORDS
        with loss_parallel():  # the logits stay cut, too
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(getattr(loss, "full_tensor", lambda loss=loss: loss)().item())
    return losses


def main() -> None:
    dist.init_process_group("a2a")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    losses, alone = train(parallelize_module(Block(), mesh, PLAN)), train(Block())
    calls = sum(mesh.get_group().stats()["calls"].values())
    if dist.get_rank() == 0:
        for step, (loss, reference) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}  loss {loss:.6f}  uncut {reference:.6f}")
        print(f"{calls} collectives on a2a")
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
