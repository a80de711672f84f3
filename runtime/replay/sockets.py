"""Cuts connections: the only way to release a thread at once that waits for a silent peer.

Gloo lets go of a blocked transfer when its connection closes, and by no call of its own. So this looks up which
sockets came into being with a process group, in /proc, and shuts them down from another thread. Where there is no
/proc, nothing is cut, and a transfer ends when its peer's process does.
"""

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")

Sockets = frozenset[tuple[int, str]]
"""(descriptor, identity): a descriptor that was closed may since name another socket."""


def open_sockets() -> Sockets:
    """All sockets of this process."""
    found = set()
    with contextlib.suppress(OSError):
        for path in _DESCRIPTORS.iterdir():
            identity = _identity(int(path.name))
            if identity.startswith("socket:"):
                found.add((int(path.name), identity))
    return frozenset(found)


def sockets_of(sockets: Iterable[socket.socket]) -> Sockets:
    """Those of this process that are open."""
    return frozenset((one.fileno(), _identity(one.fileno())) for one in sockets if one.fileno() >= 0)


def cut(sockets: Iterable[tuple[int, str]]) -> Sockets:
    """End the connections; those who wait get an error, here and at the other end. Returns those ended."""
    ended = set()
    for descriptor, identity in sockets:
        with contextlib.suppress(OSError):
            if _identity(descriptor) != identity:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                # Gloo aborts the process when a socket it listens on fails.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ended.add((descriptor, identity))
                    connection.shutdown(socket.SHUT_RDWR)
    return frozenset(ended)


def still_open(sockets: Sockets) -> bool:
    """Whether any of them has not been closed yet."""
    return any(_identity(descriptor) == identity for descriptor, identity in sockets)


def _identity(descriptor: int) -> str:
    try:
        return str((_DESCRIPTORS / str(descriptor)).readlink())
    except OSError:
        return ""
