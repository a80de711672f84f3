"""The file of losses: a line for each iteration, written when it is committed."""

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO

import msgspec

from runtime.events import Iteration, encode
from schedules.files import write_atomically

Progress = Callable[[int, float], None]
"""Called with the number and the loss of each iteration that is committed, in order."""


def read_losses(path: Path, first: int) -> list[float] | None:
    """The losses from an iteration on, as far as they are there without a gap; None where there is no file."""
    if not path.exists():
        return None
    losses: list[float] = []
    for line in path.read_text().splitlines():
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

    Lines of iterations before `first` that an earlier run left in the file stay.
    """

    def __init__(self, path: Path, first: int, progress: Progress | None) -> None:
        self._path = path
        self._progress = progress
        self._file = self._kept(first)

    def _kept(self, first: int) -> TextIO:
        """The file with the lines of iterations before `first`."""
        kept = []
        if first and self._path.exists():
            for line in self._path.read_text().splitlines():
                with suppress(msgspec.DecodeError, KeyError, TypeError):
                    if msgspec.json.decode(line)["iteration"] < first:
                        kept.append(line + "\n")
        write_atomically(self._path, "".join(kept).encode())  # whoever is killed here has lost none
        return self._path.open("a")

    def go_back(self, iteration: int) -> None:
        """Drop the lines from an iteration on, which are to be repeated."""
        self._file.close()
        self._file = self._kept(iteration)

    def write(self, iteration: int, loss: float, period_seconds: float | None, at: float) -> None:
        """Enter the next iteration, committed at a time by `EventLog.now`; the period where that is known."""
        line = Iteration(iteration=iteration, loss=loss if math.isfinite(loss) else None,
                         period=None if period_seconds is None else round(period_seconds, 6), time=at)
        self._file.write(encode(line).decode() + "\n")
        self._file.flush()
        if self._progress is not None:
            self._progress(iteration, loss)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
