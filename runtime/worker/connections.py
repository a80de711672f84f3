"""A generation's connections. The main thread can break them, whichever thread waits on them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker.sockets import Sockets, cut, open_sockets


class OrderEndedError(CommunicationError):
    """The order has ended while the generation was at work."""


class Connections:
    """The sockets that this process opens from when this is made until `made`, cut from any thread.

    `spared` gives the sockets that other threads have opened meanwhile.
    """

    def __init__(self, spared: Callable[[], Sockets] = frozenset) -> None:
        self._spared = spared
        self._before = open_sockets()
        self._made: Sockets | None = None
        self._lock = threading.Lock()
        self._released = False
        self.ended = False
        """Whether `end` was called."""

    def made(self) -> None:
        """All connections are there; sockets opened from now on are not among them. Raises OrderEndedError."""
        self._made = open_sockets() - self._before
        self.require()

    @contextmanager
    def more(self) -> Iterator[None]:
        """The sockets that are opened in here are among them, too. Raises OrderEndedError."""
        before = open_sockets()
        yield
        assert self._made is not None
        self._made |= open_sockets() - before
        self.require()

    def end(self) -> None:
        """The order has ended: cut them, unless they are released."""
        self.ended = True
        with self._lock:
            if not self._released:
                self.cut()

    def cut(self) -> None:
        """Break the connections, as a network may."""
        cut((open_sockets() - self._before if self._made is None else self._made) - self._spared())

    def release(self) -> None:
        """They are about to be closed: once this returns, `end` cuts nothing."""
        with self._lock:
            self._released = True

    def require(self) -> None:
        """Raises OrderEndedError once the order has ended."""
        if self.ended:
            raise OrderEndedError("the order is over")
