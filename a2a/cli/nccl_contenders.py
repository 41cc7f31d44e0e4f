"""What a2a's exchanges on GPUs are held against: NCCL's, in three ways, and the copy engines alone.

* `nccl`: `dist.all_to_all_single` on torch's own tensors.
* `nccl_symm`: the same with both buffers in a symmetric window that is registered with NCCL's communicator.
* `nccl_ce`: the same, on a communicator that is told to use no SMs, which leaves the copying to the copy engines.
* `copy`: each rank's copy engine stores what the rank sends into its peers' memory, and nobody waits for anybody: the link.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from a2a.cli.devices import NCCL_REFUSES, nccl_group
from a2a.cli.exchanges import Exchange, contender, dist_call, poison
from a2a.kernels import cuda
from a2a.measure import Contender, Control

if TYPE_CHECKING:
    from a2a.comm import Communicator


class NcclWindow:
    """Two buffers in a symmetric window of an NCCL communicator of its own; made and registered at the first use."""

    def __init__(self, num_bytes: int, device: torch.device, *, no_sms: bool = False) -> None:
        self._num_bytes, self._device, self._no_sms = num_bytes, device, no_sms
        self._pool: Any = None
        self._why = ""

    def open(self) -> None:
        """Collective.

        Raises:
            RuntimeError, AttributeError: this torch or NCCL has no such windows; again and again, without trying anew.
        """
        if self._why:
            raise RuntimeError(self._why)
        if self._pool is not None:
            return
        try:
            self.group = nccl_group(no_sms=self._no_sms)
            backend = self._backend = self.group._get_backend(self._device)
            pool = torch.cuda.MemPool(backend.mem_allocator)
            # One piece for both: ranks that register several must do it in the same order.
            each = -(-self._num_bytes // 4096) * 4096
            with torch.cuda.use_mem_pool(pool):
                both = torch.empty(2 * each, dtype=torch.uint8, device=self._device)
            self.buffers = both[:each], both[each:]
            backend.register_mem_pool(pool, symm=True)  # what is in the pool by now; newer torch doesn't follow it
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"
            raise
        self._pool = pool

    def close(self) -> None:
        """Take the window back. Collective."""
        if self._pool is not None:
            torch.cuda.synchronize(self._device)
            self._backend.deregister_mem_pool(self._pool)
            del self.buffers, self._pool
            self._pool = None


def window_contender(name: str, exchange: Exchange, window: NcclWindow) -> Contender:
    """NCCL's all-to-all between the buffers of a window."""
    state: dict[str, Any] = {}

    def opened() -> Callable[[], object]:
        if not state:
            window.open()
            source, output = (
                buffer[: sum(counts) * exchange.dtype.itemsize].view(exchange.dtype)
                for buffer, counts in zip(window.buffers, (exchange.sends, exchange.receives), strict=True)
            )
            exchange.fill(source)
            state.update(output=output, call=dist_call(exchange, source, output, window.group))
        call: Callable[[], object] = state["call"]
        return call

    def check_call(call: Callable[[], object]) -> int:
        poison(state["output"])
        call()
        return exchange.wrong(state["output"])

    return Contender(
        name, lambda: state["call"](), lambda: check_call(opened()), check_call=check_call, optional=True
    )  # fmt: skip


def copy_contender(exchange: Exchange, comm: Communicator, control: Control) -> Contender:
    """Plain copies of what goes to other ranks, from private memory into the peers' symmetric tensors."""
    itemsize, rank = exchange.dtype.itemsize, exchange.rank
    place = comm.require_transport("copy").place
    source = torch.empty(sum(exchange.sends), dtype=exchange.dtype, device=exchange.device)
    exchange.fill(source)
    capacity = max(sum(counts) for counts in zip(*exchange.counts, strict=True))
    whole = comm.empty((capacity,), exchange.dtype)
    output = whole[: sum(exchange.receives)]
    copies: list[tuple[int, int, int]] = []
    for peer, piece in enumerate(torch.split(source, exchange.sends)):
        before = sum(row[peer] for row in exchange.counts[:rank])
        if peer != rank and piece.numel():
            theirs = place.at(peer, place.offset_of(whole.data_ptr())) + before * itemsize
            copies.append((theirs, piece.data_ptr(), piece.numel() * itemsize))
    driver = cuda.driver()

    def call() -> None:
        stream = torch.cuda.current_stream(exchange.device).cuda_stream
        for to, of, num_bytes in copies:
            cuda.check(int(driver.cuMemcpyDtoDAsync(to, of, num_bytes, stream)[0]), "cuMemcpyDtoDAsync")

    def check_call(make: Callable[[], object]) -> int:
        poison(output)
        own = torch.split(source, exchange.sends)[rank]
        torch.split(output, exchange.receives)[rank].copy_(own)
        _meet(control)
        make()
        _meet(control)
        return exchange.wrong(output)

    return Contender("copy", call, lambda: check_call(call), check_call=check_call, optional=True)


def _meet(control: Control) -> None:
    torch.cuda.synchronize()
    control.barrier()


def nccl_contender(exchange: Exchange, group: Any) -> Contender:
    """`dist.all_to_all_single` on torch's own tensors; `group` is None where NCCL refuses these ranks."""
    if group is None:
        return Contender("nccl", lambda: None, lambda: 0, optional=True, why_not=NCCL_REFUSES)
    source = torch.empty(sum(exchange.sends), dtype=exchange.dtype, device=exchange.device)
    output = torch.empty(sum(exchange.receives), dtype=exchange.dtype, device=exchange.device)
    call = dist_call(exchange, source, output, group)
    return contender("nccl", exchange, source, output, call, optional=True)
