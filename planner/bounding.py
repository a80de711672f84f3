"""Build the problems, with costs rounded down, from which bounds of a job are proven."""

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from operator import add

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import exact_decimal, limited_ratio
from slipstream.planner.model.assemble import with_converted_bound
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.bounds_roles import RoleBounds
from slipstream.planner.model.from_job import has_exact_units
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import bounding_problem, has_overlapping_reductions
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.schedule import Schedule, Scope, Worker


def bounding_problem_in(
    scope: Scope, options: PlanOptions, job: Job, failed: Sequence[Worker]
) -> Problem:
    """Return the problem, costs rounded down, whose bounds hold for all schedules of a scope.

    The scope is OWN, STAGES or PLACE. Raises NoPlanError if no schedule can exist.
    """
    # The narrow problem gives the larger bounds, but only for schedules that share no more work.
    problem = options.make_problem(job, failed, down=True)
    if problem.bound_scope is not scope or has_overlapping_reductions(job):
        problem = bounding_problem(options, job, failed, down=True)
    return problem


def any_roles_bound(job: Job, failed: Collection[Worker], options: PlanOptions) -> Bound:
    """Return a lower bound on the period, whichever roles the live workers take.

    The bound is in ticks of the job's `bounding_problem` without failures, costs rounded down.
    Raises NoPlanError if the job has no schedule even without failures.
    """
    return role_bounds(job, failed, options).best_bound()


def role_bounds(job: Job, failed: Collection[Worker], options: PlanOptions) -> RoleBounds:
    """Return an object that computes lower bounds over all roles that live workers may take.

    The bounds are in ticks of the job's `bounding_problem` without failures, costs rounded down.
    Raises NoPlanError if the job has no schedule even without failures.
    """
    stateless = _without_state(job)
    whole = bounding_problem(options, stateless, (), down=True)
    # Schedule files of baselines record no costs of layers, by which stages could be shared.
    if options.method in BASELINES:
        whole = msgspec.structs.replace(
            whole, parts=tuple(int(layers == 1) for layers in whole.parts)
        )
    if whole.memory is None or not stateless.memory:
        return RoleBounds(whole, failed)
    # A worker that changes its role exchanges the weights of one column for those of another.
    memory, weights = whole.memory, [0] * whole.grid.columns
    for stage, amount in enumerate(stateless.memory.weights):
        weights[whole.column_of[stage]] += math.ceil(
            exact_decimal(amount) / exact_decimal(memory.unit)
        )
    capacity_of = {room.worker: room.capacity for room in memory.capacity_of or ()}
    largest = max(map(add, memory.capacity, weights)) if any(weights) else 0

    def memory_of(worker: Worker, column: int) -> int:
        # What weights leave of a worker's memory in another role; a schedule file without weights
        # counts none.
        if worker in capacity_of:
            return capacity_of[worker] + max(0, weights[worker.column] - weights[column])
        return max(memory.capacity[column], largest - weights[column])

    return RoleBounds(whole, failed, memory_of)


def _without_state(job: Job) -> Job:
    """Return a copy of the job that ignores the memory of sharded optimizer state."""
    # State of failed workers takes memory from those that take it over, and a schedule file says
    # how much only for its own failures.
    return msgspec.structs.replace(
        job, memory=job.memory and msgspec.structs.replace(job.memory, state=())
    )


def with_rounded_bound(
    schedule: Schedule, options: PlanOptions, job: Job, failed: Sequence[Worker]
) -> Schedule:
    """Return a copy of a schedule whose bound holds for the job's exact values.

    The bound is lowered only if the schedule's units of time and memory are too coarse for these
    values (lemma 15 of docs/bounds.md).
    """
    # Bounds of the other scopes are computed from costs that are rounded down.
    whole_stages = schedule.scope in (Scope.OWN, Scope.STAGES)
    if not (whole_stages or schedule.scope is Scope.PLACE):
        return schedule
    if has_exact_units(job, failed, whole_stages=whole_stages):
        return schedule
    problem = bounding_problem_in(schedule.scope, options, job, failed)
    lower = math.floor(
        strongest_bound(problem).ticks * limited_ratio(problem.tick_seconds, schedule.tick_seconds)
    )
    if lower >= schedule.lower_bound_ticks:
        return schedule
    return schedule.with_bound(lower, schedule.scope)


def with_bound_of(schedule: Schedule, other: Schedule) -> Schedule:
    """Return a copy of `schedule` with the lower bound and layer costs of `other`."""
    # The costs keep their own units; how many of these are in a tick and a unit of memory changes.
    ticks = limited_ratio(schedule.tick_seconds, other.tick_seconds)
    costs = other.times.of_layers
    if costs:
        units = Fraction(1)
        if schedule.memory and other.memory:
            units = limited_ratio(schedule.memory.unit, other.memory.unit)
        costs = msgspec.structs.replace(
            costs,
            per_tick=(Fraction(*costs.per_tick) * ticks).as_integer_ratio(),
            per_unit=(Fraction(*costs.per_unit) * units).as_integer_ratio(),
        )
    times = msgspec.structs.replace(schedule.times, of_layers=costs)
    return with_converted_bound(
        msgspec.structs.replace(schedule, times=times),
        Bound(other.lower_bound_ticks, other.scope),
        other.tick_seconds,
    )
