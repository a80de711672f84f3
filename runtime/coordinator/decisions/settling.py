"""Decide whether layers move to a better schedule for the remaining workers, and when.

The first schedule after a failure, or after a worker has become slow, leaves layers where they are.
A settled schedule, for which layers move, is faster. But all members stop once to change over, and
the next failure may come before the gain has paid for that.

Layers, in parts (`part_moves`), are fetched while training continues, for workers that join, or
only for members, to change to a better schedule.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.effects import EffectCollector, PreparedSchedule
from slipstream.runtime.events import FetchAbandoned, FetchBegun, FetchProgressed, Noted, SettlingChosen
from slipstream.runtime.protocol.to_coordinator import FetchFailed
from slipstream.runtime.protocol.to_worker import Addresses, Fetch, LayerMove
from slipstream.schedules.schedule import Speeds, Worker

PRIOR_SECONDS = 3600.0
"""Seconds with one failure assumed before the run, since little is known after the first."""
DEFAULT_PAUSE_SECONDS = 0.3
"""Assumed duration of a change of schedules if none has been measured yet."""
DEFAULT_BYTES_PER_SECOND = 1e9
"""Assumed bandwidth between two workers if none is given."""
MIN_GAIN_SHARE = 0.01
"""Smallest gain for which layers move, as a share of the period: plans are not more exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """Options for moving layers to better schedules during a run."""

    mtbf_seconds: float | None = None
    """Mean time between failures in the whole cluster; None: as observed during the run."""


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Sizes of layers and bandwidth, by which the time of moves is estimated."""

    layer_bytes: Sequence[int]
    """Bytes of parameters, buffers and optimizer state of each layer of the model."""
    bytes_per_second: float | None
    """Bandwidth from each worker to each other one; None: not limited."""


class SettlingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Policy of one run on moving layers, with the failures and speeds that it observed."""

    cost: MoveCost
    mtbf: float | None = None
    """Mean time between failures in seconds, in the whole cluster. None: as observed during the
    run."""
    began: float
    """Time of `time.monotonic` at which the run began."""
    failures: int = 0
    changes: int = 0
    """Observed changes of speed. Like a failure, each puts the layout chosen before out of date."""
    closed: tuple[int, Speeds | None] = 1, None
    """Order number and speeds for which the search is over. Initially those of the first order."""

    def expected_seconds_to_failure(self, at: float) -> float:
        """Return the expected seconds from `at` until the next failure or change of speed."""
        observed = at - self.began + PRIOR_SECONDS
        failures = (self.failures + 1) / observed if self.mtbf is None else 1 / self.mtbf
        return 1 / (failures + self.changes / observed)

    def decide_move(self, old: float, new: float, moves: Iterable[LayerMove], *, pause: float | None,
                    to: EffectCollector) -> bool:
        """Return whether moves pay before the next failure; add the figures to the effects `to`.

        They are one event and one progress line. All times are in seconds: the periods `old`
        (before the moves) and `new` (after them), and the duration `pause` of the last change of
        schedules (None: none was measured yet).
        """
        size, seconds = self._estimate_transfer(moves)
        failure = self.expected_seconds_to_failure(to.at)
        gained = old - new
        # the next iteration begins with empty pipelines
        lost = (DEFAULT_PAUSE_SECONDS if pause is None else pause) + new
        paid = math.ceil(lost / gained) if gained > 0 else None
        settles = gained > MIN_GAIN_SHARE * old and paid is not None and paid * new < failure - seconds
        to.add_effect(SettlingChosen(
            settles=settles, moves_bytes=size, move_seconds=round(seconds, 3), present_period=round(old, 6),
            settled_period=round(new, 6), pays_after=paid, time_to_failure=round(failure, 3)))
        expected = f"the next failure{' or change of speed' if self.changes else ''} is expected in {failure:.0f} s"
        says = f"{size / 1e6:.0f} MB {'' if settles else 'would '}move in about {seconds:.1f} s, for iterations of " \
               f"{new:.3g} s instead of {old:.3g} s"
        why = "which gains too little" if paid is None or gained <= MIN_GAIN_SHARE * old else \
            f"which would pay off after {paid} iterations"
        to.add_effect(f"settles: {says}, which pays off after {paid} iterations; {expected}" if settles else
                      f"does not settle: {says}, {why}; {expected}")
        return settles

    def _estimate_transfer(self, moves: Iterable[LayerMove]) -> tuple[int, float]:
        """Return the bytes of the moves, in whole layers, and the seconds that they take."""
        # The busiest connection counts, or the busiest worker if no bandwidth is configured.
        between: Counter[object] = Counter()
        size = 0
        for move in moves:
            layer = self.cost.layer_bytes[move.layer]
            size += layer
            # A configured rate limits each connection; without one, each worker's total bandwidth is the limit.
            ends = (move.source, move.target)
            between.update({ends: layer} if self.cost.bytes_per_second else dict.fromkeys(ends, layer))
        return size, max(between.values(), default=0) / (self.cost.bytes_per_second or DEFAULT_BYTES_PER_SECOND)


FETCH_RETRY_SECONDS = 0.5
"""Time from a failed fetch to the next one."""
FETCHES_PER_ORDER = 1000
"""First fetch of an order, as a multiple of its number. A coordinator that takes over continues the
numbers of orders, so it never reuses a fetch that workers may still answer."""
MAX_FETCH_FAILURES = 3
"""Consecutive failed fetches after which layers are moved while all members wait."""


class LayerFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Planned change of members or layers, once all have stopped before an iteration."""

    prepared: PreparedSchedule
    """Schedule that begins with the change."""
    order: int
    """Number of the order during which the change is prepared."""
    fetch: int = 0
    """Number of the fetch that prepares the change. 0 if layers move while all members wait."""
    began: int
    """First iteration that was not committed when the fetch began."""
    moves: tuple[LayerMove, ...] = ()
    """Moves by which workers fetch parts of layers from others during training."""
    lacking: Mapping[Worker, int] = {}
    """Layers still to be fetched, for each worker that lacks some."""
    layers: int = 0
    """Layers to fetch in all, counted once for each worker that fetches them."""
    speeds: Speeds | None = None
    """Speeds of workers for which the schedule was planned."""
    settles: bool = False
    """True if the members stay the same and only their layers change."""


class FetchState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the change that is being prepared, if any. A worker that has started meanwhile waits
    for the next change."""

    number: int = 0
    """Number of the last fetch of layers, by which workers answer it."""
    join: LayerFetch | None = None
    failures: int = 0
    not_before: float = 0.0
    """Time of `time.monotonic` before which no fetch may begin."""

    def can_begin(self, at: float) -> bool:
        """Return whether no fetch is pending, and the pause after a failed one is over."""
        return self.join is None and at >= self.not_before

    @property
    def is_preemptible(self) -> bool:
        """True if workers that want to join may cancel the pending change. Its members stay the
        same, and not all layers have been fetched."""
        return self.join is not None and self.join.settles and not self.is_complete

    @property
    def is_complete(self) -> bool:
        """True if a change is pending, and all workers have fetched its layers."""
        return self.join is not None and not self.join.lacking

    @property
    def completed_fetch(self) -> LayerFetch | None:
        """Pending change, if all its layers have been fetched; otherwise None."""
        return self.join if self.is_complete else None

    def begin_fetch(self, join: LayerFetch, addresses: Addresses, told: Collection[Worker],
                    to: EffectCollector) -> "FetchState":
        """Return the state after starting the fetch for the planned change `join`.

        Its moves, and the `addresses` of the workers that send layers, go to all connected workers
        (`told`). If fetches have failed too often, nothing is fetched: a change for joining workers
        counts as complete at once, so that its layers move while all wait, and a change for members
        only is not begun.
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
        """Return the state after a worker has all its layers of this fetch."""
        join = self.join
        if join is None or join.fetch != fetch or worker not in join.lacking:
            return self
        lacking = {target: number for target, number in join.lacking.items() if target != worker}
        to.add_effect(FetchProgressed(fetch=fetch, share=1 - sum(lacking.values()) / join.layers))
        return replace(self, join=replace(join, lacking=lacking))

    def with_failure(self, report: FetchFailed, told: Collection[Worker], to: EffectCollector) -> "FetchState":
        """Return the state after a worker could not get the layers of a fetch. The fetch is
        cancelled, all connected workers (`told`) learn it, and the next may begin after a pause."""
        if self.join is None or self.join.fetch != report.fetch:
            return self
        reason = ": ".join(filter(None, (f"worker {report.worker} could not get its layers", report.reason)))
        to.add_effect(Noted(text=reason))
        return replace(self.cancel_fetch(reason, told, to),
                       not_before=to.at + FETCH_RETRY_SECONDS, failures=self.failures + 1)

    def without_workers(self, workers: Set[Worker], told: Collection[Worker], to: EffectCollector) -> "FetchState":
        """Return the state after workers are lost. If the schedule of the pending change has any of
        them, the change is cancelled, and all connected workers (`told`) learn it."""
        gone = sorted(workers & self.join.prepared.schedule.seat_of.keys()) if self.join is not None else []
        return self.cancel_fetch(f"worker {gone[0]} is gone", told, to) if gone else self

    def with_order(self, to: EffectCollector) -> "FetchState":
        """Return the state at the start of an order, which makes or abandons the change."""
        if not self.is_complete and self.join is not None:
            to.add_effect(FetchAbandoned(fetch=self.join.fetch, reason="the workers that take part have changed"))
        return FetchState(number=self.number, failures=0 if self.is_complete else self.failures)

    def cancel_fetch(self, reason: str, told: Collection[Worker], to: EffectCollector) -> "FetchState":
        """Return the state without the pending change, whose end all `told` workers learn."""
        if self.join is None:
            return self
        if self.join.fetch:
            to.add_effect(FetchAbandoned(fetch=self.join.fetch, reason=reason))
        to.send(told, Fetch(number=self.number + 1, order=self.join.order))
        return replace(self, number=self.number + 1, join=None)
