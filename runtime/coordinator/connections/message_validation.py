"""Validate the ranges of the values in messages, whose types decoding has checked. A worker that
sends an impossible value is disconnected before any part of the message is used."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.to_coordinator import (
    FetchFailed,
    Finished,
    HeldState,
    Injected,
    IterationReport,
    Note,
    Paused,
    Ready,
    RecoveryReport,
    StepValidated,
    ToCoordinator,
    WorkerFailed,
    WorkerStatus,
)
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.measured_trace import OpTime
from slipstream.schedules.schedule import Worker

MAX_ITERATIONS_AHEAD = 8
"""Iterations from the first uncommitted one that a message may report. Members are one ahead, or
two if clipping is decided later."""
MAX_RANKS = 64
"""Largest number of ranks of a worker, by `[training] tensor_parallel`."""
MAX_TEXT_CHARACTERS = 1000
"""Characters to which a worker's text for users is cut."""


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """Bounds that the values in messages of workers must keep in one run."""

    setup: WorkerSetup
    injections: int
    """Number of failures that the run is set to inject. A worker reports one by its index below
    this number."""
    workers: frozenset[Worker] = frozenset()
    """All workers of the job's grid, live or not."""

    def find_violation(self, message: ToCoordinator, next_iteration: int) -> str | None:
        """Return a description of the impossible value in a message; None if all are possible.
        `next_iteration` is the first iteration that is not committed."""
        iterations = range(self.setup.first_iteration - 1,
                           min(self.setup.common.iterations, next_iteration + MAX_ITERATIONS_AHEAD))
        match message:
            case IterationReport() if message.iteration not in iterations or not math.isfinite(message.window_seconds):
                return f"it reports an impossible iteration {message.iteration} or time; the next is {next_iteration}"
            case IterationReport(squares=float()) if message.squares is not None \
                and not 0 <= message.squares < math.inf:
                return "it reports a squared gradient norm that is negative or not finite"
            case IterationReport() | Finished() \
                if not all(checksum.layer in range(self.setup.common.cuts[-1]) for checksum in message.checksums):
                return "it reports checksums of layers that the model does not have"
            case IterationReport():
                return _find_time_violation(message.times)
            case StepValidated() if message.factor.iteration not in iterations:
                return f"it reports a factor of iteration {message.factor.iteration}; the next is {next_iteration}"
            case Paused() if message.validated is not None and message.validated.iteration not in iterations:
                return f"it reports a factor of iteration {message.validated.iteration}; the next is {next_iteration}"
            case Paused(named=named) | WorkerStatus(awaited=named) if not self.workers.issuperset(named):
                return "it names workers that the job does not have"
            case Paused() if message.data_end is not None and message.data_end not in iterations:
                return f"it reports an end of the data at iteration {message.data_end}; the next is {next_iteration}"
            case Paused() if not self._can_keep(message.kept):
                return "it reports layers, or parts of layers, that the model does not have"
            case Ready(known=RecoveryReport()) if not self._can_know(message.known):
                return "it reports an order, iteration or layers that are impossible in this run"
            case Injected() if not 0 <= message.index < self.injections:
                return f"it reports injected failure {message.index}, but the run has only {self.injections}"
        return None

    def _can_keep(self, kept: HeldState) -> bool:
        return _is_ascending(kept.layers, self.setup.common.cuts[-1]) and all(
            layer in range(self.setup.common.cuts[-1]) and 0 <= start < stop for layer, start, stop in kept.parts)

    def _can_know(self, known: RecoveryReport | None) -> bool:
        assert known is not None
        iterations = range(self.setup.first_iteration - 1, self.setup.common.iterations)
        return (0 <= known.order < 2**31 and known.iteration in iterations
                and self.workers.issuperset(known.failed) and self._can_keep(known.kept)
                and (known.validated is None or known.validated.iteration in iterations))


def _find_time_violation(times: Sequence[OpTime]) -> str | None:
    for op_time in times:
        if op_time.number <= 0 or not 0 <= op_time.seconds < math.inf:
            return "it reports ops whose number is not positive, or whose time is negative or not finite"
        if op_time.misfit is not None and not 0 <= op_time.misfit < math.inf:
            return "it reports a cost error of ops that is negative or not finite"
    return None


def make_printable(message: ToCoordinator) -> ToCoordinator:
    """Return the message with any text for users as one line of printable characters."""
    match message:
        case Note():
            return replace(message, text=_clean_text(message.text))
        case WorkerFailed() | FetchFailed() | Paused(reason=str()):
            assert message.reason is not None
            return replace(message, reason=_clean_text(message.reason))
        case WorkerStatus():
            return replace(message, doing=_clean_text(message.doing))
    return message


def _clean_text(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text[:MAX_TEXT_CHARACTERS])


def _is_ascending(ranges: Sequence[LayerRange], layers: int) -> bool:
    """Return whether the ranges ascend with gaps and lie within the first `layers` layers."""
    edges = [edge for one in ranges for edge in one]
    return all(before < after for before, after in pairwise(edges)) and all(0 <= edge <= layers for edge in edges)
