"""Commit log: combines the reports of workers into committed iterations, losses, times and digests.

An iteration is committed when every member of the order has stepped it and, if steps depend on the gradients of all
stages, its factor is known (`runtime.state.step_factors`). It is not committed if compared copies of the state on
which it ran differ. A committed iteration is never undone, unless the run goes back to a checkpoint. A member that has
also stepped the next iteration can go back by one step.

Checkpoint timer: chooses when the next checkpoint is due, so that all checkpoints together cost little time.
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
"""Number of latest iterations whose busy windows are always kept. Medians do not need all windows of a long run."""


class CommitLogError(RuntimeError):
    """Error that ends the run: workers report different values where they must agree, or a loss is not finite again and
    again. The message is one line."""


class CommittedIteration(msgspec.Struct, frozen=True, kw_only=True):
    """Iteration that has been committed. It is also an effect: the event loop logs it and reports it to the process
    manager."""

    iteration: int
    loss: float
    window_seconds: float
    """Longest busy window of any member: the time from the start of its first op to the end of its optimizer step."""
    gradient_norm: float | None
    """Norm of all gradients before clipping; None if it was not finite."""
    evaluation: float | None
    """Loss of the validation data after the iteration; None if it was not evaluated then."""
    cost_error: float | None
    """Relative error between the expected costs of samples and measured times; None if no costs are known."""
    reports: Sequence[IterationReport] = ()
    """Reports of all members, in the order of the workers."""


class CommitLog(msgspec.Struct, frozen=True, kw_only=True):
    """Record of what the members of the current order have reported, and of all committed iterations."""

    job: str = "job"
    """Name of the job, for the trace."""
    first_iteration: int = 0
    """First iteration of the run; the iterations before it are committed."""
    skips: bool = False
    """True if the run continues after a loss that is infinite or nan. Such an iteration makes no step, and its recorded
    loss is nan."""
    validates: bool = False
    """True if steps depend on the gradients of all stages, so that a commit also needs the factor that scales the
    gradients."""
    order: int = 0
    members: int = 0
    """Number of members of the current order."""
    reports: Mapping[int, PersistentMap[Worker, IterationReport]] = {}
    """Reports of the current order on iterations that are not committed, by iteration."""
    factors: Mapping[int, float | None] = {}
    difference: CopyDifference | SampleDifference | None = None
    """Difference found between copies of state, or between samples, in the current order, if any; no iteration that
    ran on them is committed."""
    nonfinite: int | None = None
    """First iteration of the current order whose loss is not finite, if any; it is not committed unless `skips`."""
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
        """Last committed iteration and its loss (None if not finite); None if this run has none."""
        loss = self.losses_of.get(self.next_iteration - 1)
        return None if loss is None else (self.next_iteration - 1, loss if math.isfinite(loss) else None)

    @property
    def furthest_reported(self) -> int:
        """Last iteration that any member has reported in the current order or, without a report, the last committed
        one."""
        return max(self.reports, default=self.next_iteration - 1)

    @property
    def last_factor(self) -> StepFactor | None:
        """Last committed iteration, with the factor that scaled its gradients before the step (a factor of None: no
        step was made); None if the factor is not known."""
        last = self.next_iteration - 1
        return StepFactor(last, self.factors[last]) if last in self.factors else None

    def has_reports_from(self, workers: Iterable[Worker], iteration: int) -> bool:
        """Return whether an iteration is committed, or all of these members have reported that they stepped it."""
        reports = self.reports.get(iteration, ())
        return iteration < self.next_iteration or all(worker in reports for worker in workers)

    def has_all_reports(self, iteration: int) -> bool:
        """Return whether all members have reported an iteration that is not committed."""
        return len(self.reports.get(iteration, ())) >= max(1, self.members)

    def with_losses(self, losses: Sequence[float], factor: StepFactor | None) -> "CommitLog":
        """Return the log with the losses of the iterations that an earlier coordinator committed, from the first
        iteration on, and the factor that scaled the gradients in the last of them (None: not known)."""
        return replace(self, losses_of=PersistentSeries(losses, self.first_iteration),
                       factors={} if factor is None else {factor.iteration: factor.factor})

    def without_iterations_from(self, iteration: int) -> "CommitLog":
        """Return the log without the committed iterations from the given one on, which will be repeated."""
        return replace(
            self, losses_of=self.losses_of.before(iteration),
            windows=_entries_before(iteration, self.windows),
            traced=tuple(earlier for earlier in self.traced if earlier.iteration < iteration),
            factors={earlier: factor for earlier, factor in self.factors.items() if earlier < iteration})

    def with_order(self, order: int, members: Collection[Worker]) -> "CommitLog":
        """Return the log at the start of an order, without reports on iterations that are not committed."""
        return replace(self, order=order, members=len(members), reports={}, digests=PersistentMap(), difference=None,
                       nonfinite=None,
                       factors={one: factor for one, factor in self.factors.items() if one < self.next_iteration})

    def with_reports(self, *reports: IterationReport) -> tuple["CommitLog", list[CommittedIteration]]:
        """Return a pair: the log after reports of workers, and the iterations thereby committed.

        Reports of other orders are ignored. If a loss is not finite and the run may not skip such iterations (`skips`),
        neither that iteration nor a later one is committed.
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
        """Return a pair: the log after adding the `factor` by which members scale the gradients of an iteration, and
        the iterations thereby committed. A factor of another order than the current one is ignored."""
        if order != self.order:
            return self, []
        factors = {iteration: value for iteration, value in self.factors.items() if iteration != factor.iteration - 2}
        return replace(self, factors={**factors, factor.iteration: factor.factor})._with_committed()

    def with_finished(self, report: Finished) -> "CommitLog":
        """Return the log with the digests of the final parameters that a member has written. Raises CommitLogError if
        one differs from the digest that another member has reported."""
        digests = self.digests
        for name, digest in report.digests.items():
            if name not in digests:
                digests = digests.with_entry(name, digest)
            elif digests[name] != digest:
                raise CommitLogError(f"final parameter {name} of worker {report.worker} differs from its peers'")
        return replace(self, digests=digests)

    def measured_period_seconds(self, first: int | None = None, end: int | None = None) -> float | None:
        """Return the median over iterations of the longest busy window of any member (from its first op to the end of
        its step), in seconds; None without iterations.

        The iterations are those of this run, or those from `first` up to but excluding `end`. The first one is left out
        if there are others, because it warms up.
        """
        windows = self._windows_between(first, end)
        windows = windows[1:] or windows
        return statistics.median(windows) if windows else None

    def median_period_after(self, iteration: int) -> float | None:
        """Return the median, over the iterations committed after the given one, of the longest busy window of any
        member (from its first op to the end of its step), in seconds; None if there are none.

        The given iteration is left out because it is the first of an order, which begins with empty pipelines.
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
        """Return a pair: the log after committing all iterations whose reports are complete, and a list of these
        iterations."""
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
"""Largest share of a run's time for checkpoints, by their measured cost. Iterations lose more: with 1 / 125, they lost
1.08 %."""
MIN_INTERVAL_SECONDS = 60.0
"""Shortest time between two checkpoints, and from the start to the first one, whose cost is not known before."""


class CheckpointCost(NamedTuple):
    """Seconds of training time that were lost to one checkpoint, which was written while training continued."""

    iteration: int
    seconds: float
    """Cost of the checkpoint in seconds, the largest of any worker: the time that training stopped to copy layers, and
    the computing time that writing them took from training. Waiting for a disk holds up no worker and does not count.
    """


class CheckpointTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Timer of checkpoints. The time until the next one is due is 1 / `MAX_TIME_SHARE` times the training time in
    seconds that the last one cost, and at least `MIN_INTERVAL_SECONDS`.

    All arguments `at` are times of `time.monotonic`.
    """

    automatic: bool = False
    """True if the coordinator chooses when to save. Otherwise workers save at a fixed interval, and `is_due` is always
    False."""
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
        """Return the timer of a new coordinator, given the last checkpoint of the one before it, which was complete at
        time `at` and cost `seconds` of training time."""
        return replace(self, began=at, seconds=PersistentMap([(iteration, seconds)]), newest=iteration)

    @property
    def checkpoint_costs(self) -> tuple[CheckpointCost, ...]:
        """Training time in seconds that each checkpoint so far has cost, sorted by iteration."""
        return tuple(CheckpointCost(*entry) for entry in sorted(self.seconds.items()))

    def with_order(self, at: float) -> "CheckpointTimer":
        """Return the timer at the start of an order. A checkpoint that members are still saving no longer counts, as it
        may never be complete."""
        return replace(self, iteration=None, began=at if self.began is None else self.began)

    def is_due(self, at: float) -> bool:
        """Return whether the next checkpoint should be requested, at time `at`."""
        if not self.automatic or self.iteration is not None or self.began is None:
            return False
        last = 0.0 if self.newest is None else self.seconds[self.newest]
        return at - self.began > max(MIN_INTERVAL_SECONDS, last / MAX_TIME_SHARE)

    def with_request(self, iteration: int, at: float) -> "CheckpointTimer":
        """Return the timer after members were told to save a checkpoint before the optimizer step of an iteration."""
        return replace(self, iteration=iteration, asked_at=at)

    def with_saved(self, iteration: int, seconds: float) -> "CheckpointTimer":
        """Return the timer after a worker has written its layers of the checkpoint before an iteration, or failed to.

        The argument `seconds` is the training time that this cost the worker. A checkpoint costs the largest such time.
        """
        new = replace(self, iteration=None, began=self.asked_at) if iteration == self.iteration else self
        if seconds <= self.seconds.get(iteration, -1.0):
            return new
        return replace(new, seconds=self.seconds.with_entry(iteration, seconds),
                       newest=self.newest if iteration in self.seconds else iteration)
