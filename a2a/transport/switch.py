"""The buffer through which in-switch reductions go: a multicast one of torch's symmetric memory, or a software one.

Whether there may be a multicast buffer is found out from variables and the device's attribute; none is made to find out.
Where all ranks find nothing against it, torch makes it, and a2a only takes its addresses. The software switch
(A2A_SOFTWARE_SWITCH=1) is ordinary symmetric memory that kernels loop over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from a2a.config import config, multicast_variables
from a2a.errors import UnsupportedError
from a2a.topology.libcuda import MULTICAST, LibCuda

if TYPE_CHECKING:
    from a2a.transport.cuda_base import CudaTransport


@dataclass(frozen=True)
class Switch:
    """A buffer of the same size on every rank.

    Attributes:
        multicast: the address of all ranks' at once; of a software switch, its offset in the windows.
        own: the address of this rank's.
        software: it is one of loops.
        words: offset in the windows of memory for signals, zeroed at first.
        keep: what the memory lives by.
    """

    multicast: int
    own: int
    software: bool
    words: int
    keep: Any


def why_not(device: torch.device, group: Any) -> str:
    """What speaks against a multicast buffer here, or nothing. Makes none."""
    off = [f"{name}={value}" for name, value, forbids in multicast_variables() if forbids]
    if off:
        return f"{', '.join(off)} forbids NVLink multicast"
    if type(group) is not dist.ProcessGroup:
        return "torch's symmetric memory needs a process group of torch's own engines"
    try:
        has = LibCuda().attribute(MULTICAST, device.index)
    except OSError as error:
        return str(error)
    return "" if has else f"the GPU or its fabric lacks multicast (CUDA device attribute {MULTICAST} is 0)"


def open_switch(transport: CudaTransport, group: Any, num_bytes: int, word_bytes: int) -> Switch:
    """Bring it up. Collective; waits for the GPU.

    Raises:
        UnsupportedError: a rank finds something against it; says which and what.
    """
    software = config().software_switch
    kinds = transport.agree("switch/kind", "software" if software else "multicast")
    if len(set(kinds)) > 1:
        raise UnsupportedError(f"A2A_SOFTWARE_SWITCH differs between ranks: {', '.join(kinds)}")
    if not software:
        _all_find(transport, "switch/why_not", why_not(transport.device, group))
    words = transport.alloc(word_bytes, "words of the switch")
    if software:
        buffer = transport.alloc(num_bytes, "the software switch")
        return Switch(buffer.address, buffer.pointer, True, words.address, None)
    problem, multicast, own, keep = "", 0, 0, None
    try:
        keep = _multicast_buffer(transport.device, group, num_bytes)
        multicast, own = int(keep[1].multicast_ptr), int(keep[1].buffer_ptrs[keep[1].rank])
        problem = "" if multicast else "torch's symmetric memory has no multicast address"
    except RuntimeError as error:
        problem = f"torch's symmetric memory: {error}"
    _all_find(transport, "switch/made", problem)
    return Switch(multicast, own, False, words.address, keep)


def _multicast_buffer(device: torch.device, group: Any, num_bytes: int) -> tuple[torch.Tensor, Any]:
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory

    tensor = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, group.group_name)
    return tensor, _symmetric_memory.rendezvous(tensor, group)


def _all_find(transport: CudaTransport, step: str, problem: str) -> None:
    for rank, theirs in enumerate(transport.agree(step, problem)):
        if theirs:
            raise UnsupportedError(f"rank {rank}: {theirs}")


__all__ = ["Switch", "open_switch", "why_not"]
