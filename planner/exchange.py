"""Exchange roles among unlike workers: slow ones, or ones with a memory of their own.

The bounds of lemma 13 (`model.bounds_roles`) say how many vacant roles and how many unlike workers
each column has in the best distributions. Each distribution gives a few assignments of workers to
roles. An assignment is planned as a job in which every role has the speed and the memory of its
player; then the players take their seats.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, permutations, product
from typing import NamedTuple

import msgspec

from slipstream.planner.blockwise import TooLargeError
from slipstream.planner.budget import Clock
from slipstream.planner.comparison import Round, plan_in_rounds
from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import add_exactly, exact_decimal, layer_costs
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.bounds_roles import Distribution, RoleBounds
from slipstream.planner.model.from_job import choose_memory_unit, memory_in_units, to_per_mille
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import bounding_problem
from slipstream.planner.plan import Plan, plan_only
from slipstream.schedules.check import check
from slipstream.schedules.memory import activation_room
from slipstream.schedules.schedule import Schedule, Seat, Slow, Worker

MAX_ORDERS = 24
"""Maximum number of orders in which the unlike workers are distributed to columns."""
MAX_BOUNDED = 40
"""Maximum number of assignments, for each distribution, that are compared by lower bounds."""
MAX_PLANNED = 8
"""Maximum number of assignments that are planned."""


class Assignment(NamedTuple):
    """Assignment of all live workers to roles."""

    vacant: tuple[Worker, ...]
    """Roles that no worker plays, sorted."""
    players: tuple[tuple[Worker, Worker], ...]
    """Pairs of a role that is not vacant and the worker that plays it, sorted."""

    @property
    def moves(self) -> int:
        """Number of workers that do not play their own role."""
        return sum(role != player for role, player in self.players)


def exchange_roles(
    job: Job,
    failed: Sequence[Worker],
    options: PlanOptions,
    bounds: RoleBounds,
    clock: Clock,
    floor: float,
) -> Plan | None:
    """Return the shortest plan in which live workers have exchanged roles.

    The result is None if no such plan is found, if the live workers are alike or too many to bound,
    or if optimizer state is sharded. All candidates are planned in a share of the time limit, then
    the best few again in the rest. The search ends early at a period of `floor`, at Ctrl-C, or
    before a plan that would probably exceed the limit. Raises JobError if layouts are tried and a
    stage has no layer.

    Parameters
    ----------
    failed
        Workers that are down.
    options
        Options of the plans, with the limit of them all.
    bounds
        Bounds by which candidates are chosen.
    clock
        Clock of the search.
    floor
        Period in seconds that no plan can beat.
    """
    params, seconds = options.params.roles, options.limit_seconds
    # Counted steps need no deadline: each plan stops after its own.
    deadline = clock.now() + seconds if options.steps is None else math.inf
    assignments = candidate_assignments(job, failed, options, bounds, clock)

    # Each assignment is planned as a job of roles; then the players take their seats.
    def plan_assignment(assignment: Assignment, within: PlanOptions) -> Plan | None:
        try:
            plan = plan_only(within, with_assignment(job, assignment), assignment.vacant, clock)
        except (NoPlanError, TooLargeError):
            return None
        schedule = seat_players(
            plan.schedule, job, failed, assignment, from_checkpoint=options.from_checkpoint
        )
        return None if schedule is None else msgspec.structs.replace(plan, schedule=schedule)

    rounds = (
        Round(options.for_comparison, params.compared * seconds),
        Round(options, (1 - params.compared) * seconds),
    )
    return plan_in_rounds(
        assignments,
        rounds,
        plan_assignment,
        clock,
        finalists=params.finalists,
        floor=floor,
        deadline=deadline,
    )


# --- Assignments ----------------------------------------------------------------------------------


def unlike_workers(job: Job, failed: Collection[Worker]) -> list[Worker]:
    """Return the live workers that are slow or have a memory of their own, sorted."""
    workers = {worker for worker, factor in job.time.slow if to_per_mille(factor) != 1000}
    if job.memory:
        workers |= dict(job.memory.capacity_of).keys()
    return sorted(workers - {*failed})


def candidate_assignments(
    job: Job, failed: Sequence[Worker], options: PlanOptions, bounds: RoleBounds, clock: Clock
) -> list[Assignment]:
    """Return the assignments of workers to roles that are worth planning, best lower bound first.

    Of equals, those that move fewer workers come first. There are at most `MAX_PLANNED`, and none
    whose bound there was no time to compute. The list is empty if optimizer state is sharded, or if
    `bounds` has no distributions.

    Parameters
    ----------
    failed
        Workers that are down.
    options
        Options of the plans; bounds take the share `RoleParams.compared` of their limit.
    bounds
        Bounds that give the best distributions of vacant roles and unlike workers.
    clock
        Clock of the search.
    """
    # How much sharded state a worker keeps depends on its column.
    params = options.params.roles
    if job.memory and job.memory.state:
        return []
    # Distributions with the best bounds first, as long as there is time to bound their assignments.
    deadline = clock.now() + params.compared * options.limit_seconds
    bound_of = dict[Assignment, float]()
    for distribution in bounds.best_distributions(params.distributions):
        for assignment in islice(_iterate_assignments(job, failed, distribution), MAX_BOUNDED):
            if assignment not in bound_of and clock.now() <= deadline:
                bound_of[assignment] = _bound_of(assignment, job, options)
    return sorted(bound_of, key=lambda assignment: (bound_of[assignment], assignment.moves))[
        :MAX_PLANNED
    ]


def _bound_of(assignment: Assignment, job: Job, options: PlanOptions) -> float:
    """Return an assignment's lower bound on the period in seconds; infinity without a plan."""
    try:
        problem = bounding_problem(options, with_assignment(job, assignment), assignment.vacant)
    except NoPlanError:
        return math.inf
    return lower_bound(problem) * problem.tick_seconds


def _iterate_assignments(
    job: Job, failed: Sequence[Worker], distribution: Distribution
) -> Iterator[Assignment]:
    """Iterate over the assignments with these numbers of vacant roles and unlike workers."""
    orders = islice(permutations(unlike_workers(job, failed)), MAX_ORDERS)
    dealt = dict.fromkeys(_deal(order, distribution) for order in orders)
    vacancies = dict.fromkeys(_iterate_vacancies(job, failed, [down for down, _ in distribution]))
    for vacant, unlike in product(vacancies, dealt):
        yield _assign(job, failed, vacant, unlike)


def _deal(order: Sequence[Worker], distribution: Distribution) -> tuple[tuple[Worker, ...], ...]:
    """Return each column's unlike workers: in turn, as many of `order` as the distribution says."""
    rest = iter(order)
    return tuple(tuple(sorted(islice(rest, some))) for _, some in distribution)


def _iterate_vacancies(
    job: Job, failed: Sequence[Worker], counts: Sequence[int]
) -> Iterator[tuple[Worker, ...]]:
    """Iterate over sets of vacant roles, `counts[column]` of each column."""
    ascending = sorted(range(job.pipelines), key=lambda pipeline: job.microbatches[pipeline])
    # Roles of failed workers first, so that few workers move; then whole pipelines.
    for failed_first in (True, False):
        for order in (ascending, ascending[::-1]):
            vacant = []
            for column, count in enumerate(counts):
                roles = [Worker(pipeline, column) for pipeline in order]
                if failed_first:
                    roles.sort(key=lambda role: role not in failed)
                vacant += roles[:count]
            yield tuple(sorted(vacant))


def _assign(
    job: Job,
    failed: Collection[Worker],
    vacant: tuple[Worker, ...],
    unlike: Sequence[Sequence[Worker]],
) -> Assignment:
    """Return an assignment with these vacant roles and unlike workers that moves few workers."""
    grid = [
        Worker(pipeline, column)
        for pipeline in range(job.pipelines)
        for column in range(job.stages)
    ]
    special, empty = {worker for workers in unlike for worker in workers}, {*vacant}
    usual = {worker: None for worker in grid if worker not in special and worker not in failed}
    players = dict[Worker, Worker]()
    # Unlike workers keep their roles where they can, and take roles of dead or unlike workers
    # before those of alike ones.
    for column, workers in enumerate(unlike):
        free = [role for role in grid if role.column == column and role not in empty]
        players |= {worker: worker for worker in workers if worker in free}
        others = sorted(
            (role for role in free if role not in players), key=lambda role: role in usual
        )
        players |= dict(
            zip(others, (worker for worker in workers if worker not in free), strict=False)
        )
    # So do alike workers; the roles that are left get the nearest idle workers.
    players |= {role: role for role in usual if role not in empty and role not in players}
    idle = [worker for worker in usual if players.get(worker) != worker]
    for role in grid:
        if role not in empty and role not in players:
            players[role] = min(idle, key=lambda worker: (worker.column != role.column, worker))
            idle.remove(players[role])
    return Assignment(vacant, tuple(sorted(players.items())))


# --- From workers to roles and back ---------------------------------------------------------------


def with_assignment(job: Job, assignment: Assignment) -> Job:
    """Return a copy of the job whose roles have their players' speed and memory.

    A role's player is the worker that plays it in `assignment`. If the player has a memory of its
    own, what that leaves for activations grows or shrinks by how much lighter or heavier the role's
    layers are than its own, down to 0. Otherwise the role has the memory of its column.
    """
    slow = dict(job.time.slow)
    memory = job.memory
    if memory is not None:
        capacity_of, weights = dict(memory.capacity_of), [0.0] * job.stages
        for column, amount in zip(job.columns, memory.weights, strict=False):
            weights[column] = add_exactly(weights[column], amount)
        # Heavier layers leave a worker less than its own, lighter ones more.
        rooms = []
        for role, player in assignment.players:
            if player in capacity_of:
                lighter = add_exactly(weights[player.column], -weights[role.column])
                rooms.append((role, max(0.0, add_exactly(capacity_of[player], lighter))))
        memory = msgspec.structs.replace(memory, capacity_of=tuple(rooms))
    slow_roles = ((role, slow[player]) for role, player in assignment.players if player in slow)
    time = msgspec.structs.replace(job.time, slow=tuple(slow_roles))
    return msgspec.structs.replace(job, memory=memory, time=time)


def seat_players(
    schedule: Schedule,
    job: Job,
    failed: Sequence[Worker],
    assignment: Assignment,
    *,
    from_checkpoint: bool,
) -> Schedule | None:
    """Return a copy of a schedule of roles, with workers in its seats.

    The result has the speeds and memory of `job`. It is None if it would break a rule, if the
    schedule counts memory in another unit than the job, or if no live worker has the parameters of
    some column and none may be loaded from a checkpoint.

    Parameters
    ----------
    schedule
        Schedule of the job of `with_assignment`.
    failed
        Workers that are down.
    assignment
        Assignment that says which worker plays each role.
    from_checkpoint
        Whether parameters may be loaded from a checkpoint.
    """
    # Some live worker of each column must send its layers to those that take its roles.
    players, memory = dict(assignment.players), schedule.memory
    columns = {player.column for player in players.values()}
    if not from_checkpoint and columns != {*range(job.stages)}:
        return None
    # The schedule counts in units of the problem in place, or of that for layouts.
    if memory is not None:
        unit = choose_memory_unit(job)
        if float(unit) != memory.unit:
            unit = choose_memory_unit(job, layer_costs(job))
        job_memory = memory_in_units(job, unit)
        if job_memory is None or job_memory.unit != memory.unit:
            return None
        memory = msgspec.structs.replace(memory, capacity_of=job_memory.capacity_of)
    slow = tuple(Slow(worker, to_per_mille(factor)) for worker, factor in job.time.slow)
    # The programs stay those of the roles.
    seats = []
    for seat in schedule.seats:
        player, holds = players[seat.role], seat.holds
        # Lighter layers leave a player more than its own capacity. The file then says which layers
        # it holds, and the weights of all.
        if memory is not None and memory.capacity_for(player, seat.role.column) < (
            activation_room(schedule, seat) or 0
        ):
            holds = schedule.held_layers_of_column(seat.role.column)
        seats.append(Seat(player, seat.role, seat.program, holds))
    seats.sort(key=lambda seat: seat.worker)
    # Programs are numbered in the order of first use.
    order: dict[int, int] = {}
    seats = [
        msgspec.structs.replace(seat, program=order.setdefault(seat.program, len(order)))
        for seat in seats
    ]
    seated = msgspec.structs.replace(
        schedule,
        failed=tuple(sorted(set(failed))),
        seats=tuple(seats),
        memory=memory,
        programs=tuple(schedule.programs[index] for index in order),
        times=msgspec.structs.replace(schedule.times, slow=slow),
    )
    if any(seat.holds is not None for seat in seats):
        seated = _with_weights(seated, job)
    return None if check(seated) else seated


def _with_weights(schedule: Schedule, job: Job) -> Schedule:
    """Return a copy whose memory and times also record each layer's weights and optimizer step."""
    # A schedule file needs them for seats whose held layers are not those of their role.
    memory, times = schedule.memory, schedule.times
    if memory is None or memory.weights:
        return schedule
    costs = layer_costs(job)
    unit, tick = exact_decimal(memory.unit), exact_decimal(schedule.tick_seconds)
    weights = tuple(math.ceil(weight / unit) for weight in costs.weights)
    if not times.optimizer_of_layer:
        # The layers of a column add up to its step: the last one takes what rounding left.
        steps = [math.floor(step / tick) for step in costs.optimizer]
        for column, ticks in enumerate(times.optimizer):
            ranges = schedule.held_layers_of_column(column)
            steps[ranges[-1][1] - 1] += ticks - sum(sum(steps[slice(*pair)]) for pair in ranges)
        times = msgspec.structs.replace(times, optimizer_of_layer=tuple(steps))
    memory = msgspec.structs.replace(memory, weights=weights)
    return msgspec.structs.replace(schedule, memory=memory, times=times)
