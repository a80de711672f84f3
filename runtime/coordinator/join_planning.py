"""Node 0's plan for taking workers in: who fetches which layers while all train, and when they have them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore

from runtime.coordinator.layer_moves import Holders
from runtime.protocol.orders import Fetch, Move, give_fetch
from schedules.schedule import Schedule, Worker

PAUSE_SECONDS = 0.5
"""Between two fetches of which the first came to nothing."""
FAILURES = 3
"""Fetches that come to nothing, one after the other, before layers are moved while all wait."""


@dataclass(slots=True)
class Plan:
    """What comes after the next turn."""

    schedule: Schedule
    order: int
    """The one that is being followed."""
    fetch: int
    """Its number; 0: the layers are moved after the turn."""
    waits_for: set[Worker]
    """Those who do not have their layers yet."""
    began: int
    """The first iteration that was not committed when it began."""

    @property
    def members(self) -> set[Worker]:
        """Those who take part then."""
        return {seat.worker for seat in self.schedule.seats}


class Intake:
    """At most one plan at a time; whoever is ready after it was made waits for the next."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._number = 0
        self._plan: Plan | None = None
        self._failures = 0
        self._not_before = 0.0

    @property
    def open(self) -> bool:
        """Whether a plan may be made."""
        return self._plan is None and time.monotonic() >= self._not_before

    @property
    def complete(self) -> bool:
        """Whether all have the layers that the plan gives them."""
        return self._plan is not None and not self._plan.waits_for

    def begin(self, order: int, schedule: Schedule, moves: tuple[Move, ...], needs: Holders, holds: Holders,
              addresses: Mapping[Worker, tuple[str, int]], iteration: int) -> None:
        """Have the targets of the moves get their layers from the sources.

        `needs` and `holds` are the stages of each worker after and before; `iteration` is the first that is not
        committed. Where that has failed too often, the plan is complete as it is, and nothing is fetched.
        """
        if self._failures >= FAILURES:
            self._plan = Plan(schedule, order, 0, set(), iteration)
            return
        targets, sources = ({getattr(move, end) for move in moves} for end in ("target", "source"))
        self._plan = Plan(schedule, order, self._number + 1, targets, iteration)
        self._tell(Fetch(
            number=self._number + 1, order=order, moves=moves,
            needs=tuple((worker, tuple(stage for stage in needs[worker] if stage not in holds.get(worker, ())))
                        for worker in sorted(targets)),
            addresses=tuple((worker, addresses[worker]) for worker in sorted(sources))))

    def followed(self, worker: Worker, fetch: int) -> None:
        """A target has its layers."""
        if self._plan is not None and self._plan.fetch == fetch:
            self._plan.waits_for.discard(worker)

    def unfollowed(self, fetch: int) -> None:
        """A target cannot get its layers, for whatever reason: try again later."""
        if self._plan is not None and self._plan.fetch == fetch:
            self._cancel(self._plan)
            self._not_before = time.monotonic() + PAUSE_SECONDS
            self._failures += 1

    def lost(self, worker: Worker) -> None:
        """A worker is gone."""
        if self._plan is not None and worker in self._plan.members:
            self._cancel(self._plan)

    def take(self) -> Plan | None:
        """The plan, if it is complete; there is none any more. For the next order, with which all fetches end."""
        plan, self._plan, self._not_before = self._plan, None, 0.0
        if plan is None or plan.waits_for:
            return None
        self._failures = 0
        return plan

    def _cancel(self, plan: Plan) -> None:
        self._plan = None
        self._tell(Fetch(number=self._number + 1, order=plan.order))

    def _tell(self, fetch: Fetch) -> None:
        self._number = fetch.number
        give_fetch(self._store, fetch)
