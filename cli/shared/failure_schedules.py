"""The schedules of `slipstream train` after failures and where workers are slow: from a table, or planned meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from cli.shared.planning import compile_planner
from planner.job.file import Job
from planner.model.problem import NoPlanError
from planner.normalise import normal_form
from planner.options import PlanOptions
from planner.plan import plan_only
from runtime.coordinator.planning import NoScheduleError, Scheduler, SchedulerAtSpeeds, Speeds
from runtime.coordinator.speed_planning import period_at
from schedules.schedule import Schedule, Worker
from schedules.tables.file import TableError
from schedules.tables.pattern import dead_column
from schedules.tables.relabel import relabel
from schedules.tables.table import Table

AT_ONCE_SECONDS = 0.3
"""Time limit of a plan for which all wait. Where no plan is found so soon, the first one is taken."""
MEANWHILE_SECONDS = 2.0
"""Of one for other speeds, for which nobody waits."""
ROLES_SECONDS = 10.0
"""Of one in which workers take over other roles: several are planned."""


def scheduler(job: Job, first: Schedule, table: Table | None) -> Scheduler:
    """A function that gives the schedule after failures: from the table, or planned by the list schedulers.

    The planner is compiled before, so that no failure has to wait for that.
    """
    compile_planner()

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        with _no_schedule():
            return _looked_up(table, down, first) or _planned(job, first, down, AT_ONCE_SECONDS)

    return schedule


def scheduler_at_speeds(job: Job, first: Schedule, table: Table | None) -> SchedulerAtSpeeds:
    """A function that gives the schedule where workers are slow: planned for that by the list schedulers.

    What is known already, the first schedule and the table's, is taken where it is better at these speeds.
    """
    def schedule(down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        with _no_schedule():
            found = [first if down == first.failed else None, _looked_up(table, down, first),
                     _planned(job_at(job, speeds), first, down, MEANWHILE_SECONDS)]
            return min(filter(None, found), key=lambda one: period_at(one, dict(speeds)))

    return schedule


def job_at(job: Job, speeds: Speeds) -> Job:
    """A job whose workers have these speeds."""
    return msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=speeds))


@contextmanager
def _no_schedule() -> Iterator[None]:
    try:
        yield
    except (TableError, NoPlanError) as error:
        raise NoScheduleError(str(error)) from None


def _looked_up(table: Table | None, down: tuple[Worker, ...], first: Schedule) -> Schedule | None:
    # Where a stage is lost, as with a machine, one of another stage that has taken over there before holds its layers,
    # or a checkpoint does.
    lost = dead_column(down, first.grid) is not None
    found = None if table is None else table.lookup(down, held_elsewhere=lost)
    return found.schedule if found is not None and found.schedule.grid == first.grid else None


def _planned(job: Job, first: Schedule, down: tuple[Worker, ...], seconds: float) -> Schedule:
    options = PlanOptions(backward=first.backward, optimizer=first.optimizer, method="greedy",
                          time_limit=seconds)
    if dead_column(down, first.grid) is not None:
        # One of another stage, which may have taken over there before, holds its layers: roles must move.
        return _with_moves(job, down, msgspec.structs.replace(options, time_limit=ROLES_SECONDS, slices=False))
    planned = plan_only(options, job, down)
    if planned.interrupted:  # it was the run that should end, not the search alone
        raise KeyboardInterrupt
    return planned.schedule


def _with_moves(job: Job, down: tuple[Worker, ...], options: PlanOptions) -> Schedule:
    """A schedule for as many failures, spread over the stages, in which live workers move. Raises NoScheduleError."""
    found = relabel(normal_form(job, len(down), options).schedule, down, held_elsewhere=True)
    if found is None:
        raise NoScheduleError(f"no live worker can take over the roles of {', '.join(map(str, down))}")
    return found
