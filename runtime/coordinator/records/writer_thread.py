"""Writer: what touches files, or a terminal, while training goes on, in one thread beside the event loop.

Nothing has to be in a file before it is acted upon. A coordinator that starts anew asks the workers how far they are,
and which losses they have been told of; what files say is bounded by that (`failover`). So a disk that is full, and a
file system that does not answer, hold up nobody.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

from slipstream.runtime.errors import first_line

SLOW_SECONDS = 5.0
"""What takes longer is said."""
CLOSE_SECONDS = 10.0
"""At the end of a run, what has not been written that long after the last thing that was is given up."""


class Writer:
    """Does at once what touches files, and tells nobody of it."""

    def __call__(self, work: Callable[[], object]) -> None:
        """Have something done, after all before it."""
        work()

    def say(self, text: str) -> None:
        """Have this told, from any thread."""


AT_ONCE = Writer()


class WriterThread(Writer):
    """One thing after another, in the order in which they were asked for.

    As a context, it ends once that is done. `notify` is told then of what `news` has not been asked for.
    """

    def __init__(self, notify: Callable[[str], None] = lambda _: None) -> None:
        self._notify = notify
        self._waiting: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._over = False
        self._began: float | None = None
        """When what is being done was begun, by time.monotonic."""
        self._done = 0
        self._said: deque[str] = deque()
        self._slow = False
        # A daemon: whoever hangs in a file system cannot be ended, and this process does not wait for it.
        self._thread = threading.Thread(target=self._run, daemon=True, name="writer")
        self._thread.start()

    def __call__(self, work: Callable[[], object]) -> None:
        """Have something done. What it raises is said."""
        with self._wake:
            self._waiting.append(work)
            self._wake.notify()

    def say(self, text: str) -> None:
        """Have this told, from any thread."""
        self._said.append(text)

    def news(self) -> Iterator[str]:
        """What is to be told since the last call. To be called at an interval."""
        began = self._began
        if began is not None and not self._slow and time.monotonic() - began > SLOW_SECONDS:
            self._slow = True
            yield (f"the run's files have not been written for {SLOW_SECONDS:g} s; the run goes on, and writes what "
                   "waits when it can")
        while self._said:
            yield self._said.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._wake:
            self._over = True
            self._wake.notify()
        done = -1
        while self._thread.is_alive() and done != self._done:
            done = self._done
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._notify(f"{len(self._waiting) + 1} writes to the run's files are given up: the file system does not "
                         "answer")
        for text in self.news():
            self._notify(text)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting:
                    if self._over:
                        return
                    self._wake.wait()
                work = self._waiting.popleft()
            self._began = began = time.monotonic()
            try:
                work()
            except Exception as error:
                self.say(f"the run goes on, though not all of its files can be written: {first_line(error)}")
            self._began = None
            self._done += 1
            if self._slow:
                self._slow = False
                self.say(f"the run's files are written again, after {time.monotonic() - began:.0f} s")
