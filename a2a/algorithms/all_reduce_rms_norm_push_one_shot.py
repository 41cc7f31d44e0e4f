"""All-reduce, residual add and RMSNorm on GPUs in one step: every rank stores its rows into all others' memory.

Wins with few rows, and with two ranks at any number: there it moves no more than the two-shot.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.rms_norm_cuda import CudaRmsNorm


class AllReduceRmsNormPushOneShot(CudaRmsNorm):
    """See the module's docstring."""

    name: ClassVar[str] = "push_one_shot"
    two_shot: ClassVar[bool] = False
