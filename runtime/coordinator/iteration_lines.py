"""A file with a line for each committed iteration, from which lines are dropped that are to be written again."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from slipstream.runtime.coordinator.appended_file import AppendedFile, Complain, silently
from slipstream.runtime.events import encode


class IterationLines:
    """Appends to the file. Lines of iterations before `first` that an earlier run has left stay.

    Raises OSError where the file cannot be opened, or cut to go back, and never where a line cannot be written.
    """

    def __init__(self, path: Path, first: int, complain: Complain = silently) -> None:
        self._file = AppendedFile(path, complain)
        self.go_back(first)

    def go_back(self, iteration: int) -> None:
        """Drop the lines from an iteration on."""
        self._file.cut(lambda line: _is_before(line, iteration))

    def append(self, line: msgspec.Struct) -> None:
        """Write a line, which is there for other processes when this returns."""
        self._file.append(encode(line))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def lines_before(path: Path, iteration: int) -> Iterator[bytes]:
    """The whole lines of iterations before this one; none where there is no file."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        if _is_before(line, iteration):
            yield line


def _is_before(line: bytes, iteration: int) -> bool:
    try:
        return bool(msgspec.json.decode(line)["iteration"] < iteration)
    except (msgspec.DecodeError, KeyError, TypeError):
        return False
