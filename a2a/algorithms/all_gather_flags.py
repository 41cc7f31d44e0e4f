"""All-gather on GPUs by packets: every rank sends its input to all.

Wins where latency counts.
"""

from __future__ import annotations

from typing import ClassVar

from a2a.algorithms.cuda_reduction_base import CudaFlags


class AllGatherFlags(CudaFlags):
    """See the module's docstring."""

    name: ClassVar[str] = "flags"
    op: ClassVar[str] = "all_gather"
