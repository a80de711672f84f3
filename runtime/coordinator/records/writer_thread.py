"""Access files or a terminal in one thread, concurrent with the event loop.

Nothing has to be in a file before the coordinator acts on it. A restarted coordinator asks the
workers for their progress and for the losses that they were sent, and trusts files only as far as
these answers confirm them (`failover`). So a full disk or a file system that does not respond holds
up no training.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

from slipstream.runtime.errors import first_line

SLOW_WRITE_SECONDS = 5.0
"""Seconds after which a file operation that has not ended is reported to users."""
CLOSE_SECONDS = 10.0
"""Seconds without progress after which a run that has ended gives up writing."""


class Writer:
    """Writer that runs each file operation at once, in the caller's thread."""

    def __call__(self, work: Callable[[], object]) -> None:
        """Run a file operation, after all earlier ones; an error is raised here."""
        work()

    def report_problem(self, text: str) -> None:
        """Ignore a problem; subclasses report it to the run's users. Any thread may call this."""


IMMEDIATE_WRITER = Writer()


class WriterThread(Writer):
    """Writer that runs file operations in its own thread, so that no caller waits.

    The operations run in the order of the calls. The end of the context waits for all of them, but
    not for a file system that does not answer.
    """

    def __init__(self, notify: Callable[[str], None] = lambda _: None) -> None:
        self._notify = notify
        self._waiting: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._over = False
        self._began: float | None = None
        """Time of `time.monotonic` at which the current operation began; None if there is none."""
        self._done = 0
        self._said: deque[str] = deque()
        self._slow = False
        # A daemon: a thread that hangs in a file system cannot be ended, and this process must not
        # wait for it.
        self._thread = threading.Thread(target=self._run_operations, daemon=True, name="writer")
        self._thread.start()

    def __call__(self, work: Callable[[], object]) -> None:
        """Queue a file operation. An exception that it raises is reported to users."""
        with self._wake:
            self._waiting.append(work)
            self._wake.notify()

    def report_problem(self, text: str) -> None:
        """Report a problem to the users of the run; any thread may call this."""
        self._said.append(text)

    def take_reports(self) -> Iterator[str]:
        """Yield the problems reported since the last call, and a line if an operation hangs."""
        while self._said:
            yield self._said.popleft()
        # The thread sets this to None between operations, so it is read once.
        began = self._began
        if began is not None and not self._slow and time.monotonic() - began > SLOW_WRITE_SECONDS:
            self._slow = True
            yield (
                f"the run's files have not been written for {SLOW_WRITE_SECONDS:g} s; the run "
                "continues, and writes what waits when it can"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._wake:
            self._over = True
            self._wake.notify()
        # As long as operations complete, wait for the rest.
        done = -1
        while self._thread.is_alive() and done != self._done:
            done = self._done
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._notify(
                f"{len(self._waiting) + 1} writes to the run's files are given up: the file system "
                "does not answer"
            )
        for text in self.take_reports():
            self._notify(text)

    def _run_operations(self) -> None:
        while True:
            with self._wake:
                while not self._waiting:
                    if self._over:
                        return
                    self._wake.wait()
                work = self._waiting.popleft()
            # An operation may take any time, so it runs without the lock.
            self._began = began = time.monotonic()
            try:
                work()
            except Exception as error:
                self.report_problem(
                    "the run continues, though not all of its files can be written: "
                    f"{first_line(error)}"
                )
            self._began = None
            self._done += 1
            # Users were told that files are behind: tell them that they no longer are.
            if self._slow:
                self._slow = False
                self.report_problem(
                    f"the run's files are written again, after {time.monotonic() - began:.0f} s"
                )
