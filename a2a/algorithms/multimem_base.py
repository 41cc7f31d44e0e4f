"""All-reduce, reduce-scatter and all-gather through the NVLink switch: what its algorithms have in common.

The switch adds in an order of its own, so these are used only where asked for: by `communicator(deterministic=False)`, or by
A2A_ALGORITHM. The first such request of a communicator brings the switch up and tests it, on all ranks: results are compared
with those of the kernels that need no switch, and a rank that finds a difference keeps all of them from using it.

A2A_SOFTWARE_SWITCH=1 has the same kernels, csrc/cuda/reduce_multimem.cu, loop over the ranks' memory instead: for tests,
where A2A_ALGORITHM names them.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import Structure, c_uint64
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Cost, Part, Request
from a2a.algorithms.cuda_reduction_base import COLLECTIVES, CudaReduction, CudaShares, Params, Prepared, cut
from a2a.config import config
from a2a.errors import UnsupportedError
from a2a.kernels import cuda

if TYPE_CHECKING:
    from a2a.comm import Communicator

_BLOCKS, _THREADS = 24, 512
_SLOT_BYTES = 64 << 10  # of a block
# What the switch has instructions for, with the results that a2a promises.
SWITCHED = {
    *((dtype, "sum") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((dtype, name) for dtype in (torch.int32, torch.int64) for name in ("sum", "min", "max")),
}
_TEST_COUNT = 150_001  # elements of a rank's share: several slices of several blocks, and an odd end


class _MultimemParams(Structure):
    """`MultimemParams` of reduce_multimem.cu."""

    _fields_ = (("call", Params), ("multicast", c_uint64), ("own", c_uint64))


class MultimemReduction(CudaReduction):
    """What these algorithms share."""

    kernel: ClassVar[str] = "reduce_multimem"
    deterministic: ClassVar[bool] = False
    plain: ClassVar[type[CudaShares]]  # what it must agree with

    def __init__(self) -> None:
        super().__init__()
        self._tested: weakref.WeakKeyDictionary[Communicator, str] = weakref.WeakKeyDictionary()  # "": it has passed

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if (reason := super().unsupported(request, comm) or self._no_instruction(request)) is not None:
            return reason
        named = f"{self.op}={self.name}" in (config().algorithm or "").replace(" ", "").split(",")
        if config().software_switch and not named:
            return "A2A_SOFTWARE_SWITCH is for tests: name it in A2A_ALGORITHM, too"
        if comm.deterministic and not named:
            return "the switch adds in an order of its own; make the communicator with deterministic=False"
        if isinstance(comm.transport, type):
            return "the switch must pass a test first, where the ranks are"
        if comm not in self._tested:
            self._tested[comm] = self._self_test(comm)
        return self._tested[comm] or None

    def _no_instruction(self, request: Request) -> str | None:
        if self.op == "all_gather" or (request.dtype, request.get("reduce_op", "sum")) in SWITCHED:
            return None
        dtype, reduces = str(request.dtype).removeprefix("torch."), request.get("reduce_op", "sum")
        if reduces == "avg":
            return "the switch has no averages: a sum would be rounded before it is divided"
        if reduces in ("min", "max") and request.dtype.is_floating_point:
            return f"the switch's {reduces} of {dtype} is none, or does not keep a NaN of any rank"
        return f"the switch has no instruction for the {reduces} of {dtype}"

    def cost(self, request: Request, comm: Communicator) -> Cost:
        size = self.shares(request.num_bytes, comm.world_size)[0]
        moved = size if self.op == "reduce_scatter" else 2 * size // comm.world_size + size // 4
        parts = (Part("launch"), Part("signal", times=4), Part("push", moved))
        return Cost(steps=4, scale_up_bytes=moved, copied_bytes=moved, sms=_BLOCKS, parts=parts)

    def launch_of(self, whole: int, share: int) -> tuple[int, int]:
        slices = -(-whole // _SLOT_BYTES)
        return max(1, min(_BLOCKS, slices)), _THREADS

    # ---- launches

    def _function(self, comm: Communicator, dtype: int, reduce_op: int) -> int:
        functions = self._functions.setdefault(comm, {})
        if (dtype, reduce_op) not in functions:
            self.refuse_capture()
            flag_bytes, chunk_bytes = cut(comm)
            defines = {
                "WORLD": comm.world_size, "FLAG_BYTES": flag_bytes, "CHUNK_BYTES": chunk_bytes, "DTYPE": dtype,
                "REDUCE": reduce_op, "COLLECTIVE": COLLECTIVES[self.op], "TWO_SHOT": 0, "SLOT_BYTES": _SLOT_BYTES,
                "A2A_SOFTWARE_SWITCH": int(switch_of(comm).software),
            }  # fmt: skip
            place = comm.require_transport(self.op).place
            with torch.cuda.device(place.device):
                module = cuda.module(self.kernel, place, defines)
                assert module.constant("reduce_multimem_words") <= _word_bytes(comm.world_size)
                functions[dtype, reduce_op] = module.function(self.kernel)
        return functions[dtype, reduce_op]

    def _made(
        self, comm: Communicator, request: int, num_bytes: int, dtype: torch.dtype, reduce_op: str, digest: int | None
    ) -> Prepared:
        made = super()._made(comm, request, num_bytes, dtype, reduce_op, digest)
        switch = switch_of(comm)
        plain: Any = made._params
        plain.staging = switch.words
        params = _MultimemParams(call=plain, multicast=switch.multicast, own=switch.own)
        made._call.params, made._call.params_bytes = ctypes.addressof(params), ctypes.sizeof(params)
        made._params = params
        return made

    # ---- the self-test

    def _self_test(self, comm: Communicator) -> str:
        """Why the switch is not to be used, or nothing; the same on all ranks. Collective, and waits for the GPU."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.op}: a communicator's first call through the switch brings it up and tests it, which a CUDA graph "
                f"can't capture; make one call before the capture, on all ranks"
            )
        try:
            switch_of(comm)
        except UnsupportedError as error:
            return str(error)
        dtypes = (
            [torch.uint8] if self.op == "all_gather" else [torch.float32, torch.bfloat16, torch.float16, torch.int32]
        )
        found = next(filter(None, (self._difference(comm, dtype) for dtype in dtypes)), "")
        for rank, theirs in enumerate(comm.require_transport(self.op).agree(f"switch/{self.op}", found)):
            if theirs:
                return f"the switch failed its self-test on rank {rank}: {theirs}"
        return ""

    def _difference(self, comm: Communicator, dtype: torch.dtype) -> str:
        """How its result differs from that of `plain`, or nothing."""
        world, rank, device = comm.world_size, comm.rank, comm.device
        count = _TEST_COUNT * (world if self.op == "reduce_scatter" else 1)
        out_count = {"reduce_scatter": count // world, "all_gather": count * world}.get(self.op, count)
        generator = torch.Generator(device).manual_seed(rank)
        whole = torch.randint(-64, 64, (count,), generator=generator, device=device)
        detail = () if self.op == "all_gather" else (("reduce_op", "sum"),)
        asked = Request(self.op, dtype, count * dtype.itemsize, detail)
        fine = [torch.rand(count, generator=generator, device=device)] if dtype.is_floating_point else []
        for values in (whole, *fine):
            results = []
            for algorithm in (self, self.plain()):
                source = values.to(dtype, copy=True)  # an all-reduce stores there
                result = source if self.op == "all_reduce" else torch.empty(out_count, dtype=dtype, device=device)
                request = algorithm.register(
                    comm, f"switch|{self.op}|{dtype}|{algorithm.name}", f"{self.op} ({algorithm.name}, a self-test)"
                )
                algorithm.run(comm, asked, request, result, source, torch.distributed.ReduceOp.SUM)
                results.append(result.double())
            if values is whole:
                bound = 0.0  # exact in any order
            else:  # all terms are below 1: each partial sum is rounded in float32, and the last one to the dtype
                bound = world * (2 * world * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps)
            worst = float((results[0] - results[1]).abs().max())
            if not worst <= bound:
                return f"{dtype} results differ by up to {worst:g}; {bound:g} is allowed"
        return ""


def switch_of(comm: Communicator) -> Any:
    """The communicator's switch, brought up by the first that asks. Collective then.

    Raises:
        UnsupportedError: there is none, on any rank; says why.
    """
    transport = comm.require_transport("the switch")
    return transport.switch(comm.group, _BLOCKS * _SLOT_BYTES, _word_bytes(comm.world_size))


def _word_bytes(world_size: int) -> int:
    return 2 * world_size * _BLOCKS * 8
