"""A training step of a MoE layer in one CUDA graph, which skips its update when a rank is lost, instead of applying garbage.

    torchrun --nproc-per-node 2 examples/captured_step.py [--steps 20] [--lose-rank-at 10]

Needs GPUs; ranks may share one. `comm.ok` is a word on the device: 1 until a call of any rank has failed. The captured step
feeds it to the optimizer as `found_inf`, as a gradient scaler would, so that no replay after a failure changes a weight,
although the host looks at the failure (`comm.check()`) only now and then.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

import a2a

TOKENS, HIDDEN, EXPERTS, TOP_K = 256, 512, 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lose-rank-at", type=int, help="rank 1 leaves before this step")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("captured_step: there is no GPU here, and CUDA graphs need one")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.manual_seed(rank)
    comm = a2a.communicator(device="cuda", timeout=5)
    ep = a2a.ExpertParallel(
        num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, comm=comm,
        max_rows=ranks * TOKENS * TOP_K,  # a graph has fixed shapes; no routing of these tokens overflows it
    )  # fmt: skip
    experts = torch.nn.Parameter(
        torch.randn(EXPERTS // ranks, HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16) / 23
    )
    optimizer = torch.optim.AdamW([experts], lr=1e-3, fused=True, capturable=True)
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros((), device="cuda")
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids, weights = (
        torch.randint(EXPERTS, (TOKENS, TOP_K), device="cuda"),
        torch.full((TOKENS, TOP_K), 0.5, device="cuda"),
    )
    loss = torch.zeros((), device="cuda")

    def step() -> None:
        rows, _, routing = ep.dispatch(x, ids, weights)
        y = ep.combine(torch._grouped_mm(rows, experts, offs=routing.offsets_E), routing)
        value = torch.nn.functional.mse_loss(y.float(), x.float())  # the experts learn to pass their tokens on
        value.backward()
        loss.copy_(value.detach())
        optimizer.found_inf.copy_(comm.ok == 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # the first use loads kernels
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(options.steps):
        if number == options.lose_rank_at and rank == 1:
            print("rank 1 leaves", flush=True)
            os._exit(0)
        before = experts.detach().clone()
        graph.replay()
        applied = not torch.equal(before, experts.detach())
        print(
            f"rank {rank}, step {number}: loss {loss.item():.4f}, update {'applied' if applied else 'skipped'}",
            flush=True,
        )
        assert applied == bool(comm.ok.item()), "an update after a failure"
        try:
            comm.check()
        except a2a.PeerTimeoutError as error:
            sys.exit(f"rank {rank} stops at step {number}, weights as after the last good step: {error}")
    ep.close()
    comm.close()


if __name__ == "__main__":
    main()
