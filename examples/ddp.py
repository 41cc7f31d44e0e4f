"""A model under torch's DistributedDataParallel whose gradients a2a reduces, behind the backward pass.

    torchrun --nproc-per-node 4 examples/ddp.py
    A2A_TOPOLOGY=cpu:2x2 torchrun --nproc-per-node 4 examples/ddp.py     # as if the ranks were on two hosts

One marked line is a2a's. Inside a domain gradients are summed in shared memory; between domains they travel in 16 bits, and
what that loses is sent in the next step.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import a2a.integrations.ddp

WIDTH, SAMPLES, STEPS = 64, 32, 20


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher = torch.nn.Linear(WIDTH, 1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)  # several buckets, each on its way as soon as it is full
    reducer = a2a.integrations.ddp.register(ddp, wire="bf16")  # this line
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.003)
    data = torch.Generator().manual_seed(rank)  # each rank has samples of its own
    for step in range(STEPS):
        x = torch.randn(SAMPLES, WIDTH, generator=data)
        loss = (ddp(x) - teacher(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:2d}  loss {total.item() / dist.get_world_size():.4f}")
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    if rank == 0:
        print(f"{len(reducer.topology.domains)} domain(s); all ranks have the same weights:",
              all(torch.equal(weights, other) for other in everyone))  # fmt: skip
    reducer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
