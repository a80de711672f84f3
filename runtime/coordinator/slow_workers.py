"""Slow workers: which there are, what is planned for them, and who is left out. It decides when; `speed_planning` what.

Whenever the speeds that were measured are others than those of the present schedule, it is planned for them while
training goes on. Where that gains enough, the coordinator stops all before the same iteration and goes on by the new
schedule. The speeds are kept: schedules for deaths and joins are planned for them, too.

Who is left out computes nothing that could be measured. It is asked to run its ops by itself now and then, each time
after twice the pause, and is taken in like one that comes back once it is worth its place.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from slipstream.runtime.coordinator.planning import NoScheduleError, Prepared, ScheduleService, Speeds
from slipstream.runtime.coordinator.slow_detector import SpeedChange
from slipstream.runtime.coordinator.speed_planning import Decision, decide, period_at, rounded, worth_back
from slipstream.runtime.coordinator.speed_watch import SpeedWatch
from slipstream.runtime.protocol.to_coordinator import Ran, SpeedMeasured
from slipstream.schedules.schedule import Schedule, Worker

FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 640.0
"""From one measurement of a worker that is left out to the next."""


class SpeedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about workers' speeds, and what followed."""

    changes: tuple[SpeedChange, ...]
    iteration: int
    """The first one by the schedule that was planned for it, or the next one where none is changed to."""
    present_seconds: float | None
    """The planned period of the schedule so far, at these speeds; None: nothing was planned."""
    planned_seconds: float | None
    """That from now on."""
    left_out: tuple[Worker, ...] = ()
    with_them_seconds: float = 0.0
    """The planned period with those who are left out."""
    changed: bool = True
    """Whether there is another schedule."""
    reason: str | None = None
    """Why none could be planned."""

    def __str__(self) -> str:
        causes = ", ".join(map(_cause, self.changes)) or "workers are left out or taken back"
        if self.reason is not None or self.planned_seconds is None or self.present_seconds is None:
            return f"{causes}: goes on by the same schedule, as there is no other: {self.reason}"
        now, before = f"{self.planned_seconds:.3g} s", f"{self.present_seconds:.3g} s"
        if self.left_out:
            names = ", ".join(map(str, self.left_out))
            return (f"{causes}: worker {names} is left out from iteration {self.iteration} on, {now} planned without "
                    f"it and {self.with_them_seconds:.3g} s with it, instead of {before}")
        if not self.changed:
            return f"{causes}: goes on by the same schedule, {before} an iteration, as no other is shorter by much"
        return f"{causes}: from iteration {self.iteration} on by another schedule, {now} planned instead of {before}"


def _cause(change: SpeedChange) -> str:
    when = f"in iterations {change.since} to {change.since + change.iterations - 1}"
    if change.factor == 1.0:
        return f"worker {change.worker} takes as long as its peers again ({when})"
    more = f"{change.factor:.2f} times as long as its peers" if change.iterations else \
        f"{change.factor:.2f} times as long as others, as it has measured itself"
    return f"worker {change.worker} takes {more}" + (f" ({when})" if change.iterations else "")


@dataclass(slots=True)
class _LeftOut:
    """When a worker that is left out is measured next."""

    pause_seconds: float
    at: float


class _Answer(NamedTuple):
    """Of what plans beside the event loop."""

    decision: Decision
    prepared: Prepared | None
    """Its schedule, where that is another one."""
    returning: set[Worker]
    """Workers that are left out, and are worth their place again."""
    reason: str | None = None
    """Why there is no schedule for these speeds."""


class SlowWorkers:
    """Watches the speeds of one run.

    Parameters
    ----------
    say
        Called with each `SpeedEvent`.
    measure
        Asks a worker that is left out to measure itself.
    """

    def __init__(self, schedules: ScheduleService, say: Callable[[SpeedEvent], None],
                 measure: Callable[[Worker], None]) -> None:
        self._schedules = schedules
        self._say = say
        self._measure = measure
        self._watch = SpeedWatch(schedules.first)
        self._given = {worker: per_mille / 1000 for worker, per_mille in schedules.first.times.per_mille_of.items()}
        self._factors = dict(self._given)
        """Planned for."""
        self._news: list[SpeedChange] = []
        """Not told yet."""
        self._asked: object = None
        """The order and the speeds of the last decision that was asked for."""
        self._answered = False
        """Whether there is an answer to that."""
        self._present_seconds: float | None = None
        """The period of the present schedule at these speeds, where it is not planned for them, once it is known."""
        self.since = 0
        """From which iteration on the speeds are what they are now."""
        self._order = 0
        self._left_out: dict[Worker, _LeftOut] = {}
        self._pauses: dict[Worker, float] = {}
        self._returning: set[Worker] = set()
        self.decision: Decision | None = None
        """What to change to at the next iteration boundary."""

    @property
    def left_out(self) -> set[Worker]:
        """Workers that are too slow to be worth their place."""
        return set(self._left_out)

    @property
    def deciding(self) -> bool:
        """Whether it is open which schedule the speeds that are known lead to at first."""
        return self.decision is not None or (self._asked is not None and not self._answered)

    def period_of(self, present: Schedule) -> float:
        """Seconds of an iteration by the present schedule, as planned, at the speeds that are known."""
        return self._present_seconds or present.seconds(present.period_ticks)

    def ran(self, report: Ran) -> None:
        """A report of the present order."""
        changes = self._watch.ran(report)
        self.since = max([self.since, *(change.since for change in changes)])
        for change in changes:
            self._know(change.worker, change.factor)
        self._news += changes

    def measured(self, report: SpeedMeasured) -> None:
        """A worker that is left out has measured itself."""
        left, factor = self._left_out.get(report.worker), self._watch.factor_of(report.times)
        if left is None or factor is None:
            return
        known = self._watch.detector.factor(report.worker)
        if rounded(factor) >= rounded(known):
            left.pause_seconds = min(2 * left.pause_seconds, LONGEST_PAUSE_SECONDS)
        else:
            self._watch.detector.believe(report.worker, max(1.0, factor))
            self._know(report.worker, max(1.0, factor))
        left.at = time.monotonic() + left.pause_seconds

    def lost(self, worker: Worker) -> None:
        """A worker is gone. It may be started again elsewhere: nothing is known of it then."""
        self._watch.detector.lost(worker)
        self._news = [one for one in self._news if one.worker != worker]
        self._left_out.pop(worker, None)
        self._pauses.pop(worker, None)
        self._factors.pop(worker, None)
        if worker in self._given:
            self._factors[worker] = self._given[worker]
        self._returning.discard(worker)
        self._tell_service()
        self.decision = None

    def order_begins(self, number: int, schedule: Schedule, iteration: int) -> None:
        """An order begins, which carries out what was decided, or ends it."""
        if self.decision is not None and self.decision.schedule is schedule:
            self._tell(self.decision, iteration)
            for worker in self.decision.left_out:
                pause = self._pauses.get(worker, FIRST_PAUSE_SECONDS)
                self._pauses[worker] = min(2 * pause, LONGEST_PAUSE_SECONDS)
                self._left_out[worker] = _LeftOut(pause, time.monotonic() + pause)
        self.decision, self._order, self._asked, self._present_seconds = None, number, None, None
        self._returning.clear()
        self._watch.order_begins(schedule, iteration)

    def take_back(self) -> set[Worker]:
        """Those who were left out, who are needed now, however slow they are."""
        everyone = self.left_out
        self._left_out.clear()
        return everyone

    def over(self, iteration: int) -> None:
        """All iterations are committed."""
        if self._news:
            self._tell(Decision(None, 0.0, 0.0), iteration, "the run ends")

    def look(self, present: Schedule, iteration: int) -> set[Worker]:
        """Have planned what is to be planned, while all train by a schedule; those left out who may come in again.

        `iteration` is the next to be committed.
        """
        now = time.monotonic()
        for worker, left in self._left_out.items():
            if now >= left.at:
                left.at = now + max(left.pause_seconds, FIRST_PAUSE_SECONDS)
                self._measure(worker)
        returning, self._returning = self._returning & self._left_out.keys(), set()
        for worker in returning:
            del self._left_out[worker]
        question = self._order, self._schedules.speeds
        as_planned = self._as_planned(present)
        if as_planned and not self._left_out:
            self._asked = self._present_seconds = None  # whatever was asked about other speeds
            if not self._news:
                return returning
        plan = self._schedules.planner_at_speeds(present)
        if plan is None or self._asked == question or (as_planned and not self._left_out):
            if self._news and (plan is None or as_planned):
                self._tell(Decision(None, 0.0, 0.0), iteration,
                           "the run was given none" if plan is None else "the present one is for these speeds")
            return returning
        self._asked, self._answered, self.decision, speeds = question, False, None, self._speeds()
        left_out, schedules = sorted(self._left_out), self._schedules

        def work() -> _Answer:
            try:
                back = {worker for worker in left_out if worth_back(present, worker, speeds, plan)}
                decision = decide(present, speeds, plan)
                other = None if decision.schedule is None else schedules.prepare(decision.schedule)
                return _Answer(decision, other, back)
            except NoScheduleError as error:
                before = period_at(present, dict(speeds))
                return _Answer(Decision(None, before, before), None, set(), str(error) or type(error).__name__)

        schedules.background(work, partial(self._take, question, iteration), awaited=False)
        return returning

    def _take(self, question: object, iteration: int, answer: _Answer | BaseException) -> None:
        """It has been planned."""
        if question != self._asked:
            return
        self._answered = True
        if isinstance(answer, BaseException):
            self._tell(Decision(None, 0.0, 0.0), iteration, str(answer) or type(answer).__name__)
        else:
            decision, prepared, self._returning, reason = answer
            if prepared is not None and decision.schedule is not None:
                self._schedules.has_prepared(decision.schedule, prepared)
            self._present_seconds = decision.present_seconds
            if self._returning:
                pass  # they come in by an order of their own, and what all run is decided anew then
            elif decision.schedule is not None:
                self.decision = decision
            elif self._news or reason is not None:
                self._tell(decision, iteration, reason)
        self._schedules.answered()

    def _as_planned(self, present: Schedule) -> bool:
        """Whether the present schedule is one for the speeds that are known."""
        planned = {slow.worker: slow.per_mille / 1000 for slow in present.times.slow}
        return all(abs(self._factors.get(worker, 1.0) - planned.get(worker, 1.0)) < 1e-3
                   for worker in planned.keys() | self._factors.keys() if worker in present.seat_of)

    def _know(self, worker: Worker, factor: float) -> None:
        self._factors.pop(worker, None)
        if rounded(factor) != 1.0:
            self._factors[worker] = rounded(factor)
        self._tell_service()
        self.decision = None

    def _tell_service(self) -> None:
        if self._schedules.at_speeds is not None:
            self._schedules.speeds = None if self._factors == self._given else self._speeds()

    def _speeds(self) -> Speeds:
        return tuple((worker, factor) for worker, factor in sorted(self._factors.items()) if factor != 1.0)

    def _tell(self, decision: Decision, iteration: int, reason: str | None = None) -> None:
        news, self._news = tuple(self._news), []
        self._say(SpeedEvent(
            changes=news, iteration=iteration, left_out=decision.left_out, changed=decision.schedule is not None,
            present_seconds=None if reason else decision.present_seconds,
            planned_seconds=None if reason else decision.seconds,
            with_them_seconds=decision.with_them_seconds, reason=reason))
