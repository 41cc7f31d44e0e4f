"""What ranks compare before they reduce anything: the parameters and the settings; and where they begin alike."""

from __future__ import annotations

import hashlib
import itertools
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from a2a.comm import _group_exchange, _group_timeout, _store_of
from a2a.config import config
from a2a.errors import MismatchError, PeerTimeoutError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REFUSED = b"refused: "
_serials: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()

Named = list[tuple[str, nn.Parameter]]


def checked_parameters(module: nn.Module | Iterable[tuple[str, nn.Parameter]]) -> Named:
    """The parameters to reduce, with their names.

    Raises:
        ValueError, TypeError: there are none, one that can't be reduced, or several devices.
    """
    pairs = module.named_parameters() if isinstance(module, nn.Module) else module
    named: Named = []
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise TypeError(
                f"GradientReducer: module must be a torch.nn.Module or (name, parameter) pairs; got {type(pair)} in it"
            )
        name, param = pair
        if not param.requires_grad or param.numel() == 0:
            continue
        if param.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(
                f"GradientReducer: parameter {name!r} is {param.dtype}; gradients of {known} can be reduced"
            )
        if not param.is_leaf:
            raise ValueError(
                f"GradientReducer: {name!r} is no leaf: it is computed, so autograd keeps no gradient of it"
            )
        named.append((name, param))
    if not named:
        raise ValueError("GradientReducer: no parameter requires a gradient, so there is nothing to reduce")
    devices = {param.device for _, param in named}
    if len(devices) > 1:
        raise ValueError(f"GradientReducer: parameters are on {len(devices)} devices ({devices}); one reducer has one")
    if (device := next(iter(devices))).type not in ("cpu", "cuda"):
        raise ValueError(f"GradientReducer: parameters are on {device}; expected a CPU or a CUDA device")
    return named


def agree(group: Any, named: Named, settings: str, problem: Exception | None) -> None:
    """Make sure that all ranks reduce the same. Collective.

    Args:
        problem: why this rank can't; raised here once the others know.
    Raises:
        MismatchError: they don't; names the setting or the first parameter that differs, and the rank.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if size == 1:
        if problem is not None:
            raise problem
        return
    limit = config().timeout_s or _group_timeout(group, "cpu")
    prefix = f"a2a/gradients/agree/{next(_serials.setdefault(group, itertools.count()))}"
    exchange = _group_exchange(group, _store_of(group), prefix, rank, size, limit)
    lines = [settings, *(f"{name} {_shape(param)}" for name, param in named)]
    mine = "\n".join(lines).encode()
    first = _REFUSED + str(problem).encode() if problem else hashlib.sha256(mine).digest()
    try:
        everyone = exchange("digest", first)
        if problem is not None:
            raise problem
        for peer, payload in enumerate(everyone):
            if payload.startswith(_REFUSED):
                why = payload.removeprefix(_REFUSED).decode(errors="replace")
                raise MismatchError(f"GradientReducer: rank {peer} refused its own call: {why}", rank=rank, peer=peer)
        if len(set(everyone)) == 1:
            return
        texts = [zlib.decompress(payload).decode().split("\n") for payload in exchange("all", zlib.compress(mine))]
    except PeerTimeoutError as error:
        raise PeerTimeoutError(
            f"GradientReducer: rank {rank} waited {limit:.1f} s for rank {error.peer} to make its reducer. Reducers are "
            f"collective: every rank of the group makes them, in the same order",
            rank=rank,
            peer=error.peer,
            op="GradientReducer",
        ) from error
    peer = next(p for p in range(size) if texts[p] != texts[0]) if texts[rank] == texts[0] else 0
    raise MismatchError(_difference(rank, texts[rank], peer, texts[peer]), rank=rank, peer=peer, op="GradientReducer")


def _shape(param: torch.Tensor) -> str:
    strides = "" if param.is_contiguous() else f" strides {list(param.stride())}"
    return f"{str(param.dtype).removeprefix('torch.')} {list(param.shape)}{strides}"


def _difference(rank: int, mine: Sequence[str], peer: int, theirs: Sequence[str]) -> str:
    if mine[0] != theirs[0]:
        return f"GradientReducer: rank {rank} was made with {mine[0]}; rank {peer} with {theirs[0]}"
    pairs = itertools.zip_longest(mine[1:], theirs[1:], fillvalue="none: it has no more parameters")
    number, (own, other) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
    return (
        f"GradientReducer: ranks have different models. The first parameter that differs is number {number}: "
        f"rank {rank} has {own}; rank {peer} has {other}"
    )


def broadcast_from_first(module: Any, params: Sequence[nn.Parameter], group: Any) -> None:
    """Have all ranks begin with rank 0's parameters and, of a module, buffers. Collective."""
    tensors: list[torch.Tensor] = list(params)
    if isinstance(module, nn.Module):
        tensors = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        flat = tensor.detach().contiguous().view(-1)
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=group)
        if flat.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.shape))
