"""All-gather unit by unit: each rank publishes its input for everybody, or stores it into symmetric outputs.

Wins for large inputs; symmetric outputs take one copy.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.reduction_base import CpuReduction


class AllGatherTwoShot(CpuReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "two_shot"
    op: ClassVar[str] = "all_gather"
    two_shot: ClassVar[bool] = True
