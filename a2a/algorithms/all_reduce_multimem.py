"""All-reduce in the NVLink switch: rank p loads part p of all tensors added up, and stores it to all ranks at once.

Wins with many ranks, since what a rank moves does not grow with their number. Its instructions have been compiled and never
run: see multimem_base.py for what has to be asked for, and passed, before it is used.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.all_reduce_shares import AllReduceShares
from a2a.algorithms.cuda_reduction_base import CudaShares
from a2a.algorithms.multimem_base import MultimemReduction


class AllReduceMultimem(MultimemReduction):
    """See the module's docstring."""

    name: ClassVar[str] = "multimem"
    op: ClassVar[str] = "all_reduce"
    plain: ClassVar[type[CudaShares]] = AllReduceShares
