"""Find the workers of a dead coordinator, and learn what they know.

Workers that are alive pause and look for a coordinator at the same address. Each reports its
progress and what it holds (`runtime.protocol.to_coordinator.RecoveryReport`). The losses that the
dead coordinator wrote tell which iterations it had committed. All workers that were found count as
paused, all others as lost, and the next order continues from there.

No worker steps an iteration before the preceding one is committed. So all workers can go back to
the state after one of the last two iterations: the last one that any worker has stepped, if it was
committed, otherwise the one before it. A worker may have begun the step of an iteration that it
does not report. Then the preceding iteration was committed, whatever was written, and the worker
cannot undo it (`RecoveryReport.begun`).

If the state was in doubt, and the dead coordinator had the run go back, some workers may not know
that yet. Nothing that such workers hold or report counts (`Train.trusted_from`).
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
    CoordinatorRestarted,
    Event,
    Failed,
    Joined,
    OrderGiven,
    Recovered,
    Resumed,
    Slowed,
    decode_event,
)
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.protocol.to_coordinator import NOTHING_HELD, HeldState, RecoveryReport
from slipstream.runtime.protocol.to_worker import StepFactor
from slipstream.schedules.schedule import Worker

FIRST_WORKER_SECONDS = 10.0
"""Time limit for the first worker, which looks for a coordinator several times a second."""
# A worker that is stuck in an operation takes a second, thousands of workers take longer.
NEXT_WORKER_SECONDS = 10.0
"""Time limit from one worker to the next."""
# Workers may just be starting.
NEXT_START_SECONDS = 60.0
"""Time limit from one worker to the next if no order was given yet."""


@dataclass(frozen=True, slots=True)
class FailoverResult:
    """State from which a new coordinator continues a run, as workers and files tell it."""

    order: int
    """Number of the last order that any worker has followed."""
    committed: int
    """Last committed iteration."""
    losses: tuple[float, ...]
    """Losses of all committed iterations of the run; nan if no process knows a loss."""
    unwritten: range
    """Committed iterations whose losses the dead coordinator has not written."""
    factor: StepFactor | None
    """Step factor of the last committed iteration; None: no worker knows it."""
    kept: Mapping[Worker, HeldState]
    """State with which each found member can continue after `committed`; empty: with none."""
    missing: tuple[Worker, ...]
    """Members of the last order that were not found."""
    doubted: bool
    """True if the last order's state cannot be trusted: the run must go back."""
    trusted_from: int
    """Last order with which the run went back because of a doubt; 0: none."""


class RejoiningPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Phase in which a new coordinator looks for the workers of a dead one."""

    losses: Sequence[float] | None
    """Losses that the dead coordinator wrote, from iteration `first` on; None: not known."""
    first: int
    """First iteration of the run."""
    gone: frozenset[Worker] = frozenset()
    """Workers that died together with the dead coordinator."""
    expected: frozenset[Worker]
    """Workers to wait for if the dead coordinator had given no order."""
    grid: frozenset[Worker]
    """All workers of the job."""
    began: float
    """Time at which the phase began, by `time.monotonic` like all times here."""
    reports: PersistentMap[Worker, RecoveryReport] = PersistentMap()
    """Report of each worker that was found and is connected."""
    came: frozenset[Worker] = frozenset()
    """All workers that have been ready in this phase, even if lost since."""
    came_last: float | None = None
    """Time at which the last worker was added to `came`; None before the first."""

    def with_worker(
        self, worker: Worker, report: RecoveryReport | None, at: float
    ) -> "RejoiningPhase":
        """Return the phase after a worker is ready at time `at`.

        `report` is None if the worker was just started. Such a worker is recorded, as one that
        holds nothing, only as long as no iteration is known to be committed.
        """
        if report is None:
            if self.losses:
                return self
            # Before the first commit, a new worker is as good as any other.
            report = RecoveryReport(0, (), self.first - 1, NOTHING_HELD, None, pending=False)
        # A worker that is lost and returns does not prolong the phase again.
        new = replace(self, reports=self.reports.with_entry(worker, report))
        return new if worker in self.came else replace(new, came=self.came | {worker}, came_last=at)

    def without_workers(self, workers: Collection[Worker]) -> "RejoiningPhase":
        """Return the phase without the reports of workers that are lost again."""
        return replace(self, reports=self.reports.without_keys(*workers))

    @property
    def missing_members(self) -> frozenset[Worker]:
        """Members of the last order (without any: `expected` workers) that were not found."""
        # Who took part in the last order, its members tell; without one, nobody has trained yet.
        last_order = self._last_order
        if not last_order:
            return self.expected.difference(self.reports)
        failed = next(
            report.failed for report in self.reports.values() if report.order == last_order
        )
        return self.grid.difference(failed, self.reports)

    @property
    def _last_order(self) -> int:
        return max((report.order for report in self.reports.values()), default=0)

    def is_complete(self, at: float) -> bool:
        """Return whether the search for workers is over at time `at`.

        The search is over if only members in `gone` are missing, or if too long has passed since
        the last worker was found. Raises NoLiveWorkerError if none is found, or none is left,
        after `FIRST_WORKER_SECONDS`.
        """
        if not self.reports and at - self.began > FIRST_WORKER_SECONDS:
            raise NoLiveWorkerError(
                "no worker of the run that node 0 led here before has reconnected"
            )
        if not self.reports or self.came_last is None:
            return False
        patience = NEXT_WORKER_SECONDS if self._last_order else NEXT_START_SECONDS
        return self.missing_members <= self.gone or at - self.came_last > patience

    def build_result(self) -> FailoverResult:
        """Return the state from which the run continues, by workers' reports and written losses."""
        last_order = self._last_order
        # Whom to believe: after a doubt, only those that have followed an order since.
        trusted_from = max((report.trusted_from for report in self.reports.values()), default=0)
        trusted = {
            worker: report
            for worker, report in self.reports.items()
            if report.order >= trusted_from and (report.order == last_order or not report.doubted)
        }
        # In the order of their orders, so that what is newer counts.
        reports = sorted(trusted.values(), key=lambda report: report.order)
        factors = {
            report.validated.iteration: report.validated
            for report in reports
            if report.validated is not None
        }
        # Which iteration is the last that is committed for all?
        committed = self._find_committed(
            [report for report in reports if report.kept.layers and report.order == last_order]
        )
        pending = any(report.pending and report.iteration == committed for report in reports)
        if pending and committed not in factors:
            committed -= 1  # no worker knows the factor of its step, so all undo it
        # What were the losses until then? Those that are not written, workers were sent.
        losses_of_workers: dict[int, float] = {}
        for report in reports:
            losses_of_workers.update(report.losses)
        written = tuple(self.losses or ())[: committed + 1 - self.first]
        unwritten = range(self.first + len(written), committed + 1)
        # Who holds the state after it?
        kept = {
            worker: NOTHING_HELD
            for worker, report in self.reports.items()
            if report.order or not last_order
        }
        for worker, report in trusted.items():
            if worker in kept and _can_resume_at(report, committed):
                kept[worker] = report.kept
        return FailoverResult(
            order=last_order,
            committed=committed,
            factor=factors.get(committed),
            unwritten=unwritten,
            losses=(
                *written,
                *(losses_of_workers.get(iteration, math.nan) for iteration in unwritten),
            ),
            missing=tuple(sorted(self.missing_members)) if last_order else (),
            doubted=any(report.doubted and report.order == last_order for report in reports),
            trusted_from=trusted_from,
            kept=kept,
        )

    def _find_committed(self, holders: Sequence[RecoveryReport]) -> int:
        """Return the last committed iteration, by written losses and reports of holders."""
        # `holders` have reports on the last order of workers that hold layers. No worker steps an
        # iteration before the preceding one is committed.
        certain = max(
            (max(report.iteration - 1, report.begun) for report in holders),
            default=self.first - 1,
        )
        if self.losses is None:
            return certain
        # A file may end with lines that a rollback should have removed, if node 0 died before it
        # removed them: no iteration counts that some holder has not stepped.
        last = self.first + len(self.losses) - 1
        stepped = min((report.iteration - report.behind for report in holders), default=last)
        return min(max(last, certain), stepped)


def _can_resume_at(report: RecoveryReport, committed: int) -> bool:
    # A worker can undo its last step, unless it has begun what follows.
    return report.begun <= committed <= report.iteration <= committed + 1


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run's events under earlier coordinators, with which a new one continues."""

    began: float | None = None
    """Time of the run's first order, by this process's `time.monotonic`; None: none was given."""
    failures: int = 0
    """Number of failures since the first order; a domain counts once in each recovery."""
    lost: frozenset[Worker] = frozenset()
    """Members lost in the recovery in progress, if there is one."""
    speeds: Mapping[Worker, float] = {}
    """Last measured factor by which ops of each slow or recovered worker take longer."""
    checkpoint: CheckpointWritten | None = None
    """Event of the last complete checkpoint; None if there is none."""

    def with_event(self, event: Event, domains: FailureDomains) -> "Journal":
        """Return the journal after an event; a run's first order begins a new journal.

        `domains` are the run's failure domains. Times are those of the events, in seconds since
        1970.
        """
        match event:
            case OrderGiven(order=1):
                # Earlier events belong to another run in the same folder.
                return Journal(began=event.time)
            case Slowed():
                return replace(self, speeds={**self.speeds, event.worker: event.factor})
            case Recovered():
                return replace(self, speeds={**self.speeds, event.worker: 1.0})
            case Failed():
                # As in `orders.record_losses`, by which a coordinator counts while it lives.
                is_new = self.lost.isdisjoint(domains.workers_failing_with(event.worker))
                return replace(
                    self._without_speed_of(event.worker),
                    failures=self.failures + is_new,
                    lost=self.lost | {event.worker},
                )
            case Resumed() | CoordinatorRestarted():
                return replace(self, lost=frozenset())
            case Joined():  # it may be on another machine now, or its usual speed is assumed again
                return self._without_speed_of(event.worker)
            case CheckpointWritten():
                return replace(self, checkpoint=event)
        return self

    def _without_speed_of(self, worker: Worker) -> "Journal":
        return replace(
            self, speeds={other: factor for other, factor in self.speeds.items() if other != worker}
        )


EMPTY_JOURNAL = Journal()


def read_journal(folder: Path, domains: FailureDomains) -> Journal:
    """Return the journal of a run's folder, with times of `time.monotonic`; empty if unreadable.

    `domains` are the run's failure domains, whose losses in one recovery count as one failure.
    """
    # A crash may have left half a line.
    journal = EMPTY_JOURNAL
    with suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                journal = journal.with_event(decode_event(line), domains)
    # Times in files are since 1970; decisions use this process's `time.monotonic`.
    now, wall = time.monotonic(), time.time()
    if journal.began is not None:
        journal = replace(journal, began=now - max(0.0, wall - journal.began))
    if journal.checkpoint is not None:
        checkpoint = journal.checkpoint
        checkpoint = replace(checkpoint, time=now - max(0.0, wall - checkpoint.time))
        journal = replace(journal, checkpoint=checkpoint)
    return journal
