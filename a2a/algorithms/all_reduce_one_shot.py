"""All-reduce in one step: every rank publishes its tensor, and every rank reduces all of them in rank order.

Wins where latency counts: small tensors.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.reduction_base import CpuReduction


class AllReduceOneShot(CpuReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "one_shot"
    op: ClassVar[str] = "all_reduce"
    two_shot: ClassVar[bool] = False
