"""Exchange roles among unlike workers: slow ones, or ones with a memory of their own.

The bounds of lemma 13 (`model.bounds_roles`) say how many vacant roles and how many unlike workers
each column has in the best distributions. Each of them gives a few assignments: who plays which
role. An assignment is planned as a job in which every role has the speed and the memory of its
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
from slipstream.planner.job.layers import add_exactly, layer_costs
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.bounds_roles import Distribution, RoleBounds
from slipstream.planner.model.from_job import choose_memory_unit, memory_in_units, to_per_mille
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import bounding_problem
from slipstream.planner.plan import Plan, plan_only
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Schedule, Seat, Slow, Worker

MAX_ORDERS = 24
"""Maximum number of orders of the unlike workers in which they are dealt to columns."""
MAX_BOUNDED = 40
"""Maximum number of assignments of a distribution that are compared by their lower bounds."""
MAX_PLANNED = 8
"""Maximum number of assignments that are planned."""


class Assignment(NamedTuple):
    """Assignment of the live workers to roles."""

    vacant: tuple[Worker, ...]
    """Roles that no worker plays, sorted."""
    players: tuple[tuple[Worker, Worker], ...]
    """Each other role with the worker that plays it, sorted."""

    @property
    def moves(self) -> int:
        """Number of workers that change roles."""
        return sum(role != player for role, player in self.players)


def exchange_roles(job: Job, failed: Sequence[Worker], options: PlanOptions, bounds: RoleBounds, clock: Clock,
                   floor: float) -> Plan | None:
    """Return the shortest plan over assignments of roles; None if there is none.

    There is none if the live workers are alike. All candidates are planned in a share of the time,
    then the best few again in the rest. The search ends early at a period of `floor` seconds, which
    none can beat, or where plans take longer than their shares.
    """
    params, seconds = options.params.roles, options.limit_seconds
    deadline = clock.now() + seconds if options.steps is None else math.inf
    assignments = candidate_assignments(job, failed, options, bounds, clock)

    def plan_assignment(assignment: Assignment, within: PlanOptions) -> Plan | None:
        try:
            plan = plan_only(within, with_assignment(job, assignment), assignment.vacant, clock)
        except (NoPlanError, TooLargeError):
            return None
        schedule = seat_players(plan.schedule, job, failed, assignment, from_checkpoint=options.from_checkpoint)
        return None if schedule is None else msgspec.structs.replace(plan, schedule=schedule)

    rounds = (Round(options.for_comparison, params.compared * seconds), Round(options, (1 - params.compared) * seconds))
    return plan_in_rounds(assignments, rounds, plan_assignment, clock, finalists=params.finalists, floor=floor,
                          deadline=deadline)


# --- Assignments ------------------------------------------------------------------------------------------------------


def unlike_workers(job: Job, failed: Collection[Worker]) -> list[Worker]:
    """Return the live workers that are slow or have a memory of their own, sorted."""
    own = [worker for worker, _ in job.memory.capacity_of] if job.memory else []
    slow = [worker for worker, factor in job.time.slow if to_per_mille(factor) != 1000]
    return sorted({*own, *slow} - {*failed})


def candidate_assignments(job: Job, failed: Sequence[Worker], options: PlanOptions, bounds: RoleBounds,
                          clock: Clock) -> list[Assignment]:
    """Return the assignments that are worth planning, best lower bound first.

    Of equals, those that move fewer workers come first. There is none if optimizer state is
    sharded: how much a worker keeps then depends on its column.
    """
    params = options.params.roles
    if job.memory and job.memory.state:
        return []
    deadline = clock.now() + params.compared * options.limit_seconds
    bound_of = dict[Assignment, float]()
    for distribution in bounds.best_distributions(params.distributions):
        for assignment in islice(_iterate_assignments(job, failed, distribution), MAX_BOUNDED):
            if assignment not in bound_of and clock.now() <= deadline:
                bound_of[assignment] = _bound_of(assignment, job, options)
    return sorted(bound_of, key=lambda assignment: (bound_of[assignment], assignment.moves))[:MAX_PLANNED]


def _bound_of(assignment: Assignment, job: Job, options: PlanOptions) -> float:
    """Return the seconds of a bound of an assignment, or infinity without room."""
    try:
        problem = bounding_problem(options, with_assignment(job, assignment), assignment.vacant)
    except NoPlanError:
        return math.inf
    return lower_bound(problem) * problem.tick_seconds


def _iterate_assignments(job: Job, failed: Sequence[Worker], distribution: Distribution) -> Iterator[Assignment]:
    """Iterate over assignments with these numbers of vacant roles and unlike workers."""
    orders = islice(permutations(unlike_workers(job, failed)), MAX_ORDERS)
    dealt = dict.fromkeys(_deal(order, distribution) for order in orders)
    vacancies = dict.fromkeys(_iterate_vacancies(job, failed, [down for down, _ in distribution]))
    for vacant, unlike in product(vacancies, dealt):
        yield _assign(job, failed, vacant, unlike)


def _deal(order: Sequence[Worker], distribution: Distribution) -> tuple[tuple[Worker, ...], ...]:
    """Return the unlike workers of each column if they are dealt in this order."""
    rest = iter(order)
    return tuple(tuple(sorted(islice(rest, some))) for _, some in distribution)


def _iterate_vacancies(job: Job, failed: Sequence[Worker], counts: Sequence[int]) -> Iterator[tuple[Worker, ...]]:
    """Iterate over sets of vacant roles, `counts[column]` of each column."""
    ascending = sorted(range(job.pipelines), key=lambda pipeline: job.microbatches[pipeline])
    for order in (ascending, ascending[::-1]):
        yield tuple(sorted(role for column, count in enumerate(counts) for role in sorted(
            (Worker(pipeline, column) for pipeline in order), key=lambda role: role not in failed)[:count]))
    for order in (ascending, ascending[::-1]):
        yield tuple(sorted(Worker(pipeline, column) for column, count in enumerate(counts)
                           for pipeline in order[:count]))


def _assign(job: Job, failed: Collection[Worker], vacant: tuple[Worker, ...],
            unlike: Sequence[Sequence[Worker]]) -> Assignment:
    """Return the assignment with these vacancies and unlike workers in which few workers move."""
    grid = [Worker(pipeline, column) for pipeline in range(job.pipelines) for column in range(job.stages)]
    special, empty = {worker for workers in unlike for worker in workers}, {*vacant}
    usual = {worker: None for worker in grid if worker not in special and worker not in failed}
    players = dict[Worker, Worker]()
    for column, workers in enumerate(unlike):
        free = [role for role in grid if role.column == column and role not in empty]
        players |= {worker: worker for worker in workers if worker in free}
        others = sorted((role for role in free if role not in players), key=lambda role: role in usual)
        players |= dict(zip(others, (worker for worker in workers if worker not in free), strict=False))
    players |= {role: role for role in usual if role not in empty and role not in players}
    idle = [worker for worker in usual if players.get(worker) != worker]
    for role in grid:
        if role not in empty and role not in players:
            players[role] = min(idle, key=lambda worker: (worker.column != role.column, worker))
            idle.remove(players[role])
    return Assignment(vacant, tuple(sorted(players.items())))


# --- From workers to roles and back -----------------------------------------------------------------------------------


def with_assignment(job: Job, assignment: Assignment) -> Job:
    """Return a copy of the job whose roles have their players' speed and memory."""
    slow = dict(job.time.slow)
    memory = job.memory
    if memory is not None:
        own, weights = dict(memory.capacity_of), [0.0] * job.stages
        for stage, amount in enumerate(memory.weights):
            weights[job.columns[stage]] = add_exactly(weights[job.columns[stage]], amount)
        # A schedule without weights gives a worker its own capacity in any role; heavier layers leave it less.
        memory = msgspec.structs.replace(memory, capacity_of=tuple(
            (role, min(own[player], max(0.0, add_exactly(
                own[player], add_exactly(weights[player.column], -weights[role.column])))))
            for role, player in assignment.players if player in own))
    return msgspec.structs.replace(job, memory=memory, time=msgspec.structs.replace(job.time, slow=tuple(
        (role, slow[player]) for role, player in assignment.players if player in slow)))


def seat_players(schedule: Schedule, job: Job, failed: Sequence[Worker], assignment: Assignment, *,
                 from_checkpoint: bool) -> Schedule | None:
    """Return a copy of the schedule of `with_assignment` in which the players take their seats.

    It has the job's own speeds and memory. None if it breaks a rule, or if no live worker of a
    column has its parameters and no checkpoint does.
    """
    players, memory = dict(assignment.players), schedule.memory
    if not from_checkpoint and {player.column for player in players.values()} != {*range(job.stages)}:
        return None
    if memory is not None:
        unit = choose_memory_unit(job)
        if float(unit) != memory.unit:
            unit = choose_memory_unit(job, layer_costs(job))
        own = memory_in_units(job, unit)
        if own is None or own.unit != memory.unit:
            return None
        memory = msgspec.structs.replace(memory, capacity_of=own.capacity_of)
    slow = tuple(Slow(worker, to_per_mille(factor)) for worker, factor in job.time.slow)
    seats = sorted((Seat(players[seat.role], seat.role, seat.program, seat.holds) for seat in schedule.seats),
                   key=lambda seat: seat.worker)
    order: dict[int, int] = {}  # programs are numbered in the order of first use
    seats = [msgspec.structs.replace(seat, program=order.setdefault(seat.program, len(order))) for seat in seats]
    seated = msgspec.structs.replace(
        schedule, failed=tuple(sorted(set(failed))), seats=tuple(seats), memory=memory,
        programs=tuple(schedule.programs[index] for index in order),
        times=msgspec.structs.replace(schedule.times, slow=slow))
    return None if check(seated) else seated
