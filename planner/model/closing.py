"""The ops that end an iteration: all-reduces, then the optimizer step."""

from collections.abc import Mapping, Sequence

from planner.model.problem import Problem
from schedules.schedule import OpKind, Program, ProgramOp, Worker


def closing_key(problem: Problem, worker: Worker) -> int:
    """Which of `closing_programs` a worker ends with."""
    return worker.column if problem.holdings is None else problem.holdings[worker].group


def closing_programs(problem: Problem, ends: Sequence[int], begins: Sequence[int] = ()) -> Mapping[int, Program]:
    """The closing ops by column, or by group where layers are not held by column.

    `ends`: [group] when its last compute op ends. `begins`: [reduction] when it begins, where layers are not held by
    column; else all-reduces follow the last compute op of their column. With a synchronous optimizer, the step comes
    not before the last compute op of the whole job.
    """
    return dict(enumerate(_by_column(problem, ends) if problem.holdings is None else
                          _by_group(problem, ends, begins)))


def _by_column(problem: Problem, ends: Sequence[int]) -> list[Program]:
    programs = []
    for column in range(problem.grid.columns):
        ops, clock = [], ends[problem.tied[column]]
        # The same order of copies on all columns that hold them.
        for stage in sorted(problem.grid.stages_of(column), key=problem.grid.original):
            ops.append(ProgramOp(OpKind.A, stage, None, clock))
            clock += problem.times.all_reduce[stage]
        programs.append((*ops, _step(problem, clock, ends)))
    return programs


def _by_group(problem: Problem, ends: Sequence[int], begins: Sequence[int]) -> list[Program]:
    """Reductions in the order in which they begin, the same on all workers: those that take no time before others."""
    number = {layers: index for index, layers in reversed(list(enumerate(problem.layers_of)))}
    ready = [max(begins)] * len(ends)  # of workers that hold nothing
    bodies: list[list[ProgramOp]] = [[] for _ in ends]
    ticks = [problem.times.all_reduce[number[layers]] for layers, _ in problem.reductions]
    for begin, taken, (layers, groups) in sorted(zip(begins, ticks, problem.reductions, strict=True)):
        for group in groups:
            bodies[group].append(ProgramOp(OpKind.A, number[layers], None, begin))
            ready[group] = begin + taken
    return [(*body, _step(problem, clock, ends)) for body, clock in zip(bodies, ready, strict=True)]


def _step(problem: Problem, ready: int, ends: Sequence[int]) -> ProgramOp:
    return ProgramOp(OpKind.O, None, None, max(ready, *ends) if problem.optimizer == "synchronous" else ready)
