"""Orders that others made, timed under a job's times and judged by the same bound and checker as our own."""

import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from slipstream.planner.compiled import ready
from slipstream.planner.job.file import Job, JobError
from slipstream.planner.model.arrays import Ints, ProblemArrays, ints
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound, Problem, Unit
from slipstream.planner.model.start_times import timed
from slipstream.planner.plan import Plan
from slipstream.schedules.check import Violation, check
from slipstream.schedules.schedule import BackwardMode, OpKind, OptimizerMode
from slipstream.schedules.torchcsv import Action


class Judged(msgspec.Struct, frozen=True):
    """The schedule that an order makes, and the rules it breaks: memory is the one that it can."""

    plan: Plan
    violations: list[Violation]


def judge_order(job: Job, rows: Sequence[Sequence[Action]], source: str, *,
                optimizer: OptimizerMode = "staggered") -> Judged:
    """Time an order of one pipeline's ops, a row a worker, on every pipeline of the job.

    Ops start as early as the order allows, and then, with a staggered optimizer, as late as the ends of the columns
    allow. `source` names the order in errors. Raises JobError where it is no order for this job, NoPlanError when no
    schedule of the job can exist.
    """
    ready()
    began = time.monotonic()
    fused = all(action.kind in (OpKind.F, OpKind.B) for row in rows for action in row)
    backward: BackwardMode = "fused" if fused else "split"
    if backward == "split":
        rows = [[part for action in row for part in _split(action)] for row in rows]
    problem = build_problem(job, backward=backward, optimizer=optimizer)
    _require_fit(problem, rows, source)
    arrays = ProblemArrays(problem, {unit: problem.worker(unit.slice, unit.pipeline) for unit in problem.units()})
    order = _merge(arrays, rows, source)
    period, start = timed(arrays, order)
    bound = strongest_bound(problem)
    if bound.ticks > period:  # an order that takes too much memory may be faster than any that does not
        bound = Bound(period, bound.scope)
    schedule = build_schedule(problem, arrays.solution(order, start), bound=bound, method="torch-csv")
    plan = Plan(schedule=schedule, fault_free=None, solve_seconds=time.monotonic() - began)
    return Judged(plan, check(schedule))


def _split(action: Action) -> tuple[Action, ...]:
    """B as I and W: a schedule runs all of its backwards one way."""
    if action.kind is not OpKind.B:
        return (action,)
    return action._replace(kind=OpKind.I), action._replace(kind=OpKind.W)


def _require_fit(problem: Problem, rows: Sequence[Sequence[Action]], source: str) -> None:
    grid = problem.grid
    if grid.chains > 1:
        raise JobError(f"{source}: has one direction; the job's pipelines run both ways")
    if len(rows) != grid.columns:
        raise JobError(f"{source}: has {len(rows)} ranks; the job has {grid.columns} stages")
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise JobError(f"{source}: stage {action.stage} is on ranks {rank_of[action.stage]} and {rank}")
    ranks = [rank_of.get(stage, -1) for stage in range(max(rank_of) + 1)]
    if ranks != list(problem.column_of):
        raise JobError(f"{source}: its stages are on ranks {ranks}, the job's on {list(problem.column_of)}; "
                       f"say so in the job file: [placement] chunks = {len(ranks) // grid.columns}, order = {ranks}")
    found = Counter(action for row in rows for action in row)
    counts = set(grid.microbatches)
    expected = {Action(kind, stage, microbatch) for count in counts for microbatch in range(count)
                for stage in range(len(ranks)) for kind in problem.kinds}
    wrong = next((f"{action} is there {times} times" for action, times in found.items() if times > 1), None) or \
        next((f"{action} is missing" for action in sorted(expected - set(found))), None) or \
        next((f"{action} is too much" for action in sorted(set(found) - expected)), None)
    if len(counts) > 1 or wrong:
        raise JobError(f"{source}: {wrong or 'holds one order for all pipelines'}; the job has "
                       f"{' and '.join(map(str, sorted(counts)))} micro-batches a pipeline and {len(ranks)} stages")


def _merge(arrays: ProblemArrays, rows: Sequence[Sequence[Action]], source: str) -> Ints:
    """All ops of all pipelines, each after what it waits for. Raises JobError when rows wait in a circle."""
    kinds = arrays.problem.kinds
    number = {unit: index for index, unit in enumerate(arrays.units)}
    waiting = [[number[Unit(action.stage, worker.pipeline, action.microbatch)] * len(kinds) + kinds.index(action.kind)
                for action in rows[worker.column]] for worker in arrays.workers]
    starts, earlier = arrays.ops.predecessors.start.tolist(), arrays.ops.predecessors.op.tolist()
    done = [False] * len(arrays.ops.unit)
    order: list[int] = []
    positions = [0] * len(waiting)
    moved = True
    while moved:
        moved = False
        for row, ops in enumerate(waiting):
            while positions[row] < len(ops) and all(
                    done[before] for before in earlier[starts[ops[positions[row]]]:starts[ops[positions[row]] + 1]]):
                done[ops[positions[row]]] = moved = True
                order.append(ops[positions[row]])
                positions[row] += 1
    stuck = next((row for row, ops in enumerate(waiting) if positions[row] < len(ops)), None)
    if stuck is not None:
        action = rows[arrays.workers[stuck].column][positions[stuck]]
        raise JobError(f"{source}: waits in a circle: rank {arrays.workers[stuck].column} never gets to {action}, "
                       "whose input comes only after what waits for this rank")
    return ints(order)
