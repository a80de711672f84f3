"""Run log: the record of a run.

Events are written to `events.jsonl`. Each committed iteration has a line in `losses.jsonl` and `metrics.jsonl` and, if
requested, an entry in TensorBoard's files. Each schedule of an order is stored once. Every part of the coordinator that
reports an event calls `RunLog.write` with a struct of `runtime.events`; the log adds the time. If the run goes back, or
another coordinator continues it, the lines of iterations that are run again are dropped, so that each iteration has one
line in each file.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.effects import compute_schedule_digest
from slipstream.runtime.coordinator.records.appended_file import AppendedFile, IterationLines
from slipstream.runtime.coordinator.records.metrics import MetricsBuilder
from slipstream.runtime.coordinator.records.prometheus import PrometheusFile
from slipstream.runtime.coordinator.records.tensorboard import TensorBoardWriter
from slipstream.runtime.coordinator.records.writer_thread import IMMEDIATE_WRITER, Writer
from slipstream.runtime.events import (
    EVENTS,
    LOSSES,
    METRICS,
    SCHEDULES,
    Event,
    Iteration,
    IterationObserver,
    Observer,
    decode_iteration,
)

ProgressCallback = Callable[[int, float], None]
"""Function that is called with the number and the loss of each committed iteration, in order."""


class RunLog:
    """Log that appends to the files in a run's folder.

    Lines that an earlier run has left are kept for iterations before `first`. Metrics are written before losses, so
    that a process killed between the two leaves no iteration whose loss is there and whose metrics are not. The writer
    passed as `write` runs the file operations and reports those that fail. Raises OSError if a file cannot be opened,
    but never later, and ConfigError if `tensorboard` is given and its package is not installed.
    """

    def __init__(self, folder: Path, first: int = 0, write: Writer = IMMEDIATE_WRITER, *,
                 metrics: MetricsBuilder | None = None, tensorboard: Path | None = None,
                 prometheus: Path | None = None,
                 observer: Observer = lambda _: None, iteration_observer: IterationObserver = lambda _: None,
                 progress: ProgressCallback = lambda *_: None) -> None:
        self._folder = folder
        self._write = write
        self.iteration = first
        """First iteration that is not committed."""
        self._metrics = metrics
        self._observer = observer
        self._iteration_observer = iteration_observer
        self._progress = progress
        self._began, self._began_wall = time.monotonic(), round(time.time(), 3)
        self._kept: set[str] = set()
        self._shown: list[IterationLines | TensorBoardWriter | PrometheusFile] = []
        """Writers of the metrics of iterations: `metrics.jsonl` and, if requested, files for TensorBoard and
        Prometheus."""
        if metrics is not None:
            self._shown.append(IterationLines(folder / METRICS, first, write.report_problem))
        if tensorboard is not None:
            self._shown.append(TensorBoardWriter(tensorboard, first))
        if prometheus is not None:
            self._shown.append(PrometheusFile(prometheus, str(folder), write.report_problem))
        self._events = AppendedFile(folder / EVENTS, write.report_problem)
        self._losses = IterationLines(folder / LOSSES, first, write.report_problem)

    def write(self, event: Event) -> None:
        """Write an event to `events.jsonl`, with the present time."""
        now = self._current_time()
        stamped = replace(event, time=now, seconds=round(now - self._began_wall, 3), iteration=self.iteration)
        self._write(partial(self._events.append, stamped))
        if self._metrics is not None:
            self._metrics.observe_event(stamped)
        self._observer(stamped)

    def write_iteration(self, iteration: int, loss: float, period_seconds: float | None = None, *,
                        gradient_norm: float | None = None, evaluation: float | None = None,
                        cost_error: float | None = None) -> None:
        """Write the loss and the metrics of the next iteration, which is committed now.

        The argument `period_seconds` is the longest busy window of any worker, `evaluation` the validation loss, and
        `cost_error` the relative error of the times that samples were expected to take. None: not known.
        """
        line = Iteration(iteration=iteration, loss=loss if math.isfinite(loss) else None,
                         period=None if period_seconds is None else round(period_seconds, 6), time=self._current_time(),
                         cost_error=None if cost_error is None else round(cost_error, 4))
        self.iteration = iteration + 1
        if self._metrics is not None:
            shown = self._metrics.build_metrics(line, gradient_norm, evaluation)
            for file in self._shown:
                self._write(partial(file.append, shown))
            self._iteration_observer(shown)
        self._write(partial(self._losses.append, line))
        self._progress(iteration, loss)

    def drop_iterations_from(self, iteration: int) -> None:
        """Drop the lines of iterations from the given one on, which will be repeated."""
        self.iteration = iteration
        for file in (*self._shown, self._losses):
            self._write(partial(file.drop_iterations_from, iteration))

    def store_schedule(self, schedule: bytes) -> None:
        """Store a schedule, given as the contents of its file, in the run's folder; its digest names it in events."""
        self._write(partial(self._write_schedule, schedule))

    def _current_time(self) -> float:
        """Return the seconds since 1970, to milliseconds; they never decrease, even if the clock is set back."""
        return round(self._began_wall + time.monotonic() - self._began, 3)

    def _write_schedule(self, schedule: bytes) -> None:
        digest = compute_schedule_digest(schedule)
        if digest not in self._kept:
            self._kept.add(digest)
            path = self._folder / SCHEDULES / f"{digest}.json"
            temporary = path.with_name(f".{path.name}.{os.getpid():08}")
            try:
                path.parent.mkdir(exist_ok=True)
                temporary.write_bytes(schedule)  # no fsync: members wait, and the digest detects a torn file
                temporary.replace(path)
            except OSError as error:
                self._kept.discard(digest)
                self._write.report_problem(f"{path} cannot be written: {error.strerror}; the run continues")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._shown, self._events, self._losses):
            self._write(file.close)


def read_losses(folder: Path, first: int) -> list[float] | None:
    """Return the losses in a run's folder from an iteration on, up to the first gap; None if there is no file."""
    path = folder / LOSSES
    if not path.exists():
        return None
    losses: list[float] = []
    for line in path.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):
            iteration = decode_iteration(line)
            if iteration.iteration == first + len(losses):
                losses.append(math.nan if iteration.loss is None else iteration.loss)
    return losses
