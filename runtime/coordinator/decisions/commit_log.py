"""Combine the reports of workers into committed iterations, losses, times and digests.

An iteration is committed when every member has stepped it, the copies of state on which it ran are
equal where compared, and, if steps depend on the gradients of all stages, its factor is known
(`runtime.state.step_factors`). It is never undone, unless the run goes back to a checkpoint. A
member that has also stepped the next iteration can go back by one step.

The checkpoint timer chooses when the next checkpoint is due, so that all together cost little time.
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
"""Latest iterations whose busy windows are always kept; medians need no more."""


class CommitLogError(RuntimeError):
    """Error that ends the run, with a message of one line. Workers report different values where
    they must agree, or a loss is not finite again and again."""


class CommittedIteration(msgspec.Struct, frozen=True, kw_only=True):
    """Iteration that has been committed. It is also an effect: the event loop logs it and reports
    it to the process manager."""

    iteration: int
    loss: float
    window_seconds: float
    """Longest time of any member from its first op's start to its step's end."""
    gradient_norm: float | None
    """Norm of all gradients before clipping; None if it was not finite."""
    evaluation: float | None
    """Loss of the validation data after the iteration; None if it was not evaluated then."""
    cost_error: float | None
    """Relative error between the expected costs of samples and measured times. None if no costs are
    known."""
    reports: Sequence[IterationReport] = ()
    """Reports of all members, in the order of the workers."""


class CommitLog(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the current order's reports, and of all committed iterations."""

    job: str = "job"
    """Name of the job, for the trace."""
    first_iteration: int = 0
    """First iteration of the run; the iterations before it are committed."""
    skips: bool = False
    """True if the run continues, without a step and with nan, after a loss that is not finite."""
    validates: bool = False
    """True if steps depend on all stages' gradients, so that a commit needs their factor."""
    order: int = 0
    members: int = 0
    """Number of members of the current order."""
    reports: Mapping[int, PersistentMap[Worker, IterationReport]] = {}
    """Reports of the current order on iterations that are not committed, by iteration."""
    factors: Mapping[int, float | None] = {}
    difference: CopyDifference | SampleDifference | None = None
    """Difference in the current order, which keeps iterations from being committed."""
    nonfinite: int | None = None
    """First iteration of the current order whose loss is not finite, if any. It is not committed
    unless `skips`."""
    losses_of: PersistentSeries = PersistentSeries()
    """Losses of the committed iterations of this run, by iteration."""
    windows: PersistentMap[int, float] = PersistentMap()
    """Longest busy window of any member, in seconds, of each of the last committed iterations."""
    traced: tuple[MeasuredIteration, ...] = ()
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
        """Last committed iteration and its loss (None if not finite). None if this run has none."""
        loss = self.losses_of.get(self.next_iteration - 1)
        return None if loss is None else (self.next_iteration - 1, loss if math.isfinite(loss) else None)

    @property
    def furthest_reported(self) -> int:
        """Last iteration reported in the current order or, without any, the last committed one."""
        return max(self.reports, default=self.next_iteration - 1)

    @property
    def last_factor(self) -> StepFactor | None:
        """Factor of the last committed iteration's gradients; None if it is not known. Its factor
        of None means that no step was made."""
        last = self.next_iteration - 1
        return StepFactor(last, self.factors[last]) if last in self.factors else None

    def has_reports_from(self, workers: Iterable[Worker], iteration: int) -> bool:
        """Return whether an iteration is committed, or all these members have stepped it."""
        reports = self.reports.get(iteration, ())
        return iteration < self.next_iteration or all(worker in reports for worker in workers)

    def has_all_reports(self, iteration: int) -> bool:
        """Return whether all members have reported an iteration that is not committed."""
        return len(self.reports.get(iteration, ())) >= max(1, self.members)

    def with_losses(self, losses: Sequence[float], factor: StepFactor | None) -> "CommitLog":
        """Return the log with the iterations that an earlier coordinator committed.

        `losses` are theirs from the first iteration on; `factor` is that of the last one's
        gradients (None: not known).
        """
        return replace(self, losses_of=PersistentSeries(losses, self.first_iteration),
                       factors={} if factor is None else {factor.iteration: factor.factor})

    def without_iterations_from(self, iteration: int) -> "CommitLog":
        """Return the log without committed iterations from this one on, which are repeated."""
        return replace(
            self, losses_of=self.losses_of.before(iteration),
            windows=_entries_before(iteration, self.windows),
            traced=tuple(earlier for earlier in self.traced if earlier.iteration < iteration),
            factors={earlier: factor for earlier, factor in self.factors.items() if earlier < iteration})

    def with_order(self, order: int, members: Collection[Worker]) -> "CommitLog":
        """Return the log at the start of an order, without uncommitted reports."""
        return replace(self, order=order, members=len(members), reports={}, digests=PersistentMap(), difference=None,
                       nonfinite=None,
                       factors={one: factor for one, factor in self.factors.items() if one < self.next_iteration})

    def with_reports(self, *reports: IterationReport) -> tuple["CommitLog", list[CommittedIteration]]:
        """Return the log after reports, and the iterations thereby committed.

        Reports of other orders are ignored. If a loss is not finite and the run may not skip such
        iterations (`skips`), neither that iteration nor a later one is committed.
        """
        known, following, difference = dict(self.reports), self.next_iteration, self.difference
        nonfinite = self.nonfinite
        for report in reports:
            if report.order != self.order or report.iteration < following:
                continue
            if report.loss is None and not self.skips:
                nonfinite = report.iteration if nonfinite is None else min(nonfinite, report.iteration)
            iteration_reports = known[report.iteration] if report.iteration in known \
                else PersistentMap[Worker, IterationReport]()
            known[report.iteration] = iteration_reports.with_entry(report.worker, report)
            if len(known[report.iteration]) == self.members and difference is None:
                complete = [entry for _, entry in known[report.iteration].items()]
                difference = find_difference(report.iteration, complete) \
                    or find_sample_difference(report.iteration, complete)
        return replace(self, reports=known, difference=difference, nonfinite=nonfinite)._with_committed()

    def with_factor(self, order: int, factor: StepFactor) -> tuple["CommitLog", list[CommittedIteration]]:
        """Return the log after a gradient factor, and the iterations thereby committed. A factor of
        another order than the current one is ignored."""
        if order != self.order:
            return self, []
        factors = {iteration: value for iteration, value in self.factors.items() if iteration != factor.iteration - 2}
        return replace(self, factors={**factors, factor.iteration: factor.factor})._with_committed()

    def with_finished(self, report: Finished) -> "CommitLog":
        """Return the log with the digests of the final parameters that a member has written. Raises
        CommitLogError if one differs from that of another member."""
        digests = self.digests
        for name, digest in report.digests.items():
            if name not in digests:
                digests = digests.with_entry(name, digest)
            elif digests[name] != digest:
                raise CommitLogError(f"final parameter {name} of worker {report.worker} differs from its peers'")
        return replace(self, digests=digests)

    def measured_period_seconds(self, first: int | None = None, end: int | None = None) -> float | None:
        """Return the median of the longest busy windows in seconds; None without iterations.

        The iterations are those of this run, or from `first` up to but excluding `end`. The first
        one is left out if there are others, because it warms up.
        """
        windows = self._windows_between(first, end)
        windows = windows[1:] or windows
        return statistics.median(windows) if windows else None

    def median_period_after(self, iteration: int) -> float | None:
        """Return the median of the longest busy windows after an iteration, in seconds.

        Returns None if there are none. The given iteration is left out because it is the first of
        an order, which begins with empty pipelines.
        """
        windows = self._windows_between(iteration + 1, None)
        return statistics.median(windows) if windows else None

    def build_trace(self) -> MeasuredTrace:
        """Return the trace of the run: the measured ops of the iterations that were traced."""
        return MeasuredTrace(job=self.job, iterations=self.traced)

    def _windows_between(self, first: int | None, end: int | None) -> list[float]:
        return [seconds for iteration, seconds in self.windows.items()
                if (first is None or iteration >= first) and (end is None or iteration < end)]

    def _with_committed(self) -> tuple["CommitLog", list[CommittedIteration]]:
        """Return the log with complete iterations committed, and a list of these."""
        log, committed = self, list[CommittedIteration]()
        while log.has_all_reports(log.next_iteration) and (
                not log.validates or log.next_iteration in log.factors) and (
                log.difference is None or log.next_iteration < log.difference.iteration) and (
                log.nonfinite is None or log.next_iteration < log.nonfinite):
            one = _combine_reports(log.next_iteration, [report for _, report in
                                                        sorted(log.reports[log.next_iteration].items())])
            committed.append(one)
            windows, traced = log.windows.with_entry(one.iteration, one.window_seconds), log.traced
            if len(windows) > 2 * MIN_KEPT_WINDOWS:
                windows = PersistentMap(list(windows.items())[MIN_KEPT_WINDOWS:])
            if all(report.ops for report in one.reports):
                traced = (*traced, MeasuredIteration(one.iteration, _shift_to_start(
                    [op for report in one.reports for op in report.ops])))
            log = replace(log, losses_of=log.losses_of.with_entry(one.iteration, one.loss), windows=windows,
                          traced=traced,
                          reports={later: its for later, its in log.reports.items() if later > one.iteration})
        return log, committed


def _combine_reports(iteration: int, reports: Sequence[IterationReport]) -> CommittedIteration:
    squares, losses = [one.squares for one in reports], [one.evaluation for one in reports]
    misfits = [(one.number, one.misfit) for report in reports for one in report.times if one.misfit is not None]
    return CommittedIteration(
        iteration=iteration, window_seconds=max(one.window_seconds for one in reports), reports=reports,
        # Summed in the order of the workers, so that the loss does not depend on whose report came first.
        loss=sum(math.nan if one.loss is None else one.loss for one in reports),
        gradient_norm=None if None in squares else math.sqrt(math.fsum(filter(None, squares))),
        evaluation=None if None in losses else sum(filter(None, losses)),
        cost_error=math.sqrt(sum(number * misfit**2 for number, misfit in misfits)
                             / sum(number for number, _ in misfits)) if misfits else None)


def _entries_before(iteration: int, known: Mapping[int, float]) -> PersistentMap[int, float]:
    return PersistentMap((earlier, value) for earlier, value in known.items() if earlier < iteration)


def _shift_to_start(ops: list[MeasuredOp]) -> tuple[MeasuredOp, ...]:
    """Return the ops with times in seconds since the start of the first of them."""
    start = min(op.start_seconds for op in ops)
    return tuple(MeasuredOp(op.worker, op.kind, op.slice, op.pipeline, op.microbatch, op.start_seconds - start,
                            op.end_seconds - start) for op in ops)


MAX_TIME_SHARE = 1 / 160
"""Largest share of a run's time for checkpoints; iterations lose more, such as 1.08 % with 1 /
125."""
MIN_INTERVAL_SECONDS = 60.0
"""Shortest time between checkpoints, and before the first one, whose cost is not known."""


class CheckpointCost(NamedTuple):
    """Seconds of training that a checkpoint cost, which was written meanwhile."""

    iteration: int
    seconds: float
    """Largest cost of any worker: the stop to copy layers, and the writing's CPU time. Waiting for
    a disk holds up no worker and does not count."""


class CheckpointTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Timer of checkpoints, by what they cost.

    The next one is due after 1 / `MAX_TIME_SHARE` times the training seconds that the last one
    cost, and at least `MIN_INTERVAL_SECONDS`. All arguments `at` are times of `time.monotonic`.
    """

    automatic: bool = False
    """True if the coordinator chooses when to save; otherwise workers save at a fixed interval."""
    began: float | None = None
    """Time of the last checkpoint or, before the first one, of the start of training."""
    iteration: int | None = None
    """Iteration before which the state is being saved; None if no checkpoint is pending."""
    asked_at: float = 0.0
    seconds: PersistentMap[int, float] = PersistentMap()
    """Cost in seconds of each checkpoint, by the iteration before which it was saved."""
    newest: int | None = None
    """Iteration of the last checkpoint whose cost became known."""

    def with_checkpoint(self, iteration: int, seconds: float, at: float) -> "CheckpointTimer":
        """Return the timer of a new coordinator, given the last checkpoint of the one before. It
        was complete at time `at` and cost `seconds` of training time."""
        return replace(self, began=at, seconds=PersistentMap([(iteration, seconds)]), newest=iteration)

    @property
    def checkpoint_costs(self) -> tuple[CheckpointCost, ...]:
        """Training time in seconds that each checkpoint so far has cost, sorted by iteration."""
        return tuple(CheckpointCost(*entry) for entry in sorted(self.seconds.items()))

    def with_order(self, at: float) -> "CheckpointTimer":
        """Return the timer at the start of an order. A checkpoint that members are still saving no
        longer counts, as it may never be complete."""
        return replace(self, iteration=None, began=at if self.began is None else self.began)

    def is_due(self, at: float) -> bool:
        """Return whether the next checkpoint should be requested, at time `at`."""
        if not self.automatic or self.iteration is not None or self.began is None:
            return False
        last = 0.0 if self.newest is None else self.seconds[self.newest]
        return at - self.began > max(MIN_INTERVAL_SECONDS, last / MAX_TIME_SHARE)

    def with_request(self, iteration: int, at: float) -> "CheckpointTimer":
        """Return the timer after members were told to save before an iteration's step."""
        return replace(self, iteration=iteration, asked_at=at)

    def with_saved(self, iteration: int, seconds: float) -> "CheckpointTimer":
        """Return the timer after a worker has saved its layers, or failed to. `seconds` is the
        training time that this cost it. A checkpoint costs the largest such time."""
        new = replace(self, iteration=None, began=self.asked_at) if iteration == self.iteration else self
        if seconds <= self.seconds.get(iteration, -1.0):
            return new
        return replace(new, seconds=self.seconds.with_entry(iteration, seconds),
                       newest=self.newest if iteration in self.seconds else iteration)
