"""Print the progress of long work into a log, where nobody would see a bar."""

import time
from collections.abc import Callable

from slipstream.cli.shared.console import err

QUIET_SECONDS = 10.0
"""Least time between two lines that say what is being done."""


class LogProgress:
    """Printer of progress on stderr: a line for each tenth of the work, and at times what is done.

    It prints nothing in a terminal, which shows a bar instead.
    """

    def __init__(self, subject: str, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._subject, self._unit, self._clock = subject, unit, clock
        self._tenths, self._last_time = -1, -QUIET_SECONDS

    def show_count(self, done: int, total: int) -> None:
        """Print how much is done, if a further tenth is."""
        tenths = 10 * done // total if total else 0
        if tenths > self._tenths:
            self._tenths = tenths
            self._print(f"{done} of {total} {self._unit}")

    def show_work(self, text: str) -> None:
        """Print what is being done, unless a line was printed just now."""
        if self._clock() - self._last_time >= QUIET_SECONDS:
            self._print(text)

    def _print(self, text: str) -> None:
        if not err.is_terminal:
            self._last_time = self._clock()
            err.print(f"{self._subject}: {text}", soft_wrap=True)
