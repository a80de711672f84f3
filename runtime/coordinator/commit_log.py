"""Commit log: puts the reports of workers together into committed iterations, losses, times and digests.

An iteration is committed when every member of an order has stepped it and, where steps depend on the gradients of all
stages, its factor is known (`runtime.model.state.clipping`). It is never undone, unless all holders of a layer are
lost. A member that has stepped the next one, too, can go back by one step.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from slipstream.runtime.protocol.to_coordinator import Finished, Ran
from slipstream.runtime.protocol.to_worker import Factor
from slipstream.schedules.measured_trace import MeasuredIteration, MeasuredOp, MeasuredTrace
from slipstream.schedules.schedule import Worker

MOST_WINDOWS = 4096
"""Iterations whose windows are kept: medians do not need those of a month."""


class CommitLogError(RuntimeError):
    """Reports that end the run: workers that disagree, or a loss that is not finite. The message is one line."""


class CommitLog:
    """Collects reports in the order in which they come.

    Parameters
    ----------
    job
        Its name, for the trace.
    first_iteration
        Where the run begins: the iterations before it are committed.
    skips
        Whether the loss of an iteration may be other than finite. It then made no step, and its loss is nan.
    validates
        Whether steps depend on the gradients of all stages. An iteration is then committed once its factor is known.
    """

    def __init__(self, job: str, *, first_iteration: int = 0, skips: bool = False, validates: bool = False) -> None:
        self._job = job
        self._first = first_iteration
        self._skips = skips
        self._validates = validates
        self._order = 0
        self._members: frozenset[Worker] = frozenset()
        self._open: dict[int, dict[Worker, Ran]] = defaultdict(dict)
        self._factors: dict[int, float | None] = {}
        self._windows: dict[int, float] = {}
        self._traced: dict[int, MeasuredIteration] = {}
        self.gradient_norm: float | None = None
        """Of the last committed iteration, before clipping; None: it was not finite."""
        self.evaluation: float | None = None
        """The loss of validation data after the last committed iteration; None: they were not looked at."""
        self.cost_error: float | None = None
        """How far costs of samples were from what ops took in the last committed iteration; None: none are known."""
        self.losses: list[float] = []
        """Of the committed iterations of this run."""
        self.digests: dict[str, str] = {}
        """Of the parameters of workers that have finished, by name."""

    @property
    def next_iteration(self) -> int:
        """One after the last committed iteration."""
        return self._first + len(self.losses)

    @property
    def period_seconds(self) -> float:
        """Measured in the last committed iteration: the longest busy window of any member."""
        return self._windows[self.next_iteration - 1]

    @property
    def furthest(self) -> int:
        """The last iteration that any member has reported."""
        return max(self._open, default=self.next_iteration - 1)

    @property
    def factor(self) -> Factor | None:
        """Of the last committed iteration."""
        last = self.next_iteration - 1
        return Factor(last, self._factors[last]) if last in self._factors else None

    def have_reported(self, workers: Collection[Worker], iteration: int) -> bool:
        """Whether all of these members have, or it is committed."""
        return iteration < self.next_iteration or self._open[iteration].keys() >= set(workers)

    def take_over(self, losses: Sequence[float], factor: Factor | None) -> None:
        """Go on where another coordinator has ended: the losses that it has committed, and the factor of the last."""
        self.losses = list(losses)
        self._factors = {} if factor is None else {factor.iteration: factor.factor}

    def go_back(self, iteration: int) -> None:
        """Forget the committed iterations from this one on: layers of later ones are lost, and they are repeated."""
        del self.losses[iteration - self._first:]
        self._windows = {one: seconds for one, seconds in self._windows.items() if one < iteration}
        self._traced = {one: traced for one, traced in self._traced.items() if one < iteration}
        self._factors = {one: factor for one, factor in self._factors.items() if one < iteration}

    def begin(self, order: int, members: Collection[Worker]) -> None:
        """An order begins, with these members. Iterations that are not committed are dropped."""
        self._order = order
        self._members = frozenset(members)
        self._open.clear()
        self.digests.clear()
        self._factors = {one: factor for one, factor in self._factors.items() if one < self.next_iteration}

    def ran(self, report: Ran) -> Iterator[tuple[int, float]]:
        """Enter a worker's report of an iteration; the iterations that are now committed, with their losses.

        Raises CommitLogError when the loss is not finite.
        """
        if report.order != self._order:
            return
        if report.loss is None and not self._skips:
            raise CommitLogError(f"the loss of iteration {report.iteration} is not finite: try a smaller "
                              "training.learning_rate")
        self._open[report.iteration][report.worker] = report
        yield from self._commit_all()

    def validated(self, order: int, factor: Factor) -> Iterator[tuple[int, float]]:
        """Enter the factor of an iteration; the iterations that are now committed, with their losses."""
        if order != self._order:
            return
        self._factors[factor.iteration] = factor.factor
        self._factors.pop(factor.iteration - 2, None)
        yield from self._commit_all()

    def finished(self, report: Finished) -> None:
        """Enter the end of a worker. Raises CommitLogError when its parameters differ from those of its peers."""
        for name, digest in report.digests.items():
            if self.digests.setdefault(name, digest) != digest:
                raise CommitLogError(f"worker {report.worker} ends with another parameter {name} than its peers")

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
        return MeasuredTrace(job=self._job, iterations=tuple(self._traced.values()))

    def _windows_between(self, first: int | None, end: int | None) -> list[float]:
        return [seconds for iteration, seconds in self._windows.items()
                if (first is None or iteration >= first) and (end is None or iteration < end)]

    def _commit_all(self) -> Iterator[tuple[int, float]]:
        while True:
            iteration = self.next_iteration
            known = not self._validates or iteration in self._factors
            if not known or len(self._open.get(iteration, ())) < max(1, len(self._members)):
                return
            self._commit(iteration, [part for _, part in sorted(self._open.pop(iteration).items())])
            yield iteration, self.losses[-1]

    def _commit(self, iteration: int, parts: list[Ran]) -> None:
        # Summed in the order of the workers, so that the loss does not depend on whose report came first.
        self.losses.append(sum(math.nan if part.loss is None else part.loss for part in parts))
        squares = [part.squares for part in parts]
        self.gradient_norm = None if None in squares else math.sqrt(math.fsum(filter(None, squares)))
        losses = [part.evaluation for part in parts]
        self.evaluation = None if None in losses else sum(filter(None, losses))
        misfits = [(one.number, one.misfit) for part in parts for one in part.times if one.misfit is not None]
        self.cost_error = math.sqrt(sum(number * misfit**2 for number, misfit in misfits)
                                    / sum(number for number, _ in misfits)) if misfits else None
        self._windows[iteration] = max(part.window_seconds for part in parts)
        self._windows.pop(iteration - MOST_WINDOWS, None)
        if all(part.ops for part in parts):
            self._traced[iteration] = MeasuredIteration(iteration,
                                                        _from_start([op for part in parts for op in part.ops]))


def _from_start(ops: list[MeasuredOp]) -> tuple[MeasuredOp, ...]:
    """The ops in seconds from the start of the first of them."""
    start = min(op.start_seconds for op in ops)
    return tuple(MeasuredOp(op.worker, op.kind, op.slice, op.pipeline, op.microbatch, op.start_seconds - start,
                            op.end_seconds - start) for op in ops)
