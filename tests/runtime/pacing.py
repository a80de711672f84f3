"""Slows a run down while something is awaited, so that a few iterations are enough on any machine."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from runtime.coordinator.recovery import Recovery
from runtime.processes.process_manager import Return
from schedules.schedule import Worker

SLOWLY_SECONDS = 0.1
"""A process is started, and has its layers, within some tens of iterations that take so long."""


def slowly_until(happened: Callable[[], bool]) -> Callable[[int, float], None]:
    """To be called after each iteration."""
    def progress(_: int, __: float) -> None:
        if not happened():
            time.sleep(SLOWLY_SECONDS)
    return progress


class UntilBack:
    """Makes iterations take longer while a worker that should come back has not, and has not died once more."""

    def __init__(self, returns: Sequence[Return]) -> None:
        self._left = Counter(one.worker for one in returns)
        self._due = {one.worker: one.iteration for one in reversed(returns)}
        self._down: set[Worker] = set()

    def notify(self, news: object) -> None:
        if isinstance(news, Recovery):
            self._left.subtract(self._down & {*news.dead})
            self._down |= {*news.dead}
            self._left.subtract(news.returned)
            self._down -= {*news.returned}

    def progress(self, iteration: int, _: float) -> None:
        if any(self._left[worker] > 0 and self._due[worker] <= iteration for worker in self._down):
            time.sleep(SLOWLY_SECONDS)
