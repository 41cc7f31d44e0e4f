"""A pool of ranks that stays up for the whole test session.

`pool.world(4).run(check, name=value)` calls the module-level function `check(name=value)` on ranks 0 to 3 and returns their
results in rank order. Inside a rank the default process group of torch.distributed is initialised (gloo) and has exactly
that world's ranks.

Decisions:

* **Forked from a server that has imported torch once.** Importing torch costs seconds a process, forking from a process
  that has done it costs milliseconds. The server has no threads, so forking is safe; `pytest` and `hypothesis` are imported
  there too, since test modules import them.
* **One set of processes for all sizes.** A world of n uses the first n; where the size changes, the ranks leave one default
  group and join another.
* **The store lives in the test process** (as it lives in torchrun's agent), so that any rank may be killed.
* **After any failure the ranks are thrown away** and started again when next needed: a rank that raised may have left its
  group in the middle of a collective.
* **Nothing survives the test process**, however it ends: ranks are told to stop at the end of the session, and the kernel
  kills them when their pipe from the test process closes; their server leaves when they have.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pool_rank import STACKS_SIGNAL, Outcome, Task, call, describe_exit, rank_main

PRELOADED = ("torch", "torch.distributed", "numpy", "pytest", "hypothesis", "a2a")
DEADLINE_S = 60.0  # after which a check counts as hanging
GRACE_S = 5.0  # what the other ranks get to finish once one has failed
STOP_S = 10.0  # to leave at the end of the session
STACKS_S = 3.0  # to write the Python stacks after a hang
OUTPUT_LINES = 40


class RankError(AssertionError):
    """At least one rank raised, died unasked, or did not come back; the text tells it rank by rank."""


class _Rank:
    """The test process's hold on one rank: its process, its pipe and its two files."""

    def __init__(self, index: int, context: multiprocessing.context.ForkServerContext, folder: Path, port: int) -> None:
        self.index = index
        self.output_path = folder / f"rank{index}.output"
        self.stacks_path = folder / f"rank{index}.stacks"
        for old in (self.output_path, self.stacks_path):
            old.unlink(missing_ok=True)  # before the rank starts: nothing of its predecessor is read as its own
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=rank_main,
            args=(index, theirs, str(self.output_path), str(self.stacks_path), port),
            name=f"rank{index}",
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.output_start = 0

    def send(self, task: bytes) -> None:
        self.output_start = self.output_path.stat().st_size if self.output_path.exists() else 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: receive() says how
            self.connection.send_bytes(task)

    def receive(self) -> Outcome:
        """The outcome of a rank whose pipe or sentinel is ready."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                outcome: Outcome = pickle.loads(self.connection.recv_bytes())
                return outcome
        self.process.join()
        return Outcome(exit_code=self.process.exitcode)

    def output(self) -> str:
        """The last lines that the rank wrote to stdout and stderr during the present check."""
        with contextlib.suppress(FileNotFoundError), self.output_path.open(errors="replace") as file:
            file.seek(self.output_start)
            return "\n".join(file.read().splitlines()[-OUTPUT_LINES:])
        return ""

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


class Pool:
    """Owns the ranks, the store they meet at and a folder for their output. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([name for name in PRELOADED if importlib.util.find_spec(name)])
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[_Rank] = []
        self._keys = (f"world{number}" for number in itertools.count())
        self._world: tuple[int, str] = (0, "")
        self._last_check = ""

    def world(self, size: int) -> World:
        """A view of the first `size` ranks; starts nothing."""
        return World(self, size)

    def pids(self) -> list[int]:
        """The process ids of the ranks that are up, by rank."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def run(
        self,
        size: int,
        check: Callable[..., Any],
        kwargs: dict[str, Any],
        expect_dead: Collection[int],
        deadline_s: float,
    ) -> list[Any]:
        """See `World.run`, which is what tests call."""
        __tracebackhide__ = True
        task = pickle.dumps(_task(check, kwargs, *self._enter(size)))
        ranks = self._ranks[:size]
        self._last_check = check.__qualname__
        try:
            for rank in ranks:
                rank.send(task)
            outcomes = self._wait(ranks, expect_dead, deadline_s)
        except BaseException:  # Ctrl-C: the answers of these ranks are nobody's
            self._discard()
            raise
        alive = [index for index in expect_dead if not outcomes[index].died]
        failed = [index for index, outcome in enumerate(outcomes) if _failed(index, outcome, expect_dead)]
        if not failed and not alive:
            if expect_dead:
                self._discard()
            return [outcome.result for outcome in outcomes]
        report = [f"rank {index} was expected to die and did not: it {outcomes[index].describe()}" for index in alive]
        report += _by_outcome({index: outcomes[index] for index in failed})
        for index in failed:
            if output := ranks[index].output():
                report.append(f"rank {index} wrote\n{textwrap.indent(output, '    ')}")
        self._discard()
        raise RankError("\n".join([f"{check.__qualname__} on {size} ranks", *report]))

    def forget_world(self) -> None:
        """Have the next run make its process group anew."""
        self._world = (0, "")

    def close(self) -> None:
        """Stop the ranks and remove what the pool wrote; raises if one of them does not leave cleanly."""
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.connection.send_bytes(b"")
        end = time.monotonic() + STOP_S
        problems = []
        for rank in self._ranks:
            rank.process.join(max(0.0, end - time.monotonic()))
            code = rank.process.exitcode
            if code != 0:
                how = "does not leave" if code is None else describe_exit(code)
                problems.append(f"rank {rank.index} after {self._last_check}: {how}\n{rank.output()}")
        self._discard()
        shutil.rmtree(self._folder, ignore_errors=True)
        if problems:
            raise RankError("\n".join(problems))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, size: int) -> tuple[int, str]:
        """Have `size` ranks up, and a name for the group they shall be in."""
        dead = [rank for rank in self._ranks if not rank.process.is_alive()]
        if dead:
            report = [
                f"rank {rank.index} died after {self._last_check} had returned: {rank.receive().describe()}\n"
                f"{rank.output()}"
                for rank in dead
            ]
            self._discard()
            raise RankError("\n".join(report))
        if self._world[0] not in (0, size) and os.environ.get("A2A_TRANSPORT") == "nvshmem":
            self._discard()  # a process has one set of PEs for good
        while len(self._ranks) < size:
            self._ranks.append(_Rank(len(self._ranks), self._context, self._folder, self._store.port))
        if self._world[0] != size:
            self._world = (size, next(self._keys))
        return self._world

    def _wait(self, ranks: list[_Rank], expect_dead: Collection[int], deadline_s: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + deadline_s
        while len(outcomes) < len(ranks):
            pending = [rank for rank in ranks if rank.index not in outcomes]
            sources = [source for rank in pending for source in (rank.connection, rank.process.sentinel)]
            ready = set(multiprocessing.connection.wait(sources, max(0.0, end - time.monotonic())))
            if not ready:
                outcomes |= _stacks(pending)
                break
            for rank in pending:
                if rank.connection in ready or rank.process.sentinel in ready:
                    outcomes[rank.index] = rank.receive()
                    if _failed(rank.index, outcomes[rank.index], expect_dead):
                        end = min(end, time.monotonic() + GRACE_S)
        return [outcomes[index] for index in range(len(ranks))]

    def _discard(self) -> None:
        """Kill the ranks; the next run starts new ones."""
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        self.forget_world()


@dataclass(frozen=True)
class World:
    """The first `size` ranks of a pool."""

    pool: Pool
    size: int

    def run(
        self,
        check: Callable[..., Any],
        /,
        *,
        expect_dead: Collection[int] = (),
        destroys_group: bool = False,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `check(**kwargs)` on every rank and return the results in rank order.

        Args:
            check: a module-level function; arguments and results must pickle, tensors are copied.
            expect_dead: ranks that must die during the check; their result is None. The ranks are new afterwards.
            destroys_group: the check calls `destroy_process_group()`; the next run makes the default group anew.
            deadline_s: after so long the check counts as hanging.
        Raises:
            RankError: a rank raised (with its traceback), died (with its exit code or signal), or hung (with the Python
                stacks of all ranks still running).
        """
        __tracebackhide__ = True
        results = self.pool.run(self.size, check, kwargs, frozenset(expect_dead), deadline_s)
        if destroys_group:
            self.pool.forget_world()
        return results


@dataclass(frozen=True)
class InlineWorld:
    """The world that torchrun made: every rank runs the tests, so a check is simply called and its outcome gathered."""

    size: int

    def run(
        self,
        check: Callable[..., Any],
        /,
        *,
        expect_dead: Collection[int] = (),
        destroys_group: bool = False,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> list[Any]:
        """As `World.run`, but a hang prints this rank's stacks and ends it, and nobody may be killed."""
        __tracebackhide__ = True
        if expect_dead or destroys_group:
            pytest.skip("kills ranks or their group, which torchrun made")
        faulthandler.dump_traceback_later(deadline_s, exit=True)
        try:
            outcomes: list[Any] = [None] * self.size
            dist.all_gather_object(outcomes, call(check, kwargs))
        finally:
            faulthandler.cancel_dump_traceback_later()
        failed = {rank: outcome for rank, outcome in enumerate(outcomes) if _failed(rank, outcome, ())}
        if failed:
            raise RankError("\n".join([f"{check.__qualname__} on {self.size} ranks", *_by_outcome(failed)]))
        return [outcome.result for outcome in outcomes]


def _failed(rank: int, outcome: Outcome, expect_dead: Collection[int]) -> bool:
    asked_for = outcome.died and rank in expect_dead
    return (outcome.raised is not None or outcome.died or outcome.stacks is not None) and not asked_for


def _by_outcome(outcomes: dict[int, Outcome]) -> list[str]:
    """What became of the ranks, told once where it is the same; what failed by itself comes before what waited for it."""
    ranks: dict[str, list[str]] = {}
    for index in sorted(outcomes, key=lambda index: (outcomes[index].stacks is not None, index)):
        ranks.setdefault(outcomes[index].describe(), []).append(str(index))
    return [f"rank {', '.join(indices)} {what}" for what, indices in ranks.items()]


def _task(check: Callable[..., Any], kwargs: dict[str, Any], world_size: int, world_key: str) -> Task:
    file = getattr(sys.modules.get(check.__module__), "__file__", None)
    if file is None or "<" in check.__qualname__:
        raise TypeError(
            f"world.run: {check.__qualname__} must be a function at the top level of a file: ranks import it"
        )
    return Task(world_size, world_key, file, check.__module__, check.__qualname__, pickle.dumps(kwargs))


def _stacks(ranks: Iterable[_Rank]) -> dict[int, Outcome]:
    """Have every rank write its Python stacks, and read them; a rank that can't is a finding too."""
    stacks: dict[int, Outcome] = {}
    for rank in ranks:
        if rank.process.is_alive() and rank.process.pid is not None:
            os.kill(rank.process.pid, STACKS_SIGNAL)
    for rank in ranks:
        text, end = "", time.monotonic() + STACKS_S
        while time.monotonic() < end:
            time.sleep(0.05)
            before, text = text, rank.stacks_path.read_text(errors="replace") if rank.stacks_path.exists() else ""
            if text and text == before:
                break
        stacks[rank.index] = Outcome(stacks=text.rstrip() or "(it did not write any)")
    return stacks
