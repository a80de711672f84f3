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
# Below 1, as the op may have begun some time after the last commit.
HANG_SHARE = 0.8
"""Share of the timeout after which a member in one op counts as hung."""
CIRCLE_TIMEOUTS = 1.8
"""Timeouts that members wait in a circle before they are stopped: at the second report."""
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
        ordered = sorted(
            self.statuses.values(),
            key=lambda status: (status.waits, -status.seconds, status.worker),
        )
        lines = [_describe_status(status) for status in ordered[:MAX_NAMES]]
        if ordered[MAX_NAMES:]:
            lines.append(f"{len(ordered) - MAX_NAMES} others wait, too")
        lines += [f"worker {worker} does not answer" for worker in self.silent[:MAX_NAMES]]
        if self.planning:
            lines.append("node 0: plans a schedule for the workers that are left")
        return f"nothing has been committed for {self.seconds:.0f} s; " + "; ".join(lines)

    def find_culprits(self, layers_of: Mapping[Worker, Collection[int]]) -> list[WorkerStatus]:
        """Return the status of each member that hangs in one op.

        A member hangs if it has been busy with the op for most of the timeout, and each of its
        layers (`layers_of`) has another holder that has not: if all holders are busy for so long,
        the work itself is long.
        """
        enough = HANG_SHARE * self.timeout_seconds
        busy = {
            worker: status
            for worker, status in self.statuses.items()
            if not status.waits and status.seconds >= enough
        }
        # Layers that have a holder which was not busy for so long.
        spared = {
            layer for worker, layers in layers_of.items() if worker not in busy for layer in layers
        }
        return [
            status
            for worker, status in sorted(busy.items())
            if spared.issuperset(layers_of.get(worker, (-1,)))
        ]

    def find_circle(self) -> list[WorkerStatus]:
        """Return the status of members that have long waited for each other in a circle.

        No schedule lets workers wait in a circle, so a connection between them does not work. The
        result is empty if each member waits, directly or through others, for a member that computes
        or of which it is not known whom it awaits.
        """
        enough = CIRCLE_TIMEOUTS * self.timeout_seconds
        waiting = {
            worker: status
            for worker, status in self.statuses.items()
            if status.waits and status.awaited and status.seconds >= enough
        }
        # Remove members that wait for one outside of a circle, until none is left.
        while outside := [
            worker for worker, status in waiting.items() if not waiting.keys() >= {*status.awaited}
        ]:
            for worker in outside:
                del waiting[worker]
        # Remove members for which none in a circle waits.
        while unawaited := waiting.keys() - {
            worker for status in waiting.values() for worker in status.awaited
        }:
            for worker in unawaited:
                del waiting[worker]
        return [status for _, status in sorted(waiting.items())]


def _describe_status(status: WorkerStatus) -> str:
    line = f"worker {status.worker}: {status.doing}"
    return f"{line} ({status.seconds:.0f} s)" if status.seconds >= 1 else line


class StallWatch:
    """Watch that asks members what they do when the timeout passes without a commit."""

    def __init__(self, timeout_seconds: float, ask: Callable[[Worker], None]) -> None:
        self._timeout = timeout_seconds
        self._ask = ask
        self._since = self._from = self._looked = time.monotonic()
        self._asked: float | None = None
        self._members: tuple[Worker, ...] = ()
        self._statuses: dict[Worker, WorkerStatus] = {}

    def restart_timeout(self) -> None:
        """Restart the timeout after a commit or an order; drop what members were asked."""
        self._since = self._from = time.monotonic()
        self._asked = None

    def add_status(self, status: WorkerStatus) -> None:
        """Record the status with which a member has answered, unless none is awaited."""
        if self._asked is not None:
            self._statuses[status.worker] = status

    def check_progress(
        self, members: Collection[Worker], interval_seconds: float, *, planning: bool
    ) -> StallReport | None:
        """Ask members what they do if nothing is committed for long; return their answers.

        Must be called every `interval_seconds`. Calls return None until, after asking, all members
        have answered or had the time to; that call returns the answers, and the timeout begins
        anew. `planning` says whether all members wait for a schedule.
        """
        now = time.monotonic()
        # A call that comes much too late: this process was not scheduled, which does not count.
        if now - self._looked > 3 * interval_seconds:
            self._from = max(self._from, now - interval_seconds)
        self._looked = now
        # The answers arrive by `add_status`, and a later call reports them.
        if self._asked is None:
            if now - self._from > self._timeout:
                self._asked, self._members, self._statuses = now, tuple(sorted(members)), {}
                for worker in self._members:
                    self._ask(worker)
            return None
        # Report when all that are still members have answered, or some had the time to.
        present = [worker for worker in self._members if worker in members]
        silent = tuple(worker for worker in present if worker not in self._statuses)
        if silent and now - self._asked < STATUS_ANSWER_SECONDS:
            return None
        self._asked, self._from = None, now
        return StallReport(
            now - self._since,
            self._timeout,
            {worker: self._statuses[worker] for worker in present if worker not in silent},
            silent,
            planning,
        )
