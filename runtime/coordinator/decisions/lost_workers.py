"""Lost workers: why each is gone, and with them what is missing now."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.schedule import Grid, Worker


class Loss(NamedTuple):
    """That of a worker."""

    reason: str
    layers: frozenset[int] = frozenset()
    """Those that it held, besides those of its column's stages."""


def reasons(losses: Mapping[Worker, Loss]) -> str:
    """Of all losses."""
    return ", ".join(loss.reason for loss in losses.values()) or "none was there from the start"


def reasons_of(losses: Mapping[Worker, Loss], layer: int, grid: Grid, placement: Placement,
               members: Collection[Worker], ready: Collection[Worker]) -> str:
    """Why nobody holds a layer: the losses of all that may have held it, and who of its workers takes no part.

    `ready` are those that are there, and wait for an order.
    """
    own = [layer in placement.held_in_column(grid, column) for column in range(grid.columns)]
    told = [loss.reason for worker, loss in losses.items() if layer in loss.layers or own[worker.column]]
    for worker in grid.workers():
        if own[worker.column] and worker not in losses and worker not in members:
            told.append(f"worker {worker} is back, but has no layers yet" if worker in ready
                        else f"worker {worker} was not there from the start")
    return ", ".join(told)
