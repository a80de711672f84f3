"""Shut down connections, to release at once the threads that wait in them.

Gloo releases a blocked transfer only when its connection closes. So this module looks up in /proc
which sockets were opened with a process group, and another thread shuts them down. On systems
without /proc nothing is shut down, and a transfer ends when the process at its other end does.
"""

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")

Sockets = frozenset[tuple[int, str]]
"""Sockets as (descriptor, identity), since a closed socket's descriptor is used again."""


def find_open_sockets() -> Sockets:
    """Return all open sockets of this process; none on systems without /proc."""
    sockets = set()
    with contextlib.suppress(OSError):
        for path in _DESCRIPTORS.iterdir():
            identity = _read_identity(int(path.name))
            if identity.startswith("socket:"):
                sockets.add((int(path.name), identity))
    return frozenset(sockets)


def identify_sockets(sockets: Iterable[socket.socket]) -> Sockets:
    """Return the descriptor and identity, as "socket:[1234]", of each socket that is open."""
    descriptors = [entry.fileno() for entry in sockets]
    return frozenset(
        (descriptor, _read_identity(descriptor)) for descriptor in descriptors if descriptor >= 0
    )


def shut_down_sockets(sockets: Iterable[tuple[int, str]]) -> Sockets:
    """Shut down connections that are still open, and return their sockets.

    `sockets` has pairs as in `Sockets`; sockets that listen are left alone. Calls that wait in the
    connections raise an error.
    """
    ended = set()
    for descriptor, identity in sockets:
        with contextlib.suppress(OSError):
            if _read_identity(descriptor) != identity:
                continue  # closed meanwhile, and the descriptor belongs to another file
            # A duplicate, as closing the Python object must not close gloo's descriptor.
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
