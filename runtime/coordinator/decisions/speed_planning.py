"""Speed planning: decides what to do about workers that are slow, or that are not slow any more.

The functions are pure and take as long as planning takes. They compare the period of the current schedule at the
measured speeds, the period of a schedule planned for them, and those of schedules without one or more of the slow
workers. A change of schedule takes place between two iterations.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from slipstream.runtime.coordinator.decisions.schedule_requests import PreparedSchedule, SchedulerAtSpeeds
from slipstream.schedules.schedule import NoScheduleError, Schedule, Speeds, Worker
from slipstream.schedules.timing import period_at as period_at

MIN_PERIOD_GAIN = 0.02
"""Smallest gain for which the schedule changes, as a share of the current schedule's period."""
MIN_WORKER_GAIN = 0.01
"""Smallest gain by a slow worker for which it is not left out, as a share of the period with it."""
MIN_EXCLUSION_FACTOR = 2.0
"""Factor by which the ops of a worker must take longer than usual before a schedule without it is considered."""
STEPS_PER_UNIT = 20
"""Number of steps from one whole speed factor to the next: factors are rounded to multiples of 1 / 20, because smaller
differences do not matter and fewer schedules are planned."""


class SpeedDecision(NamedTuple):
    """Decision of which schedule to run at the measured speeds of workers."""

    schedule: Schedule | None
    """Schedule to change to; None: the current one stays."""
    present_seconds: float
    """Period of the current schedule, in seconds at these speeds."""
    seconds: float
    """Period of the schedule that is run from now on, in seconds at these speeds."""
    left_out: tuple[Worker, ...] = ()
    with_them_seconds: float = 0.0
    """Period of the schedule that includes the workers that are left out, in seconds at these speeds."""
    prepared: PreparedSchedule | None = None
    """The field `schedule` with the forms in which orders send it, once they are made."""
    reason: str | None = None
    """Reason why no schedule could be planned for these speeds; None if one was planned."""


class SpeedRequest(NamedTuple):
    """Request for a decision of which schedule to run while workers have the given speeds."""

    order: int
    """Number of the current order, whose schedule is `present`."""
    present: Schedule
    speeds: Speeds


class SpeedAnswer(NamedTuple):
    """Event: the answer to a request, which is a decision or the exception that planning raised."""

    question: SpeedRequest
    answer: SpeedDecision | BaseException


def answer_request(question: SpeedRequest, plan: SchedulerAtSpeeds) -> SpeedDecision:
    """Return the decision for a request, made with the planner `plan`. If there is no schedule for the speeds, the
    current one stays, and the decision says why. Exceptions of `plan` other than NoScheduleError are passed on."""
    present, speeds = question.present, question.speeds
    try:
        return decide_for_speeds(present, speeds, plan)
    except NoScheduleError as error:
        before = period_at(present, dict(speeds))
        return SpeedDecision(None, before, before, reason=str(error) or type(error).__name__)


def round_factor(factor: float) -> float:
    """Return a worker's speed factor rounded to a multiple of 1 / `STEPS_PER_UNIT`, for which schedules are planned."""
    return round(factor * STEPS_PER_UNIT) / STEPS_PER_UNIT


def decide_for_speeds(present: Schedule, speeds: Speeds, plan: SchedulerAtSpeeds) -> SpeedDecision:
    """Decide which schedule to run at the measured `speeds` of workers: the `present` one, a faster one from the
    planner `plan`, or one without slow workers. Raises NoScheduleError if `plan` has none for all live workers."""
    factors = dict(speeds)
    before = period_at(present, factors)
    live, every = present.seat_of.keys(), tuple(present.grid.workers())

    def plan_for(workers: Iterable[Worker]) -> Schedule:
        wanted = set(workers)
        schedule = plan(tuple(worker for worker in every if worker not in wanted), speeds)
        if schedule.grid != present.grid or schedule.seat_of.keys() != wanted:
            raise NoScheduleError("the schedule for the measured speeds of workers is for another job")
        return schedule

    best = plan_for(live)
    seconds_with_all = seconds = period_at(best, factors)
    left_out: tuple[Worker, ...] = ()
    for worker in sorted(live, key=lambda one: -factors.get(one, 1.0)):
        if factors.get(worker, 1.0) < MIN_EXCLUSION_FACTOR:
            break
        without = next(_try_schedule(plan_for, set(live) - {worker, *left_out}), None)
        if without is None or period_at(without, factors) > seconds * (1 + MIN_WORKER_GAIN):
            break
        best, seconds, left_out = without, period_at(without, factors), (*left_out, worker)
    if seconds > before * (1 - MIN_PERIOD_GAIN) and not left_out:
        return SpeedDecision(None, before, before)
    return SpeedDecision(best, before, seconds, left_out, seconds_with_all)


def _try_schedule(planned: Callable[[Iterable[Worker]], Schedule], live: set[Worker]) -> Iterator[Schedule]:
    """Yield the schedule that the function `planned` returns for the `live` workers; nothing if it finds none, or if
    workers would change roles."""
    try:
        schedule = planned(live)
    except NoScheduleError:
        return
    if not schedule.moves:
        yield schedule
