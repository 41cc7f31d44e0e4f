"""Process groups that `megatron.core.parallel_state` makes, on backend "a2a" where that is of use.

Expert- and tensor-parallel groups by default. Pipelines stay as they are (`dist.batch_isend_irecv` is torch's own on its own
class only), and so do data-parallel groups, whose gradients come to a2a by name, and WORLD with its watchdog.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GROUPS = (
    "EXPERT_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "TENSOR_MODEL_PARALLEL_GROUP",
)
PARAMETERS = ("ranks", "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc")


def create_group(original: Callable[..., Any], groups: frozenset[str]) -> Callable[..., Any]:
    """Megatron's `create_group`, which gives the groups of these descriptions backend "a2a" unless another is asked for.

    NCCL's options are kept: a2a makes its inner NCCL group with them.
    """

    def create(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> Any:
        if group_desc in groups and backend in (None, "nccl"):
            backend = "a2a"
        return original(ranks, timeout, backend, pg_options, use_local_synchronization, group_desc)

    return create
