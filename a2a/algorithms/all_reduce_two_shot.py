"""All-reduce in two halves: each rank reduces its share of all tensors in rank order, and everybody takes the results.

Wins where bytes count: large tensors, many ranks.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.reduction_base import CpuReduction


class AllReduceTwoShot(CpuReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "two_shot"
    op: ClassVar[str] = "all_reduce"
    two_shot: ClassVar[bool] = True
