"""csrc/cuda/all_to_all_copy.cu and its host code, all_to_all_copy.py, on the emulated machine; and mutants."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from a2a.algorithms import all_to_all_copy
from shim_build import Replacement, library
from shim_host import FailedError, FakeCuda, FakeTorch, Machine, Rank

SOURCE, HOST = "all_to_all_copy.cu", "all_to_all_copy.py"
CAUSES = {"absent": 1, "mismatch": 4, "refused": 8}
ROUNDS, MOST_BYTES = 6, 96


@dataclass(frozen=True)
class CopyMutant:
    """A line broken, and the scenario that must notice."""

    name: str
    argument: str
    replacement: Replacement
    scenario: str = "exchanges"


def mutant(name: str, argument: str, old: str, new: str, scenario: str = "exchanges", file: str = SOURCE) -> CopyMutant:
    return CopyMutant(name, argument, Replacement(file, old, new), scenario)


AWAIT = "      while (ptx::load_acquire_sys(word) != epoch && wait.again(p)) {\n      }\n"
DONE = "(a.place.at<std::uint32_t>(p, a.done) + a.place.rank)"
RELEASE = f"ptx::store_release_sys{DONE[:-1]}, epoch);"
VOLATILE = "*const_cast<{1}volatile std::uint32_t*>({0})"
MEET = "    if (p != a.place.rank) wait.await_header(p, epoch, a.digest, true);\n"
FORK = "cuda.Step(cuda.Step.WAIT, side, events[0]) for side in (1, 2)"
JOIN = "cuda.Step(cuda.Step.WAIT, 0, events[side])"
REFUSE = "            self.refuse(comm, request, str(error), False)\n            raise\n        result"
MUTANTS = (
    mutant("done_not_awaited", "VISIBLE", AWAIT, ""),
    mutant("done_not_acquired", "VISIBLE", "ptx::load_acquire_sys(word)", VOLATILE.format("word", "const ")),
    mutant("done_not_released", "VISIBLE", RELEASE, VOLATILE.format(DONE, "") + " = epoch;"),
    mutant("copies_not_awaited", "VISIBLE", JOIN, JOIN.replace("0", "1"), file=HOST),
    mutant("copies_before_enter", "REUSE", MEET, "    ;\n"),
    mutant("side_copies_before_enter", "REUSE", FORK, FORK.replace("WAIT, side", "WAIT, 0"), file=HOST),
    mutant("places_do_not_matter", "FAILURE", "{agree}|at {offset}, {each}", "{agree}|{each}", "mismatch", HOST),
    mutant("refusal_untold", "FAILURE", REFUSE, REFUSE.split("\n", 1)[1], "refused", HOST),
)


def _set_up(mutations: Sequence[Replacement], folder: Path, world: int) -> Path:
    host = [m for m in mutations if m.file == HOST]
    for mutation in host:
        source = Path(all_to_all_copy.__file__)
        exec(compile(mutation.apply(source.read_text()), str(source), "exec"), all_to_all_copy.__dict__)
    module: Any = all_to_all_copy
    defines = {"WORLD": world, "PEER_TABLE": 1}
    module.torch, module.cuda = FakeTorch(sms=2), FakeCuda(defines)
    kernels = [m for m in mutations if m not in host]
    return library(folder, ("all_to_all_copy",), defines, kernels)


def _with_table(machine: Machine) -> Machine:
    """Its memory as one that another library has mapped; the other kernels' tests have windows in one row."""
    rows = [address for base in machine.ranks[0].place.bases for address in (base, base)]
    machine.table = (ctypes.c_uint64 * len(rows))(*rows)  # type: ignore[attr-defined]  # kept
    for rank in machine.ranks:
        base = ctypes.addressof(machine.table)  # type: ignore[attr-defined]
        rank.place = dataclasses.replace(rank.place, base=base, defines=(("PEER_TABLE", 1),))
    return machine


class _Program:
    """Exchanges back to back into two symmetric tensors, each read before the next call into it."""

    def __init__(self, world: int, seed: int, how: str) -> None:
        r = random.Random(seed)
        self.how, self.culprit = how, r.randrange(world)
        self.sizes = [16 * r.randrange(0, MOST_BYTES // 16 + 1) for _ in range(ROUNDS)]
        self.algorithm = all_to_all_copy.AllToAllCopy()
        self.answers: dict[tuple[int, int], torch.Tensor] = {}

    def piece(self, number: int, source: int, to: int) -> torch.Tensor:
        values = torch.arange(self.sizes[number]) * 7 + 31 * source + 17 * to + 101 * number
        return (values % 251).to(torch.uint8)

    def __call__(self, rank: Rank) -> None:
        world = rank.world_size
        outputs = [rank.alloc(world * MOST_BYTES, f"output {i}").address for i in range(3)]
        request = self.algorithm.register(rank, "all_to_all_single|uint8", 1, "all_to_all_single(uint8)")  # type: ignore[arg-type]
        for number in range(ROUNDS):
            if rank.random.random() < 0.3:
                rank.be_late(rank.random.randrange(2000))
            self.exchange(rank, request, number, outputs[number % 2])
        rank.synchronize()
        assert not rank.record, f"rank {rank.rank}: a failure was recorded: {rank.record:x}"
        if self.how != "exchanges":
            self.fail(rank, request, outputs)

    def exchange(self, rank: Rank, request: int, number: int, offset: int) -> None:
        world, me = rank.world_size, rank.rank
        source = rank.put(torch.cat([self.piece(number, me, to) for to in range(world)]))
        output = _symmetric(rank, offset, world * self.sizes[number])
        self.algorithm.run_even(rank, request, output, source, "all_to_all_single")  # type: ignore[arg-type]
        self.answers[me, number] = rank.get(output)

    def fail(self, rank: Rank, request: int, outputs: list[int]) -> None:
        wrong = rank.rank == self.culprit
        if wrong and self.how == "absent":
            return
        size = rank.world_size * 16
        source = rank.put(torch.zeros(size, dtype=torch.uint8))
        output = _symmetric(rank, outputs[2 if wrong else 0], size)
        if wrong and self.how == "refused":
            output = rank.empty(size, torch.uint8)  # a tensor of its own
        for _ in range(2):
            with contextlib.suppress(FailedError, ValueError):
                self.algorithm.run_even(rank, request, output, source, "all_to_all_single")  # type: ignore[arg-type]
        rank.synchronize()
        cause, by, who = rank.record >> 48, rank.record >> 32 & 0xFFFF, rank.record >> 16 & 0xFFFF
        told = f"rank {rank.rank} was told cause {cause} of {who} by {by}; the culprit is {self.culprit}: {self.how}"
        assert cause == CAUSES[self.how] and self.culprit in ((by, who) if self.how == "mismatch" else (who,)), told

    def check(self, world: int) -> None:
        for (me, number), got in self.answers.items():
            expected = torch.cat([self.piece(number, source, me) for source in range(world)])
            assert torch.equal(got, expected), (
                f"round {number}, rank {me}: {got.tolist()}, expected {expected.tolist()}"
            )


def _symmetric(rank: Rank, offset: int, num_bytes: int) -> torch.Tensor:
    buffer = (ctypes.c_char * max(num_bytes, 1)).from_address(
        rank.machine.base + rank.rank * rank.machine.window + offset
    )
    return torch.frombuffer(buffer, dtype=torch.uint8)[:num_bytes]


def job(folder: Path, world: int, scenario: str, seeds: int, mutations: Sequence[Replacement], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    path = _set_up(mutations, folder, world)
    for seed in range(seeds):
        program = _Program(world, seed, scenario)
        _with_table(Machine(path, scenario, seed, world)).run(program)
        program.check(world)
