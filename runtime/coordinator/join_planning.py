"""Join planning: which layers are fetched while training goes on, and whether all have come.

They are for workers that join, or for members alone, which settle into a better schedule (`settling`). Where workers
keep parts of layers' states, these are what is fetched (`part_moves`).
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipstream.runtime.coordinator.event_log import EventLog
from slipstream.runtime.coordinator.planning import Speeds
from slipstream.runtime.events import FetchAbandoned, FetchBegun, FetchProgressed
from slipstream.runtime.protocol.to_worker import Fetch, LayerMove, PartMove
from slipstream.schedules.schedule import Schedule, Worker

Moves = tuple[LayerMove, ...] | tuple[PartMove, ...]
PAUSE_SECONDS = 0.5
"""From a fetch that failed to the next one."""
NUMBERS = 1000
"""Fetches during an order are numbered from its number times this on. A coordinator that takes over goes on with the
orders' numbers, and so gives no fetch the number of another one that workers may still answer."""
FAILURES = 3
"""Fetches that fail, one after the other, before layers are moved while all wait."""


@dataclass(slots=True)
class Join:
    """A change of members that is planned: it takes place once all have stopped before the same iteration."""

    schedule: Schedule
    order: int
    """The present one."""
    fetch: int
    """Its number; 0: the layers are moved while all wait."""
    lacking: Counter[Worker]
    """How many layers each worker fetches that does not have them yet."""
    began: int
    """The first iteration that was not committed when it began."""
    moves: Moves = ()
    """What is fetched."""
    layers: int = 0
    """Of how many, over all workers."""
    speeds: Speeds | None = None
    """For which the schedule was planned."""
    settles: bool = False
    """Whether the members stay the same, and only their layers change."""

    @property
    def members(self) -> set[Worker]:
        """The workers that take part then."""
        return {seat.worker for seat in self.schedule.seats}


class JoinPlanner:
    """Plans one join at a time; a worker that is ready after it was planned waits for the next.

    `send` sends a `Fetch` to all members and all workers that want to join.
    """

    def __init__(self, send: Callable[[Fetch], None], events: EventLog) -> None:
        self._send = send
        self._events = events
        self._number = 0
        self._join: Join | None = None
        self._failures = 0
        self._not_before = 0.0

    @property
    def open(self) -> bool:
        """Whether a join may be planned."""
        return self._join is None and time.monotonic() >= self._not_before

    @property
    def open_to_join(self) -> bool:
        """Whether one may be planned for workers that want to join: where layers only move to settle, this gives way.
        """
        return self.open or (self._join is not None and self._join.settles and not self.complete)

    @property
    def complete(self) -> bool:
        """Whether all have the layers that the join gives them."""
        return self._join is not None and not self._join.lacking

    def begin(self, order: int, schedule: Schedule, moves: Moves,
              addresses: Mapping[Worker, tuple[tuple[str, int], ...]], iteration: int, speeds: Speeds | None, *,
              settles: bool = False) -> bool:
        """Have the targets of the moves get their layers from the sources.

        `iteration` is the first that is not committed; the schedule is for workers of these speeds. Where that has
        failed too often, the join is complete as it is, and nothing is fetched; where nobody joins, it is given up.
        Whether there is one now.
        """
        if self._failures >= FAILURES:
            if not settles:
                self._join = Join(schedule, order, 0, Counter(), iteration, speeds=speeds)
            return not settles
        lacking = Counter(target for target, _ in {(move.target, move.layer) for move in moves})
        number = max(self._number, order * NUMBERS) + 1
        self._join = Join(schedule, order, number, lacking, iteration, moves, lacking.total(), speeds, settles)
        self._events.write(FetchBegun(fetch=number, purpose="settle" if settles else "join", layers=lacking.total(),
                                      workers=tuple(sorted(lacking))))
        self._give(Fetch(
            number=number, order=order, moves=tuple(move for move in moves if isinstance(move, LayerMove)),
            part_moves=tuple(move for move in moves if isinstance(move, PartMove)),
            addresses=tuple((worker, addresses[worker]) for worker in sorted({move.source for move in moves}))))
        return True

    def give_way(self) -> None:
        """Workers can join: where layers only move to settle, this comes first."""
        if self._join is not None and self._join.settles and not self.complete:
            self._cancel(self._join, "a worker wants to join")

    def drop_for_other_speeds(self, speeds: Speeds | None) -> None:
        """Where layers only move to settle, and that was planned for other speeds than these, drop it."""
        if self._join is not None and self._join.settles and not self.complete and self._join.speeds != speeds:
            self._cancel(self._join, "the speeds of the workers have changed")

    def fetch_up_to_date(self, worker: Worker, fetch: int) -> None:
        """A target has its layers."""
        join = self._join
        if join is not None and join.fetch == fetch and join.lacking.pop(worker, 0):
            self._events.write(FetchProgressed(fetch=fetch, share=1 - join.lacking.total() / join.layers))

    def fetch_failed(self, fetch: int) -> None:
        """A target cannot get its layers: try again later."""
        if self._join is not None and self._join.fetch == fetch:
            self._cancel(self._join, "a worker could not get its layers")
            self._not_before = time.monotonic() + PAUSE_SECONDS
            self._failures += 1

    def lost(self, worker: Worker) -> None:
        """A worker is gone."""
        if self._join is not None and worker in self._join.members:
            self._cancel(self._join, f"worker {worker} is gone")

    def current(self) -> Join | None:
        """The join, if it is complete."""
        return self._join if self.complete else None

    def close(self) -> None:
        """An order begins, which carries out the join that was planned, or ends it."""
        if self.complete:
            self._failures = 0
        elif self._join is not None:
            self._events.write(FetchAbandoned(fetch=self._join.fetch, reason="the workers that take part have changed"))
        self._join, self._not_before = None, 0.0

    def _cancel(self, join: Join, reason: str) -> None:
        self._join = None
        if join.fetch:
            self._events.write(FetchAbandoned(fetch=join.fetch, reason=reason))
        self._give(Fetch(number=self._number + 1, order=join.order))

    def _give(self, fetch: Fetch) -> None:
        self._number = fetch.number
        self._send(fetch)
