"""Metrics: the figures that dashboards show for each iteration."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.events import METRICS, Event, Iteration, Metrics, OrderGiven, Phase, Resumed, decode_metrics
from slipstream.runtime.state.step_factors import learning_rate_at


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """Tokens and floating-point operations of one iteration, summed over all pipelines, and the peak of a device's
    floating-point operations per second."""

    tokens: int
    flops: float
    """Floating-point operations of the forwards and backwards of one iteration (`runtime.models.flops`)."""
    peak_flops: float | None
    """Peak floating-point operations per second of a worker's device; None if it is not known."""


class MetricsBuilder:
    """Builder of the metrics of each committed iteration.

    Parameters
    ----------
    work
        Tokens and floating-point operations of one iteration, from which speeds are computed.
    recoveries
        Number of recoveries in earlier starts of the run.
    """

    def __init__(self, config: TrainingConfig, work: IterationWork, recoveries: int = 0) -> None:
        self._config = config
        self._work = work
        self._live: int | None = None
        self._phase: Phase | None = None
        self._recoveries = recoveries
        self._before: float | None = None
        """Time in seconds since 1970 at which the last iteration was committed; before the first, at which the first
        order was given."""

    def observe_event(self, event: Event) -> None:
        """Record an event of the run on which later metrics depend: an order, or the end of a recovery; others are
        ignored."""
        match event:
            case OrderGiven():
                self._live, self._phase = event.live, event.phase
                self._before = event.time if self._before is None else self._before
            case Resumed():
                self._recoveries += 1

    def build_metrics(self, line: Iteration, gradient_norm: float | None, evaluation: float | None) -> Metrics:
        """Return the metrics of a committed iteration, given its `line` of `losses.jsonl`. Iterations must be passed in
        order. `evaluation` is the validation loss, if it was computed."""
        work, seconds = self._work, None
        if line.time is not None:
            seconds = None if self._before is None else line.time - self._before
            self._before = line.time
        rate = None if not seconds or seconds <= 0 else 1 / seconds
        best = None if work.peak_flops is None or self._live is None else work.peak_flops * self._live
        return Metrics(
            iteration=line.iteration, loss=line.loss, validation_loss=evaluation, gradient_norm=gradient_norm,
            learning_rate=learning_rate_at(self._config, line.iteration),
            tokens_per_second=None if rate is None else round(work.tokens * rate, 3),
            mfu=None if rate is None or not best else round(work.flops * rate / best, 6),
            live=self._live, phase=self._phase, recoveries=self._recoveries, time=line.time or 0.0)


def read_recovery_count(folder: Path) -> int:
    """Return the number of recoveries in earlier starts of the run, as `metrics.jsonl` in its folder has it; 0 without
    a file."""
    recoveries, path = 0, folder / METRICS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError):
            recoveries = max(recoveries, decode_metrics(line).recoveries)
    return recoveries
