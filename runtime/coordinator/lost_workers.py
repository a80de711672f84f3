"""Lost workers: why each is gone, and with them what is missing now."""

from collections.abc import Collection
from typing import NamedTuple

from schedules.schedule import Grid, Worker


class _Loss(NamedTuple):
    reason: str
    columns: frozenset[int]
    """Those whose stages it may have held."""


class LostWorkers:
    """Those that are gone, of a grid, until they are back."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._losses: dict[Worker, _Loss] = {}

    def add(self, worker: Worker, reason: str, columns: Collection[int]) -> None:
        """A worker is gone that had a role in one of these columns."""
        self._losses[worker] = _Loss(reason, frozenset({worker.column, *columns}))

    def back(self, worker: Worker) -> None:
        """It is there again."""
        self._losses.pop(worker, None)

    def reasons(self) -> str:
        """Of all losses."""
        return ", ".join(loss.reason for loss in self._losses.values()) or "none was there from the start"

    def reasons_of(self, stage: int, members: Collection[Worker], ready: Collection[Worker]) -> str:
        """Why nobody holds a stage: the losses of all that may have held it, and who of its workers takes no part.

        `ready` are those that are there, and wait for an order.
        """
        grid = self._grid
        columns = {one.column for index, one in enumerate(grid.stages) if grid.original(index) == grid.original(stage)}
        told = [loss.reason for loss in self._losses.values() if loss.columns & columns]
        for worker in grid.workers():
            if worker.column in columns and worker not in self._losses and worker not in members:
                told.append(f"worker {worker} is back, but has no layers yet" if worker in ready
                            else f"worker {worker} was not there from the start")
        return ", ".join(told)
