"""Schedules for the workers that are left: looked up or planned beside the event loop, since that may take seconds."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.questions import (
    PlannerFailedError,
    Prepared,
    Question,
    ScheduleFound,
    SchedulerAtSpeeds,
)
from slipstream.runtime.coordinator.decisions.speed_planning import Decision, SpeedQuestion, SpeedsPlanned, answer_to
from slipstream.runtime.coordinator.planning.background import Background, in_thread
from slipstream.runtime.errors import RunError, first_line
from slipstream.runtime.events import Event, PlanAnswered, PlanAsked
from slipstream.schedules.codec import encode
from slipstream.schedules.parts import Alike, Parts, divide
from slipstream.schedules.schedule import Grid, HeldLayers, Schedule, Speeds, Worker
from slipstream.schedules.schedule import NoScheduleError as NoScheduleError

Scheduler = Callable[[tuple[Worker, ...]], Schedule]
"""The schedule to use when these workers are down, of the same job as the first one. Raises NoScheduleError.

Called beside the event loop, up to `AT_ONCE` at a time; mostly in a process that ends with its answer, so that whatever
else it changes is lost."""


class Rebalancer(Protocol):
    """Plans where workers hold, or come to hold, other layers than those of the grid's stages.

    All methods are called as a `Scheduler` is, and raise NoScheduleError. `speeds` are as of `SchedulerAtSpeeds`;
    without any, they are the job's.
    """

    def at_once(self, down: tuple[Worker, ...], held: HeldLayers, speeds: Speeds) -> Schedule:
        """The schedule when these workers are down, in which nobody needs a layer that it does not hold."""

    def settled(self, down: tuple[Worker, ...], held: HeldLayers, speeds: Speeds) -> Schedule:
        """The best one to come to, whatever moves for it."""

    def from_checkpoint(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """One for which all layers are read anew, whoever held them: all wait for it."""


class Finders(NamedTuple):
    """What finds schedules; None: nothing does."""

    scheduler: Scheduler | None
    at_speeds: SchedulerAtSpeeds | None = None
    rebalancer: Rebalancer | None = None


AT_ONCE = 2
"""A schedule for which all wait does not wait for one that a join needs, or that another death has made useless. A
settled one is planned beside these, one at a time."""
STUCK_SECONDS = 20.0
"""What is planned for longer holds up nothing else."""


MOST_PREPARED = 8
"""Schedules that are kept prepared: those of the present order, of its join, and of what is decided meanwhile."""


class Divide(Protocol):
    """Divides schedules among their workers, as `schedules.parts.divide` does."""

    def __call__(self, schedule: Schedule, /, alike: Alike | None = None) -> Parts:
        """`alike`: see there."""


Known = Callable[[tuple[Worker, ...]], tuple[Schedule, Parts] | None]


class ScheduleService:
    """Asks for schedules. No answer is kept here, but for what it takes to give it in an order.

    Parameters
    ----------
    grid
        The job's shape.
    finders
        What to ask.
    found
        Called on the event loop with each answer.
    tell
        Called with what is asked, and with what has been answered.
    divided
        What divides schedules among their workers.
    background
        Where all of this is done.
    known
        Gives at once what is known ahead for workers being down.
    """

    def __init__(self, grid: Grid, finders: Finders, found: Callable[[ScheduleFound | SpeedsPlanned], None],
                 tell: Callable[[Event], None] = lambda _: None,
                 divided: Divide = divide, background: Background = in_thread,
                 known: Known = lambda _: None) -> None:
        self._grid = grid
        self._divided = divided
        self._background = background
        self._known = known
        self._prepared: dict[int, tuple[Schedule, Prepared]] = {}
        """By the identity of the schedule, which is kept with it."""
        self._finders = finders
        self._found = found
        self._tell = tell
        self._asked: dict[Question, float] = {}
        """What threads are finding schedules for, and since when."""

    def prepared(self, schedule: Schedule) -> Prepared:
        """A schedule as it is given in an order. What was asked for here was prepared where it was found."""
        _, prepared = self._prepared.get(id(schedule)) or (None, self._prepare(schedule))
        self._has_prepared(schedule, prepared)
        return prepared

    def _has_prepared(self, schedule: Schedule, prepared: Prepared) -> None:
        """Keep what was prepared beside the event loop."""
        self._prepared.pop(id(schedule), None)
        self._prepared[id(schedule)] = schedule, prepared
        while len(self._prepared) > MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]

    def _prepare(self, schedule: Schedule) -> Prepared:
        return Prepared(encode(schedule), self._divided(schedule))

    def find(self, question: Question) -> None:
        """Have the answer found, unless it is being, or too many others are: then this is to be called again after one
        of them has been answered."""
        since = time.monotonic() - STUCK_SECONDS
        beside = sum(one.settled == question.settled and asked > since for one, asked in self._asked.items())
        if question in self._asked or beside >= (1 if question.settled else AT_ONCE):
            return
        try:
            find = self._finder(question)
        except NoScheduleError as error:
            self._found(ScheduleFound(question, error))
            return
        self._asked[question] = time.monotonic()
        self._tell(PlanAsked(down=question.down, phase=question.phase))
        known = self._known(question.down) if question == Question(question.down) else None
        if known is not None:
            schedule, parts = known
            self._take(question, (schedule, Prepared(encode(schedule), parts)))
            return

        def work() -> tuple[Schedule, Prepared]:
            found = without_idle(self._fitting(question.down, find()))
            return found, self._prepare(found)

        self._background(work, partial(self._take, question), awaited=not question.settled)

    def decide(self, question: SpeedQuestion) -> None:
        """Have it decided what to do at these speeds."""
        plan = self._planner_at_speeds(question)

        def work() -> tuple[Decision, Prepared | None]:
            decision = answer_to(question, plan)
            other = decision.schedule
            return decision, None if other is None else self._prepare(other)

        def decided(found: tuple[Decision, Prepared | None] | BaseException) -> None:
            if not isinstance(found, BaseException):
                decision, prepared = found
                if decision.schedule is not None and prepared is not None:
                    self._has_prepared(decision.schedule, prepared)
            self._found(SpeedsPlanned(question, found if isinstance(found, BaseException) else decision))

        self._background(work, decided, awaited=False)

    def _planner_at_speeds(self, question: SpeedQuestion) -> SchedulerAtSpeeds:
        """What plans for speeds where workers hold what the present schedule gives them, and none of it moves."""
        present, finders = question.present, self._finders
        rebalancer = finders.rebalancer
        if finders.at_speeds is None:
            return _none
        if rebalancer is None or all(seat.holds is None for seat in present.seats):
            return finders.at_speeds
        held = {seat.worker: present.holds_of(seat) for seat in present.seats}

        def plan(down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
            live = (worker for worker in present.grid.workers() if worker not in down)
            return rebalancer.at_once(down, tuple((worker, held.get(worker, ())) for worker in live), speeds)

        return plan

    def _fitting(self, down: tuple[Worker, ...], schedule: Schedule) -> Schedule:
        live = [worker for worker in self._grid.workers() if worker not in down]
        if schedule.grid != self._grid or list(schedule.members) != live:
            raise RunError(f"the schedule for the failure of {', '.join(map(str, down))} is one of another job")
        return schedule

    def _finder(self, question: Question) -> Callable[[], Schedule]:
        """What finds the answer. Raises NoScheduleError where there is nothing to ask."""
        scheduler, at_speeds, rebalancer = self._finders
        if question.held is not None or question.from_checkpoint:
            if rebalancer is None:
                raise NoScheduleError
            if question.held is None:
                return partial(rebalancer.from_checkpoint, question.down, question.speeds or ())
            find = rebalancer.settled if question.settled else rebalancer.at_once
            return partial(find, question.down, question.held, question.speeds or ())
        if question.speeds is not None and at_speeds is not None:
            return partial(at_speeds, question.down, question.speeds)
        if scheduler is None:
            raise NoScheduleError
        return partial(scheduler, question.down)

    def _take(self, question: Question, found: tuple[Schedule, Prepared] | BaseException) -> None:
        answer: Schedule | Exception
        if isinstance(found, NoScheduleError | RunError):
            answer = found
        elif isinstance(found, BaseException):
            answer = PlannerFailedError(f"the planner failed: {type(found).__name__}: {first_line(found)}")
        else:
            answer, prepared = found
            self._has_prepared(answer, prepared)
        took = time.monotonic() - self._asked.pop(question)
        self._tell(PlanAnswered(down=question.down, phase=question.phase, took=round(took, 3),
                                        error=str(answer) if isinstance(answer, Exception) else None))
        self._found(ScheduleFound(question, answer))


def _none(_down: tuple[Worker, ...], _speeds: Speeds) -> Schedule:
    raise NoScheduleError("nothing plans for speeds")


def without_idle(schedule: Schedule) -> Schedule:
    """A schedule without those who hold nothing.

    Nobody would wait for them, nor they for anybody: they could be many iterations ahead, or behind.
    """
    seats = [seat for seat in schedule.seats if schedule.holds_of(seat)]
    if len(seats) == len(schedule.seats):
        return schedule
    used = sorted({seat.program for seat in seats})
    there = {seat.worker for seat in seats}
    return replace(schedule, failed=tuple(worker for worker in schedule.grid.workers() if worker not in there),
                   seats=tuple(replace(seat, program=used.index(seat.program)) for seat in seats),
                   programs=tuple(schedule.programs[program] for program in used))
