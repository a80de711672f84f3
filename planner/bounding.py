"""Build the problems that prove a job's and its plans' bounds, costs rounded down."""

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


def bounding_problem_in(scope: Scope, options: PlanOptions, job: Job, failed: Sequence[Worker]) -> Problem:
    """Return the problem, with costs rounded down, whose bounds hold for this scope, in place."""
    problem = options.make_problem(job, failed, down=True)
    if problem.bound_scope is not scope or has_overlapping_reductions(job):
        problem = bounding_problem(options, job, failed, down=True)
    return problem


def any_roles_bound(job: Job, failed: Collection[Worker], options: PlanOptions) -> Bound:
    """Return a bound for any roles of live workers, in ticks of `bounding_problem` without
    failures."""
    return role_bounds(job, failed, options).best_bound()


def role_bounds(job: Job, failed: Collection[Worker], options: PlanOptions) -> RoleBounds:
    """Return the bounds of roles of live workers, in ticks of `bounding_problem` without
    failures."""
    stateless = _without_state(job)
    whole = bounding_problem(options, stateless, (), down=True)
    if options.method in BASELINES:  # whose files have no costs of layers, by which stages could be shared
        whole = msgspec.structs.replace(whole, parts=tuple(int(layers == 1) for layers in whole.parts))
    if whole.memory is None or not stateless.memory:
        return RoleBounds(whole, failed)
    memory, weights = whole.memory, [0] * whole.grid.columns
    for stage, amount in enumerate(stateless.memory.weights):
        weights[whole.column_of[stage]] += math.ceil(exact_decimal(amount) / exact_decimal(memory.unit))
    own = {room.worker: room.capacity for room in memory.capacity_of or ()}
    most = max(map(add, memory.capacity, weights)) if any(weights) else 0

    def room_of(worker: Worker, column: int) -> int:
        # What weights leave of a worker's memory in another role; a schedule file without weights counts none.
        if worker in own:
            return own[worker] + max(0, weights[worker.column] - weights[column])
        return max(memory.capacity[column], most - weights[column])

    return RoleBounds(whole, failed, room_of)


def _without_state(job: Job) -> Job:
    """Return a copy of the job without sharded optimizer state.

    Its lower bounds hold whichever workers fail. State of failed workers takes memory from those
    that take it over, and a schedule file says how much only for its own failures.
    """
    return msgspec.structs.replace(job, memory=job.memory and msgspec.structs.replace(job.memory, state=()))


def with_rounded_bound(schedule: Schedule, options: PlanOptions, job: Job, failed: Sequence[Worker]) -> Schedule:
    """Return a copy of a schedule whose bound holds for the exact times and memory.

    It is lowered only if the schedule's units are too coarse (lemma 15 of docs/bounds.md). Bounds
    for layouts with layers moved are computed from costs that are rounded down.
    """
    if schedule.scope not in (Scope.OWN, Scope.STAGES, Scope.PLACE) or has_exact_units(job, failed):
        return schedule
    problem = bounding_problem_in(schedule.scope, options, job, failed)
    lower = math.floor(strongest_bound(problem).ticks * limited_ratio(problem.tick_seconds, schedule.tick_seconds))
    return schedule if lower >= schedule.lower_bound_ticks else schedule.with_bound(lower, schedule.scope)


def with_bound_of(schedule: Schedule, other: Schedule) -> Schedule:
    """Return a copy of `schedule` with the bound of `other` and its costs of layers."""
    ticks = limited_ratio(schedule.tick_seconds, other.tick_seconds)
    costs = other.times.of_layers
    if costs:
        units = limited_ratio(schedule.memory.unit, other.memory.unit) if schedule.memory and other.memory else 1
        costs = msgspec.structs.replace(costs, per_tick=(Fraction(*costs.per_tick) * ticks).as_integer_ratio(),
                                        per_unit=(Fraction(*costs.per_unit) * units).as_integer_ratio())
    times = msgspec.structs.replace(schedule.times, of_layers=costs)
    return with_converted_bound(msgspec.structs.replace(schedule, times=times),
                                Bound(other.lower_bound_ticks, other.scope),
                                other.tick_seconds)
