"""All-reduce on GPUs in two steps of packets: rank p reduces share p of all tensors, in rank order, and sends it to all.

Wins between the other two: more than two ranks, middling tensors.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.cuda_reduction_base import CudaFlags


class AllReduceTwoShotFlags(CudaFlags):
    """See the module's docstring."""

    name: ClassVar[str] = "two_shot_flags"
    op: ClassVar[str] = "all_reduce"
    two_shot: ClassVar[bool] = True
