"""Schedules that a run requests when workers fail, slow down or return.

The schedules come from a table, or are planned during the run. They are of the same job as the
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
from slipstream.planner.plan import Plan, plan_only
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
"""Tolerance when rooms are rounded down to units of memory, in these units."""


class FailurePlanner:
    """Planner of the schedules with which one run continues after failures; thread-safe."""

    def __init__(
        self,
        job: Job,
        first: Schedule,
        table: Table | None = None,
        *,
        settled_seconds: float | None = None,
        params: SearchParams = DEFAULTS,
        progress: ProgressCallback = ignore_progress,
    ) -> None:
        """Compile and load the planner, so that no failure waits for it. Forked processes share it.

        Parameters
        ----------
        first
            Schedule with which the run began.
        table
            Table whose schedules for failures are used instead of planning; None: all are planned.
        settled_seconds
            Seconds of a search for a rebalanced schedule; None or 0: those of `params`.
        progress
            Function that receives a line if the planner is compiled here.
        """
        self._job, self._first, self._table, self._params = job, first, table, params.failures
        self._options = PlanOptions(
            backward=first.backward, optimizer=first.optimizer, params=params
        )
        self._greedy = msgspec.structs.replace(
            self._options, method="greedy", time_limit=self._params.at_once_seconds
        )
        self._settled_seconds = settled_seconds or self._params.settled_seconds
        ensure_compiled(progress)
        load_kernel()

    def after(self, down: tuple[Worker, ...]) -> Schedule:
        """Return the schedule to continue with when these workers are down.

        The schedule is from the table, or made by the list schedulers. Roles and layers stay in
        place unless no such schedule exists, or the table has one with moved roles whose shorter
        period makes up for the pause to load layers within `FailureParams.pause_pays_seconds`.
        Raises NoPlanError if there is none, KeyboardInterrupt if Ctrl-C ends a plan in place.
        """
        # The table's schedules, with roles moved and in place, cost next to nothing to look up;
        # one in place is planned only if the table has none.
        with _as_no_plan_error():
            moved = self._look_up(down, roles_move=True)
            try:
                in_place = self._look_up(down) or self._plan_schedule(
                    self._job, down, self._params.at_once_seconds
                )
            except NoPlanError:
                if moved is None:
                    raise
                return moved
            if moved is not None and self._is_worth_its_pause(moved, in_place):
                return moved
            return in_place

    def at_speeds(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """Return the schedule to continue with when `down` have failed and others are slow.

        Each of `speeds` is a worker and the factor by which its ops take longer; if there are none,
        the new plan is for those of the job. Of a new plan and, where they fit, the run's first
        schedule and the table's, the result is the one with the shortest period at these speeds.
        Raises NoPlanError without a new plan, KeyboardInterrupt if Ctrl-C ends it.
        """
        # A schedule that is better searched, for other speeds, may still be shorter than a quick
        # plan for these.
        with _as_no_plan_error():
            choices = []
            if down == self._first.failed and has_room(self._job, self._first):
                choices.append(self._first)
            in_table = self._look_up(down)
            if in_table is not None:
                choices.append(in_table)
            job = self._job_at_speeds(speeds)
            choices.append(self._plan_schedule(job, down, self._params.meanwhile_seconds))
            return min(choices, key=lambda schedule: period_at(schedule, dict(speeds)))

    def plan_at_once(
        self, down: tuple[Worker, ...], held_layers: HeldLayers, speeds: Speeds
    ) -> Schedule:
        """Return a schedule for these failures in which workers run only layers they hold.

        The layers that each worker holds now are `held_layers`. Slow workers are those in `speeds`;
        if it is empty, those of the job. Raises NoPlanError if there is none, as when some layer
        has no live holder, and JobError if a stage has no layer.
        """
        # No job is too large: with `holds`, jobs are planned whole in any time.
        options = msgspec.structs.replace(self._greedy, holds=held_layers)
        return self._with_true_bound(plan_only(options, self._job_at_speeds(speeds), down).schedule)

    def plan_rebalanced(
        self, down: tuple[Worker, ...], held_layers: HeldLayers, speeds: Speeds
    ) -> Schedule:
        """Return the best schedule found for these failures, whichever layers must move.

        The layers that each worker holds now are `held_layers`. Slow workers are those in `speeds`.
        If it is empty, they are those of the job; if, moreover, all hold the layers of their own
        columns, the table's schedule is returned if it has one. Raises NoPlanError if there is
        none, JobError if a stage has no layer.
        """
        in_table = None if speeds else self._settled_in_table(down, held_layers)
        if in_table is not None:
            return in_table
        options = msgspec.structs.replace(
            self._options, layers="move", time_limit=self._settled_seconds, holds=held_layers
        )
        with _as_no_plan_error():
            return self._with_true_bound(
                plan_only(options, self._job_at_speeds(speeds), down).schedule
            )

    def plan_from_checkpoint(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        """Return a schedule for these failures in which any worker may get any layer.

        To run it, all workers load a checkpoint. Slow workers are those in `speeds`; if it is
        empty, those of the job. Raises NoPlanError if there is none, or if the job is too large to
        be planned in time, and JobError if a stage has no layer.
        """
        options = msgspec.structs.replace(self._greedy, layers="move", from_checkpoint=True)
        with _as_no_plan_error():
            return self._with_true_bound(
                self._plan_even_late(self._job_at_speeds(speeds), down, options).schedule
            )

    def _with_true_bound(self, schedule: Schedule) -> Schedule:
        """Return the schedule, without its bound if the job leaves recomputation to the planner."""
        # The bound was proven for the stages that were chosen to recompute, not for all choices.
        return (
            schedule.with_bound(0, schedule.scope) if chooses_recomputation(self._job) else schedule
        )

    def _job_at_speeds(self, speeds: Speeds) -> Job:
        return with_speeds(self._job, speeds) if speeds else self._job

    def _is_worth_its_pause(self, moved: Schedule, in_place: Schedule) -> bool:
        """Return whether the shorter period of `moved` saves more than loading its layers takes."""
        loading = compute_transition(moved, self._job)
        if not loading.layers:
            return period_seconds(moved) < period_seconds(in_place)
        # Without weights in the job file, nobody knows how long loading takes.
        if loading.seconds is None:
            return False
        # Time saved in a given time of training, for the same number of iterations.
        saved = self._params.pause_pays_seconds * (
            1 - period_seconds(moved) / period_seconds(in_place)
        )
        return saved > loading.seconds + self._params.joining_seconds

    def _look_up(self, down: tuple[Worker, ...], *, roles_move: bool = False) -> Schedule | None:
        # If a stage is lost, as with a machine, a worker of another stage that has taken over there
        # before holds its layers, or a checkpoint does.
        lost = dead_column(down, self._first.grid) is not None
        return self._table_schedule(down, held_elsewhere=lost, roles_move=roles_move)

    def _settled_in_table(
        self, down: tuple[Worker, ...], held_layers: HeldLayers
    ) -> Schedule | None:
        """Return the table's rebalanced schedule for these failures, or None if none fits."""
        # The table's schedules are for workers that hold the layers of their own columns.
        if any(
            layers != self._first.held_layers_of_column(worker.column)
            for worker, layers in held_layers
        ):
            return None
        with _as_no_plan_error():
            return self._table_schedule(down, settled=True)

    def _table_schedule(
        self,
        down: tuple[Worker, ...],
        *,
        held_elsewhere: bool = False,
        roles_move: bool = False,
        settled: bool = False,
    ) -> Schedule | None:
        """Return the schedule that `Table.lookup` finds with these options; None if none fits."""
        if self._table is None:
            return None
        entry = self._table.lookup(
            down,
            held_elsewhere=held_elsewhere,
            roles_move=roles_move,
            settled=settled,
            nodes=self._job.nodes,
            checked=False,
        )
        if entry is None:
            return None
        # A table of another job, or one with wrong values, must not stop the run.
        fits = (
            entry.schedule.grid == self._first.grid
            and has_room(self._job, entry.schedule)
            and not check(entry.schedule)
        )
        return entry.schedule if fits else None

    def _plan_schedule(self, job: Job, down: tuple[Worker, ...], seconds: float) -> Schedule:
        """Return a schedule for the failures `down`, by the list schedulers in about `seconds`."""
        params, ops = self._params, _max_changed_ops(job, down)
        options = msgspec.structs.replace(self._greedy, time_limit=seconds)
        # The larger the job, the less is tried: no cut micro-batches, then only the first plan.
        if ops > params.large:
            options = msgspec.structs.replace(options, slices=False)
        if params.large < ops <= params.largest and seconds == params.at_once_seconds:
            options = msgspec.structs.replace(options, steps=1)
        if dead_column(down, self._first.grid) is not None:
            # A worker of another stage, which has taken over there before, may hold its layers:
            # roles must move.
            options = msgspec.structs.replace(
                options, time_limit=params.roles_seconds, slices=False
            )
            return self._with_true_bound(_plan_with_moved_roles(job, down, options))
        planned = self._plan_even_late(job, down, options)
        if planned.interrupted:  # it was the run that should end, not the search alone
            raise KeyboardInterrupt
        return self._with_true_bound(planned.schedule)

    def _plan_even_late(self, job: Job, down: tuple[Worker, ...], options: PlanOptions) -> Plan:
        """Return a plan, even if the job is too large for the limit in `options`."""
        # A plan that takes longer is better than none.
        try:
            return plan_only(options, job, down)
        except TooLargeError:
            return plan_only(
                msgspec.structs.replace(options, time_limit=self._params.large_seconds), job, down
            )


def period_seconds(schedule: Schedule) -> float:
    """Return the period of a schedule in seconds."""
    return schedule.seconds(schedule.period_ticks)


def _max_changed_ops(job: Job, down: tuple[Worker, ...]) -> int:
    """Return an upper limit of the ops of pipelines that may share failed workers' work."""
    # Each micro-batch at each virtual stage of a failed worker may go to another pipeline.
    count = max(job.microbatches)
    moved = count * (job.depth // job.stages)
    return 3 * job.depth * count * min(job.pipelines, len(down) * (1 + moved))


@contextmanager
def _as_no_plan_error() -> Iterator[None]:
    """Return a context in which a TableError or TooLargeError is raised as NoPlanError."""
    try:
        yield
    except (TableError, TooLargeError) as error:
        raise NoPlanError(" ".join(str(error).split())) from None


def with_speeds(job: Job, speeds: Speeds) -> Job:
    """Return a copy of the job in which `speeds` alone say which workers are slow."""
    return msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=speeds))


def has_room(job: Job, schedule: Schedule) -> bool:
    """Return whether all workers have room for their ops, given memories of their own.

    True if the job gives no worker its own, or the schedule records no memory.
    """
    if job.memory is None or schedule.memory is None or not job.memory.capacity_of:
        return True
    schedule = _with_own_rooms(job, schedule)
    return all(
        peak <= (activation_room(schedule, schedule.seat_of[worker]) or 0)
        for worker, peak in memory_peaks(schedule).items()
    )


def _plan_with_moved_roles(job: Job, down: tuple[Worker, ...], options: PlanOptions) -> Schedule:
    """Return a schedule for these failures in which live workers may take other roles."""
    memory = job.memory
    if memory is None or not memory.capacity_of:
        return _relabelled_normal_form(job, down, options)
    # The least room that any worker would have in the roles of each column.
    within = msgspec.structs.replace(options, time_limit=options.time_limit / 2)
    lowest = []
    for column, room in enumerate(memory.capacity):
        rooms = [_room_in_role(job, worker, column) for worker, _ in memory.capacity_of]
        lowest.append(min(room, *rooms))
    # Which workers move is chosen last. If one has too little memory for its role, all is planned
    # again with the least room.
    for capacity, too_little in ((memory.capacity, ()), (tuple(lowest), (NoPlanError,))):
        of_columns = msgspec.structs.replace(memory, capacity=capacity, capacity_of=())
        with suppress(*too_little):
            schedule = _relabelled_normal_form(
                msgspec.structs.replace(job, memory=of_columns), down, within
            )
            if has_room(job, schedule):
                return _with_own_rooms(job, schedule)
    raise NoPlanError(f"no live worker has room for the roles of {', '.join(map(str, down))}")


def _relabelled_normal_form(job: Job, down: tuple[Worker, ...], options: PlanOptions) -> Schedule:
    """Return the `normal_form` for as many failures, its roles played by the live workers."""
    job = slow_while_alive(job, down)
    relabelled = relabel_schedule(
        normal_form(job, len(down), options).schedule, down, held_elsewhere=True, nodes=job.nodes
    )
    if relabelled is None:
        raise NoPlanError(f"no live worker can take over the roles of {', '.join(map(str, down))}")
    return relabelled


def _with_own_rooms(job: Job, schedule: Schedule) -> Schedule:
    """Return a copy that records the room of workers with a memory of their own."""
    assert job.memory is not None and schedule.memory is not None
    rooms = []
    for worker, _ in job.memory.capacity_of:
        seat = schedule.seat_of.get(worker)
        if seat is not None:
            left = _room_in_role(
                job, worker, seat.role.column if seat.holds is None else worker.column
            )
            rooms.append(Room(worker, max(0, math.floor(left / schedule.memory.unit + ROUNDING))))
    return msgspec.structs.replace(
        schedule,
        memory=msgspec.structs.replace(schedule.memory, capacity_of=tuple(rooms) or msgspec.UNSET),
    )


def _room_in_role(job: Job, worker: Worker, column: int) -> float:
    """Return a worker's room with the layers of `column`, in the job's unit."""
    # The job file says what room the worker has with its own column's weights; heavier ones may
    # leave less than nothing.
    memory = job.memory
    assert memory is not None
    weights_by_column = [0.0] * job.stages
    for stage_column, weights in zip(job.columns, memory.weights, strict=False):
        weights_by_column[stage_column] += weights
    own_room = dict(memory.capacity_of)[worker]
    return own_room + weights_by_column[worker.column] - weights_by_column[column]
