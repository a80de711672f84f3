"""Recoveries: changes of members, and how long each took."""

import time
from collections.abc import Collection

import msgspec

from schedules.schedule import Worker


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the workers that take part."""

    iteration: int
    """The first one that ran with the new workers."""
    dead: tuple[Worker, ...]
    returned: tuple[Worker, ...]
    reasons: tuple[str, ...]
    """Of each death."""
    live: int
    """Workers that take part from then on."""
    seconds: float
    """The pause: from the first death, or from when all had stopped, until the first worker began its first op."""
    broken: str | None = None
    """Where it began with a connection that broke: who lost it, to whom, and why."""
    meanwhile: int = 0
    """Iterations that were committed while layers were fetched for it."""
    commit_gap_seconds: float | None = None
    """From the last commit before to the first one after: the pause, what was lost, and an iteration. None: there were
    not both in this run."""

    went_back_to: int | None = None
    """Where nobody held some layer any more: the iteration of the checkpoint that the run went back to, or its first.
    """
    repeated: int = 0
    """Committed iterations that are run again for that; their numbers are the same."""

    def __str__(self) -> str:
        back = [f"worker {worker} is back" for worker in self.returned]
        causes = ", ".join([*self.reasons, *back]) or self.broken or "a connection broke"
        again = "" if self.went_back_to is None else (
            f": no live worker had all layers, so the run went back to iteration {self.went_back_to}, and "
            f"{self.repeated} iterations are run again, with the same numbers")
        return f"{causes}{again}: iteration {self.iteration} runs on {self.live} workers, {self.seconds:.2f} s later"


class RecoveryClock:
    """Measures recoveries, each of which may take several orders."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._ordered = 0.0
        self._dead: list[tuple[Worker, str]] = []
        self._broken: str | None = None
        self._returned: set[Worker] = set()
        self._meanwhile = 0
        self._back: tuple[int | None, int] = None, 0
        self._committed: float | None = None
        self._without_gap = 0
        """Recoveries, the last ones, after which nothing has been committed."""
        self.recoveries: list[Recovery] = []

    def lost(self, worker: Worker, reason: str, since: float) -> None:
        """A member is gone, since a time by time.monotonic. Time before the last order does not count."""
        since = max(since, self._ordered)
        self._began = since if self._began is None else min(self._began, since)
        self._dead.append((worker, reason))
        self._returned.discard(worker)

    def begin(self) -> None:
        """Members stop, unless they have before."""
        if self._began is None:
            self._began = time.monotonic()

    def broke(self, worker: Worker, reason: str) -> None:
        """A member has lost a connection. What others then lose follows from it."""
        self.begin()
        self._broken = self._broken or f"worker {worker} lost a connection, {reason}"

    def ordered(self, returned: Collection[Worker], meanwhile: int) -> None:
        """An order is given, with workers that come in."""
        self._returned.update(returned)
        self._meanwhile, self._ordered = meanwhile, time.monotonic()

    def went_back(self, iteration: int, repeated: int) -> None:
        """Layers were lost: iterations from this one on are run again."""
        before, already = self._back
        self._back = iteration if before is None else min(before, iteration), already + repeated

    def end(self, iteration: int, live: int) -> Recovery | None:
        """A member runs its first op; None where that ends no recovery."""
        if self._began is None:
            return None
        recovery = Recovery(
            iteration=iteration, dead=tuple(worker for worker, _ in self._dead), live=live,
            returned=tuple(sorted(self._returned)), reasons=tuple(reason for _, reason in self._dead),
            seconds=time.monotonic() - self._began, broken=self._broken, meanwhile=self._meanwhile,
            went_back_to=self._back[0], repeated=self._back[1])
        self._began, self._dead, self._broken, self._returned, self._back = None, [], None, set(), (None, 0)
        self.recoveries.append(recovery)
        self._without_gap += 1
        return recovery

    def committed(self) -> None:
        """An iteration was committed."""
        now = time.monotonic()
        if self._without_gap and self._committed is not None:
            gap = now - self._committed
            self.recoveries[-self._without_gap:] = [msgspec.structs.replace(one, commit_gap_seconds=gap)
                                                 for one in self.recoveries[-self._without_gap:]]
        self._committed, self._without_gap = now, 0
