"""Journal: what a coordinator that starts anew knows from the events of the one before it (`events.jsonl`).

How far all have come, and who holds what, it asks the workers (`failover`).
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from slipstream.runtime.events import (
    EVENTS,
    CheckpointWritten,
    Event,
    Failed,
    Joined,
    NodeLost,
    OrderGiven,
    Recovered,
    Slowed,
    decode,
)
from slipstream.schedules.schedule import Worker


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, whoever has led it."""

    began: float | None = None
    """By time.monotonic of now, like the checkpoint's: when its first order was given."""
    failures: int = 0
    """Workers of one machine that went together are one."""
    speeds: Mapping[Worker, float] = {}
    """What was found of workers: by which factor of the usual time they take longer."""
    checkpoint: CheckpointWritten | None = None
    """The last one."""

    def after(self, event: Event) -> "Journal":
        """With what has happened next."""
        match event:
            case OrderGiven(order=1):
                return Journal(began=event.time)  # what was before is of another run in the same folder
            case Slowed():
                return replace(self, speeds={**self.speeds, event.worker: event.factor})
            case Recovered():
                return replace(self, speeds={**self.speeds, event.worker: 1.0})
            case Failed():
                return replace(self._without(event.worker), failures=self.failures + 1)
            case Joined():  # on another machine, perhaps, or left out before, and quick again
                return self._without(event.worker)
            case NodeLost():
                return replace(self, failures=self.failures + 1 - len(event.workers))
            case CheckpointWritten():
                return replace(self, checkpoint=event)
        return self

    def _without(self, worker: Worker) -> "Journal":
        return replace(self, speeds={one: factor for one, factor in self.speeds.items() if one != worker})


NO_JOURNAL = Journal()


def read_journal(folder: Path) -> Journal:
    """That of a run's folder, as far as it can be read."""
    found = NO_JOURNAL
    with suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                found = found.after(decode(line))
    now, wall, last = time.monotonic(), time.time(), found.checkpoint
    return replace(
        found, began=None if found.began is None else now - max(0.0, wall - found.began),
        checkpoint=None if last is None else replace(last, time=now - max(0.0, wall - last.time)))
