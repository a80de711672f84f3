"""Build a schedule from solved subproblems, with all-reduces and optimizer steps."""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from slipstream.planner.job.layers import limited_ratio
from slipstream.planner.model.arrays import Ints, Solution
from slipstream.planner.model.decompose import Piece, make_whole_piece
from slipstream.planner.model.problem import Bound, MicroBatch, Problem
from slipstream.planner.model.start_times import (
    NEVER,
    compute_group_ends,
    compute_reduction_begins,
    compute_ticks_saved,
    get_deadlines,
    latest_group_ends,
    place_in_bubbles,
    place_reductions,
    solution_period,
    with_latest_starts,
)
from slipstream.schedules.schedule import OpKind, Program, ProgramOp, Schedule, Seat, Worker

ForeignNames = tuple[tuple[MicroBatch, tuple[int | None, int]], ...]
"""Names of a subproblem's micro-batches in the whole problem, where they differ.

Each is a micro-batch of the subproblem, and a pair of the pipeline that reads it in the whole
problem (None: the one that runs it) and its number there.
"""


def align_pieces(
    problem: Problem, solutions: Sequence[Solution], deadlines: Sequence[int] | None = None
) -> list[Solution]:
    """Return the solutions of all subproblems on one clock, beginning at tick 0.

    With a staggered optimizer and several subproblems, each op then starts as late as the common
    end of its worker's group allows, which makes busy windows short. These ends are those with the
    shortest period of three choices: `deadlines`, which are ends of groups or begins of reductions
    (as `get_deadlines` returns; None: not a choice); the ends of the longest subproblem; and the
    latest ends of all subproblems if each begins at tick 0.
    """
    at_0 = [solution.with_starts(solution.start - solution.start.min()) for solution in solutions]
    if len(solutions) == 1 or problem.optimizer == "synchronous":
        return at_0
    # Choices of the tick by which each group ends. The longest subproblem should set them, as it
    # then needs no more time than alone; groups that it lacks end as in the others.
    choices: list[Sequence[int]] = [deadlines] if deadlines else []
    periods = [solution_period(solution) for solution in solutions]
    least = max(periods)
    longest = solutions[periods.index(least)]
    of_longest = get_deadlines(longest)
    common = get_deadlines(*at_0)
    choices += [
        latest_group_ends(longest.arrays, choice).tolist()
        for choice in (np.where(of_longest > NEVER, of_longest, common), common)
    ]
    # Take the choice with the shortest period; none can be shorter than the longest subproblem's.
    best: tuple[int, list[Solution]] | None = None
    for choice in choices:
        late = [with_latest_starts(solution, choice) for solution in solutions]
        longest_of_late = _aligned_period(
            late, compute_group_ends(*late) if problem.anneals_reductions else choice
        )
        if best is None or longest_of_late < best[0]:
            best = longest_of_late, late
        if longest_of_late <= least:
            break
    assert best is not None
    first = min(solution.start.min() for solution in best[1])
    return [solution.with_starts(solution.start - first) for solution in best[1]]


def compute_period(
    problem: Problem, solutions: Sequence[Solution], deadlines: Sequence[int] | None = None
) -> int:
    """Return the period, in ticks, of the schedule that `build_schedule` would make.

    `deadlines` are as in `build_schedule`.
    """
    aligned = align_pieces(problem, solutions, deadlines)
    return _aligned_period(aligned, compute_group_ends(*aligned))


def _aligned_period(aligned: Sequence[Solution], last: Sequence[int] | Ints) -> int:
    saved = compute_ticks_saved(aligned)
    return max(solution_period(solution, last, saved) for solution in aligned)


def build_schedule(
    problem: Problem,
    solved: Solution | Sequence[tuple[Piece, Solution]],
    *,
    method: str,
    bound: Bound | None = None,
    deadlines: Sequence[int] | None = None,
) -> Schedule:
    """Build the schedule from one solution, or from those of all subproblems.

    Parameters
    ----------
    problem
        Problem that is solved.
    solved
        The solution, or pairs of each subproblem and its solution.
    method
        Name of the search, for the schedule.
    bound
        Proven bound, for the schedule; None: no bound is known.
    deadlines
        Ticks at which groups end, or reductions begin, that `align_pieces` may choose; None: it
        chooses among its own.
    """
    if isinstance(solved, Solution):
        solved = [(make_whole_piece(problem), solved)]
    aligned = align_pieces(problem, [solution for _, solution in solved], deadlines)
    last = compute_group_ends(*aligned)
    # All groups end their iteration on the common clock, so closing ops are those of the whole job.
    closing = build_closing_programs(
        problem, last.tolist(), _begin_reductions(problem, aligned, last).tolist()
    )
    programs: dict[Worker, Program] = {}
    for (piece, _), placed in zip(solved, aligned, strict=True):
        programs |= _build_programs(piece, placed, closing)
    ticks = _aligned_period(aligned, last)
    # Most workers of a large job run by a program that others run, too; it is stored once.
    seats, stored = _share_programs(problem, programs)
    bound = bound or Bound(0, problem.bound_scope)
    return Schedule(
        job=problem.name,
        tick_seconds=problem.tick_seconds,
        grid=problem.grid,
        slices=problem.slices,
        times=problem.times,
        memory=problem.memory,
        backward=problem.backward,
        optimizer=problem.optimizer,
        failed=tuple(sorted(problem.failed)),
        seats=seats,
        programs=stored,
        period_ticks=ticks,
        lower_bound_ticks=bound.ticks,
        status="optimal" if ticks <= bound.ticks else "feasible",
        method=method,
        bound_scope=bound.scope,
    )


def _begin_reductions(problem: Problem, aligned: Sequence[Solution], last: Ints) -> Ints:
    """Return the start tick of each reduction, if groups end their compute ops at `last`."""
    if problem.can_reduce_early:
        return compute_reduction_begins(aligned)
    if problem.reduces_in_bubbles:
        return place_in_bubbles(aligned).begin
    return place_reductions(aligned[0].arrays, last)[0]


def with_converted_bound(schedule: Schedule, bound: Bound, tick_seconds: float) -> Schedule:
    """Return a copy of the schedule with `bound` in its own ticks, rounded down.

    The ticks of `bound` are `tick_seconds` long.
    """
    return schedule.with_bound(
        math.floor(bound.ticks * limited_ratio(tick_seconds, schedule.tick_seconds)), bound.scope
    )


def _build_programs(
    piece: Piece, solution: Solution, closing: Sequence[Program]
) -> dict[Worker, Program]:
    """Return the programs of the workers in all copies of a subproblem."""
    arrays = solution.arrays
    kinds, row_of = piece.problem.op_kinds, arrays.ops.worker.tolist()
    # The compute ops of each worker in the subproblem, and whose micro-batches they are.
    bodies: list[list[ProgramOp]] = [[] for _ in arrays.workers]
    owners: list[list[MicroBatch]] = [[] for _ in arrays.workers]
    for op, begin in zip(
        solution.order.tolist(), solution.start[solution.order].tolist(), strict=True
    ):
        number, kind = divmod(op, len(kinds))
        unit, row = arrays.units[number], row_of[number]
        bodies[row].append(ProgramOp(kinds[kind], unit.slice, unit.microbatch, begin))
        owners[row].append(MicroBatch(unit.pipeline, unit.microbatch))
    closed = [
        _insert_closing_ops(piece.problem, worker, body, closing)
        for worker, body in zip(arrays.workers, bodies, strict=True)
    ]
    # Programs of two copies differ only where they run other pipelines' micro-batches.
    batches_run: list[set[MicroBatch]] = [set() for _ in range(piece.problem.grid.pipelines)]
    for worker, batches in zip(arrays.workers, owners, strict=True):
        batches_run[worker.pipeline].update(batches)
    program_of: dict[tuple[int, ForeignNames], Program] = {}
    programs: dict[Worker, Program] = {}
    for copy in piece.copies:
        names = [
            _find_foreign_names(piece, copy, pipeline, batches_run[pipeline])
            for pipeline in range(len(copy))
        ]
        for row, worker in enumerate(arrays.workers):
            key = row, names[worker.pipeline]
            if key not in program_of:
                program_of[key] = _rename_microbatches(*closed[row], owners[row], dict(key[1]))
            programs[Worker(copy[worker.pipeline], worker.column)] = program_of[key]
    return programs


def _find_foreign_names(
    piece: Piece, copy: Sequence[int], pipeline: int, ran: Iterable[MicroBatch]
) -> ForeignNames:
    """Return the `ForeignNames` of the micro-batches that one pipeline runs in a copy."""
    names = []
    for batch in sorted(ran):
        original = piece.original_microbatch(copy, *batch)
        name = (
            None if original.pipeline == copy[pipeline] else original.pipeline,
            original.microbatch,
        )
        if name != (None, batch.microbatch):
            names.append((batch, name))
    return tuple(names)


def _insert_closing_ops(
    problem: Problem, worker: Worker, body: Sequence[ProgramOp], closing: Sequence[Program]
) -> tuple[Program, Sequence[int]]:
    """Return a worker's program, and the indices of its compute ops, `body`, in it."""
    last = closing[problem.group_number(worker)]
    if not (problem.can_reduce_early or problem.reduces_in_bubbles):
        return (*body, *last), range(len(body))
    # A reduction that begins before an op ends goes before that op.
    program: list[ProgramOp] = []
    places: list[int] = []
    pending = list(last)
    for op in body:
        while pending and pending[0].start_ticks < op.start_ticks + problem.op_ticks(
            op.kind, op.slice or 0, worker
        ):
            program.append(pending.pop(0))
        places.append(len(program))
        program.append(op)
    return (*program, *pending), places


def _rename_microbatches(
    program: Program,
    places: Sequence[int],
    owners: Sequence[MicroBatch],
    names: Mapping[MicroBatch, tuple[int | None, int]],
) -> Program:
    """Return a program whose ops at `places`, of micro-batches `owners`, are renamed by `names`."""
    if not names:
        return program
    ops = list(program)
    for index, owner in zip(places, owners, strict=True):
        if owner in names:
            pipeline, microbatch = names[owner]
            ops[index] = msgspec.structs.replace(
                ops[index], pipeline=pipeline, microbatch=microbatch
            )
    return tuple(ops)


def _share_programs(
    problem: Problem, programs: Mapping[Worker, Program]
) -> tuple[tuple[Seat, ...], tuple[Program, ...]]:
    """Return the seats, sorted by worker, and each distinct program once."""
    index: dict[Program, int] = {}
    number_of: dict[int, int] = {}
    seats, usual = [], problem.grid.held_layers_by_column
    for worker, program in sorted(programs.items()):
        # Copies share their programs as objects, whose content need not be compared then.
        if id(program) not in number_of:
            number_of[id(program)] = index.setdefault(program, len(index))
        ranges = problem.workers[worker].holds
        listed = None if ranges == usual[worker.column] else ranges
        seats.append(Seat(worker, worker, number_of[id(program)], listed))
    return tuple(seats), tuple(index)


# --- The ops that end an iteration ----------------------------------------------------------------


def build_closing_programs(
    problem: Problem, ends: Sequence[int], begins: Sequence[int]
) -> list[Program]:
    """Return the closing ops of each group: reductions by start, then the optimizer step.

    Groups that share reductions run them in the same order. `ends` has the end of each group's last
    compute op. `begins` has the start of each reduction if groups share some or if they may lie in
    bubbles; otherwise it is ignored, and reductions follow the last compute op one after the other.
    With a synchronous optimizer, the step waits for the last compute op of the whole job.
    """
    ready = list(ends) if problem.reduces_in_bubbles else [max(begins, default=0)] * len(ends)
    ticks = [problem.reduction_ticks(layers) for layers, _ in problem.groups.reductions]
    if not (problem.groups.has_shared_reductions or problem.reduces_in_bubbles):
        begins, ready = _place_reductions(problem, ends, ticks)
    # By start, and if they start together those that take no time first.
    bodies: list[list[ProgramOp]] = [[] for _ in ends]
    for begin, taken, (layers, groups) in sorted(
        zip(begins, ticks, problem.groups.reductions, strict=True)
    ):
        for group in groups:
            bodies[group].append(ProgramOp(OpKind.A, problem.number_of_slice[layers], None, begin))
            ready[group] = (
                max(begin + taken, ends[group]) if problem.reduces_in_bubbles else begin + taken
            )
    return [
        (*body, _make_optimizer_op(problem, clock, ends))
        for body, clock in zip(bodies, ready, strict=True)
    ]


def _place_reductions(
    problem: Problem, ends: Sequence[int], ticks: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return reductions' starts and groups' ends if compute ends at `ends` and A take `ticks`."""
    clock, begins = list(ends), []
    for taken, (_, (group,)) in zip(ticks, problem.groups.reductions, strict=True):
        begins.append(clock[group])
        clock[group] += taken
    return begins, clock


def _make_optimizer_op(problem: Problem, ready: int, ends: Sequence[int]) -> ProgramOp:
    return ProgramOp(
        OpKind.O, None, None, max(ready, *ends) if problem.optimizer == "synchronous" else ready
    )
