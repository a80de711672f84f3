"""Notice at once that another process is gone, without relying on clocks.

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
from slipstream.runtime.replay.python_exit import has_exit_begun, start_thread
from slipstream.runtime.replay.sockets import Sockets, identify_sockets

POLL_SECONDS = 0.05
CONNECT_SECONDS = 5.0
"""Longest wait for a machine that does not answer."""
SILENT_SECONDS = 20
"""Time after which a machine that acknowledges nothing counts as gone (Linux)."""
BACKLOG = 1024
"""Connections that may wait to be accepted; with more, a slow process would seem dead."""
OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors that have a cause on this machine, so the other process may be alive."""


class Watch:
    """Thread that watches one other process, and by which another one watches this process.

    Parameters
    ----------
    host
        Address of this machine at which other processes reach it.
    check
        Function that the thread calls every `POLL_SECONDS`.
    """

    def __init__(self, host: str, check: Callable[[], None]) -> None:
        self._check = check
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._listener.setblocking(False)  # who connected may have gone before it is accepted
        self.address = f"{host} {self._listener.getsockname()[1]}"
        """Host and port, separated by a space, at which other processes watch this one."""
        self._followed: socket.socket | None = None
        self._on_loss: Callable[[], None] = lambda: None
        self._accepted: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = start_thread("watching another process", self._run)

    def follow(self, address: str | None, on_loss: Callable[[], None]) -> None:
        """Watch the process at `address` from now on; None: watch no process.

        `on_loss` is called when the process is gone, by the watch's thread; or at once, by this
        one, if it is gone already. Raises OSError as `connect` does.
        """
        connection = None if address is None else connect(address)
        with self._lock:
            before, self._followed, self._on_loss = self._followed, connection, on_loss
        if before is not None:
            before.close()
        if address is not None and connection is None:
            on_loss()

    def sockets(self) -> Sockets:
        """Return all open sockets of the watch."""
        with self._lock:
            return identify_sockets(self._sockets())

    def close(self) -> None:
        """End the thread, after at most `CONNECT_SECONDS`, and close all sockets."""
        self._closed.set()
        self._thread.join(CONNECT_SECONDS)
        with self._lock:
            for connection in self._sockets():
                connection.close()

    def _sockets(self) -> list[socket.socket]:
        return [self._listener, *self._accepted, *filter(None, [self._followed])]

    def _run(self) -> None:
        while not (self._closed.is_set() or has_exit_begun()):
            with self._lock:
                followed, waiting = self._followed, self._sockets()
            for connection in _find_readable(waiting, POLL_SECONDS):
                self._take(connection, followed)
            self._check()

    def _take(self, ready: socket.socket, followed: socket.socket | None) -> None:
        """Accept a connection if `ready` listens; otherwise close `ready`, and report a loss."""
        # Nothing is ever sent, so a connection that can be read has ended.
        if ready is self._listener:
            try:
                # With the lock, or an abort, which spares `sockets`, could shut it down unseen.
                with self._lock:
                    connection, _ = ready.accept()
                    self._accepted.append(connection)
            except OSError:  # such as too many open files: whoever connects is kept waiting
                self._closed.wait(POLL_SECONDS)
        elif ready is followed:
            with self._lock:
                is_current, on_loss = self._followed is followed, self._on_loss
                if is_current:
                    self._followed = None
            if is_current:
                ready.close()
                on_loss()  # without the lock, as it may follow another process
        else:
            with self._lock:
                self._accepted.remove(ready)
            ready.close()


def is_dead(address: str) -> bool:
    """Return whether the process that listened at `address` is dead.

    Raises OSError as `connect` does.
    """
    connection = connect(address)
    with connection or contextlib.nullcontext():
        return has_ended(connection)


def has_ended(connection: socket.socket | None) -> bool:
    """Return whether the process at the other end is dead, given what `connect` returned."""
    return connection is None or bool(_find_readable([connection], 0))  # nothing is ever sent


def connect(address: str) -> socket.socket | None:
    """Connect to the process at an address; return None if the process is dead.

    If its machine does not answer in `CONNECT_SECONDS`, it counts as dead, too. Raises OSError for
    causes on this machine, such as too many open files.
    """
    host, port = address.split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    except OSError as error:
        if error.errno in OWN_ERRORS:
            raise  # a process must not be taken for dead because this one lacks descriptors
        return None
    with contextlib.suppress(OSError):  # it has ended meanwhile, which the next look at it finds
        enable_keepalive(connection, SILENT_SECONDS)
    return connection


def _find_readable(connections: Iterable[socket.socket], seconds: float) -> list[socket.socket]:
    """Wait up to `seconds`; return the connections that can be read or have ended."""
    # Unlike select, poll takes descriptors from 1024 on; unlike epoll, it needs none of its own.
    with selectors.PollSelector() as selector:
        for connection in connections:
            with contextlib.suppress(ValueError, KeyError):  # closed meanwhile
                selector.register(connection, selectors.EVENT_READ)
        return [cast(socket.socket, key.fileobj) for key, _ in selector.select(seconds)]
