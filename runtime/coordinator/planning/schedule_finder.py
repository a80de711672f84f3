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
"""Function that returns the job's schedule without the given workers.

The function raises NoScheduleError if there is none. It is called concurrently with the event loop,
perhaps several times at once, and for large jobs in processes that end with the answer, so that
side effects are lost.
"""


class Rebalancer(Protocol):
    """Interface of planners of schedules whose workers hold layers of other stages, too.

    All methods are called outside the event loop's thread, plan without the workers in `down`, and
    raise NoScheduleError if there is no such schedule. `speeds` has the factor by which each slow
    worker's ops take longer; empty: speeds are those of the job. `holders` has the layers of each
    live worker.
    """

    def plan_at_once(
        self, down: tuple[Worker, ...], holders: HeldLayers, speeds: Speeds, /
    ) -> Schedule:
        """Return a schedule for which no worker has to load a layer."""

    def plan_rebalanced(
        self, down: tuple[Worker, ...], holders: HeldLayers, speeds: Speeds, /
    ) -> Schedule:
        """Return the best schedule for which any layers may move between live workers."""

    def plan_from_checkpoint(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """Return a schedule whose workers all read their layers from a checkpoint."""


class SchedulePlanners(NamedTuple):
    """Planners of a run, each None if the run does not have it."""

    scheduler: Scheduler | None
    """Planner for failures."""
    at_speeds: SchedulerAtSpeeds | None = None
    """Planner for failures and slow workers."""
    rebalancer: Rebalancer | None = None
    """Planner that may move layers."""


MAX_CONCURRENT_REQUESTS = 2
"""Largest number of requests answered at a time, besides one for a rebalanced schedule."""
STUCK_REQUEST_SECONDS = 20.0
"""Seconds after which an unanswered request no longer counts towards these limits."""


class ScheduleDivider(Protocol):
    """Interface of functions that divide a schedule among workers, as `divide_schedule` does."""

    def __call__(
        self, schedule: Schedule, /, alike: EquivalentSchedule | None = None
    ) -> DividedSchedule:
        """Return each worker's share of a schedule: what it must know, such as its program.

        `alike` saves most of the computation if another schedule has been divided that differs only
        in the numbers of its pipelines. It is a pair of that schedule's shares and a mapping from
        its pipelines' numbers to those of `schedule`.
        """


PrecomputedLookup = Callable[[tuple[Worker, ...]], tuple[Schedule, DividedSchedule] | None]
"""Function that returns the schedule without given workers, and its shares; None: not planned."""


class ScheduleService:
    """Service that answers requests for schedules in the background.

    Parameters
    ----------
    grid
        Grid of pipelines and stages of the job.
    finders
        Planners to ask.
    found
        Function that is called on the event loop with each answer.
    tell
        Function that is called with an event of the run's log for each schedule request that
        planners get, and for its answer.
    divided
        Function that divides a schedule into what each worker must know of it.
    background
        Function that runs the planners.
    find_precomputed
        Function that returns a schedule planned before the failure, or None.
    """

    def __init__(
        self,
        grid: Grid,
        finders: SchedulePlanners,
        found: Callable[[ScheduleAnswer | SpeedAnswer], None],
        tell: Callable[[Event], None] = lambda _: None,
        divided: ScheduleDivider = divide_schedule,
        background: BackgroundRunner = run_in_thread,
        find_precomputed: PrecomputedLookup = lambda _: None,
    ) -> None:
        self._grid = grid
        self._divided = divided
        self._background = background
        self._find_precomputed = find_precomputed
        self._finders = finders
        self._found = found
        self._tell = tell
        self._asked: dict[ScheduleRequest, float] = {}
        """Requests that are being answered, and their times of `time.monotonic`."""

    def prepare_schedule(self, schedule: Schedule) -> PreparedSchedule:
        """Return a schedule with all that its orders send, which takes long to compute."""
        return prepare_schedule(schedule, self._divided(schedule))

    def request_schedule(self, question: ScheduleRequest) -> None:
        """Start to find the requested schedule in the background.

        Does nothing if this request, or too many others, are in progress. If too many are, the
        caller must repeat the call after one of them has been answered. If there is no planner for
        it, or a plan made in advance, `found` gets the answer before this returns.
        """
        # Is it in progress, or are too many others of its kind? Planners that hang do not count.
        since = time.monotonic() - STUCK_REQUEST_SECONDS
        running = sum(
            request.rebalanced == question.rebalanced and start > since
            for request, start in self._asked.items()
        )
        limit = 1 if question.rebalanced else MAX_CONCURRENT_REQUESTS
        if question in self._asked or running >= limit:
            return
        # Does this run have a planner for it?
        try:
            find = self._choose_planner(question)
        except NoScheduleError as error:
            self._found(ScheduleAnswer(question, error))
            return
        self._asked[question] = time.monotonic()
        self._tell(PlanAsked(down=question.down, phase=question.phase))
        # Is it a failure without anything else, planned in advance?
        precomputed = None
        if question == ScheduleRequest(question.down):
            precomputed = self._find_precomputed(question.down)
        if precomputed is not None:
            self._handle_answer(question, prepare_schedule(*precomputed))
            return

        def work() -> PreparedSchedule:
            return self.prepare_schedule(
                without_idle_workers(self._require_fitting(question.down, find()))
            )

        self._background(
            work, partial(self._handle_answer, question), awaited=not question.rebalanced
        )

    def request_speed_decision(self, question: SpeedRequest) -> None:
        """Start to decide in the background which schedule fits the measured speeds best."""
        plan = self._choose_speed_planner(question)

        def work() -> SpeedDecision:
            # A schedule that is chosen is prepared here, too: the event loop has no time for it.
            decision = answer_request(question, plan)
            if decision.schedule is None:
                return decision
            return decision._replace(prepared=self.prepare_schedule(decision.schedule))

        self._background(
            work, lambda answer: self._found(SpeedAnswer(question, answer)), awaited=False
        )

    def _choose_speed_planner(self, question: SpeedRequest) -> SchedulerAtSpeeds:
        """Return a planner for given speeds that keeps layers in place; perhaps one that raises."""
        # If the run has none, return a function that raises NoScheduleError.
        present, finders = question.present, self._finders
        rebalancer = finders.rebalancer
        if finders.at_speeds is None:
            return _refuse_speeds
        if rebalancer is None or all(seat.holds is None for seat in present.seats):
            return finders.at_speeds
        layers_of = {seat.worker: present.held_layers_of_seat(seat) for seat in present.seats}

        def plan(down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
            live = (worker for worker in present.grid.workers() if worker not in down)
            holders = tuple((worker, layers_of.get(worker, ())) for worker in live)
            return rebalancer.plan_at_once(down, holders, speeds)

        return plan

    def _require_fitting(self, down: tuple[Worker, ...], schedule: Schedule) -> Schedule:
        live = [worker for worker in self._grid.workers() if worker not in down]
        if schedule.grid != self._grid or list(schedule.members) != live:
            raise RunError(
                f"the schedule for the failure of {', '.join(map(str, down))} is for another job"
            )
        return schedule

    def _choose_planner(self, question: ScheduleRequest) -> Callable[[], Schedule]:
        scheduler, at_speeds, rebalancer = self._finders
        # Layers do not lie as in the job, or are all to be read anew.
        if question.held is not None or question.from_checkpoint:
            if rebalancer is None:
                raise NoScheduleError
            if question.held is None:
                return partial(
                    rebalancer.plan_from_checkpoint, question.down, question.speeds or ()
                )
            find = rebalancer.plan_rebalanced if question.rebalanced else rebalancer.plan_at_once
            return partial(find, question.down, question.held, question.speeds or ())
        # Layers in place: with the measured speeds, if a planner knows them.
        if question.speeds is not None and at_speeds is not None:
            return partial(at_speeds, question.down, question.speeds)
        if scheduler is None:
            raise NoScheduleError
        return partial(scheduler, question.down)

    def _handle_answer(
        self, question: ScheduleRequest, result: PreparedSchedule | BaseException
    ) -> None:
        # An error of the planner itself is distinguished from the answer that there is no schedule.
        answer: PreparedSchedule | Exception
        if isinstance(result, PreparedSchedule | NoScheduleError | RunError):
            answer = result
        else:
            answer = PlannerFailedError(
                f"the planner failed: {type(result).__name__}: {first_line(result)}"
            )
        # The log has how long it took, and the answer leads to the next decision.
        took = time.monotonic() - self._asked.pop(question)
        self._tell(
            PlanAnswered(
                down=question.down,
                phase=question.phase,
                took=round(took, 3),
                error=str(answer) if isinstance(answer, Exception) else None,
            )
        )
        self._found(ScheduleAnswer(question, answer))


def _refuse_speeds(_down: tuple[Worker, ...], _speeds: Speeds) -> Schedule:
    raise NoScheduleError("no planner for slow workers is configured")


def without_idle_workers(schedule: Schedule) -> Schedule:
    """Return the schedule without the workers that hold no layer."""
    # No worker waits for these, and they wait for no worker, so they could be many iterations ahead
    # or behind.
    seats = [seat for seat in schedule.seats if schedule.held_layers_of_seat(seat)]
    if len(seats) == len(schedule.seats):
        return schedule
    used = sorted({seat.program for seat in seats})
    remaining = {seat.worker for seat in seats}
    return replace(
        schedule,
        failed=tuple(worker for worker in schedule.grid.workers() if worker not in remaining),
        seats=tuple(replace(seat, program=used.index(seat.program)) for seat in seats),
        programs=tuple(schedule.programs[program] for program in used),
    )
