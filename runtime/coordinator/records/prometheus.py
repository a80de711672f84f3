"""Metrics for Prometheus: a text file of the newest iteration, for the textfile collector of its node exporter."""

from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.runtime.events import Metrics

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
    """Text file with the metrics of the newest iteration of a run, in Prometheus' exposition format.

    It is replaced as a whole, so that a reader never sees half of it. If it cannot be written, `say` is called once
    with a line for users, and once more when it can be written again.
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
    """Yield the lines of the file for the metrics of an iteration. The label `run` names the run's folder; metrics that
    are not known are left out."""
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
