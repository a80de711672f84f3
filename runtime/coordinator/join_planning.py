"""Join planning: which layers are fetched for a join while training goes on, and whether all have come."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime.coordinator.event_log import EventLog
from runtime.events import FetchAbandoned, FetchBegun, FetchProgressed
from runtime.protocol.to_worker import Fetch, LayerMove
from schedules.schedule import Schedule, Worker

PAUSE_SECONDS = 0.5
"""From a fetch that failed to the next one."""
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
    waits_for: set[Worker]
    """The workers that do not have their layers yet."""
    began: int
    """The first iteration that was not committed when it began."""
    targets: int = 0
    """Workers that fetch layers."""

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
    def complete(self) -> bool:
        """Whether all have the layers that the join gives them."""
        return self._join is not None and not self._join.waits_for

    def begin(self, order: int, schedule: Schedule, moves: tuple[LayerMove, ...],
              addresses: Mapping[Worker, tuple[str, int]], iteration: int) -> None:
        """Have the targets of the moves get their layers from the sources.

        `iteration` is the first that is not committed. Where that has failed too often, the join is complete as it is,
        and nothing is fetched.
        """
        if self._failures >= FAILURES:
            self._join = Join(schedule, order, 0, set(), iteration)
            return
        targets, sources = ({getattr(move, end) for move in moves} for end in ("target", "source"))
        self._join = Join(schedule, order, self._number + 1, targets, iteration, len(targets))
        self._events.write(FetchBegun(fetch=self._number + 1, purpose="join", layers=len(moves),
                                      workers=tuple(sorted(targets))))
        self._give(Fetch(
            number=self._number + 1, order=order, moves=moves,
            addresses=tuple((worker, addresses[worker]) for worker in sorted(sources))))

    def fetch_up_to_date(self, worker: Worker, fetch: int) -> None:
        """A target has its layers."""
        if self._join is not None and self._join.fetch == fetch:
            self._join.waits_for.discard(worker)
            self._events.write(FetchProgressed(fetch=fetch, share=1 - len(self._join.waits_for) / self._join.targets))

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
