"""Checkpoint timer: chooses when the next checkpoint is due, so that all checkpoints together cost little time."""

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap

MAX_TIME_SHARE = 1 / 160
"""Largest share of a run's time for checkpoints, by their measured cost. Iterations lose more: with 1 / 125, they lost
1.08 %."""
MIN_INTERVAL_SECONDS = 60.0
"""Shortest time between two checkpoints, and from the start to the first one, whose cost is not known before."""


class CheckpointCost(NamedTuple):
    """Seconds of training time that were lost to one checkpoint, which was written while training continued."""

    iteration: int
    seconds: float
    """Cost of the checkpoint in seconds, the largest of any worker: the time that training stopped to copy layers, and
    the computing time that writing them took from training. Waiting for a disk holds up no worker and does not count.
    """


class CheckpointTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Timer of checkpoints. The time until the next one is due is 1 / `MAX_TIME_SHARE` times the training time in
    seconds that the last one cost, and at least `MIN_INTERVAL_SECONDS`.

    All arguments `at` are times of `time.monotonic`.
    """

    automatic: bool = False
    """True if the coordinator chooses when to save. Otherwise workers save at a fixed interval, and `is_due` is always
    False."""
    began: float | None = None
    """Time of the last checkpoint or, before the first one, of the start of training."""
    iteration: int | None = None
    """Iteration before which the state is being saved; None if no checkpoint is pending."""
    asked_at: float = 0.0
    seconds: PersistentMap[int, float] = PersistentMap()
    """Cost in seconds of each checkpoint, by the iteration before which it was saved."""
    newest: int | None = None
    """Iteration of the last checkpoint whose cost became known."""

    def with_checkpoint(self, iteration: int, seconds: float, at: float) -> "CheckpointTimer":
        """Return the timer of a new coordinator, given the last checkpoint of the one before it, which was complete at
        time `at` and cost `seconds` of training time."""
        return replace(self, began=at, seconds=PersistentMap([(iteration, seconds)]), newest=iteration)

    @property
    def checkpoint_costs(self) -> tuple[CheckpointCost, ...]:
        """Training time in seconds that each checkpoint so far has cost, sorted by iteration."""
        return tuple(CheckpointCost(*entry) for entry in sorted(self.seconds.items()))

    def with_order(self, at: float) -> "CheckpointTimer":
        """Return the timer at the start of an order. A checkpoint that members are still saving no longer counts, as it
        may never be complete."""
        return replace(self, iteration=None, began=at if self.began is None else self.began)

    def is_due(self, at: float) -> bool:
        """Return whether the next checkpoint should be requested, at time `at`."""
        if not self.automatic or self.iteration is not None or self.began is None:
            return False
        last = 0.0 if self.newest is None else self.seconds[self.newest]
        return at - self.began > max(MIN_INTERVAL_SECONDS, last / MAX_TIME_SHARE)

    def with_request(self, iteration: int, at: float) -> "CheckpointTimer":
        """Return the timer after members were told to save a checkpoint before the optimizer step of an iteration."""
        return replace(self, iteration=iteration, asked_at=at)

    def with_saved(self, iteration: int, seconds: float) -> "CheckpointTimer":
        """Return the timer after a worker has written its layers of the checkpoint before an iteration, or failed to.

        The argument `seconds` is the training time that this cost the worker. A checkpoint costs the largest such time.
        """
        new = replace(self, iteration=None, began=self.asked_at) if iteration == self.iteration else self
        if seconds <= self.seconds.get(iteration, -1.0):
            return new
        return replace(new, seconds=self.seconds.with_entry(iteration, seconds),
                       newest=self.newest if iteration in self.seconds else iteration)
