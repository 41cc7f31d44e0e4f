"""torch's own backends, as they stand under backend "a2a": gloo for CPU tensors, NCCL for CUDA tensors.

torch makes them inside its own set-up of a group, which it skips for a group that comes from Python; so they are made here,
with the same options and names. A backend for another device type is one function and an entry in INNER and UNDER.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

NAME = "a2a"


@dataclass(frozen=True)
class Setup:
    """What an inner backend is made from."""

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    requested: Mapping[str, str]  # device type -> backend name
    group_name: str = ""
    global_ranks: Sequence[int] = ()
    options: object | None = None
    device_id: torch.device | None = None


@dataclass(frozen=True)
class Inner:
    """torch's own backend for one device type."""

    name: str
    kind: dist.ProcessGroup.BackendType
    backend: Any
    takes_lists: bool  # whether its `alltoall` takes tensors of any sizes


def _gloo(setup: Setup) -> Inner | None:
    if not dist.is_gloo_available():
        return None
    backend = dist.ProcessGroupGloo(setup.store, setup.rank, setup.world_size, setup.timeout)
    _describe(getattr(backend, "options", None), setup)
    return Inner("gloo", dist.ProcessGroup.BackendType.GLOO, backend, takes_lists=False)


def _nccl(setup: Setup) -> Inner | None:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    options = dist.ProcessGroupNCCL.Options()
    if isinstance(setup.options, dist.ProcessGroupNCCL.Options):
        options = setup.options
    options._timeout = setup.timeout
    _describe(options, setup)
    backend = dist.ProcessGroupNCCL(setup.store, setup.rank, setup.world_size, options)
    return Inner("nccl", dist.ProcessGroup.BackendType.NCCL, backend, takes_lists=True)


def _describe(options: Any, setup: Setup) -> None:
    """Tell an inner backend which group it is part of, for its logs and dumps."""
    if options is None:  # an older torch's gloo
        return
    options.global_ranks_in_group = list(setup.global_ranks)
    options.group_name = setup.group_name


# How torch's own backends are made; None where this machine or build has none.
INNER: dict[str, Callable[[Setup], Inner | None]] = {"gloo": _gloo, "nccl": _nccl}
# Which of them stands under a2a on each device type.
UNDER: dict[str, str] = {"cpu": "gloo", "cuda": "nccl"}


def make_inner(setup: Setup) -> dict[str, Inner]:
    """torch's own backends, one for each device type that was asked for and that this machine has."""
    made: dict[str, Inner | None] = {}
    inner: dict[str, Inner] = {}
    for device_type, requested in setup.requested.items():
        name = UNDER.get(device_type, "") if requested == NAME else requested
        if name not in INNER:
            raise ValueError(
                f"backend a2a: can't set up {device_type}:{requested} in one group with a2a; it knows {', '.join(INNER)}, "
                f"and a2a on {', '.join(UNDER)}"
            )
        if name not in made:
            made[name] = INNER[name](replace(setup, store=PrefixStore(name, setup.store)))
        backend = made[name]
        if backend is not None:
            inner[device_type] = backend
    if not inner:
        raise ValueError(f"backend a2a: this machine has none of the devices asked for: {', '.join(setup.requested)}")
    for backend in {id(one): one for one in inner.values()}.values():
        backend.backend._set_sequence_number_for_group()
    return inner


def alltoall_in_one_call(
    group: dist.ProcessGroup, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor]
) -> None:
    """`alltoall` by way of one flat exchange, for a backend that takes no lists. Done when it returns."""
    sent = torch.cat([tensor.reshape(-1) for tensor in input_tensors])
    received, sizes = [tensor.numel() for tensor in output_tensors], [tensor.numel() for tensor in input_tensors]
    flat = torch.empty(sum(received), dtype=sent.dtype, device=sent.device)
    call = getattr(group, "all_to_all_single", None) or group.alltoall_base
    call(flat, sent, received, sizes).wait()
    for tensor, piece in zip(output_tensors, torch.split(flat, received), strict=True):
        tensor.copy_(piece.view(tensor.shape))
