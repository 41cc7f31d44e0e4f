"""What the transports of GPU memory share: everything but where the memory comes from.

* **The control block** (csrc/cuda/signal.cuh) holds the first failure. Kernels copy it into pinned memory of this process,
  which the next call reads: the host never waits for the device to learn of a failure.
* **Staging for the ops comes with the communicator**, zeroed, so that no call is collective on the host: ranks may make
  their first calls on two communicators in different orders.
* **Buffers are made and given back collectively**, in `alloc`; garbage collection alone never changes what the ranks agree
  on. What `tensor` handed out stays mapped for as long as the tensor lives, whatever is closed before.
"""

from __future__ import annotations

import contextlib
import json
import sys
from abc import abstractmethod
from ctypes import c_uint64
from typing import Any, ClassVar

import torch

from a2a.errors import A2AError, MismatchError, PeerTimeoutError, RowOverflowError, UnsupportedError
from a2a.kernels import cuda, cuda_requests
from a2a.kernels.cpu import Cause
from a2a.topology import Topology
from a2a.transport.base import SymmetricBuffer, Transport, Wiring, not_one_domain
from a2a.transport.cuda_memory import Memory, Place, agree_over

_CONTROL_BYTES = 128 << 10
_STAGING_BYTES, _STAGING_BYTES_A_RANK = 256 << 20, 64 << 20  # of all-to-alls
_REDUCTION_BYTES, _REDUCTION_BYTES_A_RANK = 144 << 20, 36 << 20  # of reductions and all-gathers
_NORM_BYTES, _NORM_BYTES_A_RANK = 128 << 20, 32 << 20  # of all-reduces with a norm
_OK_AT, _CLOSED_AT = 8, 16  # in the control block
_LATE_AT = _CLOSED_AT + 8 * 1024 + 4 * 32  # behind `closed` and `epoch`; three words a rank
_HEADERS_AT, _HEADER_WORDS = _LATE_AT + 24 * 1024, 8  # two a rank
_BROKEN = " The communicator is broken since then; close it and make a new one."
_ASK = -1  # no stream


class CudaTransport(Transport):
    """A transport of GPU memory. What differs is `name`, `unavailable` and `_open`."""

    device_type: ClassVar[str] = "cuda"

    @classmethod
    def unavailable(cls, topology: Topology, device_type: str) -> str | None:
        if device_type != "cuda":
            return f"it serves CUDA tensors; this group's are on {device_type}"
        if reason := not_one_domain(topology):
            return reason
        if not torch.cuda.is_available():
            return "torch finds no CUDA device here"
        try:
            cuda.lib()
            cuda.driver()
            cuda.compiler()
        except UnsupportedError as error:
            return str(error)
        return None

    @classmethod
    def open(cls, wiring: Wiring) -> CudaTransport:
        return cls(wiring)

    @staticmethod
    def reduction_bytes(world_size: int) -> int:
        """Of `reduction_staging` on each rank."""
        return min(_REDUCTION_BYTES, _REDUCTION_BYTES_A_RANK * world_size)

    @abstractmethod
    def _open(self, wiring: Wiring) -> Memory:
        """This communicator's memory, with nothing in it. Collective; raises on all ranks or on none."""

    def __init__(self, wiring: Wiring) -> None:
        self.rank, self.world_size, self.timeout_s = wiring.rank, wiring.world_size, wiring.timeout_s
        self.agree = agree_over(wiring.exchange, self.name)  # what every rank says at a step: for set-up only
        index = torch.cuda.current_device() if wiring.device.index is None else wiring.device.index
        self.device = torch.device("cuda", index)
        self._closed = False
        self._switch: Any = None
        self._requests: list[tuple[int, str]] = []
        self._numbers: dict[tuple[int, str], int] = {}
        self._shared: dict[str, list[SymmetricBuffer]] = {}
        self.last_stream = 0  # of the call before: calls of one communicator run in their order; _ASK while capturing
        self._eager = self._last = 0  # of the last call that ran, and of the last one at all
        self._sides: list[torch.cuda.Stream] = []
        torch.cuda.synchronize(self.device)  # makes the context current
        self._looking: torch.cuda.Stream | None = None
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._record = c_uint64.from_address(self._host.data_ptr())
        with torch.cuda.device(self.device):
            self._memory = memory = self._open(wiring)
            self._control_at = memory.add(_CONTROL_BYTES, "the control block")
            self._control = memory.tensor(self._control_at, _CONTROL_BYTES)
            self._ok = self._control[_OK_AT : _OK_AT + 4].view(torch.int32).squeeze(0)
            self._ok.fill_(1)
            self.place = self._placed(memory)
        self.handle = self.place.base
        size = min(_STAGING_BYTES, _STAGING_BYTES_A_RANK * self.world_size)
        more = self.reduction_bytes(self.world_size)
        norms = min(_NORM_BYTES, _NORM_BYTES_A_RANK * self.world_size)
        all_of_them = self.alloc(size + more + norms, "staging")
        address, pointer = all_of_them.address, all_of_them.pointer
        self.staging = SymmetricBuffer(address, pointer, size)
        self.reduction_staging = SymmetricBuffer(address + size, pointer + size, more)
        self.norm_staging = SymmetricBuffer(address + size + more, pointer + size + more, norms)
        torch.cuda.synchronize(self.device)
        self.agree("ready", "")

    def _placed(self, memory: Memory) -> Place:
        facts = torch.cuda.get_device_properties(self.device)
        context = int(cuda.driver().cuCtxGetCurrent()[1])
        base, defines = memory.find(self._control_at)
        bases = tuple(memory.pointer(rank, 0) for rank in range(self.world_size))
        return Place(base, memory.window, self._host.data_ptr(), context, self.device, f"sm_{facts.major}{facts.minor}",
                     self.rank, bases, defines)  # fmt: skip

    # ---- memory

    def alloc(self, num_bytes: int, what: str, *, touch: bool = True) -> SymmetricBuffer:
        memory = self._memory
        records = [json.loads(p) for p in self.agree("alloc", json.dumps([num_bytes, what, memory.gone()]))]
        for peer, (theirs, text, _) in enumerate(records):
            if text.startswith("!"):
                raise MismatchError(f"comm.empty: rank {peer} refused its own call, so nothing was made: {text[1:]}",
                                    rank=self.rank, peer=peer, op="alloc")  # fmt: skip
            if (theirs, text) != (num_bytes, what):
                raise MismatchError(
                    f"rank {self.rank} asked for {what}; rank {peer} asked for {text}. Symmetric memory is made by all "
                    f"ranks alike: call with equal arguments everywhere",
                    rank=self.rank, peer=peer, op="alloc",
                )  # fmt: skip
        self._drop(sorted(set.intersection(*(set(g) for _, _, g in records))))
        with torch.cuda.device(self.device):
            offset = memory.add(num_bytes, what)
        return SymmetricBuffer(offset, memory.pointer(self.rank, offset), num_bytes)

    def _drop(self, offsets: list[int]) -> None:
        """Give back what every rank has let go of, once no kernel of any rank can be using it."""
        if offsets:
            torch.cuda.synchronize(self.device)
            self.agree("drop", "")
            with torch.cuda.device(self.device):
                self._memory.drop(offsets)

    def refuse_alloc(self, why: str) -> None:
        self.agree("alloc", json.dumps([0, f"!{why}", []]))

    def tensor(self, buffer: SymmetricBuffer) -> torch.Tensor:
        return self._memory.tensor(buffer.address, buffer.num_bytes)

    def release(self, buffer: SymmetricBuffer) -> None:
        if not self._closed:
            self._memory.blocks[buffer.address].released = True

    def shared(self, what: str, num_bytes: int) -> SymmetricBuffer:
        """A buffer that all users of `what` on this communicator share, zeroed at first; made where none is large enough.

        Collective. A larger one does not replace the one that others hold.
        """
        known = self._shared.setdefault(what, [])
        for buffer in known:
            if buffer.num_bytes >= num_bytes:
                return buffer
        known.append(self.alloc(num_bytes, what))
        return known[-1]

    def switch(self, group: Any, num_bytes: int, word_bytes: int) -> Any:
        """The `Switch` of this communicator, made by the first call. Collective then.

        Raises:
            UnsupportedError: there is none, on any rank; says why.
        """
        from a2a.transport.switch import open_switch  # which knows this class

        if self._switch is None:
            try:
                self._switch = open_switch(self, group, num_bytes, word_bytes)
            except UnsupportedError as error:
                self._switch = error
        if isinstance(self._switch, UnsupportedError):
            raise self._switch
        return self._switch

    # ---- streams

    def follow(self, stream: int) -> None:
        """Have a call on this stream follow the call before, which was on another or in a graph."""
        if self.last_stream != _ASK:
            self._eager = self._last = self.last_stream
        last, self._last = self._last, stream
        with torch.cuda.device(self.device):
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:  # calls of one graph follow each other too; where in time it is replayed, its user decides
            if last not in (0, stream) and _captures(self._external(last)):
                self._external(stream).wait_stream(self._external(last))
            self.last_stream = _ASK
            return
        self._external(stream).wait_stream(self._external(self._eager))
        self.last_stream = stream

    def streams(self) -> tuple[int, int, int]:
        """The current stream, made to follow the call before, and two of this communicator's own."""
        if not self._sides:
            self._sides = [torch.cuda.Stream(self.device, priority=-1) for _ in range(2)]  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device).cuda_stream
        if current != self.last_stream:
            self.follow(current)
        gates, work = self._sides
        return current, gates.cuda_stream, work.cuda_stream

    def outlive(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of tensors, once they are dropped, until this communicator's calls so far are over."""
        last = self._last if self.last_stream == _ASK else self.last_stream
        for tensor in tensors:
            tensor.record_stream(self._external(last))

    def _external(self, stream: int) -> torch.cuda.Stream:
        if not stream:
            return torch.cuda.default_stream(self.device)
        return torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call]

    # ---- requests and failures

    def request(self, agree: str, row_bytes: int, text: str) -> int:
        """Register what a call asks for. `row_bytes` is not compared here: the sizes of the pieces are."""
        key = (cuda_requests.digest_of(agree), text)
        if key not in self._numbers:
            self._numbers[key] = len(self._requests)
            self._requests.append(key)
        return self._numbers[key]

    def digest(self, request: int) -> int:
        """What peers compare; 0 is a refusal's."""
        return self._requests[request][0]

    def failed(self) -> bool:
        return self._closed or self._record.value != 0

    def told(self) -> bool:
        if self.failed() or torch.cuda.is_current_stream_capturing():
            return self.failed()
        seen = self._look(0, 8).view(torch.int64)
        if seen.item() and not self.failed():
            self._host.copy_(seen)  # as this rank's next kernel would have
        return self.failed()

    def _look(self, begin: int, end: int) -> torch.Tensor:
        """Bytes of the control block. On a stream that follows none: what users have launched may run on."""
        if self._looking is None:
            self._looking = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._looking):
            seen = self._control[begin:end].to("cpu", non_blocking=True)
        self._looking.synchronize()
        return seen

    def raise_failure(self, result: int, op: str, refusal: tuple[int, str] | None = None) -> None:
        if self._closed:
            raise A2AError(f"{op}: this communicator is closed on rank {self.rank}; make a new one")
        record = self._record.value
        if not record:
            cuda.check(result, op)
            return
        cause, by, who, text = record >> 48, record >> 32 & 0xFFFF, record >> 16 & 0xFFFF, record & 0xFFFF
        asked = self._requests[text][1] if text < len(self._requests) and by == self.rank else op
        difference = self._difference(by, who) if cause == Cause.MISMATCH else None
        messages: dict[int, str] = {
            Cause.TIMEOUT: f"rank {by} waited {self.timeout_s:.1f} s for rank {who} in {asked}. Rank {who} may have died or "
            f"taken another branch. See `a2a doctor`; the limit is A2A_TIMEOUT_S.",
            Cause.CLOSED: f"rank {who} has closed this communicator: rank {by} was waiting for it in {asked}.",
            Cause.MISMATCH: difference or f"rank {by} called {asked}, rank {who} something else.",
            Cause.SPLITS: f"split sizes disagree: what rank {by} in {asked} or rank {who} sends, the other does not expect."
            if by != who
            else f"rank {by} passed offsets or sizes to {asked} that lie outside its operand or its output, or that differ "
            f"for what it sends itself.",
            Cause.OVERFLOW: f"rank {by} received more rows than max_rows in {asked}; raise max_rows, or pass "
            f"overflow='drop'.",
            Cause.NOT_READY: f"rank {by} waited {self.timeout_s:.1f} s in {asked} for its own ready flags: rows of "
            f"combine(..., ready=True) that nothing marked, or rows of a dispatch whose kernels found no room. A kernel "
            f"that waits or marks is launched before that combine, and leaves SMs (ReadyFlags.reserved_sms).",
            Cause.REFUSED: f"rank {who} refused its own call while rank {by} was in {asked}; rank {who}'s error says why.",
            Cause.OUT_OF_RANGE: f"rank {by} passed an expert id that is neither -1 nor one of the experts' to {asked}.",
        }
        told = messages.get(cause, f"cause {cause}, found by rank {by}.") + _BROKEN
        if cause in (Cause.TIMEOUT, Cause.CLOSED, Cause.NOT_READY):
            name = Cause(cause).name.lower()
            raise PeerTimeoutError(told, rank=self.rank, peer=who, op=asked, cause=name)
        if cause == Cause.OVERFLOW:
            raise RowOverflowError(told)
        raise MismatchError(told, rank=self.rank, peer=who if by == self.rank else by, op=asked)

    def _difference(self, by: int, who: int) -> str | None:
        """What two ranks have called, as far as their signals are here and tell."""
        if torch.cuda.is_current_stream_capturing():
            return None
        size = 4 * 2 * _HEADER_WORDS * self.world_size
        words = self._look(_HEADERS_AT, _HEADERS_AT + size).view(torch.int32).view(-1, 2, _HEADER_WORDS).tolist()
        for headers in zip(words[by], words[who], strict=True):
            one, other = ([word & 0xFFFFFFFF for word in header] for header in headers)
            if one[0] == other[0] != 0 and one[1] != other[1]:  # of one epoch
                return f"rank {by} called {self._told(one)}, rank {who} {self._told(other)}."
        return None

    def _told(self, header: list[int]) -> str:
        known = next((text for digest, text in self._requests if digest == header[1]), None)
        return known or cuda_requests.told(header) or "another collective"

    def ok_word(self) -> torch.Tensor:
        return self._ok

    def stats(self) -> dict[str, object]:
        """Waits for the device. A peer counts as late when it was not there after a first look, some 20 us."""
        words = self._control[_LATE_AT : _LATE_AT + 24 * self.world_size].view(torch.int64).view(-1, 3).tolist()
        return {
            "transport": self.name,
            "device": str(self.device),
            "symmetric_bytes": self._memory.own_bytes(),
            "peers": [
                {"rank": peer, "late": times, "late_us": ns / 1e3, "longest_us": longest / 1e3}
                for peer, (times, ns, longest) in enumerate(words)
                if peer != self.rank
            ],
        }

    # ---- the end

    def close(self) -> None:
        """Waits for this rank's kernels, each of which ends by its deadline, and then tells the peers."""
        if self._closed:
            return
        self._closed = True
        self._memory.close()
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
            for peer in range(self.world_size):
                at = self._control_at + _CLOSED_AT + 8 * self.rank
                self._memory.view(peer, at, 8).tensor().fill_(1)
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Let go of the memory; tensors that are out keep it."""
        self.handle = 0
        del self._control, self._ok, self._memory

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing() and getattr(self, "handle", None):
            with contextlib.suppress(Exception):
                self.close()


def _captures(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is part of a capture."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


__all__ = ["CudaTransport"]
