"""What each holds under a schedule: layers of stages, stages of workers, workers of nodes."""

from collections.abc import Sequence
from itertools import pairwise

from runtime.model.layers import split_layers
from schedules.schedule import Schedule, Worker


class PlacementError(ValueError):
    """A schedule and a model that do not fit each other. The message is one line."""


def layer_ranges(schedule: Schedule, layers: int) -> list[tuple[int, int]]:
    """The half-open range of layers of each virtual stage: the schedule's where it says so, else an even cut.

    Raises PlacementError unless the ranges hold each of the model's `layers` once, in order, or where workers run parts
    of stages or hold other layers than those of stages, and ConfigError when there are more stages than layers.
    """
    grid = schedule.grid
    if schedule.slices or any(seat.holds is not None for seat in schedule.seats):
        what = "cuts stages into slices" if all(seat.holds is None for seat in schedule.seats) else "has moved layers"
        raise PlacementError(f"the schedule {what}, which the runtime cannot run yet; without --schedule, one of "
                             "whole stages is planned")
    stages = grid.stages[:grid.depth]  # those of other chains are copies
    given = [stage.layers for stage in stages if stage.layers is not None]
    if not given:
        return split_layers(layers, len(stages)) * grid.chains
    if len(given) < len(stages):
        raise PlacementError(f"the schedule gives layers to {len(given)} of its {len(stages)} stages; expected all "
                             "or none")
    expected = 0
    for index, (start, end) in enumerate(given):
        if start != expected or end <= start:
            raise PlacementError(f"the schedule gives layers {start} to {end} to stage {index}; expected some layers, "
                                 f"the first of them {expected}")
        expected = end
    if expected != layers:
        raise PlacementError(f"the schedule's stages hold {expected} layers; the model has {layers}: [placement] and "
                             "[model] of the job file must agree")
    return given * grid.chains


def reduce_group(schedule: Schedule, stage: int) -> list[Worker]:
    """The live workers that hold a stage or a copy of it, sorted: they have the same parameters and sum gradients."""
    grid = schedule.grid
    columns = {other.column for index, other in enumerate(grid.stages) if grid.original(index) == grid.original(stage)}
    return sorted(seat.worker for seat in schedule.seats if seat.role.column in columns)


def assign_to_nodes(workers: Sequence[Worker], nodes: int) -> list[list[Worker]]:
    """Cut the live workers, in their order, into one run of neighbours a node, sizes differing by at most one."""
    ends = [len(workers) * node // nodes for node in range(nodes + 1)]
    return [list(workers[start:end]) for start, end in pairwise(ends)]
