"""Build the problems from which the bounds of a job's questions are proven, with costs rounded down."""

import math
from collections.abc import Collection, Sequence
from operator import add

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import exact_decimal
from slipstream.planner.model.bounds_roles import RoleBounds
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import bounding_problem, has_overlapping_reductions
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.schedule import Scope, Worker


def bounding_problem_in(scope: Scope, options: PlanOptions, job: Job, failed: Sequence[Worker]) -> Problem:
    """Return the problem, with costs rounded down, whose bounds hold for schedules of this scope, in place."""
    problem = options.make_problem(job, failed, down=True)
    if problem.bound_scope is not scope or has_overlapping_reductions(job):
        problem = bounding_problem(options, job, failed, down=True)
    return problem


def any_roles_bound(job: Job, failed: Collection[Worker], options: PlanOptions) -> Bound:
    """Return a bound on the period for any assignment of roles to the workers that have not failed.

    It is in ticks of `bounding_problem` with all workers alive.
    """
    return role_bounds(job, failed, options).best_bound()


def role_bounds(job: Job, failed: Collection[Worker], options: PlanOptions) -> RoleBounds:
    """Return the bounds of assignments of roles to the workers that have not failed, in ticks of `bounding_problem`
    with all workers alive."""
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
    """Return a copy of the job without sharded optimizer state, for lower bounds that hold whichever workers fail.

    With it, failures leave less memory to the workers that take over their state. A schedule file says how much only
    for its own failures, not for others that a bound covers, too.
    """
    return msgspec.structs.replace(job, memory=job.memory and msgspec.structs.replace(job.memory, state=()))
