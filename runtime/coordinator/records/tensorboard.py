"""Metrics for TensorBoard, if its package is installed."""

import importlib.util
from pathlib import Path

from slipstream.runtime.config import ConfigError
from slipstream.runtime.events import Metrics

TAGS = {"loss": "loss/training", "validation_loss": "loss/validation", "gradient_norm": "gradient norm",
        "learning_rate": "learning rate", "tokens_per_second": "speed/tokens per second", "mfu": "speed/mfu",
        "live": "workers/live", "recoveries": "workers/recoveries"}
"""Name under which TensorBoard shows each of the metrics, by the metric's field of `Metrics`."""


class TensorBoardWriter:
    """Writer of the metrics of iterations, from `first` on, to a new event file in a folder. Raises OSError, and
    ConfigError if the package is not installed.

    A file that begins with some iteration hides the entries from that iteration on in earlier files of the folder. So
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
