"""a2a: topology-aware collectives for PyTorch.

    import a2a                                   # registers the backend "a2a" with torch.distributed

The README has examples; `a2a demo` shows the library at work, `a2a doctor` what this machine can do.
"""

from __future__ import annotations

__version__ = "0.1.0"

from typing import TYPE_CHECKING, Any

from a2a import topology
from a2a.errors import (
    A2AError,
    InterruptedRankError,
    MismatchError,
    PeerTimeoutError,
    RowOverflowError,
    UnsupportedError,
)
from a2a.topology import Topology

if TYPE_CHECKING:
    from a2a.gradients import GradientReducer

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:  # `a2a doctor` must still be able to say so
    _why = str(_error)

    def __getattr__(name: str) -> Any:
        raise ImportError(f"a2a.{name} needs torch ({_why}): pip install torch; see `a2a doctor`")

else:
    from a2a.comm import Communicator, communicator
    from a2a.integrations import c10d_backend
    from a2a.integrations.patch import patched
    from a2a.moe import ExpertParallel, ReadyFlags, Routing
    from a2a.ops import all_to_all, all_to_all_single
    from a2a.reductions import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
    from a2a.rms_norm import all_reduce_rms_norm
    from a2a.work import Work

    c10d_backend.register()

    def __getattr__(name: str) -> Any:
        if name != "GradientReducer":
            raise AttributeError(f"module 'a2a' has no attribute {name!r}")
        from a2a.gradients import GradientReducer  # here: programs that reduce no gradients need not load it

        return GradientReducer


__all__ = [
    "A2AError",
    "Communicator",
    "ExpertParallel",
    "GradientReducer",
    "InterruptedRankError",
    "MismatchError",
    "PeerTimeoutError",
    "ReadyFlags",
    "Routing",
    "RowOverflowError",
    "Topology",
    "UnsupportedError",
    "Work",
    "__version__",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_to_all",
    "all_to_all_single",
    "communicator",
    "patched",
    "reduce_scatter_tensor",
    "topology",
]
