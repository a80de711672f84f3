"""The problem of a layout: who holds what and the routes are given, the order in time is open."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from planner.job.file import Job
from planner.job.layers import layer_costs
from planner.job.shared_state import with_shared_state
from planner.layout.types import LayerRange, Layout
from planner.model.from_job import grid_of
from planner.model.problem import Holding, Leg, Problem, merged
from planner.model.ticks import memory_in_units, tick_of, times_in_ticks
from schedules.schedule import BackwardMode, Grid, Memory, OptimizerMode, Times, Worker

Held = tuple[LayerRange, ...]


def problem_of_layout(job: Job, failed: Sequence[Worker], layout: Layout, *, backward: BackwardMode = "split",
                      optimizer: OptimizerMode = "staggered", least: int = 0) -> Problem:
    """Translate a job with a layout to ticks, fine enough for those of single layers; `least` is a bound in these.

    Raises JobError where a stage has no layer.
    """
    job = with_shared_state(job, failed)
    grid, costs = grid_of(job), layer_costs(job)
    tick = tick_of(job, costs)
    groups = tuple(sorted(set(layout.holds.values())))
    reductions = _reductions(groups)
    number = _numbers(grid, layout, (layers for layers, _ in reductions))
    slices = tuple(number)[len(set(_stage_layers(grid))):]
    times = times_in_ticks(job, grid, tick, costs, slices)
    times = msgspec.structs.replace(times, optimizer_of_layer=tuple(round(value / tick) for value in costs.optimizer))
    memory = memory_in_units(job, costs, slices)
    routes = {batch: tuple(Leg(number[stop.layers], stop.worker) for stop in route)
              for batch, route in layout.routes.items()}
    return Problem(name=job.name, tick_seconds=float(tick), grid=grid, times=times, memory=memory,
                   failed=frozenset(failed), backward=backward, optimizer=optimizer, sharing=True, slices=slices,
                   routes=routes, least=least, reductions=reductions, groups=groups,
                   holdings=_holdings(grid, times, memory, layout.holds, groups))


def _stage_layers(grid: Grid) -> list[LayerRange]:
    return [grid.layers_of(stage) for stage in range(len(grid.stages))]


def _numbers(grid: Grid, layout: Layout, reduced: Iterable[LayerRange]) -> dict[LayerRange, int]:
    """The number of each slice: that of the first stage with the same layers, or one beyond the stages."""
    number: dict[LayerRange, int] = {}
    for stage, layers in enumerate(_stage_layers(grid)):
        number.setdefault(layers, stage)
    used = {stop.layers for route in layout.routes.values() for stop in route} | set(reduced)
    for index, layers in enumerate(sorted(used - set(number))):
        number[layers] = len(grid.stages) + index
    return number


def _reductions(groups: Sequence[Held]) -> tuple[tuple[LayerRange, tuple[int, ...]], ...]:
    """Ranges of layers with the same holders, as long as can be, and the groups of these."""
    edges = sorted({edge for held in groups for layers in held for edge in layers})
    found: list[tuple[LayerRange, tuple[int, ...]]] = []
    for first, end in pairwise(edges):
        holders = tuple(group for group, held in enumerate(groups)
                        if any(low <= first and end <= high for low, high in held))
        if found and found[-1][1] == holders and found[-1][0][1] == first:
            found[-1] = (found[-1][0][0], end), holders
        elif holders:
            found.append(((first, end), holders))
    return tuple(found)


def _holdings(grid: Grid, times: Times, memory: Memory | None, holds: Mapping[Worker, Held],
              groups: Sequence[Held]) -> dict[Worker, Holding]:
    number = {held: group for group, held in enumerate(groups)}
    # Layers may be rounded otherwise than the stages that they are of.
    usual = {merged(grid.layers_of(stage) for stage in grid.stages_of(column)): times.optimizer[column]
             for column in range(grid.columns)}
    steps = [usual.get(held, sum(sum(times.optimizer_of_layer[first:end]) for first, end in held)) for held in groups]
    weights = memory.weights if memory else ()
    beside = [sum(sum(weights[first:end]) for first, end in {grid.layers_of(stage) for stage in
                                                             grid.stages_of(column)})
              for column in range(grid.columns)]

    def room(worker: Worker) -> int:
        held = sum(sum(weights[first:end]) for first, end in holds[worker])
        return 0 if memory is None else \
            memory.beside(worker, worker.column) + beside[worker.column] - held

    return {worker: Holding(room=room(worker), step=steps[number[held]], group=number[held])
            for worker, held in sorted(holds.items())}
