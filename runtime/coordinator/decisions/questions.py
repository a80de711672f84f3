"""Questions that the state asks while the run goes on, as their answers take seconds to plan; answers are events."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream.runtime.events import Phase
from slipstream.schedules.parts import Parts
from slipstream.schedules.schedule import HeldLayers, NoScheduleError, Schedule, Speeds, Worker

SchedulerAtSpeeds = Callable[[tuple[Worker, ...], Speeds], Schedule]
"""The schedule to use when these workers are down, and others have these speeds. As `planning.Scheduler` else."""


class Question(NamedTuple):
    """Which schedule is asked for."""

    down: tuple[Worker, ...]
    speeds: Speeds | None = None
    """None: those of the first schedule."""
    held: HeldLayers | None = None
    """None: the layers of the grid's stages."""
    settled: bool = False
    from_checkpoint: bool = False
    """Whether all layers are read anew, whatever is held."""

    @property
    def phase(self) -> Phase:
        """Of the order that the schedule is for."""
        return "settled" if self.settled or self.from_checkpoint else "at once"


class Prepared(NamedTuple):
    """A schedule as it is given in an order."""

    text: bytes
    """As a file."""
    parts: Parts
    """What each worker is told of it."""


class PlannerFailedError(NoScheduleError):
    """What was to plan has failed in another way than that there is no schedule: that may go well the next time."""


class ScheduleFound(NamedTuple):
    """The answer to a question: the schedule, or why there is none (NoScheduleError, RunError)."""

    question: Question
    answer: Schedule | Exception
