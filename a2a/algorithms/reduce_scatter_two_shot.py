"""Reduce-scatter unit by unit: every rank hands each owner its share, or lets it be read, and the owner reduces it.

Wins for large inputs, of which one-shot's slot would not hold one, and for symmetric ones.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.reduction_base import CpuReduction


class ReduceScatterTwoShot(CpuReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "two_shot"
    op: ClassVar[str] = "reduce_scatter"
    two_shot: ClassVar[bool] = True
