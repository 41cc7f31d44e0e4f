"""All-reduce, residual add and RMSNorm by rows: each rank reduces and norms its share, and everybody takes the results.

Wins where bytes count: many rows, many ranks.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.rms_norm_base import CpuRmsNorm


class AllReduceRmsNormTwoShot(CpuRmsNorm):
    """See the module's docstring."""

    name: ClassVar[str] = "two_shot"
    two_shot: ClassVar[bool] = True
