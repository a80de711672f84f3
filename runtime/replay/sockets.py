"""Shut down connections, the only way to release at once a thread that waits.

Gloo releases a blocked transfer only when its connection closes; it has no call for that. So this
module looks up in /proc which sockets were opened with a process group, and another thread shuts
them down. On systems without /proc nothing is shut down, and a transfer ends when its peer's
process ends.
"""

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")

Sockets = frozenset[tuple[int, str]]
"""Sockets as (descriptor, identity), because the descriptor may since have been reused."""


def find_open_sockets() -> Sockets:
    """Return all open sockets of this process, found in /proc; none on systems without it."""
    sockets = set()
    with contextlib.suppress(OSError):
        for path in _DESCRIPTORS.iterdir():
            identity = _read_identity(int(path.name))
            if identity.startswith("socket:"):
                sockets.add((int(path.name), identity))
    return frozenset(sockets)


def identify_sockets(sockets: Iterable[socket.socket]) -> Sockets:
    """Return the descriptor and identity of each of these sockets that is open. The identity is the
    system's name, such as "socket:[1234]"."""
    return frozenset((one.fileno(), _read_identity(one.fileno())) for one in sockets if one.fileno() >= 0)


def shut_down_sockets(sockets: Iterable[tuple[int, str]]) -> Sockets:
    """Shut down the connections of these sockets, and return those concerned. Sockets that listen
    or are closed are left out. Calls that wait in them get an error, here and at the other end."""
    ended = set()
    for descriptor, identity in sockets:
        with contextlib.suppress(OSError):
            if _read_identity(descriptor) != identity:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                # Gloo aborts the process when a socket it listens on fails.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ended.add((descriptor, identity))
                    connection.shutdown(socket.SHUT_RDWR)
    return frozenset(ended)


def is_any_open(sockets: Sockets) -> bool:
    """Return whether any of these sockets is not closed yet."""
    return any(_read_identity(descriptor) == identity for descriptor, identity in sockets)


def _read_identity(descriptor: int) -> str:
    try:
        return str((_DESCRIPTORS / str(descriptor)).readlink())
    except OSError:
        return ""
