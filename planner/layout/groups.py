"""Large clusters: a line that is cut anew and just enough others form a group; like groups get like layouts.

Groups share no micro-batch, so that the order of each is searched by itself, and that of like ones once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from slipstream.planner.layout.cuts import lines_of
from slipstream.planner.layout.division import Divider
from slipstream.planner.model.decompose import part_of
from slipstream.planner.model.layout import Layout, MicroBatch, Stop
from slipstream.planner.model.problem import Problem
from slipstream.schedules.schedule import Worker

UNDIVIDED = 8
"""Pipelines up to which all are one group."""
MOST_HELPERS = 16
"""Of one line that is cut anew."""
TOLERANCE = 0.005
"""How much longer than with most helpers the longest load may be, as a share of it."""


def by_groups(problem: Problem, groups: Sequence[tuple[int, ...]],
              make: Callable[[Problem], Layout | None]) -> Layout | None:
    """A layout made group by group, like groups once; None where there is none for one of them.

    Raises LookupError when the live workers cannot hold all layers.
    """
    if len(groups) == 1:
        return make(problem)
    known: dict[tuple[object, ...], Layout | None] = {}
    holds, routes, kind = {}, {}, ""
    for pipelines in groups:
        part = part_of(problem, pipelines)
        key = tuple(part.workers.items()), part.grid.microbatches
        if key not in known:
            known[key] = make(part)
        layout = known[key]
        if layout is None:
            return None
        kind = kind or layout.kind
        holds.update({_named(worker, pipelines): ranges for worker, ranges in layout.holds.items()})
        for batch, route in layout.routes.items():
            routes[MicroBatch(pipelines[batch.pipeline], batch.microbatch)] = tuple(
                Stop(stop.layers, _named(stop.worker, pipelines)) for stop in route)
    return Layout(kind=kind, holds=dict(sorted(holds.items())), routes=dict(sorted(routes.items())))


def groups_of(problem: Problem) -> Iterator[tuple[int, ...]]:
    """The pipelines of each group: those that lost workers or time, with their helpers; each other one by itself.

    Who lost more may have more helpers. All in one group where there are few. Raises LookupError when the live workers
    cannot hold all layers.
    """
    lines = lines_of(problem)
    if len(problem.grid.microbatches) <= UNDIVIDED:
        yield tuple(range(len(problem.grid.microbatches)))
        return
    kept = [line.workers[0].pipeline for line in lines if not line.cut]
    weak = [tuple(sorted({worker.pipeline for worker in line.workers})) for line in lines if line.cut]
    weak += [(pipeline,) for pipeline in range(len(problem.grid.microbatches)) if not problem.live_of[pipeline]]
    merged = {pipeline for group in weak for pipeline in group}
    kept = [pipeline for pipeline in kept if pipeline not in merged]
    losses = [_lost(problem, group) for group in weak]
    available, helpers = len(kept), dict[tuple[object, ...], int]()
    for group, lost in zip(weak, losses, strict=True):
        live = [worker for pipeline in group for worker in problem.live_of[pipeline]]
        key = len(group), tuple(sorted(map(problem.slowness, live)))  # which stages they are matters little
        if key not in helpers:
            share = min(int(available * lost / sum(losses)), MOST_HELPERS)
            helpers[key] = _helpers(problem, group, kept[:share])
        yield (*group, *kept[:helpers[key]])
        kept = kept[helpers[key]:]
    for pipeline in kept:
        yield (pipeline,)


def _lost(problem: Problem, group: Sequence[int]) -> Fraction:
    """How many workers' work these pipelines cannot do; a little, where all their workers are fast."""
    workers = len(group) * len(problem.paths[0])
    speeds = (Fraction(1000, problem.slowness(worker)) for pipeline in group for worker in problem.live_of[pipeline])
    return max(Fraction(1, 1000), workers - sum(speeds, start=Fraction(0)))


def _helpers(problem: Problem, group: tuple[int, ...], most: Sequence[int]) -> int:
    """The fewest helpers with which the longest load is about as short as with the most."""
    def longest(count: int) -> float:
        part = part_of(problem, (*group, *most[:count]))
        try:
            found = Divider(part, lines_of(part)).least(within=TOLERANCE / 5)
        except LookupError:
            return math.inf
        return math.inf if found is None else found[0]

    best, count = longest(len(most)), 1
    while count < len(most) and longest(count) > (1 + TOLERANCE) * best:
        count *= 2
    return min(count, len(most))


def _named(worker: Worker, pipelines: Sequence[int]) -> Worker:
    return Worker(pipelines[worker.pipeline], worker.column)
