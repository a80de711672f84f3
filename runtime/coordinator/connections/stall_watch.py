"""Stall watch: says who keeps a run from going on, when nothing has been committed for long.

All members are asked what they do (`runtime.protocol.to_worker.ReportStatus`); their main threads answer, whatever
their computing threads wait for. Heartbeats do not show this: the main thread sends them, too.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from slipstream.runtime.protocol.to_coordinator import Status
from slipstream.schedules.schedule import Worker

ANSWER_SECONDS = 1.0
"""A worker that answers at all does so in milliseconds."""
MOST = 0.8
"""Of the timeout: what hangs has begun after the last commit."""
TOLD = 8
"""Workers that a line names."""


@dataclass(frozen=True, slots=True)
class Stall:
    """What all members do while nothing is committed."""

    seconds: float
    """Since anything was."""
    timeout_seconds: float
    statuses: Mapping[Worker, Status]
    silent: tuple[Worker, ...]
    """Members that have not answered."""
    planning: bool
    """Whether a schedule is being planned, for which all wait."""

    def __str__(self) -> str:
        ordered = sorted(self.statuses.values(), key=lambda one: (one.waits, -one.seconds, one.worker))
        told = [f"worker {one.worker}: {one.doing}" + (f" ({one.seconds:.0f} s)" if one.seconds >= 1 else "")
                for one in ordered[:TOLD]]
        told += [f"{len(ordered) - TOLD} others wait, too"] if ordered[TOLD:] else []
        told += [f"worker {worker} does not answer" for worker in self.silent[:TOLD]]
        told += ["node 0: plans a schedule for the workers that are left"] if self.planning else []
        return f"nothing has been committed for {self.seconds:.0f} s; " + "; ".join(told)

    def culprits(self, held: Mapping[Worker, Collection[int]]) -> list[Status]:
        """Members that have been at one thing of their own for most of the timeout, and can be done without.

        `held` are the layers of all members. Where all that hold a layer compute for so long, it is the work that is
        long.
        """
        enough = MOST * self.timeout_seconds
        busy = {worker: one for worker, one in self.statuses.items() if not one.waits and one.seconds >= enough}
        spared = {layer for worker, layers in held.items() if worker not in busy for layer in layers}
        return [one for worker, one in sorted(busy.items()) if spared.issuperset(held.get(worker, (-1,)))]


class StallWatch:
    """Asks who keeps a run from going on, once for each timeout that passes without a commit."""

    def __init__(self, timeout_seconds: float, ask: Callable[[Worker], None]) -> None:
        self._timeout = timeout_seconds
        self._ask = ask
        self._since = self._from = self._looked = time.monotonic()
        self._asked: float | None = None
        self._members: tuple[Worker, ...] = ()
        self._statuses: dict[Worker, Status] = {}

    def progressed(self) -> None:
        """Something was committed, or an order was given."""
        self._since = self._from = time.monotonic()
        self._asked = None

    def answered(self, status: Status) -> None:
        """A member says what it does."""
        if self._asked is not None:
            self._statuses[status.worker] = status

    def look(self, members: Collection[Worker], interval_seconds: float, *, planning: bool) -> Stall | None:
        """To be called at an interval: asks these members where it is time to; the stall, once they have answered."""
        now = time.monotonic()
        if now - self._looked > 3 * interval_seconds:  # this process did not run, as when it was stopped
            self._from = max(self._from, now - interval_seconds)
        self._looked = now
        if self._asked is None:
            if now - self._from > self._timeout:
                self._asked, self._members, self._statuses = now, tuple(sorted(members)), {}
                for worker in self._members:
                    self._ask(worker)
            return None
        present = [worker for worker in self._members if worker in members]
        silent = tuple(worker for worker in present if worker not in self._statuses)
        if silent and now - self._asked < ANSWER_SECONDS:
            return None
        self._asked, self._from = None, now
        return Stall(now - self._since, self._timeout,
                     {worker: self._statuses[worker] for worker in present if worker not in silent}, silent, planning)
