"""The schedules of `slipstream train` after failures and where workers are slow: from a table, or planned meanwhile."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from cli.shared.planning import compile_planner
from planner.job.file import Job
from planner.model.problem import NoPlanError
from planner.normalise import normal_form, slow_while_alive
from planner.options import PlanOptions
from planner.plan import plan_only
from runtime.coordinator.planning import NoScheduleError, Scheduler, SchedulerAtSpeeds, Speeds
from runtime.coordinator.speed_planning import period_at
from schedules.costs import Room
from schedules.memory import memory_peaks, room
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
ROUNDED = 1e-9
"""Units of memory."""


def scheduler(job: Job, first: Schedule, table: Table | None) -> Scheduler:
    """A function that gives the schedule after failures: from the table, or planned by the list schedulers.

    The planner is compiled before, so that no failure has to wait for that.
    """
    compile_planner()

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        with _no_schedule():
            return _looked_up(job, table, down, first) or _planned(job, first, down, AT_ONCE_SECONDS)

    return schedule


def scheduler_at_speeds(job: Job, first: Schedule, table: Table | None) -> SchedulerAtSpeeds:
    """A function that gives the schedule where workers are slow: planned for that by the list schedulers.

    What is known already, the first schedule and the table's, is taken where it is better at these speeds.
    """
    def schedule(down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        with _no_schedule():
            found = [first if down == first.failed and has_room(job, first) else None,
                     _looked_up(job, table, down, first),
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


def has_room(job: Job, schedule: Schedule) -> bool:
    """Whether workers that have another capacity than their column have enough for a schedule, which may be made
    without regard to that, and may have other roles for them."""
    if job.memory is None or schedule.memory is None or not job.memory.capacity_of:
        return True
    own = _with_own_rooms(job, schedule)
    return all(peak <= (room(own, own.seat_of[worker]) or 0) for worker, peak in memory_peaks(own).items())


def _looked_up(job: Job, table: Table | None, down: tuple[Worker, ...], first: Schedule) -> Schedule | None:
    # Where a stage is lost, as with a machine, one of another stage that has taken over there before holds its layers,
    # or a checkpoint does.
    lost = dead_column(down, first.grid) is not None
    found = None if table is None else table.lookup(down, held_elsewhere=lost, nodes=job.nodes)
    fits = found is not None and found.schedule.grid == first.grid and has_room(job, found.schedule)
    return found.schedule if found is not None and fits else None


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
    """A schedule for as many failures, spread over the stages, in which live workers move. Raises NoScheduleError.

    Who moves is chosen last. So where single workers have less room than others, and what they get does not fit, it is
    planned once more as if nobody had more than they would have in the same role.
    """
    memory = job.memory
    if memory is None or not memory.capacity_of:
        return _moved(job, down, options)
    within = msgspec.structs.replace(options, time_limit=options.time_limit / 2)
    least = tuple(min(room, *(_room_at(job, worker, column) for worker, _ in memory.capacity_of))
                  for column, room in enumerate(memory.capacity))
    for capacity, too_little in ((memory.capacity, ()), (least, (NoPlanError,))):
        of_columns = msgspec.structs.replace(memory, capacity=capacity, capacity_of=())
        with suppress(*too_little):
            found = _moved(msgspec.structs.replace(job, memory=of_columns), down, within)
            if has_room(job, found):
                return _with_own_rooms(job, found)
    raise NoScheduleError(f"no live worker has room for the roles of {', '.join(map(str, down))}")


def _moved(job: Job, down: tuple[Worker, ...], options: PlanOptions) -> Schedule:
    job = slow_while_alive(job, down)
    found = relabel(normal_form(job, len(down), options).schedule, down, held_elsewhere=True, nodes=job.nodes)
    if found is None:
        raise NoScheduleError(f"no live worker can take over the roles of {', '.join(map(str, down))}")
    return found


def _with_own_rooms(job: Job, schedule: Schedule) -> Schedule:
    """The schedule with what room single workers have in their roles; where layers are given, in their own."""
    assert job.memory is not None and schedule.memory is not None
    rooms = []
    for worker, _ in job.memory.capacity_of:
        seat = schedule.seat_of.get(worker)
        if seat is not None:
            left = _room_at(job, worker, seat.role.column if seat.holds is None else worker.column)
            rooms.append(Room(worker, max(0, math.floor(left / schedule.memory.unit + ROUNDED))))
    return msgspec.structs.replace(schedule, memory=msgspec.structs.replace(
        schedule.memory, capacity_of=tuple(rooms) or msgspec.UNSET))


def _room_at(job: Job, worker: Worker, column: int) -> float:
    """The room of one that has another capacity than its column, in a role of a column."""
    memory = job.memory
    assert memory is not None
    weights = memory.weights or (0.0,) * len(job.columns)
    own, its = (sum(of_stage for of_stage, at in zip(weights, job.columns, strict=True) if at == one)
                for one in (worker.column, column))
    return dict(memory.capacity_of)[worker] + own - its
