"""When reductions may go through the NVLink switch: what is asked, in which order, and that nothing is made to find out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a.algorithms.all_gather_multimem import AllGatherMultimem
from a2a.algorithms.all_reduce_multimem import AllReduceMultimem
from a2a.algorithms.base import Request
from a2a.algorithms.multimem_base import SWITCHED
from a2a.config import config, describe
from a2a.transport import switch

GROUP = dist.ProcessGroup.__new__(dist.ProcessGroup)
OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@pytest.fixture(autouse=True)
def nothing_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OFF, "A2A_SOFTWARE_SWITCH", "A2A_ALGORITHM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(switch, "LibCuda", lambda: SimpleNamespace(attribute=lambda which, index: 1))
    monkeypatch.setattr(switch, "_multicast_buffer", never)


def never(*_: Any) -> Any:
    raise AssertionError("a multicast buffer was asked for")


class Transport:
    """What `open_switch` needs; `others`: what rank 1 says at a step."""

    device, device_type = torch.device("cuda", 0), "cuda"

    def __init__(self, **others: str) -> None:
        self.others, self.allocated = others, list[str]()

    def agree(self, step: str, mine: str) -> list[str]:
        return [mine, self.others.get(step.replace("switch/", ""), mine)]

    def alloc(self, num_bytes: int, what: str) -> Any:
        self.allocated.append(what)
        return SimpleNamespace(address=4096 * len(self.allocated), pointer=1 << 20, num_bytes=num_bytes)


def opened(transport: Transport) -> switch.Switch:
    return switch.open_switch(transport, GROUP, 1 << 20, 4096)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OFF)
def test_a_variable_that_forbids_multicast_is_obeyed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, OFF[name])
    monkeypatch.setattr(switch, "LibCuda", never)
    with pytest.raises(a2a.UnsupportedError, match=f"rank 0: {name}={OFF[name]} forbids"):
        opened(Transport())


def test_a_device_without_multicast_is_told_by_its_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "LibCuda", lambda: SimpleNamespace(attribute=lambda which, index: 0))
    with pytest.raises(a2a.UnsupportedError, match="lacks multicast"):
        opened(Transport())


def test_a_reason_of_any_rank_holds_for_all() -> None:
    with pytest.raises(a2a.UnsupportedError, match="rank 1: its own reason"):
        opened(Transport(why_not="its own reason"))


def test_a_group_without_torchs_rendezvous_is_refused() -> None:
    assert "torch's own engines" in switch.why_not(torch.device("cuda", 0), object())


def test_torchs_buffer_is_taken_where_nothing_speaks_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = SimpleNamespace(multicast_ptr=1 << 40, buffer_ptrs=[7, 8], rank=1)
    monkeypatch.setattr(switch, "_multicast_buffer", lambda *_: (None, handle))
    transport = Transport()
    made = opened(transport)
    assert (made.multicast, made.own, made.software, made.words) == (1 << 40, 8, False, 4096)
    assert transport.allocated == ["words of the switch"]
    handle.multicast_ptr = 0
    with pytest.raises(a2a.UnsupportedError, match="no multicast address"):
        opened(Transport())


def test_the_software_switch_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_SOFTWARE_SWITCH", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setattr(switch, "LibCuda", never)
    made = opened(Transport())
    assert (made.multicast, made.own, made.software) == (8192, 1 << 20, True)
    with pytest.raises(a2a.UnsupportedError, match="differs between ranks: software, multicast"):
        opened(Transport(kind="multicast"))


def comm(**fields: Any) -> Any:
    class Comm(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    return Comm(**{"transport": Transport(), "deterministic": False, "world_size": 2, "rank": 0, **fields})


def asked(dtype: torch.dtype, reduce_op: str = "sum") -> Request:
    return Request("all_reduce", dtype, 1 << 20, (("reduce_op", reduce_op),))


@pytest.mark.parametrize(
    ("dtype", "reduce_op", "says"),
    [
        (torch.bfloat16, "avg", "rounded before it is divided"),
        (torch.float32, "max", "does not keep a NaN"),
        (torch.int8, "sum", "no instruction for the sum of int8"),
        (torch.float64, "sum", "no instruction for the sum of float64"),
        (torch.int32, "band", "it reduces by"),
    ],
)
def test_what_the_switch_lacks_is_said(dtype: torch.dtype, reduce_op: str, says: str) -> None:
    assert says in (AllReduceMultimem().unsupported(asked(dtype, reduce_op), comm()) or "")


def proven(result: str) -> tuple[AllReduceMultimem, list[str]]:
    algorithm, calls = AllReduceMultimem(), list[str]()

    def self_test(_: Any) -> str:
        calls.append("test")
        return result

    algorithm._self_test = self_test  # type: ignore[method-assign]
    return algorithm, calls


def test_it_is_used_only_where_asked_for_and_once_it_has_passed() -> None:
    algorithm, calls = proven("")
    assert "deterministic=False" in (algorithm.unsupported(asked(torch.bfloat16), comm(deterministic=True)) or "")
    assert not calls, "it was tested unasked"
    mine = comm()
    for dtype, reduce_op in SWITCHED:
        assert algorithm.unsupported(asked(dtype, reduce_op), mine) is None
    assert calls == ["test"]
    algorithm, _ = proven("the switch failed its self-test on rank 1: far off")
    assert "failed its self-test on rank 1" in (algorithm.unsupported(asked(torch.float32), comm()) or "")


def test_a_name_in_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_SOFTWARE_SWITCH", "1")
    algorithm, calls = proven("")
    assert "for tests" in (algorithm.unsupported(asked(torch.bfloat16), comm()) or "")
    monkeypatch.setenv("A2A_ALGORITHM", "all_to_all=c10d, all_reduce=multimem")
    assert algorithm.unsupported(asked(torch.bfloat16), comm(deterministic=True)) is None
    assert calls == ["test"]
    assert "for tests" in (AllGatherMultimem().unsupported(Request("all_gather", torch.uint8, 64), comm()) or "")


SELF_TESTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "right": (lambda t: t, ""),
    "one bit off in integers": (lambda t: t.index_fill(0, torch.tensor([5]), 0.0), "differ by up to"),
    "half": (lambda t: t / 2, "differ by up to"),
    "nan": (lambda t: t * float("nan"), "differ by up to nan"),
}


@pytest.mark.parametrize("name", SELF_TESTS)
def test_the_self_test_compares_with_the_other_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    spoil, says = SELF_TESTS[name]
    algorithm = AllReduceMultimem()

    class Fake:
        """Both kernels: a world of two ranks that bring the same."""

        name = "fake"

        def __init__(self, wrong: Any = None) -> None:
            self.wrong = wrong

        def register(self, *_: Any) -> int:
            return 0

        def run(self, comm: Any, asked: Any, request: int, output: torch.Tensor, input: torch.Tensor, op: Any) -> None:
            result = input * 2
            output.copy_(self.wrong(result.float()) if self.wrong else result)

    fake = Fake(spoil)
    monkeypatch.setattr(algorithm, "register", fake.register, raising=False)
    monkeypatch.setattr(algorithm, "run", fake.run, raising=False)
    monkeypatch.setattr(type(algorithm), "plain", Fake)
    found = algorithm._difference(comm(device=torch.device("cpu")), torch.float32)
    assert (found == "") if not says else (says in found)


def test_the_variable_is_read_in_one_place() -> None:
    assert config({"A2A_SOFTWARE_SWITCH": "1"}).software_switch
    assert not config({}).software_switch
    assert "A2A_SOFTWARE_SWITCH" in [name for name, _, _ in describe({})]
