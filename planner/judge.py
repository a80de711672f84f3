"""Orders that others made, timed under a job's times and judged by the same bound and checker as our own."""

import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from planner.job.file import Job, JobError
from planner.model.arrays import Dense, Order
from planner.model.assemble import build_schedule
from planner.model.bounds import lower_bound
from planner.model.problem import Problem, Unit, build_problem
from planner.plan import Plan
from schedules.check import Violation, check
from schedules.schedule import BackwardMode, OpKind, OptimizerMode
from schedules.torchcsv import Action


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
    began = time.monotonic()
    fused = all(action.kind in (OpKind.F, OpKind.B) for row in rows for action in row)
    backward: BackwardMode = "fused" if fused else "split"
    if backward == "split":
        rows = [[part for action in row for part in _split(action)] for row in rows]
    problem = build_problem(job, backward=backward, optimizer=optimizer)
    _require_fit(problem, rows, source)
    hosts = {unit: unit.pipeline for unit in problem.units()}
    dense = Dense(problem, hosts)
    order = _merge(dense, rows, source)
    period, start = dense.timed(order)
    # An order that takes too much memory may be faster than any that does not.
    schedule = build_schedule(problem, dense.solution(order, start), lower_bound=min(lower_bound(problem), period),
                              method="torch-csv")
    plan = Plan(schedule=schedule, fault_free_period=schedule.seconds(schedule.period_ticks),
                solve_seconds=time.monotonic() - began)
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


def _merge(dense: Dense, rows: Sequence[Sequence[Action]], source: str) -> Order:
    """All ops of all pipelines, each after what it waits for. Raises JobError when rows wait in a circle."""
    kinds, last = dense.problem.kinds, dense.depth - 1
    number = {unit: index for index, unit in enumerate(dense.units)}
    waiting = [[number[Unit(action.stage, role.pipeline, action.microbatch)] * len(kinds) + kinds.index(action.kind)
                for action in rows[role.column]] for role in dense.roles]
    done = [False] * len(dense.length)
    order: list[int] = []
    positions = [0] * len(waiting)
    moved = True
    while moved:
        moved = False
        for lane, ops in enumerate(waiting):
            while positions[lane] < len(ops) and _ready(ops[positions[lane]], dense, done, len(kinds), last):
                done[ops[positions[lane]]] = moved = True
                order.append(ops[positions[lane]])
                positions[lane] += 1
    stuck = next((lane for lane, ops in enumerate(waiting) if positions[lane] < len(ops)), None)
    if stuck is not None:
        action = rows[dense.roles[stuck].column][positions[stuck]]
        raise JobError(f"{source}: waits in a circle: rank {dense.roles[stuck].column} never gets to {action}, whose "
                       "input comes only after what waits for this rank")
    return order


def _ready(op: int, dense: Dense, done: Sequence[bool], kinds: int, last: int) -> bool:
    unit, kind = divmod(op, kinds)
    place = dense.place[unit]
    if kind == 0:
        return place == 0 or done[op - kinds]
    return done[op - 1] and (kind == 2 or place == last or done[op + kinds])
