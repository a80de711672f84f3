"""Lost workers: why each is gone, and with them what is missing now."""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from slipstream.runtime.coordinator.persistent_map import PersistentMap
from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.schedule import Grid, Worker


class Loss(NamedTuple):
    """That of a worker."""

    reason: str
    layers: frozenset[int]
    """Those that it held, besides those of its column's stages."""


class LostWorkers(msgspec.Struct, frozen=True):
    """Those that are gone, until they are back."""

    losses: PersistentMap[Worker, Loss] = PersistentMap()

    def adding(self, worker: Worker, reason: str, layers: Collection[int]) -> "LostWorkers":
        """A worker is gone that held these layers."""
        return LostWorkers(self.losses.adding(worker, Loss(reason, frozenset(layers))))

    def back(self, worker: Worker) -> "LostWorkers":
        """It is there again."""
        return LostWorkers(self.losses.without(worker))

    def reasons(self) -> str:
        """Of all losses."""
        return ", ".join(loss.reason for loss in self.losses.values()) or "none was there from the start"

    def reasons_of(self, layer: int, grid: Grid, placement: Placement, members: Collection[Worker],
                   ready: Collection[Worker]) -> str:
        """Why nobody holds a layer: the losses of all that may have held it, and who of its workers takes no part.

        `ready` are those that are there, and wait for an order.
        """
        own = [layer in placement.held_in_column(grid, column) for column in range(grid.columns)]
        told = [loss.reason for worker, loss in self.losses.items() if layer in loss.layers or own[worker.column]]
        for worker in grid.workers():
            if own[worker.column] and worker not in self.losses and worker not in members:
                told.append(f"worker {worker} is back, but has no layers yet" if worker in ready
                            else f"worker {worker} was not there from the start")
        return ", ".join(told)
