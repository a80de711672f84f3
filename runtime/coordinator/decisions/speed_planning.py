"""Speed planning: decides what to do about workers that are slow, or that are not slow any more.

The functions are pure and take as long as planning takes. They compare the period of the current schedule at the
measured speeds, the period of a schedule planned for them, and those of schedules without one or more of the slow
workers. A change of schedule takes place between two iterations.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from slipstream.runtime.coordinator.decisions.questions import SchedulerAtSpeeds
from slipstream.schedules.schedule import NoScheduleError, Schedule, Speeds, Worker
from slipstream.schedules.timing import period_at as period_at

LEAST_GAIN = 0.02
"""Smallest share of the period that a new schedule must gain."""
LEAST_WORTH = 0.01
"""Smallest share of the period that a slow worker must gain to keep its place."""
LEAVE_OUT_FROM = 2.0
"""Smallest factor of a slow worker for which a schedule without it is considered."""
STEP = 20
"""Factors are rounded to multiples of 1 / 20: smaller differences do not matter, and fewer schedules are planned."""


class Decision(NamedTuple):
    """Decision of what to run at the measured speeds."""

    schedule: Schedule | None
    """Schedule to change to; None: the current one stays."""
    present_seconds: float
    """Period of the current schedule at these speeds."""
    seconds: float
    """Period from now on."""
    left_out: tuple[Worker, ...] = ()
    with_them_seconds: float = 0.0
    """Period including the workers that are left out."""
    reason: str | None = None
    """Reason why there is no schedule for these speeds."""


class SpeedQuestion(NamedTuple):
    """Request for a decision while workers have the given speeds."""

    order: int
    """Number of the current order, whose schedule is `present`."""
    present: Schedule
    speeds: Speeds


class SpeedsPlanned(NamedTuple):
    """Event: the answer to a request, which is a decision or the exception that planning raised."""

    question: SpeedQuestion
    answer: Decision | BaseException


def answer_to(question: SpeedQuestion, plan: SchedulerAtSpeeds) -> Decision:
    """Return the decision for a request. Exceptions of `plan` other than NoScheduleError are passed on."""
    present, speeds = question.present, question.speeds
    try:
        return decide(present, speeds, plan)
    except NoScheduleError as error:
        before = period_at(present, dict(speeds))
        return Decision(None, before, before, reason=str(error) or type(error).__name__)


def rounded(factor: float) -> float:
    """Return a factor rounded to one that schedules are planned for."""
    return round(factor * STEP) / STEP


def decide(present: Schedule, speeds: Speeds, plan: SchedulerAtSpeeds) -> Decision:
    """Return which schedule the workers should run at these speeds. Exceptions of `plan` are passed on."""
    factors = dict(speeds)
    before = period_at(present, factors)
    live, every = present.seat_of.keys(), tuple(present.grid.workers())

    def plan_for(workers: Iterable[Worker]) -> Schedule:
        wanted = set(workers)
        schedule = plan(tuple(worker for worker in every if worker not in wanted), speeds)
        if schedule.grid != present.grid or schedule.seat_of.keys() != wanted:
            raise NoScheduleError("the schedule for workers of other speeds is one of another job")
        return schedule

    best = plan_for(live)
    seconds_with_all = seconds = period_at(best, factors)
    left_out: tuple[Worker, ...] = ()
    for worker in sorted(live, key=lambda one: -factors.get(one, 1.0)):
        if factors.get(worker, 1.0) < LEAVE_OUT_FROM:
            break
        without = next(_attempt(plan_for, set(live) - {worker, *left_out}), None)
        if without is None or period_at(without, factors) > seconds * (1 + LEAST_WORTH):
            break
        best, seconds, left_out = without, period_at(without, factors), (*left_out, worker)
    if seconds > before * (1 - LEAST_GAIN) and not left_out:
        return Decision(None, before, before)
    return Decision(best, before, seconds, left_out, seconds_with_all)


def _attempt(planned: Callable[[Iterable[Worker]], Schedule], live: set[Worker]) -> Iterator[Schedule]:
    """Yield the schedule for these workers, if there is one in which no worker has to take over another role."""
    try:
        schedule = planned(live)
    except NoScheduleError:
        return
    if not schedule.moves:
        yield schedule
