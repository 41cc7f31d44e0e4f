"""Run one function on every rank: ranks that we start, or those that a launcher has started.

`run_ranks(work, options, ...)` calls the module-level function `work(options, emit)` on each rank with torch.distributed
initialised (gloo). What rank 0 emits arrives, in order, at `receive` in the process that has the terminal: the one the user
started or, under a launcher, rank 0 itself.

Decisions:

* **Forked from a server that has imported torch once** where we start the ranks: importing torch costs seconds a process.
* **MPI's ranks are started by MPI's own mpiexec**, each running `a2a.cli.rank_process`; a comparison with MPI needs no other
  command than one without. Which mpiexec: the one of the MPI library that mpi4py has loaded, since under another's mpiexec
  every rank would believe to be alone.
* **No rank outlives the command**: the kernel kills ranks when the server goes, which goes with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from a2a.cli import hosts
from a2a.cli.hosts import Place
from a2a.config import Launch, launch
from a2a.errors import UnsupportedError

Emit = Callable[[dict[str, Any]], None]
Work = Callable[[Any, Emit], None]

GROUP_TIMEOUT_S = 120.0
GRACE_S = 2.0  # what the other ranks get to say something of their own after one has failed
PR_SET_PDEATHSIG = 1


class RanksFailedError(RuntimeError):
    """A rank raised or died; the text is what is to be shown to the user."""


@dataclass(frozen=True)
class Mpi:
    """An MPI that mpi4py has loaded, and how its ranks are started."""

    name: str
    version: str
    mpiexec: tuple[str, ...]


def run_ranks(
    work: Work,
    options: Any,
    ranks: int | None,
    receive: Emit,
    *,
    default: int = 2,
    mpi: Mpi | None = None,
    places: Sequence[Place] = (),
) -> None:
    """Call `work(options, emit)` on every rank and wait for all of them.

    Args:
        work: a module-level function; `emit` takes JSON-like dicts and does something on rank 0 only.
        ranks: how many to start; None: `default`, or what the launcher has started.
        receive: called with what rank 0 emits; under a launcher only in rank 0.
        mpi: start the ranks under this MPI, unless a launcher has done it already.
        places: the host that each rank is started on, where that isn't this one; no launcher has started the ranks then.
    Raises:
        RanksFailedError: a rank raised or died.
        ValueError: `ranks` is not what the launcher has started.
        UnsupportedError: torch is missing, or what launched this says too little.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError("torch is not installed: pip install torch. `a2a doctor` says what else is missing")
    started = launch()
    if places:
        _spawned(work, options, len(places), receive, places)
    elif started.world_size > 1:
        if ranks not in (None, started.world_size):
            raise ValueError(
                f"--ranks {ranks}, but {started.launcher} has started {started.world_size} ranks; leave it out"
            )
        join(started)
        try:
            work(options, receive if started.rank == 0 else _ignore)
        finally:
            leave()
    elif mpi is not None:
        _under_mpi(work, options, ranks or default, receive, mpi)
    else:
        _spawned(work, options, ranks or default, receive)


def join(started: Launch) -> None:
    """Initialise torch.distributed (gloo, one thread of computation) among the ranks that a launcher has started."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    if started.launcher == "torchrun":
        dist.init_process_group("gloo", timeout=timeout)
        return
    if started.master_addr and started.master_port:
        address, port, store = started.master_addr, started.master_port, None
    else:
        address, port, store = _meet_over_mpi(started)
    if store is None:
        store = _tcp_store(address, port, started.world_size, started.rank == 0)
    dist.init_process_group("gloo", store=store, rank=started.rank, world_size=started.world_size, timeout=timeout)


def leave() -> None:
    """Leave torch.distributed."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def mpi_world(world_size: int) -> Any:
    """mpi4py's COMM_WORLD, after making sure that it is the world that torch.distributed is in.

    Raises:
        UnsupportedError: mpi4py is missing or was started by another MPI's mpiexec.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UnsupportedError(f"MPI can't be used: {error}. Install it with: pip install 'a2a[mpi]' mpich") from error
    if MPI.COMM_WORLD.size != world_size:
        raise UnsupportedError(
            f"mpi4py sees {MPI.COMM_WORLD.size} ranks where {world_size} were started: it is linked to "
            f"{MPI.Get_library_version().split(',')[0].splitlines()[0].strip()}, and these ranks were started by something "
            f"else. Start them with that MPI's mpiexec, or leave that to `a2a bench --against mpi`"
        )
    return MPI.COMM_WORLD


def find_mpi() -> Mpi:
    """The MPI that mpi4py loads and its mpiexec, asked of another process since loading an MPI can't be undone.

    Raises:
        UnsupportedError: there is no mpi4py, no MPI library, or no mpiexec that belongs to it; says what to install.
    """
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnsupportedError(f"mpi4py can't be loaded ({last}). Install it with: pip install 'a2a[mpi]' mpich")
    version = " ".join(asked.stdout.split("\n")[0].replace("\t", " ").split(",")[0].split())
    name = "Open MPI" if "Open MPI" in version else "MPICH" if "MPICH" in version else version.split()[0]
    own = Path(sys.prefix) / "bin" / "mpiexec"
    candidates = [str(own)] if own.exists() else []
    candidates += [
        path for path in (shutil.which("mpiexec"), shutil.which("mpirun")) if path and path not in candidates
    ]
    for path in candidates:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            about = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
            is_open = "Open MPI" in about or "OpenRTE" in about or "PRRTE" in about
            if is_open != (name == "Open MPI"):
                continue
            if is_open:  # unbound, as gloo's threads would share one core with their rank
                return Mpi(name, version, (path, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"))
            local = ("-launcher", "fork") if "HYDRA" in about else ()  # not through Slurm, where there is one
            return Mpi(name, version, (path, *local))
    found = ", ".join(candidates) or "none"
    raise UnsupportedError(
        f"mpi4py is linked to {version}, and no mpiexec of it was found (found: {found}). Put its mpiexec first in PATH, or "
        f"use the MPICH wheel: pip install mpi4py mpich"
    )


def _ignore(_: dict[str, Any]) -> None:
    """What ranks other than 0 emit goes nowhere."""


def _tcp_store(address: str, port: int, ranks: int, serve: bool) -> Any:
    """A key-value store that rank 0 serves, at a free port if `port` is 0."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    return dist.TCPStore(address, port, ranks, serve, timeout, wait_for_workers=False)  # type: ignore[attr-defined]


def _meet_over_mpi(started: Launch) -> tuple[str, int, Any]:
    """Let rank 0 open a store and tell the others where, through mpi4py."""
    if started.launcher != "mpi":
        raise UnsupportedError(
            f"{started.launcher} has started {started.world_size} ranks but not said where they meet; set MASTER_ADDR "
            f"(the host of rank 0, for Slurm: $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)) and MASTER_PORT"
        )
    comm = mpi_world(started.world_size)
    hosts = comm.allgather(socket.gethostname())
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = None
    if started.rank == 0:
        store = _tcp_store(address, 0, started.world_size, True)
    port = comm.bcast(store.port if store is not None else 0)
    return address, int(port), store


# ------------------------------------------------------------------------------------------------ ranks that we start


def _spawned(work: Work, options: Any, ranks: int, receive: Emit, places: Sequence[Place] = ()) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "a2a"])
    ports = context.SimpleQueue()
    processes, pipes = [], {}
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, ranks, work, options, theirs, ports, places), name=f"rank{rank}", daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes[mine] = rank
    failure: tuple[int, str] | None = None
    end = float("inf")
    try:
        while pipes and time.monotonic() < end:
            ready: list[Any] = multiprocessing.connection.wait(list(pipes), timeout=0.5)
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    message = pipe.recv()
                except EOFError:
                    del pipes[pipe]
                    processes[rank].join()
                    if processes[rank].exitcode and failure is None:
                        failure = rank, _describe_exit(processes[rank].exitcode)
                else:
                    if "raised" not in message:
                        receive(message)
                    elif failure is None:
                        failure = rank, message["raised"]
                if failure is not None:
                    end = min(end, time.monotonic() + GRACE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failure is not None:
        raise RanksFailedError(f"rank {failure[0]} of {ranks} failed: {failure[1]}")


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"


def _rank_main(
    rank: int, ranks: int, work: Work, options: Any, pipe: Connection, ports: Any, places: Sequence[Place]
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, and that ends its ranks
    try:
        if places:
            hosts.join(places[rank])
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        address = places[0].address if places else "127.0.0.1"
        if rank == 0:
            store = _tcp_store(address, 0, ranks, True)
            for _ in range(ranks - 1):
                ports.put(store.port)
        else:
            store = _tcp_store(address, ports.get(), ranks, False)
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        work(options, pipe.send if rank == 0 else _ignore)
        leave()
    except Exception as error:
        pipe.send({"raised": f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"})
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _under_mpi(work: Work, options: Any, ranks: int, receive: Emit, mpi: Mpi) -> None:
    with tempfile.TemporaryDirectory(prefix="a2a-") as folder:
        job, lines = Path(folder) / "job", Path(folder) / "lines"
        lines.touch()
        job.write_bytes(pickle.dumps((work, options, str(lines))))
        command = [*mpi.mpiexec, "-n", str(ranks), sys.executable, "-m", "a2a.cli.rank_process", str(job)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            with lines.open() as file:
                over, pending = False, ""
                while not over:
                    over = (
                        process.poll() is not None
                    )  # before reading, so that nothing written before the end is missed
                    while text := file.readline():
                        pending += text
                        if pending.endswith("\n"):
                            receive(json.loads(pending))
                            pending = ""
                    time.sleep(0 if over else 0.1)
        finally:
            if process.poll() is None:
                process.terminate()  # mpiexec takes its ranks along
                process.wait(timeout=10)
        raised = sorted(Path(folder).glob("lines.rank*"), key=lambda path: path.stat().st_mtime_ns)
        if raised:
            raise RanksFailedError(f"rank {raised[0].suffix[5:]} of {ranks} failed: {raised[0].read_text()}")
        if process.returncode:
            raise RanksFailedError(
                f"{mpi.name}'s mpiexec ended with exit code {process.returncode}; what its ranks said is above"
            )
