"""What this process can tell about the machine it runs on: identity, namespaces and CPU cores.

Identity is a hint and no more. A cloned virtual machine keeps its boot id, containers share host names and `/dev/shm`, and
some sandboxes show neither; `detect.py` proves what these facts suggest.

Cores are those that this process may use: its affinity mask (which cpusets narrow too), then the CPU quota of its cgroup
and of every cgroup above it that is visible, in version 2 (`cpu.max`) and 1 (`cpu.cfs_quota_us`), from inside containers
(whose mounts may show only a part of the tree) as from outside. `os.cpu_count()` knows of none of these.

Nothing here raises: a file that is missing or unreadable is a fact that stays empty.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostFacts:
    """One process's view of its host; plain values, so that ranks can exchange them. "" means: not to be found out."""

    hostname: str
    boot_id: str  # of the running kernel; clones of a virtual machine share it
    net_ns: str  # namespace names as the kernel writes them, such as "net:[4026531833]"
    pid_ns: str
    ipc_ns: str
    pid: int
    uid: int  # effective: what a peer sees of this process's sockets
    cpus: tuple[int, ...]  # the affinity mask
    cpu_quota: float | None  # cores' worth of CPU time that the tightest cgroup grants; None: no limit
    cpu_quota_group: str  # identity of that cgroup, equal for processes that share the quota

    @property
    def cores(self) -> int:
        """CPU cores that this process can keep busy: its affinity mask, capped by the whole cores of its quota."""
        return cores_together([self])

    @property
    def hint(self) -> tuple[str, str]:
        """What two processes must have in common to be worth a try at sharing memory: kernel and network namespace."""
        return self.boot_id, self.net_ns

    def to_json(self) -> str:
        """Return the facts as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> HostFacts:
        """Read what `to_json` wrote.

        Raises:
            ValueError, TypeError: it is something else, for instance from another version of a2a.
        """
        entries = json.loads(text)
        return cls(**{**entries, "cpus": tuple(entries["cpus"])})


def local_facts(root: Path = Path("/")) -> HostFacts:
    """Gather the facts of this process.

    Args:
        root: where `/proc` and `/sys` are looked up; for tests.
    """
    try:
        cpus = tuple(sorted(os.sched_getaffinity(0)))
    except OSError:
        cpus = tuple(range(os.cpu_count() or 1))
    quota, group = _cpu_quota(root)
    net_ns, pid_ns, ipc_ns = (_link_target(root / "proc/self/ns" / name) for name in ("net", "pid", "ipc"))
    return HostFacts(
        hostname=socket.gethostname(),
        boot_id=_read(root / "proc/sys/kernel/random/boot_id").strip(),
        net_ns=net_ns,
        pid_ns=pid_ns,
        ipc_ns=ipc_ns,
        pid=os.getpid(),
        uid=os.geteuid(),
        cpus=cpus,
        cpu_quota=quota,
        cpu_quota_group=group,
    )


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name as the kernel has it; "unknown CPU" where it says none."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"


def cores_together(facts: Sequence[HostFacts]) -> int:
    """Count the CPU cores that processes of one host can keep busy together.

    Their affinity masks united, capped by their quotas if all have one; a quota that several share counts once. At least 1.
    """
    cores = len({cpu for one in facts for cpu in one.cpus})
    quotas = {one.cpu_quota_group: one.cpu_quota for one in facts if one.cpu_quota is not None}
    if all(one.cpu_quota is not None for one in facts):
        cores = min(cores, int(sum(quotas.values())))
    return max(cores, 1)


def _cpu_quota(root: Path) -> tuple[float | None, str]:
    """Return the tightest quota, in cores, and the identity of the cgroup that sets it."""
    tightest: tuple[float | None, str] = (None, "")
    for folder in _cpu_cgroups(root):
        quota = _quota_of(folder)
        if quota is not None and (tightest[0] is None or quota < tightest[0]):
            status = folder.stat()
            tightest = quota, f"{status.st_dev}:{status.st_ino}"
    return tightest


def _quota_of(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    try:
        quota_us, period_us = (int(field) for field in fields)
    except ValueError:  # "max", or no such files
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None  # version 1 writes -1 for no limit


def _cpu_cgroups(root: Path) -> Iterator[Path]:
    """Yield this process's cgroups that can limit CPU time, each followed by those above it up to the mount."""
    path_of: dict[str, str] = {}  # filesystem type of the hierarchy -> this process's path in it
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            path_of["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            path_of["cgroup"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, fs_fields = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(fs_fields) < 3 or fs_fields[0] not in path_of:
            continue
        if fs_fields[0] == "cgroup" and "cpu" not in fs_fields[2].split(","):
            continue
        mounted_part, mount = _unescape(fields[3]).rstrip("/"), root / _unescape(fields[4]).lstrip("/")
        path = path_of[fs_fields[0]]
        # A container may mount only its own part of the tree, or see a path from outside it: then the mount's top is it.
        inside = path[len(mounted_part) :].strip("/") if (path + "/").startswith(mounted_part + "/") else ""
        folder = mount / inside if ".." not in inside.split("/") else mount
        if not folder.is_dir():
            folder = mount
        while True:
            yield folder
            if folder == mount:
                break
            folder = folder.parent


def _unescape(field: str) -> str:
    """Undo the octal escapes of /proc/self/mountinfo (space, tab, newline, backslash)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _link_target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
