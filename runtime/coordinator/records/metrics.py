"""Metrics: what dashboards show of each iteration."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.events import METRICS, Event, Iteration, Metrics, OrderGiven, Phase, Resumed, decode_metrics
from slipstream.runtime.model.state.learning_rate import learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """What an iteration is, over all pipelines."""

    tokens: int
    flops: float
    """Operations of the model in forward and backward (`runtime.model.layers.flops`)."""
    peak_flops: float | None
    """Operations per second of a worker's device, at its best; None: not known."""


class IterationMetrics:
    """Puts together what is known of each iteration of a run, which had so many recoveries before this start of it."""

    def __init__(self, config: TrainingConfig, work: IterationWork, recoveries: int = 0) -> None:
        self._config = config
        self._work = work
        self._live: int | None = None
        self._phase: Phase | None = None
        self._recoveries = recoveries
        self._before: float | None = None
        """When the iteration before was committed, or else the first order given."""

    def observe(self, event: Event) -> None:
        """Something has happened."""
        match event:
            case OrderGiven():
                self._live, self._phase = event.live, event.phase
                self._before = event.time if self._before is None else self._before
            case Resumed():
                self._recoveries += 1

    def of(self, line: Iteration, gradient_norm: float | None, evaluation: float | None) -> Metrics:
        """Those of the iteration that is committed next."""
        work, seconds = self._work, None
        if line.time is not None:
            seconds = None if self._before is None else line.time - self._before
            self._before = line.time
        rate = None if not seconds or seconds <= 0 else 1 / seconds
        best = None if work.peak_flops is None or self._live is None else work.peak_flops * self._live
        return Metrics(
            iteration=line.iteration, loss=line.loss, validation_loss=evaluation, gradient_norm=gradient_norm,
            learning_rate=learning_rate(self._config, line.iteration),
            tokens_per_second=None if rate is None else round(work.tokens * rate, 3),
            mfu=None if rate is None or not best else round(work.flops * rate / best, 6),
            live=self._live, phase=self._phase, recoveries=self._recoveries, time=line.time or 0.0)


def recoveries_in(folder: Path) -> int:
    """Those that earlier starts of a run have written to its metrics."""
    found, path = 0, folder / METRICS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError):
            found = max(found, decode_metrics(line).recoveries)
    return found
