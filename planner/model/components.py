"""The pieces of a problem with a layout: pipelines that some route joins; equal ones once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from planner.layout.types import MicroBatch
from planner.model.problem import Leg, Problem
from planner.model.unions import joined
from schedules.schedule import Worker


def by_runner(problem: Problem) -> tuple[Problem, Mapping[MicroBatch, MicroBatch]]:
    """The same with micro-batches numbered in the pipeline that runs them, not in the one that they come from.

    In order of their own numbers, those of several pipelines in turn. Those that several run are numbered in the first
    of these, evenly over what that one runs alone: so pipelines with equally many are alike.
    The mapping is from the new names to those of the problem.
    """
    assert problem.routes is not None
    alone: list[list[MicroBatch]] = [[] for _ in range(problem.grid.pipelines)]
    shared: list[list[MicroBatch]] = [[] for _ in range(problem.grid.pipelines)]
    for batch in sorted(problem.routes, key=lambda batch: (batch.microbatch, batch.pipeline)):
        runners = {leg.worker.pipeline for leg in problem.routes[batch]}
        pipeline = batch.pipeline if batch.pipeline in runners else min(runners)
        (alone if len(runners) == 1 else shared)[pipeline].append(batch)
    names = {MicroBatch(pipeline, number): batch for pipeline, both in enumerate(zip(alone, shared, strict=True))
             for number, batch in enumerate(_evenly(*both))}
    routes = {new: problem.routes[batch] for new, batch in sorted(names.items())}
    counts = tuple(len(own) + len(others) for own, others in zip(alone, shared, strict=True))
    grid = msgspec.structs.replace(problem.grid, microbatches=counts)
    return msgspec.structs.replace(problem, grid=grid, routes=routes), names


def _evenly(some: Sequence[MicroBatch], others: Sequence[MicroBatch]) -> list[MicroBatch]:
    """All, the others in equal steps among some."""
    found, count = list(some), len(others)
    for number in reversed(range(count)):
        found.insert((2 * number + 1) * len(some) // (2 * count), others[number])
    return found


def components(problem: Problem) -> list[list[tuple[int, ...]]]:
    """Pipelines by the piece they belong to: for each different piece, all its copies, their pipelines in equal order.

    Pipelines are joined where a micro-batch of one passes the other; one that runs nothing, with the first.
    """
    assert problem.routes is not None
    copies: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    alike: dict[object, int] = {}
    kind = [alike.setdefault(_own(problem, pipeline), len(alike)) for pipeline in range(problem.grid.pipelines)]
    for members in _joined_pipelines(problem):
        ordered = tuple(sorted(members, key=lambda pipeline: (kind[pipeline], pipeline)))
        copies[tuple(kind[pipeline] for pipeline in ordered), _routes(problem, ordered)].append(ordered)
    return sorted(copies.values(), key=lambda group: (-len(group[0]), group))


def _joined_pipelines(problem: Problem) -> list[list[int]]:
    """The pipelines of each piece."""
    routes = problem.routes or {}
    first = joined(problem.grid.pipelines, {(batch.pipeline, leg.worker.pipeline) for batch, route in routes.items()
                                            for leg in route})
    busy = {first[batch.pipeline] for batch in routes}
    found: dict[int, list[int]] = defaultdict(list)
    for pipeline, one in enumerate(first):
        found[one if one in busy else min(busy)].append(pipeline)
    return list(found.values())


def _own(problem: Problem, pipeline: int) -> tuple[object, ...]:
    """What a pipeline's workers are and hold."""
    return problem.grid.microbatches[pipeline], tuple(problem.workers.get(Worker(pipeline, column))
                                                      for column in range(problem.grid.columns))


def _routes(problem: Problem, pipelines: Sequence[int]) -> tuple[object, ...]:
    """The routes of these pipelines' micro-batches, as if they were numbered in their order."""
    number = {pipeline: index for index, pipeline in enumerate(pipelines)}
    return tuple((slice_, number[worker.pipeline], worker.column) for pipeline in pipelines
                 for microbatch in range(problem.grid.microbatches[pipeline])
                 for slice_, worker in (problem.routes or {})[MicroBatch(pipeline, microbatch)])


def part_of(problem: Problem, pipelines: Sequence[int]) -> Problem:
    """The problem of some pipelines alone, numbered anew in their order."""
    number = {pipeline: index for index, pipeline in enumerate(pipelines)}
    grid = msgspec.structs.replace(problem.grid, pipelines=len(pipelines),
                                   microbatches=tuple(problem.grid.microbatches[pipeline] for pipeline in pipelines))
    part = msgspec.structs.replace(problem, grid=grid, workers={
        Worker(number[pipeline], column): problem.workers[Worker(pipeline, column)]
        for pipeline in pipelines for column in range(grid.columns) if Worker(pipeline, column) in problem.workers})
    if problem.routes is None:
        return part
    return msgspec.structs.replace(part, routes={MicroBatch(number[pipeline], microbatch): tuple(
        Leg(leg.slice, Worker(number[leg.worker.pipeline], leg.worker.column))
        for leg in problem.routes[MicroBatch(pipeline, microbatch)])
        for pipeline in pipelines for microbatch in range(problem.grid.microbatches[pipeline])})
