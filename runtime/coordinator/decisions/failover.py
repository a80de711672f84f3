"""Find the workers of a dead coordinator, and learn what they know.

Workers that are alive pause and look for a coordinator at the same address. Each reports its
progress and what it holds (`runtime.protocol.to_coordinator.RecoveryReport`). The losses that the
dead coordinator wrote tell which iterations it had committed. All workers that were found are then
treated as paused, and the next order continues from there. Workers that were not found count as
lost.

No worker steps an iteration before the preceding one is committed. So the state that all workers
can go back to is that after one of the last two iterations: the last one that any worker has
stepped, if it was committed, otherwise the one before it. A worker may have begun the step of an
iteration that it does not report. Then the preceding iteration was committed, whatever was written,
and the worker cannot undo it (`RecoveryReport.begun`).

If copies differed, and the dead coordinator had the run go back, some workers may not know that
yet. Nothing that they hold or report counts (`Train.trusted_from`).
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.errors import NoLiveWorkerError
from slipstream.runtime.events import (
    EVENTS,
    CheckpointWritten,
    Event,
    Failed,
    Joined,
    NodeLost,
    OrderGiven,
    Recovered,
    Slowed,
    decode_event,
)
from slipstream.runtime.protocol.to_coordinator import NOTHING_HELD, HeldState, RecoveryReport
from slipstream.runtime.protocol.to_worker import StepFactor
from slipstream.schedules.schedule import Worker

FIRST_WORKER_SECONDS = 10.0
"""Time limit for the first worker, which looks for a coordinator several times a second."""
NEXT_WORKER_SECONDS = 10.0
"""Time limit from one worker to the next: stuck ones take a second, thousands more."""
NEXT_START_SECONDS = 60.0
"""Time limit to the next worker before the first order, when they may be about to start."""


@dataclass(frozen=True, slots=True)
class FailoverResult:
    """State of a run from which a new coordinator continues, by its workers and files."""

    order: int
    """Number of the last order that any worker has followed."""
    committed: int
    """Last committed iteration."""
    losses: tuple[float, ...]
    """Losses of all committed iterations of the run. Nan for an iteration whose loss no process
    knows."""
    unwritten: range
    """Committed iterations whose losses the dead coordinator has not written."""
    factor: StepFactor | None
    """Gradient factor of the last committed iteration, if any worker knows it."""
    kept: Mapping[Worker, HeldState]
    """Layers and parts that each found worker holds, if it can go back to `committed`. A worker
    that was about to join when the coordinator died is left out."""
    missing: tuple[Worker, ...]
    """Members of the last order that were not found."""
    doubted: bool
    """True if the last order ended because copies differed, so that the run must go back."""
    trusted_from: int
    """Last order in which the run went back because copies differed, or 0."""


class RejoiningPhase(msgspec.Struct, frozen=True, kw_only=True):
    """First phase of a new coordinator, which looks for a dead one's workers. All times are of
    `time.monotonic`."""

    losses: Sequence[float] | None
    """Losses that the dead coordinator wrote, from iteration `first` on; None if not known."""
    first: int
    """First iteration of the run."""
    gone: frozenset[Worker] = frozenset()
    """Workers that died together with the dead coordinator."""
    expected: frozenset[Worker]
    """Workers to wait for if the dead coordinator had given no order."""
    grid: frozenset[Worker]
    """All workers of the job."""
    began: float
    known: PersistentMap[Worker, RecoveryReport] = PersistentMap()
    came: frozenset[Worker] = frozenset()
    """Workers that have connected in this phase, even if lost again: none prolongs it twice."""
    came_last: float | None = None
    """Time at which a worker last connected for the first time; None before the first."""

    def with_worker(self, worker: Worker, known: RecoveryReport | None, at: float) -> "RejoiningPhase":
        """Return this phase after a worker has connected and reported what it knows.

        A worker that knows nothing (None) has just been started; it is added only if no iteration
        has been committed.
        """
        if known is None:
            if self.losses:
                return self
            known = RecoveryReport(0, (), self.first - 1, NOTHING_HELD, None, pending=False)
        new = replace(self, known=self.known.with_entry(worker, known))
        return new if worker in self.came else replace(new, came=self.came | {worker}, came_last=at)

    def without_workers(self, workers: Collection[Worker]) -> "RejoiningPhase":
        """Return this phase without workers that had connected and are lost again."""
        return replace(self, known=self.known.without_keys(*workers))

    @property
    def missing_members(self) -> frozenset[Worker]:
        """Members of the last order that have not connected to this coordinator."""
        last_order = self._last_order
        if not last_order:
            return self.expected.difference(self.known)
        failed = next(known.failed for known in self.known.values() if known.order == last_order)
        return self.grid.difference(failed, self.known)

    @property
    def _last_order(self) -> int:
        """Number of the last order that any worker has followed; 0 if there was none."""
        return max((known.order for known in self.known.values()), default=0)

    def is_complete(self, at: float) -> bool:
        """Return whether the search for workers is over at time `at`.

        It is if no member is missing, or too long has passed since the last worker connected.
        Raises NoLiveWorkerError if none has connected within `FIRST_WORKER_SECONDS`.
        """
        if not self.known and at - self.began > FIRST_WORKER_SECONDS:
            raise NoLiveWorkerError("no worker of the run that node 0 led here before has reconnected")
        if not self.known or self.came_last is None:
            return False
        patience = NEXT_WORKER_SECONDS if self._last_order else NEXT_START_SECONDS
        return self.missing_members <= self.gone or at - self.came_last > patience

    def build_result(self) -> FailoverResult:
        """Return the state to continue from, by the workers' reports and the written losses."""
        last = None if self.losses is None else self.first + len(self.losses) - 1
        last_order = self._last_order
        trusted_from = max((known.trusted_from for known in self.known.values()), default=0)
        trusted = {worker: known for worker, known in self.known.items()
                   if known.order >= trusted_from and (known.order == last_order or not known.doubted)}
        everyone = sorted(trusted.values(), key=lambda known: known.order)  # so that what is newer counts
        holders = [known for known in everyone if known.kept.layers and known.order == last_order]
        before = max((max(known.iteration - 1, known.begun) for known in holders), default=self.first - 1)
        # A file may end with lines that a rollback should have removed, if node 0 died before it removed them.
        stepped = min((known.iteration - known.behind for known in holders), default=before if last is None else last)
        committed = before if last is None else min(max(last, before), stepped)
        factors = {report.validated.iteration: report.validated for report in everyone if report.validated is not None}
        pending = any(known.pending and known.iteration == committed for known in everyone)
        if pending and committed not in factors:
            committed -= 1  # no worker knows the factor of its step, so all undo it
        losses_of_workers = {iteration: loss for known in everyone for iteration, loss in known.losses.items()}
        written = tuple(self.losses or ())[:committed + 1 - self.first]
        unwritten = range(self.first + len(written), committed + 1)
        return FailoverResult(order=last_order, committed=committed, factor=factors.get(committed), unwritten=unwritten,
                              losses=(*written,
                                      *(losses_of_workers.get(iteration, math.nan) for iteration in unwritten)),
                              missing=tuple(sorted(self.missing_members)) if last_order else (),
                              doubted=any(known.doubted and known.order == last_order for known in everyone),
                              trusted_from=trusted_from,
                              kept={worker: known.kept if worker in trusted and _can_resume_at(known, committed)
                                    else NOTHING_HELD
                                    for worker, known in self.known.items() if known.order or not last_order})


def _can_resume_at(known: RecoveryReport, committed: int) -> bool:
    return known.begun <= committed <= known.iteration <= committed + 1


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the events of one run, over all coordinators that have led it."""

    began: float | None = None
    """Time of the run's first order, by this process's `time.monotonic`, as in `checkpoint`."""
    failures: int = 0
    """Failures since the first order; workers of one machine lost together count as one."""
    speeds: Mapping[Worker, float] = {}
    """Last measured slowdown, as a factor, of each worker that was ever slow."""
    checkpoint: CheckpointWritten | None = None
    """Event of the last complete checkpoint; None if there is none."""

    def with_event(self, event: Event) -> "Journal":
        """Return the journal after the next event. The first order of a run begins a new
        journal."""
        match event:
            case OrderGiven(order=1):
                return Journal(began=event.time)  # earlier events belong to another run in the same folder
            case Slowed():
                return replace(self, speeds={**self.speeds, event.worker: event.factor})
            case Recovered():
                return replace(self, speeds={**self.speeds, event.worker: 1.0})
            case Failed():
                return replace(self._without_speed_of(event.worker), failures=self.failures + 1)
            case Joined():  # it may be on another machine now, or its usual speed is assumed again
                return self._without_speed_of(event.worker)
            case NodeLost():
                return replace(self, failures=self.failures + 1 - len(event.workers))
            case CheckpointWritten():
                return replace(self, checkpoint=event)
        return self

    def _without_speed_of(self, worker: Worker) -> "Journal":
        return replace(self, speeds={other: factor for other, factor in self.speeds.items() if other != worker})


EMPTY_JOURNAL = Journal()


def read_journal(folder: Path) -> Journal:
    """Return the journal of a run's folder. Lines that cannot be decoded and a missing file are
    ignored."""
    journal = EMPTY_JOURNAL
    with suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                journal = journal.with_event(decode_event(line))
    now, wall, last = time.monotonic(), time.time(), journal.checkpoint
    return replace(
        journal, began=None if journal.began is None else now - max(0.0, wall - journal.began),
        checkpoint=None if last is None else replace(last, time=now - max(0.0, wall - last.time)))
