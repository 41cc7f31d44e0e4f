"""Reduce-scatter in the NVLink switch: rank p loads share p of all tensors added up.

Wins with many ranks, since what a rank moves does not grow with their number. Its instructions have been compiled and never
run: see multimem_base.py for what has to be asked for, and passed, before it is used.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.cuda_reduction_base import CudaShares
from a2a.algorithms.multimem_base import MultimemReduction
from a2a.algorithms.reduce_scatter_shares import ReduceScatterShares


class ReduceScatterMultimem(MultimemReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "multimem"
    op: ClassVar[str] = "reduce_scatter"
    plain: ClassVar[type[CudaShares]] = ReduceScatterShares
