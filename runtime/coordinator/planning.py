"""Schedules for the workers that are left: looked up or planned in threads, since that may take seconds."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from runtime.coordinator.event_log import EventLog
from runtime.errors import RunError
from runtime.events import PlanAnswered, PlanAsked
from schedules.schedule import Schedule, Worker


class NoScheduleError(RuntimeError):
    """There is no schedule for these failures. The message is one line, or empty where failures end the run."""


Scheduler = Callable[[tuple[Worker, ...]], Schedule]
"""The schedule to use when these workers are down, of the same job as the first one. Raises NoScheduleError.

Called from planning threads, up to `AT_ONCE` at a time."""

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
    """

    def __init__(self, first: Schedule, scheduler: Scheduler | None, answered: Callable[[], None],
                 events: EventLog | None = None) -> None:
        self.first = first
        self._scheduler = scheduler
        self._answered = answered
        self._events = events or EventLog(None)
        self._answers: dict[tuple[Worker, ...], Schedule | BaseException] = {}
        self._asked: dict[tuple[Worker, ...], float] = {}
        """The failures for which threads are finding schedules, and since when."""

    def for_workers(self, live: Sequence[Worker]) -> Schedule | None:
        """The schedule for these workers, in order; None: it is being found, as `get` says.

        Raises NoScheduleError, and RunError where the scheduler's answer does not fit.
        """
        if live == [seat.worker for seat in self.first.seats]:
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
        answer = self._answers.get(down)
        if isinstance(answer, BaseException):
            raise answer
        if answer is None and down not in self._asked and len(self._asked) < AT_ONCE:
            self._ask(down)
        return answer

    def forget(self) -> None:
        """Drop all answers."""
        self._answers.clear()

    def _ask(self, down: tuple[Worker, ...]) -> None:
        self._asked[down] = time.monotonic()
        self._events.write(PlanAsked(down=down, phase="at once"))
        scheduler, loop = self._scheduler, asyncio.get_running_loop()
        assert scheduler is not None

        def work() -> None:
            answer: Schedule | BaseException
            try:
                answer = scheduler(down)
            except BaseException as error:
                answer = error
            with contextlib.suppress(RuntimeError):  # the run is over, and the loop closed
                loop.call_soon_threadsafe(self._take, down, answer)

        # A daemon, unlike the threads of asyncio.to_thread: a run that ends does not wait for it.
        threading.Thread(target=work, daemon=True, name="planning").start()

    def _take(self, down: tuple[Worker, ...], answer: Schedule | BaseException) -> None:
        self._answers[down] = answer
        took = time.monotonic() - self._asked.pop(down)
        self._events.write(PlanAnswered(down=down, phase="at once", took=round(took, 3),
                                        error=str(answer) if isinstance(answer, BaseException) else None))
        self._answered()
