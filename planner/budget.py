"""What a search may use: seconds or counted steps, one seed, a way to be stopped, and somebody to tell of progress.

With seconds, how far a search gets depends on the machine and on what else runs there, and so does its plan. With
steps, one seed gives one plan: on any machine, at any load, with any number of threads.
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

# --- Progress ---------------------------------------------------------------------------------------------------------


ProgressCallback = Callable[[str], None]
"""Called with one line: a better plan was found, or what takes long now."""

CountCallback = Callable[[int, int], None]
"""Called with (parts finished, parts in all) by work that is done in parts."""


def quiet(line: str) -> None:
    """A callback that does nothing."""


class SearchProgress:
    """What one search tells: plans that are better than all that it told of before, whichever step found them."""

    def __init__(self, line: ProgressCallback = quiet) -> None:
        self.line = line
        """Tells anything else."""
        self._least = math.inf

    def found(self, method: str, period: float, bound: float) -> None:
        """A plan with this period, in seconds, and its proven bound."""
        if period < self._least * (1 - 1e-9):  # the same in other ticks is no news
            self._least = period
            self.line(f"{method}: period {period:g} s, bound {bound:g} s")


STEP_SECONDS = 2.5e-6
"""What a step takes on an idle core, about. One move of annealing is a step; all else is counted in as many moves as it
takes as long as."""
LIST_SCHEDULE_STEPS, LIST_SCHEDULE_STEPS_PER_OP = 40.0, 0.12
"""Steps of a list schedule, and of each of its ops."""
SCHEDULER_STEPS_PER_OP = 0.24
"""Steps for each op to make a list scheduler."""
LAYOUT_STEPS = 2.0
"""Steps to make a layout, for each micro-batch at a stage."""
SOLVER_UNITS_PER_STEP = 5e-7
"""Units of CP-SAT's deterministic time."""


class SearchEnd(StrEnum):
    """Why a search ends."""

    BOUND = "the bound is reached"
    SECONDS = "the time is up"
    STEPS = "the steps are made"
    STALE = "nothing better was found for long"
    INTERRUPT = "it was interrupted"


class Clock:
    """The time of this machine. Counted steps take what they take."""

    end = SearchEnd.SECONDS
    """Why a search ends that has used up all of it."""

    steps = 0.0
    """Counted so far."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def processor(self) -> float:
        """Seconds that processors have worked for this process."""
        return time.process_time()

    def thread(self) -> float:
        """Seconds that a processor has worked for this thread."""
        return time.thread_time()

    def count(self, steps: float) -> None:
        """So many steps were made."""

    def beside(self) -> "Clock":
        """A clock for a thread that runs beside this one."""
        return self

    def join(self, other: "Clock") -> None:
        """A thread beside this one, with a clock of its own, has ended."""

    def solver_limits(self, seconds: float) -> dict[str, float]:
        """The parameters of CP-SAT that end it within a time."""
        return {"max_time_in_seconds": max(0.01, seconds)}

    def described(self, seconds: float) -> str:
        """A span of this clock in words."""
        return f"{seconds:.2g} s"


class StepClock(Clock):
    """Counts steps; each takes `STEP_SECONDS`. Only one thread counts on each."""

    end = SearchEnd.STEPS

    def __init__(self, steps: float = 0.0) -> None:
        self.steps = steps

    def now(self) -> float:
        """Seconds that the counted steps stand for."""
        return self.steps * STEP_SECONDS

    processor = thread = now

    def count(self, steps: float) -> None:
        """So many steps were made."""
        self.steps += steps

    def beside(self) -> "Clock":
        """A clock that begins with the steps of this one: what other threads do does not change what it says."""
        return StepClock(self.steps)

    def join(self, other: Clock) -> None:
        """Go on from the later of them."""
        self.steps = max(self.steps, other.steps)

    def solver_limits(self, seconds: float) -> dict[str, float]:
        """In units of CP-SAT's own count, which is the same on any machine."""
        return {"max_deterministic_time": max(1e-3, seconds / STEP_SECONDS * SOLVER_UNITS_PER_STEP)}

    def described(self, seconds: float) -> str:
        """In steps."""
        return f"{round(seconds / STEP_SECONDS):,} steps"


class Tally:
    """How often each technique of a search was tried, and how often it made the best plan of something shorter."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.helped: Counter[str] = Counter()

    def add(self, what: str, tried: int = 1, helped: int = 0) -> None:
        """`what`: a technique; an operator of one is "technique: operator"."""
        self.tried[what] += tried
        self.helped[what] += helped

    def join(self, other: "Tally") -> None:
        """What a thread beside this one has tried."""
        self.tried.update(other.tried)
        self.helped.update(other.helped)

    @property
    def techniques(self) -> list[str]:
        """Those that were really tried, in the order in which they began."""
        return list(dict.fromkeys(what.partition(":")[0] for what, tried in self.tried.items() if tried))


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Passed along the steps of a search."""

    deadline: float
    """By the clock."""
    clock: Clock = msgspec.field(default_factory=Clock)
    seed: int = 0
    progress: SearchProgress = msgspec.field(default_factory=SearchProgress)
    tally: Tally = msgspec.field(default_factory=Tally)
    stop: threading.Event = msgspec.field(default_factory=threading.Event)
    """Set from outside: the search then ends with the best plan so far."""
    solved: list[Any] | None = None
    """What searches before this one have found (`search.incumbent.Solved`), from which this one begins where its pieces
    are the same, and to which it adds; None: nothing is kept."""

    @classmethod
    def of_steps(cls, steps: int, seed: int = 0) -> "Budget":
        """So many steps from now on."""
        return cls(deadline=steps * STEP_SECONDS, clock=StepClock(), seed=seed)

    @classmethod
    def of_seconds(cls, seconds: float, seed: int = 0) -> "Budget":
        """So many seconds from now on."""
        return cls(deadline=time.monotonic() + seconds, seed=seed)

    @property
    def seconds(self) -> float:
        """Left until the deadline; negative after it."""
        return self.deadline - self.clock.now()

    @property
    def stopped(self) -> bool:
        """Whether the search is to end before the deadline."""
        return self.stop.is_set()

    def end(self, best: int, bound: int, needs: float = 0.0) -> SearchEnd | None:
        """Why a search ends whose best plan has this period, in ticks. None: it goes on.

        `needs`: seconds for what it does next.
        """
        if best <= bound:
            return SearchEnd.BOUND
        if self.stopped:
            return SearchEnd.INTERRUPT
        return self.clock.end if self.seconds <= needs else None

    def share(self, share: float) -> "Budget":
        """A part of the time that is left, with all else."""
        return self.within(share * self.seconds)

    def within(self, seconds: float) -> "Budget":
        """So many seconds from now on, with all else."""
        return self.until(self.clock.now() + seconds)

    def until(self, deadline: float) -> "Budget":
        """Another deadline, with all else."""
        return msgspec.structs.replace(self, deadline=deadline)

    def beside(self) -> "Budget":
        """The same for a thread that runs beside this one; see `join`."""
        return msgspec.structs.replace(self, clock=self.clock.beside(), tally=Tally())

    def join(self, other: "Budget") -> None:
        """The thread beside this one, which had that budget, has ended."""
        self.clock.join(other.clock)
        self.tally.join(other.tally)


# --- Ctrl-C during a search: noted, and acted upon where the best plan so far is safe ---------------------------------


class _Note:
    """A handler that sets an event; at the second signal it raises KeyboardInterrupt after all."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, *_: object) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        self.event.set()


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event instead of raising KeyboardInterrupt; a second one raises it after all.

    An exception could strike anywhere, also where Python swallows it. Only the main thread of a program gets signals;
    elsewhere the event is never set. Where one search is part of another, what has ended the inner ends the outer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield threading.Event()
        return
    note = _Note()
    before = signal.signal(signal.SIGINT, note)
    try:
        yield note.event
    finally:
        signal.signal(signal.SIGINT, before)
        if isinstance(before, _Note) and note.event.is_set():
            before.event.set()
