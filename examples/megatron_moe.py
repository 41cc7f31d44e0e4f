"""A small Mixture-of-Experts language model of Megatron Core, trained on a2a for a few steps.

    torchrun --nproc-per-node 2 examples/megatron_moe.py

Two marked lines bring a2a in; the rest is Megatron. It runs on GPUs, and on a CPU where there are none."""

import contextlib
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

import a2a.integrations.megatron  # (1)

GPU = torch.cuda.is_available()
WORDS, LENGTH, BATCH = 64, 16, 8


def without_cuda() -> None:
    """Megatron asks for streams and the current device, and compiles, wherever it runs."""
    torch._dynamo.config.disable = True
    for name in ("Stream", "Event", "current_stream", "default_stream", "stream"):
        setattr(torch.cuda, name, mock.MagicMock())
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16 uses it also where there is no TransformerEngine


def main() -> None:
    dist.init_process_group("nccl" if GPU else "gloo")
    rank, device = dist.get_rank(), torch.device("cuda" if GPU else "cpu")
    a2a.integrations.megatron.install()  # (2) before groups and model are made
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    if GPU:
        torch.cuda.set_device(rank)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    else:
        without_cuda()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_token_dispatcher_type="flex",  # or "alltoall"
        moe_flex_dispatcher_backend="hybridep",  # whose place a2a takes
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    torch.manual_seed(1)
    model = GPTModel(config, spec, vocab_size=WORDS, max_sequence_length=LENGTH).to(device)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    positions = torch.arange(LENGTH, device=device).expand(BATCH, -1)
    later = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    for step in range(10):
        start = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(100 * rank + step))
        words = ((start + 3 * torch.arange(LENGTH + 1)) % WORDS).to(device)
        ddp.zero_grad_buffer()
        loss = ddp(words[:, :-1], positions, later, labels=words[:, 1:]).mean()
        loss.backward()
        ddp.finish_grad_sync()
        for weight in model.parameters():
            weight.grad = weight.main_grad
        optimizer.step()
        if rank == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
