"""Show the progress of `slipstream train` from the events of the run: phase, live workers and throughput."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from slipstream.cli.shared.console import err
from slipstream.cli.shared.run_summary import run_time
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

RECENT_ITERATIONS = 10
"""Number of iterations over which the throughput is averaged."""


class RunProgress:
    """Progress of a run, updated by each event and each committed iteration.

    Parameters
    ----------
    tokens
        Number of tokens in a sample; None if samples do not consist of tokens.
    """

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens
        self._workers = self._samples = self._live = self._iterations = self._done = 0
        self._fault_free: float | None = None
        self._planned: float | None = None
        self._phase: Phase | None = None
        self._fetched: float | None = None
        """Share of the layers that have been copied for a better schedule; None if no such fetch is in progress."""
        self._fetch = 0
        self._committed: deque[float] = deque(maxlen=RECENT_ITERATIONS + 1)
        """Times at which the last iterations of this generation were committed."""

    def observe(self, event: Event) -> None:
        """Update phase, live workers and copied layers according to an event of the run."""
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

    def record_commit(self, iteration: int) -> None:
        """Record that an iteration was committed."""
        self._done = iteration + 1
        self._committed.append(time.monotonic())

    @property
    def phase(self) -> str:
        """Name of the phase or, while layers are fetched to even out the load, `settling` with the share that has
        arrived. Empty before the first generation."""
        return f"settling {self._fetched:.0%}".replace("%", " %") if self._fetched is not None else self._phase or ""

    @property
    def throughput(self) -> float | None:
        """Throughput over the last iterations, in tokens per second, or in samples per second if samples do not consist
        of tokens; None until the present workers have committed two of them."""
        seconds = self._iteration_seconds
        return None if seconds is None else (self._tokens or 1) * self._samples / seconds

    @property
    def seconds_left(self) -> float | None:
        """Remaining time, in seconds, if further iterations take as long as the last ones. None if that is unknown."""
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
        parts = [self.phase, f"{self._live} of {self._workers} workers"]
        rate, seconds_left = self.throughput, self.seconds_left
        unit = "samples/s" if self._tokens is None else "tokens/s"
        parts += [] if rate is None else [f"{_format_count(rate)} {unit}"]
        parts += [] if not seconds_left else [f"{run_time(seconds_left)} left"]
        if self._fault_free and self._planned:
            parts.append(f"planned {100 * self._fault_free / self._planned:.0f} % of fault-free")
        return ", ".join(parts)


def _format_count(number: float) -> str:
    """Format a number with commas between thousands, rounded to an integer or, below 100, to three significant
    digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


@dataclass(frozen=True, slots=True)
class ProgressDisplay:
    """Progress bar on stderr, with a line above it for each iteration and for each change of workers.

    A thread prints everything, so that callers do not wait for the terminal.
    """

    bar: Progress
    task: TaskID
    progress: RunProgress
    write: WriterThread

    def show_commit(self, iteration: int, loss: float) -> None:
        """Show a committed iteration. Without a progress bar, its line also has what the bar would show."""
        self.write(partial(self._print_commit, iteration, loss))

    def show_event(self, event: Event) -> None:
        """Update the progress bar after an event of the run."""
        self.write(partial(self._update_bar, event))

    def show_message(self, news: object) -> None:
        """Print a line about a change of workers or a problem (`news`, by its text)."""
        self.write(lambda: self.bar.console.print(str(news), style="yellow", soft_wrap=True))

    def _print_commit(self, iteration: int, loss: float) -> None:
        self.progress.record_commit(iteration)
        self.bar.update(self.task, completed=iteration + 1, description=f"loss {loss:.4f}, {self.progress}")
        state = f"  {self.progress}" if self.bar.disable else ""
        self.bar.console.print(f"iteration {iteration:>6}  loss {loss:.6f}{state}", soft_wrap=True)

    def _update_bar(self, event: Event) -> None:
        self.progress.observe(event)
        self.bar.update(self.task, description=str(self.progress) or None)


@contextmanager
def show_progress(iterations: int, tokens: int | None) -> Iterator[ProgressDisplay]:
    """Show a progress bar on stderr within the context, and yield the display, to which the caller passes commits and
    events of a run.

    The run has `iterations` iterations, and a sample has `tokens` tokens (None: it does not consist of tokens).
    """
    what = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), what)  # a narrow terminal cuts what comes last
    with Progress(*columns, console=err, transient=True, expand=True, disable=not err.is_terminal) as bar, \
            WriterThread() as write:
        if bar.disable:  # a log: the first iteration may be a minute away
            write(lambda: err.print("starting the workers"))
        yield ProgressDisplay(bar, bar.add_task("starting the workers", total=iterations), RunProgress(tokens), write)


@contextmanager
def call_in_thread(tell: Callable[..., object],
                   complain: Callable[[str], None] = lambda _: None) -> Iterator[Callable[..., None]]:
    """Yield a function that calls `tell` with its arguments in a thread, so that callers do not wait for the terminal.

    At the end of the context, `complain` receives the errors of the thread.
    """
    with WriterThread(complain) as write:
        def call_later(*what: Any) -> None:
            write(partial(tell, *what))

        yield call_later
