"""Decisions (hosts and start times of compute ops) and how they become a schedule."""

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from planner.problem import Problem, Unit
from schedules.graph import OpKey
from schedules.schedule import Op, OpKind, Schedule, Status, Worker, period_ticks, share_programs


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler decides. All-reduces and optimizer steps follow from it."""

    hosts: Mapping[Unit, int]
    """The pipeline whose worker runs each unit."""
    starts: Mapping[OpKey, int]
    """Start tick of each compute op (kind, stage, pipeline, microbatch).

    Ops without duration may share an instant: they then run in the order of this mapping.
    """


def place_ops(problem: Problem, solution: Solution) -> dict[Worker, list[Op]]:
    """All ops by physical worker, in order of start; earliest start 0.

    The all-reduces of a column start once all its workers have done their last compute op, one stage after the other;
    the optimizer step follows, in synchronous mode not before the last compute op of the whole job.
    """
    shift = min(solution.starts.values())
    ops: dict[Worker, list[Op]] = {player: [] for player in problem.player.values()}
    for (kind, stage, pipeline, microbatch), start in solution.starts.items():
        host = solution.hosts[Unit(stage, pipeline, microbatch)]
        worker = problem.player[problem.role(stage, host)]
        begin = start - shift
        ops[worker].append(Op(kind, stage, pipeline, microbatch, worker, begin,
                              begin + problem.cost(kind, stage, host)))
    for program in ops.values():
        program.sort(key=lambda op: (op.start_ticks, op.end_ticks))
    _close_iteration(problem, ops)
    return ops


def _close_iteration(problem: Problem, ops: Mapping[Worker, list[Op]]) -> None:
    """Append the A and O ops."""
    ready: dict[int, int] = defaultdict(int)
    for role, player in problem.player.items():
        if ops[player]:
            ready[role.column] = max(ready[role.column], max(op.end_ticks for op in ops[player]))
    last_compute = max(ready.values(), default=0) if problem.optimizer == "synchronous" else 0
    for role, player in problem.player.items():
        clock = ready[role.column]
        for stage in problem.grid.stages_of(role.column):
            end = clock + problem.cost(OpKind.A, stage, role.pipeline)
            ops[player].append(Op(OpKind.A, stage, None, None, player, clock, end))
            clock = end
        clock = max(clock, last_compute)
        ops[player].append(Op(OpKind.O, None, None, None, player, clock, clock + problem.times.optimizer[role.column]))


def solution_period(problem: Problem, solution: Solution) -> int:
    """The period in ticks that this solution gives."""
    return _period(problem, place_ops(problem, solution))


def _period(problem: Problem, ops: Mapping[Worker, list[Op]]) -> int:
    flat = [op for program in ops.values() for op in program]
    if problem.optimizer == "synchronous":
        return max(op.end_ticks for op in flat) - min(op.start_ticks for op in flat)
    return period_ticks(flat)


def build_schedule(problem: Problem, solution: Solution, *, lower_bound: int, method: str) -> Schedule:
    """The schedule of a solution, with its period and proven bound."""
    ops = place_ops(problem, solution)
    role_of = {player: role for role, player in problem.player.items()}
    seats, programs = share_programs(ops, role_of)
    period = _period(problem, ops)
    status: Status = "optimal" if period <= lower_bound else "feasible"
    return Schedule(job=problem.name, tick_seconds=problem.tick_seconds, grid=problem.grid, times=problem.times,
                    memory=problem.memory, backward=problem.backward, optimizer=problem.optimizer,
                    failed=tuple(sorted(problem.failed)), seats=seats, programs=programs, period_ticks=period,
                    lower_bound_ticks=lower_bound, status=status, method=method)
