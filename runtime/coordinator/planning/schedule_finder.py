"""Find or plan schedules for the remaining workers, concurrently with the event loop."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.effects import (
    PlannerFailedError,
    PreparedSchedule,
    ScheduleAnswer,
    SchedulerAtSpeeds,
    ScheduleRequest,
    prepare_schedule,
)
from slipstream.runtime.coordinator.decisions.slow_workers import (
    SpeedAnswer,
    SpeedDecision,
    SpeedRequest,
    answer_request,
)
from slipstream.runtime.coordinator.planning.background import BackgroundRunner, run_in_thread
from slipstream.runtime.errors import RunError, first_line
from slipstream.runtime.events import Event, PlanAnswered, PlanAsked
from slipstream.schedules.schedule import Grid, HeldLayers, Schedule, Speeds, Worker
from slipstream.schedules.schedule import NoScheduleError as NoScheduleError
from slipstream.schedules.shares import DividedSchedule, EquivalentSchedule, divide_schedule

Scheduler = Callable[[tuple[Worker, ...]], Schedule]
"""Function that returns the first job's schedule without the given workers.

It raises NoScheduleError if there is none. It is called concurrently with the event loop, up to
`MAX_CONCURRENT_REQUESTS` times at once, and mostly in a process that ends with its answer, so that
all its other side effects are lost.
"""


class Rebalancer(Protocol):
    """Interface of planners of schedules whose workers hold layers of other stages, too.

    All methods are called outside the event loop's thread, and raise NoScheduleError if there is no
    such schedule. They plan without the workers in `down`. `speeds` has the factor by which each
    slow worker's ops take longer; if it is empty, the speeds are those of the job. `held` has the
    layers of each live worker.
    """

    def plan_at_once(self, down: tuple[Worker, ...], held: HeldLayers, speeds: Speeds) -> Schedule:
        """Return the schedule for which no worker needs a layer that it does not hold."""

    def plan_settled(self, down: tuple[Worker, ...], held: HeldLayers, speeds: Speeds) -> Schedule:
        """Return the best schedule, whatever layers move for it between live workers."""

    def plan_from_checkpoint(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """Return the schedule for which all layers are read from a checkpoint."""


class SchedulePlanners(NamedTuple):
    """Planners of a run, or None: for failures, at given speeds, and with layers moved."""

    scheduler: Scheduler | None
    at_speeds: SchedulerAtSpeeds | None = None
    rebalancer: Rebalancer | None = None


MAX_CONCURRENT_REQUESTS = 2
"""Requests at a time, so that one which all wait for does not wait for others. A settled schedule
is planned in addition, one at a time."""
STUCK_REQUEST_SECONDS = 20.0
"""Seconds after which a request no longer counts towards `MAX_CONCURRENT_REQUESTS`."""


class ScheduleDivider(Protocol):
    """Interface of functions that divide a schedule into shares, as `divide_schedule` does."""

    def __call__(self, schedule: Schedule, /, alike: EquivalentSchedule | None = None) -> DividedSchedule:
        """Return what each worker must know of a schedule (its share), such as its program.

        If another schedule that differs only in the numbering of its pipelines has been divided,
        pass `alike` to save most of the computation: a pair of its shares and a mapping from its
        pipelines' numbers to those of `schedule`.
        """


PrecomputedLookup = Callable[[tuple[Worker, ...]], tuple[Schedule, DividedSchedule] | None]
"""Function that returns a precomputed schedule without some workers, and its shares, or None."""


class ScheduleService:
    """Service that answers requests for schedules in the background.

    They come in the forms in which orders send them.

    Parameters
    ----------
    grid
        Grid of pipelines and stages of the job.
    finders
        Planners to ask.
    found
        Function that is called on the event loop with each answer.
    tell
        Function that is called with an event for each request and each answer.
    divided
        Function that divides a schedule into what each worker must know of it.
    background
        Function that runs the planners.
    known
        Function that returns a precomputed schedule without given workers, and its shares, or None.
    """

    def __init__(self, grid: Grid, finders: SchedulePlanners, found: Callable[[ScheduleAnswer | SpeedAnswer], None],
                 tell: Callable[[Event], None] = lambda _: None, divided: ScheduleDivider = divide_schedule,
                 background: BackgroundRunner = run_in_thread, known: PrecomputedLookup = lambda _: None) -> None:
        self._grid = grid
        self._divided = divided
        self._background = background
        self._known = known
        self._finders = finders
        self._found = found
        self._tell = tell
        self._asked: dict[ScheduleRequest, float] = {}
        """Requests that are being answered, with the times at which they were made."""

    def prepare_schedule(self, schedule: Schedule) -> PreparedSchedule:
        """Return a schedule with the forms in which orders send it. This takes long for many
        workers."""
        return prepare_schedule(schedule, self._divided(schedule))

    def request_schedule(self, question: ScheduleRequest) -> None:
        """Start to find the requested schedule in the background.

        Does nothing if this request, or too many others, are in progress; in the latter case, the
        caller must repeat the call after another one has been answered.
        """
        since = time.monotonic() - STUCK_REQUEST_SECONDS
        running = sum(request.settled == question.settled and start > since for request, start in self._asked.items())
        if question in self._asked or running >= (1 if question.settled else MAX_CONCURRENT_REQUESTS):
            return
        try:
            find = self._choose_planner(question)
        except NoScheduleError as error:
            self._found(ScheduleAnswer(question, error))
            return
        self._asked[question] = time.monotonic()
        self._tell(PlanAsked(down=question.down, phase=question.phase))
        precomputed = self._known(question.down) if question == ScheduleRequest(question.down) else None
        if precomputed is not None:
            self._handle_answer(question, prepare_schedule(*precomputed))
            return

        def work() -> PreparedSchedule:
            return self.prepare_schedule(without_idle_workers(self._require_fitting(question.down, find())))

        self._background(work, partial(self._handle_answer, question), awaited=not question.settled)

    def request_speed_decision(self, question: SpeedRequest) -> None:
        """Start to decide, in the background, which schedule to run at measured speeds."""
        plan = self._choose_speed_planner(question)

        def work() -> SpeedDecision:
            decision = answer_request(question, plan)
            other = decision.schedule
            return decision if other is None else decision._replace(prepared=self.prepare_schedule(other))

        self._background(work, lambda found: self._found(SpeedAnswer(question, found)), awaited=False)

    def _choose_speed_planner(self, question: SpeedRequest) -> SchedulerAtSpeeds:
        """Return the planner for speeds that leaves layers with their present holders."""
        # If the run has none, return a function that raises NoScheduleError.
        present, finders = question.present, self._finders
        rebalancer = finders.rebalancer
        if finders.at_speeds is None:
            return _refuse_speeds
        if rebalancer is None or all(seat.holds is None for seat in present.seats):
            return finders.at_speeds
        held = {seat.worker: present.held_layers_of_seat(seat) for seat in present.seats}

        def plan(down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
            live = (worker for worker in present.grid.workers() if worker not in down)
            return rebalancer.plan_at_once(down, tuple((worker, held.get(worker, ())) for worker in live), speeds)

        return plan

    def _require_fitting(self, down: tuple[Worker, ...], schedule: Schedule) -> Schedule:
        live = [worker for worker in self._grid.workers() if worker not in down]
        if schedule.grid != self._grid or list(schedule.members) != live:
            raise RunError(f"the schedule for the failure of {', '.join(map(str, down))} is for another job")
        return schedule

    def _choose_planner(self, question: ScheduleRequest) -> Callable[[], Schedule]:
        """Return the function that makes the requested schedule, or raise NoScheduleError."""
        scheduler, at_speeds, rebalancer = self._finders
        if question.held is not None or question.from_checkpoint:
            if rebalancer is None:
                raise NoScheduleError
            if question.held is None:
                return partial(rebalancer.plan_from_checkpoint, question.down, question.speeds or ())
            find = rebalancer.plan_settled if question.settled else rebalancer.plan_at_once
            return partial(find, question.down, question.held, question.speeds or ())
        if question.speeds is not None and at_speeds is not None:
            return partial(at_speeds, question.down, question.speeds)
        if scheduler is None:
            raise NoScheduleError
        return partial(scheduler, question.down)

    def _handle_answer(self, question: ScheduleRequest, found: PreparedSchedule | BaseException) -> None:
        answer: PreparedSchedule | Exception
        if isinstance(found, NoScheduleError | RunError):
            answer = found
        elif isinstance(found, BaseException):
            answer = PlannerFailedError(f"the planner failed: {type(found).__name__}: {first_line(found)}")
        else:
            answer = found
        took = time.monotonic() - self._asked.pop(question)
        self._tell(PlanAnswered(down=question.down, phase=question.phase, took=round(took, 3),
                                        error=str(answer) if isinstance(answer, Exception) else None))
        self._found(ScheduleAnswer(question, answer))


def _refuse_speeds(_down: tuple[Worker, ...], _speeds: Speeds) -> Schedule:
    raise NoScheduleError("no planner for slow workers is configured")


def without_idle_workers(schedule: Schedule) -> Schedule:
    """Return a schedule without the workers that hold no layer. No worker waits for them, and they
    wait for no worker, so they could be many iterations ahead or behind."""
    seats = [seat for seat in schedule.seats if schedule.held_layers_of_seat(seat)]
    if len(seats) == len(schedule.seats):
        return schedule
    used = sorted({seat.program for seat in seats})
    remaining = {seat.worker for seat in seats}
    return replace(schedule, failed=tuple(worker for worker in schedule.grid.workers() if worker not in remaining),
                   seats=tuple(replace(seat, program=used.index(seat.program)) for seat in seats),
                   programs=tuple(schedule.programs[program] for program in used))
