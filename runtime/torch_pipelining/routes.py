"""Routes: which worker runs which micro-batch at which stage, and what it sends where."""

from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import NamedTuple, Self

from slipstream.schedules.check import check
from slipstream.schedules.codec import read as read_schedule
from slipstream.schedules.layers import prefix_sums
from slipstream.schedules.rows import Cell, build_rows
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.table import Table

MakeSchedule = Callable[[tuple[Worker, ...]], Schedule]
"""Function of the failed workers; all processes must get the same schedule from it."""
Source = str | PathLike[str] | Table | Schedule | MakeSchedule


class NoRouteError(ValueError):
    """Error for failures for which there is no schedule that can run. The message is one line."""


class Sample(NamedTuple):
    """Micro-batch of an iteration: the pipeline that reads it, and its number there, from 0."""

    pipeline: int
    microbatch: int


class Routes:
    """Rows of all live workers, for one set of failed workers.

    Attributes
    ----------
    workers
        Live workers, sorted.
    rows
        Cells of each live worker, in the order in which it runs them.
    stages, microbatches
        Numbers of stages, and of micro-batches over all pipelines.
    """

    def __init__(self, schedule: Schedule, source: Source) -> None:
        if violations := check(schedule):
            raise NoRouteError(f"the schedule breaks rules: {violations[0]}; expected one that passes slipstream.check")
        self._source, self._grid = source, schedule.grid
        self.rows = build_rows(schedule)
        self.workers = tuple(sorted(self.rows))
        self.failed = tuple(worker for worker in schedule.grid.workers() if worker not in self.rows)
        self.stages = 1 + max(cell.stage for row in self.rows.values() for cell in row)
        self.microbatches = schedule.grid.total_microbatches
        self._worker_of = {cell: worker for worker, row in self.rows.items() for cell in row
                           if cell.microbatch is not None}

    @classmethod
    def read(cls, source: Source, failed: Iterable[str | Worker] = ()) -> Self:
        """Read the routes around some failed workers.

        Args:
            source: A table of schedules (or its folder), a schedule (or its file), or a function that
                returns the schedule for a tuple of failed workers. After further failures, a schedule
                alone does not help.
            failed: Workers that are down, each as "PIPELINE.STAGE" or `Worker`.

        Raises NoRouteError if there is no schedule for these failures with all layers in place, and
        the errors of reading files.
        """
        down = tuple(sorted({one if isinstance(one, Worker) else Worker.parse(one) for one in failed}))
        if isinstance(source, str | PathLike):
            path = Path(source)
            source = Table.load(path) if path.is_dir() else read_schedule(path)
        return cls(_find_schedule(source, down), source)

    def without(self, failed: Collection[Worker]) -> "Routes":
        """Return the routes if exactly these workers are down. Raises NoRouteError."""
        return self if set(failed) == set(self.failed) else type(self).read(self._source, failed)

    def stages_of(self, worker: Worker) -> tuple[int, ...]:
        """Return the stages whose parameters a live worker holds."""
        return tuple(sorted({cell.stage for cell in self.rows[worker]}))

    def holders(self, stage: int) -> tuple[Worker, ...]:
        """Return the live workers that hold a stage, sorted."""
        return self._holders[stage]

    def worker_with(self, stage: int, action: str, microbatch: int) -> Worker:
        """Return the worker whose row has this cell, such as the other end of a transfer."""
        return self._worker_of[Cell(stage, action, microbatch)]

    def numbers_of(self, worker: Worker) -> tuple[int, ...]:
        """Return the micro-batches of which a worker runs any stage, in the order of their forwards."""
        forwards = (cell.microbatch for cell in self.rows[worker] if cell.action == "F")
        return tuple(dict.fromkeys(number for number in forwards if number is not None))

    def sample_of(self, number: int) -> Sample:
        """Return pipeline and number there of a micro-batch, given its number over all pipelines."""
        firsts = prefix_sums(self._grid.microbatches)
        pipeline = max(at for at, count in enumerate(self._grid.microbatches) if count and firsts[at] <= number)
        return Sample(pipeline, number - firsts[pipeline])

    @property
    def has_split_backward(self) -> bool:
        """True if I and W are separate."""
        return any(cell.action == "I" for row in self.rows.values() for cell in row)

    @cached_property
    def digest(self) -> str:
        """Digest of all rows, by which processes compare them."""
        lines = (f"{worker} {' '.join(map(str, self.rows[worker]))}" for worker in self.workers)
        return sha256("\n".join(lines).encode()).hexdigest()

    @property
    def grid_workers(self) -> tuple[Worker, ...]:
        """All workers of the job, dead or alive, sorted."""
        return tuple(self._grid.workers())

    @cached_property
    def _holders(self) -> dict[int, tuple[Worker, ...]]:
        return {stage: tuple(worker for worker in self.workers if stage in self.stages_of(worker))
                for stage in range(self.stages)}


def _find_schedule(source: Table | Schedule | MakeSchedule, down: tuple[Worker, ...]) -> Schedule:
    """Return the schedule for exactly these failed workers, in which no worker loads layers."""
    names = ", ".join(map(str, down)) or "nobody"
    if isinstance(source, Table):
        found = source.lookup(down)
        if found is None:
            raise NoRouteError(f"the table {source.folder} has no schedule with layers in place "
                               f"for {names} down; expected one: plan it with a larger "
                               "--max-failures, or go back to a checkpoint")
        return found.schedule
    schedule = source if isinstance(source, Schedule) else source(down)
    live = {seat.worker for seat in schedule.seats}
    found_down = tuple(worker for worker in schedule.grid.workers() if worker not in live)
    if found_down != down:
        raise NoRouteError(f"the schedule is for {', '.join(map(str, found_down)) or 'nobody'} "
                           f"down, not for {names}; give a table (slipstream table) for failures "
                           "that come later")
    return schedule
