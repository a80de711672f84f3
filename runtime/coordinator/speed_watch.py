"""Speed watch: what workers report of their ops in committed iterations, put together for the detector."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.commit_log import Committed
from slipstream.runtime.coordinator.slow_detector import CellTime, SlowDetector, SpeedChange
from slipstream.runtime.replay.recorder import OpTime
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Schedule, Worker

WARM_UP = 1
"""Iterations of an order that say little: connections, caches and allocators are cold."""


class SpeedWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Finds changes of speed in the reports of one order after the other. No detector that it has had ever changes."""

    detector: SlowDetector
    cells: "Cells"
    begins: int = 0
    """The first iteration that is looked at."""

    def order_begins(self, schedule: Schedule, iteration: int) -> "SpeedWatch":
        """An order begins at an iteration."""
        detector = self.detector.copy()
        detector.interrupt()
        return SpeedWatch(detector=detector, cells=Cells(schedule), begins=iteration + WARM_UP)

    def committed(self, one: Committed) -> tuple["SpeedWatch", list[SpeedChange]]:
        """With an iteration of the present order; what has changed."""
        if one.iteration < self.begins:
            return self, []
        detector = self.detector.copy()
        return replace(self, detector=detector), detector.observe(
            one.iteration, one.window_seconds, {report.worker: self.cells.of(report.times) for report in one.reports})

    def believe(self, worker: Worker, factor: float) -> "SpeedWatch":
        """A worker's factor is known otherwise."""
        detector = self.detector.copy()
        detector.believe(worker, factor)
        return replace(self, detector=detector)

    def lost(self, worker: Worker) -> "SpeedWatch":
        """A worker is gone."""
        detector = self.detector.copy()
        detector.lost(worker)
        return replace(self, detector=detector)


class Cells:
    """What the slices of a schedule are, and what their ops take by plan on a worker of usual speed."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @cached_property
    def _planned(self) -> Mapping[tuple[str, int], tuple[LayerRange, float]]:
        usual, schedule = replace(self._schedule.times, slow=()), self._schedule
        return {(kind, slice_): (schedule.layers_of(slice_),
                                 schedule.seconds(usual.duration_ticks(kind, slice_, Worker(0, 0))))
                for kind in COMPUTE_KINDS for slice_ in range(len(schedule.layers_by_slice))}

    def of(self, times: Sequence[OpTime]) -> list[CellTime]:
        """Times by layers. What no worker can have run, is left out."""
        planned = self._planned
        return [CellTime(one.kind, known[0], one.number, one.seconds, known[1])
                for one in times if (known := planned.get((one.kind, one.slice))) is not None]
