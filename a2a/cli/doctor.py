"""`a2a doctor`: what this machine can do, what keeps something from being used, and what to do about it.

Every fact is asked for by itself and none can end the command: it is there for machines where something is missing, torch
and a2a's own compiled library included. The exit code is 0 whatever is found.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text

from a2a.cli import doctor_gpu, show
from a2a.cli.facts import Fact, ask
from a2a.cli.ranks import find_mpi
from a2a.config import describe, launch

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
FUTEX_WAKE = 1
CAP_SYS_PTRACE = 19


def run() -> int:
    """Print all facts; returns 0."""
    out = show.console()
    marks = {"ok": ("+", "green"), "off": ("-", "yellow"), "bad": ("!", "bold red")}
    problems = 0
    for title, facts in SECTIONS.items():
        out.print(f"[bold]{title}[/bold]")
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(min_width=8)
        table.add_column(overflow="fold")
        for fact in ask(title.lower(), facts) or [Fact("off", title.lower(), "none found")]:
            mark, style = marks[fact.state]
            text = Text(fact.text)
            if fact.fix:
                text.append(f"\n-> {fact.fix}", style="bold")
            table.add_row(Text(mark, style=style), Text(fact.name), text)
            problems += fact.state == "bad"
        out.print(table)
        out.print()
    if problems:
        out.print(f"[bold red]{problems} of these keep a2a from working as it should[/bold red] (marked !).")
    else:
        out.print("[bold green]Nothing here keeps a2a from working.[/bold green]")
    return 0


# ---------------------------------------------------------------------------------------------------------- sections


def _software() -> Iterator[Fact]:
    on_linux = sys.platform.startswith("linux")
    yield Fact("ok", "python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield Fact(
        "ok" if on_linux else "bad",
        "system",
        f"{platform.system()} {platform.release()}, {platform.machine()}",
        "" if on_linux else "a2a runs on Linux only",
    )
    yield _package("a2a", "pip install .", needed=False)  # a checkout on the path has no metadata, and works
    yield _package("torch", "pip install torch")
    yield _package("numpy", "pip install numpy")
    yield _package("matplotlib", "for --plot: pip install 'a2a[plot]'", needed=False)
    yield _library()


def _package(name: str, fix: str, *, needed: bool = True) -> Fact:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "in a folder of sys.path, not installed"
    if importlib.util.find_spec(name) is None:
        return Fact("bad" if needed else "off", name, "not installed", fix)
    try:
        if needed:
            importlib.import_module(name)  # being there is not working
    except Exception as error:
        return Fact("bad", name, f"{version}, can't be imported: {type(error).__name__}: {error}", f"repair it: {fix}")
    return Fact("ok", name, version)


def _library() -> Fact:
    try:
        from a2a.kernels import cpu

        cpu.lib()
        return Fact("ok", "library", f"{cpu.find()}, ABI {cpu.ABI}, instructions: {cpu.isa()}")
    except Exception as error:
        fix = "pip install . (or pip install -e .) in the checkout, or install the wheel"
        return Fact("bad", "library", str(error), "" if "pip install" in str(error) else fix)


def _cpu() -> Iterator[Fact]:
    from a2a.topology import local_facts

    facts = local_facts()
    quota = "" if facts.cpu_quota is None else f", of which its cgroup grants {facts.cpu_quota:g} cores' time"
    try:
        from a2a.measure import cpu_name

        processor = cpu_name()
    except ImportError:  # no torch
        processor = platform.processor() or platform.machine()
    yield Fact("ok", "processor", processor)
    yield Fact("ok", "cores", f"{len(facts.cpus)} in the affinity mask{quota}")
    known = facts.boot_id and facts.net_ns
    yield Fact(
        "ok" if known else "off",
        "host",
        f"{facts.hostname}, user {facts.uid}"
        + ("" if known else "; boot id or network namespace can't be read, so ranks are grouped by trying alone"),
    )


def _shared_memory() -> Iterator[Fact]:
    for name, probe, why, needed in (
        ("memfd", _try_memfd, "memory that ranks share", "memfd_create"),
        ("sockets", _try_sockets, "abstract Unix sockets that pass file descriptors: how ranks hand memory, GPUs' too, to "
         "each other", "socket(AF_UNIX) and sendmsg with SCM_RIGHTS"),
        ("futex", _try_futex, "how a rank sleeps while it waits", "futex"),
        ("pidfd", _try_pidfd, "how the death of a rank is noticed at once", "pidfd_open"),
    ):  # fmt: skip
        try:
            probe()
            yield Fact("ok", name, f"works ({why})")
        except Exception as error:
            fix = f"the sandbox or seccomp profile must allow {needed} (docker: --security-opt seccomp=PROFILE)"
            yield Fact("bad", name, f"does not work: {error} ({why})", fix)
    yield from ask("reading", lambda: iter([_reading()]))
    yield _huge_pages()
    try:
        status = os.statvfs("/dev/shm")
        free = status.f_bavail * status.f_frsize / 2**20
        yield Fact("ok", "/dev/shm", f"{free:,.0f} MiB free; a2a does not use it (its memory is anonymous)")
    except OSError as error:
        yield Fact("off", "/dev/shm", f"{error.strerror}; a2a does not need it (its memory is anonymous)")


def _try_memfd() -> None:
    descriptor = os.memfd_create("a2a-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[0] = 1
    finally:
        os.close(descriptor)


def _try_sockets() -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.settimeout(5)
        server.bind(f"\0a2a-doctor-{secrets.token_hex(16)}")
        server.listen(1)
        client.connect(server.getsockname())
        peer, _ = server.accept()
        with peer:
            socket.send_fds(client, [b"x"], [client.fileno()])
            _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
            for descriptor in descriptors:
                os.close(descriptor)
            if not descriptors:
                raise OSError("the descriptor did not arrive")


def _try_futex() -> None:
    number = SYS_FUTEX.get(platform.machine())
    if number is None:
        return  # no number known here; the library asks the C library's headers
    word = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.byref(word), FUTEX_WAKE, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _try_pidfd() -> None:
    if not hasattr(os, "pidfd_open"):
        raise OSError("this Python was built without pidfd_open")
    os.close(os.pidfd_open(os.getpid()))


def _reading(root: Path = Path("/")) -> Fact:
    """Whether ranks may read each other's ordinary memory. Both who forbids it and what allows it have names."""
    why = "how large ordinary tensors of CPU ranks are copied once instead of twice"
    word, copy = ctypes.c_uint64(7), ctypes.c_uint64()
    vectors = [(ctypes.c_size_t * 2)(ctypes.addressof(value), 8) for value in (copy, word)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.process_vm_readv(os.getpid(), vectors[0], 1, vectors[1], 1, 0) != 8:
        fix = "the seccomp profile must allow process_vm_readv (docker: --cap-add SYS_PTRACE does it)"
        return Fact("off", "reading", f"process_vm_readv does not work: {os.strerror(ctypes.get_errno())} ({why})", fix)
    try:
        scope = int((root / "proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    held = [line.split()[1] for line in (root / "proc/self/status").read_text().splitlines() if line[:7] == "CapEff:"]
    may_trace = bool(held) and bool(int(held[0], 16) >> CAP_SYS_PTRACE & 1)
    if scope and not may_trace:
        fix = "give the ranks CAP_SYS_PTRACE (docker: --cap-add SYS_PTRACE), or as root: sysctl kernel.yama.ptrace_scope=0"
        return Fact("off", "reading", f"forbidden between ranks by kernel.yama.ptrace_scope={scope} ({why})", fix)
    return Fact("ok", "reading", f"process_vm_readv works ({why})")


def _huge_pages() -> Fact:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return Fact(
            "off", "huge pages", "this kernel does not offer them for shared memory; large exchanges are slower"
        )
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        return Fact(
            "off",
            "huge pages",
            f"off for shared memory ({chosen}): large exchanges are slower",
            "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    return Fact("ok", "huge pages", f"for shared memory: {chosen}")


def _launchers() -> Iterator[Fact]:
    started = launch()
    if started.launcher is None:
        yield Fact("ok", "launcher", "none: started alone; commands start their own ranks")
    else:
        yield Fact("ok", "launcher", f"{started.launcher}: rank {started.rank} of {started.world_size}")
    try:
        mpi = find_mpi()
        yield Fact("ok", "mpi", f"{mpi.version}, started by {' '.join(mpi.mpiexec)}")
    except Exception as error:
        yield Fact("off", "mpi", str(error))


def _transports() -> Iterator[Fact]:
    from a2a.config import config
    from a2a.topology import Topology
    from a2a.transport import candidates, why_not

    topology = Topology.detect()
    for transport in candidates():
        usable = f"can be used, for {transport.device_type} tensors"
        reason = why_not(transport, topology, transport.device_type)
        if transport.only_by_name and config().transport != transport.name:  # would it do?
            reason = f"{reason}; {transport.unavailable(topology, transport.device_type) or f'it {usable}'}"
        yield Fact("off" if reason else "ok", transport.name, reason or usable)


def _algorithms() -> Iterator[Fact]:
    import torch

    from a2a.algorithms import candidates
    from a2a.algorithms.base import Request as PlanRequest
    from a2a.cli import plan
    from a2a.comm import Communicator

    moe = plan.moe_request(plan.Request("moe", (), (), tokens=64, hidden=64, experts=4, top_k=2), "float32", 1)
    with Communicator(lambda _, payload: [payload], 0, 1) as comm:  # of this process alone
        for algorithm in candidates():
            request = (
                moe if algorithm.op == "moe" else PlanRequest(algorithm.op, torch.float32, 4096, (("hidden", 64),))
            )
            if algorithm.baseline:  # this communicator has no group to ask about
                told = "takes what nothing else can, on the group's own engine; so it needs a process group"
                yield Fact("ok", algorithm.name, f"{algorithm.op}: {told}")
                continue
            reason = algorithm.unsupported(request, comm)
            yield Fact("off" if reason else "ok", algorithm.name, f"{algorithm.op}: {reason or 'can be used'}")


def _variables() -> Iterator[Fact]:
    for name, value, meaning in describe():
        yield Fact("off" if value == "unset" else "ok", name, f"{value} ({meaning})")


SECTIONS: dict[str, Callable[[], Iterator[Fact]]] = {
    "Software": _software,
    "Processor": _cpu,
    "Shared memory": _shared_memory,
    "GPUs": doctor_gpu.facts,
    "Launchers": _launchers,
    "Transports": _transports,
    "Algorithms": _algorithms,
    "Variables": _variables,
}
