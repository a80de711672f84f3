"""Let Python end only when background threads are back from torch.

When a daemon thread returns from C++ while Python ends, Python ends the thread inside a destructor
of pybind11. C++ then aborts the whole process, and prints "terminate called without an active
exception", although the program may have succeeded.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
EXIT_SECONDS = 5.0
"""Longest wait for the threads. Calls take milliseconds, but those that gloo forgets take long."""
POLL_SECONDS = 0.001
"""Interval between checks whether all calls have returned."""
_UNFINISHED: set[object] = set()
"""An object for each call that has not returned."""
_has_begun = False
"""True once the end of Python has begun."""

# A forked process has none of the threads, so it would wait in vain.
os.register_at_fork(after_in_child=_UNFINISHED.clear)


def finish_before_exit(
    function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> Callable[[], T]:
    """Return a call of `function`, to be made once, by a daemon thread.

    From now on, the end of Python waits up to `EXIT_SECONDS` until the call has returned.
    """
    # No lock, as this may be called where the garbage collector comes.
    unfinished = object()
    _UNFINISHED.add(unfinished)

    def call() -> T:
        nonlocal function, arguments, options
        try:
            return function(*arguments, **options)
        finally:
            # First, as destructors of torch's objects run in C++, too.
            del function, arguments, options
            _UNFINISHED.discard(unfinished)

    return call


def start_thread(
    name: str, function: Callable[P, object], *arguments: P.args, **options: P.kwargs
) -> threading.Thread:
    """Start a daemon thread that calls `function` as `finish_before_exit` does; return it."""
    thread = threading.Thread(
        target=finish_before_exit(function, *arguments, **options), daemon=True, name=name
    )
    thread.start()
    return thread


def has_exit_begun() -> bool:
    """Return whether Python ends, so that a thread that repeats calls has to return."""
    return _has_begun


@atexit.register
def _wait_for_calls() -> None:
    global _has_begun
    _has_begun = True
    deadline = time.monotonic() + EXIT_SECONDS
    while _UNFINISHED and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
