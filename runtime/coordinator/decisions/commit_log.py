"""Commit log: puts the reports of workers together into committed iterations, losses, times and digests.

An iteration is committed when every member of an order has stepped it and, where steps depend on the gradients of all
stages, its factor is known (`runtime.model.state.clipping`); not where copies of what it was run on differ, as far as
they have been compared. It is never undone, unless all holders of a layer are
lost. A member that has stepped the next one, too, can go back by one step.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.copy_comparison import Difference, find_difference
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.protocol.to_coordinator import Finished, Ran
from slipstream.runtime.protocol.to_worker import Factor
from slipstream.schedules.measured_trace import MeasuredIteration, MeasuredOp, MeasuredTrace
from slipstream.schedules.schedule import Worker

MOST_WINDOWS = 4096
"""Iterations at least whose windows are kept: medians do not need those of a month."""


class CommitLogError(RuntimeError):
    """Reports that end the run: workers that disagree, or a loss that is not finite. The message is one line."""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """An iteration that is committed: as an effect, write its line and tell who must know."""

    iteration: int
    loss: float
    window_seconds: float
    """The longest busy window of any member."""
    gradient_norm: float | None
    """Before clipping; None: it was not finite."""
    evaluation: float | None
    """The loss of validation data after it; None: they were not looked at."""
    cost_error: float | None
    """How far costs of samples were from what ops took; None: none are known."""
    reports: Sequence[Ran] = ()
    """In the order of the workers."""


class CommitLog(msgspec.Struct, frozen=True, kw_only=True):
    """What has been reported and committed."""

    job: str = "job"
    """Its name, for the trace."""
    first_iteration: int = 0
    """Where the run begins: the iterations before it are committed."""
    skips: bool = False
    """Whether the loss of an iteration may be other than finite. It then made no step, and its loss is nan."""
    validates: bool = False
    """Whether steps depend on the gradients of all stages. An iteration is then committed once its factor is known."""
    order: int = 0
    members: int = 0
    """Of the order."""
    reports: Mapping[int, PersistentMap[Worker, Ran]] = {}
    """Of the order's iterations that are not committed."""
    factors: Mapping[int, float | None] = {}
    difference: Difference | None = None
    """Of the order, where copies differ: no iteration is committed that was run on these."""
    losses_of: PersistentMap[int, float] = PersistentMap()
    """Of the committed iterations of this run."""
    windows: PersistentMap[int, float] = PersistentMap()
    """Of the last of them: the longest busy window of any member."""
    traced: tuple[MeasuredIteration, ...] = ()
    digests: PersistentMap[str, str] = PersistentMap()
    """Of the parameters of workers that have finished, by name."""

    @property
    def losses(self) -> list[float]:
        """Of the committed iterations of this run."""
        return list(self.losses_of.values())

    @property
    def next_iteration(self) -> int:
        """One after the last committed iteration."""
        return self.first_iteration + len(self.losses_of)

    @property
    def last(self) -> tuple[int, float | None] | None:
        """The last committed iteration of this run, and its loss, where that is finite."""
        loss = self.losses_of.get(self.next_iteration - 1)
        return None if loss is None else (self.next_iteration - 1, loss if math.isfinite(loss) else None)

    @property
    def furthest(self) -> int:
        """The last iteration that any member has reported."""
        return max(self.reports, default=self.next_iteration - 1)

    @property
    def factor(self) -> Factor | None:
        """Of the last committed iteration."""
        last = self.next_iteration - 1
        return Factor(last, self.factors[last]) if last in self.factors else None

    def have_reported(self, workers: Iterable[Worker], iteration: int) -> bool:
        """Whether all of these members have, or it is committed."""
        reports = self.reports.get(iteration, ())
        return iteration < self.next_iteration or all(worker in reports for worker in workers)

    def take_over(self, losses: Sequence[float], factor: Factor | None) -> "CommitLog":
        """Go on where another coordinator has ended: the losses that it has committed, and the factor of the last."""
        return replace(self, losses_of=PersistentMap(enumerate(losses, self.first_iteration)),
                       factors={} if factor is None else {factor.iteration: factor.factor})

    def go_back(self, iteration: int) -> "CommitLog":
        """Forget the committed iterations from this one on: layers of later ones are lost, and they are repeated."""
        return replace(
            self, losses_of=_before(iteration, self.losses_of), windows=_before(iteration, self.windows),
            traced=tuple(one for one in self.traced if one.iteration < iteration),
            factors={one: factor for one, factor in self.factors.items() if one < iteration})

    def begin(self, order: int, members: Collection[Worker]) -> "CommitLog":
        """An order begins, with these members. Iterations that are not committed are dropped."""
        return replace(self, order=order, members=len(members), reports={}, digests=PersistentMap(), difference=None,
                       factors={one: factor for one, factor in self.factors.items() if one < self.next_iteration})

    def ran(self, *reports: Ran) -> tuple["CommitLog", list[Committed]]:
        """With reports of workers; the iterations that are now committed.

        Raises CommitLogError when a loss is not finite.
        """
        known, following, difference = dict(self.reports), self.next_iteration, self.difference
        for report in reports:
            if report.order != self.order or report.iteration < following:
                continue
            if report.loss is None and not self.skips:
                raise CommitLogError(f"the loss of iteration {report.iteration} is not finite: try a smaller "
                                     "training.learning_rate")
            mine = known[report.iteration] if report.iteration in known else PersistentMap[Worker, Ran]()
            known[report.iteration] = mine.adding(report.worker, report)
            if len(known[report.iteration]) == self.members and difference is None:
                difference = find_difference(report.iteration, (one for _, one in known[report.iteration].items()))
        return replace(self, reports=known, difference=difference)._with_committed()

    def validated(self, order: int, factor: Factor) -> tuple["CommitLog", list[Committed]]:
        """With the factor of an iteration; the iterations that are now committed."""
        if order != self.order:
            return self, []
        factors = {one: known for one, known in self.factors.items() if one != factor.iteration - 2}
        return replace(self, factors={**factors, factor.iteration: factor.factor})._with_committed()

    def finished(self, report: Finished) -> "CommitLog":
        """With the end of a worker. Raises CommitLogError when its parameters differ from those of its peers."""
        digests = self.digests
        for name, digest in report.digests.items():
            if name not in digests:
                digests = digests.adding(name, digest)
            elif digests[name] != digest:
                raise CommitLogError(f"worker {report.worker} ends with another parameter {name} than its peers")
        return replace(self, digests=digests)

    def measured_period_seconds(self, first: int | None = None, end: int | None = None) -> float | None:
        """Median over iterations of the longest busy window of any worker, without the first one, which warms up.

        Over those of this run, or from `first` to before `end`.
        """
        windows = self._windows_between(first, end)
        windows = windows[1:] or windows
        return statistics.median(windows) if windows else None

    def period_after(self, iteration: int) -> float | None:
        """Median of the longest busy window of any worker, in seconds, over the iterations committed after one.

        With that one an order begins, in empty pipelines. None: no other has been committed.
        """
        windows = self._windows_between(iteration + 1, None)
        return statistics.median(windows) if windows else None

    def trace(self) -> MeasuredTrace:
        """The ops of the iterations that were traced."""
        return MeasuredTrace(job=self.job, iterations=self.traced)

    def _windows_between(self, first: int | None, end: int | None) -> list[float]:
        return [seconds for iteration, seconds in self.windows.items()
                if (first is None or iteration >= first) and (end is None or iteration < end)]

    def _with_committed(self) -> tuple["CommitLog", list[Committed]]:
        log, committed = self, list[Committed]()
        while len(log.reports.get(log.next_iteration, ())) >= max(1, log.members) and (
                not log.validates or log.next_iteration in log.factors) and (
                log.difference is None or log.next_iteration < log.difference.iteration):
            one = _put_together(log.next_iteration, [report for _, report in
                                                     sorted(log.reports[log.next_iteration].items())])
            committed.append(one)
            windows, traced = log.windows.adding(one.iteration, one.window_seconds), log.traced
            if len(windows) > 2 * MOST_WINDOWS:
                windows = PersistentMap(list(windows.items())[MOST_WINDOWS:])
            if all(report.ops for report in one.reports):
                traced = (*traced, MeasuredIteration(one.iteration, _from_start(
                    [op for report in one.reports for op in report.ops])))
            log = replace(log, losses_of=log.losses_of.adding(one.iteration, one.loss), windows=windows, traced=traced,
                          reports={later: its for later, its in log.reports.items() if later > one.iteration})
        return log, committed


def _put_together(iteration: int, reports: Sequence[Ran]) -> Committed:
    squares, losses = [one.squares for one in reports], [one.evaluation for one in reports]
    misfits = [(one.number, one.misfit) for report in reports for one in report.times if one.misfit is not None]
    return Committed(
        iteration=iteration, window_seconds=max(one.window_seconds for one in reports), reports=reports,
        # Summed in the order of the workers, so that the loss does not depend on whose report came first.
        loss=sum(math.nan if one.loss is None else one.loss for one in reports),
        gradient_norm=None if None in squares else math.sqrt(math.fsum(filter(None, squares))),
        evaluation=None if None in losses else sum(filter(None, losses)),
        cost_error=math.sqrt(sum(number * misfit**2 for number, misfit in misfits)
                             / sum(number for number, _ in misfits)) if misfits else None)


def _before(iteration: int, known: Mapping[int, float]) -> PersistentMap[int, float]:
    return PersistentMap((one, value) for one, value in known.items() if one < iteration)


def _from_start(ops: list[MeasuredOp]) -> tuple[MeasuredOp, ...]:
    """The ops in seconds from the start of the first of them."""
    start = min(op.start_seconds for op in ops)
    return tuple(MeasuredOp(op.worker, op.kind, op.slice, op.pipeline, op.microbatch, op.start_seconds - start,
                            op.end_seconds - start) for op in ops)
