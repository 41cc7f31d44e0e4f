"""All-reduce on GPUs in two halves: rank p reduces share p of all tensors, in rank order, and stores it into all of them.

Wins where bytes count. Both directions of the link are filled, by loads and stores of symmetric tensors, or by pushes of
ordinary ones through rings.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.cuda_reduction_base import CudaShares


class AllReduceShares(CudaShares):
    """See the module's docstring."""

    name: ClassVar[str] = "shares"
    op: ClassVar[str] = "all_reduce"
    two_shot: ClassVar[bool] = True
