"""All-gather by the NVLink switch: every rank stores its tensor once, and the switch to all ranks.

Wins with many ranks, since what a rank moves does not grow with their number. Its instructions have been compiled and never
run: see multimem_base.py for what has to be asked for, and passed, before it is used.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.all_gather_shares import AllGatherShares
from a2a.algorithms.cuda_reduction_base import CudaShares
from a2a.algorithms.multimem_base import MultimemReduction


class AllGatherMultimem(MultimemReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "multimem"
    op: ClassVar[str] = "all_gather"
    plain: ClassVar[type[CudaShares]] = AllGatherShares
    deterministic: ClassVar[bool] = True
