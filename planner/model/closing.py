"""The ops that end an iteration: all-reduces, then the optimizer step."""

from collections.abc import Mapping, Sequence

from planner.model.problem import Problem
from schedules.schedule import OpKind, Program, ProgramOp, Worker


def closing_key(problem: Problem, worker: Worker) -> int:
    """Which of `closing_programs` a worker ends with."""
    return worker.column if problem.holdings is None else problem.holdings[worker].group


def closing_programs(problem: Problem, ends: Sequence[int], begins: Sequence[int] = ()) -> Mapping[int, Program]:
    """The closing ops by column, or by group where layers are not held by column.

    `ends`: [group] when its last compute op ends. All-reduces start once all workers that take part have done their
    last compute op; where they lie between compute ops, at `begins` [reduction]. With a synchronous optimizer, the step
    not before the last compute op of the whole job.
    """
    return dict(enumerate(_by_column(problem, ends) if problem.holdings is None else
                          _between(problem, ends, begins) if problem.interleaved else _by_group(problem, ends)))


def closing_ends(problem: Problem, ends: Sequence[int]) -> list[int]:
    """[group] when the windows of its workers end, where layers are not held by column."""
    step = {holding.group: holding.step for holding in (problem.holdings or {}).values()}
    if problem.interleaved:
        return [end + step.get(group, 0) for group, end in enumerate(ends)]
    return [program[-1].start_ticks + step.get(group, 0)
            for group, program in enumerate(_by_group(problem, ends))]


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


def _between(problem: Problem, ends: Sequence[int], begins: Sequence[int]) -> list[Program]:
    """Reductions that take no time, each when no worker that takes part runs an op."""
    number = {layers: index for index, layers in reversed(list(enumerate(problem.layers_of)))}
    bodies: list[list[ProgramOp]] = [[] for _ in ends]
    for begin, (layers, groups) in sorted(zip(begins, problem.reductions, strict=True)):
        for group in groups:
            bodies[group].append(ProgramOp(OpKind.A, number[layers], None, begin))
    last = max(begins)  # of workers that hold nothing
    return [(*body, _step(problem, end if body else last, ends)) for body, end in zip(bodies, ends, strict=True)]


def _by_group(problem: Problem, ends: Sequence[int]) -> list[Program]:
    """Reductions that are ready first come first, of equals the one of the later layers: one at a time on a worker."""
    number = {layers: index for index, layers in reversed(list(enumerate(problem.layers_of)))}
    free = list(ends)
    bodies: list[list[ProgramOp]] = [[] for _ in ends]
    for layers, groups in sorted(problem.reductions, key=lambda reduction: (
            max(ends[group] for group in reduction[1]), -reduction[0][0])):
        begin = max(free[group] for group in groups)
        for group in groups:
            bodies[group].append(ProgramOp(OpKind.A, number[layers], None, begin))
            free[group] = begin + problem.times.all_reduce[number[layers]]
    return [(*body, _step(problem, clock, ends)) for body, clock in zip(bodies, free, strict=True)]


def _step(problem: Problem, ready: int, ends: Sequence[int]) -> ProgramOp:
    return ProgramOp(OpKind.O, None, None, max(ready, *ends) if problem.optimizer == "synchronous" else ready)
