"""Schedules for the workers that are left: looked up or planned beside the event loop, since that may take seconds."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from slipstream.runtime.coordinator.background import Background, in_thread
from slipstream.runtime.coordinator.event_log import EventLog
from slipstream.runtime.errors import RunError, first_line
from slipstream.runtime.events import Phase, PlanAnswered, PlanAsked
from slipstream.schedules.codec import encode
from slipstream.schedules.errors import NoScheduleError as NoScheduleError
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.parts import Parts, divide
from slipstream.schedules.schedule import Schedule, Worker

Scheduler = Callable[[tuple[Worker, ...]], Schedule]
"""The schedule to use when these workers are down, of the same job as the first one. Raises NoScheduleError.

Called beside the event loop, up to `AT_ONCE` at a time; mostly in a process that ends with its answer, so that whatever
else it changes is lost."""

Speeds = tuple[tuple[Worker, float], ...]
"""All workers that do not take the usual time, sorted, each with its factor of it."""

SchedulerAtSpeeds = Callable[[tuple[Worker, ...], Speeds], Schedule]
"""The schedule to use when these workers are down, and others have these speeds. As `Scheduler` else."""

Held = tuple[tuple[Worker, tuple[LayerRange, ...]], ...]
"""The layers of the schedules that each live worker holds, sorted."""


class Rebalancer(Protocol):
    """Plans where workers hold, or come to hold, other layers than those of the grid's stages.

    All methods are called as a `Scheduler` is, and raise NoScheduleError. `speeds` are as of `SchedulerAtSpeeds`;
    without any, they are the job's.
    """

    def at_once(self, down: tuple[Worker, ...], held: Held, speeds: Speeds) -> Schedule:
        """The schedule when these workers are down, in which nobody needs a layer that it does not hold."""

    def settled(self, down: tuple[Worker, ...], held: Held, speeds: Speeds) -> Schedule:
        """The best one to come to, whatever moves for it."""

    def from_checkpoint(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """One for which all layers are read anew, whoever held them: all wait for it."""


class Finders(NamedTuple):
    """What finds schedules; None: nothing does."""

    scheduler: Scheduler | None
    at_speeds: SchedulerAtSpeeds | None = None
    rebalancer: Rebalancer | None = None


WithDegraded = Callable[[tuple[Worker, ...]], Finders]
"""What finds schedules while these workers, sorted, have less room: they go on as half their processes."""


class Question(NamedTuple):
    """Which schedule is asked for."""

    down: tuple[Worker, ...]
    speeds: Speeds | None = None
    """None: those of the first schedule."""
    held: Held | None = None
    """None: the layers of the grid's stages."""
    settled: bool = False
    from_checkpoint: bool = False
    """Whether all layers are read anew, whatever is held."""
    degraded: tuple[Worker, ...] = ()
    """Live workers that go on as half their processes."""

    @property
    def phase(self) -> Phase:
        """Of the order that the schedule is for."""
        return "settled" if self.settled or self.from_checkpoint else "at once"


AT_ONCE = 2
"""A schedule for which all wait does not wait for one that a join needs, or that another death has made useless. A
settled one is planned beside these, one at a time."""
STUCK_SECONDS = 20.0
"""What is planned for longer holds up nothing else."""


class Prepared(NamedTuple):
    """A schedule as it is given in an order."""

    text: bytes
    """As a file."""
    parts: Parts
    """What each worker is told of it."""


MOST_PREPARED = 8
"""Schedules that are kept prepared: those of the present order, of its join, and of what is decided meanwhile."""
Divide = Callable[[Schedule], Parts]


class ScheduleService:
    """Asks a `Scheduler` for schedules, and keeps the answers until `forget`.

    Parameters
    ----------
    first
        The schedule for the workers that are there from the start.
    scheduler
        What to ask for others; None: the first failure ends the run.
    answered
        Called on the event loop whenever there is an answer.
    events
        Are told what is asked, and what has been answered.
    at_speeds
        What to ask where workers are slow; None: that changes no schedule.
    rebalancer
        What to ask where layers have moved, or may move.
    with_degraded
        What to ask while workers go on as half their processes; None: as else.
    divided
        What divides schedules among their workers.
    background
        Where all of this is done.
    """

    def __init__(self, first: Schedule, scheduler: Scheduler | None, answered: Callable[[], None],
                 events: EventLog | None = None, at_speeds: SchedulerAtSpeeds | None = None,
                 rebalancer: Rebalancer | None = None, with_degraded: WithDegraded | None = None,
                 divided: Divide = divide, background: Background = in_thread) -> None:
        self.first = first
        self.background = background
        self._divided = divided
        self._prepared: dict[int, tuple[Schedule, Prepared]] = {}
        """By the identity of the schedule, which is kept with it."""
        self._finders = Finders(scheduler, at_speeds, rebalancer)
        self._with_degraded = with_degraded
        self.stand_for: Mapping[Worker, int] = {}
        """For how many ranks each process does of a worker."""
        self.answered = answered
        self._events = events or EventLog(None)
        self.at_speeds = at_speeds
        self.speeds: Speeds | None = None
        """What is planned for besides failures, where that is not what the first schedule says."""
        self._answers: dict[Question, Schedule | BaseException] = {}
        self._asked: dict[Question, float] = {}
        """What threads are finding schedules for, and since when."""

    def prepared(self, schedule: Schedule) -> Prepared:
        """A schedule as it is given in an order. What was asked for here was prepared where it was found."""
        _, prepared = self._prepared.get(id(schedule)) or (None, self.prepare(schedule))
        self.has_prepared(schedule, prepared)
        return prepared

    def has_prepared(self, schedule: Schedule, prepared: Prepared) -> None:
        """Keep what was prepared beside the event loop."""
        self._prepared.pop(id(schedule), None)
        self._prepared[id(schedule)] = schedule, prepared
        while len(self._prepared) > MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]

    def prepare(self, schedule: Schedule) -> Prepared:
        """A schedule as it is given in an order, made anew."""
        return Prepared(encode(schedule), self._divided(schedule))

    def for_workers(self, live: Sequence[Worker]) -> Schedule | None:
        """The schedule for these workers, in order; None: it is being found, as `get` says.

        Whoever would hold nothing has no part in it (`without_idle`). Raises NoScheduleError, and RunError where the
        scheduler's answer does not fit.
        """
        if self._as_first(live):
            return self.first
        return self.get(self._down(live))

    def at_once(self, held: Held) -> Schedule | None:
        """The schedule for workers that hold these layers, in which none move; None and errors as of `for_workers`."""
        live = [worker for worker, _ in held]
        return self._find(Question(self._down(live), self.speeds, held, degraded=self._degraded(live)))

    def settled(self, held: Held) -> Schedule | None:
        """The schedule that is the best to come to for workers that hold these layers; None and errors likewise."""
        live = [worker for worker, _ in held]
        if self._as_first(live):
            return self.first
        return self._find(Question(self._down(live), self.speeds, held, settled=True,
                                   degraded=self._degraded(live)))

    def from_checkpoint(self, live: Sequence[Worker]) -> Schedule | None:
        """The schedule for these workers, in order, where all layers are read anew; None and errors likewise."""
        return self._find(Question(self._down(live), self.speeds, from_checkpoint=True,
                                   degraded=self._degraded(live)))

    def planner_at_speeds(self, present: Schedule) -> SchedulerAtSpeeds | None:
        """What plans for speeds where workers hold what a schedule gives them, and none of it moves.

        None where the run has nothing that plans for speeds: settled schedules are not planned for them then, either.
        """
        finders = self._found_by(self._degraded(seat.worker for seat in present.seats))
        rebalancer = finders.rebalancer
        if finders.at_speeds is None or rebalancer is None or all(seat.holds is None for seat in present.seats):
            return finders.at_speeds
        held = {seat.worker: present.holds_of(seat) for seat in present.seats}

        def plan(down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
            live = (worker for worker in present.grid.workers() if worker not in down)
            return rebalancer.at_once(down, tuple((worker, held.get(worker, ())) for worker in live), speeds)

        return plan

    def _as_first(self, live: Sequence[Worker]) -> bool:
        """Whether the first schedule is for these workers, as they are."""
        return self.speeds is None and live == [seat.worker for seat in self.first.seats] and not self._degraded(live)

    def _degraded(self, live: Iterable[Worker]) -> tuple[Worker, ...]:
        """Those of these workers that go on as half their processes, where that makes a difference."""
        if self._with_degraded is None:
            return ()
        return tuple(sorted(worker for worker in live if self.stand_for.get(worker, 1) > 1))

    def _found_by(self, degraded: tuple[Worker, ...]) -> Finders:
        return self._finders if not degraded or self._with_degraded is None else self._with_degraded(degraded)

    def _down(self, live: Sequence[Worker]) -> tuple[Worker, ...]:
        return tuple(sorted(set(self.first.grid.workers()) - set(live)))

    def _fitting(self, down: tuple[Worker, ...], schedule: Schedule) -> Schedule:
        live = [worker for worker in self.first.grid.workers() if worker not in down]
        if schedule.grid != self.first.grid or list(schedule.members) != live:
            raise RunError(f"the schedule for the failure of {', '.join(map(str, down))} is one of another job")
        return schedule

    def get(self, down: tuple[Worker, ...]) -> Schedule | None:
        """The schedule for these failures; None: it is being found, call again when `answered` has been called.

        Raises what the scheduler has raised.
        """
        live = set(self.first.grid.workers()).difference(down)
        return self._find(Question(down, self.speeds, degraded=self._degraded(live)))

    def _find(self, question: Question) -> Schedule | None:
        """The answer; None where it is not there yet. Raises what was raised."""
        answer = self._answers.get(question)
        if isinstance(answer, BaseException):
            raise answer
        since = time.monotonic() - STUCK_SECONDS
        beside = sum(one.settled == question.settled and asked > since for one, asked in self._asked.items())
        if answer is None and question not in self._asked and beside < (1 if question.settled else AT_ONCE):
            find = self._finder(question)
            self._asked[question] = time.monotonic()
            self._events.write(PlanAsked(down=question.down, phase=question.phase))

            def work() -> tuple[Schedule, Prepared]:
                found = without_idle(self._fitting(question.down, find()))
                return found, self.prepare(found)

            self.background(work, partial(self._take, question), awaited=not question.settled)
        return answer

    def _finder(self, question: Question) -> Callable[[], Schedule]:
        """What finds the answer. Raises NoScheduleError where there is nothing to ask."""
        scheduler, at_speeds, rebalancer = self._found_by(question.degraded)
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

    def forget(self) -> None:
        """Drop all answers."""
        self._answers.clear()

    def _take(self, question: Question, found: tuple[Schedule, Prepared] | BaseException) -> None:
        answer: Schedule | BaseException
        if isinstance(found, BaseException):
            answer = found
        else:
            answer, prepared = found
            self.has_prepared(answer, prepared)
        if isinstance(answer, BaseException) and not isinstance(answer, NoScheduleError | RunError):
            answer = NoScheduleError(f"the planner failed: {type(answer).__name__}: {first_line(answer)}")
        self._answers[question] = answer
        took = time.monotonic() - self._asked.pop(question)
        self._events.write(PlanAnswered(down=question.down, phase=question.phase, took=round(took, 3),
                                        error=str(answer) if isinstance(answer, BaseException) else None))
        self.answered()


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
