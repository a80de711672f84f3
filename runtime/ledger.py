"""What the workers of a run report, put together: iterations, losses, times, digests."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator

from runtime.report import Finished, Ran
from schedules.schedule import Schedule
from schedules.trace import MeasuredIteration, MeasuredOp, Trace


class LedgerError(RuntimeError):
    """Reports that must not be: workers that disagree, or a loss that is not finite. The message is one line."""


class Ledger:
    """Collects reports in the order in which they come.

    `skips`: an iteration whose loss is not finite is nothing bad, it made no step; its loss is nan.
    """

    def __init__(self, schedule: Schedule, *, skips: bool = False) -> None:
        self._schedule = schedule
        self._skips = skips
        self._workers = frozenset(seat.worker for seat in schedule.seats)
        self._open: dict[int, list[Ran]] = defaultdict(list)
        self._finished: list[Finished] = []
        self._windows: list[float] = []
        self._traced: list[MeasuredIteration] = []
        self.losses: list[float] = []
        """Of the committed iterations: those that every worker has run to its optimizer step."""
        self.digests: dict[str, str] = {}
        """Of the parameters of those who have finished, by name."""

    @property
    def complete(self) -> bool:
        """Whether all workers have finished."""
        return len(self._finished) == len(self._workers)

    def ran(self, report: Ran) -> Iterator[tuple[int, float]]:
        """Enter an iteration of a worker; the iterations, with their losses, that are now committed.

        Raises LedgerError when the loss is not finite.
        """
        if report.loss is None and not self._skips:
            raise LedgerError(f"the loss of iteration {report.iteration} is not finite: try a smaller "
                              "training.learning_rate")
        self._open[report.iteration].append(report)
        while len(self._open[len(self.losses)]) == len(self._workers):
            iteration = len(self.losses)
            self._commit(iteration, sorted(self._open.pop(iteration), key=lambda part: part.worker))
            yield iteration, self.losses[-1]

    def finished(self, report: Finished) -> None:
        """Enter the end of a worker. Raises LedgerError when its parameters differ from those of its peers."""
        for name, digest in report.digests.items():
            if self.digests.setdefault(name, digest) != digest:
                raise LedgerError(f"worker {report.worker} ends with another parameter {name} than its peers")
        self._finished.append(report)

    def measured_period_seconds(self) -> float | None:
        """Median over iterations of the longest busy window of any worker; the first one warms up and counts not."""
        windows = self._windows[1:] or self._windows
        return statistics.median(windows) if windows else None

    def trace(self) -> Trace:
        """The ops of the iterations that were traced."""
        return Trace(job=self._schedule.job, iterations=tuple(self._traced))

    def _commit(self, iteration: int, parts: list[Ran]) -> None:
        # Summed in the order of the workers, so that the loss does not depend on whose report came first.
        self.losses.append(sum(math.nan if part.loss is None else part.loss for part in parts))
        self._windows.append(max(part.window_seconds for part in parts))
        if all(part.ops for part in parts):
            self._traced.append(MeasuredIteration(iteration, _from_start([op for part in parts for op in part.ops])))


def _from_start(ops: list[MeasuredOp]) -> tuple[MeasuredOp, ...]:
    """The ops in seconds from the start of the first of them."""
    start = min(op.start_seconds for op in ops)
    return tuple(MeasuredOp(op.worker, op.kind, op.stage, op.pipeline, op.microbatch, op.start_seconds - start,
                            op.end_seconds - start) for op in ops)
