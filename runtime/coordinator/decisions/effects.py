"""Effects: actions that the event loop carries out after an event has been handled.

Besides the classes below, the following objects are effects:

- an event of the run (`runtime.events`): write it, and store the schedule of an order or drop the losses of a rollback
  that belong to it; a `Noted` event is also reported to users;
- a request (`schedule_requests`, `speed_planning`): find the answer, which arrives as an event;
- a `SpeedEvent`, a `Recovery` or a string: report it to users;
- a committed iteration (`commit_log`), or the result of a failover (`failover`): write the losses.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from slipstream.runtime.protocol.to_worker import ToWorker
from slipstream.schedules.schedule import Worker


class SendMessage(msgspec.Struct, frozen=True):
    """Effect: send a message to workers. A worker that is not connected is skipped."""

    workers: tuple[Worker, ...]
    message: ToWorker


class GiveUpWorker(msgspec.Struct, frozen=True):
    """Effect: kill the processes of a worker and count it as lost."""

    worker: Worker
    reason: str


class EffectCollector:
    """Collector of the effects of one event, which happened at `at`, a time of `time.monotonic`."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.effects: list[Any] = []

    def add_effect(self, effect: object) -> None:
        """Add an effect, which is carried out after the effects that were added before it."""
        self.effects.append(effect)

    def send(self, workers: Iterable[Worker], message: ToWorker) -> None:
        """Add the effect of sending a message to workers."""
        self.effects.append(SendMessage(tuple(workers), message))
