"""Requests for schedules. Planning takes seconds, so training continues and the answer arrives as an event."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream.runtime.events import Phase
from slipstream.schedules.schedule import HeldLayers, NoScheduleError, Schedule, Speeds, Worker
from slipstream.schedules.worker_programs import DividedSchedule

SchedulerAtSpeeds = Callable[[tuple[Worker, ...], Speeds], Schedule]
"""Function that returns the schedule for some workers being down and others having these speeds; it is called like a
`planning.schedule_finder.Scheduler`."""


class ScheduleRequest(NamedTuple):
    """Request for a schedule, described by the workers that are down and by what may move."""

    down: tuple[Worker, ...]
    speeds: Speeds | None = None
    """Speeds of workers to plan for; None: those of the first schedule."""
    held: HeldLayers | None = None
    """Layers that each worker holds; None: the layers of the stages of its column."""
    settled: bool = False
    """True if layers may move for the best schedule."""
    from_checkpoint: bool = False
    """True if all layers are read from a checkpoint, whatever workers hold."""

    @property
    def phase(self) -> Phase:
        """Phase of the order for which the schedule is requested, as events name it."""
        return "settled" if self.settled or self.from_checkpoint else "at once"


class PreparedSchedule(NamedTuple):
    """Schedule in the form in which an order sends it."""

    text: bytes
    """Schedule as the contents of its file."""
    parts: DividedSchedule
    """Schedule divided into the share of each worker."""


class PlannerFailedError(NoScheduleError):
    """Error of the planner other than that no schedule exists; another attempt may succeed."""


class ScheduleAnswer(NamedTuple):
    """Event: the schedule that was requested, or the error if there is none (NoScheduleError, RunError)."""

    question: ScheduleRequest
    answer: Schedule | Exception
