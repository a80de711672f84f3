"""Watch: notice at once that another process is gone, without relying on clocks.

Every process listens on a socket, and holds a connection to one other, so that all are watched in a
circle. The system closes the connection when the process at its other end dies, and refuses new
ones. A process that is merely slow is not taken for dead.
"""

import contextlib
import errno
import selectors
import socket
import threading
from collections.abc import Callable, Iterable
from typing import cast

from slipstream.runtime.protocol.channel import enable_keepalive
from slipstream.runtime.replay.sockets import Sockets, identify_sockets

POLL_SECONDS = 0.05
CONNECT_SECONDS = 5.0
"""Longest wait for a machine that does not answer."""
SILENT_SECONDS = 20
"""Time after which a machine counts as gone that acknowledges nothing (Linux)."""
BACKLOG = 1024
"""Connections that may wait for a process that is slow: with more, it would be taken for dead."""
OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors for want of something that this process or machine lacks: the process at the other end may
live.
"""


class Watch:
    """Listening socket of this process, and a connection to the process that it watches.

    Parameters
    ----------
    host
        Address of this machine at which the others reach it.
    check
        Function that is called every `POLL_SECONDS` from the thread of the watch.
    """

    def __init__(self, host: str, check: Callable[[], None]) -> None:
        self._check = check
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._listener.setblocking(False)  # who connected may have gone before it is accepted
        self.address = f"{host} {self._listener.getsockname()[1]}"
        """Host and port, by which others find this process."""
        self._followed: socket.socket | None = None
        self._on_loss: Callable[[], None] = lambda: None
        self._accepted: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True,
                                        name="watching another process")
        self._thread.start()

    def follow(self, address: str | None, on_loss: Callable[[], None]) -> None:
        """Watch the process at an address from now on, instead of the one before; `on_loss` is
        called if it is gone. None: watch nobody."""
        connection = None if address is None else connect(address)
        with self._lock:
            before, self._followed, self._on_loss = self._followed, connection, on_loss
        if before is not None:
            before.close()
        if address is not None and connection is None:
            on_loss()

    def sockets(self) -> Sockets:
        """Return the sockets of the watch."""
        with self._lock:
            return identify_sockets(self._sockets())

    def close(self) -> None:
        """Close all sockets."""
        self._closed.set()
        self._thread.join(CONNECT_SECONDS)
        with self._lock:
            for connection in self._sockets():
                connection.close()

    def _sockets(self) -> list[socket.socket]:
        return [self._listener, *self._accepted, *filter(None, [self._followed])]

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                followed, waiting = self._followed, self._sockets()
            for connection in _find_readable(waiting, POLL_SECONDS):
                self._take(connection, followed)
            self._check()

    def _take(self, ready: socket.socket, followed: socket.socket | None) -> None:
        """Accept a connection, or notice that one has ended: nothing is ever sent."""
        if ready is self._listener:
            try:
                connection, _ = ready.accept()
            except OSError:  # such as too many open files: whoever connects is kept waiting
                self._closed.wait(POLL_SECONDS)
                return
            with self._lock:
                self._accepted.append(connection)
        elif ready is followed:
            with self._lock:
                is_current, on_loss = self._followed is followed, self._on_loss
                if is_current:
                    self._followed = None
            if is_current:
                ready.close()
                on_loss()
        else:
            with self._lock:
                self._accepted.remove(ready)
            ready.close()


def is_dead(address: str) -> bool:
    """Return whether nobody listens at an address any more."""
    connection = connect(address)
    with connection or contextlib.nullcontext():
        return has_ended(connection)


def has_ended(connection: socket.socket | None) -> bool:
    """Return whether the process is dead to which `connect` has made a connection."""
    return connection is None or bool(_find_readable([connection], 0))  # nothing is ever sent


def connect(address: str) -> socket.socket | None:
    """Connect to a process; return None if it is dead. Raises OSError for errors of this
    process.
    """
    host, port = address.split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    except OSError as error:
        if error.errno in OWN_ERRORS:
            raise
        return None
    with contextlib.suppress(OSError):  # it has ended meanwhile, which the next look at it finds
        enable_keepalive(connection, SILENT_SECONDS)
    return connection


def _find_readable(connections: Iterable[socket.socket], seconds: float) -> list[socket.socket]:
    """Wait until any of these can be read, or has ended; return those."""
    # unlike select, poll takes descriptors from 1024 on; unlike epoll, it needs none of its own
    with selectors.PollSelector() as selector:
        for connection in connections:
            with contextlib.suppress(ValueError, KeyError):  # closed meanwhile
                selector.register(connection, selectors.EVENT_READ)
        return [cast(socket.socket, key.fileobj) for key, _ in selector.select(seconds)]
