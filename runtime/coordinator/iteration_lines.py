"""A file with a line for each committed iteration, from which lines are dropped that are to be written again."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.runtime.coordinator.appended_file import AppendedFile, Complain, silently
from slipstream.runtime.events import encode
from slipstream.schedules.files import write_atomically


class IterationLines:
    """Appends to the file. Lines of iterations before `first` that an earlier run has left stay.

    Raises OSError where the file cannot be opened, or made anew to go back, and never where a line cannot be written.
    """

    def __init__(self, path: Path, first: int, complain: Complain = silently) -> None:
        self._path = path
        self._complain = complain
        self._file = self._kept(first)

    def _kept(self, first: int) -> AppendedFile:
        """The file with the lines of iterations before `first`."""
        kept = [line + "\n" for line in lines_before(self._path, first)] if first else []
        write_atomically(self._path, "".join(kept).encode())  # whoever is killed here has lost none
        return AppendedFile(self._path, self._complain)

    def go_back(self, iteration: int) -> None:
        """Drop the lines from an iteration on."""
        self._file.close()
        self._file = self._kept(iteration)

    def append(self, line: msgspec.Struct) -> None:
        """Write a line, which is there for other processes when this returns."""
        self._file.append(encode(line))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def lines_before(path: Path, iteration: int) -> Iterator[str]:
    """The whole lines of iterations before this one; none where there is no file."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            if msgspec.json.decode(line)["iteration"] < iteration:
                yield line
