"""Ctrl-C during a search: noted, and acted upon where the best plan so far is safe."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Note:
    """A handler that sets an event; at the second signal it raises KeyboardInterrupt after all."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, *_: object) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        self.event.set()


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event instead of raising KeyboardInterrupt; a second one raises it after all.

    An exception could strike anywhere, also where Python swallows it. Only the main thread of a program gets signals;
    elsewhere the event is never set. Where one search is part of another, what has ended the inner ends the outer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield threading.Event()
        return
    note = _Note()
    before = signal.signal(signal.SIGINT, note)
    try:
        yield note.event
    finally:
        signal.signal(signal.SIGINT, before)
        if isinstance(before, _Note) and note.event.is_set():
            before.event.set()
