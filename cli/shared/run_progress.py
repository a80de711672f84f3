"""What `slipstream train` shows while it runs: phase, live workers and throughput, from the events of the run."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from slipstream.cli.shared.console import err
from slipstream.cli.shared.run_summary import clock
from slipstream.runtime.coordinator.records.writer_thread import WriterThread
from slipstream.runtime.events import (
    Event,
    FetchAbandoned,
    FetchBegun,
    FetchProgressed,
    HandedOver,
    OrderGiven,
    Phase,
    Started,
)

RECENT = 10
"""Iterations over which the throughput is taken."""


class RunProgress:
    """Is told of each event and each committed iteration.

    Parameters
    ----------
    tokens
        Of a sample.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._workers = self._samples = self._live = self._iterations = self._done = 0
        self._fault_free: float | None = None
        self._planned: float | None = None
        self._phase: Phase | None = None
        self._fetched: float | None = None
        """The share of a fetch that settles; None: there is none."""
        self._fetch = 0
        self._committed: deque[float] = deque(maxlen=RECENT + 1)
        """When the last iterations were, of this order."""

    def observe(self, event: Event) -> None:
        """Something has happened."""
        match event:
            case Started():
                self._workers, self._samples, self._fault_free = event.workers, event.samples, event.fault_free_period
                self._iterations, self._done = event.iterations, event.iteration
            case OrderGiven():
                self._live, self._planned, self._phase, self._fetched = (event.live, event.planned_period, event.phase,
                                                                         None)
                self._committed.clear()
            case FetchBegun() if event.purpose == "settle":
                self._fetch, self._fetched = event.fetch, 0.0
            case FetchProgressed() if event.fetch == self._fetch and self._fetched is not None:
                self._fetched = event.share
            case FetchAbandoned() | HandedOver() if event.fetch == self._fetch:
                self._fetched = None

    def committed(self, iteration: int) -> None:
        """An iteration was committed."""
        self._done = iteration + 1
        self._committed.append(time.monotonic())

    @property
    def phase(self) -> str:
        """In words, with how much of the layers has come; empty before the first order."""
        return f"settling {self._fetched:.0%}".replace("%", " %") if self._fetched is not None else self._phase or ""

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last iterations; None: two have not been committed yet by the present workers."""
        seconds = self._iteration_seconds
        return None if seconds is None else self._tokens * self._samples / seconds

    @property
    def seconds_left(self) -> float | None:
        """If the iterations to come take as long as the last ones."""
        seconds = self._iteration_seconds
        return None if seconds is None else seconds * (self._iterations - self._done)

    @property
    def _iteration_seconds(self) -> float | None:
        if len(self._committed) < 2 or self._committed[-1] <= self._committed[0]:
            return None
        return (self._committed[-1] - self._committed[0]) / (len(self._committed) - 1)

    def __str__(self) -> str:
        if self._phase is None:
            return ""
        told = [self.phase, f"{self._live} of {self._workers} workers"]
        rate, left = self.tokens_per_second, self.seconds_left
        told += [] if rate is None else [f"{_count(rate)} tokens/s"]
        told += [] if not left else [f"{clock(left)} left"]
        if self._fault_free and self._planned:
            told.append(f"planned {100 * self._fault_free / self._planned:.0f} % of fault-free")
        return ", ".join(told)


def _count(number: float) -> str:
    """With three digits at least, and thousands apart."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


@dataclass(frozen=True, slots=True)
class Shown:
    """A progress bar on stderr, and above it a line for each iteration and for each change of workers.

    All in a thread: whoever tells it of something does not wait for the terminal.
    """

    bar: Progress
    task: TaskID
    progress: RunProgress
    write: WriterThread

    def committed(self, iteration: int, loss: float) -> None:
        """Show an iteration. Where there is no bar, its line says what the bar would."""
        self.write(partial(self._committed, iteration, loss))

    def observe(self, event: Event) -> None:
        """Something has happened."""
        self.write(partial(self._observe, event))

    def say(self, news: object) -> None:
        """Show what has changed, or gone wrong."""
        self.write(lambda: self.bar.console.print(str(news), style="yellow", soft_wrap=True))

    def _committed(self, iteration: int, loss: float) -> None:
        self.progress.committed(iteration)
        self.bar.update(self.task, completed=iteration + 1, description=f"loss {loss:.4f}, {self.progress}")
        state = f"  {self.progress}" if self.bar.disable else ""
        self.bar.console.print(f"iteration {iteration:>6}  loss {loss:.6f}{state}", soft_wrap=True)

    def _observe(self, event: Event) -> None:
        self.progress.observe(event)
        self.bar.update(self.task, description=str(self.progress) or None)


@contextmanager
def shown(iterations: int, tokens: int) -> Iterator[Shown]:
    """While a run of so many iterations lasts; `tokens`: of a sample."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar, \
            WriterThread() as write:
        yield Shown(bar, bar.add_task("starting the workers", total=iterations), RunProgress(tokens), write)


@contextmanager
def in_thread(tell: Callable[..., object],
              complain: Callable[[str], None] = lambda _: None) -> Iterator[Callable[..., None]]:
    """The same in a thread: whoever calls it does not wait for the terminal. At the end, `complain` has its errors."""
    with WriterThread(complain) as write:
        def told(*what: Any) -> None:
            write(partial(tell, *what))

        yield told
