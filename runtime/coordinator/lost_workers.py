"""Lost workers: why each is gone, and with them what is missing now."""

from collections.abc import Collection
from typing import NamedTuple

from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.schedule import Grid, Worker


class _Loss(NamedTuple):
    reason: str
    layers: frozenset[int]
    """Those that it may have held."""


class LostWorkers:
    """Those that are gone, of a grid, until they are back."""

    def __init__(self, grid: Grid, placement: Placement) -> None:
        self._grid = grid
        self._own = [placement.held_in_column(grid, column) for column in range(grid.columns)]
        """The layers of each column's stages."""
        self._losses: dict[Worker, _Loss] = {}

    def add(self, worker: Worker, reason: str, layers: Collection[int]) -> None:
        """A worker is gone that held these layers."""
        self._losses[worker] = _Loss(reason, self._own[worker.column].union(layers))

    def back(self, worker: Worker) -> None:
        """It is there again."""
        self._losses.pop(worker, None)

    def reasons(self) -> str:
        """Of all losses."""
        return ", ".join(loss.reason for loss in self._losses.values()) or "none was there from the start"

    def reasons_of(self, layer: int, members: Collection[Worker], ready: Collection[Worker]) -> str:
        """Why nobody holds a layer: the losses of all that may have held it, and who of its workers takes no part.

        `ready` are those that are there, and wait for an order.
        """
        told = [loss.reason for loss in self._losses.values() if layer in loss.layers]
        for worker in self._grid.workers():
            if layer in self._own[worker.column] and worker not in self._losses and worker not in members:
                told.append(f"worker {worker} is back, but has no layers yet" if worker in ready
                            else f"worker {worker} was not there from the start")
        return ", ".join(told)
