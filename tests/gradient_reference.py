"""What GradientReducer must compute, in one process, and the models whose gradients are known.

The reference follows the order of sums in a2a/gradients/hierarchy.py, one NumPy operation after the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

import a2a
import moe_reference
from a2a.topology.model import Domain, Link

# By number of ranks: how they may be spread over domains.
HIERARCHIES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,), (1, 1)],
    4: [(4,), (2, 2), (1, 1, 1, 1), (3, 1)],
    5: [(2, 3), (3, 2)],
}
LINKS = (Link(1.0, 10.0), Link(20.0, 1.0))


@functools.cache
def topology(*sizes: int, kind: Literal["cpu_host", "nvlink"] = "cpu_host") -> a2a.Topology:
    """Domains of so many consecutive ranks each."""
    ends = np.cumsum([0, *sizes]).tolist()
    domains = [Domain(tuple(range(a, b)), kind) for a, b in itertools.pairwise(ends)]
    return a2a.Topology(tuple(domains), *LINKS)


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """A gradient of one rank: numbers of very different size, so that another order of sums shows."""
    rng = np.random.default_rng([rank, count, salt])
    spread = rng.standard_normal(count) * np.exp2(rng.integers(-12, 3, count))
    return torch.empty(count, dtype=dtype).copy_(torch.from_numpy(spread))


class Planted(nn.Module):
    """Parameters whose gradients are what `loss` is given."""

    def __init__(self, counts: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.ones(count, dtype=dtype) for count, dtype in zip(counts, dtypes, strict=True)
        )

    def loss(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """`None`: the parameter is not used."""
        used = zip(self.weights, gradients, strict=True)
        return torch.stack([(p * g).sum().double() for p, g in used if g is not None]).sum()

    def gradients(self) -> list[Tensor]:
        return [weight.grad.clone() for weight in self.weights if weight.grad is not None]


def in_order(terms: Sequence[np.ndarray]) -> np.ndarray:
    total = terms[0].copy()
    for term in terms[1:]:
        total = total + term
    return total


def rounded(array: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """In `dtype`, and back."""
    wide = torch.from_numpy(array)
    return wide.to(dtype).to(wide.dtype).numpy()


class Reference:
    """One gradient that is alone in its bucket, step by step.

    Args:
        sizes: ranks of each domain.
        count: of elements.
    """

    def __init__(self, sizes: Sequence[int], count: int, dtype: torch.dtype, wire: str | None, *, average: bool = True):
        self.sizes, self.count, self.dtype, self.average = sizes, count, dtype, average
        self.wide = np.float64 if dtype == torch.float64 else np.float32
        lossy = wire == "fp8" or (wire == "bf16" and dtype != torch.bfloat16)
        self.wire = wire if lossy else None
        domains, rails = len(sizes), max(sizes)
        unit = 128 if wire == "fp8" else 64 // (2 if wire == "bf16" else dtype.itemsize)
        self.piece = -(-count // (rails * domains * unit)) * unit
        self.total = self.piece * rails * domains
        self.owner = np.arange(self.total) // self.piece % domains
        self.owed = np.zeros((domains, self.total), self.wide)
        self.owed_by_result = np.zeros(self.total, self.wide)

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """What every rank has after a step in which the ranks' gradients were these."""
        arrays = [gradient.to(torch.from_numpy(np.zeros(1, self.wide)).dtype).numpy() for gradient in gradients]
        starts = np.cumsum([0, *self.sizes])
        means = self.dtype == torch.float16 if len(self.sizes) > 1 else self.average
        terms = []
        for domain, size in enumerate(self.sizes):
            summed = in_order(arrays[starts[domain] : starts[domain + 1]])
            terms.append(rounded(summed / self.wide(size) if means else summed, self.dtype))
        if len(self.sizes) == 1:
            return torch.from_numpy(terms[0]).to(self.dtype)
        arrived = []
        for domain, term in enumerate(terms):
            padded = np.pad(term, (0, self.total - self.count))
            others = self.owner != domain
            arrived.append(np.where(others, self._sent(padded, self.owed[domain], others), padded))
        if means:
            arrived = [term * self.wide(size) for term, size in zip(arrived, self.sizes, strict=True)]
        total = in_order(arrived)
        if self.average:
            total = total / self.wide(sum(self.sizes))
        result = self._sent(total, self.owed_by_result, np.ones(self.total, bool))
        return torch.from_numpy(result[: self.count]).to(self.dtype)

    def _sent(self, values: np.ndarray, owed: np.ndarray, where: np.ndarray) -> np.ndarray:
        """As it arrives, with what was owed; what is lost is owed."""
        if self.wire is None:
            return values
        wanted = owed + values
        if self.wire == "bf16":
            arrives = rounded(wanted, torch.bfloat16)
        else:
            q, scales = moe_reference.quantise(torch.from_numpy(wanted.astype(np.float32))[None], "fp8")
            arrives = moe_reference.dequantise(q, scales, "fp8", torch.float32)[0].numpy().astype(self.wide)
        owed[where] = (wanted - arrives)[where]
        return arrives
