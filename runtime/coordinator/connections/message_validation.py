"""Check that the values in messages are possible; decoding has checked their types.

A worker that sends an impossible value is disconnected before any part of the message is used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

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

# Members are one ahead, or two if clipping is decided later.
MAX_ITERATIONS_AHEAD = 8
"""Number of iterations, from the next to be committed on, that a message may name."""
MAX_TEXT_CHARACTERS = 1000
"""Number of characters after which a worker's text for users is cut."""


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """Limits of one run for the values in messages of workers."""

    setup: WorkerSetup
    injections: int
    """Number of failures to inject, which messages name by their index."""
    workers: frozenset[Worker] = frozenset()
    """All workers of the job's grid, live or not."""

    def find_violation(self, message: ToCoordinator, next_iteration: int) -> str | None:
        """Return a clause about an impossible value in a message; None if all are possible.

        `next_iteration` is the next one to be committed.
        """
        # The iteration before the first stands for the state with which the run begins.
        iterations = range(
            self.setup.first_iteration - 1,
            min(self.setup.common.iterations, next_iteration + MAX_ITERATIONS_AHEAD),
        )
        following = f"the next is {next_iteration}"
        match message:
            # Each member reports each iteration: that it could be one at all, then its values.
            case IterationReport() if message.iteration not in iterations or not math.isfinite(
                message.window_seconds
            ):
                return (
                    f"it reports an impossible iteration {message.iteration} or time; {following}"
                )
            case IterationReport(squares=float()) if (
                message.squares is not None and not 0 <= message.squares < math.inf
            ):
                return "it reports a squared gradient norm that is negative or not finite"
            case IterationReport() | Finished() if not all(
                checksum.layer in range(self.setup.common.cuts[-1])
                for checksum in message.checksums
            ):
                return "it reports checksums of layers that the model does not have"
            case IterationReport():
                return _find_time_violation(message.times)
            # Then the factor with which a member has stepped.
            case StepValidated() if message.factor.iteration not in iterations:
                return f"it reports a factor of iteration {message.factor.iteration}; {following}"
            case Paused() if (
                message.validated is not None and message.validated.iteration not in iterations
            ):
                return (
                    f"it reports a factor of iteration {message.validated.iteration}; {following}"
                )
            # What a member reports when it pauses, or when it is asked what it does.
            case Paused(named=named) | WorkerStatus(awaited=named) if not self.workers.issuperset(
                named
            ):
                return "it names workers that the job does not have"
            case Paused() if message.data_end is not None and message.data_end not in iterations:
                return f"it reports an end of the data at iteration {message.data_end}; {following}"
            case Paused() if not self._can_keep(message.kept):
                return "it reports layers, or parts of layers, that the model does not have"
            # What a worker has kept of a coordinator that died.
            case Ready(known=RecoveryReport()) if not self._can_know(message.known):
                return "it reports an order, iteration or layers that are impossible in this run"
            case Injected() if not 0 <= message.index < self.injections:
                return (
                    f"it reports injected failure {message.index}, but the run has only "
                    f"{self.injections}"
                )
        return None

    def _can_keep(self, kept: HeldState) -> bool:
        return _is_ascending(kept.layers, self.setup.common.cuts[-1]) and all(
            layer in range(self.setup.common.cuts[-1]) and 0 <= start < stop
            for layer, start, stop in kept.parts
        )

    def _can_know(self, report: RecoveryReport | None) -> bool:
        assert report is not None
        iterations = range(self.setup.first_iteration - 1, self.setup.common.iterations)
        return (
            0 <= report.order < 2**31
            and report.iteration in iterations
            and self.workers.issuperset(report.failed)
            and self._can_keep(report.kept)
            and (report.validated is None or report.validated.iteration in iterations)
        )


def _find_time_violation(times: Sequence[OpTime]) -> str | None:
    for op_time in times:
        if op_time.number <= 0 or not 0 <= op_time.seconds < math.inf:
            return (
                "it reports ops whose number is not positive, or whose time is negative or not "
                "finite"
            )
        if op_time.misfit is not None and not 0 <= op_time.misfit < math.inf:
            return "it reports a cost error of ops that is negative or not finite"
    return None


def make_printable(message: ToCoordinator) -> ToCoordinator:
    """Return a message whose texts for users are cut, and one line of printable characters."""
    # Else a worker could write control sequences to a user's terminal.
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
    characters = list(text[:MAX_TEXT_CHARACTERS])
    for index, character in enumerate(characters):
        if not character.isprintable():
            characters[index] = " "
    return "".join(characters)


def _is_ascending(ranges: Sequence[LayerRange], layers: int) -> bool:
    """Return whether `ranges` ascend, do not touch, and lie within the first `layers` layers."""
    edges = list(chain.from_iterable(ranges))
    if any(before >= after for before, after in pairwise(edges)):
        return False
    return all(0 <= edge <= layers for edge in edges)
