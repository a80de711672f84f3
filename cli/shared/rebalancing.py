"""The schedules of `slipstream train` where layers have moved, or may move."""

import os
from functools import partial
from typing import NamedTuple

import msgspec

from cli.shared.failure_schedules import AT_ONCE_SECONDS, has_room, job_at
from planner.job.file import Job
from planner.model.problem import NoPlanError
from planner.options import PlanOptions
from planner.plan import plan_only
from planner.tables.process_pool import PoolError, run_all
from runtime.coordinator.planning import Held, NoScheduleError, Speeds
from schedules.codec import decode, encode
from schedules.schedule import Schedule, Worker
from schedules.tables.file import TableError
from schedules.tables.table import Table

SETTLED_SECONDS = 10.0
"""Time limit of one that is planned while all train."""
NICENESS = 10
"""Of the process that plans meanwhile: the workers of its machine go first."""


class _Task(NamedTuple):
    """What to plan."""

    options: PlanOptions
    down: tuple[Worker, ...]

    def __str__(self) -> str:
        return f"the plan without {', '.join(map(str, self.down))}"


class Rebalancing:
    """A `Rebalancer`: plans on the spot; settled schedules by a process of its own, or from a table."""

    def __init__(self, job: Job, first: Schedule, table: Table | None = None,
                 settled_seconds: float = SETTLED_SECONDS) -> None:
        self._job = job
        self._first = first
        self._table = table
        self._options = PlanOptions(backward=first.backward, optimizer=first.optimizer)
        self._settled_seconds = settled_seconds

    def at_once(self, down: tuple[Worker, ...], held: Held, speeds: Speeds) -> Schedule:
        """The schedule in which nobody needs a layer that it does not hold. Raises NoScheduleError."""
        options = msgspec.structs.replace(self._options, method="greedy", time_limit=AT_ONCE_SECONDS, holds=held)
        return self._on_the_spot(options, down, speeds)

    def settled(self, down: tuple[Worker, ...], held: Held, speeds: Speeds) -> Schedule:
        """The best schedule to come to. Raises NoScheduleError."""
        found = None if speeds else self._in_table(down, held)
        if found is not None:
            return found
        options = msgspec.structs.replace(self._options, layers="move", time_limit=self._settled_seconds, holds=held)
        try:
            ((_, answer),) = run_all(partial(_plan, self._job_at(speeds)), [_Task(options, down)], 1, (NoPlanError,))
        except (NoPlanError, PoolError) as error:
            raise NoScheduleError(" ".join(str(error).split())) from None
        return decode(answer)

    def from_checkpoint(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """The schedule for which all layers are read anew. Raises NoScheduleError."""
        options = msgspec.structs.replace(self._options, method="greedy", time_limit=AT_ONCE_SECONDS, layers="move",
                                          from_checkpoint=True)
        return self._on_the_spot(options, down, speeds)

    def _on_the_spot(self, options: PlanOptions, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        try:
            return plan_only(options, self._job_at(speeds), down).schedule
        except NoPlanError as error:
            raise NoScheduleError(str(error)) from None

    def _job_at(self, speeds: Speeds) -> Job:
        return job_at(self._job, speeds) if speeds else self._job

    def _in_table(self, down: tuple[Worker, ...], held: Held) -> Schedule | None:
        """The table's, where the layers are still where it takes them to be."""
        if self._table is None or any(layers != self._first.holds_of_column(worker.column) for worker, layers in held):
            return None
        try:
            found = self._table.lookup(down, settled=True, nodes=self._job.nodes)
        except TableError as error:
            raise NoScheduleError(str(error)) from None
        if found is None or found.schedule.grid != self._first.grid or not has_room(self._job, found.schedule):
            return None
        return found.schedule


def _plan(job: Job, task: _Task) -> bytes:
    """In a process of its own."""
    os.nice(NICENESS)
    return encode(plan_only(task.options, job, task.down).schedule)
