"""Learning rate of an iteration: a function of the iteration's number and the configuration alone.

So a step that is undone, one that is repeated after a failure, and one of a run that resumes from a checkpoint all use
the learning rate that they would have had without these.
"""

import functools
import math
from collections.abc import Callable, Mapping

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.object_reference import load_reference

_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,  # Loshchilov and Hutter, ICLR 2017
    "wsd": lambda progress: 1 - progress,
}
"""Functions, by name of the schedule, from the share of the decay's iterations that have passed to the share of the
decay that is still ahead, from 1 to 0."""


def learning_rate_at(config: TrainingConfig, iteration: int) -> float:
    """Return the learning rate of an iteration.

    It equals torch's LinearLR during warm-up, followed by ConstantLR, LinearLR or CosineAnnealingLR; "wsd" is the
    schedule of MiniCPM (Hu et al., 2024).
    """
    return config.learning_rate * rate_factor(config, iteration)


def is_scheduled(config: TrainingConfig) -> bool:
    """Return whether the learning rate changes during the run."""
    return config.learning_rate_schedule != "constant" or config.warmup_iterations > 1


def rate_factor(config: TrainingConfig, iteration: int) -> float:
    """Return the learning rate of an iteration as a multiple of `config.learning_rate`."""
    if ":" in config.learning_rate_schedule:
        return _user_factor(config, iteration)
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


def _user_factor(config: TrainingConfig, iteration: int) -> float:
    """Return the factor of the learning rate that the user's own schedule returns for an iteration. Raises ConfigError
    if the schedule fails, or the factor is negative or not finite."""
    name = config.learning_rate_schedule
    try:
        found = float(_load_schedule(name)(config, iteration))
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"training.learning_rate_schedule is {name!r}, which fails: {type(error).__name__}: "
                          f"{first_line(error)}") from error
    if not 0 <= found < math.inf:
        raise ConfigError(f"training.learning_rate_schedule is {name!r}, which gives {found} for iteration {iteration};"
                          " expected a finite number of at least 0")
    return found


@functools.cache
def _load_schedule(name: str) -> Callable[[TrainingConfig, int], float]:
    """Import and return a user's function that computes the factor of the learning rate; `name` is
    `module:function`."""
    found: Callable[[TrainingConfig, int], float] = load_reference("training.learning_rate_schedule", name)
    return found
