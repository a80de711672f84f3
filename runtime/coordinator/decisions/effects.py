"""Effects: what is to be done outside because of an event, once it has been handled.

Besides what is here, an event of the run (`runtime.events`) is one: write it, with what it is about: the schedule of an
order, the losses that are given up. What is `Noted`, people are told, too. A question (`questions`): find its
answer, which comes as an event. A `SpeedEvent`, a `Recovery` or a text: tell people. What is committed
(`commit_log`), and what another coordinator's run is gone on with from (`failover`): write the losses.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from slipstream.runtime.protocol.to_worker import ToWorker
from slipstream.schedules.schedule import Worker


class Send(msgspec.Struct, frozen=True):
    """Send a message to workers; nothing happens where one is gone."""

    workers: tuple[Worker, ...]
    message: ToWorker


class GiveUp(msgspec.Struct, frozen=True):
    """End a worker's processes, and count it as lost."""

    worker: Worker
    reason: str


class Effects:
    """Collects those of one event, which happened `at` a time by time.monotonic."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.effects: list[Any] = []

    def do(self, effect: object) -> None:
        """Have something done."""
        self.effects.append(effect)

    def send(self, workers: Iterable[Worker], message: ToWorker) -> None:
        """Send a message to workers."""
        self.effects.append(Send(tuple(workers), message))
