"""Say which worker runs which micro-batch at which stage, and what it sends where."""

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
"""Function that returns the schedule for the failed workers, the same on all processes."""
Source = str | PathLike[str] | Table | Schedule | MakeSchedule


class NoRouteError(ValueError):
    """Error, in one line, for failures after which no schedule can be run."""


class Sample(NamedTuple):
    """Micro-batch, by the pipeline that reads it and its number in that pipeline, from 0."""

    pipeline: int
    microbatch: int


class Routes:
    """Which worker runs which micro-batch at which stage, for one set of failed workers.

    Raises NoRouteError for a schedule that breaks rules, and NotWholeError, a ValueError too, for
    one in which workers run parts of stages, or others' stages.

    Attributes
    ----------
    workers
        Live workers, sorted.
    failed
        All other workers, sorted.
    rows
        Cells of each live worker, in the order in which it runs them.
    stages, microbatches
        Number of stages, and of micro-batches of all pipelines together.
    """

    def __init__(self, schedule: Schedule, source: Source) -> None:
        if violations := check(schedule):
            raise NoRouteError(
                f"the schedule breaks rules: {violations[0]}; expected one that passes "
                "slipstream.check"
            )
        self._source, self._grid = source, schedule.grid
        self.rows = build_rows(schedule)
        self.workers = tuple(sorted(self.rows))
        self.failed = tuple(worker for worker in schedule.grid.workers() if worker not in self.rows)
        self.stages = 1 + max(cell.stage for row in self.rows.values() for cell in row)
        self.microbatches = schedule.grid.total_microbatches
        self._worker_of = {
            cell: worker
            for worker, row in self.rows.items()
            for cell in row
            if cell.microbatch is not None
        }

    @classmethod
    def read(cls, source: Source, failed: Iterable[str | Worker] = ()) -> Self:
        """Return the routes that avoid the `failed` workers.

        Raises NoRouteError if there is no schedule for these failures in which no layers move, the
        errors of `Routes`, and those of reading files.

        Parameters
        ----------
        source
            A table of schedules (or its folder), a schedule (or its file), or a function that
            returns the schedule for a tuple of failed workers. A single schedule is of no use after
            further failures.
        failed
            Workers that are down, each as "PIPELINE.STAGE" or `Worker`.
        """
        down = tuple(sorted(set(map(_as_worker, failed))))
        if isinstance(source, str | PathLike):
            path = Path(source)
            source = Table.load(path) if path.is_dir() else read_schedule(path)
        return cls(_find_schedule(source, down), source)

    def without(self, failed: Collection[Worker]) -> "Routes":
        """Return the routes for the case that the `failed` workers, and no others, are down.

        Raises NoRouteError, and the errors of `read`.
        """
        return self if set(failed) == set(self.failed) else type(self).read(self._source, failed)

    def stages_of(self, worker: Worker) -> tuple[int, ...]:
        """Return the stages that a live worker runs, and so holds."""
        return tuple(sorted({cell.stage for cell in self.rows[worker]}))

    def holders(self, stage: int) -> tuple[Worker, ...]:
        """Return the live workers that hold a stage, sorted."""
        return self._holders[stage]

    def worker_with(self, stage: int, action: str, microbatch: int) -> Worker:
        """Return the worker that runs a cell, given by stage, action and micro-batch.

        `action` is that of a cell, such as "F" or "SEND_F", and `microbatch` a number over all
        pipelines. Raises KeyError if there is no such cell.
        """
        return self._worker_of[Cell(stage, action, microbatch)]

    def numbers_of(self, worker: Worker) -> tuple[int, ...]:
        """Return a worker's micro-batches, numbered over all pipelines, in order of forwards."""
        forwards = (cell.microbatch for cell in self.rows[worker] if cell.action == "F")
        return tuple(dict.fromkeys(number for number in forwards if number is not None))

    def sample_of(self, number: int) -> Sample:
        """Return a micro-batch's pipeline, and its number there, by its number over all."""
        # Pipelines are numbered through; the last one with any micro-batch that begins at or before
        # the number has it, as some have none.
        firsts = prefix_sums(self._grid.microbatches)
        pipeline = max(
            at for at, count in enumerate(self._grid.microbatches) if count and firsts[at] <= number
        )
        return Sample(pipeline, number - firsts[pipeline])

    @property
    def has_split_backward(self) -> bool:
        """True if backwards are run as I and W, False if as B."""
        return any(cell.action == "I" for row in self.rows.values() for cell in row)

    @cached_property
    def digest(self) -> str:
        """Digest of all workers' cells in order, equal on processes with the same routes."""
        lines = (f"{worker} {' '.join(map(str, self.rows[worker]))}" for worker in self.workers)
        return sha256("\n".join(lines).encode()).hexdigest()

    @property
    def grid_workers(self) -> tuple[Worker, ...]:
        """All workers of the job, dead or alive, sorted."""
        return tuple(self._grid.workers())

    @cached_property
    def _holders(self) -> dict[int, tuple[Worker, ...]]:
        stages_by_worker = {worker: self.stages_of(worker) for worker in self.workers}
        holders: dict[int, tuple[Worker, ...]] = {}
        for stage in range(self.stages):
            holders[stage] = tuple(
                worker for worker, stages in stages_by_worker.items() if stage in stages
            )
        return holders


def _as_worker(name: str | Worker) -> Worker:
    return name if isinstance(name, Worker) else Worker.parse(name)


def _find_schedule(source: Table | Schedule | MakeSchedule, down: tuple[Worker, ...]) -> Schedule:
    """Return the schedule for the workers `down`, in which no worker loads layers."""
    names = ", ".join(map(str, down)) or "nobody"
    if isinstance(source, Table):
        entry = source.lookup(down)
        if entry is None:
            raise NoRouteError(
                f"the table {source.folder} has no schedule with layers in place "
                f"for {names} down; expected one: plan it with a larger "
                "--max-failures, or go back to a checkpoint"
            )
        return entry.schedule
    # A single schedule, or a function's answer, may be for other failures than these.
    schedule = source if isinstance(source, Schedule) else source(down)
    live = {seat.worker for seat in schedule.seats}
    planned_down = tuple(worker for worker in schedule.grid.workers() if worker not in live)
    if planned_down != down:
        raise NoRouteError(
            f"the schedule is for {', '.join(map(str, planned_down)) or 'nobody'} "
            f"down, not for {names}; give a table (slipstream table) for failures "
            "that come later"
        )
    return schedule
