"""Hosts that aren't there: ranks of this machine in two network namespaces, joined by a cable of limited speed.

What runs in one namespace can't reach the other but through the cable, a pair of virtual Ethernet devices with a token
bucket on each end. So code that crosses hosts crosses a real, slow network, with its buffers, its segments and its
failures.

    with Hosts(mbit_per_s=1000) as hosts:
        ...  a process that calls `join(hosts.places[1])` first thing is on the second host

Decisions. The namespaces have no names: each is kept by a process of ours that waits at the end of a pipe, and goes
with it, also when we are killed. Devices and addresses exist inside them alone. So nothing can collide and nothing is
left behind. Needs root, `ip` and `tc` (iproute2), `unshare` and `nsenter` (util-linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from a2a.config import use_network_interface
from a2a.errors import UnsupportedError

NEEDED = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_CLONE_NEWNET = 0x40000000
_START_S = 5.0
_BURST_KB, _QUEUE_MS = 128, 50  # of the token bucket


@dataclass(frozen=True)
class Place:
    """One of the hosts: what a process needs to move there."""

    namespace: str  # a file
    address: str
    interface: str


def why_not() -> str | None:
    """What keeps this process from making hosts, as far as can be told before trying; or None."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which need root: run as root, or in a container of your own"
    missing = sorted({package for tool, package in NEEDED.items() if shutil.which(tool) is None})
    if missing:
        return f"hosts need {', '.join(missing)}: apt-get install {' '.join(missing)}"
    return None


class Hosts:
    """Two hosts and the cable between them. A context manager; its end is theirs, and that of who is on them."""

    def __init__(self, mbit_per_s: float = 1000.0) -> None:
        """Make them.

        Raises:
            UnsupportedError: this machine does not let us; says what was refused.
        """
        if reason := why_not():
            raise UnsupportedError(reason)
        self.mbit_per_s = mbit_per_s
        self._keepers: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(2):
                self._keepers.append(self._keep())
            self.places = tuple(
                Place(f"/proc/{keeper.pid}/ns/net", f"10.77.0.{index + 1}", f"a2a{index}")
                for index, keeper in enumerate(self._keepers)
            )
            self._connect()
        except BaseException:
            self.close()
            raise

    def _keep(self) -> subprocess.Popen[bytes]:
        """A process with a network namespace of its own, until its pipe closes."""
        keeper = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        own, end = os.readlink("/proc/self/ns/net"), time.monotonic() + _START_S
        while time.monotonic() < end:
            if keeper.poll() is not None:
                told = keeper.stderr.read().decode(errors="replace").strip() if keeper.stderr else ""
                raise UnsupportedError(f"no network namespace to be had here: {told or 'unshare failed'}")
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{keeper.pid}/ns/net") != own:
                    return keeper
            time.sleep(0.005)
        keeper.kill()
        raise UnsupportedError(f"no network namespace within {_START_S:.0f} s")

    def _connect(self) -> None:
        left, right = self.places
        self._in(
            left, f"ip link add {left.interface} type veth peer name {right.interface} netns {self._keepers[1].pid}"
        )
        for place in self.places:
            self._in(place, f"ip address add {place.address}/24 dev {place.interface}")
            self._in(place, "ip link set lo up")
            self._in(place, f"ip link set {place.interface} up")
            rate = f"rate {self.mbit_per_s:g}mbit burst {_BURST_KB}kb latency {_QUEUE_MS}ms"
            self._in(place, f"tc qdisc add dev {place.interface} root tbf {rate}")

    def _in(self, place: Place, command: str) -> None:
        done = subprocess.run(
            ["nsenter", f"--net={place.namespace}", *command.split()], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UnsupportedError(
                f"hosts can't be joined here: `{command}`: {done.stderr.strip() or done.stdout.strip()}"
            )

    def cut(self) -> None:
        """Cut the cable: from now on nothing arrives, and nobody is told."""
        self._in(self.places[0], f"ip link set {self.places[0].interface} down")

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait()
            for pipe in (keeper.stdin, keeper.stderr):
                if pipe is not None:
                    pipe.close()
        self._keepers = []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(place: Place) -> None:
    """Move this process to a host: before it opens a connection or starts a thread that will."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(place.namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise UnsupportedError(f"can't enter the network namespace: {os.strerror(ctypes.get_errno())}")
    use_network_interface(place.interface)


def spread(ranks: int, order: str) -> tuple[int, ...]:
    """Which of the two hosts each rank is on: "blocks" fills one host after the other, "cyclic" deals in turn."""
    if order not in ("blocks", "cyclic"):
        raise ValueError(f"order of ranks {order!r}; expected blocks or cyclic")
    return tuple(rank % 2 if order == "cyclic" else int(rank >= (ranks + 1) // 2) for rank in range(ranks))
