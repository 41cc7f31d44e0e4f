"""All-gather on GPUs, bound by the link: every rank stores its input into symmetric outputs, or sends it through rings.

Wins where bytes count.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.cuda_reduction_base import CudaShares


class AllGatherShares(CudaShares):
    """See the module's docstring."""

    name: ClassVar[str] = "shares"
    op: ClassVar[str] = "all_gather"
