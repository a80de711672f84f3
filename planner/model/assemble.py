"""From decisions to a schedule: solved pieces are put in their places, all-reduces and optimizer steps added."""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from slipstream.planner.job.layers import ratio
from slipstream.planner.model.arrays import Ints, Solution
from slipstream.planner.model.decompose import Piece, undivided
from slipstream.planner.model.problem import Bound, MicroBatch, Problem
from slipstream.planner.model.start_times import (
    NEVER,
    group_ends,
    late_ends,
    latest,
    reduced,
    reduction_begins,
    solution_period,
)
from slipstream.schedules.schedule import OpKind, Program, ProgramOp, Schedule, Seat, Worker

Names = tuple[tuple[MicroBatch, tuple[int | None, int]], ...]


def align(problem: Problem, solutions: Sequence[Solution], deadlines: Sequence[int] | None = None) -> list[Solution]:
    """Put the solutions of all pieces on one clock, the first op of all at 0.

    Staggered, and if there are several: each op as late as the common ends of the groups allow, so that the windows
    of all pieces are as short as their orders permit. These ends are the `deadlines` where given; else those of the
    longest piece, or the latest of all pieces when each begins at 0, whichever gives the shorter period.
    """
    at_0 = [one.at(one.start - one.start.min()) for one in solutions]
    if len(solutions) == 1 or problem.optimizer == "synchronous":
        return at_0
    choices: list[Sequence[int]] = [deadlines] if deadlines else []
    periods = [solution_period(one) for one in solutions]
    least = max(periods)
    longest = solutions[periods.index(least)]
    own = group_ends(longest)
    common = group_ends(*at_0)
    choices += [late_ends(longest.arrays, choice).tolist()
                for choice in (np.where(own > NEVER, own, common), common)]
    best: tuple[int, list[Solution]] | None = None
    for choice in choices:
        late = [latest(one, choice) for one in solutions]
        longest_of_late = _period(late, choice)
        if best is None or longest_of_late < best[0]:
            best = longest_of_late, late
        if longest_of_late <= least:
            break
    assert best is not None
    first = min(one.start.min() for one in best[1])
    return [one.at(one.start - first) for one in best[1]]


def period(problem: Problem, solutions: Sequence[Solution], deadlines: Sequence[int] | None = None) -> int:
    """The period in ticks of the schedule that `build_schedule` would make."""
    aligned = align(problem, solutions, deadlines)
    return _period(aligned, group_ends(*aligned))


def _period(aligned: Sequence[Solution], last: Sequence[int] | Ints) -> int:
    return max(solution_period(one, last) for one in aligned)


def build_schedule(problem: Problem, solved: Solution | Sequence[tuple[Piece, Solution]], *, method: str,
                   bound: Bound | None = None, deadlines: Sequence[int] | None = None) -> Schedule:
    """The schedule of a solution, or of those of all pieces, with its period and the bound proven; see `align`."""
    if isinstance(solved, Solution):
        solved = [(undivided(problem), solved)]
    aligned = align(problem, [solution for _, solution in solved], deadlines)
    last = group_ends(*aligned)
    begins = reduction_begins(aligned) if problem.interleaved else reduced(aligned[0].arrays, last)[0]
    closing = closing_programs(problem, last.tolist(), begins.tolist())
    programs: dict[Worker, Program] = {}
    for (piece, _), one in zip(solved, aligned, strict=True):
        programs |= _programs(piece, one, closing)
    ticks = _period(aligned, last)
    seats, stored = _share(problem, programs)
    bound = bound or Bound(0, problem.scope)
    return Schedule(job=problem.name, tick_seconds=problem.tick_seconds, grid=problem.grid,
                    slices=problem.slices, times=problem.times, memory=problem.memory,
                    backward=problem.backward, optimizer=problem.optimizer, failed=tuple(sorted(problem.failed)),
                    seats=seats, programs=stored, period_ticks=ticks, lower_bound_ticks=bound.ticks,
                    status="optimal" if ticks <= bound.ticks else "feasible", method=method, bound_scope=bound.scope)


def claiming(schedule: Schedule, bound: Bound, tick_seconds: float) -> Schedule:
    """The schedule with another bound, in ticks of so many seconds; it is rounded down."""
    return schedule.with_bound(math.floor(bound.ticks * ratio(tick_seconds, schedule.tick_seconds)), bound.scope)


def _programs(piece: Piece, solution: Solution, closing: Sequence[Program]) -> dict[Worker, Program]:
    """The program of every role of all copies of a piece; those that are equal in several copies are one object."""
    arrays = solution.arrays
    kinds, row_of = piece.problem.kinds, arrays.ops.worker.tolist()
    bodies: list[list[ProgramOp]] = [[] for _ in arrays.workers]
    owners: list[list[MicroBatch]] = [[] for _ in arrays.workers]
    for op, begin in zip(solution.order.tolist(), solution.start[solution.order].tolist(), strict=True):
        number, kind = divmod(op, len(kinds))
        unit, row = arrays.units[number], row_of[number]
        bodies[row].append(ProgramOp(kinds[kind], unit.slice, unit.microbatch, begin))
        owners[row].append(MicroBatch(unit.pipeline, unit.microbatch))
    closed = [_closed(piece.problem, worker, body, closing)
              for worker, body in zip(arrays.workers, bodies, strict=True)]
    ran: list[set[MicroBatch]] = [set() for _ in range(piece.problem.grid.pipelines)]
    for worker, batches in zip(arrays.workers, owners, strict=True):
        ran[worker.pipeline].update(batches)
    made: dict[tuple[int, Names], Program] = {}
    programs: dict[Worker, Program] = {}
    for copy in piece.copies:
        names = [_names(piece, copy, pipeline, ran[pipeline]) for pipeline in range(len(copy))]
        for row, worker in enumerate(arrays.workers):
            own = names[worker.pipeline]
            if (row, own) not in made:
                made[row, own] = _named(*closed[row], owners[row], dict(own))
            programs[Worker(copy[worker.pipeline], worker.column)] = made[row, own]
    return programs


def _names(piece: Piece, copy: Sequence[int], pipeline: int, ran: Iterable[MicroBatch]) -> Names:
    """Those of the micro-batches that a pipeline's workers run which are not named there as in the piece's own problem:
    with their names there, pipeline (None: that of the worker) and number."""
    names = []
    for batch in sorted(ran):
        known = piece.named(copy, *batch)
        name = None if known.pipeline == copy[pipeline] else known.pipeline, known.microbatch
        if name != (None, batch.microbatch):
            names.append((batch, name))
    return tuple(names)


def _closed(problem: Problem, worker: Worker, body: Sequence[ProgramOp],
            closing: Sequence[Program]) -> tuple[Program, Sequence[int]]:
    """The compute ops of a worker, with the closing ops behind those that end before them; and where each now is."""
    last = closing[problem.group(worker)]
    if not problem.interleaved:
        return (*body, *last), range(len(body))
    program: list[ProgramOp] = []
    places: list[int] = []
    left = list(last)
    for op in body:
        while left and left[0].start_ticks < op.start_ticks + problem.cost(op.kind, op.slice or 0, worker):
            program.append(left.pop(0))
        places.append(len(program))
        program.append(op)
    return (*program, *left), places


def _named(program: Program, places: Sequence[int], owners: Sequence[MicroBatch],
           names: Mapping[MicroBatch, tuple[int | None, int]]) -> Program:
    """The program with micro-batches as they are named in the whole problem. `places` and `owners`: of compute ops."""
    if not names:
        return program
    ops = list(program)
    for index, owner in zip(places, owners, strict=True):
        if owner in names:
            pipeline, microbatch = names[owner]
            ops[index] = msgspec.structs.replace(ops[index], pipeline=pipeline, microbatch=microbatch)
    return tuple(ops)


def _share(problem: Problem, programs: Mapping[Worker, Program]) -> tuple[tuple[Seat, ...], tuple[Program, ...]]:
    """Seats sorted by worker, each distinct program once, in the order of their first use."""
    index: dict[Program, int] = {}
    known: dict[int, int] = {}
    seats, usual = [], problem.grid.held_by_column
    for worker, program in sorted(programs.items()):
        if id(program) not in known:
            known[id(program)] = index.setdefault(program, len(index))
        held = problem.workers[worker].holds
        seats.append(Seat(worker, worker, known[id(program)], None if held == usual[worker.column] else held))
    return tuple(seats), tuple(index)


# --- The ops that end an iteration ------------------------------------------------------------------------------------


def closing_programs(problem: Problem, ends: Sequence[int], begins: Sequence[int]) -> list[Program]:
    """[group] the closing ops: reductions in the order in which they begin, the same on all workers that share them;
    those that take no time before others.

    `ends`: [group] when its last compute op ends. `begins`: [reduction] when it begins, where groups share some; else
    each follows the last compute op of its group, and those before. With a synchronous optimizer, the step comes not
    before the last compute op of the whole job.
    """
    ready = [max(begins, default=0)] * len(ends)  # of workers that hold nothing
    ticks = [problem.reduction_ticks(layers) for layers, _ in problem.reductions]
    if not problem.linking:
        begins, ready = _in_turn(problem, ends, ticks)
    bodies: list[list[ProgramOp]] = [[] for _ in ends]
    for begin, taken, (layers, groups) in sorted(zip(begins, ticks, problem.reductions, strict=True)):
        for group in groups:
            bodies[group].append(ProgramOp(OpKind.A, problem.number_of[layers], None, begin))
            ready[group] = begin + taken
    return [(*body, _step(problem, clock, ends)) for body, clock in zip(bodies, ready, strict=True)]


def _in_turn(problem: Problem, ends: Sequence[int], ticks: Sequence[int]) -> tuple[list[int], list[int]]:
    """[reduction] when it begins where no groups share any, and [group] when the last of its own is done."""
    clock, begins = list(ends), []
    for taken, (_, (group,)) in zip(ticks, problem.reductions, strict=True):
        begins.append(clock[group])
        clock[group] += taken
    return begins, clock


def _step(problem: Problem, ready: int, ends: Sequence[int]) -> ProgramOp:
    return ProgramOp(OpKind.O, None, None, max(ready, *ends) if problem.optimizer == "synchronous" else ready)
