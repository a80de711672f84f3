"""Who holds which layers, and so: the room of each worker, its optimizer step, what is reduced together."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from planner.model.problem import UNLIMITED, LiveWorker, Problem
from schedules.layers import LayerRange, total
from schedules.schedule import Grid, Memory, Times, Worker

Held = tuple[LayerRange, ...]
Reduction = tuple[LayerRange, tuple[int, ...]]


def held_problem(*, grid: Grid, times: Times, memory: Memory | None, holds: Mapping[Worker, Held],
                 **others: Any) -> Problem:
    """The problem in which live workers hold these layers: ascending ranges that do not touch.

    `others`: the other fields of a problem. Workers that `holds` does not name are down.
    """
    groups = tuple(sorted(set(holds.values())))
    number = {held: group for group, held in enumerate(groups)}
    usual = grid.held_by_column
    # Layers may be rounded otherwise than the stages that they are of.
    of_column = dict(zip(usual, times.optimizer, strict=True))
    steps = [of_column[held] if held in of_column else
             sum(sum(times.optimizer_of_layer[first:end]) for first, end in held) for held in groups]
    slow = times.per_mille_of

    def room(worker: Worker, held: Held) -> int:
        if memory is None:
            return UNLIMITED
        own = memory.beside(worker, worker.column)
        if held == usual[worker.column]:
            return own
        return own + total(memory.weights_before, usual[worker.column]) - total(memory.weights_before, held)

    workers = {worker: LiveWorker(per_mille=slow.get(worker, 1000), room=room(worker, held), group=number[held],
                                  step=times.optimizer[worker.column] if held == usual[worker.column] else
                                  steps[number[held]])
               for worker, held in sorted(holds.items())}
    return Problem(grid=grid, times=times, memory=memory, workers=workers, groups=groups,
                   reductions=reductions_of(grid, groups), **others)


def in_place(grid: Grid, failed: Sequence[Worker]) -> dict[Worker, Held]:
    """What live workers hold where no layers have moved."""
    usual, down = grid.held_by_column, set(failed)
    return {worker: usual[worker.column] for worker in grid.workers() if worker not in down}


def reductions_of(grid: Grid, groups: Sequence[Held]) -> tuple[Reduction, ...]:
    """Ranges of layers with the same holders, and the groups of these.

    Those of each stage by itself where all workers hold whole stages; else as long as can be.
    """
    ends = {end for _, end in grid.layers_by_stage}
    edges = {edge for held in groups for layers in held for edge in layers}
    whole = edges - {0} <= ends
    found: list[Reduction] = []
    for first, end in pairwise(sorted(edges | ends if whole else edges)):
        holders = tuple(group for group, held in enumerate(groups)
                        if any(low <= first and end <= high for low, high in held))
        if found and found[-1][1] == holders and found[-1][0][1] == first and not whole:
            found[-1] = (found[-1][0][0], end), holders
        elif holders:
            found.append(((first, end), holders))
    return tuple(found)
