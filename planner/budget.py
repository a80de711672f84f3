"""Limits of a search: seconds or counted steps, a seed, a stop event, and progress.

With seconds, how far a search gets, and so its plan, depends on the machine and its load. With
steps, one seed gives one plan on any machine, at any load, with any number of threads.
"""

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import msgspec

# --- Progress -------------------------------------------------------------------------------------


ProgressCallback = Callable[[str], None]
"""Function that receives a line of progress, such as a better plan."""

CountCallback = Callable[[int, int], None]
"""Function that receives progress as two numbers: finished parts of the work, and all."""


def ignore_progress(line: str) -> None:
    """Do nothing with a line of progress: the default where functions report progress."""


class SearchProgress:
    """Reporter of a search's progress, which reports only plans shorter than all before."""

    def __init__(self, line: ProgressCallback = ignore_progress) -> None:
        self.report_line = line
        """Function that receives each line of progress; for plans, `report_plan` calls it."""
        self._least = math.inf

    def report_plan(self, method: str, period: float, bound: float) -> None:
        """Report a plan that `method` found, if its period is the shortest so far.

        Period and lower bound are in seconds.
        """
        # The same period in other ticks, with another rounding, is no news.
        if period < self._least * (1 - 1e-9):
            self._least = period
            self.report_line(f"{method}: period {period:g} s, bound {bound:g} s")

    def of_part(self, subject: str) -> "SearchProgress":
        """Return a reporter for a search of another problem, whose lines begin with `subject`."""
        return SearchProgress(lambda line: self.report_line(f"{subject}: {line}"))


STEP_SECONDS = 2.5e-6
"""Approximate seconds of a search step on an idle core, such as an annealing move."""
LIST_SCHEDULE_STEPS = 40.0
"""Search steps counted for making one list schedule, in addition to those for its ops."""
LIST_SCHEDULE_STEPS_PER_OP = 0.12
"""Search steps counted for each op of a list schedule."""
SCHEDULER_STEPS_PER_OP = 0.24
"""Search steps counted for each op when a list scheduler is constructed."""
LAYOUT_STEPS = 2.0
"""Search steps counted for each micro-batch at each stage when a layout is constructed."""
SOLVER_UNITS_PER_STEP = 5e-7
"""Units of CP-SAT's deterministic time that count as one search step."""


class SearchEnd(StrEnum):
    """Reason why a search ended."""

    BOUND = "the bound is reached"
    SECONDS = "the time is up"
    STEPS = "the steps are made"
    STALE = "nothing better was found for long"
    INTERRUPT = "it was interrupted"


class Clock:
    """Wall clock of a search whose limit is in seconds; it does not count steps."""

    limit_reason = SearchEnd.SECONDS
    """Reason why a search ends when the time of this clock is up."""

    steps = 0.0
    """Number of search steps counted so far; always 0 on a wall clock."""

    def now(self) -> float:
        """Return the time in seconds of `time.monotonic`."""
        return time.monotonic()

    def process_seconds(self) -> float:
        """Return the processor time of this process, in seconds."""
        return time.process_time()

    def thread_seconds(self) -> float:
        """Return the processor time of this thread, in seconds."""
        return time.thread_time()

    def count_steps(self, steps: float) -> None:
        """Ignore these search steps; a `StepClock` counts them."""

    def fork(self) -> "Clock":
        """Return a clock for a concurrent thread: here, this clock itself."""
        return self

    def join(self, other: "Clock") -> None:
        """Ignore the clock of an ended thread; a `StepClock` takes over its time."""

    def solver_limits(self, seconds: float) -> dict[str, float]:
        """Return the CP-SAT parameters that end a solve after these seconds, at least 0.01."""
        return {"max_time_in_seconds": max(0.01, seconds)}

    def format_duration(self, seconds: float) -> str:
        """Return a duration in seconds on this clock as text for a message: `12 s`."""
        return f"{seconds:.2g} s"


class StepClock(Clock):
    """Clock of one thread on which each counted step takes `STEP_SECONDS`, on any machine."""

    limit_reason = SearchEnd.STEPS

    def __init__(self, steps: float = 0.0) -> None:
        self.steps = steps

    def now(self) -> float:
        """Return the time in seconds: the number of counted steps, each of `STEP_SECONDS`."""
        return self.steps * STEP_SECONDS

    process_seconds = thread_seconds = now

    def count_steps(self, steps: float) -> None:
        """Count search steps that have just been done, which advances the clock."""
        self.steps += steps

    def fork(self) -> "Clock":
        """Return a clock for another thread, which starts at this clock's time."""
        return StepClock(self.steps)

    def join(self, other: Clock) -> None:
        """Set this clock to the time of an ended thread's clock, if that is later."""
        self.steps = max(self.steps, other.steps)

    def solver_limits(self, seconds: float) -> dict[str, float]:
        """Return the CP-SAT parameters that end a solve after these seconds of this clock.

        A solve has at least 0.001 units of CP-SAT's deterministic time.
        """
        # CP-SAT's deterministic time counts its work, in units of its own.
        return {"max_deterministic_time": max(1e-3, seconds / STEP_SECONDS * SOLVER_UNITS_PER_STEP)}

    def format_duration(self, seconds: float) -> str:
        """Return a duration in seconds of this clock as text: its number of search steps."""
        return f"{round(seconds / STEP_SECONDS):,} steps"


class Tally:
    """Counters of how often each technique was tried, and shortened the best plan."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.helped: Counter[str] = Counter()

    def count_uses(self, what: str, tried: int = 1, helped: int = 0) -> None:
        """Count `tried` uses of a technique, of which `helped` shortened the best plan.

        The name `what` is "technique" or "technique: operator".
        """
        self.tried[what] += tried
        self.helped[what] += helped

    def join(self, other: "Tally") -> None:
        """Add the counts of another thread's tally to this one."""
        self.tried.update(other.tried)
        self.helped.update(other.helped)

    @property
    def techniques(self) -> list[str]:
        """Techniques that were tried at least once, in the order of their first use."""
        return list(
            dict.fromkeys(what.partition(":")[0] for what, tried in self.tried.items() if tried)
        )


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a search, with its clock, seed, progress reports and counters."""

    deadline: float
    """Time at which the search must end, in seconds of `clock`."""
    clock: Clock = msgspec.field(default_factory=Clock)
    seed: int = 0
    progress: SearchProgress = msgspec.field(default_factory=SearchProgress)
    tally: Tally = msgspec.field(default_factory=Tally)
    stop: threading.Event = msgspec.field(default_factory=threading.Event)
    """Event set from outside to end the search with the best plan so far."""
    solved: list[Any] | None = None
    """Earlier solutions of subproblems (`search.incumbent.SolvedPiece`), to start from and add to.

    None: none are kept.
    """

    @classmethod
    def of_steps(cls, steps: int, seed: int = 0) -> "Budget":
        """Return a budget of this number of counted search steps, with a new clock."""
        return cls(deadline=steps * STEP_SECONDS, clock=StepClock(), seed=seed)

    @classmethod
    def of_seconds(cls, seconds: float, seed: int = 0) -> "Budget":
        """Return a budget of `seconds` of wall time from now on."""
        return cls(deadline=time.monotonic() + seconds, seed=seed)

    @property
    def seconds_left(self) -> float:
        """Seconds left until the deadline on the budget's clock; negative after it."""
        return self.deadline - self.clock.now()

    @property
    def is_stopped(self) -> bool:
        """True if the search must end before the deadline: `stop` is set, as by Ctrl-C."""
        return self.stop.is_set()

    def end_reason(self, best: int, bound: int, needs: float = 0.0) -> SearchEnd | None:
        """Return why a search must end now, or None if it may continue.

        A search must end if its shortest period, `best`, attains the proven `bound` (both in
        ticks), if it was interrupted, or if its next operation, which takes `needs` seconds, would
        end after the deadline.
        """
        if best <= bound:
            return SearchEnd.BOUND
        if self.is_stopped:
            return SearchEnd.INTERRUPT
        return self.clock.limit_reason if self.seconds_left <= needs else None

    def with_share(self, share: float) -> "Budget":
        """Return a copy that ends after a `share` (0 to 1) of the time left."""
        return self.with_seconds(share * self.seconds_left)

    def with_seconds(self, seconds: float) -> "Budget":
        """Return a copy of the budget that ends in `seconds` on its clock."""
        return self.with_deadline(self.clock.now() + seconds)

    def with_deadline(self, deadline: float) -> "Budget":
        """Return a copy of the budget with another deadline, in seconds of its clock."""
        return msgspec.structs.replace(self, deadline=deadline)

    def fork(self) -> "Budget":
        """Return a budget for a concurrent thread, with its own counters.

        If steps are counted, its clock is its own, too. When the thread has ended, `join` takes
        over its time and counts.
        """
        return msgspec.structs.replace(self, clock=self.clock.fork(), tally=Tally())

    def join(self, other: "Budget") -> None:
        """Take over time and counts of `other`, from `fork`, whose thread has ended."""
        self.clock.join(other.clock)
        self.tally.join(other.tally)


# --- Ctrl-C during a search: noted, and acted upon where the best plan so far is safe -------------


class _InterruptFlag:
    """Signal handler that at its first call sets an event, and later raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, *_: object) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        self.event.set()


@contextmanager
def defer_interrupts() -> Iterator[threading.Event]:
    """Return a context in which the first Ctrl-C only sets the yielded event.

    A second Ctrl-C raises KeyboardInterrupt. In other threads than the main one the event is never
    set. An interrupt that ends the inner of two nested contexts also sets the event of the outer.
    """
    # Python's own handler may raise anywhere, even where exceptions are swallowed. Only the main
    # thread of a program receives signals.
    if threading.current_thread() is not threading.main_thread():
        yield threading.Event()
        return
    note = _InterruptFlag()
    before = signal.signal(signal.SIGINT, note)
    try:
        yield note.event
    finally:
        signal.signal(signal.SIGINT, before)
        # The outer search did not see the signal that ended this one.
        if isinstance(before, _InterruptFlag) and note.event.is_set():
            before.event.set()
