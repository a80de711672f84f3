"""Layer fetches: copying layers to workers while training continues, and whether all layers have arrived.

Layers are fetched for workers that join, or only for members, to change to a better schedule (`settling`). What is
fetched are parts of layers (`part_moves`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Set

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.effects import EffectCollector
from slipstream.runtime.coordinator.decisions.schedule_requests import PreparedSchedule
from slipstream.runtime.events import FetchAbandoned, FetchBegun, FetchProgressed, Noted
from slipstream.runtime.protocol.to_coordinator import FetchFailed
from slipstream.runtime.protocol.to_worker import Addresses, Fetch, LayerMove
from slipstream.schedules.schedule import Speeds, Worker

FETCH_RETRY_SECONDS = 0.5
"""Time from a failed fetch to the next one."""
FETCHES_PER_ORDER = 1000
"""Fetches of an order are numbered from its number times this constant. A coordinator that takes over continues the
numbers of orders, so it never reuses the number of a fetch that workers may still answer."""
MAX_FETCH_FAILURES = 3
"""Number of consecutive failed fetches after which layers are moved while all members wait."""


class LayerFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Planned change of members or layers, made when all members have stopped before the same iteration."""

    prepared: PreparedSchedule
    """Schedule that begins with the change."""
    order: int
    """Number of the order during which the change is prepared."""
    fetch: int = 0
    """Number of the fetch of layers that prepares the change; 0 if the layers are moved while all members wait."""
    began: int
    """First iteration that was not committed when the fetch began."""
    moves: tuple[LayerMove, ...] = ()
    """Moves by which workers fetch parts of layers from others during training."""
    lacking: Mapping[Worker, int] = {}
    """Number of layers that each worker has not fetched yet, for workers that have not fetched all of theirs."""
    layers: int = 0
    """Number of layers to fetch in all, counted once for each worker that fetches them."""
    speeds: Speeds | None = None
    """Speeds of workers for which the schedule was planned."""
    settles: bool = False
    """True if the members stay the same and only their layers change."""


class FetchState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the change of members or layers that is being prepared, if any; a worker that has started meanwhile
    waits for the next change."""

    number: int = 0
    """Number of the last fetch of layers, by which workers answer it."""
    join: LayerFetch | None = None
    failures: int = 0
    not_before: float = 0.0
    """Time of `time.monotonic` before which no fetch may begin."""

    def can_begin(self, at: float) -> bool:
        """Return whether a fetch may begin: none is pending, and the pause after a failed one is over."""
        return self.join is None and at >= self.not_before

    @property
    def is_preemptible(self) -> bool:
        """True if workers that want to join may cancel the pending change: its members stay the same, and not all
        layers have been fetched."""
        return self.join is not None and self.join.settles and not self.is_complete

    @property
    def is_complete(self) -> bool:
        """True if a change of members or layers is pending and all workers have fetched the layers that it gives
        them."""
        return self.join is not None and not self.join.lacking

    @property
    def completed_fetch(self) -> LayerFetch | None:
        """Pending change of members or layers, if all its layers have been fetched; otherwise None."""
        return self.join if self.is_complete else None

    def begin_fetch(self, join: LayerFetch, addresses: Addresses, told: Collection[Worker],
                    to: EffectCollector) -> "FetchState":
        """Start the fetch for the planned change `join`: send its moves, and the `addresses` of the workers that send
        layers, to all connected workers (`told`). Return the state after that.

        If fetches have failed too often, nothing is fetched: a change for joining workers counts as complete at once,
        so that its layers move while all wait, and a change for members only is not begun.
        """
        if self.failures >= MAX_FETCH_FAILURES:
            return self if join.settles else replace(self, join=replace(join, moves=()))
        lacking = Counter(target for target, _ in {(move.target, move.layer) for move in join.moves})
        number, layers = max(self.number, join.order * FETCHES_PER_ORDER) + 1, lacking.total()
        to.add_effect(FetchBegun(fetch=number, purpose="settle" if join.settles else "join", layers=layers,
                                 workers=tuple(sorted(lacking))))
        to.send(told, Fetch(number=number, order=join.order, moves=join.moves, addresses=addresses))
        return replace(self, number=number, join=replace(join, fetch=number, lacking=lacking, layers=layers))

    def with_target_ready(self, worker: Worker, fetch: int, to: EffectCollector) -> "FetchState":
        """Return the state after a worker has reported that it has all layers of the fetch with number `fetch`."""
        join = self.join
        if join is None or join.fetch != fetch or worker not in join.lacking:
            return self
        lacking = {target: number for target, number in join.lacking.items() if target != worker}
        to.add_effect(FetchProgressed(fetch=fetch, share=1 - sum(lacking.values()) / join.layers))
        return replace(self, join=replace(join, lacking=lacking))

    def with_failure(self, report: FetchFailed, told: Collection[Worker], to: EffectCollector) -> "FetchState":
        """Return the state after a worker has reported that it cannot get the layers of a fetch: that fetch is
        cancelled, all connected workers (`told`) learn it, and the next may begin after a pause."""
        if self.join is None or self.join.fetch != report.fetch:
            return self
        reason = ": ".join(filter(None, (f"worker {report.worker} could not get its layers", report.reason)))
        to.add_effect(Noted(text=reason))
        return replace(self.cancel_fetch(reason, told, to),
                       not_before=to.at + FETCH_RETRY_SECONDS, failures=self.failures + 1)

    def without_workers(self, workers: Set[Worker], told: Collection[Worker], to: EffectCollector) -> "FetchState":
        """Return the state after workers are lost. If the schedule of the pending change has any of them, the change is
        cancelled, and all connected workers (`told`) learn it."""
        gone = sorted(workers & self.join.prepared.schedule.seat_of.keys()) if self.join is not None else []
        return self.cancel_fetch(f"worker {gone[0]} is gone", told, to) if gone else self

    def with_order(self, to: EffectCollector) -> "FetchState":
        """Return the state at the start of an order, without the pending change, which the order makes or abandons."""
        if not self.is_complete and self.join is not None:
            to.add_effect(FetchAbandoned(fetch=self.join.fetch, reason="the workers that take part have changed"))
        return FetchState(number=self.number, failures=0 if self.is_complete else self.failures)

    def cancel_fetch(self, reason: str, told: Collection[Worker], to: EffectCollector) -> "FetchState":
        """Return the state without the pending change, after telling all connected workers (`told`) to end its
        fetch."""
        if self.join is None:
            return self
        if self.join.fetch:
            to.add_effect(FetchAbandoned(fetch=self.join.fetch, reason=reason))
        to.send(told, Fetch(number=self.number + 1, order=self.join.order))
        return replace(self, number=self.number + 1, join=None)
