"""Speed watch: what workers report of their ops, put together by iterations for the detector."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from msgspec.structs import replace

from slipstream.runtime.coordinator.slow_detector import CellTime, SlowDetector, SpeedChange
from slipstream.runtime.protocol.to_coordinator import Ran
from slipstream.runtime.replay.recorder import OpTime
from slipstream.schedules.schedule import COMPUTE_KINDS, Schedule, Worker

WARM_UP = 1
"""Iterations of an order that say little: connections, caches and allocators are cold."""


class SpeedWatch:
    """Finds changes of speed in the reports of one order after the other.

    Parameters
    ----------
    first
        The schedule at the start, which knows of workers that are slow by the job file.
    """

    def __init__(self, first: Schedule) -> None:
        known = {worker: per_mille / 1000 for worker, per_mille in first.times.per_mille_of.items()}
        self.detector = SlowDetector(known)
        self._cells = _Cells(first)
        self._members: frozenset[Worker] = frozenset()
        self._from = 0
        self._open: dict[int, dict[Worker, Ran]] = defaultdict(dict)

    def order_begins(self, schedule: Schedule, iteration: int) -> None:
        """An order begins at an iteration."""
        self.detector.interrupt()
        self._cells = _Cells(schedule)
        self._members = frozenset(schedule.seat_of)
        self._from = iteration + WARM_UP
        self._open.clear()

    def ran(self, report: Ran) -> list[SpeedChange]:
        """Enter a report of the present order; what has changed once all members have reported the iteration."""
        parts = self._open[report.iteration]
        parts[report.worker] = report
        if len(parts) < len(self._members):  # reports are of members
            return []
        del self._open[report.iteration]
        if report.iteration < self._from:
            return []
        return self.detector.observe(report.iteration, max(part.window_seconds for part in parts.values()),
                                     {worker: self._cells.of(part.times) for worker, part in parts.items()})

    def factor_of(self, times: Sequence[OpTime]) -> float | None:
        """What a worker that has measured itself takes, by what was measured of others; None: that is not known."""
        cells = [(cell, self.detector.usual_seconds(cell)) for cell in self._cells.of(times)]
        usual = sum(cell.number * seconds for cell, seconds in cells if seconds is not None)
        took = sum(cell.number * cell.seconds for cell, seconds in cells if seconds is not None)
        return took / usual if usual and took else None


class _Cells:
    """What the slices of a schedule are, and what their ops take by plan on a worker of usual speed."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @cached_property
    def _planned(self) -> Mapping[tuple[str, int], float]:
        usual, schedule = replace(self._schedule.times, slow=()), self._schedule
        return {(kind, slice_): schedule.seconds(usual.duration_ticks(kind, slice_, Worker(0, 0)))
                for kind in COMPUTE_KINDS for slice_ in range(len(schedule.layers_by_slice))}

    def of(self, times: Sequence[OpTime]) -> list[CellTime]:
        """Times by layers. What no worker can have run, is left out."""
        return [CellTime(one.kind, self._schedule.layers_of(one.slice), one.number, one.seconds,
                         self._planned[one.kind, one.slice])
                for one in times if (one.kind, one.slice) in self._planned]
