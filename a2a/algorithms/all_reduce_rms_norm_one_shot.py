"""All-reduce, residual add and RMSNorm in one step: every rank publishes its rows, and does all of it for all rows.

Wins where latency counts: few rows, as in decoding.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.rms_norm_base import CpuRmsNorm


class AllReduceRmsNormOneShot(CpuRmsNorm):
    """See the module's docstring."""

    name: ClassVar[str] = "one_shot"
    two_shot: ClassVar[bool] = False
