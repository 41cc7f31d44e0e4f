"""What an algorithm owes: a reason where it can't, a cost where it can, and the doing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.work import Work

if TYPE_CHECKING:
    from a2a.comm import Communicator
    from a2a.topology.costs import Costs


@dataclass(frozen=True)
class Request:
    """A collective, as far as all ranks agree on it. What may differ between ranks (splits, strides, kind of memory) is not
    here: it selects a side of the algorithm's protocol, never the algorithm.

    Attributes:
        op: "all_to_all" (of tensors, even or not, single or listed), "all_reduce", "reduce_scatter", "all_gather" or "moe".
        dtype: of the elements.
        num_bytes: that a rank sends, where ranks are known to send alike; 0 where not.
        detail: what else all ranks agree on and an algorithm may need, as sorted pairs.
    """

    op: str
    dtype: torch.dtype
    num_bytes: int = 0
    detail: tuple[tuple[str, Any], ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """An entry of `detail`."""
        return dict(self.detail).get(key, default)


@dataclass(frozen=True)
class Part:
    """Some bytes of one primitive (`a2a.topology.costs` lists them).

    Attributes:
        primitive: its name.
        num_bytes: how many.
        among: of how many they are a part, which decides about caches; 0: they are all.
        times: how often; less than nothing for what another part counts too much.
    """

    primitive: str
    num_bytes: int = 0
    among: int = 0
    times: float = 1.0

    def time_us(self, costs: Costs) -> float:
        if self.among > self.num_bytes:
            return self.times * costs.us(self.primitive, self.among) * self.num_bytes / self.among
        return self.times * costs.us(self.primitive, self.num_bytes)


def own_copy(num_bytes: int, among: int) -> Part:
    """What stays at home of a collective of CPU tensors, which moves `among` bytes in all."""
    past_caches = num_bytes >= 2 << 20  # kPastCache in csrc/cpu/all_to_all_pairwise.cpp
    return Part("stream" if past_caches else "copy", num_bytes, among)


@dataclass(frozen=True)
class Cost:
    """Modelled, per rank and call.

    Attributes:
        steps: rounds of signals that follow one another.
        scale_up_bytes: stored into or loaded from peers' memory.
        scale_out_bytes: sent across rails.
        copied_bytes: written to memory in all, staging included.
        sms: that wait or copy, on a GPU.
        rail_steps: messages between domains that follow one another.
        parts: the primitives that it is made of, one after the other. Without any, the links' latency and bandwidth decide.
    """

    steps: int
    scale_up_bytes: int = 0
    scale_out_bytes: int = 0
    copied_bytes: int = 0
    sms: int = 0
    rail_steps: int = 0
    parts: tuple[Part, ...] = ()

    def time_us(self, comm: Communicator) -> float:
        """What this would take on the communicator: the measured costs of its parts, and the link between domains."""
        up, out = comm.topology.scale_up, comm.topology.scale_out
        if self.parts:
            time = sum(part.time_us(comm.costs) for part in self.parts)
        else:
            time = self.steps * up.latency_us + self.copied_bytes / (up.bandwidth_GBps * 1e3)
        if not self.scale_out_bytes:
            return time
        return time + max(1, self.rail_steps) * out.latency_us + self.scale_out_bytes / (out.bandwidth_GBps * 1e3)

    @property
    def primitives(self) -> frozenset[str]:
        """The names of its parts."""
        return frozenset(part.primitive for part in self.parts)


class Algorithm(ABC):
    """Base class of the algorithms."""

    name: ClassVar[str] = ""
    op: ClassVar[str] = ""
    device_type: ClassVar[str] = ""  # of the memory that its kernels address; "": any
    deterministic: ClassVar[bool] = True
    baseline: ClassVar[bool] = False  # serves every communicator of a process group

    @abstractmethod
    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        """Why it can't do `request` on `comm`, or None. Depends only on what all ranks have in common."""

    @abstractmethod
    def cost(self, request: Request, comm: Communicator) -> Cost:
        """Modelled cost of a request that it supports."""

    def remarks(self, request: Request, comm: Communicator) -> tuple[str, ...]:
        """What else `a2a plan` says of it where it is chosen."""
        return ()

    def no_memory(self, comm: Communicator) -> str | None:
        """Why its kernels can't run on `comm`, or None."""
        if comm.transport is None:
            return "; ".join(f"{name}: {why}" for name, why in comm.why_no_transport.items())
        if comm.transport.device_type != self.device_type:
            kind = comm.transport.device_type
            return f"its kernels are for {self.device_type} memory; this communicator's is {kind}"
        return None


class AllToAll(Algorithm):
    """An all-to-all: rank r's piece for rank p becomes p's piece from r."""

    op: ClassVar[str] = "all_to_all"

    @abstractmethod
    def run(
        self, comm: Communicator, request: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: str
    ) -> None:
        """Exchange contiguous pieces, in rank order; `request` is what `register` gave. Blocks until done."""

    @abstractmethod
    def run_even(self, comm: Communicator, request: int, output: torch.Tensor, input: torch.Tensor, op: str) -> None:
        """The same for two contiguous tensors that all ranks share evenly."""

    def prepare_even(self, comm: Communicator, request: int, num_bytes: int) -> Any:
        """What the ops' fast way may call for even, contiguous tensors of so many bytes; None: nothing.

        It has `call(address, output, input)`, which returns 0 or a failure, `address`, `device` and `num_bytes`.
        """
        return None

    @abstractmethod
    def submit(
        self,
        comm: Communicator,
        request: int,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        op: str,
        result: list[torch.Tensor],
        finish: Any,
    ) -> Work:
        """Start it and return Work."""

    @abstractmethod
    def register(self, comm: Communicator, agree: str, row_bytes: int, text: str) -> int:
        """Make a request known, so that peers that ask for something else can be told."""

    @abstractmethod
    def refuse(self, comm: Communicator, request: int, why: str, async_op: bool) -> None:
        """Tell the peers that this rank can't make its call."""
