"""Which device a command runs on, and what its ranks need there.

The default process group is gloo's on every device: through it ranks agree. On GPUs there is one of NCCL's beside it, which
is the baseline, aligns the GPUs before samples, and takes what a2a hands over.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from a2a.config import launch
from a2a.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from a2a.clocks import Clock
    from a2a.measure import Control

NCCL_TIMEOUT_S = 120.0
NCCL_REFUSES = "NCCL takes one rank a GPU, and here ranks share one"


@dataclass(frozen=True)
class Site:
    """Where this rank's tensors are.

    Attributes:
        device: with its index, on a GPU.
        clock: what times calls there.
        group: what communicators are made of: NCCL's group on GPUs, else None, the default one.
    """

    device: torch.device
    clock: Clock
    group: Any = None


def num_gpus() -> int:
    """How many GPUs torch finds; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(asked: str | None, ranks: int | None) -> str:
    """ "cuda" or "cpu": what was asked for, else GPUs where there is one for every rank or a launcher has started the ranks.

    Raises:
        UnsupportedError: "cuda" was asked for, and torch finds no GPU.
    """
    gpus = num_gpus()
    if asked == "cuda" and not gpus:
        import torch

        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise UnsupportedError(f"--device cuda: torch {torch.__version__}, built {built}, finds no GPU here")
    if asked is not None:
        return asked
    if launch().world_size > 1:
        return "cuda" if gpus else "cpu"
    return "cuda" if (ranks or 2) <= gpus else "cpu"


@contextlib.contextmanager
def site(kind: str, control: Control, *, graph: bool = False) -> Iterator[Site]:
    """This rank's place, for as long as the block runs. Collective.

    On a GPU everything in the block is queued on the clock's stream.
    """
    import torch

    from a2a.clocks import CudaClock, HostClock

    if kind == "cpu":
        yield Site(torch.device("cpu"), HostClock(control.barrier))
        return
    started = launch()
    local_rank = started.local_rank if started.world_size > 1 else control.rank
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    shared = started.world_size <= 1 and control.world_size > torch.cuda.device_count()
    # NCCL refuses ranks that share a GPU. Then the hosts' barrier alone aligns them: for tests, not for figures.
    group = None if shared else nccl_group()
    mark = torch.zeros(1, device=device)

    def meet() -> None:
        if group is not None:
            torch.distributed.all_reduce(mark, group=group)

    clock = CudaClock(device, control.barrier, meet, graph=graph)
    with torch.cuda.stream(clock.stream):
        yield Site(device, clock, group)
    torch.cuda.synchronize(device)


def nccl_group(*, no_sms: bool = False) -> Any:
    """A new NCCL group of all ranks, which has connected them. `no_sms`: it prefers the copy engines where it can."""
    import torch
    import torch.distributed as dist

    nccl = dist.ProcessGroupNCCL
    options: Any = nccl.Options(is_high_priority_stream=True)
    if no_sms:
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=NCCL_TIMEOUT_S)
    group = dist.new_group(backend="nccl", pg_options=options, timeout=timeout)
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group
