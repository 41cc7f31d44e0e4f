"""All-to-all on GPUs by their copy engines: no SM works while the bytes travel, so a matrix product beside it loses none.

A kernel of one block meets the peers, the host's copies follow it on the stream, and another tells the peers that their
pieces are there (csrc/cuda/all_to_all_copy.cu). Everything can be captured in a CUDA graph.

The host names where each piece goes, without asking anybody: so all ranks must pass the same `Communicator.empty` tensor, or
ones at the same place of their symmetric memory, and even pieces. What a rank knows to be otherwise it refuses; what only
shows between ranks is a MismatchError. Since other calls may differ in that from rank to rank, this way is taken only where
all ranks ask for it: A2A_ALGORITHM=all_to_all=copy.

Wins from some 16 MiB on, where something else wants the SMs. Below, two kernels and their copies cost more than one kernel.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import Structure, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import AllToAll, Cost, Part, Request
from a2a.config import config
from a2a.kernels import cpu, cuda, cuda_params
from a2a.work import Aside, Work

if TYPE_CHECKING:
    from a2a.comm import Communicator

_THREADS = 128  # the kernels' own constant
_MOST_KEPT = 256  # sequences of a communicator


class _Copy(Structure):
    _fields_ = (("place", cuda_params.Place), ("done", c_uint64), ("digest", c_uint32), ("unused", c_uint32))


class _Sequence:
    """Enter, the copies of one size to one place, leave. Which input they read is set call by call."""

    def __init__(self, launcher: _Launcher, offset: int, each: int, digest: int, text: int) -> None:
        place, rank, world, events = launcher.place, launcher.rank, launcher.world, launcher.events
        where = cuda_params.Place(place.base, place.window, place.host, launcher.timeout_ns, rank, text)
        self._params = _Copy(where, launcher.done.address, digest, 0)
        self._calls = [launcher.call(name, self._params) for name in ("enter", "leave")]
        enter, leave = (cuda.Step(cuda.Step.LAUNCH, 0, ctypes.addressof(call)) for call in self._calls)
        steps = [enter, cuda.Step(cuda.Step.RECORD, 0, events[0])]
        steps += [cuda.Step(cuda.Step.WAIT, side, events[0]) for side in (1, 2)]
        self.pieces = []  # (step, the piece's offset in the input)
        for number, step in enumerate(
            (*range(1, world), 0)
        ):  # peers in turn, so that not all store to one; the own piece last
            peer = (rank + step) % world
            to = place.at(peer, offset) + rank * each
            self.pieces.append((len(steps), peer * each))
            steps.append(cuda.Step(cuda.Step.COPY, number % 3, to, 0, 0, _words(0, each)))
        for side in (1, 2):
            steps += [cuda.Step(cuda.Step.RECORD, side, events[side]), cuda.Step(cuda.Step.WAIT, 0, events[side])]
        steps.append(leave)
        if not each:
            steps = [enter, leave]
            self.pieces = []
        self.steps, self.count, self._each = (cuda.Step * len(steps))(*steps), len(steps), each

    def read_from(self, input: int) -> None:
        for index, offset in self.pieces:
            self.steps[index].patch = _words(input + offset, self._each)


def _words(source: int, num_bytes: int) -> Any:
    low = 0xFFFFFFFF
    return (c_uint32 * 6)(source & low, source >> 32, num_bytes & low, num_bytes >> 32)


class _Launcher:
    """The kernels on one communicator."""

    def __init__(self, comm: Communicator) -> None:
        transport = comm.require_transport("all_to_all")
        self.rank, self.world, self.place, self.transport = comm.rank, comm.world_size, transport.place, transport
        self.timeout_ns = int(comm.timeout_s * 1e9)
        self.done = transport.shared("all_to_all_copy", 4 * comm.world_size)
        self.lib = cuda.lib()
        with torch.cuda.device(self.place.device):
            self._module = cuda.module("all_to_all_copy", self.place, {"WORLD": comm.world_size})
        self.events = [cuda.event() for _ in range(3)]
        self.aside = Aside(self.place.device)
        weakref.finalize(self, _free, self.lib, list(self.events))
        self._sequences: dict[tuple[int, ...], _Sequence] = {}

    def call(self, name: str, params: _Copy) -> cuda.Call:
        function = self._module.function(f"all_to_all_copy_{name}")
        return cuda.Call(
            function=function, context=self.place.context, failure=self.place.host, params=ctypes.addressof(params),
            params_bytes=ctypes.sizeof(params), grid=1, block=_THREADS,
        )  # fmt: skip

    def offset(self, output: int, num_bytes: int) -> int:
        """Where in the symmetric memory an output lies.

        Raises:
            ValueError: it does not.
        """
        offset: int = self.place.offset_of(output)
        if num_bytes and not 0 <= offset <= self.place.window - num_bytes:
            raise ValueError(
                "all_to_all=copy: output is not of Communicator.empty, so no peer's copy engine can store to it; pass "
                "such a tensor on all ranks, or take A2A_ALGORITHM away"
            )
        return offset if num_bytes else 0

    def run(self, agree: str, offset: int, each: int, input: int) -> int:
        digest_of = f"{agree}|at {offset}, {each} bytes a piece"
        text = self.transport.request(
            digest_of, 0, f"all_to_all of {each} bytes a piece into symmetric memory at {offset}"
        )
        return self._launch((text, offset, each), self.transport.digest(text), input)

    def refuse(self, request: int) -> int:
        return self._launch((request, -1, 0), 0, 0)

    def _launch(self, key: tuple[int, int, int], digest: int, input: int) -> int:
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            sequence = _Sequence(self, key[1], key[2], digest, key[0] & 0xFFFF)
        self._sequences[key] = sequence  # the last used last
        if len(self._sequences) > _MOST_KEPT:
            del self._sequences[next(iter(self._sequences))]
        sequence.read_from(input)
        result: int = self.lib.a2a_cuda_run(sequence.steps, sequence.count, (c_void_p * 3)(*self.transport.streams()))
        return result


def _free(library: Any, events: list[int]) -> None:
    for event in events:
        library.a2a_cuda_event_free(event)


def _even(pieces: list[torch.Tensor]) -> tuple[int, int]:
    """(address, bytes of each) of pieces of one size that lie one behind the other.

    Raises:
        ValueError: they don't.
    """
    address, each = pieces[0].data_ptr(), pieces[0].numel() * pieces[0].element_size()
    for number, piece in enumerate(pieces):
        if piece.numel() * piece.element_size() != each or (each and piece.data_ptr() != address + number * each):
            raise ValueError(
                "all_to_all=copy: pieces differ in size or do not lie side by side; copy engines serve even exchanges "
                "of one tensor. Take A2A_ALGORITHM away for the others"
            )
    return address, each


class AllToAllCopy(AllToAll):
    """See the module's docstring."""

    name: ClassVar[str] = "copy"
    device_type: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        self._launchers: weakref.WeakKeyDictionary[Communicator, _Launcher] = weakref.WeakKeyDictionary()
        self._agreed: weakref.WeakKeyDictionary[Communicator, dict[int, str]] = weakref.WeakKeyDictionary()

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if reason := self.no_memory(comm):
            return reason
        if "all_to_all=copy" not in (config().algorithm or "").replace(" ", "").split(","):
            return "it takes even pieces into tensors of comm.empty, on all ranks; ask: A2A_ALGORITHM=all_to_all=copy"
        return None

    def cost(self, request: Request, comm: Communicator) -> Cost:
        remote = request.num_bytes * (comm.world_size - 1) // comm.world_size
        parts = (Part("launch", times=2), Part("signal", times=2), Part("engine", remote))
        return Cost(steps=3, scale_up_bytes=remote, copied_bytes=request.num_bytes, parts=parts)

    def register(self, comm: Communicator, agree: str, row_bytes: int, text: str) -> int:
        index: int = comm.require_transport("all_to_all").request(agree, row_bytes, text)
        self._agreed.setdefault(comm, {})[index] = agree
        return index

    def refuse(self, comm: Communicator, request: int, why: str, async_op: bool) -> None:
        self._launcher(comm).refuse(request)

    def run_even(self, comm: Communicator, request: int, output: torch.Tensor, input: torch.Tensor, op: str) -> None:
        num_bytes = output.numel() * output.element_size()
        self._run(comm, request, output.data_ptr(), input.data_ptr(), num_bytes // comm.world_size, op)

    def run(
        self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: str
    ) -> None:
        try:
            (to, each), (source, same) = _even(outputs), _even(inputs)
            if same != each:
                raise ValueError(f"all_to_all=copy: output pieces have {each} bytes, input pieces {same}")
        except ValueError as error:
            self.refuse(comm, request, str(error), False)
            raise
        self._run(comm, request, to, source, each, op)

    def submit(self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor],
               op: str, result: list[torch.Tensor], finish: Any) -> Work:  # fmt: skip
        def call() -> None:
            self.run(comm, request, outputs, inputs, op)
            if finish is not None:
                finish()

        return self._launcher(comm).aside.run(call, result, [*outputs, *inputs, *result])

    def _run(self, comm: Communicator, request: int, output: int, input: int, each: int, op: str) -> None:
        launcher = self._launcher(comm)
        try:
            offset = launcher.offset(output, each * comm.world_size)
        except ValueError as error:
            self.refuse(comm, request, str(error), False)
            raise
        result = launcher.run(self._agreed[comm][request], offset, each, input)
        if result:
            comm.raise_failure(cpu.FAILED if result == cuda.FAILED else result, op)

    def _launcher(self, comm: Communicator) -> _Launcher:
        launcher = self._launchers.get(comm)
        if launcher is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "all_to_all: the first call on a communicator loads its kernels, which a CUDA graph can't capture; make "
                    "one call before the capture, on all ranks"
                )
            launcher = self._launchers[comm] = _Launcher(comm)
        return launcher
