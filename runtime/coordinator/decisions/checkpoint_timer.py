"""Checkpoint timer: when the next checkpoint is due where the run itself chooses, so that all of them cost little."""

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap

SHARE = 1 / 160
"""Of the time that checkpoints may cost. Iterations lose more than the cost that is measured: with 1 / 125, 1.08 %."""
LEAST_SECONDS = 60.0
"""From one checkpoint to the next, and from the start to the first, whose cost is not known before."""


class CheckpointCost(NamedTuple):
    """What a checkpoint cost that was written while training went on."""

    iteration: int
    seconds: float
    """The longest, over workers, that training was held up to copy layers, and what then was computed to write them:
    what waits for a disk holds nobody up."""


class CheckpointTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Collects what checkpoints cost, and spaces them: each is followed by a pause of 1 / `SHARE` times its cost.

    All times are by time.monotonic.
    """

    automatic: bool = False
    """Whether `due` ever says so. Otherwise the workers know by themselves when to save."""
    began: float | None = None
    """The last checkpoint, or training."""
    iteration: int | None = None
    """That whose state is being saved."""
    asked_at: float = 0.0
    seconds: PersistentMap[int, float] = PersistentMap()
    """What each checkpoint cost, by its iteration."""
    newest: int | None = None
    """The last one of which that became known."""

    def after(self, iteration: int, seconds: float, at: float) -> "CheckpointTimer":
        """Go on after a checkpoint that another coordinator has had written."""
        return replace(self, began=at, seconds=PersistentMap([(iteration, seconds)]), newest=iteration)

    @property
    def costs(self) -> tuple[CheckpointCost, ...]:
        """Of all checkpoints so far."""
        return tuple(CheckpointCost(*one) for one in sorted(self.seconds.items()))

    def order_begins(self, at: float) -> "CheckpointTimer":
        """A checkpoint of which nothing has been heard yet may never be complete."""
        return replace(self, iteration=None, began=at if self.began is None else self.began)

    def due(self, at: float) -> bool:
        """Whether to save one soon."""
        if not self.automatic or self.iteration is not None or self.began is None:
            return False
        last = 0.0 if self.newest is None else self.seconds[self.newest]
        return at - self.began > max(LEAST_SECONDS, last / SHARE)

    def asked(self, iteration: int, at: float) -> "CheckpointTimer":
        """The workers are told to save the state before an iteration."""
        return replace(self, iteration=iteration, asked_at=at)

    def saved(self, iteration: int, seconds: float) -> "CheckpointTimer":
        """A worker has written its layers, or has failed to."""
        new = replace(self, iteration=None, began=self.asked_at) if iteration == self.iteration else self
        if seconds <= self.seconds.get(iteration, -1.0):
            return new
        return replace(new, seconds=self.seconds.adding(iteration, seconds),
                       newest=self.newest if iteration in self.seconds else iteration)
