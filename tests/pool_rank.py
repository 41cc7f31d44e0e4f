"""What runs inside a rank of the pool: the loop that performs the tasks of the test process.

* **A check travels as (file, module name, qualified name)**, and the rank imports the file under that same name. So it works
  in every import mode of pytest, and classes of a test module can be pickled both ways. pytest's assertion rewriting is
  applied there, so that a failing assert shows its values.
* **A rank dies with the test process**, by the kernel's hand: a rank may be inside a call that never returns.
"""

from __future__ import annotations

import ast
import atexit
import datetime
import faulthandler
import fcntl
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = (
    30.0  # of the default group: below the pool's deadline, so that a collective's own message comes first
)
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Task:
    """What a rank is sent: which world to be in, and which function of which file to call there."""

    world_size: int
    world_key: str
    file: str
    module: str
    qualname: str
    kwargs: bytes


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: exactly one of a result, a traceback, an exit code, or the stacks of a hang."""

    result: Any = None
    raised: str | None = None
    exit_code: int | None = None
    stacks: str | None = None

    @property
    def died(self) -> bool:
        return self.exit_code is not None

    def describe(self) -> str:
        if self.raised is not None:
            return f"raised\n{textwrap.indent(self.raised.rstrip(), '    ')}"
        if self.exit_code is not None:
            return f"died: {describe_exit(self.exit_code)}"
        if self.stacks is not None:
            return f"was still running; its Python stacks, innermost call first\n{textwrap.indent(self.stacks, '    ')}"
        return "finished"


def describe_exit(exit_code: int) -> str:
    """Say how a process ended, from a code as `multiprocessing` gives it: negative for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def rank_main(rank: int, connection: Connection, output_path: str, stacks_path: str, port: int) -> None:
    _die_with_the_test_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process decides what Ctrl-C means
    output = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    stacks = open(stacks_path, "w")  # noqa: SIM115  (open as long as the signal may come)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world_key = ""
    try:
        while message := _receive(connection):
            task: Task = pickle.loads(message)
            if task.world_key != world_key:
                _join(rank, task, dist.PrefixStore(task.world_key, store))
                world_key = task.world_key
            connection.send_bytes(_reply(task))
    finally:  # multiprocessing leaves by os._exit, a user's process does not
        if dist.is_initialized():
            dist.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def _die_with_the_test_process() -> None:
    """Have the kernel kill this rank when the pipe from the test process closes, even inside a call that never returns."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _receive(connection: Connection) -> bytes:
    """The next task, or nothing at the end of the session or of the test process."""
    try:
        return connection.recv_bytes()
    except EOFError:
        return b""


def _join(rank: int, task: Task, store: dist.Store) -> None:
    """Leave the default group for that of the task; returns when all its ranks are in, so that any of them may die now."""
    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.world_size, timeout=timeout)
    if store.add("joined", 1) == task.world_size:
        store.set("all joined", "")
    store.wait(["all joined"], timeout)


def _reply(task: Task) -> bytes:
    try:
        check: Any = _module(task.module, task.file)
        for name in task.qualname.split("."):
            check = getattr(check, name)
        kwargs = pickle.loads(task.kwargs)
    except Exception:
        return pickle.dumps(Outcome(raised=traceback.format_exc()))
    outcome = call(check, kwargs)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return pickle.dumps(outcome)
    except Exception:
        return pickle.dumps(Outcome(raised=f"its result does not pickle\n{traceback.format_exc()}"))


def call(check: Callable[..., Any], kwargs: dict[str, Any]) -> Outcome:
    try:
        return Outcome(result=check(**kwargs))
    except SystemExit:
        raise
    except BaseException as error:  # pytest's own outcomes (a pytest.raises that did not) are no Exception
        own = error.__traceback__.tb_next if error.__traceback__ else None
        return Outcome(raised="".join(traceback.format_exception(type(error), error, own)))


def _module(name: str, file: str) -> ModuleType:
    """The module of that name, imported from `file` with pytest's assertion rewriting unless it is there already."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(_rewritten(Path(file)), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _rewritten(path: Path) -> Any:
    source = path.read_bytes()
    tree = ast.parse(source, str(path))
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:  # private to pytest: without it failing asserts show only their source
        pass
    else:
        rewrite_asserts(tree, source, str(path), None)
    return compile(tree, str(path), "exec", dont_inherit=True)
