"""Build a schedule from solved pieces on one clock, with all-reduces and optimizer steps."""

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


def align_pieces(problem: Problem, solutions: Sequence[Solution],
                 deadlines: Sequence[int] | None = None) -> list[Solution]:
    """Return the solutions of all subproblems shifted onto one clock.

    On it, the first op of all starts at tick 0. With a staggered optimizer and several subproblems,
    each op then starts as late as the common end of its worker's group allows, so that busy windows
    are as short as the orders permit. Of three choices of the common ends, the one with the
    shortest period is used: `deadlines`, if given; the ends of the longest subproblem; and the
    latest ends of all subproblems when each begins at tick 0.
    """
    at_0 = [solution.with_starts(solution.start - solution.start.min()) for solution in solutions]
    if len(solutions) == 1 or problem.optimizer == "synchronous":
        return at_0
    choices: list[Sequence[int]] = [deadlines] if deadlines else []
    periods = [solution_period(solution) for solution in solutions]
    least = max(periods)
    longest = solutions[periods.index(least)]
    of_longest = get_deadlines(longest)
    common = get_deadlines(*at_0)
    choices += [latest_group_ends(longest.arrays, choice).tolist()
                for choice in (np.where(of_longest > NEVER, of_longest, common), common)]
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
    """Return the ticks of what `build_schedule` would make; for `deadlines` see `align_pieces`."""
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
    """Build the schedule of one solution, or of the solutions of all subproblems.

    They are put on one clock.

    Parameters
    ----------
    problem
        Problem that is solved.
    solved
        The solution, or each subproblem with its solution.
    method
        Search that the schedule names.
    bound
        Proven bound that it names; None: no bound is known.
    deadlines
        Ticks by which groups end their compute ops; see `align_pieces`.
    """
    if isinstance(solved, Solution):
        solved = [(make_whole_piece(problem), solved)]
    aligned = align_pieces(problem, [solution for _, solution in solved], deadlines)
    last = compute_group_ends(*aligned)
    closing = build_closing_programs(
        problem, last.tolist(), _begin_reductions(problem, aligned, last).tolist()
    )
    programs: dict[Worker, Program] = {}
    for (piece, _), placed in zip(solved, aligned, strict=True):
        programs |= _build_programs(piece, placed, closing)
    ticks = _aligned_period(aligned, last)
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
    """Return the start tick of each reduction if groups end compute at `last`."""
    if problem.can_reduce_early:
        return compute_reduction_begins(aligned)
    if problem.reduces_in_bubbles:
        return place_in_bubbles(aligned).begin
    return place_reductions(aligned[0].arrays, last)[0]


def with_converted_bound(schedule: Schedule, bound: Bound, tick_seconds: float) -> Schedule:
    """Return a copy of the schedule with a bound from ticks of `tick_seconds`, rounded down."""
    return schedule.with_bound(
        math.floor(bound.ticks * limited_ratio(tick_seconds, schedule.tick_seconds)), bound.scope
    )


def _build_programs(
    piece: Piece, solution: Solution, closing: Sequence[Program]
) -> dict[Worker, Program]:
    """Return the programs of the roles in all copies of a subproblem."""
    arrays = solution.arrays
    kinds, row_of = piece.problem.op_kinds, arrays.ops.worker.tolist()
    bodies: list[list[ProgramOp]] = [[] for _ in arrays.workers]
    owners: list[list[MicroBatch]] = [[] for _ in arrays.workers]
    for op, begin in zip(
        solution.order.tolist(), solution.start[solution.order].tolist(), strict=True
    ):
        number, kind = divmod(op, len(kinds))
        unit, row = arrays.units[number], row_of[number]
        bodies[row].append(ProgramOp(kinds[kind], unit.slice, unit.microbatch, begin))
        owners[row].append(MicroBatch(unit.pipeline, unit.microbatch))
    closed = [_insert_closing_ops(piece.problem, worker, body, closing)
              for worker, body in zip(arrays.workers, bodies, strict=True)]
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
    """Return the micro-batches of `ran` whose name changes, with their new names."""
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


def _insert_closing_ops(problem: Problem, worker: Worker, body: Sequence[ProgramOp],
                        closing: Sequence[Program]) -> tuple[Program, Sequence[int]]:
    """Return a worker's program, and the indices of its compute ops in it."""
    last = closing[problem.group_number(worker)]
    if not (problem.can_reduce_early or problem.reduces_in_bubbles):
        return (*body, *last), range(len(body))
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


def _rename_microbatches(program: Program, places: Sequence[int], owners: Sequence[MicroBatch],
                         names: Mapping[MicroBatch, tuple[int | None, int]]) -> Program:
    """Return a worker's program with micro-batches named as in the whole problem."""
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
    """Return the closing ops of each group.

    They are reductions by start, then the optimizer step.

    The order of shared reductions is the same on all workers that share them. Among reductions that
    start together, those that take no time come first. `ends` has the end of the last compute op of
    each group, `begins` the start of each reduction if groups share some or they lie in bubbles.
    Otherwise the reductions follow the last compute op of their group one after the other. With a
    synchronous optimizer, the step waits for the last compute op of the whole job.
    """
    ready = list(ends) if problem.reduces_in_bubbles else [max(begins, default=0)] * len(ends)
    ticks = [problem.reduction_ticks(layers) for layers, _ in problem.groups.reductions]
    if not (problem.groups.has_shared_reductions or problem.reduces_in_bubbles):
        begins, ready = _place_reductions(problem, ends, ticks)
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
    """Return each reduction's start tick, and each group's end, from compute `ends`."""
    clock, begins = list(ends), []
    for taken, (_, (group,)) in zip(ticks, problem.groups.reductions, strict=True):
        begins.append(clock[group])
        clock[group] += taken
    return begins, clock


def _make_optimizer_op(problem: Problem, ready: int, ends: Sequence[int]) -> ProgramOp:
    return ProgramOp(
        OpKind.O, None, None, max(ready, *ends) if problem.optimizer == "synchronous" else ready
    )
