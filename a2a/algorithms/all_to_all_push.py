"""All-to-all on GPUs by stores into the peers' memory; each pair of ranks takes the shortest way it has.

Small pieces travel as packets that mark their own arrival (flags). Larger ones are stored into a receiver's symmetric
tensor (direct), or else through a ring at the receiver, whose two copies overlap (staged). One kernel on the caller's stream
does it all, csrc/cuda/all_to_all_push.cu, which has the protocol. The host waits for nothing: epochs live on the device, so
a call can be captured in a CUDA graph and replayed.

Wins wherever GPUs reach each other's memory.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import Structure, c_int64, c_uint32, c_uint64
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import AllToAll, Cost, Part, Request
from a2a.kernels import cpu, cuda, cuda_params
from a2a.work import Aside, Work

if TYPE_CHECKING:
    from a2a.comm import Communicator

_BLOCKS, _SLOTS, _CHANNEL_BYTES, _UNIT = 24, 4, 32 << 10, 48  # the kernel's own constants
_TEAMS = 2  # channels of a block, which hide each other's waits
_FLAG_BYTES = 2 << 20  # the most that a pair sends as packets: fewer steps pay for a third more bytes
_CHUNK_BYTES = 128 << 10
_THREADS = 512, 1024  # of a block, of the small and the large kernel
_COPIERS = 16  # blocks that copy a large own piece beside the others

_get_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: this torch has no CUDA


class _Ragged(Structure):
    """`Params` of the kernel's ragged kind: without pairs, which it makes from four lists on the device."""

    _fields_ = (
        *((name, c_uint64) for name in ("output", "input", "input_offsets", "send", "output_offsets", "recv")),
        ("place", cuda_params.Place),
        ("staging", c_uint64),
        ("digest", c_uint32),
        ("copiers", c_uint32),
        ("row_bytes", c_uint64),
        ("in_rows", c_int64),
        ("out_rows", c_int64),
    )


class _Pair(Structure):
    _fields_ = (("input", c_uint64), ("output", c_uint64), ("send_bytes", c_uint64), ("recv_bytes", c_uint64))


class Launcher:
    """The kernel and its staging on one communicator."""

    def __init__(self, comm: Communicator) -> None:
        transport = comm.require_transport("all_to_all")
        world, place = comm.world_size, transport.place
        self.rank, self.place, self.transport = comm.rank, place, transport
        self.staging = transport.staging
        share = self.staging.num_bytes // world
        self.flag_bytes = min(_FLAG_BYTES, share // 8 // _UNIT * _UNIT)
        chunk_bytes = min(_CHUNK_BYTES, share // 2 // (_BLOCKS * _TEAMS * _SLOTS) // 4096 * 4096)
        self._defines = {"WORLD": world, "FLAG_BYTES": self.flag_bytes, "CHUNK_BYTES": chunk_bytes, "TEAMS": _TEAMS}
        self.small, self.large = self._functions()
        self._ragged: tuple[int, int] | None = None
        self.launch = cuda.lib().a2a_cuda_launch
        self.aside: Aside | None = None

        class Params(Structure):
            _fields_ = (
                ("output", c_uint64),
                ("input", c_uint64),
                ("place", cuda_params.Place),
                ("staging", c_uint64),
                ("digest", c_uint32),
                ("copiers", c_uint32),
                ("pairs", _Pair * world),
            )

        self._params = Params
        self._timeout_ns = int(comm.timeout_s * 1e9)

    def _functions(self, **more: int) -> tuple[int, int]:
        place, defines = self.place, {**self._defines, **more}
        with torch.cuda.device(place.device):
            module = cuda.module("all_to_all_push", place, defines)
            assert module.constant("all_to_all_push_staging") <= self.staging.num_bytes
            return module.function("all_to_all_push_small"), module.function("all_to_all_push_large")

    def _where(self, request: int) -> cuda_params.Place:
        place = self.place
        return cuda_params.Place(place.base, place.window, place.host, self._timeout_ns, self.rank, request & 0xFFFF)

    def _call(self, function: int, params: Structure, blocks: int, threads: int) -> cuda.Call:
        return cuda.Call(
            function=function, context=self.place.context, failure=self.place.host, params=ctypes.addressof(params),
            params_bytes=ctypes.sizeof(params), grid=blocks, block=threads,
        )  # fmt: skip

    def prepare(self, request: int, pairs: list[tuple[int, int, int, int]], digest: int | None = None) -> _Prepared:
        """A launch of pairs (input, output, send bytes, receive bytes), offsets from what the call will name."""
        rank = self.rank
        digest = self.transport.digest(request) if digest is None else digest
        largest = max((max(s, r) for p, (_, _, s, r) in enumerate(pairs) if p != rank), default=0)
        own = pairs[rank][2]
        function, copiers, threads = self.large, 0, _THREADS[1]
        if largest <= self.flag_bytes:
            function = self.small
            packets = sum(-(-max(s, r) // _UNIT) for p, (_, _, s, r) in enumerate(pairs) if p != rank)
            needed = max(packets, own // 64, 1)
            threads = min(_THREADS[0], max(128, -(-needed // _BLOCKS // 32) * 32))
            blocks = min(_BLOCKS, -(-needed // threads))
        else:
            blocks = min(_BLOCKS, -(-largest // (_CHANNEL_BYTES * _TEAMS)))
            copiers = _COPIERS if own > self.flag_bytes else 0
        params = self._params(
            0, 0, self._where(request), self.staging.address, digest, copiers, tuple(_Pair(*pair) for pair in pairs)
        )
        call = self._call(function, params, blocks + copiers, threads)
        return _Prepared(self, call, params, sum(s for _, _, s, _ in pairs))

    def prepare_ragged(self, request: int, in_rows: int, out_rows: int, row_bytes: int) -> tuple[cuda.Call, Structure]:
        """A launch that learns from lists on the device which rows go where; with its parameters, which must live as long.

        Sizes aren't known here: the grid suits the most that a rank could send or receive.
        """
        if self._ragged is None:
            self._ragged = self._functions(RAGGED=1)
        (small, large), most = self._ragged, max(in_rows, out_rows) * row_bytes
        if most <= self.flag_bytes:
            function, copiers = small, 0
            needed = max(1, -(-most // _UNIT))
            threads = min(_THREADS[0], max(128, -(-needed // _BLOCKS // 32) * 32))
            blocks = min(_BLOCKS, -(-needed // threads))
        else:
            function, copiers, threads, blocks = large, _COPIERS, _THREADS[1], _BLOCKS
        params = _Ragged(
            place=self._where(request), staging=self.staging.address, digest=self.transport.digest(request),
            copiers=copiers, row_bytes=row_bytes, in_rows=in_rows, out_rows=out_rows,
        )  # fmt: skip
        return self._call(function, params, blocks + copiers, threads), params


class _Prepared:
    """A launch whose tensors may change from call to call. `call(address, output, input)` makes it; 0: it is on its way."""

    def __init__(self, launcher: Launcher, call: cuda.Call, params: Structure, num_bytes: int) -> None:
        self._launcher, self._call, self._params = launcher, call, params
        self.address = ctypes.addressof(call)  # of a `cuda.Call`
        self.device: int = launcher.place.device.index
        self.num_bytes = num_bytes

    def call(self, address: int, output: int, input: int) -> int:
        launcher = self._launcher
        stream = _get_stream(self.device)  # type: ignore[misc]
        if stream != launcher.transport.last_stream:
            launcher.transport.follow(stream)
        result: int = launcher.launch(address, stream, output, input)
        return result


class AllToAllPush(AllToAll):
    """See the module's docstring."""

    name: ClassVar[str] = "push"
    device_type: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        self._launchers: weakref.WeakKeyDictionary[Communicator, Launcher] = weakref.WeakKeyDictionary()

    def _launcher(self, comm: Communicator) -> Launcher:
        launcher = self._launchers.get(comm)
        if launcher is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "all_to_all: the first call on a communicator loads its kernels, which a CUDA graph can't capture; make "
                    "one call before the capture, on all ranks"
                )
            launcher = self._launchers[comm] = Launcher(comm)
        return launcher

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        return self.no_memory(comm)

    def cost(self, request: Request, comm: Communicator) -> Cost:
        remote = request.num_bytes * (comm.world_size - 1) // comm.world_size
        # The own piece is copied within the GPU while the others cross the link, which is slower.
        parts = (Part("launch"), Part("signal"), Part("push", remote))
        return Cost(steps=2, scale_up_bytes=remote, copied_bytes=request.num_bytes + remote, sms=_BLOCKS, parts=parts)

    def register(self, comm: Communicator, agree: str, row_bytes: int, text: str) -> int:
        index: int = comm.require_transport("all_to_all").request(agree, row_bytes, text)
        return index

    def refuse(self, comm: Communicator, request: int, why: str, async_op: bool) -> None:
        prepared = self._launcher(comm).prepare(request, [(0, 0, 0, 0)] * comm.world_size, digest=0)
        prepared.call(prepared.address, 0, 0)

    def prepare_even(self, comm: Communicator, request: int, num_bytes: int) -> _Prepared:
        each = num_bytes // comm.world_size
        return self._launcher(comm).prepare(request, [(each * p, each * p, each, each) for p in range(comm.world_size)])

    def run_even(self, comm: Communicator, request: int, output: torch.Tensor, input: torch.Tensor, op: str) -> None:
        prepared = self.prepare_even(comm, request, input.numel() * input.element_size())
        _call(comm, prepared, output.data_ptr(), input.data_ptr(), op)

    def run(
        self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: str
    ) -> None:
        pairs = [
            (i.data_ptr(), o.data_ptr(), i.numel() * i.element_size(), o.numel() * o.element_size())
            for o, i in zip(outputs, inputs, strict=True)
        ]
        _call(comm, self._launcher(comm).prepare(request, pairs), 0, 0, op)

    def submit(self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor],
               op: str, result: list[torch.Tensor], finish: Any) -> Work:  # fmt: skip
        launcher = self._launcher(comm)
        if launcher.aside is None:
            launcher.aside = Aside(launcher.place.device)

        def call() -> None:
            self.run(comm, request, outputs, inputs, op)
            if finish is not None:
                finish()

        return launcher.aside.run(call, result, [*outputs, *inputs, *result])


def _call(comm: Communicator, prepared: _Prepared, output: int, input: int, op: str) -> None:
    result = prepared.call(prepared.address, output, input)
    if result:
        comm.raise_failure(cpu.FAILED if result == cuda.FAILED else result, op)
