"""Write the figures that dashboards, TensorBoard and Prometheus show for each iteration."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.events import (
    METRICS,
    Event,
    Iteration,
    Metrics,
    OrderGiven,
    Phase,
    Resumed,
    decode_metrics,
)
from slipstream.runtime.state.step_factors import learning_rate_at


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """Work of one iteration of all pipelines, from which throughput and MFU are computed."""

    tokens: int
    flops: float
    """Floating-point operations of all forwards and backwards (`runtime.models.flops`)."""
    peak_flops: float | None
    """Peak floating-point operations per second of a worker's device; None: not known."""


class MetricsBuilder:
    """Builder of the metrics of each committed iteration.

    `work` is what each iteration computes, and `recoveries` how many there were in earlier starts.
    """

    def __init__(self, config: TrainingConfig, work: IterationWork, recoveries: int = 0) -> None:
        self._config = config
        self._work = work
        self._live: int | None = None
        self._phase: Phase | None = None
        self._recoveries = recoveries
        self._before: float | None = None
        """Seconds since 1970 at the last commit or, before it, the first order."""

    def observe_event(self, event: Event) -> None:
        """Record an order or the end of a recovery, on which later metrics depend."""
        match event:
            case OrderGiven():
                self._live, self._phase = event.live, event.phase
                self._before = event.time if self._before is None else self._before
            case Resumed():
                self._recoveries += 1

    def build_metrics(
        self, line: Iteration, gradient_norm: float | None, evaluation: float | None
    ) -> Metrics:
        """Return the metrics of the iteration that is committed now.

        `line` is its line in `losses.jsonl`, `gradient_norm` the norm of its gradients before
        clipping, and `evaluation` its validation loss; None: not known. Speeds are those since the
        call before or, for the first call, since the first order.
        """
        # Iterations per second since the commit before, which includes pauses.
        rate = None
        if line.time is not None:
            if self._before is not None and line.time > self._before:
                rate = 1 / (line.time - self._before)
            self._before = line.time
        # MFU counts live workers only: a failure alone does not lower it.
        work, tokens_per_second, mfu = self._work, None, None
        if rate is not None:
            tokens_per_second = round(work.tokens * rate, 3)
            if work.peak_flops and self._live:
                mfu = round(work.flops * rate / (work.peak_flops * self._live), 6)
        return Metrics(
            iteration=line.iteration,
            loss=line.loss,
            validation_loss=evaluation,
            gradient_norm=gradient_norm,
            learning_rate=learning_rate_at(self._config, line.iteration),
            tokens_per_second=tokens_per_second,
            mfu=mfu,
            live=self._live,
            phase=self._phase,
            recoveries=self._recoveries,
            time=line.time or 0.0,
        )


def read_recovery_count(folder: Path) -> int:
    """Return how many recoveries a folder's metrics count; 0 without them. Raises OSError."""
    recoveries, path = 0, folder / METRICS
    # A line that a crash has left incomplete cannot be decoded.
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError):
            recoveries = max(recoveries, decode_metrics(line).recoveries)
    return recoveries


TAGS = {
    "loss": "loss/training",
    "validation_loss": "loss/validation",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "speed/tokens per second",
    "mfu": "speed/mfu",
    "live": "workers/live",
    "recoveries": "workers/recoveries",
}
"""Name under which TensorBoard shows each of these fields of `Metrics`."""


class TensorBoardWriter:
    """Writer of the metrics of iterations from `first` on to a new TensorBoard file.

    Raises OSError, and ConfigError if the package is not installed. A file hides the entries of
    earlier files from its first iteration on: TensorBoard shows each iteration once, even if it was
    repeated.
    """

    def __init__(self, folder: Path, first: int) -> None:
        require_tensorboard()
        self._folder = folder
        self._phase = ""
        self._open_writer(first)

    def append(self, line: Metrics) -> None:
        """Write the metrics of an iteration."""
        for name, tag in TAGS.items():
            value = getattr(line, name)
            if value is not None:
                self._writer.add_scalar(tag, value, line.iteration, walltime=line.time)
        # Text has no curve, so only changes of the phase are written.
        if line.phase is not None and line.phase != self._phase:
            self._phase = line.phase
            self._writer.add_text("phase", line.phase, line.iteration, walltime=line.time)
        self._writer.flush()  # so that nothing is lost if the process is killed

    def drop_iterations_from(self, iteration: int) -> None:
        """Hide the entries from the given iteration on."""
        self._writer.close()
        self._open_writer(iteration)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _open_writer(self, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, and needs the package

        self._writer = SummaryWriter(self._folder, purge_step=first)
        self._phase = ""


def require_tensorboard() -> None:
    """Raise ConfigError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "metrics for TensorBoard need its package: pip install -e '.[tensorboard]'"
        )


GAUGES = {
    "iteration": ("iteration", "Number of the last committed iteration, from 0"),
    "loss": ("loss", "Mean loss of the last committed iteration"),
    "validation_loss": ("validation_loss", "Validation loss after the last committed iteration"),
    "gradient_norm": ("gradient_norm", "Norm of all gradients before clipping"),
    "learning_rate": ("learning_rate", "Learning rate of the last committed iteration"),
    "tokens_per_second": (
        "tokens_per_second",
        "Throughput since the commit before, including pauses",
    ),
    "mfu": ("mfu_ratio", "Model FLOPs utilization of the live workers"),
    "live": ("live_workers", "Number of workers that take part"),
    "time": ("commit_timestamp_seconds", "Time of the last commit in seconds since 1970"),
}
"""Name without `PREFIX`, and help text, of each gauge, by the field of `Metrics`."""
RECOVERIES = "recoveries_total"
PREFIX = "slipstream_"


class PrometheusFile:
    """Text file with a run's newest metrics, in Prometheus' exposition format.

    `say` is called with a line for users when the file cannot be written, and when it can again.
    """

    def __init__(self, path: Path, run: str, say: Callable[[str], None]) -> None:
        self._path, self._run, self._say = path, run, say
        self._has_complained = False

    def append(self, line: Metrics) -> None:
        """Replace the file by one with these metrics."""
        # Prometheus may read the file at any time: it must never see half of one.
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            temporary.write_text("".join(render_metrics(line, self._run)), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                self._say(
                    f"{self._path} cannot be written: {error.strerror or error}; the run continues"
                )
            return
        if self._has_complained:
            self._has_complained = False
            self._say(f"{self._path} is written again")

    def drop_iterations_from(self, iteration: int) -> None:
        """Do nothing: the next iteration replaces the file."""

    def close(self) -> None:
        """Do nothing: the file stays with the last iteration."""


def render_metrics(line: Metrics, run: str) -> Iterator[str]:
    """Yield a Prometheus file's lines for an iteration's known metrics; `run` is the folder."""
    # The label is escaped as Prometheus' text format requires.
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    for field, (name, text) in GAUGES.items():
        value = getattr(line, field)
        if value is not None:
            number = f"{value:.3f}" if field == "time" else f"{value:.10g}"
            yield from _render(name, "gauge", text, f'{{run="{label}"}} {number}')
    yield from _render(
        RECOVERIES,
        "counter",
        "Recoveries from failures so far, over all starts of the run",
        f'{{run="{label}"}} {line.recoveries}',
    )
    # A text is a label of a metric whose value is 1, as is usual in Prometheus.
    if line.phase is not None:
        yield from _render(
            "phase",
            "gauge",
            "1 for the kind of schedule that workers train by",
            f'{{run="{label}",phase="{line.phase}"}} 1',
        )


def _render(name: str, kind: str, text: str, sample: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}.\n"
    yield f"# TYPE {PREFIX}{name} {kind}\n"
    yield f"{PREFIX}{name}{sample}\n"
