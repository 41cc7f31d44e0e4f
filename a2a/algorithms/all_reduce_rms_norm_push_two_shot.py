"""All-reduce, residual add and RMSNorm on GPUs by rows: batches go to their owners, and come back reduced.

Wins where bytes count: many rows on more than two ranks.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.rms_norm_cuda import CudaRmsNorm


class AllReduceRmsNormPushTwoShot(CudaRmsNorm):
    """See the module's docstring."""

    name: ClassVar[str] = "push_two_shot"
    two_shot: ClassVar[bool] = True
