"""The learning rate of an iteration: a function of the iteration's number and the configuration alone.

So a step that is undone, one that is repeated after a failure, and one of a run that goes on from a checkpoint have the
learning rate that they would have had.
"""

import math
from collections.abc import Callable, Mapping

from slipstream.runtime.config import TrainingConfig

_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,  # Loshchilov and Hutter, ICLR 2017
    "wsd": lambda progress: 1 - progress,
}
"""What is left of the way down, 1 to 0, by the share of the decay that is over."""


def learning_rate(config: TrainingConfig, iteration: int) -> float:
    """What an iteration steps with. Equal to torch's LinearLR over warm-up, followed by ConstantLR, LinearLR or
    CosineAnnealingLR; "wsd" is that of MiniCPM (Hu et al., 2024).
    """
    return config.learning_rate * scale(config, iteration)


def is_scheduled(config: TrainingConfig) -> bool:
    """Whether the learning rate changes at all."""
    return config.learning_rate_schedule != "constant" or config.warmup_iterations > 1


def scale(config: TrainingConfig, iteration: int) -> float:
    """The learning rate of an iteration as a multiple of `config.learning_rate`."""
    warmup = config.warmup_iterations
    if iteration < warmup:
        return (iteration + 1) / warmup
    if config.learning_rate_schedule == "constant":
        return 1.0
    end = config.schedule_iterations or config.iterations
    begin = warmup if config.learning_rate_schedule != "wsd" else end - (
        config.decay_iterations or min(max(1, end // 10), end - warmup))
    progress = min(1.0, max(0, iteration - begin) / max(1, end - begin))
    final = (config.final_learning_rate or 0.0) / config.learning_rate
    return final + (1 - final) * _DECAYS[config.learning_rate_schedule](progress)
