"""Effects: actions that the event loop carries out after an event has been handled.

Besides the classes below, the following objects are effects:

- an event of the run (`runtime.events`): write it, and store the schedule of an order or drop the
  losses of a rollback that belong to it; a `Noted` event is also reported to users;
- a request (`ScheduleRequest`, `slow_workers.SpeedRequest`): find the answer, which arrives as an
  event, because planning takes seconds;
- a `SpeedEvent`, a `Recovery` or a string: report it to users;
- a committed iteration (`commit_log`), or the result of a failover (`failover`): write the losses,
  and start workers that are due.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from slipstream.runtime.events import Phase
from slipstream.runtime.protocol.to_worker import ToWorker
from slipstream.schedules.codec import encode
from slipstream.schedules.schedule import HeldLayers, NoScheduleError, Schedule, Speeds, Worker
from slipstream.schedules.shares import DividedSchedule


class SendMessage(msgspec.Struct, frozen=True):
    """Effect: send a message to workers. A worker that is not connected is skipped."""

    workers: tuple[Worker, ...]
    message: ToWorker


class GiveUpWorker(msgspec.Struct, frozen=True):
    """Effect: kill the processes of a worker and count it as lost."""

    worker: Worker
    reason: str


class EffectCollector:
    """Collector of the effects of one event, which happened at time `at` (`time.monotonic`)."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.effects: list[Any] = []

    def add_effect(self, effect: object) -> None:
        """Add an effect, to be carried out after those that were added before."""
        self.effects.append(effect)

    def send(self, workers: Iterable[Worker], message: ToWorker) -> None:
        """Add the effect of sending a message to workers."""
        self.effects.append(SendMessage(tuple(workers), message))


DIGEST_CHARACTERS = 16
"""Length of the digest by which events name a schedule."""

SchedulerAtSpeeds = Callable[[tuple[Worker, ...], Speeds], Schedule]
"""Function that returns the schedule without given workers at given speeds.

It raises NoScheduleError if there is none.
"""


class ScheduleRequest(NamedTuple):
    """Request for a schedule without the workers that are down."""

    down: tuple[Worker, ...]
    speeds: Speeds | None = None
    """Speeds of workers to plan for; None: those of the first schedule."""
    held: HeldLayers | None = None
    """Layers that each worker holds; None: the layers of the stages of its column."""
    rebalanced: bool = False
    """True if layers may move between workers to get the best schedule."""
    from_checkpoint: bool = False
    """True if all layers are read from a checkpoint, whatever workers hold."""

    @property
    def phase(self) -> Phase:
        """Kind of schedule in events: "settled" or "at once".

        It is "settled" if layers may move, or are all read from a checkpoint.
        """
        return "settled" if self.rebalanced or self.from_checkpoint else "at once"


class PreparedSchedule(NamedTuple):
    """Schedule with all that orders send of it, which takes long to compute."""

    schedule: Schedule
    text: bytes
    """Contents of the schedule's JSON file."""
    digest: str
    """Digest of the text, by which events name the schedule."""
    parts: DividedSchedule
    """Share of the schedule that each worker receives."""


def prepare_schedule(schedule: Schedule, parts: DividedSchedule) -> PreparedSchedule:
    """Encode a schedule, and compute its digest; `parts` has the shares that workers receive.

    Raises ScheduleError if the schedule is too large for a file.
    """
    text = encode(schedule)
    return PreparedSchedule(schedule, text, compute_schedule_digest(text), parts)


def compute_schedule_digest(text: bytes) -> str:
    """Return the digest by which events name a schedule; `text` is its file's contents."""
    return hashlib.sha256(text).hexdigest()[:DIGEST_CHARACTERS]


class PlannerFailedError(NoScheduleError):
    """Error raised if the planner itself fails, so that another attempt may succeed."""


class ScheduleAnswer(NamedTuple):
    """Event: the schedule that was requested, or NoScheduleError or RunError if there is none."""

    question: ScheduleRequest
    answer: PreparedSchedule | Exception
