"""Write the figures that dashboards, TensorBoard and Prometheus show for each iteration."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.events import METRICS, Event, Iteration, Metrics, OrderGiven, Phase, Resumed, decode_metrics
from slipstream.runtime.state.step_factors import learning_rate_at


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """Tokens and operations of an iteration, over all pipelines, and a device's peak."""

    tokens: int
    flops: float
    """Operations of the iteration's forwards and backwards (`runtime.models.flops`)."""
    peak_flops: float | None
    """Peak floating-point operations per second of a worker's device; None: not known."""


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
        """Time since 1970 of the last commit or, before it, of the first order, in seconds."""

    def observe_event(self, event: Event) -> None:
        """Record an order or the end of a recovery, on which later metrics depend."""
        match event:
            case OrderGiven():
                self._live, self._phase = event.live, event.phase
                self._before = event.time if self._before is None else self._before
            case Resumed():
                self._recoveries += 1

    def build_metrics(self, line: Iteration, gradient_norm: float | None, evaluation: float | None) -> Metrics:
        """Return the metrics of a committed iteration, given its `line` of `losses.jsonl`.

        Iterations must be passed in order. `evaluation` is the validation loss, if it was computed.
        """
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
    """Return the recoveries of earlier starts, by the folder's metrics; 0 without a file."""
    recoveries, path = 0, folder / METRICS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError):
            recoveries = max(recoveries, decode_metrics(line).recoveries)
    return recoveries


TAGS = {"loss": "loss/training", "validation_loss": "loss/validation", "gradient_norm": "gradient norm",
        "learning_rate": "learning rate", "tokens_per_second": "speed/tokens per second", "mfu": "speed/mfu",
        "live": "workers/live", "recoveries": "workers/recoveries"}
"""Name under which TensorBoard shows each field of `Metrics`."""


class TensorBoardWriter:
    """Writer of the metrics of iterations from `first` on to a new TensorBoard file.

    Raises OSError, and ConfigError if the package is not installed. A file that begins with some
    iteration hides the entries from that iteration on in earlier files of the folder. So
    TensorBoard shows each iteration once, even if it was repeated.
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
        raise ConfigError("metrics for TensorBoard need its package: pip install -e '.[tensorboard]'")


GAUGES = {
    "iteration": ("iteration", "Number of the last committed iteration, from 0"),
    "loss": ("loss", "Mean loss of the last committed iteration"),
    "validation_loss": ("validation_loss", "Validation loss after the last committed iteration"),
    "gradient_norm": ("gradient_norm", "Norm of all gradients before clipping"),
    "learning_rate": ("learning_rate", "Learning rate of the last committed iteration"),
    "tokens_per_second": ("tokens_per_second", "Throughput since the commit before, including pauses"),
    "mfu": ("mfu_ratio", "Model FLOPs utilization of the live workers"),
    "live": ("live_workers", "Number of workers that take part"),
    "time": ("commit_timestamp_seconds", "Time of the last commit in seconds since 1970"),
}
"""Name without its prefix, and help, of each gauge, by the field of `Metrics`."""
RECOVERIES = "recoveries_total"
PREFIX = "slipstream_"


class PrometheusFile:
    """Text file with a run's newest metrics, in Prometheus' exposition format.

    It is replaced as a whole, so that a reader never sees half of it. If it cannot be written,
    `say` is called once with a line for users, and once more when it can be written again.
    """

    def __init__(self, path: Path, run: str, say: Callable[[str], None]) -> None:
        self._path, self._run, self._say = path, run, say
        self._told = False

    def append(self, line: Metrics) -> None:
        """Replace the file by one with these metrics."""
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            temporary.write_text("".join(render_metrics(line, self._run)), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            if not self._told:
                self._told = True
                self._say(f"{self._path} cannot be written: {error.strerror or error}; the run continues")
            return
        if self._told:
            self._told = False
            self._say(f"{self._path} is written again")

    def drop_iterations_from(self, iteration: int) -> None:
        """Do nothing: the next iteration replaces the file."""

    def close(self) -> None:
        """Do nothing: the file stays with the last iteration."""


def render_metrics(line: Metrics, run: str) -> Iterator[str]:
    """Yield the lines of the file for the metrics of an iteration. The label `run` names the run's
    folder; metrics that are not known are left out."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    for field, (name, text) in GAUGES.items():
        value = getattr(line, field)
        if value is not None:
            yield from _render(name, "gauge", text, f'{{run="{label}"}} {value:.10g}' if field != "time" else
                               f'{{run="{label}"}} {value:.3f}')
    yield from _render(RECOVERIES, "counter", "Recoveries from failures so far, over all starts of the run",
                       f'{{run="{label}"}} {line.recoveries}')
    if line.phase is not None:
        yield from _render("phase", "gauge", "1 for the kind of schedule that workers train by",
                           f'{{run="{label}",phase="{line.phase}"}} 1')


def _render(name: str, kind: str, text: str, sample: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}.\n"
    yield f"# TYPE {PREFIX}{name} {kind}\n"
    yield f"{PREFIX}{name}{sample}\n"
