"""Join planning: which layers are fetched while training goes on, and whether all have come.

They are for workers that join, or for members alone, which settle into a better schedule (`settling`). What is fetched
are parts of layers (`part_moves`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Set

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.effects import Effects
from slipstream.runtime.events import FetchAbandoned, FetchBegun, FetchProgressed
from slipstream.runtime.protocol.to_worker import Addresses, Fetch, Move
from slipstream.schedules.schedule import Schedule, Speeds, Worker

PAUSE_SECONDS = 0.5
"""From a fetch that failed to the next one."""
NUMBERS = 1000
"""Fetches during an order are numbered from its number times this on. A coordinator that takes over goes on with the
orders' numbers, and so gives no fetch the number of another one that workers may still answer."""
FAILURES = 3
"""Fetches that fail, one after the other, before layers are moved while all wait."""


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A change of members that is planned: it takes place once all have stopped before the same iteration."""

    schedule: Schedule
    order: int
    """The present one."""
    fetch: int = 0
    """Its number; 0: the layers are moved while all wait."""
    began: int
    """The first iteration that was not committed when it began."""
    moves: tuple[Move, ...] = ()
    """What is fetched."""
    lacking: Mapping[Worker, int] = {}
    """How many layers each worker fetches that does not have them yet."""
    layers: int = 0
    """Of how many, over all workers."""
    speeds: Speeds | None = None
    """For which the schedule was planned."""
    settles: bool = False
    """Whether the members stay the same, and only their layers change."""


class Joins(msgspec.Struct, frozen=True, kw_only=True):
    """One join at a time; a worker that is ready after it was planned waits for the next."""

    number: int = 0
    """Of the last fetch."""
    join: Join | None = None
    failures: int = 0
    not_before: float = 0.0
    """By time.monotonic: when the next may begin."""

    def open(self, at: float) -> bool:
        """Whether a join may be planned."""
        return self.join is None and at >= self.not_before

    @property
    def gives_way(self) -> bool:
        """Whether there is one that ends where workers want to join: layers only move to settle, and have not yet."""
        return self.join is not None and self.join.settles and not self.complete

    @property
    def complete(self) -> bool:
        """Whether all have the layers that the join gives them."""
        return self.join is not None and not self.join.lacking

    @property
    def current(self) -> Join | None:
        """The join, if it is complete."""
        return self.join if self.complete else None

    def begin(self, join: Join, addresses: Addresses, told: Collection[Worker], to: Effects) -> "Joins":
        """Have the targets of the join's moves get their layers from the sources; `told` are all that live.

        Where that has failed too often, the join is complete as it is, and nothing is fetched; where nobody joins,
        there is none.
        """
        if self.failures >= FAILURES:
            return self if join.settles else replace(self, join=replace(join, moves=()))
        lacking = Counter(target for target, _ in {(move.target, move.layer) for move in join.moves})
        number, layers = max(self.number, join.order * NUMBERS) + 1, lacking.total()
        to.do(FetchBegun(fetch=number, purpose="settle" if join.settles else "join", layers=layers,
                         workers=tuple(sorted(lacking))))
        to.send(told, Fetch(number=number, order=join.order, moves=join.moves, addresses=addresses))
        return replace(self, number=number, join=replace(join, fetch=number, lacking=lacking, layers=layers))

    def fetch_up_to_date(self, worker: Worker, fetch: int, to: Effects) -> "Joins":
        """A target has its layers."""
        join = self.join
        if join is None or join.fetch != fetch or worker not in join.lacking:
            return self
        lacking = {one: number for one, number in join.lacking.items() if one != worker}
        to.do(FetchProgressed(fetch=fetch, share=1 - sum(lacking.values()) / join.layers))
        return replace(self, join=replace(join, lacking=lacking))

    def fetch_failed(self, fetch: int, told: Collection[Worker], to: Effects) -> "Joins":
        """A target cannot get its layers: try again later."""
        if self.join is None or self.join.fetch != fetch:
            return self
        return replace(self.cancel("a worker could not get its layers", told, to),
                       not_before=to.at + PAUSE_SECONDS, failures=self.failures + 1)

    def lost(self, workers: Set[Worker], told: Collection[Worker], to: Effects) -> "Joins":
        """Workers are gone."""
        gone = sorted(workers & self.join.schedule.seat_of.keys()) if self.join is not None else []
        return self.cancel(f"worker {gone[0]} is gone", told, to) if gone else self

    def close(self, to: Effects) -> "Joins":
        """An order begins, which carries out the join that was planned, or ends it."""
        if not self.complete and self.join is not None:
            to.do(FetchAbandoned(fetch=self.join.fetch, reason="the workers that take part have changed"))
        return Joins(number=self.number, failures=0 if self.complete else self.failures)

    def cancel(self, reason: str, told: Collection[Worker], to: Effects) -> "Joins":
        """Whoever has begun the fetch, ends it."""
        if self.join is None:
            return self
        if self.join.fetch:
            to.do(FetchAbandoned(fetch=self.join.fetch, reason=reason))
        to.send(told, Fetch(number=self.number + 1, order=self.join.order))
        return replace(self, number=self.number + 1, join=None)
