"""DDP with a2a's reduction: DistributedDataParallel's own buckets, each on GradientReducer's way as soon as it is full.

    model = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register(model, wire="bf16")

All else stays DDP's: buckets, `no_sync`, unused parameters.
"""

# Without `from __future__ import annotations`: DDP compares the hook's annotations with types.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import a2a


def register(
    model: DistributedDataParallel, topology: a2a.Topology | None = None, wire: str | None = None
) -> a2a.GradientReducer:
    """Have a DDP model's gradients averaged by a2a. Collective over its process group; before the first backward pass.

    Args:
        model: on one device.
        topology, wire: as in `a2a.GradientReducer`. What a wire format owes is kept by DDP's buckets; DDP makes these
            anew after the first step, where it begins at zero again.
    Returns: the reducer, which lives as long as the model; close it when done.
    Raises:
        RuntimeError: the model has a communication hook already.
    Like: torch.distributed.algorithms.ddp_comm_hooks. Differs: a peer that is lost is named by the error of `backward`.
    """
    device = next(model.parameters()).device
    reducer = a2a.GradientReducer.of_tensors(device, model.process_group, topology, wire)
    model.register_comm_hook(reducer, _reduce)
    return reducer


def _reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    future: torch.futures.Future[torch.Tensor] = state.reduce(bucket.buffer(), f"bucket {bucket.index()}")
    return future


__all__ = ["register"]
