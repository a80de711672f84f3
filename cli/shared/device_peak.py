"""What this machine's GPU does at its best, by its name."""

import re

from slipstream.planner.job.estimate import GPUS
from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.device import choose_device, gpu_name

_NAMES = {"a100": r"A100\b", "h100": r"H100 80GB HBM3\b", "h200": r"\bH200\b", "b200": r"\bB200\b"}
"""What the driver calls them. Other forms, such as H100 PCIe and NVL, have other peaks."""


def peak_flops(training: TrainingConfig) -> float | None:
    """Operations per second without sparsity, of bf16 only: other arithmetic may or may not use the tensor cores.

    None where that is not known. The GPUs of other nodes are taken to be the same. Raises ConfigError.
    """
    if training.dtype != "bf16" or choose_device(training.device) == "cpu":
        return None
    return peak_of(gpu_name())


def peak_of(device: str) -> float | None:
    """Of a GPU by its driver's name for it."""
    return next((GPUS[name].flops for name, pattern in _NAMES.items() if re.search(pattern, device)), None)
