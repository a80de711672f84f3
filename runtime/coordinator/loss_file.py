"""The file of losses: a line for each iteration, written when it is committed."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from slipstream.runtime.coordinator.appended_file import IterationLines
from slipstream.runtime.coordinator.metrics import MetricsRecorder
from slipstream.runtime.coordinator.writer import AT_ONCE, Writer
from slipstream.runtime.events import Iteration

Progress = Callable[[int, float], None]
"""Called with the number and the loss of each iteration that is committed, in order."""


def read_losses(path: Path, first: int) -> list[float] | None:
    """The losses from an iteration on, as far as they are there without a gap; None where there is no file."""
    if not path.exists():
        return None
    losses: list[float] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(msgspec.DecodeError):
            one = _LINE.decode(line)
            if one.iteration == first + len(losses):
                losses.append(math.nan if one.loss is None else one.loss)
    return losses


class _Line(msgspec.Struct, frozen=True):
    iteration: int
    loss: float | None


_LINE = msgspec.json.Decoder(_Line)


class LossFile:
    """Writes losses to the file, and calls `progress` with them. Raises OSError.

    Lines of iterations before `first` that an earlier run left in the file stay. `metrics` is told first: whoever is
    killed between the two has no iteration in the file of which the metrics lack.
    """

    def __init__(self, path: Path, first: int, progress: Progress | None,
                 metrics: MetricsRecorder | None = None, write: Writer = AT_ONCE) -> None:
        self._progress = progress
        self._metrics = metrics
        self._write = write
        self._lines = IterationLines(path, first, write.say)

    def go_back(self, iteration: int) -> None:
        """Drop the lines from an iteration on, which are to be repeated."""
        if self._metrics is not None:
            self._metrics.go_back(iteration)
        self._write(partial(self._lines.go_back, iteration))

    def write(self, iteration: int, loss: float, period_seconds: float | None, at: float,
              gradient_norm: float | None = None, evaluation: float | None = None,
              cost_error: float | None = None) -> None:
        """Enter the next iteration, committed at a time by `EventLog.now`; what else is known of it."""
        line = Iteration(iteration=iteration, loss=loss if math.isfinite(loss) else None,
                         period=None if period_seconds is None else round(period_seconds, 6), time=at,
                         cost_error=None if cost_error is None else round(cost_error, 4))
        if self._metrics is not None:
            self._metrics.committed(line, gradient_norm, evaluation)
        self._write(partial(self._lines.append, line))
        if self._progress is not None:
            self._progress(iteration, loss)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write(self._lines.close)
