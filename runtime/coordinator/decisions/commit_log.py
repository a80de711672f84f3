"""Combine the reports of workers into committed iterations, losses, times and digests.

An iteration is committed when every member has stepped it, its loss is finite (or `CommitLog.skips`
is set), copies of state and samples are equal where compared, and, if steps depend on the gradients
of all stages, its factor is known (`runtime.state.step_factors`). A committed iteration is never
undone, unless the run goes back to a checkpoint. A member that has also stepped the next iteration
can go back by one step.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.comparisons import (
    CopyDifference,
    SampleDifference,
    find_difference,
    find_sample_difference,
)
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap, PersistentSeries
from slipstream.runtime.protocol.to_coordinator import Finished, IterationReport
from slipstream.runtime.protocol.to_worker import StepFactor
from slipstream.schedules.measured_trace import MeasuredIteration, MeasuredOp, MeasuredTrace
from slipstream.schedules.schedule import Worker

MIN_KEPT_WINDOWS = 4096
"""Smallest number of last iterations whose busy windows are kept; medians need no more."""


class CommitLogError(RuntimeError):
    """Error of one line: workers' inputs or results differ, or a loss is never finite."""


class CommittedIteration(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: an iteration has been committed, with these values."""

    iteration: int
    loss: float
    window_seconds: float
    """Longest busy window of any member, in seconds."""
    gradient_norm: float | None
    """Norm of all gradients before clipping; None if it was not finite."""
    evaluation: float | None
    """Validation loss after the iteration; None if it was not evaluated, or is not finite."""
    cost_error: float | None
    """Root mean square of the relative errors of expected op times; None without any."""
    reports: Sequence[IterationReport] = ()
    """Reports of all members, sorted by worker."""


class CommitLog(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the current order's reports, and of all committed iterations."""

    job: str = "job"
    """Name of the job, for the trace."""
    first_iteration: int = 0
    """First iteration of the run; the iterations before it are committed."""
    skips: bool = False
    """True if a loss that is not finite is committed as nan, without a step."""
    validates: bool = False
    """True if steps depend on all stages' gradients: a commit needs the step factor."""
    order: int = 0
    """Number of the current order."""
    members: int = 0
    """Number of members of the current order."""
    reports: Mapping[int, PersistentMap[Worker, IterationReport]] = {}
    """Reports of the current order on iterations that are not committed, by iteration."""
    factors: Mapping[int, float | None] = {}
    """Known step factors of the last iterations, by iteration; None: the step is skipped."""
    difference: CopyDifference | SampleDifference | None = None
    """Difference found in the current order; its iteration and later ones are not committed."""
    nonfinite: int | None = None
    """First iteration of the current order whose loss is not finite; None: none, or `skips`."""
    losses_of: PersistentSeries = PersistentSeries()
    """Losses of the committed iterations of this run, by iteration."""
    windows: PersistentMap[int, float] = PersistentMap()
    """Longest busy window of any member, in seconds, of each of the last committed iterations."""
    traced: tuple[MeasuredIteration, ...] = ()
    """Measured ops of the iterations that are traced."""
    digests: PersistentMap[str, str] = PersistentMap()
    """Digests of the parameters of members that have finished, by the name of the parameter."""

    @property
    def losses(self) -> list[float]:
        """Losses of the committed iterations of this run, in order."""
        return list(self.losses_of.values())

    @property
    def next_iteration(self) -> int:
        """Iteration after the last committed one."""
        return self.first_iteration + len(self.losses_of)

    @property
    def last_committed(self) -> tuple[int, float | None] | None:
        """Last committed iteration, and its loss or None if not finite; None without iterations."""
        iteration = self.next_iteration - 1
        loss = self.losses_of.get(iteration)
        if loss is None:
            return None
        return iteration, loss if math.isfinite(loss) else None

    @property
    def furthest_reported(self) -> int:
        """Last iteration that a member has reported in the current order, or the last committed."""
        return max(self.reports, default=self.next_iteration - 1)

    @property
    def last_factor(self) -> StepFactor | None:
        """Step factor of the last committed iteration; None if it is not known."""
        last = self.next_iteration - 1
        return StepFactor(last, self.factors[last]) if last in self.factors else None

    def has_reports_from(self, workers: Iterable[Worker], iteration: int) -> bool:
        """Return whether an iteration is committed, or all these members have stepped it."""
        reports = self.reports.get(iteration, ())
        return iteration < self.next_iteration or all(worker in reports for worker in workers)

    def has_all_reports(self, iteration: int) -> bool:
        """Return whether an iteration is not committed yet, but all members have reported it."""
        return len(self.reports.get(iteration, ())) >= max(1, self.members)

    def with_losses(self, losses: Sequence[float], factor: StepFactor | None) -> "CommitLog":
        """Return the log with an earlier coordinator's losses and last step factor."""
        return replace(
            self,
            losses_of=PersistentSeries(losses, self.first_iteration),
            factors={} if factor is None else {factor.iteration: factor.factor},
        )

    def without_iterations_from(self, iteration: int) -> "CommitLog":
        """Return the log without `iteration` and later ones, which are run again."""
        return replace(
            self,
            losses_of=self.losses_of.before(iteration),
            windows=_entries_before(iteration, self.windows),
            traced=tuple(earlier for earlier in self.traced if earlier.iteration < iteration),
            factors={
                earlier: factor for earlier, factor in self.factors.items() if earlier < iteration
            },
        )

    def with_order(self, order: int, members: Collection[Worker]) -> "CommitLog":
        """Return the log at the start of an order, without uncommitted reports."""
        return replace(
            self,
            order=order,
            members=len(members),
            reports={},
            digests=PersistentMap(),
            difference=None,
            nonfinite=None,
            factors={
                iteration: factor
                for iteration, factor in self.factors.items()
                if iteration < self.next_iteration
            },
        )

    def with_reports(
        self, *reports: IterationReport
    ) -> tuple["CommitLog", list[CommittedIteration]]:
        """Return the log after `reports`, and the iterations that these commit.

        Reports of other orders or of committed iterations are ignored. If a loss is not finite and
        the log has no `skips`, or if copies or samples differ, neither that iteration nor a later
        one is committed.
        """
        by_iteration, difference = dict(self.reports), self.difference
        nonfinite = self.nonfinite
        for report in reports:
            iteration = report.iteration
            if report.order != self.order or iteration < self.next_iteration:
                continue
            # The first loss that is not finite stops commits, whatever is reported later.
            if report.loss is None and not self.skips:
                nonfinite = iteration if nonfinite is None else min(nonfinite, iteration)
            by_worker = by_iteration.get(iteration)
            if by_worker is None:
                by_worker = PersistentMap[Worker, IterationReport]()
            by_iteration[iteration] = by_worker = by_worker.with_entry(report.worker, report)
            # Compare copies and samples once all members have reported.
            if len(by_worker) == self.members and difference is None:
                complete = list(by_worker.values())
                difference = find_difference(iteration, complete) or find_sample_difference(
                    iteration, complete
                )
        return replace(
            self, reports=by_iteration, difference=difference, nonfinite=nonfinite
        )._with_committed()

    def with_factor(
        self, order: int, factor: StepFactor
    ) -> tuple["CommitLog", list[CommittedIteration]]:
        """Return the log with a factor, unless of another order, and what it commits."""
        if order != self.order:
            return self, []
        # No worker can go back by more than one step, so older factors are not needed.
        factors = {
            iteration: value
            for iteration, value in self.factors.items()
            if iteration != factor.iteration - 2
        }
        return replace(self, factors={**factors, factor.iteration: factor.factor})._with_committed()

    def with_finished(self, report: Finished) -> "CommitLog":
        """Return the log with a member's final digests; raise CommitLogError if peers' differ."""
        digests = self.digests
        for name, digest in report.digests.items():
            if name not in digests:
                digests = digests.with_entry(name, digest)
            elif digests[name] != digest:
                raise CommitLogError(
                    f"final parameter {name} of worker {report.worker} differs from its peers'"
                )
        return replace(self, digests=digests)

    def measured_period_seconds(
        self, first: int | None = None, end: int | None = None
    ) -> float | None:
        """Return the median over iterations of the longest busy window, in seconds.

        Of the last committed iterations (`MIN_KEPT_WINDOWS` or more), those from `first` up to, but
        not including, `end` count (None: no limit), without the first of these unless it is the
        only one. Returns None if there is none.
        """
        windows = self._windows_between(first, end)
        windows = windows[1:] or windows  # the first one warms up
        return statistics.median(windows) if windows else None

    def median_period_after(self, iteration: int) -> float | None:
        """Return the median longest busy window after `iteration`, in seconds; None without any."""
        windows = self._windows_between(iteration + 1, None)
        return statistics.median(windows) if windows else None

    def build_trace(self) -> MeasuredTrace:
        """Return the measured ops of the iterations that were traced."""
        return MeasuredTrace(job=self.job, iterations=self.traced)

    def _windows_between(self, first: int | None, end: int | None) -> list[float]:
        return [
            seconds
            for iteration, seconds in self.windows.items()
            if (first is None or iteration >= first) and (end is None or iteration < end)
        ]

    def _with_committed(self) -> tuple["CommitLog", list[CommittedIteration]]:
        # A report or a factor may commit several iterations, each only after the one before.
        log, committed = self, list[CommittedIteration]()
        while (
            log.has_all_reports(log.next_iteration)
            and (not log.validates or log.next_iteration in log.factors)
            and (log.difference is None or log.next_iteration < log.difference.iteration)
            and (log.nonfinite is None or log.next_iteration < log.nonfinite)
        ):
            # Reports in the order of the workers: sums do not depend on whose came first.
            iteration = log.next_iteration
            by_worker = log.reports[iteration]
            commit = _combine_reports(
                iteration, [by_worker[worker] for worker in sorted(by_worker)]
            )
            committed.append(commit)
            # Drop old windows rarely, as that copies all others.
            windows = log.windows.with_entry(iteration, commit.window_seconds)
            if len(windows) > 2 * MIN_KEPT_WINDOWS:
                windows = PersistentMap(list(windows.items())[MIN_KEPT_WINDOWS:])
            # Only iterations that all members have traced are kept.
            traced = log.traced
            if all(report.ops for report in commit.reports):
                ops = [op for report in commit.reports for op in report.ops]
                traced = (*traced, MeasuredIteration(iteration, _shift_to_start(ops)))
            log = replace(
                log,
                losses_of=log.losses_of.with_entry(iteration, commit.loss),
                windows=windows,
                traced=traced,
                reports={
                    later: reports for later, reports in log.reports.items() if later > iteration
                },
            )
        return log, committed


def _combine_reports(iteration: int, reports: Sequence[IterationReport]) -> CommittedIteration:
    # Losses and squared gradients are shares that add up; a missing share makes the sum unknown.
    squares = [report.squares for report in reports if report.squares is not None]
    evaluations = [report.evaluation for report in reports if report.evaluation is not None]
    losses = [report.loss for report in reports if report.loss is not None]
    loss = sum(losses) if len(losses) == len(reports) else math.nan
    return CommittedIteration(
        iteration=iteration,
        window_seconds=max(report.window_seconds for report in reports),
        reports=reports,
        loss=loss,
        gradient_norm=math.sqrt(math.fsum(squares)) if len(squares) == len(reports) else None,
        evaluation=sum(evaluations) if len(evaluations) == len(reports) else None,
        cost_error=_combine_misfits(reports),
    )


def _combine_misfits(reports: Sequence[IterationReport]) -> float | None:
    """Return the root mean square of all ops' relative cost errors; None without any."""
    # Each report has one figure for several ops, which counts once for each.
    numbers = list[int]()
    squares = list[float]()
    for report in reports:
        for op_time in report.times:
            if op_time.misfit is not None:
                numbers.append(op_time.number)
                squares.append(op_time.number * op_time.misfit**2)
    return math.sqrt(sum(squares) / sum(numbers)) if numbers else None


def _entries_before(iteration: int, entries: Mapping[int, float]) -> PersistentMap[int, float]:
    return PersistentMap(
        (earlier, value) for earlier, value in entries.items() if earlier < iteration
    )


def _shift_to_start(ops: list[MeasuredOp]) -> tuple[MeasuredOp, ...]:
    # Clocks begin anywhere; a trace begins at 0.
    start = min(op.start_seconds for op in ops)
    return tuple(
        MeasuredOp(
            op.worker,
            op.kind,
            op.slice,
            op.pipeline,
            op.microbatch,
            op.start_seconds - start,
            op.end_seconds - start,
        )
        for op in ops
    )


# Iterations lose slightly more than workers measure.
MAX_TIME_SHARE = 1 / 160
"""Largest share of a run's time that checkpoints may cost."""
MIN_INTERVAL_SECONDS = 60.0
"""Shortest time between checkpoints, and before the first one, whose cost is not known."""


class CheckpointCost(NamedTuple):
    """Training time that a checkpoint has cost, although it was written in the background."""

    iteration: int
    seconds: float
    """Largest cost of any worker: its stop to copy layers, and the writing's CPU time."""


class CheckpointTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Timer that says when a checkpoint is due, so that all together cost little.

    The next checkpoint is due after 1 / `MAX_TIME_SHARE` times the training seconds that the last
    one cost, and at least `MIN_INTERVAL_SECONDS`. All arguments `at` are times of `time.monotonic`.
    """

    automatic: bool = False
    """True if the coordinator chooses when to save; otherwise workers save at a fixed interval."""
    began: float | None = None
    """Time of the last checkpoint or, before any, the first order; None before that."""
    iteration: int | None = None
    """Iteration before which the state is being saved; None if no checkpoint is pending."""
    asked_at: float = 0.0
    """Time at which the pending or the last checkpoint was requested."""
    seconds: PersistentMap[int, float] = PersistentMap()
    """Cost in seconds of each checkpoint, by the iteration before which it was saved."""
    newest: int | None = None
    """Iteration of the last checkpoint whose cost became known."""

    def with_checkpoint(self, iteration: int, seconds: float, at: float) -> "CheckpointTimer":
        """Return the timer after an earlier coordinator's checkpoint, complete at time `at`.

        The checkpoint was saved before `iteration` and cost `seconds` of training.
        """
        return replace(
            self, began=at, seconds=PersistentMap([(iteration, seconds)]), newest=iteration
        )

    @property
    def checkpoint_costs(self) -> tuple[CheckpointCost, ...]:
        """Cost of each checkpoint so far, sorted by iteration."""
        return tuple(CheckpointCost(*entry) for entry in sorted(self.seconds.items()))

    def with_order(self, at: float) -> "CheckpointTimer":
        """Return the timer at the start of an order, which drops a pending checkpoint."""
        return replace(self, iteration=None, began=at if self.began is None else self.began)

    def is_due(self, at: float) -> bool:
        """Return whether a checkpoint should be requested at time `at`."""
        if not self.automatic or self.iteration is not None or self.began is None:
            return False
        last = 0.0 if self.newest is None else self.seconds[self.newest]
        return at - self.began > max(MIN_INTERVAL_SECONDS, last / MAX_TIME_SHARE)

    def with_request(self, iteration: int, at: float) -> "CheckpointTimer":
        """Return the timer after members were told, at time `at`, to save before `iteration`."""
        return replace(self, iteration=iteration, asked_at=at)

    def with_saved(self, iteration: int, seconds: float) -> "CheckpointTimer":
        """Return the timer after a worker lost `seconds` to save its layers before `iteration`."""
        # The first report ends the wait; the slowest worker gives the cost.
        new = self
        if iteration == self.iteration:
            new = replace(self, iteration=None, began=self.asked_at)
        if seconds <= self.seconds.get(iteration, -1.0):
            return new
        return replace(
            new,
            seconds=self.seconds.with_entry(iteration, seconds),
            newest=self.newest if iteration in self.seconds else iteration,
        )
