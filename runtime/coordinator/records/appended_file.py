"""Files to which lines are appended. A write error never ends a run: lines wait until they can be written."""

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path

import msgspec

from slipstream.runtime.events import encode

MAX_UNWRITTEN_LINES = 100_000
"""Largest number of lines that wait to be written; if there are more, the oldest are dropped."""


class AppendedFile:
    """File to which whole lines are appended without buffering.

    Each line is written by one call, and other processes can read it when that returns. An incomplete last line that a
    crash has left is removed. Raises OSError if the file cannot be opened; `append` never does: if a disk is full,
    `say` is called once with a line for users, and once more when the disk has free space again and the waiting lines
    are written.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._unwritten: deque[bytes] = deque(maxlen=MAX_UNWRITTEN_LINES)
        self._told = False
        self._file = FileIO(path, "ab+")
        self._size = self._file.truncate(_find_complete_size(self._file))

    def append(self, line: msgspec.Struct) -> None:
        """Write a struct as a line of JSON, after all lines that still wait to be written."""
        self._unwritten.append(encode(line) + b"\n")
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten[0])
                if written != len(self._unwritten[0]):
                    raise OSError("no space left")
                self._size += written
                self._unwritten.popleft()
            if self._told:
                self._told = False
                self._say(f"{self._path} is written again")
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)  # else half a line and the next one become one line
            if not self._told:
                self._told = True
                self._say(f"{self._path} cannot be written: {error.strerror or error}; the run continues, and writes "
                          "what waits when it can")

    def truncate_from(self, keeps: Callable[[bytes], bool]) -> None:
        """Drop the first line for which `keeps` is False, and all lines after it. This needs no free disk space. Raises
        OSError."""
        self._unwritten = deque((line for line in self._unwritten if keeps(line)), MAX_UNWRITTEN_LINES)
        self._file.seek(0)
        size = 0
        with BufferedReader(FileIO(os.dup(self._file.fileno()))) as lines:
            for line in lines:
                if not keeps(line):
                    break
                size += len(line)
        self._size = self._file.truncate(size)

    def close(self) -> None:
        """Close the file; lines that could not be written are lost, and users are told how many."""
        if self._unwritten:
            self._say(f"{self._path} lacks the last {len(self._unwritten)} of its lines, which could not be written")
        self._file.close()


class IterationLines(AppendedFile):
    """File with a line for each committed iteration. When it is opened, only lines of iterations before `first` are
    kept.

    Raises OSError if the file cannot be opened or truncated.
    """

    def __init__(self, path: Path, first: int, say: Callable[[str], None]) -> None:
        super().__init__(path, say)
        self.drop_iterations_from(first)

    def drop_iterations_from(self, iteration: int) -> None:
        """Drop the lines from an iteration on, which will be written again."""
        self.truncate_from(lambda line: _is_line_before(line, iteration))


def _is_line_before(line: bytes, iteration: int) -> bool:
    try:
        return bool(msgspec.json.decode(line)["iteration"] < iteration)
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


def _find_complete_size(file: FileIO) -> int:
    """Return the size of a file without an incomplete last line."""
    size = file.seek(0, os.SEEK_END)
    while size:
        begin = max(0, size - 2**16)
        file.seek(begin)
        newline = file.read(size - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        size = begin
    return 0
