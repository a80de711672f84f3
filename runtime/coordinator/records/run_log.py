"""Run log: the record of a run. What happens goes to `events.jsonl`, a line for each iteration that is committed to
`losses.jsonl` and `metrics.jsonl`, and to TensorBoard's files where wanted; each schedule of an order is kept once.

All of the coordinator that has something to tell calls `RunLog.write` with one struct of `runtime.events`. The log
fills in when that was. Where the run goes back, or another coordinator goes on, the lines of iterations that are run
again are dropped, so that each iteration has one in each file.
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

from slipstream.runtime.coordinator.decisions.orders import digest_of
from slipstream.runtime.coordinator.records.appended_file import AppendedFile, IterationLines
from slipstream.runtime.coordinator.records.metrics import IterationMetrics
from slipstream.runtime.coordinator.records.tensorboard import TensorBoard
from slipstream.runtime.coordinator.records.writer_thread import AT_ONCE, Writer
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

Progress = Callable[[int, float], None]
"""Called with the number and the loss of each iteration that is committed, in order."""


class RunLog:
    """Appends to the files in a run's folder. Raises OSError where they cannot be opened, and never later.

    Lines of iterations before `first` that an earlier run left stay. Metrics are written before losses: whoever is
    killed between the two has no iteration among the losses that the metrics lack. `write` has files written, and says
    where that cannot be. Raises ConfigError where there is a folder for TensorBoard, and its package is not installed.
    """

    def __init__(self, folder: Path, first: int = 0, write: Writer = AT_ONCE, *,
                 metrics: IterationMetrics | None = None, tensorboard: Path | None = None,
                 observer: Observer = lambda _: None, iteration_observer: IterationObserver = lambda _: None,
                 progress: Progress = lambda *_: None) -> None:
        self._folder = folder
        self._write = write
        self.iteration = first
        """The first iteration that is not committed."""
        self._metrics = metrics
        self._observer = observer
        self._iteration_observer = iteration_observer
        self._progress = progress
        self._began, self._began_wall = time.monotonic(), round(time.time(), 3)
        self._kept: set[str] = set()
        self._shown: list[IterationLines | TensorBoard] = []
        """Where metrics go."""
        if metrics is not None:
            self._shown.append(IterationLines(folder / METRICS, first, write.say))
        if tensorboard is not None:
            self._shown.append(TensorBoard(tensorboard, first))
        self._events = AppendedFile(folder / EVENTS, write.say)
        self._losses = IterationLines(folder / LOSSES, first, write.say)

    def write(self, event: Event) -> None:
        """Enter an event, which happens now."""
        now = self._now()
        stamped = replace(event, time=now, seconds=round(now - self._began_wall, 3), iteration=self.iteration)
        self._write(partial(self._events.append, stamped))
        if self._metrics is not None:
            self._metrics.observe(stamped)
        self._observer(stamped)

    def commit(self, iteration: int, loss: float, period_seconds: float | None = None, *,
               gradient_norm: float | None = None, evaluation: float | None = None, cost_error: float | None = None
               ) -> None:
        """Enter the next iteration, which is committed now; what is known of it besides."""
        line = Iteration(iteration=iteration, loss=loss if math.isfinite(loss) else None,
                         period=None if period_seconds is None else round(period_seconds, 6), time=self._now(),
                         cost_error=None if cost_error is None else round(cost_error, 4))
        self.iteration = iteration + 1
        if self._metrics is not None:
            shown = self._metrics.of(line, gradient_norm, evaluation)
            for file in self._shown:
                self._write(partial(file.append, shown))
            self._iteration_observer(shown)
        self._write(partial(self._losses.append, line))
        self._progress(iteration, loss)

    def go_back(self, iteration: int) -> None:
        """Drop the lines of iterations from this one on, which are to be repeated."""
        self.iteration = iteration
        for file in (*self._shown, self._losses):
            self._write(partial(file.go_back, iteration))

    def keep(self, schedule: bytes) -> None:
        """Keep a schedule in the folder; events name it by its digest."""
        self._write(partial(self._keep, schedule))

    def _now(self) -> float:
        """Seconds since 1970, in milliseconds. It never goes back, whoever sets the clock."""
        return round(self._began_wall + time.monotonic() - self._began, 3)

    def _keep(self, schedule: bytes) -> None:
        digest = digest_of(schedule)
        if digest not in self._kept:
            self._kept.add(digest)
            path = self._folder / SCHEDULES / f"{digest}.json"
            temporary = path.with_name(f".{path.name}.{os.getpid():08}")
            try:
                path.parent.mkdir(exist_ok=True)
                temporary.write_bytes(schedule)  # not flushed: members wait, and the digest shows whether it is whole
                temporary.replace(path)
            except OSError as error:
                self._kept.discard(digest)
                self._write.say(f"{path} cannot be written: {error.strerror}; the run goes on")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._shown, self._events, self._losses):
            self._write(file.close)


def read_losses(folder: Path, first: int) -> list[float] | None:
    """The losses in a run's folder from an iteration on, as far as they are there without a gap; None where there are
    none."""
    path = folder / LOSSES
    if not path.exists():
        return None
    losses: list[float] = []
    for line in path.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):
            one = decode_iteration(line)
            if one.iteration == first + len(losses):
                losses.append(math.nan if one.loss is None else one.loss)
    return losses
