"""From decisions to a schedule: solved pieces are put in their places, all-reduces and optimizer steps added."""

from collections.abc import Mapping, Sequence

import msgspec

from planner.model.arrays import Dense, Order
from planner.model.decompose import Piece, undivided
from planner.model.problem import Problem
from planner.model.solution import Solution
from schedules.schedule import OpKind, Program, ProgramOp, Schedule, Seat, Status, Worker


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A solved piece: its order, and start ticks on the clock that all pieces share."""

    piece: Piece
    dense: Dense
    order: Order
    start: Sequence[int]


def place(problem: Problem, solved: Sequence[tuple[Piece, Solution]],
          deadlines: Sequence[int] | None = None) -> list[Placed]:
    """Put solved pieces on one clock, the first op of all at 0.

    Staggered, and if there are several: each op as late as the common ends of the columns allow, so that the windows
    of all pieces are as short as their orders permit. These ends are the `deadlines` where given; else those of the
    longest piece, or the latest of all pieces when each begins at 0, whichever gives the shorter period.
    """
    placed = []
    for piece, solution in solved:
        dense = Dense(piece.problem, solution.hosts)
        placed.append(Placed(piece=piece, dense=dense, order=dense.order(solution), start=dense.starts(solution)))
    if len(placed) == 1 or problem.optimizer == "synchronous":
        return [_shifted(one, min(one.start)) for one in placed]
    choices: list[Sequence[int]] = [deadlines] if deadlines else []
    longest = max(placed, key=lambda one: one.dense.period(one.start))
    least = longest.dense.period(longest.start)
    choices.append(longest.dense.ends(longest.start))
    choices.append(ends(problem, [_shifted(one, min(one.start)) for one in placed]))
    best: tuple[int, list[Placed]] | None = None
    for choice in choices:
        late = [_late(one, choice) for one in placed]
        period = max(one.dense.period(one.start, choice) for one in late)
        if best is None or period < best[0]:
            best = period, late
        if period <= least:
            break
    assert best is not None
    first = min(min(one.start) for one in best[1])
    return [_shifted(one, first) for one in best[1]]


def _shifted(placed: Placed, first: int) -> Placed:
    return msgspec.structs.replace(placed, start=[begin - first for begin in placed.start])


def _late(placed: Placed, deadlines: Sequence[int]) -> Placed:
    return msgspec.structs.replace(placed, start=placed.dense.latest(placed.order, deadlines))


def ends(problem: Problem, placed: Sequence[Placed]) -> list[int]:
    """When the last compute op of each column ends."""
    per_piece = [one.dense.ends(one.start) for one in placed]
    return [max(ends[column] for ends in per_piece) for column in range(problem.grid.columns)]


def period(problem: Problem, solved: Sequence[tuple[Piece, Solution]], deadlines: Sequence[int] | None = None) -> int:
    """The period in ticks of the schedule that `build_schedule` would make."""
    placed = place(problem, solved, deadlines)
    return _period(placed, ends(problem, placed))


def _period(placed: Sequence[Placed], last: Sequence[int]) -> int:
    return max(one.dense.period(one.start, last) for one in placed)


def build_schedule(problem: Problem, solved: Solution | Sequence[tuple[Piece, Solution]], *, lower_bound: int,
                   method: str, deadlines: Sequence[int] | None = None) -> Schedule:
    """The schedule of a solution, or of those of all pieces, with its period and proven bound; see `place`."""
    if isinstance(solved, Solution):
        solved = [(undivided(problem), solved)]
    placed = place(problem, solved, deadlines)
    last = ends(problem, placed)
    closing = _closing(problem, last)
    programs: dict[Worker, Program] = {}
    for one in placed:
        programs |= _programs(one, closing)
    ticks = _period(placed, last)
    status: Status = "optimal" if ticks <= lower_bound else "feasible"
    seats, stored = _share(programs, problem.player)
    return Schedule(job=problem.name, tick_seconds=problem.tick_seconds, grid=problem.grid, times=problem.times,
                    memory=problem.memory, backward=problem.backward, optimizer=problem.optimizer,
                    failed=tuple(sorted(problem.failed)), seats=seats, programs=stored, period_ticks=ticks,
                    lower_bound_ticks=lower_bound, status=status, method=method)


def _closing(problem: Problem, ready: Sequence[int]) -> list[Program]:
    """The ops that end an iteration, by column: the all-reduces of its stages one after the other, then the step.

    They start once all workers of the column have done their last compute op; with a synchronous optimizer, the step
    not before the last compute op of the whole job.
    """
    programs = []
    for column, clock in enumerate(ready):
        ops = []
        # The same order of copies on all columns that hold them.
        for stage in sorted(problem.grid.stages_of(column), key=problem.grid.original):
            ops.append(ProgramOp(OpKind.A, stage, None, clock))
            clock += problem.times.all_reduce[stage]
        begin = max(clock, *ready) if problem.optimizer == "synchronous" else clock
        programs.append((*ops, ProgramOp(OpKind.O, None, None, begin)))
    return programs


def _programs(placed: Placed, closing: Sequence[Program]) -> dict[Worker, Program]:
    """The program of every role of all copies of a piece; those without re-routed ops are one object for all copies."""
    dense, start = placed.dense, placed.start
    kinds = placed.piece.problem.kinds
    bodies: list[list[ProgramOp]] = [[] for _ in dense.roles]
    foreign: list[list[tuple[int, int]]] = [[] for _ in dense.roles]
    for op in placed.order:
        number, kind = divmod(op, dense.kinds)
        unit, lane = dense.units[number], dense.lane[number]
        if unit.pipeline != dense.roles[lane].pipeline:
            foreign[lane].append((len(bodies[lane]), unit.pipeline))
        bodies[lane].append(ProgramOp(kinds[kind], unit.stage, unit.microbatch, start[op]))
    programs: dict[Worker, Program] = {}
    for lane, role in enumerate(dense.roles):
        program = (*bodies[lane], *closing[role.column])
        for copy in placed.piece.copies:
            programs[Worker(copy[role.pipeline], role.column)] = _named(program, foreign[lane], copy)
    return programs


def _named(program: Program, foreign: Sequence[tuple[int, int]], copy: Sequence[int]) -> Program:
    """The program with the pipelines of its re-routed ops as they are numbered in the whole problem."""
    if not foreign:
        return program
    ops = list(program)
    for index, pipeline in foreign:
        ops[index] = msgspec.structs.replace(ops[index], pipeline=copy[pipeline])
    return tuple(ops)


def _share(programs: Mapping[Worker, Program], player: Mapping[Worker, Worker]) -> \
        tuple[tuple[Seat, ...], tuple[Program, ...]]:
    """Seats sorted by worker, each distinct program once, in the order of their first use."""
    index: dict[Program, int] = {}
    known: dict[int, int] = {}
    seats = []
    for worker, role in sorted((player[role], role) for role in programs):
        program = programs[role]
        if id(program) not in known:
            known[id(program)] = index.setdefault(program, len(index))
        seats.append(Seat(worker, role, known[id(program)]))
    return tuple(seats), tuple(index)
