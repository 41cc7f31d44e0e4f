"""a2a: topology-aware collectives for PyTorch.

    import a2a                                   # registers the backend "a2a" with torch.distributed

The README has examples; `a2a demo` shows the library at work, `a2a doctor` what this machine can do.
"""

from __future__ import annotations

__version__ = "0.1.0"

from a2a import topology
from a2a.comm import Communicator, communicator
from a2a.errors import (
    A2AError,
    InterruptedRankError,
    MismatchError,
    PeerTimeoutError,
    RowOverflowError,
    UnsupportedError,
)
from a2a.integrations import c10d_backend
from a2a.integrations.patch import patched
from a2a.moe import ExpertParallel, Routing
from a2a.ops import all_to_all, all_to_all_single
from a2a.topology import Topology
from a2a.work import Work

c10d_backend.register()

__all__ = [
    "A2AError",
    "Communicator",
    "ExpertParallel",
    "InterruptedRankError",
    "MismatchError",
    "PeerTimeoutError",
    "Routing",
    "RowOverflowError",
    "Topology",
    "UnsupportedError",
    "Work",
    "__version__",
    "all_to_all",
    "all_to_all_single",
    "communicator",
    "patched",
    "topology",
]
