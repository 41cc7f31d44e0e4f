"""All-reduce, residual add and RMSNorm on GPUs: what its algorithms there have in common, and their launches.

Few rows travel as packets that mark their own arrival (csrc/cuda/norm_flags.cu), more of them in batches with a signal each
(norm_rows.cu), through staging of their own in either case: kinds of memory make no difference. More rows than the staging
holds are several launches, cut in the same way on every rank. The host waits for nothing, so that a call can be captured in
a CUDA graph and replayed.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from ctypes import Structure, c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Cost, Part, Request
from a2a.algorithms.reduction_base import DTYPES
from a2a.algorithms.rms_norm_base import OP, Prepared, RmsNorm, Tensors, hidden_of
from a2a.kernels import cpu, cuda, cuda_params

if TYPE_CHECKING:
    from a2a.comm import Communicator

_BLOCKS, _BATCHES = 32, 64  # kBlocks and kMostBatches in norm.cuh
_PACKET_BYTES = 192 << 10  # a rank's, a third more than its rows have
_FLAG_BYTES = 512 << 10  # the most that a rank sends as packets, over all peers
_BATCH_BYTES = 32 << 10  # of rows with one signal, where a row is not longer
_TEAM, _TEAMS = 1024, 8  # kMostThreads and kMostTeams in norm_rows.cu

_get_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: this torch has no CUDA


class NormParams(Structure):
    """`Params` of norm.cuh."""

    _fields_ = (
        *((name, c_uint64) for name in ("out", "residual_out", "input", "residual", "weight")),
        ("place", cuda_params.Place),
        ("staging", c_uint64),
        ("digest", c_uint32),
        ("eps", c_float),
        ("rows", c_uint32),
        ("batch_rows", c_uint32),
    )


@dataclass(frozen=True)
class Cut:
    """How the rows of one launch of norm_rows are cut into batches, alike on all ranks."""

    rows: int
    grid: int
    batch_rows: int

    @staticmethod
    def of(rows: int, row_bytes: int, per_owner: int, slab_bytes: int) -> Cut:
        """As many of `rows` as the staging takes. `per_owner`: batches of a block of which each owner has one."""
        vectors = row_bytes // 16
        teams = 1 if vectors >= _TEAM else min(_TEAMS, _TEAM // (-(-vectors // 32) * 32))
        largest = max(1, _BATCH_BYTES // row_bytes)
        most = _BLOCKS * _BATCHES * largest
        rows = min(rows, most)
        while True:
            each = -(-rows // _BLOCKS)
            batch_rows = min(largest, each, max(teams, -(-each // 2)))
            grid = min(_BLOCKS, -(-rows // batch_rows))
            batches = -(-rows // (grid * batch_rows))
            slot = -(-batch_rows * (row_bytes + 4) // 16) * 16
            if batches <= _BATCHES and grid * -(-batches // per_owner) * slot <= slab_bytes:
                return Cut(rows, grid, batch_rows)
            rows = max(1, rows * 7 // 8)


class _Kernels:
    """The kernels of one algorithm for rows of one length and dtype on one communicator."""

    def __init__(self, comm: Communicator, hidden: int, dtype: torch.dtype, two_shot: bool) -> None:
        transport = comm.require_transport(OP)
        self.transport, self.place, self.rank, self.world = transport, transport.place, comm.rank, comm.world_size
        self.row_bytes, self.two_shot = hidden * dtype.itemsize, two_shot
        self.staging = transport.norm_staging
        self.timeout_ns = int(comm.timeout_s * 1e9)
        self.packet_bytes, self.slab_bytes = slabs(self.staging.num_bytes, self.world)
        defines = {
            "WORLD": self.world, "DTYPE": DTYPES[dtype], "HIDDEN": hidden, "PACKET_BYTES": self.packet_bytes,
            "ROW_BYTES": self.slab_bytes,
        }  # fmt: skip
        self.functions: dict[str, tuple[int, int]] = {}  # name -> handle, threads
        with torch.cuda.device(self.place.device):
            self._load("norm_rows", {**defines, "TWO_SHOT": int(two_shot)})
            if not two_shot:
                self._load("norm_flags", defines)
        self.launch = cuda.lib().a2a_cuda_launch

    def _load(self, name: str, defines: dict[str, int]) -> None:
        module = cuda.module(name, self.place, defines)
        assert module.constant("norm_staging") <= self.staging.num_bytes
        self.functions[name] = module.function(name), module.constant(f"{name}_threads")

    def prepare(self, request: int, rows: int, eps: float, digest: int | None = None) -> CudaPrepared:
        digest = self.transport.digest(request) if digest is None else digest
        launches: list[_Launch] = []
        done = 0
        while done < rows or not launches:
            launches.append(self._launch(request, digest, rows - done, eps))
            launches[-1].offset = done * self.row_bytes
            done += launches[-1].params.rows
        return CudaPrepared(self, launches)

    def _launch(self, request: int, digest: int, rows: int, eps: float) -> _Launch:
        """Of the first of `rows`."""
        units = -(-self.row_bytes // 48)
        flags = (
            not self.two_shot
            and rows * units * 64 <= self.packet_bytes
            and rows * self.row_bytes * (self.world - 1) <= _FLAG_BYTES
        )
        name = "norm_flags" if flags else "norm_rows"
        function, threads = self.functions[name]
        cut = Cut(rows, max(1, min(_BLOCKS, rows)), 1)
        if not flags:
            cut = Cut.of(max(rows, 1), self.row_bytes, self.world if self.two_shot else 1, self.slab_bytes)
        place = self.place
        where = cuda_params.Place(place.base, place.window, place.host, self.timeout_ns, self.rank, request & 0xFFFF)
        params = NormParams(
            place=where, staging=self.staging.address, digest=digest, eps=eps, rows=min(rows, cut.rows),
            batch_rows=cut.batch_rows,
        )  # fmt: skip
        call = cuda.Call(
            function=function, context=place.context, failure=place.host, params=ctypes.addressof(params),
            params_bytes=ctypes.sizeof(params), grid=cut.grid, block=threads,
        )  # fmt: skip
        return _Launch(call, params)


def slabs(staging_bytes: int, world_size: int) -> tuple[int, int]:
    """(PACKET_BYTES, ROW_BYTES) of norm.cuh's staging."""
    signals = 3 * world_size * _BLOCKS * _BATCHES * 4
    packets = min(_PACKET_BYTES, (staging_bytes - signals) // (16 * world_size) // 64 * 64)
    return packets, (staging_bytes - signals - 2 * world_size * packets) // (3 * world_size) // 4096 * 4096


@dataclass
class _Launch:
    call: cuda.Call
    params: NormParams
    offset: int = 0  # bytes, of its rows in every tensor


class CudaPrepared(Prepared):
    """The launches of a call."""

    alignment = 16

    def __init__(self, kernels: _Kernels, launches: list[_Launch]) -> None:
        self.device = kernels.place.device.index
        self._kernels = kernels
        self._launches = [(each, each.params, ctypes.addressof(each.call), each.offset) for each in launches]
        self._lock = threading.Lock()  # one call at a time fills in the parameters

    def __call__(self, out: int, residual_out: int, input: int, residual: int, weight: int) -> int:
        kernels = self._kernels
        stream = _get_stream(self.device)  # type: ignore[misc]
        if stream != kernels.transport.last_stream:
            kernels.transport.follow(stream)
        with self._lock:
            for _, params, address, offset in self._launches:
                params.input, params.residual, params.weight = input + offset, residual + offset, weight
                result: int = kernels.launch(address, stream, out + offset, residual_out + offset)
                if result:
                    return cpu.FAILED if result == cuda.FAILED else result
        return 0


class CudaRmsNorm(RmsNorm):
    """What the one-shot and two-shot algorithms share."""

    device_type: ClassVar[str] = "cuda"
    two_shot: ClassVar[bool] = False
    alignment: ClassVar[int] = 16

    def __init__(self) -> None:
        self._kernels: weakref.WeakKeyDictionary[Communicator, dict[Any, _Kernels]] = weakref.WeakKeyDictionary()

    def _of(self, comm: Communicator, hidden: int, dtype: torch.dtype) -> _Kernels:
        known = self._kernels.setdefault(comm, {})
        if (hidden, dtype) not in known:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{OP}: the first call with rows of this length and dtype loads their kernels, which a CUDA graph can't "
                    f"capture; make one call before the capture, on all ranks"
                )
            known[hidden, dtype] = _Kernels(comm, hidden, dtype, self.two_shot)
        return known[hidden, dtype]

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if (reason := self.no_memory(comm) or self.no_kernel(request)) is not None:
            return reason
        row_bytes = hidden_of(request) * request.dtype.itemsize
        return f"a row has {row_bytes} bytes, which 16 does not divide" if row_bytes % 16 else None

    def cost(self, request: Request, comm: Communicator) -> Cost:
        size, n = request.num_bytes, comm.world_size
        remote = 2 * size * (n - 1) // n if self.two_shot else size * (n - 1)
        steps, copied = 2 if self.two_shot else 1, remote + size // 4
        parts = (Part("launch"), Part("signal", times=steps), Part("push", remote), Part("copy", size // 4))
        return Cost(steps=steps, scale_up_bytes=remote, copied_bytes=copied, sms=_BLOCKS, parts=parts)

    def refuse(self, comm: Communicator, request: int, why: str) -> None:
        self._of(comm, 4, torch.float32).prepare(request, 0, 0.0, digest=0)(0, 0, 0, 0, 0)

    def prepare(self, comm: Communicator, asked: Request, request: int, eps: float) -> CudaPrepared:
        hidden = hidden_of(asked)
        rows = asked.num_bytes // (hidden * asked.dtype.itemsize)
        return self._of(comm, hidden, asked.dtype).prepare(request, rows, eps)

    def run(self, comm: Communicator, asked: Request, request: int, tensors: Tensors, eps: float) -> None:
        result = self.prepare(comm, asked, request, eps)(*tensors.pointers)
        if result:
            comm.raise_failure(result, OP)
