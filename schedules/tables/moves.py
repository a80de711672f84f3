"""What workers that play other roles than their own have to load."""

from slipstream.schedules.layers import layers_in
from slipstream.schedules.schedule import Grid, Schedule, Seat, Worker


def layers_to_load(grid: Grid, worker: Worker, role: Worker) -> int:
    """How many model layers a worker must load before it can play a role.

    A stage counts as one layer where the job does not say how many it has.
    """
    return 0 if worker.column == role.column else len(_layers(grid, role.column) - _layers(grid, worker.column))


def layers_lacked(schedule: Schedule, seat: Seat) -> frozenset[int]:
    """The layers that a worker must load for its seat: those beside the layers of its own column's stages."""
    if seat.holds is None and seat.worker.column == seat.role.column:
        return frozenset()
    return layers_in(schedule.holds_of(seat)) - layers_in(schedule.holds_of_column(seat.worker.column))


def _layers(grid: Grid, column: int) -> set[int]:
    return {layer for stage in grid.stages_of(column) for layer in range(*grid.layers_of(stage))}
