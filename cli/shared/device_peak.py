"""Tell the peak performance of this machine's GPU by its name."""

import re

from slipstream.planner.job.estimate import GPUS
from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.device import choose_device, gpu_name

_NAME_PATTERNS = {"a100": r"A100\b", "h100": r"H100 80GB HBM3\b", "h200": r"\bH200\b", "b200": r"\bB200\b"}
"""Patterns of the driver's names of GPUs. Other forms, such as H100 PCIe and NVL, have other peaks."""


def peak_flops(training: TrainingConfig) -> float | None:
    """Return the peak of this machine's GPU in operations per second, without sparsity, if training uses bf16.

    Returns None if the peak is unknown, and for other arithmetic, which may or may not use the tensor cores. GPUs of
    other nodes are assumed to be the same. Raises ConfigError if bf16 training requires a GPU that this machine lacks.
    """
    if training.dtype != "bf16" or choose_device(training.device) == "cpu":
        return None
    return peak_of_gpu(gpu_name())


def peak_of_gpu(device: str) -> float | None:
    """Return a GPU's peak in bf16 operations per second, without sparsity, by the name that its driver reports; None if
    it is unknown."""
    return next((GPUS[name].flops for name, pattern in _NAME_PATTERNS.items() if re.search(pattern, device)), None)
