"""Metrics: what dashboards show of each iteration, in `metrics.jsonl` and, where wanted, in TensorBoard's files.

A line is written when its iteration is committed, before that of the losses. Where the run goes back, or another
coordinator goes on, the lines of iterations that are run again are dropped, so that each iteration has one.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.coordinator.appended_file import IterationLines
from slipstream.runtime.coordinator.tensorboard import TensorBoard
from slipstream.runtime.coordinator.writer import AT_ONCE, Writer
from slipstream.runtime.events import METRICS, Event, Iteration, Metrics, OrderGiven, Phase, Resumed, decode_metrics
from slipstream.runtime.model.state.learning_rate import learning_rate

Sink = IterationLines | TensorBoard
"""Where metrics go. All methods raise OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """What an iteration is, over all pipelines."""

    tokens: int
    flops: float
    """Operations of the model in forward and backward (`runtime.model.layers.flops`)."""
    peak_flops: float | None
    """Operations per second of a worker's device, at its best; None: not known."""


IterationObserver = Callable[[Metrics], None]


class MetricsRecorder:
    """Puts together what is known of each iteration. It is told of all events, and of what is committed."""

    def __init__(self, config: TrainingConfig, work: IterationWork, sinks: Sequence[Sink], recoveries: int = 0,
                 write: Writer = AT_ONCE, observer: IterationObserver = lambda _: None) -> None:
        self._config = config
        self._work = work
        self._sinks = sinks
        self._write = write
        self._observer = observer
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

    def committed(self, line: Iteration, gradient_norm: float | None, evaluation: float | None) -> None:
        """An iteration was committed."""
        work, seconds = self._work, None
        if line.time is not None:
            seconds = None if self._before is None else line.time - self._before
            self._before = line.time
        rate = None if not seconds or seconds <= 0 else 1 / seconds
        best = None if work.peak_flops is None or self._live is None else work.peak_flops * self._live
        self._tell(Metrics(
            iteration=line.iteration, loss=line.loss, validation_loss=evaluation, gradient_norm=gradient_norm,
            learning_rate=learning_rate(self._config, line.iteration),
            tokens_per_second=None if rate is None else round(work.tokens * rate, 3),
            mfu=None if rate is None or not best else round(work.flops * rate / best, 6),
            live=self._live, phase=self._phase, recoveries=self._recoveries, time=line.time or 0.0))

    def go_back(self, iteration: int) -> None:
        """The iterations from this one on are run again."""
        for sink in self._sinks:
            self._write(partial(sink.go_back, iteration))

    def _tell(self, line: Metrics) -> None:
        for sink in self._sinks:
            self._write(partial(self._append, sink, line))
        self._observer(line)

    def _append(self, sink: Sink, line: Metrics) -> None:
        try:
            sink.append(line)
        except OSError as error:
            self._write.say(f"metrics of iteration {line.iteration} cannot be written: {error.strerror or error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks:
            self._write(sink.close)


def record_metrics(out: Path, first: int, config: TrainingConfig, work: IterationWork, tensorboard: Path | None,
                   write: Writer = AT_ONCE, observer: IterationObserver | None = None
                   ) -> MetricsRecorder:
    """Record the metrics of a run in its folder from an iteration on, and for TensorBoard where a folder is given.

    An observer is called with each.

    Raises OSError, and ConfigError where TensorBoard is not installed.
    """
    recoveries = recoveries_in(out / METRICS)
    shown = [] if tensorboard is None else [TensorBoard(tensorboard, first)]
    return MetricsRecorder(config, work, [IterationLines(out / METRICS, first, write.say), *shown], recoveries,
                           write, observer or (lambda _: None))


def recoveries_in(path: Path) -> int:
    """Those that earlier starts of a run have written to its metrics."""
    found = 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError):
            found = max(found, decode_metrics(line).recoveries)
    return found
