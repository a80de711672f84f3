"""Schedules for the workers that are left: looked up or planned in threads, since that may take seconds."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from runtime.coordinator.event_log import EventLog
from runtime.errors import RunError
from runtime.events import PlanAnswered, PlanAsked
from schedules.schedule import Schedule, Worker

T = TypeVar("T")


class NoScheduleError(RuntimeError):
    """There is no schedule for these failures. The message is one line, or empty where failures end the run."""


Scheduler = Callable[[tuple[Worker, ...]], Schedule]
"""The schedule to use when these workers are down, of the same job as the first one. Raises NoScheduleError.

Called from planning threads, up to `AT_ONCE` at a time."""

Speeds = tuple[tuple[Worker, float], ...]
"""All workers that do not take the usual time, sorted, each with its factor of it."""

SchedulerAtSpeeds = Callable[[tuple[Worker, ...], Speeds], Schedule]
"""The schedule to use when these workers are down, and others have these speeds. As `Scheduler` else."""

AT_ONCE = 2
"""A schedule for which all wait does not wait for one that a join needs, or that another death has made useless."""


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
    """

    def __init__(self, first: Schedule, scheduler: Scheduler | None, answered: Callable[[], None],
                 events: EventLog | None = None, at_speeds: SchedulerAtSpeeds | None = None) -> None:
        self.first = first
        self._scheduler = scheduler
        self.answered = answered
        self._events = events or EventLog(None)
        self.at_speeds = at_speeds
        self.speeds: Speeds | None = None
        """What is planned for besides failures, where that is not what the first schedule says."""
        self._answers: dict[_Question, Schedule | BaseException] = {}
        self._asked: dict[_Question, float] = {}
        """What threads are finding schedules for, and since when."""

    def for_workers(self, live: Sequence[Worker]) -> Schedule | None:
        """The schedule for these workers, in order; None: it is being found, as `get` says.

        Raises NoScheduleError, and RunError where the scheduler's answer does not fit.
        """
        if self.speeds is None and live == [seat.worker for seat in self.first.seats]:
            return self.first
        down = tuple(sorted(set(self.first.grid.workers()) - set(live)))
        schedule = self.get(down)
        if schedule is not None and (schedule.grid != self.first.grid
                                     or [seat.worker for seat in schedule.seats] != list(live)):
            raise RunError(f"the schedule for the failure of {', '.join(map(str, down))} is one of another job")
        return schedule

    def get(self, down: tuple[Worker, ...]) -> Schedule | None:
        """The schedule for these failures; None: it is being found, call again when `answered` has been called.

        Raises what the scheduler has raised.
        """
        if self._scheduler is None:
            raise NoScheduleError
        question = down, self.speeds
        answer = self._answers.get(question)
        if isinstance(answer, BaseException):
            raise answer
        if answer is None and question not in self._asked and len(self._asked) < AT_ONCE:
            self._asked[question] = time.monotonic()
            self._events.write(PlanAsked(down=down, phase="at once"))
            in_background(partial(self._find, question), partial(self._take, question))
        return answer

    def forget(self) -> None:
        """Drop all answers."""
        self._answers.clear()

    def _find(self, question: "_Question") -> Schedule:
        down, speeds = question
        if speeds is not None and self.at_speeds is not None:
            return self.at_speeds(down, speeds)
        assert self._scheduler is not None
        return self._scheduler(down)

    def _take(self, question: "_Question", answer: Schedule | BaseException) -> None:
        self._answers[question] = answer
        took = time.monotonic() - self._asked.pop(question)
        self._events.write(PlanAnswered(down=question[0], phase="at once", took=round(took, 3),
                                        error=str(answer) if isinstance(answer, BaseException) else None))
        self.answered()


_Question = tuple[tuple[Worker, ...], Speeds | None]
"""Who is down, and which speeds are known."""


def in_background(work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
    """Do long work in a thread, and have its result, or what it raises, handled on the event loop."""
    loop = asyncio.get_running_loop()

    def run() -> None:
        answer: T | BaseException
        try:
            answer = work()
        except BaseException as error:
            answer = error
        with contextlib.suppress(RuntimeError):  # the run is over, and the loop closed
            loop.call_soon_threadsafe(done, answer)

    # A daemon, unlike the threads of asyncio.to_thread: a run that ends does not wait for it.
    threading.Thread(target=run, daemon=True, name="planning").start()
