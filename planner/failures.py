"""Schedules that a run requests when workers fail, slow down or return.

They come from a table, or are planned while the run continues, and are of the same job as the
schedule that the run began with. NoPlanError is raised if there is none.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from slipstream.planner.blockwise import TooLargeError
from slipstream.planner.budget import ProgressCallback, ignore_progress
from slipstream.planner.compiled import ensure_compiled, load_kernel
from slipstream.planner.job.file import Job
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.normalise import normal_form, slow_while_alive
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import DEFAULTS, SearchParams
from slipstream.planner.plan import plan_only
from slipstream.planner.recompute import chooses_recomputation
from slipstream.planner.report import compute_transition
from slipstream.schedules.check import check
from slipstream.schedules.memory import activation_room, memory_peaks
from slipstream.schedules.schedule import HeldLayers, Room, Schedule, Speeds, Worker
from slipstream.schedules.tables.file import TableError
from slipstream.schedules.tables.pattern import dead_column
from slipstream.schedules.tables.relabel import relabel_schedule
from slipstream.schedules.tables.table import Table
from slipstream.schedules.timing import period_at

ROUNDING = 1e-9
"""Tolerance for rounding when rooms are compared, in the schedule's units of memory."""



class FailurePlanner:
    """Maker, for any thread, of the schedules with which one run continues after failures."""

    def __init__(self, job: Job, first: Schedule, table: Table | None = None, *, settled_seconds: float | None = None,
                 params: SearchParams = DEFAULTS, progress: ProgressCallback = ignore_progress) -> None:
        """Compile and load the planner, so that no failure waits for it.

        Forked processes share it. The run began with the schedule `first`. Schedules that `table`
        has for failures are used instead of planning; None: all are planned. A search for a
        rebalanced schedule takes `settled_seconds` (None: as `params` says). `progress` receives a
        line if the planner is compiled here.
        """
        self._job, self._first, self._table, self._params = job, first, table, params.failures
        self._options = PlanOptions(backward=first.backward, optimizer=first.optimizer, params=params)
        self._greedy = msgspec.structs.replace(self._options, method="greedy", time_limit=self._params.at_once_seconds)
        self._settled_seconds = settled_seconds or self._params.settled_seconds
        ensure_compiled(progress)
        load_kernel()

    def after(self, down: tuple[Worker, ...]) -> Schedule:
        """Return the schedule to continue with when these workers are down.

        It is from the table, or made by the list schedulers. Layers stay in place, unless no such
        schedule exists, or the table's one with moved roles makes up for the pause of loading
        layers within `FailureParams.pause_pays_seconds`.
        """
        with _as_no_plan_error():
            moved = self._look_up(down, roles_move=True)
            try:
                in_place = self._look_up(down) or self._plan_schedule(self._job, down, self._params.at_once_seconds)
            except NoPlanError:
                if moved is None:
                    raise
                return moved
            return moved if moved is not None and self._is_worth_its_pause(moved, in_place) else in_place

    def at_speeds(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """Return the schedule to continue with when `down` have failed and others are slow.

        Each of `speeds` is a worker and the factor by which its ops take longer. Of a new plan, the
        run's first schedule and the table's, it is the one with the shortest period at these
        speeds.
        """
        with _as_no_plan_error():
            choices = [self._first if down == self._first.failed and has_room(self._job, self._first) else None,
                       self._look_up(down),
                       self._plan_schedule(self._job_at_speeds(speeds), down, self._params.meanwhile_seconds)]
            return min(filter(None, choices), key=lambda one: period_at(one, dict(speeds)))

    def plan_at_once(self, down: tuple[Worker, ...], held: HeldLayers, speeds: Speeds) -> Schedule:
        """Return a schedule for these failures in which each worker runs only layers in `held`.

        Slow workers are those in `speeds`; if it is empty, those of the job.
        """
        options = msgspec.structs.replace(self._greedy, holds=held)
        return self._with_true_bound(plan_only(options, self._job_at_speeds(speeds), down).schedule)

    def plan_settled(self, down: tuple[Worker, ...], held: HeldLayers, speeds: Speeds) -> Schedule:
        """Return the best schedule for these failures, whichever layers move, from table or search.

        The layers that each worker has now are `held`. Slow workers are those in `speeds`, for
        which no table is used; if it is empty, those of the job.
        """
        in_table = None if speeds else self._settled_in_table(down, held)
        if in_table is not None:
            return in_table
        options = msgspec.structs.replace(self._options, layers="move", time_limit=self._settled_seconds, holds=held)
        with _as_no_plan_error():
            return self._with_true_bound(plan_only(options, self._job_at_speeds(speeds), down).schedule)

    def plan_from_checkpoint(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """Return a schedule for these failures in which any worker may have any layer.

        All workers then load a checkpoint. Slow workers are those in `speeds`; if it is empty,
        those of the job.
        """
        options = msgspec.structs.replace(self._greedy, layers="move", from_checkpoint=True)
        return self._with_true_bound(plan_only(options, self._job_at_speeds(speeds), down).schedule)

    def _with_true_bound(self, schedule: Schedule) -> Schedule:
        """Return the schedule, without its bound if that is of one choice alone."""
        return schedule.with_bound(0, schedule.scope) if chooses_recomputation(self._job) else schedule

    def _job_at_speeds(self, speeds: Speeds) -> Job:
        return with_speeds(self._job, speeds) if speeds else self._job

    def _is_worth_its_pause(self, moved: Schedule, in_place: Schedule) -> bool:
        """Return whether the shorter period of `moved` saves more than loading its layers takes."""
        loading = compute_transition(moved, self._job)
        if not loading.layers:
            return period_seconds(moved) < period_seconds(in_place)
        if loading.seconds is None:
            return False
        saved = self._params.pause_pays_seconds * (1 - period_seconds(moved) / period_seconds(in_place))
        return saved > loading.seconds + self._params.joining_seconds

    def _look_up(self, down: tuple[Worker, ...], *, roles_move: bool = False) -> Schedule | None:
        # If a stage is lost, as with a machine, a worker of another stage that has taken over there before holds its
        # layers, or a checkpoint does.
        lost = dead_column(down, self._first.grid) is not None
        return self._table_schedule(down, held_elsewhere=lost, roles_move=roles_move)

    def _settled_in_table(self, down: tuple[Worker, ...], held: HeldLayers) -> Schedule | None:
        """Return the table's rebalanced schedule for these failures, if it fits `held`."""
        if any(layers != self._first.held_layers_of_column(worker.column) for worker, layers in held):
            return None
        with _as_no_plan_error():
            return self._table_schedule(down, settled=True)

    def _table_schedule(self, down: tuple[Worker, ...], *, held_elsewhere: bool = False, roles_move: bool = False,
                        settled: bool = False) -> Schedule | None:
        """Return the table's schedule for these failures, by the options of `Table.lookup`."""
        entry = None if self._table is None else self._table.lookup(
            down, held_elsewhere=held_elsewhere, roles_move=roles_move, settled=settled, nodes=self._job.nodes,
            checked=False)
        fits = entry is not None and entry.schedule.grid == self._first.grid and has_room(self._job, entry.schedule) \
            and not check(entry.schedule)
        return entry.schedule if entry is not None and fits else None

    def _plan_schedule(self, job: Job, down: tuple[Worker, ...], seconds: float) -> Schedule:
        """Return a schedule by the list schedulers in about `seconds`."""
        params, ops = self._params, _max_changed_ops(job, down)
        options = msgspec.structs.replace(self._greedy, time_limit=seconds)
        if ops > params.large:
            options = msgspec.structs.replace(options, slices=False)
        if params.large < ops <= params.largest and seconds == params.at_once_seconds:  # the first plan that is found
            options = msgspec.structs.replace(options, steps=1)
        if dead_column(down, self._first.grid) is not None:
            # A worker of another stage, which has taken over there before, may hold its layers: roles must move.
            options = msgspec.structs.replace(options, time_limit=params.roles_seconds, slices=False)
            return self._with_true_bound(_plan_with_moved_roles(job, down, options))
        try:
            planned = plan_only(options, job, down)
        except TooLargeError:
            planned = plan_only(msgspec.structs.replace(options, time_limit=params.large_seconds), job, down)
        if planned.interrupted:  # it was the run that should end, not the search alone
            raise KeyboardInterrupt
        return self._with_true_bound(planned.schedule)


def period_seconds(schedule: Schedule) -> float:
    """Return the period of a schedule in seconds."""
    return schedule.seconds(schedule.period_ticks)


def _max_changed_ops(job: Job, down: tuple[Worker, ...]) -> int:
    """Return a bound on the ops of pipelines that may share a failed worker's micro-batch."""
    most = max(job.microbatches)
    return 3 * job.stages * most * min(job.pipelines, len(down) * (1 + most))


@contextmanager
def _as_no_plan_error() -> Iterator[None]:
    """Return a context in which a TableError or TooLargeError is raised as NoPlanError."""
    try:
        yield
    except (TableError, TooLargeError) as error:
        raise NoPlanError(" ".join(str(error).split())) from None


def with_speeds(job: Job, speeds: Speeds) -> Job:
    """Return a copy of the job with these slow workers and factors of op times."""
    return msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=speeds))


def has_room(job: Job, schedule: Schedule) -> bool:
    """Return whether a schedule fits into workers' own capacities, in whatever roles."""
    if job.memory is None or schedule.memory is None or not job.memory.capacity_of:
        return True
    own = _with_own_rooms(job, schedule)
    return all(peak <= (activation_room(own, own.seat_of[worker]) or 0) for worker, peak in memory_peaks(own).items())


def _plan_with_moved_roles(job: Job, down: tuple[Worker, ...], options: PlanOptions) -> Schedule:
    """Return a schedule for these failures in which live workers may take other roles.

    It is planned for the number of failures; which workers move is chosen last. If that gives a
    worker more than its memory holds, it is planned again with the least room of each column's
    roles. Raises NoPlanError if that does not fit either.
    """
    memory = job.memory
    if memory is None or not memory.capacity_of:
        return _relabelled_normal_form(job, down, options)
    within = msgspec.structs.replace(options, time_limit=options.time_limit / 2)
    lowest = tuple(min(room, *(_room_in_role(job, worker, column) for worker, _ in memory.capacity_of))
                   for column, room in enumerate(memory.capacity))
    for capacity, too_little in ((memory.capacity, ()), (lowest, (NoPlanError,))):
        of_columns = msgspec.structs.replace(memory, capacity=capacity, capacity_of=())
        with suppress(*too_little):
            schedule = _relabelled_normal_form(msgspec.structs.replace(job, memory=of_columns), down, within)
            if has_room(job, schedule):
                return _with_own_rooms(job, schedule)
    raise NoPlanError(f"no live worker has room for the roles of {', '.join(map(str, down))}")


def _relabelled_normal_form(job: Job, down: tuple[Worker, ...], options: PlanOptions) -> Schedule:
    """Return a schedule for as many failures, with live workers assigned to its roles."""
    job = slow_while_alive(job, down)
    relabelled = relabel_schedule(normal_form(job, len(down), options).schedule, down, held_elsewhere=True,
                                  nodes=job.nodes)
    if relabelled is None:
        raise NoPlanError(f"no live worker can take over the roles of {', '.join(map(str, down))}")
    return relabelled


def _with_own_rooms(job: Job, schedule: Schedule) -> Schedule:
    """Return a copy of the schedule that records rooms of workers with an own capacity."""
    assert job.memory is not None and schedule.memory is not None
    rooms = []
    for worker, _ in job.memory.capacity_of:
        seat = schedule.seat_of.get(worker)
        if seat is not None:
            left = _room_in_role(job, worker, seat.role.column if seat.holds is None else worker.column)
            rooms.append(Room(worker, max(0, math.floor(left / schedule.memory.unit + ROUNDING))))
    return msgspec.structs.replace(schedule, memory=msgspec.structs.replace(
        schedule.memory, capacity_of=tuple(rooms) or msgspec.UNSET))


def _room_in_role(job: Job, worker: Worker, column: int) -> float:
    """Return the activation memory of a worker with an own capacity, by its role's column."""
    memory = job.memory
    assert memory is not None
    weights = memory.weights or (0.0,) * len(job.columns)
    own, its = (sum(of_stage for of_stage, at in zip(weights, job.columns, strict=True) if at == place)
                for place in (worker.column, column))
    return dict(memory.capacity_of)[worker] + own - its
