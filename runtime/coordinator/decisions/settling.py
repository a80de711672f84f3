"""Settling: decides whether layers move to a schedule that is better for the remaining workers, and when that pays.

The first schedule after a failure, or after a worker has become slow, leaves layers where they are. A settled schedule,
for which layers move, is faster. But all members stop once to change over, and the next failure may come before the
gain has paid for that.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from slipstream.runtime.coordinator.decisions.effects import EffectCollector
from slipstream.runtime.events import SettlingChosen
from slipstream.runtime.protocol.to_worker import LayerMove
from slipstream.schedules.schedule import Speeds

PRIOR_SECONDS = 3600.0
"""Seconds with one failure that are assumed before the run and added to what was observed, since little is known after
the first failure."""
DEFAULT_PAUSE_SECONDS = 0.3
"""Assumed duration of a change of schedules if none has been measured yet."""
DEFAULT_BYTES_PER_SECOND = 1e9
"""Assumed bandwidth between two workers if none is given."""
MIN_GAIN_SHARE = 0.01
"""Smallest gain for which layers move, as a share of the period: plans do not predict smaller differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """Options for moving layers to better schedules during a run."""

    mtbf_seconds: float | None = None
    """Mean time between failures in the whole cluster; None: as observed during the run."""


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Sizes of the layers and bandwidth between workers, from which the time for moving layers is estimated."""

    layer_bytes: Sequence[int]
    """Bytes of parameters, buffers and optimizer state of each layer of the model."""
    bytes_per_second: float | None
    """Bandwidth from each worker to each other one; None: not limited."""


class SettlingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Policy of one run that decides whether layers move to a better schedule, with the observed failures and changes
    of speed on which it is based."""

    cost: MoveCost
    mtbf: float | None = None
    """Mean time between failures in seconds, in the whole cluster; None: as observed during the run."""
    began: float
    """Time of `time.monotonic` at which the run began."""
    failures: int = 0
    changes: int = 0
    """Number of observed changes of workers' speeds; like a failure, each makes the layout chosen before it out of
    date."""
    closed: tuple[int, Speeds | None] = 1, None
    """Order number and speeds for which the search for a better schedule has ended; initially those of the first
    order."""

    def expected_seconds_to_failure(self, at: float) -> float:
        """Return the expected seconds from `at` until the next failure or change of speed."""
        observed = at - self.began + PRIOR_SECONDS
        failures = (self.failures + 1) / observed if self.mtbf is None else 1 / self.mtbf
        return 1 / (failures + self.changes / observed)

    def decide_move(self, old: float, new: float, moves: Iterable[LayerMove], *, pause: float | None,
                    to: EffectCollector) -> bool:
        """Return whether making these moves of layers pays before the next failure; add the figures of this decision to
        the effects `to`, as one event and one progress line.

        All times are in seconds: the periods `old` (before the moves) and `new` (after them), and the duration `pause`
        of the last change of schedules (None: none was measured yet).
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
        """Return the bytes of all moves, each counted as a whole layer, and the seconds that they take: those of the
        busiest connection, or of the busiest worker if no bandwidth of connections is configured."""
        between: Counter[object] = Counter()
        size = 0
        for move in moves:
            layer = self.cost.layer_bytes[move.layer]
            size += layer
            # A configured rate limits each connection; without one, each worker's total bandwidth is the limit.
            ends = (move.source, move.target)
            between.update({ends: layer} if self.cost.bytes_per_second else dict.fromkeys(ends, layer))
        return size, max(between.values(), default=0) / (self.cost.bytes_per_second or DEFAULT_BYTES_PER_SECOND)
