"""Validation of the values in messages: decoding has checked their types, and this module checks their ranges.

A worker that sends an impossible value is disconnected before any part of the message is used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from slipstream.runtime.protocol.setup import Setup
from slipstream.runtime.protocol.to_coordinator import (
    Failed,
    Injected,
    Kept,
    Known,
    Note,
    Paused,
    Ran,
    Ready,
    Status,
    ToCoordinator,
    Validated,
)
from slipstream.runtime.replay.recorder import OpTime
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

AHEAD = 8
"""Limit on iterations ahead of the last committed one: members are one ahead, or two if clipping is decided later."""
MOST_RANKS = 64
"""Largest number of ranks of a worker, by `[training] tensor_parallel`."""
TEXT_CHARACTERS = 1000
"""Largest number of characters that are kept of a text for users."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the values in messages of a run."""

    setup: Setup
    injections: int
    """Number of injected failures."""
    workers: frozenset[Worker] = frozenset()
    """All workers of the grid."""

    def wrong(self, message: ToCoordinator, next_iteration: int) -> str | None:
        """Return what is impossible in a message, or None; `next_iteration` is the first uncommitted one."""
        iterations = range(self.setup.first_iteration - 1, min(self.setup.iterations, next_iteration + AHEAD))
        match message:
            case Ran() if message.iteration not in iterations or not math.isfinite(message.window_seconds):
                return f"it says that it has run iteration {message.iteration}, where {next_iteration} is the next"
            case Ran(squares=float()) if message.squares is not None and not 0 <= message.squares < math.inf:
                return "it says that its gradients have a norm that there is not"
            case Ran() if not all(checksum.layer in range(self.setup.cuts[-1]) for checksum in message.checksums):
                return "it says that it holds layers that there are not"
            case Ran():
                return _wrong_times(message.times)
            case Validated() if message.factor.iteration not in iterations:
                return f"it has a factor of iteration {message.factor.iteration}, where {next_iteration} is the next"
            case Paused() if message.validated is not None and message.validated.iteration not in iterations:
                return f"it has a factor of iteration {message.validated.iteration}, where {next_iteration} is the next"
            case Paused() if not self._may_keep(message.kept):
                return "it says that it holds layers, or parts of them, that there are not"
            case Ready(known=Known()) if not self._may_know(message.known):
                return "it says that it knows what nobody can"
            case Injected() if not 0 <= message.index < self.injections:
                return f"it says that failure {message.index} on purpose has happened, which there is not"
        return None

    def _may_keep(self, kept: Kept) -> bool:
        return _ascending(kept.layers, self.setup.cuts[-1]) and all(
            layer in range(self.setup.cuts[-1]) and 0 <= start < stop for layer, start, stop in kept.parts)

    def _may_know(self, known: Known | None) -> bool:
        assert known is not None
        iterations = range(self.setup.first_iteration - 1, self.setup.iterations)
        return (0 <= known.order < 2**31 and known.iteration in iterations
                and self.workers.issuperset(known.failed) and self._may_keep(known.kept)
                and (known.validated is None or known.validated.iteration in iterations))


def _wrong_times(times: Sequence[OpTime]) -> str | None:
    for op_time in times:
        if op_time.number <= 0 or not 0 <= op_time.seconds < math.inf:
            return "it says that ops take no time that there is"
        if op_time.misfit is not None and not 0 <= op_time.misfit < math.inf:
            return "it says that ops differ from their costs by what there is not"
    return None


def printable(message: ToCoordinator) -> ToCoordinator:
    """Return the message with its text for users made one line of printable characters."""
    match message:
        case Note():
            return replace(message, text=_line(message.text))
        case Failed() | Paused(reason=str()):
            assert message.reason is not None
            return replace(message, reason=_line(message.reason))
        case Status():
            return replace(message, doing=_line(message.doing))
    return message


def _line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text[:TEXT_CHARACTERS])


def _ascending(ranges: Sequence[LayerRange], layers: int) -> bool:
    """Return whether ranges are ascending, do not touch, and lie within the given number of layers."""
    edges = [edge for one in ranges for edge in one]
    return all(before < after for before, after in pairwise(edges)) and all(0 <= edge <= layers for edge in edges)
