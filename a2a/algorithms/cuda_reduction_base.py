"""What all-reduces, reduce-scatters and all-gathers on GPUs have in common: staging, kernels and their launches.

The kernels are csrc/cuda/reduce_flags.cu and reduce_shares.cu, which have the protocols. Each is compiled for one
collective, dtype and reduction, at the first call that asks for it. Tensors of `Communicator.empty` are loaded from and
stored to by the peers; others go through rings. The kernels find out from the addresses, so one prepared launch serves both.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import Structure, c_uint32, c_uint64
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Cost, Part, Request
from a2a.algorithms.reduction_base import DTYPES, REDUCE_OPS, Reduction
from a2a.kernels import cpu, cuda, cuda_params, cuda_requests
from a2a.work import Aside, Work

if TYPE_CHECKING:
    from a2a.comm import Communicator

COLLECTIVES = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2}
COPY = 4  # kCopy: what an all-gather reduces by
BLOCKS, CHANNELS, SLOTS, UNIT = 24, 48, 4, 48  # the kernels' own constants
FLAG_BYTES = 2 << 20  # the most that a rank sends another as packets: fewer steps pay for a third more bytes
CHUNK_BYTES = 64 << 10
_THREADS = 512, 1024  # of a block, of packets and of chunks
_CHANNEL_BYTES = 16 << 10  # of a share: it gets a channel for so many
_SHARE_ALIGNMENT = 128
_PIECES = {1: DTYPES[torch.uint8], 2: DTYPES[torch.int16]}  # what other elements are copied as: int32

_get_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: this torch has no CUDA


def cut(comm: Communicator) -> tuple[int, int]:
    """(the most that goes as packets, bytes of a chunk) in a communicator's staging."""
    transport: Any = comm.transport
    share = transport.reduction_bytes(comm.world_size) // comm.world_size
    flag_bytes = min(FLAG_BYTES, share // 17)
    room = share - 2 * 2 * (flag_bytes // 3 * 4 + 128) - 64 * CHANNELS
    return flag_bytes, min(CHUNK_BYTES, room // (2 * CHANNELS * SLOTS) // 1024 * 1024)


class _Shares(Structure):
    _fields_ = (("total", c_uint64), ("each", c_uint64))


class Params(Structure):
    """`Params` of reduce.cuh."""

    _fields_ = (
        ("output", c_uint64),
        ("input", c_uint64),
        ("place", cuda_params.Place),
        ("staging", c_uint64),
        ("count", c_uint64),
        ("shares", _Shares),
        ("digest", c_uint32),
        ("about", c_uint32),
    )


class Prepared:
    """A launch whose tensors may change from call to call. `call(address, output, input)` makes it; 0: it is on its way."""

    def __init__(self, transport: Any, call: cuda.Call, params: Structure) -> None:
        self._transport, self._call, self._params = transport, call, params
        self.address = ctypes.addressof(call)
        self.device: int = transport.place.device.index
        self._launch = cuda.lib().a2a_cuda_launch

    def call(self, address: int, output: int, input: int) -> int:
        stream = _get_stream(self.device)  # type: ignore[misc]
        if stream != self._transport.last_stream:
            self._transport.follow(stream)
        result: int = self._launch(address, stream, output, input)
        return result


class CudaReduction(Reduction):
    """What these algorithms share."""

    device_type: ClassVar[str] = "cuda"
    kernel: ClassVar[str] = ""
    two_shot: ClassVar[bool] = False  # an all-reduce of shares

    def __init__(self) -> None:
        self._functions: weakref.WeakKeyDictionary[Communicator, dict[Any, int]] = weakref.WeakKeyDictionary()
        self._asides: weakref.WeakKeyDictionary[Communicator, Aside] = weakref.WeakKeyDictionary()

    # ---- what it can

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if (reason := self.no_memory(comm)) is not None:
            return reason
        if self.op != "all_gather":
            if (reduce_op := request.get("reduce_op", "sum")) not in REDUCE_OPS:
                return f"it reduces by {', '.join(REDUCE_OPS)}; asked for {reduce_op}"
            if request.dtype not in DTYPES:
                return f"it reduces float16 to float64, bfloat16, uint8 and int8 to int64; asked for {request.dtype}"
        return self.too_large(request, comm)

    def too_large(self, request: Request, comm: Communicator) -> str | None:
        """Why the request's size is none for it, or None."""
        return None

    def shares(self, num_bytes: int, world_size: int) -> tuple[int, int]:
        """(bytes of the whole tensor, of a share) for an input of so many."""
        if self.op == "all_gather":
            return num_bytes * world_size, num_bytes
        if self.op == "reduce_scatter":
            return num_bytes, num_bytes // world_size
        return num_bytes, -(-num_bytes // (world_size * _SHARE_ALIGNMENT)) * _SHARE_ALIGNMENT

    def remote_bytes(self, request: Request, comm: Communicator) -> int:
        """What a rank sends over the link, without marks."""
        peers, (whole, share) = comm.world_size - 1, self.shares(request.num_bytes, comm.world_size)
        if self.op == "all_reduce":
            return peers * (2 * share if self.two_shot else whole)
        return peers * share

    # ---- launches

    def refuse_capture(self) -> None:
        """Raise while a CUDA graph is captured: a kernel is about to be loaded."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.op}: a communicator's first call with a dtype and reduction loads a kernel, which a CUDA graph "
                f"can't capture; make one such call before the capture, on all ranks"
            )

    def _function(self, comm: Communicator, dtype: int, reduce_op: int) -> int:
        functions = self._functions.setdefault(comm, {})
        function = functions.get((dtype, reduce_op))
        if function is not None:
            return function
        self.refuse_capture()
        transport = comm.require_transport(self.op)
        flag_bytes, chunk_bytes = cut(comm)
        defines = {
            "WORLD": comm.world_size, "FLAG_BYTES": flag_bytes, "CHUNK_BYTES": chunk_bytes, "DTYPE": dtype,
            "REDUCE": reduce_op, "COLLECTIVE": COLLECTIVES[self.op], "TWO_SHOT": int(self.two_shot),
        }  # fmt: skip
        place = transport.place
        with torch.cuda.device(place.device):
            module = cuda.module(self.kernel, place, defines)
            assert module.constant("reduce_staging") <= transport.reduction_staging.num_bytes
            function = functions[dtype, reduce_op] = module.function(self.kernel)
        return function

    def _made(
        self, comm: Communicator, request: int, num_bytes: int, dtype: torch.dtype, reduce_op: str, digest: int | None
    ) -> Prepared:
        transport = comm.require_transport(self.op)
        if self.op == "all_gather":
            numbers = _PIECES.get(dtype.itemsize, DTYPES[torch.int32]), COPY
        else:
            numbers = DTYPES[dtype], REDUCE_OPS[reduce_op]
        smaller = num_bytes // comm.world_size if self.op == "reduce_scatter" else num_bytes
        place, (whole, share) = transport.place, self.shares(num_bytes, comm.world_size)
        params = Params(
            place=cuda_params.Place(
                place.base, place.window, place.host, int(comm.timeout_s * 1e9), comm.rank, request & 0xFFFF
            ),
            staging=transport.reduction_staging.address,
            shares=_Shares(whole, share),
            count=smaller // dtype.itemsize,
            digest=transport.digest(request) if digest is None else digest,
            about=cuda_requests.about(COLLECTIVES[self.op], dtype, numbers[1]),
        )
        grid, block = self.launch_of(whole, share)
        call = cuda.Call(
            function=self._function(comm, *numbers), context=place.context, failure=place.host,
            params=ctypes.addressof(params), params_bytes=ctypes.sizeof(params), grid=grid, block=block,
        )  # fmt: skip
        return Prepared(transport, call, params)

    def launch_of(self, whole: int, share: int) -> tuple[int, int]:
        """(blocks, threads of a block): the same on all ranks."""
        return max(1, min(BLOCKS, -(-share // (2 * _CHANNEL_BYTES)))), _THREADS[1]

    def prepare(self, comm: Communicator, asked: Request, request: int, output: torch.Tensor) -> Prepared:
        return self._made(comm, request, asked.num_bytes, asked.dtype, asked.get("reduce_op"), None)

    # ---- calls

    def register(self, comm: Communicator, agree: str, text: str) -> int:
        index: int = comm.require_transport(self.op).request(agree, 0, text)
        return index

    def refuse(self, comm: Communicator, request: int, op: str, why: str, async_op: bool) -> None:
        prepared = self._made(comm, request, 0, torch.float32, "sum", digest=0)
        prepared.call(prepared.address, 0, 0)

    def run(
        self, comm: Communicator, asked: Request, request: int, output: torch.Tensor, input: torch.Tensor, op: Any
    ) -> None:
        prepared = self.prepare(comm, asked, request, output)
        result = prepared.call(prepared.address, output.data_ptr(), input.data_ptr())
        if result:
            comm.raise_failure(cpu.FAILED if result == cuda.FAILED else result, self.op)

    def submit(
        self,
        comm: Communicator,
        asked: Request,
        request: int,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any,
        result: list[torch.Tensor],
        finish: Callable[[], None],
    ) -> Work:
        if comm not in self._asides:
            self._asides[comm] = Aside(comm.require_transport(self.op).place.device)

        def call() -> None:
            self.run(comm, asked, request, output, input, op)
            finish()

        return self._asides[comm].run(call, result, (output, input, *result))

    @staticmethod
    def _cost(steps: int, num_bytes: int) -> Cost:
        """So many rounds of signals, and so many bytes over the link."""
        parts = (Part("launch"), Part("signal", times=steps), Part("push", num_bytes))
        return Cost(steps=steps, scale_up_bytes=num_bytes, copied_bytes=num_bytes, sms=BLOCKS, parts=parts)


class CudaFlags(CudaReduction):
    """By packets that mark their own arrival."""

    kernel: ClassVar[str] = "reduce_flags"

    def _piece(self, whole: int, share: int) -> int:
        return whole if self.op == "all_reduce" and not self.two_shot else share

    def too_large(self, request: Request, comm: Communicator) -> str | None:
        most, _ = cut(comm)
        piece = self._piece(*self.shares(request.num_bytes, comm.world_size))
        return f"it sends at most {most} bytes to a rank as packets; asked for {piece}" if piece > most else None

    def launch_of(self, whole: int, share: int) -> tuple[int, int]:
        units = max(-(-self._piece(whole, share) // UNIT), 1)
        threads = min(_THREADS[0], max(128, -(-units // BLOCKS // 32) * 32))
        return min(BLOCKS, -(-units // threads)), threads

    def cost(self, request: Request, comm: Communicator) -> Cost:
        packets = self.remote_bytes(request, comm) * 4 // 3
        steps = 2 if self.op == "all_reduce" and self.two_shot else 1
        return self._cost(steps, packets)


class CudaShares(CudaReduction):
    """By loads and stores of shares, or chunks of them through rings."""

    kernel: ClassVar[str] = "reduce_shares"

    def cost(self, request: Request, comm: Communicator) -> Cost:
        # Headers, then progress; in an all-reduce loads and stores follow each other in between.
        steps = 3 if self.op == "all_reduce" else 2
        return self._cost(steps, self.remote_bytes(request, comm))
