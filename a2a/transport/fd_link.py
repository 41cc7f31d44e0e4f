"""Handing file descriptors between the processes of one host: a star of abstract Unix sockets around rank 0.

Abstract sockets need no file system, vanish with their processes and stay inside one network namespace. Their names are open
to other users of the host, so the name is 128 random bits, a token is checked, and SO_PEERCRED must show our own user.
The connections stay open: memory that is added later travels over them, too.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import struct
import time

from a2a.errors import A2AError, PeerTimeoutError, UnsupportedError
from a2a.transport.base import Exchange

_HELLO = struct.Struct("<16sI")
_FDS_A_MESSAGE = 200  # the kernel takes 253


class FdLink:
    """Rank 0's connections to all others; on the others, the one to rank 0.

    Raises:
        PeerTimeoutError: a rank did not connect in time; names it.
        UnsupportedError: the system refuses such sockets, on this rank or on another.
    """

    def __init__(
        self, exchange: Exchange, rank: int, world_size: int, timeout_s: float, owner: str = "cpu_shm"
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.sockets: list[socket.socket | None] = [None] * world_size
        listener, offer = None, b""
        if rank == 0:
            try:
                token = secrets.token_bytes(16)
                name = b"\0a2a-" + secrets.token_hex(16).encode()
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                listener.bind(name)
                listener.listen(world_size)
                offer = b"+" + token + name
            except OSError as error:
                offer = b"-" + str(error).encode()
        offer = exchange("link/offer", offer)[0]
        if offer[:1] != b"+":
            raise UnsupportedError(f"{owner}: rank 0 can't open an abstract Unix socket: {offer[1:].decode()}")
        problem = ""
        try:
            if rank == 0:
                assert listener is not None
                self._accept(listener, offer[1:17])
            else:
                self._connect(offer[1:17], offer[17:])
        except (A2AError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            if listener is not None:
                listener.close()
        for peer, theirs in enumerate(exchange("link/status", problem.encode())):
            if theirs:
                self.close()
                raise UnsupportedError(
                    f"{owner}: rank {peer} can't link to the ranks of its host through an abstract Unix socket: "
                    f"{theirs.decode()}"
                )

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        deadline = time.monotonic() + self.timeout_s
        while missing := [r for r in range(1, self.world_size) if self.sockets[r] is None]:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                raise PeerTimeoutError(
                    f"rank 0 waited {self.timeout_s:g} s for rank {missing[0]} to connect", rank=0, peer=missing[0]
                ) from None
            guest.settimeout(self.timeout_s)
            hello = guest.recv(_HELLO.size) if _peer_uid(guest) == os.getuid() else b""
            theirs, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
            if secrets.compare_digest(theirs, token) and 0 < rank < self.world_size:
                self.sockets[rank] = guest
            else:
                guest.close()

    def _connect(self, token: bytes, name: bytes) -> None:
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sockets[0] = leader
        leader.settimeout(self.timeout_s)
        leader.connect(name)
        if _peer_uid(leader) != os.getuid():
            raise UnsupportedError("the socket of rank 0 belongs to another user")
        leader.send(_HELLO.pack(token, self.rank))

    def gather(self, fd: int) -> list[int]:
        """Rank 0 gets a descriptor of every rank (its own duplicated); the others get nothing. -1 stands for none."""
        if self.rank:
            _send(self._socket(0), [fd])
            return []
        return [os.dup(fd) if fd >= 0 else -1] + [_receive(self._socket(r))[0] for r in range(1, self.world_size)]

    def broadcast(self, fds: list[int]) -> list[int]:
        """Every rank gets rank 0's descriptors as its own."""
        if self.rank:
            return _receive(self._socket(0))
        for peer in range(1, self.world_size):
            _send(self._socket(peer), fds)
        return [os.dup(fd) if fd >= 0 else -1 for fd in fds]

    def _socket(self, peer: int) -> socket.socket:
        connection = self.sockets[peer]
        assert connection is not None
        return connection

    def close(self) -> None:
        for connection in self.sockets:
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.close()
        self.sockets = [None] * self.world_size


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _send(connection: socket.socket, fds: list[int]) -> None:
    """Send descriptors; -1 travels as a hole."""
    for start in range(0, len(fds), _FDS_A_MESSAGE):
        part = fds[start : start + _FDS_A_MESSAGE]
        present = bytes(fd >= 0 for fd in part)
        more = bytes([start + _FDS_A_MESSAGE < len(fds)])
        real = array.array("i", [fd for fd in part if fd >= 0])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, real)] if real else []
        connection.sendmsg([more + present], ancillary)


def _receive(connection: socket.socket) -> list[int]:
    fds: list[int] = []
    more = True
    while more:
        message, ancillary, _, _ = connection.recvmsg(1 + _FDS_A_MESSAGE, socket.CMSG_SPACE(4 * _FDS_A_MESSAGE))
        if not message:
            raise UnsupportedError("the process at the other end of the link is gone")
        real = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                real.frombytes(payload[: len(payload) // 4 * 4])
        for fd in real:
            os.set_inheritable(fd, False)
        got = iter(real)
        fds += [next(got, -1) if present else -1 for present in message[1:]]
        more = bool(message[0])
    return fds
