"""Speed planning: what to do about workers that are slow, or slow no more. Pure; takes as long as planning does.

Compared are the period of the present schedule at the speeds that were measured, that of one that is planned for them,
and those of schedules without one of the slow workers. A change of schedule takes place between two iterations.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from slipstream.runtime.coordinator.decisions.questions import SchedulerAtSpeeds
from slipstream.schedules.schedule import NoScheduleError, Schedule, Speeds, Worker
from slipstream.schedules.timing import period_at as period_at

LEAST_GAIN = 0.02
"""Of the period, for which a schedule is changed."""
LEAST_WORTH = 0.01
"""Of the period, that a slow worker must gain to keep its place."""
LEAVE_OUT_FROM = 2.0
"""Factor from which it is asked whether the others are better off alone."""
STEP = 20
"""Factors are planned for in steps of 1 / 20: nothing depends on less, and fewer schedules are planned."""


class Decision(NamedTuple):
    """What is planned for speeds."""

    schedule: Schedule | None
    """To change to; None: to stay."""
    present_seconds: float
    """The period of the present schedule at these speeds."""
    seconds: float
    """The period from now on."""
    left_out: tuple[Worker, ...] = ()
    with_them_seconds: float = 0.0
    """The period with those who are left out."""
    reason: str | None = None
    """Why there is no schedule for these speeds."""


class SpeedQuestion(NamedTuple):
    """What is asked for while workers have these speeds."""

    order: int
    """The present one, and its schedule."""
    present: Schedule
    speeds: Speeds


class SpeedsPlanned(NamedTuple):
    """The answer to a question, or what planning has raised."""

    question: SpeedQuestion
    answer: Decision | BaseException


def answer_to(question: SpeedQuestion, plan: SchedulerAtSpeeds) -> Decision:
    """What to do about workers of other speeds. Raises what `plan` raises, but NoScheduleError."""
    present, speeds = question.present, question.speeds
    try:
        return decide(present, speeds, plan)
    except NoScheduleError as error:
        before = period_at(present, dict(speeds))
        return Decision(None, before, before, reason=str(error) or type(error).__name__)


def rounded(factor: float) -> float:
    """A factor that is planned for."""
    return round(factor * STEP) / STEP


def decide(present: Schedule, speeds: Speeds, plan: SchedulerAtSpeeds) -> Decision:
    """What the workers of a schedule should run at these speeds. Raises what `plan` raises."""
    factors = dict(speeds)
    before = period_at(present, factors)
    live, every = present.seat_of.keys(), tuple(present.grid.workers())

    def planned(workers: Iterable[Worker]) -> Schedule:
        there = set(workers)
        schedule = plan(tuple(worker for worker in every if worker not in there), speeds)
        if schedule.grid != present.grid or schedule.seat_of.keys() != there:
            raise NoScheduleError("the schedule for workers of other speeds is one of another job")
        return schedule

    best = planned(live)
    together = seconds = period_at(best, factors)
    left_out: tuple[Worker, ...] = ()
    for worker in sorted(live, key=lambda one: -factors.get(one, 1.0)):
        if factors.get(worker, 1.0) < LEAVE_OUT_FROM:
            break
        without = next(_attempt(planned, set(live) - {worker, *left_out}), None)
        if without is None or period_at(without, factors) > seconds * (1 + LEAST_WORTH):
            break
        best, seconds, left_out = without, period_at(without, factors), (*left_out, worker)
    if seconds > before * (1 - LEAST_GAIN) and not left_out:
        return Decision(None, before, before)
    return Decision(best, before, seconds, left_out, together)


def _attempt(planned: Callable[[Iterable[Worker]], Schedule], live: set[Worker]) -> Iterator[Schedule]:
    """The schedule for these workers, if there is one in which nobody has to take over another role."""
    try:
        schedule = planned(live)
    except NoScheduleError:
        return
    if not schedule.moves:
        yield schedule
