"""Watch: notice at once that another process is gone, without relying on clocks.

Every process listens on a socket, and holds a connection to one other, so that all are watched in a
circle. The system closes the connection when the process at its other end dies, and refuses new
ones. A process that is merely slow is not taken for dead.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Callable

from slipstream.runtime.replay.sockets import Sockets, identify_sockets

POLL_SECONDS = 0.05
CONNECT_SECONDS = 5.0
"""Longest wait for a machine that does not answer."""
BACKLOG = 1024
"""Connections that may wait for a process that is slow: with more, it would be taken for dead."""


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
        self.address = f"{host} {self._listener.getsockname()[1]}"
        """Host and port, by which others find this process."""
        self._followed: socket.socket | None = None
        self._on_loss: Callable[[], None] = lambda: None
        self._accepted: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watching another process")
        self._thread.start()

    def follow(self, address: str | None, on_loss: Callable[[], None]) -> None:
        """Watch the process at an address from now on, instead of the one before; `on_loss` is
        called if it is gone. None: watch nobody."""
        connection = None if address is None else _connect(address)
        with self._lock:
            before, self._followed, self._on_loss = self._followed, connection, on_loss
        if before is not None:
            before.close()
        if address is not None and connection is None:
            on_loss()

    def sockets(self) -> Sockets:
        """Return the sockets of the watch."""
        with self._lock:
            followed = [] if self._followed is None else [self._followed]
            return identify_sockets([self._listener, *followed, *self._accepted])

    def close(self) -> None:
        """Close all sockets."""
        self._closed.set()
        self._thread.join(CONNECT_SECONDS)
        with self._lock:
            for one in [self._listener, *self._accepted, *([self._followed] if self._followed else [])]:
                one.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                followed = self._followed
                waiting = [self._listener, *self._accepted, *([followed] if followed is not None else [])]
            try:
                ready, _, _ = select.select(waiting, [], [], POLL_SECONDS)
            except (OSError, ValueError):  # one was closed meanwhile
                continue
            for one in ready:
                self._take(one, followed)
            self._check()

    def _take(self, ready: socket.socket, followed: socket.socket | None) -> None:
        """Accept a connection, or notice that one has ended: nothing is ever sent."""
        if ready is self._listener:
            with self._lock:
                self._accepted.append(ready.accept()[0])
        elif ready is followed:
            with self._lock:
                is_current = self._followed is followed
                if is_current:
                    self._followed = None
            if is_current:
                ready.close()
                self._on_loss()
        else:
            with self._lock:
                self._accepted.remove(ready)
            ready.close()


class Probe:
    """Connection to a process that is missing, by which its death is noticed."""

    def __init__(self, address: str) -> None:
        self._connection = _connect(address)

    def is_dead(self) -> bool:
        """Return whether nobody listens at the address any more."""
        if self._connection is None:
            return True
        return bool(select.select([self._connection], [], [], 0)[0])  # nothing is ever sent: it has ended

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def is_dead(address: str) -> bool:
    """Return whether nobody listens at an address any more."""
    with contextlib.closing(Probe(address)) as probe:
        return probe.is_dead()


def _connect(address: str) -> socket.socket | None:
    host, port = address.split()
    with contextlib.suppress(OSError):
        return socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    return None
