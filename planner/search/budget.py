"""What a search may use: time, one seed, a way to be stopped, and somebody to tell of progress."""

import threading
import time

import msgspec

from planner.progress import SearchProgress


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Passed along the steps of a search."""

    deadline: float
    """A time.monotonic()."""
    seed: int = 0
    progress: SearchProgress = msgspec.field(default_factory=SearchProgress)
    stop: threading.Event = msgspec.field(default_factory=threading.Event)
    """Set from outside: the search then ends with the best plan so far."""

    @property
    def seconds(self) -> float:
        """Left until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    @property
    def stopped(self) -> bool:
        """Whether the search is to end before the deadline."""
        return self.stop.is_set()

    def share(self, share: float) -> "Budget":
        """A part of the time that is left, with all else."""
        return self.until(time.monotonic() + share * self.seconds)

    def until(self, deadline: float) -> "Budget":
        """Another deadline, with all else."""
        return msgspec.structs.replace(self, deadline=deadline)
