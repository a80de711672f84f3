"""Lost workers: why each worker is lost, and which layers are missing with it."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.schedule import Grid, Worker


class WorkerLoss(NamedTuple):
    """Loss of one worker: its reason, and the layers lost with it."""

    reason: str
    layers: frozenset[int] = frozenset()
    """Layers that the worker held in addition to those of its column's stages."""


def describe_losses(losses: Mapping[Worker, WorkerLoss]) -> str:
    """Return the reasons of all losses in one line, separated by commas, or a clause that says so if there are none."""
    return ", ".join(loss.reason for loss in losses.values()) or "none was there from the start"


def describe_layer_loss(losses: Mapping[Worker, WorkerLoss], layer: int, grid: Grid, placement: Placement,
                        members: Collection[Worker], ready: Collection[Worker]) -> str:
    """Return, as one text, the reasons why no worker holds a layer: the losses of all workers that may have held it,
    and the workers of its stage that are neither lost nor members.

    The argument `losses` has each lost worker's loss; the workers in `ready` are connected and wait for an order.
    """
    own = [layer in placement.layers_in_column(grid, column) for column in range(grid.columns)]
    causes = [loss.reason for worker, loss in losses.items() if layer in loss.layers or own[worker.column]]
    for worker in grid.workers():
        if own[worker.column] and worker not in losses and worker not in members:
            causes.append(f"worker {worker} is back, but has no layers yet" if worker in ready
                          else f"worker {worker} was not there from the start")
    return ", ".join(causes)
