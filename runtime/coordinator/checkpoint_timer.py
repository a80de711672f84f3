"""Checkpoint timer: when the next checkpoint is due where the run itself chooses, so that all of them cost little."""

import time
from typing import NamedTuple

SHARE = 1 / 160
"""Of the time that checkpoints may cost. Iterations lose more than the cost that is measured: with 1 / 125, 1.08 %."""
LEAST_SECONDS = 60.0
"""From one checkpoint to the next, and from the start to the first, whose cost is not known before."""


class CheckpointCost(NamedTuple):
    """What a checkpoint cost that was written while training went on."""

    iteration: int
    seconds: float
    """The longest, over workers, from when it began to copy layers until they were on the disk: training lost no more
    than if it had stood still meanwhile."""


class CheckpointTimer:
    """Collects what checkpoints cost, and spaces them: each is followed by a pause of 1 / `SHARE` times its cost.

    Parameters
    ----------
    automatic
        Whether `due` ever says so. Otherwise the workers know by themselves when to save.
    """

    def __init__(self, *, automatic: bool) -> None:
        self._automatic = automatic
        self._began: float | None = None
        """The last checkpoint, or training."""
        self._asked: int | None = None
        self._asked_at = 0.0
        self._costs: dict[int, float] = {}

    @property
    def costs(self) -> tuple[CheckpointCost, ...]:
        """Of all checkpoints so far."""
        return tuple(CheckpointCost(*one) for one in sorted(self._costs.items()))

    def order_begins(self) -> None:
        """A checkpoint of which nothing has been heard yet may never be complete."""
        self._asked = None
        self._began = time.monotonic() if self._began is None else self._began

    def due(self) -> bool:
        """Whether to save one soon."""
        if not self._automatic or self._asked is not None or self._began is None:
            return False
        cost = next(reversed(self._costs.values()), 0.0)
        return time.monotonic() - self._began > max(LEAST_SECONDS, cost / SHARE)

    def asked(self, iteration: int) -> None:
        """The workers are told to save the state before an iteration."""
        self._asked, self._asked_at = iteration, time.monotonic()

    def saved(self, iteration: int, seconds: float) -> None:
        """A worker has written its layers, or has failed to."""
        if iteration == self._asked:
            self._asked, self._began = None, self._asked_at
        self._costs[iteration] = max(seconds, self._costs.get(iteration, 0.0))
