"""All-reduce on GPUs in one step: every rank sends its tensor to all as packets, and reduces all of them in rank order.

Wins where latency counts: small tensors, and for two ranks middling ones.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.cuda_reduction_base import CudaFlags


class AllReduceFlags(CudaFlags):
    """See the module's docstring."""

    name: ClassVar[str] = "flags"
    op: ClassVar[str] = "all_reduce"
