"""All-gather in one step: every rank publishes its input with its first signal, and everybody copies it.

Wins where latency counts: small inputs.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.reduction_base import CpuReduction


class AllGatherOneShot(CpuReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "one_shot"
    op: ClassVar[str] = "all_gather"
    two_shot: ClassVar[bool] = False
