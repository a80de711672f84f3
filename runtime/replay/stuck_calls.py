"""Track calls into process groups by thread, so that a stuck thread can be abandoned.

Gloo has a deadlock: a thread that finds a connection broken while it writes waits for the next turn
of the event loop, and holds a lock that the event loop may be waiting for. Nothing releases the
thread. The deadlock is rare, and happens when workers die. Waits of calls that gloo forgets are
ended by other means (`runtime.replay.gloo`).
"""

import threading
import time
from collections.abc import Collection
from typing import NamedTuple

from slipstream.schedules.schedule import Worker


class AbandonedError(RuntimeError):
    """Error for a call that returns after its thread was abandoned, and may change nothing."""


class OpenCall(NamedTuple):
    """A call into a process group that has not returned; `what` describes the call."""

    what: str
    began: float
    """Time at which the call began, by time.monotonic."""
    awaited: tuple[Worker, ...] = ()
    """Workers for which the call waits; empty if they are unknown."""
    on_device: bool = False
    """True if the call waits for the device; its thread is then never abandoned."""
    outer: "OpenCall | None" = None
    """Call within which this one was made; None if there is none."""


class OpenCalls:
    """Record of which threads are inside a call into a process group."""

    def __init__(self) -> None:
        self._calls: dict[int, OpenCall] = {}
        self._abandoned: set[int] = set()
        # "The call has ended" and "its thread is abandoned" exclude each other.
        self._lock = threading.Lock()

    def enter_call(
        self, what: str, awaited: Collection[Worker] = (), *, on_device: bool = False
    ) -> None:
        """Register that this thread enters a call, described by `what`.

        The call waits for the workers in `awaited`, empty if unknown, or for the device.
        """
        # A call within another one keeps it, for `leave_call`.
        thread = threading.get_ident()
        self._calls[thread] = OpenCall(
            what, time.monotonic(), tuple(awaited), on_device, self._calls.get(thread)
        )

    def name_awaited(self, awaited: Collection[Worker]) -> None:
        """Register the workers for which this thread's present call, if any, waits."""
        # Within a call that creates several groups, whom it waits for changes from group to group.
        thread = threading.get_ident()
        call = self._calls.get(thread)
        if call is not None:
            self._calls[thread] = call._replace(awaited=tuple(awaited))

    def leave_call(self) -> None:
        """Register that this thread leaves its call. Raises AbandonedError if it was abandoned."""
        thread = threading.get_ident()
        with self._lock:
            call = self._calls.pop(thread, None)
            # The thread is back in the call around this one.
            if call is not None and call.outer is not None:
                self._calls[thread] = call.outer
            abandoned = thread in self._abandoned
            self._abandoned.discard(thread)
        if abandoned:
            raise AbandonedError("the thread of this call was abandoned")

    def call_of_thread(self, thread: int) -> OpenCall | None:
        """Return the call that a thread is inside of; None if it is in none."""
        return self._calls.get(thread)

    def abandon_threads(self, threads: Collection[int], seconds: float) -> bool:
        """Abandon all threads if each has been in one call for at least `seconds`.

        Returns True if all were abandoned, and False if none was. A thread in no call, or in a call
        that waits for the device, cannot be abandoned. An abandoned thread gets an AbandonedError
        if its call ever returns.
        """
        with self._lock:
            # All or none: a thread that goes on would use what the others have left.
            calls = [self._calls.get(thread) for thread in threads]
            if any(
                call is None or call.on_device or time.monotonic() - call.began < seconds
                for call in calls
            ):
                return False
            for thread in threads:
                self._abandoned.add(thread)
            return True


OPEN_CALLS = OpenCalls()
"""The one `OpenCalls` of this process, in which all threads register their calls."""
