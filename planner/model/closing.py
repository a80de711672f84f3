"""The ops that end an iteration: all-reduces, then the optimizer step."""

from collections.abc import Sequence

from planner.model.problem import Problem
from schedules.schedule import OpKind, Program, ProgramOp


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
