"""Reduce-scatter on GPUs, bound by the link: rank p loads share p of symmetric inputs, or gets it through a ring.

Wins where bytes count.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.cuda_reduction_base import CudaShares


class ReduceScatterShares(CudaShares):
    """See the module's docstring."""

    name: ClassVar[str] = "shares"
    op: ClassVar[str] = "reduce_scatter"
