"""Reduce-scatter on GPUs by packets: every rank sends share p to rank p, which reduces the shares in rank order.

Wins where latency counts.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.cuda_reduction_base import CudaFlags


class ReduceScatterFlags(CudaFlags):
    """See the module's docstring."""

    name: ClassVar[str] = "flags"
    op: ClassVar[str] = "reduce_scatter"
