"""Slows a run down while something is awaited.

So a few iterations are enough on any machine.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.events import Event, FetchBegun
from slipstream.runtime.processes.process_manager import Return
from slipstream.schedules.schedule import Worker

FIRST_SECONDS = 0.05
"""Of the first pause between iterations."""
GROWTH = 1.25
"""How many times as long as the last one a pause is.

A process is started, and has its layers, within ten pauses on an idle machine. Twenty-five of
them are half a minute, for a busy one.
"""
MOST_SECONDS = 5.0
"""Of the longest pause."""


HELD_SECONDS = 240.0


class Pauses:
    """Each is longer than the one before, until what is awaited has happened."""

    def __init__(self) -> None:
        self._seconds = FIRST_SECONDS

    def wait(self, awaited: bool) -> None:
        """To be called after each iteration."""
        if awaited:
            time.sleep(self._seconds)
            self._seconds = min(GROWTH * self._seconds, MOST_SECONDS)
        else:
            self.restart()

    def restart(self) -> None:
        """Something else is awaited now."""
        self._seconds = FIRST_SECONDS


def after_each_iteration(
    monkeypatch: pytest.MonkeyPatch, progress: Callable[[int, float], None]
) -> None:
    """Have this called in runs that commands start in this process."""
    write = RunLog.write_iteration

    def written(
        log: RunLog, iteration: int, loss: float, *more: float | None, **fields: float | None
    ) -> None:
        write(log, iteration, loss, *more, **fields)
        progress(iteration, loss)

    monkeypatch.setattr(RunLog, "write_iteration", written)


def hold_at(iteration: int, path: Path) -> None:
    """Have a command's run wait after an iteration until a file is there.

    The run is in this process.
    """
    write = RunLog.write_iteration

    def written(
        log: RunLog, number: int, loss: float, *more: float | None, **fields: float | None
    ) -> None:
        write(log, number, loss, *more, **fields)
        deadline = time.monotonic() + HELD_SECONDS
        while number == iteration and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    RunLog.write_iteration = written  # type: ignore[method-assign]


def slowly_until(happened: Callable[[], bool]) -> Callable[[int, float], None]:
    """To be called after each iteration."""
    pauses = Pauses()
    return lambda _, __: pauses.wait(not happened())


class UntilBack:
    """Makes iterations take longer while a worker should come back.

    It has not, and has not died once more.
    """

    def __init__(self, returns: Sequence[Return]) -> None:
        self._left = Counter(death.worker for death in returns)
        self._due = {death.worker: death.iteration for death in reversed(returns)}
        self._down: set[Worker] = set()
        self._pauses = Pauses()

    def notify(self, news: object) -> None:
        if isinstance(news, Recovery):
            self._left.subtract(self._down & {*news.dead})
            self._down |= {*news.dead}
            self._left.subtract(news.returned)
            self._down -= {*news.returned}
        elif str(news).endswith("before it took part"):
            self._left[Worker.parse(str(news).split()[1])] -= 1

    def observe(self, event: Event) -> None:
        if isinstance(event, FetchBegun):
            self._pauses.restart()

    def progress(self, iteration: int, _: float) -> None:
        self._pauses.wait(
            any(self._left[worker] > 0 and self._due[worker] <= iteration for worker in self._down)
        )
