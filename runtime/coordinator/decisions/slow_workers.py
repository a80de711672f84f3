"""Decide which workers are slow, which are left out, and what is planned for them.

`SlowWorkers` decides when to plan, `decide_for_speeds` what. Whenever the measured speeds differ
from those of the current schedule, a schedule is planned for them while training continues. If it
gains enough, the coordinator stops all members before the same iteration and continues by the new
schedule. The speeds are kept: schedules for deaths and joins are planned for them, too.

A worker that is left out computes nothing that could be measured. After a pause it joins like a
worker that returns, and is assumed to run at usual speed. If it is still slow, this is detected
again, and its next pause is twice as long.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.commit_log import CommittedIteration
from slipstream.runtime.coordinator.decisions.effects import (
    EffectCollector,
    PreparedSchedule,
    SchedulerAtSpeeds,
)
from slipstream.runtime.coordinator.decisions.slow_detector import (
    CellTime,
    SlowDetector,
    SpeedChange,
)
from slipstream.schedules.measured_trace import OpTime
from slipstream.schedules.schedule import (
    COMPUTE_KINDS,
    LayerRange,
    NoScheduleError,
    Schedule,
    Speeds,
    Worker,
)
from slipstream.schedules.timing import period_at as period_at

MIN_PERIOD_GAIN = 0.02
"""Smallest gain for which the schedule changes, as a share of its period."""
MIN_WORKER_GAIN = 0.01
"""Smallest gain, as a share of the period, for which a slow worker is kept."""
MIN_EXCLUSION_FACTOR = 2.0
"""Smallest factor of a slow worker for which a schedule without it is considered."""
STEPS_PER_UNIT = 20
"""Steps from one whole speed factor to the next; rounding to these saves plans."""


class SpeedDecision(NamedTuple):
    """Decision which schedule to run at the measured speeds, and which workers to leave out."""

    schedule: Schedule | None
    """Schedule to change to; None: the current one stays."""
    present_seconds: float
    """Period of the current schedule, in seconds at these speeds."""
    seconds: float
    """Period of the schedule that is run from now on, in seconds at these speeds."""
    left_out: tuple[Worker, ...] = ()
    """Slow workers without which `schedule` is planned."""
    with_them_seconds: float = 0.0
    """Period in seconds of the best schedule with the workers in `left_out`, too."""
    prepared: PreparedSchedule | None = None
    """The field `schedule` with all that its orders send; None until that is computed."""
    reason: str | None = None
    """Reason why no schedule could be planned for these speeds; None: one was."""


class SpeedRequest(NamedTuple):
    """Request for a decision which schedule to run at the given speeds."""

    order: int
    """Number of the current order, whose schedule is `present`."""
    present: Schedule
    speeds: Speeds


class SpeedAnswer(NamedTuple):
    """Event: a `SpeedRequest` is answered with a decision, or with an exception of planning."""

    question: SpeedRequest
    answer: SpeedDecision | BaseException


def answer_request(question: SpeedRequest, plan: SchedulerAtSpeeds) -> SpeedDecision:
    """Return the requested decision; without a schedule for the speeds, the present one stays."""
    present, speeds = question.present, question.speeds
    try:
        return decide_for_speeds(present, speeds, plan)
    except NoScheduleError as error:
        before = period_at(present, dict(speeds))
        return SpeedDecision(None, before, before, reason=str(error) or type(error).__name__)


def round_factor(factor: float) -> float:
    """Return a speed factor rounded to a multiple of 1 / `STEPS_PER_UNIT`."""
    return round(factor * STEPS_PER_UNIT) / STEPS_PER_UNIT


def decide_for_speeds(present: Schedule, speeds: Speeds, plan: SchedulerAtSpeeds) -> SpeedDecision:
    """Decide which schedule to run at the measured `speeds` of workers.

    The choice is between the `present` schedule, one that `plan` returns for these speeds, and ones
    without the slowest workers. Takes as long as several plans. Raises NoScheduleError if `plan`
    has no schedule for all live workers, or one for another job.
    """
    factors = dict(speeds)
    before = period_at(present, factors)
    live, every = present.seat_of.keys(), tuple(present.grid.workers())

    def plan_for(workers: Iterable[Worker]) -> Schedule:
        wanted = set(workers)
        schedule = plan(tuple(worker for worker in every if worker not in wanted), speeds)
        if schedule.grid != present.grid or schedule.seat_of.keys() != wanted:
            raise NoScheduleError(
                "the schedule for the measured speeds of workers is for another job"
            )
        return schedule

    # With all workers, as they are.
    best = plan_for(live)
    seconds_with_all = seconds = period_at(best, factors)
    # Without the slowest, one after the other, while that costs hardly anything.
    left_out: tuple[Worker, ...] = ()
    for worker in sorted(live, key=lambda worker: -factors.get(worker, 1.0)):
        if factors.get(worker, 1.0) < MIN_EXCLUSION_FACTOR:
            break
        without = next(_try_schedule(plan_for, set(live) - {worker, *left_out}), None)
        if without is None or period_at(without, factors) > seconds * (1 + MIN_WORKER_GAIN):
            break
        best, seconds, left_out = without, period_at(without, factors), (*left_out, worker)
    # A small gain is not worth a change.
    if seconds > before * (1 - MIN_PERIOD_GAIN) and not left_out:
        return SpeedDecision(None, before, before)
    return SpeedDecision(best, before, seconds, left_out, seconds_with_all)


def _try_schedule(
    planned: Callable[[Iterable[Worker]], Schedule], live: set[Worker]
) -> Iterator[Schedule]:
    """Yield the schedule for `live` workers, if there is one without changes of roles."""
    try:
        schedule = planned(live)
    except NoScheduleError:
        return
    if not schedule.moves:
        yield schedule


WARM_UP_ITERATIONS = 1
"""Iterations at the start of an order that are not measured: everything is cold."""
FIRST_EXCLUSION_SECONDS = 10.0
"""First pause of a worker that is left out. Each later one is twice as long."""
MAX_EXCLUSION_SECONDS = 640.0
"""Longest pause after which a worker that was left out takes part again."""
NO_DECISION = SpeedDecision(None, 0.0, 0.0)
K = TypeVar("K")
V = TypeVar("V")


class SpeedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Report to users of changes of workers' speeds, and of what follows from them."""

    changes: tuple[SpeedChange, ...]
    """Changes that were detected; empty if workers are only left out or taken back."""
    iteration: int
    """First iteration by the new schedule, or the next iteration if the schedule stays."""
    present_seconds: float | None
    """Planned seconds per iteration by the previous schedule at new speeds; None: unknown."""
    planned_seconds: float | None
    """Planned seconds per iteration from this iteration on; None: not planned."""
    left_out: tuple[Worker, ...] = ()
    """Workers that are left out because they are slow."""
    with_them_seconds: float = 0.0
    """Planned seconds per iteration if the workers that are left out took part."""
    changed: bool = True
    """True if the schedule changes."""
    reason: str | None = None
    """Reason why no schedule was planned for the new speeds; None: one was."""

    def __str__(self) -> str:
        # What happened, then what follows: the schedule stays, workers go, or another one begins.
        causes = (
            ", ".join(map(_describe_change, self.changes)) or "workers are left out or taken back"
        )
        if self.reason is not None or self.planned_seconds is None or self.present_seconds is None:
            return f"{causes}: the schedule stays, as no other is available: {self.reason}"
        # Workers are left out, perhaps although they would help a little.
        now, before = f"{self.planned_seconds:.3g} s", f"{self.present_seconds:.3g} s"
        if self.left_out:
            names = ", ".join(map(str, self.left_out))
            why = ""
            if self.with_them_seconds <= self.planned_seconds * (1 + MIN_WORKER_GAIN):
                why = (
                    f": it would shorten an iteration by less than {MIN_WORKER_GAIN:.0%}, and all "
                    "would wait for it"
                )
            return (
                f"{causes}: worker {names} is left out from iteration {self.iteration} on, {now} "
                f"planned without it and {self.with_them_seconds:.3g} s with it, instead of "
                f"{before}{why}"
            )
        if not self.changed:
            return (
                f"{causes}: the schedule stays, at {before} an iteration, as no other is much "
                "shorter"
            )
        return (
            f"{causes}: from iteration {self.iteration} on by another schedule, {now} planned "
            f"instead of {before}"
        )


def _describe_change(change: SpeedChange) -> str:
    when = f"in iterations {change.since} to {change.since + change.iterations - 1}"
    if change.factor == 1.0:
        return f"worker {change.worker} takes as long as its peers again ({when})"
    return f"worker {change.worker} takes {change.factor:.2f} times as long as its peers ({when})"


def build_slow_workers(
    first: Schedule, *, plans: bool, measured: Mapping[Worker, float] = {}
) -> "SlowWorkers":
    """Return the state of workers' speeds at the start of a run by schedule `first`.

    `plans` says whether the run has a planner for slow workers. `measured` has the factors that an
    earlier coordinator measured.
    """
    # Workers that are slow by the job are so from the start; what was measured since counts more.
    planned = {worker: per_mille / 1000 for worker, per_mille in first.times.per_mille_of.items()}
    state = SlowWorkers(
        plans=plans,
        detector=SlowDetector({**planned, **measured}),
        cells=PlannedCells(first),
        planned=planned,
        factors=planned,
    )
    for worker, factor in measured.items():
        state = state._with_factor(worker, factor)
    return state


class SlowWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """State of the workers' speeds, by which it is decided what to plan and when.

    Arguments `iteration` are the next one to be committed; reports to users are effects in `to`.
    """

    plans: bool
    """True if the run has a planner for slow workers."""
    detector: SlowDetector
    """Detector of changes of speed, which is copied before it changes."""
    cells: "PlannedCells"
    """Layers and planned times of the current schedule's ops."""
    begins: int = 0
    """First iteration of the current order whose op times are used."""
    planned: Mapping[Worker, float]
    """Factors of slow workers for which the first schedule was planned."""
    factors: Mapping[Worker, float]
    """Rounded factors by which slow workers' ops take longer, for which schedules are planned."""
    news: tuple[SpeedChange, ...] = ()
    """Changes of workers' speeds that have not been reported to users yet."""
    asked: SpeedRequest | None = None
    """Last request for a decision in the current order; None if there is none."""
    answered: bool = False
    """True if the request `asked` has been answered."""
    present_seconds: float | None = None
    """Planned period of the current schedule at the present speeds; None: not computed."""
    since: int = 0
    """Iteration from which the workers have had their present speeds."""
    order: int = 0
    """Number of the current order."""
    left_out: Mapping[Worker, float] = {}
    """Workers left out as slow, each with the end of its pause (`time.monotonic`)."""
    pauses: Mapping[Worker, float] = {}
    """Seconds of the next pause of each worker that has been left out before."""
    decision: SpeedDecision | None = None
    """Decision to carry out with the next order; None if there is none."""

    @property
    def planned_speeds(self) -> Speeds | None:
        """Speeds for which schedules are planned; None: those of the first schedule."""
        return None if not self.plans or self.factors == self.planned else self._measured_speeds()

    @property
    def is_deciding(self) -> bool:
        """True if a decision for the present speeds is requested, or not yet carried out."""
        return self.decision is not None or (self.asked is not None and not self.answered)

    def planned_period_of(self, present: Schedule) -> float:
        """Return the planned period of the current schedule, `present`, in seconds.

        It is at the present speeds if it was computed for them, otherwise at those of the schedule.
        """
        return self.present_seconds or present.seconds(present.period_ticks)

    def with_iteration(self, commit: CommittedIteration) -> "SlowWorkers":
        """Return the state after an iteration's commit; unchanged before iteration `begins`."""
        if commit.iteration < self.begins:
            return self
        # Earlier states share the detector, so a copy of it changes.
        detector = self.detector.copy()
        changes = detector.add_iteration(
            commit.iteration,
            commit.window_seconds,
            {report.worker: self.cells.convert_times(report.times) for report in commit.reports},
        )
        new = replace(self, detector=detector)
        if not changes:
            return new
        # Schedules are planned for the new speeds from now on, and users see the changes with what
        # follows from them.
        for change in changes:
            new = new._with_factor(change.worker, change.factor)
        return replace(
            new,
            news=(*self.news, *changes),
            since=max(self.since, *(change.since for change in changes)),
        )

    def without_worker(self, worker: Worker) -> "SlowWorkers":
        """Return the state after a worker is lost, without a decision to carry out."""
        # What was measured is forgotten, as the worker may return on another machine; what the job
        # says of it is not.
        factors = _without_keys(self.factors, [worker])
        if worker in self.planned:
            factors[worker] = self.planned[worker]
        detector = self.detector.copy()
        detector.remove_worker(worker)
        return replace(
            self,
            detector=detector,
            factors=factors,
            decision=None,
            news=tuple(change for change in self.news if change.worker != worker),
            left_out=_without_keys(self.left_out, [worker]),
            pauses=_without_keys(self.pauses, [worker]),
        )

    def with_order(
        self, number: int, schedule: Schedule, iteration: int, to: EffectCollector
    ) -> "SlowWorkers":
        """Return the state when order `number` starts, at `iteration`, with `schedule`.

        A pending decision about slow workers is carried out if it was for this schedule, else
        dropped.
        """
        new = self
        # Carried out: report it, and begin the pauses of the workers that it leaves out.
        if self.decision is not None and self.decision.schedule is schedule:
            new = self._emit_speed_event(self.decision, iteration, to)
            left_out, pauses = dict(self.left_out), dict(self.pauses)
            for worker in self.decision.left_out:
                pause = self.pauses.get(worker, FIRST_EXCLUSION_SECONDS)
                left_out[worker] = to.at + pause
                pauses[worker] = min(2 * pause, MAX_EXCLUSION_SECONDS)
            new = replace(new, left_out=left_out, pauses=pauses)
        # Measure anew: ops of this order may be on other layers.
        detector = self.detector.copy()
        detector.drop_open_iterations()
        return replace(
            new,
            decision=None,
            order=number,
            asked=None,
            present_seconds=None,
            detector=detector,
            cells=PlannedCells(schedule),
            begins=iteration + WARM_UP_ITERATIONS,
        )

    def with_readmitted(self, workers: Collection[Worker]) -> "SlowWorkers":
        """Return the state in which these workers are no longer left out as slow."""
        return replace(self, left_out=_without_keys(self.left_out, workers)) if workers else self

    def with_run_ended(self, iteration: int, to: EffectCollector) -> "SlowWorkers":
        """Report the speed changes that users have not seen; return the state without them.

        The report is an effect in `to`. `iteration` is the next one, before which the run ends.
        """
        return (
            self._emit_speed_event(NO_DECISION, iteration, to, "the run ends")
            if self.news
            else self
        )

    def request_decision(
        self, present: Schedule, iteration: int, to: EffectCollector
    ) -> "SlowWorkers":
        """Return the state after requesting a decision, if speeds differ from the schedule's.

        The request is an effect in `to`. Workers that have been left out for long enough may take
        part again, and count as running at usual speed. The same speeds are requested once in an
        order. If nothing can or need be planned, unreported changes are reported. `present` is the
        current schedule, and `iteration` the next one to be committed.
        """
        # Readmit workers whose pause is over.
        due = [worker for worker, at in self.left_out.items() if to.at >= at]
        new = self.with_readmitted(due)
        for worker in due:
            detector = new.detector.copy()
            detector.set_factor(worker, 1.0)
            new = replace(new, detector=detector)._with_factor(worker, 1.0)
        as_planned, speeds = new._is_planned_for_speeds(present), new._measured_speeds()
        if as_planned and new.asked is not None:
            # A pending answer for other speeds is ignored.
            new = replace(new, asked=None, present_seconds=None)
        # Nothing to plan: report changes that are still unreported.
        if not self.plans or as_planned:
            reason = "the run was given none"
            if self.plans:
                reason = "the present one is for these speeds"
            return new._emit_speed_event(NO_DECISION, iteration, to, reason) if new.news else new
        # Ask, unless this has been asked in this order.
        asked = new.asked
        if asked is not None and (asked.order, asked.speeds) == (new.order, speeds):
            return new
        question = SpeedRequest(new.order, present, speeds)
        to.add_effect(question)
        return replace(new, asked=question, answered=False, decision=None)

    def with_answer(self, event: SpeedAnswer, iteration: int, to: EffectCollector) -> "SlowWorkers":
        """Return the state after the answer to the last request; any other answer is ignored.

        If planning failed, or the schedule stays and there is news, an event of `iteration`, the
        next one, is added to the effects of `to`.
        """
        if event.question is not self.asked:
            return self
        # If planning failed, or the schedule stays, users learn that at once.
        new, decision = replace(self, answered=True), event.answer
        if isinstance(decision, BaseException):
            return new._emit_speed_event(
                NO_DECISION, iteration, to, str(decision) or type(decision).__name__
            )
        new = replace(new, present_seconds=decision.present_seconds)
        if decision.schedule is not None:
            return replace(new, decision=decision)
        return (
            new._emit_speed_event(decision, iteration, to, decision.reason)
            if self.news or decision.reason
            else new
        )

    def _is_planned_for_speeds(self, present: Schedule) -> bool:
        # Factors are rounded, and schedules have them in thousandths.
        planned = {slow.worker: slow.per_mille / 1000 for slow in present.times.slow}
        return all(
            abs(self.factors.get(worker, 1.0) - planned.get(worker, 1.0)) < 1e-3
            for worker in planned.keys() | self.factors.keys()
            if worker in present.seat_of
        )

    def _with_factor(self, worker: Worker, factor: float) -> "SlowWorkers":
        # A decision for other speeds is out of date.
        factors = _without_keys(self.factors, [worker])
        if round_factor(factor) != 1.0:
            factors[worker] = round_factor(factor)
        return replace(self, factors=factors, decision=None)

    def _measured_speeds(self) -> Speeds:
        return tuple(
            (worker, factor) for worker, factor in sorted(self.factors.items()) if factor != 1.0
        )

    def _emit_speed_event(
        self,
        decision: SpeedDecision,
        iteration: int,
        to: EffectCollector,
        reason: str | None = None,
    ) -> "SlowWorkers":
        """Report the changes that users have not seen; return the state without these changes."""
        to.add_effect(
            SpeedEvent(
                changes=self.news,
                iteration=iteration,
                left_out=decision.left_out,
                changed=decision.schedule is not None,
                present_seconds=None if reason else decision.present_seconds,
                planned_seconds=None if reason else decision.seconds,
                with_them_seconds=decision.with_them_seconds,
                reason=reason,
            )
        )
        return replace(self, news=())


def _without_keys(entries: Mapping[K, V], gone: Collection[K]) -> dict[K, V]:
    return {key: value for key, value in entries.items() if key not in gone}


class PlannedCells:
    """Layers and planned seconds of each kind of op on each slice of a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @cached_property
    def _planned_cells(self) -> Mapping[tuple[str, int], tuple[LayerRange, float]]:
        # Planned times are those at usual speed, with which all workers are compared.
        usual, schedule = replace(self._schedule.times, slow=()), self._schedule
        return {
            (kind, slice_): (
                schedule.layers_of(slice_),
                schedule.seconds(usual.duration_ticks(kind, slice_, Worker(0, 0))),
            )
            for kind in COMPUTE_KINDS
            for slice_ in range(len(schedule.layers_by_slice))
        }

    def convert_times(self, times: Sequence[OpTime]) -> list[CellTime]:
        """Return measured times with the ops' layers and planned times; drop unplanned ops."""
        cells = []
        for op_time in times:
            planned = self._planned_cells.get((op_time.kind, op_time.slice))
            if planned is not None:
                layers, planned_seconds = planned
                cells.append(
                    CellTime(op_time.kind, layers, op_time.number, op_time.seconds, planned_seconds)
                )
        return cells
