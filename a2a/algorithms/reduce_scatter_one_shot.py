"""Reduce-scatter in one step: every rank publishes its input, and every rank reduces its share of all of them.

Wins where latency counts: small inputs.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.reduction_base import CpuReduction


class ReduceScatterOneShot(CpuReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "one_shot"
    op: ClassVar[str] = "reduce_scatter"
    two_shot: ClassVar[bool] = False
