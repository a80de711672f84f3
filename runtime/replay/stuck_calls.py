"""Calls into a process group, by thread, so that a thread that is stuck in one is found and can be left behind.

Gloo has a deadlock: a thread that finds a connection broken while it writes waits for the event loop to turn, and holds
a lock that the event loop may be waiting for. Nothing releases it. It is rare, and happens when peers die. Waits
for what gloo forgets are ended by other means (`runtime.replay.gloo`).
"""

import threading
import time
from collections.abc import Collection
from typing import NamedTuple


class AbandonedError(RuntimeError):
    """The call has returned after the thread was left behind: it must change nothing."""


class OpenCall(NamedTuple):
    """A call that has not returned."""

    what: str
    began: float
    """By time.monotonic."""


class OpenCalls:
    """Which threads are inside a call, since when."""

    def __init__(self) -> None:
        self._calls: dict[int, OpenCall] = {}
        self._abandoned: set[int] = set()
        self._lock = threading.Lock()
        """Either a call has ended, or its thread is left behind: both know the same."""

    def begin(self, what: str) -> None:
        """This thread makes a call."""
        self._calls[threading.get_ident()] = OpenCall(what, time.monotonic())

    def end(self) -> None:
        """The call is over. Raises AbandonedError."""
        thread = threading.get_ident()
        with self._lock:
            self._calls.pop(thread, None)
            abandoned = thread in self._abandoned
            self._abandoned.discard(thread)
        if abandoned:
            raise AbandonedError("nobody waits any more")

    def of(self, thread: int) -> OpenCall | None:
        """The call that a thread is inside of."""
        return self._calls.get(thread)

    def abandon(self, threads: Collection[int], seconds: float) -> bool:
        """Whether each of these threads has been in one call for so long; then each ends with an error if it ever comes
        out of it."""
        with self._lock:
            calls = [self._calls.get(thread) for thread in threads]
            if any(call is None or time.monotonic() - call.began < seconds for call in calls):
                return False
            for thread in threads:
                self._abandoned.add(thread)
            return True


OPEN_CALLS = OpenCalls()
"""Of this process."""
