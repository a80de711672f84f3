"""Event log: writes `events.jsonl`, and keeps each schedule that an order uses, once.

All of the coordinator that has something to tell calls `EventLog.write` with one struct of `runtime.events`. The log
fills in when that was.
"""

import hashlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from slipstream.runtime.coordinator.appended_file import AppendedFile
from slipstream.runtime.coordinator.writer import AT_ONCE, Writer
from slipstream.runtime.events import EVENTS, SCHEDULES, Event

DIGEST_LENGTH = 16
Observer = Callable[[Event], None]
"""Called with each event, on the coordinator's thread."""


class EventLog:
    """Appends to the file in a run's folder. Raises OSError where that cannot be opened, and never later.

    Parameters
    ----------
    folder
        The run's; None: only the observer is told.
    write
        Has files written, and says where that cannot be.
    """

    def __init__(self, folder: Path | None, observer: Observer = lambda _: None,
                 write: Writer = AT_ONCE) -> None:
        self._folder = folder
        self._write = write
        self.iteration = 0
        """The first iteration that is not committed."""
        self._observer = observer
        self._began, self._began_wall = time.monotonic(), round(time.time(), 3)
        self._kept: set[str] = set()
        self._file = None if folder is None else AppendedFile(folder / EVENTS, write.say)

    def write(self, event: Event) -> None:
        """Enter an event, which happens now."""
        now = self.now()
        stamped = replace(event, time=now, seconds=round(now - self._began_wall, 3), iteration=self.iteration)
        if self._file is not None:
            self._write(partial(self._file.append, stamped))
        self._observer(stamped)

    def now(self) -> float:
        """Seconds since 1970, in milliseconds. It never goes back, whoever sets the clock."""
        return round(self._began_wall + time.monotonic() - self._began, 3)

    def keep(self, schedule: bytes) -> None:
        """Keep a schedule in the folder; events name it by its digest."""
        if self._folder is not None:
            self._write(partial(self._keep, self._folder, schedule))

    def _keep(self, folder: Path, schedule: bytes) -> None:
        digest = digest_of(schedule)
        if digest not in self._kept:
            self._kept.add(digest)
            path = folder / SCHEDULES / f"{digest}.json"
            temporary = path.with_name(f".{path.name}.{os.getpid():08}")
            try:
                path.parent.mkdir(exist_ok=True)
                temporary.write_bytes(schedule)  # not flushed: members wait, and the digest shows whether it is whole
                temporary.replace(path)
            except OSError as error:
                self._kept.discard(digest)
                self._write.say(f"{path} cannot be written: {error.strerror}; the run goes on")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._write(self._file.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digest_of(schedule: bytes) -> str:
    """By which events name a schedule."""
    return hashlib.sha256(schedule).hexdigest()[:DIGEST_LENGTH]


def both(one: Observer, other: Observer) -> Observer:
    """Two observers as one."""
    def observe(event: Event) -> None:
        one(event)
        other(event)

    return observe
