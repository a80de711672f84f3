"""What others made, or files claim, is judged: orders under a job's times, by the same bound and checker as our own;
the lower bound that a schedule's file states, proven again from the file alone."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from slipstream.planner.budget import Budget
from slipstream.planner.compiled import ready
from slipstream.planner.job.file import Job, JobError
from slipstream.planner.model.arrays import Ints, ProblemArrays, ints
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.bounds import least_of, strongest_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.from_job import build_problem, equal_parts, held_problem, in_place, problem_of_layers
from slipstream.planner.model.problem import Bound, LayerTicks, Problem, Question, Unit
from slipstream.planner.model.start_times import timed
from slipstream.planner.normalise import Windows
from slipstream.planner.overlapped import exposed_anywhere, least_of_columns
from slipstream.planner.params import DEFAULTS
from slipstream.planner.plan import Plan
from slipstream.planner.report import shared_ticks
from slipstream.planner.search.incumbent import options
from slipstream.schedules.check import Violation, check
from slipstream.schedules.schedule import BackwardMode, LayerCosts, OpKind, OptimizerMode, Room, Schedule, Scope, Worker
from slipstream.schedules.torchcsv import Action

# --- An order of one pipeline's ops -----------------------------------------------------------------------------------


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


# --- The bound that a file states -------------------------------------------------------------------------------------


def proven_bound(schedule: Schedule, budget: Budget | None = None) -> Bound:
    """A bound for the question that the schedule's own answers, with these workers and the room they have.

    Where micro-batches may be cut or layers moved, it counts what a file tells of the costs of layers. Files of before
    do not tell them: then only work bounds the period, and the optimizer step of a layer. With a budget, CP-SAT proves
    what is claimed of a small problem and is more than that.
    """
    found, claimed = _counted(schedule), schedule.lower_bound_ticks
    if budget is None or found.ticks >= claimed or schedule.scope not in (Scope.OWN, Scope.STAGES):
        return found
    from slipstream.planner.search.cpsat import PROVED, excludes  # the solver takes a third of a second to load

    problem = _problem(schedule, _vacant(schedule))
    # Pipelines that share no micro-batches are independent: what is proven of one holds for all.
    parts = [problem] if problem.sharing else [piece.problem for piece in decompose(problem)]
    if any(options(part) <= DEFAULTS.cp_sat.largest_proof and excludes(part, claimed, budget) for part in parts):
        return Bound(claimed, schedule.scope, PROVED)
    return found


def _counted(schedule: Schedule) -> Bound:
    """What can be proven without a search."""
    if schedule.times.of_layers and schedule.scope in (*([] if schedule.overlaps else [Scope.PLACE]), Scope.LAYERS):
        return _least(schedule, schedule.times.of_layers)
    if schedule.scope is Scope.LAYERS:
        ticks = min(schedule.times.optimizer_of_layer, default=0) + math.ceil(shared_ticks(schedule))
        return Bound(ticks, Scope.LAYERS)
    if schedule.scope is Scope.ROLES:
        return Windows(lambda failed: _problem(schedule, failed)).least(len(schedule.failed))
    problem = _problem(schedule, _vacant(schedule))
    bound = strongest_bound(problem)
    return Bound(bound.ticks, schedule.scope, bound.counts)


def _vacant(schedule: Schedule) -> list[Worker]:
    return [role for role in schedule.grid.workers() if role not in schedule.player_of]


def _exposed(schedule: Schedule) -> tuple[int, ...]:
    """What remains of reductions after the last W of a worker where they overlap, by stage: the least that one of its
    layers takes, where the file tells that, else nothing."""
    told = schedule.times.of_layers
    if not told:
        return (0,) * len(schedule.grid.stages)
    return least_of_columns(schedule.grid, [math.floor(min(told.all_reduce[slice(*layers)]) / Fraction(*told.per_tick))
                                            for layers in schedule.grid.layers_by_stage])


def _problem(schedule: Schedule, failed: Sequence[Worker]) -> Problem:
    """The problem of a schedule in place, with these roles vacant. Of workers that are down none is slow."""
    grid, scope = schedule.grid, schedule.scope
    slow = tuple(one for one in schedule.times.slow if one.worker in schedule.seat_of)
    reduced = _exposed(schedule) if schedule.overlaps else schedule.times.all_reduce
    return held_problem(
        name=schedule.job, tick_seconds=schedule.tick_seconds, grid=grid,
        times=msgspec.structs.replace(schedule.times, slow=slow, all_reduce=reduced), memory=schedule.memory,
        holds=in_place(grid, failed), backward=schedule.backward, optimizer=schedule.optimizer,
        sharing=scope is not Scope.OWN,
        parts=() if scope in (Scope.OWN, Scope.STAGES) else _parts(schedule))


def _parts(schedule: Schedule) -> tuple[int, ...]:
    """Into how many equal layers stages may be cut. Where the file does not tell what layers cost, only the work counts
    of a stage of several."""
    if schedule.times.of_layers:
        return equal_parts(schedule.grid, _costs(schedule.times.of_layers))
    return tuple(int(end - first == 1) for first, end in schedule.grid.layers_by_stage)


def _costs(told: LayerCosts) -> LayerTicks:
    return LayerTicks(**{name: getattr(told, name) for name in LayerTicks.__struct_fields__})


def _least(schedule: Schedule, told: LayerCosts) -> Bound:
    """A bound for all layouts, where layers cost at least what the file tells."""
    grid, memory = schedule.grid, schedule.memory
    per_tick, per_unit = Fraction(*told.per_tick), Fraction(*told.per_unit)
    costs = _costs(told)
    if schedule.overlaps:  # reductions may go on beside all compute but the last
        costs = msgspec.structs.replace(costs, all_reduce=(0,) * grid.layer_count)
    if memory is not None:
        others = tuple(Room(one.worker, math.ceil(one.capacity * per_unit)) for one in memory.capacity_of or ())
        memory = msgspec.structs.replace(memory, capacity_of=others or msgspec.UNSET,
                                         capacity=tuple(math.ceil(room * per_unit) for room in memory.capacity))
    shared = schedule.scope is Scope.PLACE and all(seat.holds is None for seat in schedule.seats)
    below = problem_of_layers(
        costs, msgspec.structs.replace(schedule.times, transfer=math.floor(schedule.times.transfer * per_tick)), memory,
        name=schedule.job, tick_seconds=schedule.tick_seconds, grid=grid,
        holds={worker: schedule.holds(worker) for worker in schedule.members}, backward=schedule.backward,
        optimizer=schedule.optimizer, question=Question(layers="fixed" if schedule.scope is Scope.PLACE else "move"),
        sharing=shared, parts=equal_parts(grid, costs) if shared else ())
    bound = least_of(below)
    beyond = exposed_anywhere(schedule) if schedule.overlaps else 0
    return msgspec.structs.replace(bound, ticks=math.floor(bound.ticks / per_tick) + beyond)
