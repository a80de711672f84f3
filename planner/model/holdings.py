"""Who holds which layers, and so: the room of each worker, its optimizer step, what is reduced together."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from slipstream.planner.layout.types import UNLIMITED, Held, LiveWorker
from slipstream.planner.model.problem import Problem
from slipstream.schedules.layers import LayerRange, total
from slipstream.schedules.schedule import Grid, Memory, Times, Worker

Reduction = tuple[LayerRange, tuple[int, ...]]


def held_problem(*, grid: Grid, times: Times, memory: Memory | None, holds: Mapping[Worker, Held],
                 **others: Any) -> Problem:
    """The problem in which live workers hold these layers: ascending ranges that do not touch.

    `others`: the other fields of a problem. Workers that `holds` does not name are down.
    """
    groups = tuple(sorted(set(holds.values())))
    return Problem(grid=grid, times=times, memory=memory, workers=live_workers(grid, times, memory, holds),
                   groups=groups, reductions=reductions_of(grid, groups), **others)


def live_workers(grid: Grid, times: Times, memory: Memory | None,
                 holds: Mapping[Worker, Held]) -> dict[Worker, LiveWorker]:
    """Those that `holds` names, sorted. Their room is what they have beside their own stages, and the weights of these.
    """
    before = memory.weights_before if memory and memory.weights else ()
    own = [total(before, held) if before else 0 for held in grid.held_by_column]
    return {worker: LiveWorker(per_mille=times.per_mille_of.get(worker, 1000), holds=held, room=UNLIMITED
                               if memory is None else memory.beside(worker, worker.column) + own[worker.column])
            for worker, held in sorted(holds.items())}


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
