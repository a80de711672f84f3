"""Keep the record of a run in files; a write error never ends it.

Events are written to `events.jsonl`. Each committed iteration has a line in `losses.jsonl` and
`metrics.jsonl` and, if requested, an entry in TensorBoard's files. Each schedule of an order is
stored once. If the run goes back, or another coordinator continues it, the lines of iterations that
are run again are dropped, so that each iteration has one line in each file.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.effects import compute_schedule_digest
from slipstream.runtime.coordinator.records.metrics import (
    MetricsBuilder,
    PrometheusFile,
    TensorBoardWriter,
)
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
    encode,
)

MAX_UNWRITTEN_LINES = 100_000
"""Largest number of lines that wait to be written; then the oldest are dropped."""


class AppendedFile:
    """File to which whole lines are appended without buffering.

    Each line is written by one call, and other processes can read the line when the call returns.
    An incomplete last line that a crash has left is removed. Raises OSError if the file cannot be
    opened; while writing fails, lines wait. `say` is called with a line for users when lines begin
    to wait, and when they are written again.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._unwritten: deque[bytes] = deque(maxlen=MAX_UNWRITTEN_LINES)
        self._has_complained = False
        self._file = FileIO(path, "ab+")
        self._size = self._file.truncate(_find_complete_size(self._file))

    def append(self, line: msgspec.Struct) -> None:
        """Write a struct as a line of JSON, after all lines that still wait."""
        self._unwritten.append(encode(line) + b"\n")
        # A line is forgotten only when all of it is in the file: a full disk may take half a line.
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten[0])
                if written != len(self._unwritten[0]):
                    raise OSError("no space left")
                self._size += written
                self._unwritten.popleft()
            if self._has_complained:
                self._has_complained = False
                self._say(f"{self._path} is written again")
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)  # else half a line and the next one become one line
            if not self._has_complained:
                self._has_complained = True
                self._say(
                    f"{self._path} cannot be written: {error.strerror or error}; the run "
                    "continues, and writes what waits when it can"
                )

    def truncate_from(self, keeps: Callable[[bytes], bool]) -> None:
        """Remove the first line for which `keeps` is False, and all after it.

        Of lines that wait, those for which it is True stay. Raises OSError.
        """
        self._unwritten = deque(
            (line for line in self._unwritten if keeps(line)), MAX_UNWRITTEN_LINES
        )
        self._file.seek(0)
        size = 0
        with BufferedReader(FileIO(os.dup(self._file.fileno()))) as lines:
            for line in lines:
                if not keeps(line):
                    break
                size += len(line)
        self._size = self._file.truncate(size)

    def close(self) -> None:
        """Close the file, and tell users how many lines are lost, if any."""
        if self._unwritten:
            self._say(
                f"{self._path} lacks the last {len(self._unwritten)} of its lines, which could "
                "not be written"
            )
        self._file.close()


class IterationLines(AppendedFile):
    """File with a line for each committed iteration.

    If the file exists, only its lines of iterations before `first` are kept. Raises OSError if the
    file cannot be opened or truncated.
    """

    def __init__(self, path: Path, first: int, say: Callable[[str], None]) -> None:
        super().__init__(path, say)
        self.drop_iterations_from(first)

    def drop_iterations_from(self, iteration: int) -> None:
        """Remove the lines of `iteration` and later ones, which will be written again."""
        self.truncate_from(lambda line: _is_line_before(line, iteration))


def _is_line_before(line: bytes, iteration: int) -> bool:
    try:
        return bool(msgspec.json.decode(line)["iteration"] < iteration)
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


def _find_complete_size(file: FileIO) -> int:
    # Search the last newline from the end: the file of a long run is large.
    size = file.seek(0, os.SEEK_END)
    while size:
        begin = max(0, size - 2**16)
        file.seek(begin)
        newline = file.read(size - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        size = begin
    return 0


ProgressCallback = Callable[[int, float], None]
"""Function that is called with each committed iteration and its loss, in order."""


class RunLog:
    """Log of a run: appends events, losses and metrics to files in its folder.

    Losses and metrics that an earlier run has left are kept for iterations before `first`, events
    all. The writer passed as `write` runs the file operations. Lines that cannot be written wait; a
    `WriterThread` reports that, the default does not. Other errors are reported by a `WriterThread`
    and raised by the default. Raises OSError if a file cannot be opened, and ConfigError if
    `tensorboard` is given and its package is not installed.
    """

    def __init__(
        self,
        folder: Path,
        first: int = 0,
        write: Writer = IMMEDIATE_WRITER,
        *,
        metrics: MetricsBuilder | None = None,
        tensorboard: Path | None = None,
        prometheus: Path | None = None,
        observer: Observer = lambda _: None,
        iteration_observer: IterationObserver = lambda _: None,
        progress: ProgressCallback = lambda *_: None,
    ) -> None:
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
        """Writers of metrics: to `metrics.jsonl` and, if requested, TensorBoard and Prometheus."""
        # All files are opened now, so that a folder that cannot be written ends the run at once.
        if metrics is not None:
            self._shown.append(IterationLines(folder / METRICS, first, write.report_problem))
        if tensorboard is not None:
            self._shown.append(TensorBoardWriter(tensorboard, first))
        if prometheus is not None:
            self._shown.append(PrometheusFile(prometheus, str(folder), write.report_problem))
        self._events = AppendedFile(folder / EVENTS, write.report_problem)
        self._losses = IterationLines(folder / LOSSES, first, write.report_problem)

    def write(self, event: Event) -> None:
        """Write an event with the present time to `events.jsonl`; pass it to the observer."""
        now = self._current_time()
        stamped = replace(
            event, time=now, seconds=round(now - self._began_wall, 3), iteration=self.iteration
        )
        self._write(partial(self._events.append, stamped))
        if self._metrics is not None:
            self._metrics.observe_event(stamped)
        self._observer(stamped)

    def write_iteration(
        self,
        iteration: int,
        loss: float,
        period_seconds: float | None = None,
        *,
        gradient_norm: float | None = None,
        evaluation: float | None = None,
        cost_error: float | None = None,
    ) -> None:
        """Write the loss and the metrics of the iteration that is committed now.

        The observers are called, too. Each of the following is None if it is not known.

        Parameters
        ----------
        period_seconds
            Longest busy window of any worker.
        gradient_norm
            Norm of all gradients before clipping.
        evaluation
            Validation loss.
        cost_error
            Relative error of the times that samples were expected to take.
        """
        # Metrics come before losses: a process killed between the two leaves no iteration whose
        # loss is there and whose metrics are not.
        line = Iteration(
            iteration=iteration,
            loss=loss if math.isfinite(loss) else None,
            period=None if period_seconds is None else round(period_seconds, 6),
            time=self._current_time(),
            cost_error=None if cost_error is None else round(cost_error, 4),
        )
        self.iteration = iteration + 1
        if self._metrics is not None:
            shown = self._metrics.build_metrics(line, gradient_norm, evaluation)
            for file in self._shown:
                self._write(partial(file.append, shown))
            self._iteration_observer(shown)
        self._write(partial(self._losses.append, line))
        self._progress(iteration, loss)

    def drop_iterations_from(self, iteration: int) -> None:
        """Remove the lines of `iteration` and later ones, which will be repeated."""
        self.iteration = iteration
        for file in (*self._shown, self._losses):
            self._write(partial(file.drop_iterations_from, iteration))

    def store_schedule(self, schedule: bytes) -> None:
        """Store the contents of a schedule file in the run's folder, named by their digest."""
        self._write(partial(self._write_schedule, schedule))

    def _current_time(self) -> float:
        return round(self._began_wall + time.monotonic() - self._began, 3)

    def _write_schedule(self, schedule: bytes) -> None:
        # Several orders may have the same schedule.
        digest = compute_schedule_digest(schedule)
        if digest not in self._kept:
            self._kept.add(digest)
            path = self._folder / SCHEDULES / f"{digest}.json"
            temporary = path.with_name(f".{path.name}.{os.getpid():08}")
            try:
                path.parent.mkdir(exist_ok=True)
                # No fsync: members wait, and the digest detects a torn file.
                temporary.write_bytes(schedule)
                temporary.replace(path)
            except OSError as error:
                self._kept.discard(digest)
                self._write.report_problem(
                    f"{path} cannot be written: {error.strerror}; the run continues"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._shown, self._events, self._losses):
            self._write(file.close)


def read_losses(folder: Path, first: int) -> list[float] | None:
    """Return a run's losses from iteration `first` up to a gap; None without a file.

    A loss that was not finite is NaN. Raises OSError if the file cannot be read.
    """
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
