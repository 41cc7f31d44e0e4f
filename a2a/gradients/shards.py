"""What each rank has when gradients are scattered: its parts of the buckets, as flat parameters with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from a2a.gradients.hierarchy import Hierarchy
from a2a.gradients.tensors import Tensors


class Shards:
    """This rank's parts. A part is a piece of one bucket; a rank of a small domain may have several of a bucket.

    Attributes:
        params: the parts, whose `.grad` the reducer sets.
    """

    def __init__(self, buckets: Sequence[Tensors]) -> None:
        """`buckets` hold the parameters' values in `flat`."""
        self.params: list[nn.Parameter] = []
        self._of: dict[int, list[tuple[nn.Parameter, int, int]]] = {}  # by id of the bucket: (part, rail, begin)
        for tensors in buckets:
            for rail, begin, count in tensors.own_pieces():
                part = nn.Parameter(tensors.flat[begin : begin + count].clone())
                self.params.append(part)
                self._of.setdefault(id(tensors), []).append((part, rail, begin))

    def take(self, tensors: Tensors) -> None:
        """Add a bucket's reduced pieces to the gradients of its parts."""
        for part, rail, begin in self._of.get(id(tensors), ()):
            count = part.numel()
            reduced = tensors.reduced[rail][:count] if tensors.reduced else tensors.flat[begin : begin + count]
            if part.grad is None:
                part.grad = torch.empty_like(part).copy_(reduced)
            else:
                part.grad.add_(reduced)

    def fill(self, tensors: Tensors) -> None:
        """Put a bucket's parts where they lie in it."""
        for part, _, begin in self._of.get(id(tensors), ()):
            tensors.flat[begin : begin + part.numel()].copy_(part.detach())

    def clip_(self, max_norm: float, ways: Hierarchy) -> Tensor:
        """See `GradientReducer.clip_grad_norm_`."""
        grads = [part.grad for part in self.params if part.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=ways.device)
        for grad in grads:
            squares += grad.to(torch.float64).square().sum()
        if ways.group is not None and ways.world_size > 1:
            everyone = [torch.zeros_like(squares) for _ in range(ways.world_size)]
            dist.all_gather(everyone, squares, group=ways.group)
            squares = torch.stack(everyone).sum()  # of the same terms in the same order on every rank
        norm = squares.sqrt().to(torch.float32)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.dtype))
        return norm
