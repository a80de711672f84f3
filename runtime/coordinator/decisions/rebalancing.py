"""Decide whether layers move to a better schedule for the remaining workers, and when.

The first schedule after a failure, or after a worker has become slow, leaves layers where they are.
A rebalanced schedule, for which layers move, is faster. But all members stop once to change to it,
and the next failure may come before the gain has paid for that.

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
from slipstream.runtime.events import (
    FetchAbandoned,
    FetchBegun,
    FetchProgressed,
    Noted,
    SettlingChosen,
)
from slipstream.runtime.protocol.to_coordinator import FetchFailed
from slipstream.runtime.protocol.to_worker import Addresses, Fetch, LayerMove
from slipstream.schedules.schedule import Speeds, Worker

PRIOR_SECONDS = 3600.0
"""Seconds before the run's start in which one failure is assumed to have happened."""
DEFAULT_PAUSE_SECONDS = 0.3
"""Assumed duration of a change of schedules if none has been measured yet."""
DEFAULT_BYTES_PER_SECOND = 1e9
"""Assumed total bandwidth of each worker if none between workers is given."""
MIN_GAIN_SHARE = 0.01
"""Smallest gain for which layers move, as a share of the period. Plans are no more exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalancing:
    """Options for moving layers to better schedules during a run."""

    mtbf_seconds: float | None = None
    """Mean time between failures in the whole cluster; None: as observed during the run."""


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Sizes of layers, and bandwidth, from which the time of moves is estimated."""

    layer_bytes: Sequence[int]
    """Bytes of parameters, buffers and optimizer state of each layer of the model."""
    bytes_per_second: float | None
    """Configured bandwidth from each worker to each other one; None: not limited."""


class RebalancingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Policy that decides whether moving layers pays, by the failures that the run has had."""

    cost: MoveCost
    mtbf: float | None = None
    """Mean seconds between failures in the whole cluster; None: as observed during the run."""
    began: float
    """Time of `time.monotonic` at which the run began."""
    failures: int = 0
    """Number of failures so far; workers of one machine lost together count as one."""
    changes: int = 0
    """Number of changes of speed so far, which make a layout obsolete as failures do."""
    closed: tuple[int, Speeds | None] = 1, None
    """Number of the order, and its planned speeds, for which no better schedule is searched."""

    def expected_seconds_to_failure(self, at: float) -> float:
        """Return the expected seconds from `at` until the next failure or change of speed."""
        # Rates add up. If none is given, one failure is assumed in the time before the run.
        observed = at - self.began + PRIOR_SECONDS
        failures = (self.failures + 1) / observed if self.mtbf is None else 1 / self.mtbf
        return 1 / (failures + self.changes / observed)

    def decide_move(
        self,
        old: float,
        new: float,
        moves: Iterable[LayerMove],
        *,
        pause: float | None,
        to: EffectCollector,
    ) -> bool:
        """Return whether moves pay before the next failure; report the figures as effects in `to`.

        A gain of at most `MIN_GAIN_SHARE` of the period does not pay.

        Parameters
        ----------
        old, new
            Periods before and after the moves, in seconds.
        pause
            Duration of the last recovery, in seconds; None: there was none.
        """
        # Layers are fetched first, while all train by the old schedule.
        size, seconds = self._estimate_transfer(moves)
        failure = self.expected_seconds_to_failure(to.at)
        # What all lose once: the change itself, and an iteration that begins with empty pipelines.
        lost = (DEFAULT_PAUSE_SECONDS if pause is None else pause) + new
        # After how many iterations has the gain of each paid for that?
        gained = old - new
        paid = math.ceil(lost / gained) if gained > 0 else None
        pays = gained > MIN_GAIN_SHARE * old and paid is not None and paid * new < failure - seconds
        to.add_effect(
            SettlingChosen(
                settles=pays,
                moves_bytes=size,
                move_seconds=round(seconds, 3),
                present_period=round(old, 6),
                settled_period=round(new, 6),
                pays_after=paid,
                time_to_failure=round(failure, 3),
            )
        )
        # Tell users the same figures in one line.
        change = "failure or change of speed" if self.changes else "failure"
        verb = "move" if pays else "would move"
        line = (
            f"{size / 1e6:.0f} MB {verb} in about {seconds:.1f} s, for iterations of "
            f"{new:.3g} s instead of {old:.3g} s, which"
        )
        expected = f"the next {change} is expected in {failure:.0f} s"
        if pays:
            to.add_effect(f"settles: {line} pays off after {paid} iterations; {expected}")
        elif paid is None or gained <= MIN_GAIN_SHARE * old:
            to.add_effect(f"does not settle: {line} gains too little; {expected}")
        else:
            to.add_effect(
                f"does not settle: {line} would pay off after {paid} iterations; {expected}"
            )
        return pays

    def _estimate_transfer(self, moves: Iterable[LayerMove]) -> tuple[int, float]:
        # The busiest connection counts, or the busiest worker if no bandwidth is configured.
        between: Counter[object] = Counter()
        size = 0
        for move in moves:
            layer = self.cost.layer_bytes[move.layer]
            size += layer
            # A configured rate limits each connection; without one, each worker's total bandwidth
            # is the limit.
            ends = (move.source, move.target)
            between.update(
                {ends: layer} if self.cost.bytes_per_second else dict.fromkeys(ends, layer)
            )
        return size, max(between.values(), default=0) / (
            self.cost.bytes_per_second or DEFAULT_BYTES_PER_SECOND
        )


FETCH_RETRY_SECONDS = 0.5
"""Seconds from a failed fetch to the next one."""
FETCHES_PER_ORDER = 1000
"""Fetch numbers reserved for each order, so that no later coordinator reuses one."""
MAX_FETCH_FAILURES = 3
"""Failed fetches in a row after which layers move while all members wait."""


class LayerFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Change of members or layers that is prepared by fetching layers while all train."""

    prepared: PreparedSchedule
    """Schedule to change to."""
    order: int
    """Number of the order during which the change is prepared."""
    fetch: int = 0
    """Number of the fetch; 0: none, as layers move while all members wait."""
    began: int
    """First iteration that was not committed when the fetch began."""
    moves: tuple[LayerMove, ...] = ()
    """Moves by which workers fetch parts of layers from others during training."""
    lacking: Mapping[Worker, int] = {}
    """Number of layers that each worker fetches, for workers that do not have all yet."""
    layers: int = 0
    """Number of layers to fetch in all, counted once for each worker that fetches them."""
    speeds: Speeds | None = None
    """Speeds for which the schedule was planned; None: those of the first schedule."""
    rebalances: bool = False
    """True if the members stay the same and only their layers change."""


class FetchState(msgspec.Struct, frozen=True, kw_only=True):
    """State of fetches of layers: the change that they prepare, and how many have failed.

    Reports about another fetch than the pending one change nothing.
    """

    number: int = 0
    """Number of the last fetch of layers, which the workers' answers name."""
    join: LayerFetch | None = None
    """Change that is being prepared; None: there is none."""
    failures: int = 0
    """Number of fetches in a row that have failed."""
    not_before: float = 0.0
    """Time of `time.monotonic` before which no fetch may begin."""

    def can_begin(self, at: float) -> bool:
        """Return whether no fetch is pending, and the pause after a failed one is over."""
        return self.join is None and at >= self.not_before

    @property
    def is_preemptible(self) -> bool:
        """True if the pending change only moves members' layers and may give way to joins."""
        # Once all layers have been fetched, the change itself takes hardly any time.
        return self.join is not None and self.join.rebalances and not self.is_complete

    @property
    def is_complete(self) -> bool:
        """True if a change is pending, and all workers have fetched its layers."""
        return self.join is not None and not self.join.lacking

    @property
    def completed_fetch(self) -> LayerFetch | None:
        """Pending change, if all its layers have been fetched; otherwise None."""
        return self.join if self.is_complete else None

    def begin_fetch(
        self, join: LayerFetch, addresses: Addresses, live: Collection[Worker], to: EffectCollector
    ) -> "FetchState":
        """Return the state after starting the fetch for the planned change `join`.

        The effects in `to` send its moves, and the `addresses` of the workers that send layers, to
        all `live` workers. If too many fetches have failed, nothing is fetched: a change with which
        workers join is complete at once, so that layers move while all wait, and a change for
        members only is not begun.
        """
        if self.failures >= MAX_FETCH_FAILURES:
            return self if join.rebalances else replace(self, join=replace(join, moves=()))
        # A layer may come in several parts, but counts once.
        target_layers = {(move.target, move.layer) for move in join.moves}
        lacking = Counter(target for target, _ in target_layers)
        # A number that no fetch of an earlier order has, whichever coordinator gave that order.
        number, layers = max(self.number, join.order * FETCHES_PER_ORDER) + 1, lacking.total()
        to.add_effect(
            FetchBegun(
                fetch=number,
                purpose="settle" if join.rebalances else "join",
                layers=layers,
                workers=tuple(sorted(lacking)),
            )
        )
        to.send(live, Fetch(number=number, order=join.order, moves=join.moves, addresses=addresses))
        return replace(
            self, number=number, join=replace(join, fetch=number, lacking=lacking, layers=layers)
        )

    def with_target_ready(self, worker: Worker, fetch: int, to: EffectCollector) -> "FetchState":
        """Return the state after a worker has got all its layers in fetch number `fetch`."""
        join = self.join
        if join is None or join.fetch != fetch or worker not in join.lacking:
            return self
        lacking = {target: number for target, number in join.lacking.items() if target != worker}
        to.add_effect(FetchProgressed(fetch=fetch, share=1 - sum(lacking.values()) / join.layers))
        return replace(self, join=replace(join, lacking=lacking))

    def with_failure(
        self, report: FetchFailed, live: Collection[Worker], to: EffectCollector
    ) -> "FetchState":
        """Return the state after a worker could not get its layers, which ends the fetch."""
        if self.join is None or self.join.fetch != report.fetch:
            return self
        reason = ": ".join(
            filter(None, (f"worker {report.worker} could not get its layers", report.reason))
        )
        to.add_effect(Noted(text=reason))
        return replace(
            self.cancel_fetch(reason, live, to),
            not_before=to.at + FETCH_RETRY_SECONDS,
            failures=self.failures + 1,
        )

    def without_workers(
        self, workers: Set[Worker], live: Collection[Worker], to: EffectCollector
    ) -> "FetchState":
        """Return the state after workers are lost, without a change that needs them.

        If there is such a change, the effects added to `to` tell all `live` workers to drop it.
        """
        if self.join is None:
            return self
        gone = sorted(workers & self.join.prepared.schedule.seat_of.keys())
        return self.cancel_fetch(f"worker {gone[0]} is gone", live, to) if gone else self

    def with_order(self, to: EffectCollector) -> "FetchState":
        """Return the state at an order's start, which makes or drops the pending change."""
        if not self.is_complete and self.join is not None:
            to.add_effect(
                FetchAbandoned(
                    fetch=self.join.fetch, reason="the workers that take part have changed"
                )
            )
        return FetchState(number=self.number, failures=0 if self.is_complete else self.failures)

    def cancel_fetch(
        self, reason: str, live: Collection[Worker], to: EffectCollector
    ) -> "FetchState":
        """Return the state without the pending change; all `live` workers are told to drop it."""
        if self.join is None:
            return self
        if self.join.fetch:
            to.add_effect(FetchAbandoned(fetch=self.join.fetch, reason=reason))
        # A fetch without moves, of the next number, replaces the pending one.
        to.send(live, Fetch(number=self.number + 1, order=self.join.order))
        return replace(self, number=self.number + 1, join=None)
