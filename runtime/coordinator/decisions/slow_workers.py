"""Slow workers: which there are, what is planned for them, and who is left out. It decides when; `speed_planning` what.

Whenever the speeds that were measured are others than those of the present schedule, it is planned for them while
training goes on. Where that gains enough, the coordinator stops all before the same iteration and goes on by the new
schedule. The speeds are kept: schedules for deaths and joins are planned for them, too.

Who is left out computes nothing that could be measured. After a pause it is taken in like one that comes back, and
believed to take the usual time; where it does not, it is found out within a few iterations, and the next pause is twice
as long.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.commit_log import Committed
from slipstream.runtime.coordinator.decisions.effects import Effects
from slipstream.runtime.coordinator.decisions.slow_detector import CellTime, SlowDetector, SpeedChange
from slipstream.runtime.coordinator.decisions.speed_planning import Decision, SpeedQuestion, SpeedsPlanned, rounded
from slipstream.runtime.replay.recorder import OpTime
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Schedule, Speeds, Worker

WARM_UP = 1
"""Iterations of an order that say little: connections, caches and allocators are cold."""
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 640.0
"""Until a worker that is left out takes part again."""
NOTHING = Decision(None, 0.0, 0.0)
K = TypeVar("K")
V = TypeVar("V")


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
    return f"worker {change.worker} takes {change.factor:.2f} times as long as its peers ({when})"


def watched(first: Schedule, *, plans: bool, known: Mapping[Worker, float] = {}) -> "SlowWorkers":
    """What a run begins with: the first schedule knows of workers that are slow by the job file.

    `plans`: whether anything plans for speeds; `known` is what another coordinator has found out since.
    """
    given = {worker: per_mille / 1000 for worker, per_mille in first.times.per_mille_of.items()}
    found = SlowWorkers(plans=plans, detector=SlowDetector({**given, **known}), cells=Cells(first), given=given,
                        factors=given)
    for worker, factor in known.items():
        found = found._knowing(worker, factor)
    return found


class SlowWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the speeds of one run. No detector that it has had ever changes."""

    plans: bool
    detector: SlowDetector
    cells: "Cells"
    begins: int = 0
    """The first iteration that is looked at."""
    given: Mapping[Worker, float]
    factors: Mapping[Worker, float]
    """Planned for."""
    news: tuple[SpeedChange, ...] = ()
    """Not told yet."""
    asked: SpeedQuestion | None = None
    """The last question."""
    answered: bool = False
    """Whether there is an answer to that."""
    present_seconds: float | None = None
    """The period of the present schedule at these speeds, where it is not planned for them, once it is known."""
    since: int = 0
    """From which iteration on the speeds are what they are now."""
    order: int = 0
    left_out: Mapping[Worker, float] = {}
    """Workers that are too slow to be worth their place, with when they take part again, by time.monotonic."""
    pauses: Mapping[Worker, float] = {}
    """The next one of each that has been left out."""
    decision: Decision | None = None
    """What to change to at the next iteration boundary."""

    @property
    def speeds(self) -> Speeds | None:
        """What is planned for besides failures; None: what the first schedule says."""
        return None if not self.plans or self.factors == self.given else self._speeds()

    @property
    def deciding(self) -> bool:
        """Whether it is open which schedule the speeds that are known lead to at first."""
        return self.decision is not None or (self.asked is not None and not self.answered)

    def period_of(self, present: Schedule) -> float:
        """Seconds of an iteration by the present schedule, as planned, at the speeds that are known."""
        return self.present_seconds or present.seconds(present.period_ticks)

    def committed(self, one: Committed) -> "SlowWorkers":
        """With an iteration of the present order."""
        if one.iteration < self.begins:
            return self
        detector = self.detector.copy()
        changes = detector.observe(one.iteration, one.window_seconds,
                                   {report.worker: self.cells.of(report.times) for report in one.reports})
        new = replace(self, detector=detector)
        if not changes:
            return new
        for change in changes:
            new = new._knowing(change.worker, change.factor)
        return replace(new, news=(*self.news, *changes), since=max(self.since, *(change.since for change in changes)))

    def lost(self, worker: Worker) -> "SlowWorkers":
        """A worker is gone. It may be started again elsewhere: nothing is known of it then."""
        factors = _without(self.factors, [worker])
        if worker in self.given:
            factors[worker] = self.given[worker]
        detector = self.detector.copy()
        detector.lost(worker)
        return replace(self, detector=detector, factors=factors, decision=None,
                       news=tuple(one for one in self.news if one.worker != worker),
                       left_out=_without(self.left_out, [worker]), pauses=_without(self.pauses, [worker]))

    def order_begins(self, number: int, schedule: Schedule, iteration: int, to: Effects) -> "SlowWorkers":
        """An order begins, which carries out what was decided, or ends it."""
        new = self
        if self.decision is not None and self.decision.schedule is schedule:
            new = self._telling(self.decision, iteration, to)
            pauses = {worker: self.pauses.get(worker, FIRST_PAUSE_SECONDS) for worker in self.decision.left_out}
            left_out = {worker: to.at + pause for worker, pause in pauses.items()}
            new = replace(
                new, left_out={**self.left_out, **left_out},
                pauses={**self.pauses, **{one: min(2 * pause, LONGEST_PAUSE_SECONDS) for one, pause in pauses.items()}})
        detector = self.detector.copy()
        detector.interrupt()
        return replace(new, decision=None, order=number, asked=None, present_seconds=None, detector=detector,
                       cells=Cells(schedule), begins=iteration + WARM_UP)

    def take_back(self, workers: Collection[Worker]) -> "SlowWorkers":
        """These are left out no longer, however slow they are."""
        return replace(self, left_out=_without(self.left_out, workers)) if workers else self

    def over(self, iteration: int, to: Effects) -> "SlowWorkers":
        """All iterations are committed."""
        return self._telling(NOTHING, iteration, to, "the run ends") if self.news else self

    def look(self, present: Schedule, iteration: int, to: Effects) -> "SlowWorkers":
        """Have planned what is to be planned, while all train by a schedule.

        Those whose pause is over are left out no longer. `iteration` is the next to be committed.
        """
        due = [worker for worker, at in self.left_out.items() if to.at >= at]
        new = self.take_back(due)
        for worker in due:
            detector = new.detector.copy()
            detector.believe(worker, 1.0)
            new = replace(new, detector=detector)._knowing(worker, 1.0)
        as_planned, speeds = new._as_planned(present), new._speeds()
        if as_planned and new.asked is not None:
            new = replace(new, asked=None, present_seconds=None)  # whatever was asked about other speeds
        asked = new.asked is not None and (new.asked.order, new.asked.speeds) == (new.order, speeds)
        if not self.plans or as_planned or asked:
            return new._telling(NOTHING, iteration, to, "the present one is for these speeds" if self.plans else
                                "the run was given none") if new.news and (as_planned or not self.plans) else new
        question = SpeedQuestion(new.order, present, speeds)
        to.do(question)
        return replace(new, asked=question, answered=False, decision=None)

    def planned(self, planned: SpeedsPlanned, iteration: int, to: Effects) -> "SlowWorkers":
        """What was asked has been answered."""
        if planned.question is not self.asked:
            return self
        new, decision = replace(self, answered=True), planned.answer
        if isinstance(decision, BaseException):
            return new._telling(NOTHING, iteration, to, str(decision) or type(decision).__name__)
        new = replace(new, present_seconds=decision.present_seconds)
        if decision.schedule is not None:
            return replace(new, decision=decision)
        return new._telling(decision, iteration, to, decision.reason) if self.news or decision.reason else new

    def _as_planned(self, present: Schedule) -> bool:
        """Whether the present schedule is one for the speeds that are known."""
        planned = {slow.worker: slow.per_mille / 1000 for slow in present.times.slow}
        return all(abs(self.factors.get(worker, 1.0) - planned.get(worker, 1.0)) < 1e-3
                   for worker in planned.keys() | self.factors.keys() if worker in present.seat_of)

    def _knowing(self, worker: Worker, factor: float) -> "SlowWorkers":
        factors = _without(self.factors, [worker])
        if rounded(factor) != 1.0:
            factors[worker] = rounded(factor)
        return replace(self, factors=factors, decision=None)

    def _speeds(self) -> Speeds:
        return tuple((worker, factor) for worker, factor in sorted(self.factors.items()) if factor != 1.0)

    def _telling(self, decision: Decision, iteration: int, to: Effects, reason: str | None = None) -> "SlowWorkers":
        to.do(SpeedEvent(
            changes=self.news, iteration=iteration, left_out=decision.left_out, changed=decision.schedule is not None,
            present_seconds=None if reason else decision.present_seconds,
            planned_seconds=None if reason else decision.seconds,
            with_them_seconds=decision.with_them_seconds, reason=reason))
        return replace(self, news=())


def _without(known: Mapping[K, V], gone: Collection[K]) -> dict[K, V]:
    return {one: value for one, value in known.items() if one not in gone}


class Cells:
    """What the slices of a schedule are, and what their ops take by plan on a worker of usual speed."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @cached_property
    def _planned(self) -> Mapping[tuple[str, int], tuple[LayerRange, float]]:
        usual, schedule = replace(self._schedule.times, slow=()), self._schedule
        return {(kind, slice_): (schedule.layers_of(slice_),
                                 schedule.seconds(usual.duration_ticks(kind, slice_, Worker(0, 0))))
                for kind in COMPUTE_KINDS for slice_ in range(len(schedule.layers_by_slice))}

    def of(self, times: Sequence[OpTime]) -> list[CellTime]:
        """Times by layers. What no worker can have run, is left out."""
        planned = self._planned
        return [CellTime(one.kind, known[0], one.number, one.seconds, known[1])
                for one in times if (known := planned.get((one.kind, one.slice))) is not None]
