"""Which live workers form lines, and the layouts of published systems as special cases."""

from collections.abc import Sequence

import msgspec

from slipstream.planner.layout.fixed import fixed_layout
from slipstream.planner.layout.lines import Line, cut
from slipstream.planner.model.layout import Layout
from slipstream.planner.model.problem import Problem
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import VirtualStage, Worker


def lines_of(problem: Problem) -> list[Line]:
    """Lines of the live workers: a pipeline's own where they can hold all layers, else those of several pipelines.

    A pipeline that lost nobody and has nobody slow keeps its stages. Those that are cut anew come first. Raises
    LookupError when no line of all workers can hold all layers.
    """
    by_pipeline: dict[int, list[Worker]] = {}
    for worker in problem.live:
        by_pipeline.setdefault(worker.pipeline, []).append(worker)
    lines, pool = [], []
    for workers in sorted(by_pipeline.values(), key=len):
        if _keeps(problem, workers):
            lines.append(Line(tuple(_along(workers)), cut=False))
        elif _holds_all(problem, workers):
            lines.append(Line(tuple(_along(workers)), cut=True))
        else:
            pool += workers
            if _holds_all(problem, pool):
                lines.append(Line(tuple(_along(pool)), cut=True))
                pool = []
    if pool:
        if not lines:
            raise LookupError("the live workers have no room for all layers")
        weakest = min(lines, key=lambda line: (not line.cut, len(line.workers), line.workers))
        lines.remove(weakest)
        lines.append(Line(tuple(_along([*weakest.workers, *pool])), cut=True))
    return sorted(lines, key=lambda line: (not line.cut, line.workers[0].pipeline))


def one_cut(problem: Problem) -> Layout | None:
    """One cut for all pipelines, by the live workers that each column has left; None where no such cut fits.

    After ElasWave (arXiv 2510.00606), which re-balances layers between stages for all replicas alike. A worker stays in
    its column, and its column's workers share the micro-batches of the whole.
    """
    columns = sorted({column for path in problem.paths for _, column in path})
    rates = [sum(1000 / problem.slowness(worker) for worker in problem.live if worker.column == column)
             for column in columns]
    if len(problem.paths) > 1 or len(problem.paths[0]) != len(columns):
        return None
    low, high = 0.0, float(problem.ample_ticks)
    found: list[LayerRange] | None = None
    for _ in range(60):
        middle = (low + high) / 2
        ranges = _ranges(problem, columns, rates, middle)
        low, high = (middle, high) if ranges is None else (low, middle)
        found = ranges or found
    if found is None:
        return None
    of_column = {column: (layers,) for column, layers in zip(columns, found, strict=True) if layers[0] < layers[1]}
    stages = tuple(VirtualStage(column=column, layers=layers) for column, (layers,) in of_column.items())
    there = msgspec.structs.replace(
        problem, grid=msgspec.structs.replace(problem.grid, stages=stages), workers={
            worker: msgspec.structs.replace(one, holds=of_column.get(worker.column, ()))
            for worker, one in problem.workers.items()})
    layout = fixed_layout(there, sliced=False)
    return msgspec.structs.replace(layout, kind="one cut for all pipelines")


def _ranges(problem: Problem, columns: Sequence[int], rates: Sequence[float],
            limit: float) -> list[LayerRange] | None:
    """Layers of each column whose work its live workers do within the limit, from the first column on."""
    ranges, layer = [], 0
    for column, rate in zip(columns, rates, strict=True):
        first, work, tail = layer, 0, 0
        room = min((problem.workers[worker].room for worker in problem.live if worker.column == column), default=0)
        while layer < problem.grid.layer_count:
            work += problem.costs.work[layer] * problem.grid.total_microbatches
            tail += problem.costs.closing[layer]
            room -= problem.costs.weights[layer] + problem.costs.most[layer]
            if not rate or work / rate + tail > limit or room < 0:
                break
            layer += 1
        ranges.append((first, layer))
    return ranges if layer == problem.grid.layer_count else None


def _along(workers: Sequence[Worker]) -> list[Worker]:
    """In order of the layers that they hold at first, so that few layers move."""
    return sorted(workers, key=lambda worker: (worker.column, worker.pipeline))


def _keeps(problem: Problem, workers: Sequence[Worker]) -> bool:
    """Whether these are all workers of a pipeline, none of them slow, each with the stages of its column."""
    stages: dict[int, list[LayerRange]] = {}
    for layers, column in problem.paths[0]:
        stages.setdefault(column, []).append(layers)
    return {worker.column for worker in workers} == set(stages) and all(
        problem.slowness(worker) == 1000 and tuple(problem.workers[worker].holds) == tuple(stages[worker.column])
        for worker in workers)


def _holds_all(problem: Problem, workers: Sequence[Worker]) -> bool:
    """Whether a line of these workers has room for all layers."""
    return cut(problem, _along(workers), [1] * problem.grid.layer_count, problem.ample_ticks * 4) is not None
