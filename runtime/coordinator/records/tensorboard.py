"""Metrics for TensorBoard, where its package is installed."""

import importlib.util
from pathlib import Path

from slipstream.runtime.config import ConfigError
from slipstream.runtime.events import Metrics

TAGS = {"loss": "loss/training", "validation_loss": "loss/validation", "gradient_norm": "gradient norm",
        "learning_rate": "learning rate", "tokens_per_second": "speed/tokens per second", "mfu": "speed/mfu",
        "live": "workers/live", "recoveries": "workers/recoveries"}
"""The name under which each of the metrics is shown."""


class TensorBoard:
    """Writes event files to a folder. Raises OSError, and ConfigError where the package is not there.

    A file that begins with an iteration hides those from it on in earlier files of the folder: TensorBoard shows each
    iteration once, whatever was repeated.
    """

    def __init__(self, folder: Path, first: int) -> None:
        require_package()
        self._folder = folder
        self._phase = ""
        self._open(first)

    def append(self, line: Metrics) -> None:
        """Enter an iteration."""
        for name, tag in TAGS.items():
            value = getattr(line, name)
            if value is not None:
                self._writer.add_scalar(tag, value, line.iteration, walltime=line.time)
        if line.phase is not None and line.phase != self._phase:
            self._phase = line.phase
            self._writer.add_text("phase", line.phase, line.iteration, walltime=line.time)
        self._writer.flush()  # a process that is killed has lost nothing

    def go_back(self, iteration: int) -> None:
        """Hide what was entered from this iteration on."""
        self._writer.close()
        self._open(iteration)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _open(self, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, and needs the package

        self._writer = SummaryWriter(self._folder, purge_step=first)
        self._phase = ""


def require_package() -> None:
    """Raises ConfigError where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("metrics for TensorBoard need its package: pip install -e '.[tensorboard]'")
