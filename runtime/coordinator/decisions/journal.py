"""Journal: what a restarted coordinator knows from the events that earlier coordinators wrote to `events.jsonl`.

The progress of the workers and the layers that they hold are not in it; the workers report them (`failover`).
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
    decode_event,
)
from slipstream.schedules.schedule import Worker


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the events of one run, over all coordinators that have led it."""

    began: float | None = None
    """Time of the run's first order, on this process's `time.monotonic` clock, as is the time in `checkpoint`."""
    failures: int = 0
    """Number of failures of workers since the first order; workers of one machine that were lost together count as
    one."""
    speeds: Mapping[Worker, float] = {}
    """Factor by which each worker's ops were last measured to take longer than usual, for workers that were ever
    slow."""
    checkpoint: CheckpointWritten | None = None
    """Event of the last complete checkpoint; None if there is none."""

    def with_event(self, event: Event) -> "Journal":
        """Return the journal after the next event; the first order of a run begins a new journal."""
        match event:
            case OrderGiven(order=1):
                return Journal(began=event.time)  # earlier events belong to another run in the same folder
            case Slowed():
                return replace(self, speeds={**self.speeds, event.worker: event.factor})
            case Recovered():
                return replace(self, speeds={**self.speeds, event.worker: 1.0})
            case Failed():
                return replace(self._without_speed_of(event.worker), failures=self.failures + 1)
            case Joined():  # it may be on another machine now, or its usual speed is assumed again
                return self._without_speed_of(event.worker)
            case NodeLost():
                return replace(self, failures=self.failures + 1 - len(event.workers))
            case CheckpointWritten():
                return replace(self, checkpoint=event)
        return self

    def _without_speed_of(self, worker: Worker) -> "Journal":
        return replace(self, speeds={other: factor for other, factor in self.speeds.items() if other != worker})


EMPTY_JOURNAL = Journal()


def read_journal(folder: Path) -> Journal:
    """Return the journal of a run's folder; lines that cannot be decoded and a missing file are ignored."""
    journal = EMPTY_JOURNAL
    with suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                journal = journal.with_event(decode_event(line))
    now, wall, last = time.monotonic(), time.time(), journal.checkpoint
    return replace(
        journal, began=None if journal.began is None else now - max(0.0, wall - journal.began),
        checkpoint=None if last is None else replace(last, time=now - max(0.0, wall - last.time)))
