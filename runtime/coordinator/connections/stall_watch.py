"""Find the workers that hold up a run when nothing has been committed for long.

All members are asked what they do (`runtime.protocol.to_worker.ReportStatus`). Their main threads
answer, whatever their computing threads wait for. Heartbeats do not show a stall, because the main
thread sends them, too.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from slipstream.runtime.protocol.to_coordinator import WorkerStatus
from slipstream.schedules.schedule import Worker

STATUS_ANSWER_SECONDS = 1.0
"""Time that members have to answer. A worker that answers at all does so in milliseconds."""
HANG_SHARE = 0.8
"""Share of the timeout that a hung activity lasts, as it may have begun late."""
CIRCLE_TIMEOUTS = 1.8
"""Timeouts for which members must wait for each other in one call to be stopped. Two reports in a
row then name them: communication that is only slow ends earlier."""
MAX_NAMES = 8
"""Largest number of workers that a line names."""


@dataclass(frozen=True, slots=True)
class StallReport:
    """Report that no iteration was committed for long, and what each member does."""

    seconds: float
    """Seconds since the last commit or order."""
    timeout_seconds: float
    statuses: Mapping[Worker, WorkerStatus]
    silent: tuple[Worker, ...]
    """Members that were asked for their status and have not answered."""
    planning: bool
    """True if all members wait for a schedule that is being planned."""

    def __str__(self) -> str:
        ordered = sorted(self.statuses.values(), key=lambda one: (one.waits, -one.seconds, one.worker))
        lines = [f"worker {one.worker}: {one.doing}" + (f" ({one.seconds:.0f} s)" if one.seconds >= 1 else "")
                 for one in ordered[:MAX_NAMES]]
        lines += [f"{len(ordered) - MAX_NAMES} others wait, too"] if ordered[MAX_NAMES:] else []
        lines += [f"worker {worker} does not answer" for worker in self.silent[:MAX_NAMES]]
        lines += ["node 0: plans a schedule for the workers that are left"] if self.planning else []
        return f"nothing has been committed for {self.seconds:.0f} s; " + "; ".join(lines)

    def find_culprits(self, held: Mapping[Worker, Collection[int]]) -> list[WorkerStatus]:
        """Return the status of members that were busy too long with one op.

        Too long is most of the timeout, if each of its layers (`held`) has another holder that was
        not: if all holders compute for so long, the work itself is long.
        """
        enough = HANG_SHARE * self.timeout_seconds
        busy = {worker: one for worker, one in self.statuses.items() if not one.waits and one.seconds >= enough}
        spared = {layer for worker, layers in held.items() if worker not in busy for layer in layers}
        return [one for worker, one in sorted(busy.items()) if spared.issuperset(held.get(worker, (-1,)))]


    def find_circle(self) -> list[WorkerStatus]:
        """Return the status of members that have long waited for each other in a circle.

        No schedule lets workers wait in a circle, so a connection between them does not work. Empty
        if each waits, however indirectly, for a member that computes, or whose wait is not known.
        """
        enough = CIRCLE_TIMEOUTS * self.timeout_seconds
        waiting = {worker: one for worker, one in self.statuses.items()
                   if one.waits and one.awaited and one.seconds >= enough}
        while outside := [worker for worker, one in waiting.items() if not waiting.keys() >= {*one.awaited}]:
            for worker in outside:  # it waits for a member that is not in a circle
                del waiting[worker]
        while unawaited := waiting.keys() - {worker for one in waiting.values() for worker in one.awaited}:
            for worker in unawaited:
                del waiting[worker]
        return [one for _, one in sorted(waiting.items())]


class StallWatch:
    """Watch that calls `ask` for each member when the timeout passes without a commit."""

    def __init__(self, timeout_seconds: float, ask: Callable[[Worker], None]) -> None:
        self._timeout = timeout_seconds
        self._ask = ask
        self._since = self._from = self._looked = time.monotonic()
        self._asked: float | None = None
        self._members: tuple[Worker, ...] = ()
        self._statuses: dict[Worker, WorkerStatus] = {}

    def restart_timeout(self) -> None:
        """Restart the timeout, because an iteration was committed or an order was given."""
        self._since = self._from = time.monotonic()
        self._asked = None

    def add_status(self, status: WorkerStatus) -> None:
        """Record the status with which a member has answered."""
        if self._asked is not None:
            self._statuses[status.worker] = status

    def check_progress(self, members: Collection[Worker], interval_seconds: float, *,
                       planning: bool) -> StallReport | None:
        """Ask members what they do once the timeout passes without a commit; report the answers.

        Returns None while there is nothing to report. Members have `STATUS_ANSWER_SECONDS` to
        answer. To be called every `interval_seconds`: a call that comes much later means that this
        process was not scheduled, and that time does not count. `planning` says that members wait
        for a schedule.
        """
        now = time.monotonic()
        if now - self._looked > 3 * interval_seconds:  # this process was not scheduled
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
        if silent and now - self._asked < STATUS_ANSWER_SECONDS:
            return None
        self._asked, self._from = None, now
        return StallReport(now - self._since, self._timeout,
                           {worker: self._statuses[worker] for worker in present if worker not in silent}, silent,
                           planning)
