"""Meeting the others, and an end to it: what another thread must be able to call off, whatever it waits for."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from runtime.replay.communication import CommunicationError
from runtime.worker.sockets import Sockets, cut, open_sockets

T = TypeVar("T")


class OverError(CommunicationError):
    """The order has ended while it was being followed."""


class Outcome(Generic[T]):
    """What a call in another thread gave, or raised."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None
        try:
            self.value = call()
        except BaseException as error:
            self.error = error


class Meeting:
    """One order's connections: made in a thread that can be left behind, cut from any thread.

    `spared` are sockets that others have opened meanwhile.

    Meeting others can block where nothing can be cut yet: on a peer that died before it connected. Then the thread is
    left to its own timeout.
    """

    def __init__(self, spared: Callable[[], Sockets] = frozenset) -> None:
        self._spared = spared
        self._before = open_sockets()
        self._made: Sockets | None = None
        self._woken = threading.Event()
        self.over = False

    def end(self) -> None:
        """Call it off: cut the connections, and wake whoever is in `hold`. May be called from any thread."""
        self.over = True
        self._cut()
        self._woken.set()

    def cut(self) -> None:
        """Break the connections, as a network may."""
        self._cut()

    def require(self) -> None:
        """Raises OverError once the meeting has been called off."""
        if self.over:
            raise OverError("the order is over")

    def hold(self, call: Callable[[], T], undo: Callable[[T], None] = lambda _: None) -> T:
        """Do something that may block; `undo` it if it succeeds after all when nobody waits for it any more.

        Raises OverError when the meeting is called off, and whatever `call` raises.
        """
        self._woken.clear()
        outcomes: list[Outcome[T]] = []
        lock = threading.Lock()

        def run() -> None:
            outcome = Outcome(call)
            with lock:
                outcomes.append(outcome)
                late = self.over
            if late and outcome.error is None:
                assert outcome.value is not None
                undo(outcome.value)
            self._woken.set()

        threading.Thread(target=run, daemon=True, name="meeting").start()
        if not self.over:
            self._woken.wait()
        with lock:
            # Under the lock: either the thread has seen that it is late, or its outcome is taken here.
            if not outcomes:
                self.over = True
                raise OverError("the order is over")
            outcome = outcomes[0]
        if self.over:
            if outcome.error is None:
                assert outcome.value is not None
                undo(outcome.value)
            raise OverError("the order is over")
        if outcome.error is not None:
            raise outcome.error
        self._made = open_sockets() - self._before
        assert outcome.value is not None
        return outcome.value

    def _cut(self) -> None:
        cut((open_sockets() - self._before if self._made is None else self._made) - self._spared())
