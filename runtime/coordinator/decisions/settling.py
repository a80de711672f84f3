"""Settling: whether layers move to a schedule that is better for the workers that are left, and when that has paid.

The first answer to a failure, or to a worker that has become slow, leaves layers where they are. A schedule for which
layers move is faster, but all stop once to change over; and the next failure may come before that has paid.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from slipstream.runtime.coordinator.decisions.effects import Effects
from slipstream.runtime.events import SettlingChosen
from slipstream.runtime.protocol.to_worker import Move
from slipstream.schedules.schedule import Speeds

PRIOR_SECONDS = 3600.0
"""Beside the failures of this run, one is assumed in so long: after the first failure, little is known."""
PAUSE_SECONDS = 0.3
"""A change of schedules lasts so long, where none has been measured yet."""
BYTES_PER_SECOND = 1e9
"""From one worker to another, where nothing else is known."""
LEAST_GAIN = 0.01
"""Share of an iteration below which a schedule is not better: plans are not measured so closely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """How a run settles."""

    mtbf_seconds: float | None = None
    """From one failure in the whole cluster to the next; None: as observed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What moving layers is expected to cost."""

    layer_bytes: Sequence[int]
    """Parameters, buffers and the optimizer's state of each layer of the model."""
    bytes_per_second: float | None
    """From each worker to each other; None: not bounded."""


class Settler(msgspec.Struct, frozen=True, kw_only=True):
    """Decides for one run."""

    cost: Cost
    mtbf: float | None = None
    """As in `Settling`."""
    began: float
    """By time.monotonic."""
    failures: int = 0
    changes: int = 0
    """Of speed: after each, what had been settled for is over, as after a failure."""
    closed: tuple[int, Speeds | None] = 1, None
    """The order that is as good as it gets, and at which speeds; at the start, the first one."""

    def seconds_to_failure(self, at: float) -> float:
        """To be expected until the next failure or change of speed."""
        observed = at - self.began + PRIOR_SECONDS
        failures = (self.failures + 1) / observed if self.mtbf is None else 1 / self.mtbf
        return 1 / (failures + self.changes / observed)

    def pays(self, old: float, new: float, moves: Iterable[Move], *, pause: float | None, to: Effects) -> bool:
        """Whether to move; tells the numbers in one line and one event.

        `old` and `new` are the periods before and after, `pause` is how long the last change of schedules took, all in
        seconds.
        """
        size, seconds = self._moved(moves)
        failure = self.seconds_to_failure(to.at)
        gained = old - new
        lost = (PAUSE_SECONDS if pause is None else pause) + new  # an iteration that begins with empty pipelines
        paid = math.ceil(lost / gained) if gained > 0 else None
        settles = gained > LEAST_GAIN * old and paid is not None and paid * new < failure - seconds
        to.do(SettlingChosen(
            settles=settles, moves_bytes=size, move_seconds=round(seconds, 3), present_period=round(old, 6),
            settled_period=round(new, 6), pays_after=paid, time_to_failure=round(failure, 3)))
        expected = f"the next failure{' or change of speed' if self.changes else ''} is expected in {failure:.0f} s"
        says = f"{size / 1e6:.0f} MB {'' if settles else 'would '}move in about {seconds:.1f} s, for iterations of " \
               f"{new:.3g} s instead of {old:.3g} s"
        why = "which gains too little" if paid is None or gained <= LEAST_GAIN * old else \
            f"which would have paid after {paid} iterations"
        to.do(f"settles: {says}, which has paid after {paid} iterations; {expected}" if settles else
              f"does not settle: {says}, {why}; {expected}")
        return settles

    def _moved(self, moves: Iterable[Move]) -> tuple[int, float]:
        """Bytes of all moves, and seconds until the busiest connection or worker has carried its share."""
        between: Counter[object] = Counter()
        size = 0
        for move in moves:
            layer = self.cost.layer_bytes[move.layer]
            size += layer
            # A rate that is given holds for each connection.
            ends = (move.source, move.target)
            between.update({ends: layer} if self.cost.bytes_per_second else dict.fromkeys(ends, layer))
        return size, max(between.values(), default=0) / (self.cost.bytes_per_second or BYTES_PER_SECOND)
