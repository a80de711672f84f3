"""Ctrl-C during a search: noted, and acted upon where the best plan so far is safe."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event instead of raising KeyboardInterrupt; a second one raises it after all.

    An exception could strike anywhere, also where Python swallows it. Only the main thread of a program hears signals;
    elsewhere the event is never set.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def note(*_: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
