"""Solve what is equal once: healthy pipelines of the same shape meet only at the all-reduce and share one plan."""

from collections import defaultdict

import msgspec

from planner.problem import Problem, Unit
from planner.solution import Solution
from schedules.schedule import Worker


class Collapsed(msgspec.Struct, frozen=True, kw_only=True):
    """A smaller problem with one pipeline per kind, and which original pipelines each of them stands for."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]

    def expand(self, solution: Solution) -> Solution:
        """The solution of the small problem, repeated for every member."""
        hosts = {}
        starts = {}
        for unit in solution.hosts:
            for member in self.members[unit.pipeline]:
                hosts[unit._replace(pipeline=member)] = member
        for (kind, stage, pipeline, microbatch), start in solution.starts.items():
            for member in self.members[pipeline]:
                starts[kind, *Unit(stage, member, microbatch)] = start
        return Solution(hosts=hosts, starts=starts)


def collapse(problem: Problem) -> Collapsed | None:
    """One pipeline per kind, where nothing is re-routed and no worker is slow; None otherwise.

    Exact: without re-routing a pipeline's plan touches the others only through the windows of the columns, so equal
    pipelines may run equal plans without lengthening any window.
    """
    if len(problem.player) < problem.grid.pipelines * problem.grid.columns or problem.times.slow:
        return None
    kinds: dict[int, list[int]] = defaultdict(list)
    for pipeline, count in enumerate(problem.grid.microbatches):
        kinds[count].append(pipeline)
    if len(kinds) == problem.grid.pipelines:
        return None
    counts = tuple(kinds)
    grid = msgspec.structs.replace(problem.grid, pipelines=len(counts), microbatches=counts)
    player = {worker: worker for worker in grid.workers()}
    small = msgspec.structs.replace(problem, grid=grid, player=player, failed=frozenset[Worker]())
    return Collapsed(problem=small, members=tuple(tuple(members) for members in kinds.values()))
