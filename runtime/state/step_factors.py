"""Compute an iteration's learning rate, and the step factor of its gradients."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.object_reference import load_reference

_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    # Loshchilov and Hutter, ICLR 2017.
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "wsd": lambda progress: 1 - progress,
}
"""Remaining share of the rate, given the share of the decay that has passed."""


def learning_rate_at(config: TrainingConfig, iteration: int) -> float:
    """Return the learning rate of an iteration.

    Built-in schedules equal torch's LinearLR during warm-up, followed by ConstantLR, LinearLR or
    CosineAnnealingLR; "wsd" is the schedule of MiniCPM (Hu et al., 2024). Raises ConfigError as
    `rate_factor` does.
    """
    return config.learning_rate * rate_factor(config, iteration)


def is_scheduled(config: TrainingConfig) -> bool:
    """Return whether the learning rate may change during the run."""
    return config.learning_rate_schedule != "constant" or config.warmup_iterations > 1


def rate_factor(config: TrainingConfig, iteration: int) -> float:
    """Return the learning rate of an iteration as a multiple of `config.learning_rate`.

    Raises ConfigError if a user's own schedule cannot be loaded, fails, or returns a wrong number.
    """
    if ":" in config.learning_rate_schedule:
        return _user_factor(config, iteration)
    warmup = config.warmup_iterations
    if iteration < warmup:
        return (iteration + 1) / warmup
    if config.learning_rate_schedule == "constant":
        return 1.0
    end = config.schedule_iterations or config.iterations
    begin = warmup
    if config.learning_rate_schedule == "wsd":
        # By default the decay takes a tenth of the run.
        begin = end - (config.decay_iterations or min(max(1, end // 10), end - warmup))
    # From here on the decay is the same for all schedules: it ends at the final rate.
    progress = min(1.0, max(0, iteration - begin) / max(1, end - begin))
    final = (config.final_learning_rate or 0.0) / config.learning_rate
    return final + (1 - final) * _DECAYS[config.learning_rate_schedule](progress)


def _user_factor(config: TrainingConfig, iteration: int) -> float:
    name = config.learning_rate_schedule
    try:
        factor = float(_load_schedule(name)(config, iteration))
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"training.learning_rate_schedule is {name!r}, which fails: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    if not 0 <= factor < math.inf:
        raise ConfigError(
            f"training.learning_rate_schedule is {name!r}, which gives {factor} for iteration "
            f"{iteration}; expected a finite number of at least 0"
        )
    return factor


@functools.cache
def _load_schedule(name: str) -> Callable[[TrainingConfig, int], float]:
    schedule: Callable[[TrainingConfig, int], float] = load_reference(
        "training.learning_rate_schedule", name
    )
    return schedule


# On the host, 2 MiB stay in the cache, where the sum takes a third of the time. On a GPU, larger
# chunks need fewer kernels.
CHUNK_SIZE = {"cpu": 2**18, "cuda": 2**22}
"""Gradient elements converted to float64 at a time, by type of device."""
NORM_EPSILON = 1e-6
"""Number added to the norm that divides gradients, as in torch.nn.utils.clip_grad_norm_."""


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares of a gradient, in float64, copied in chunks only."""
    flat = gradient.detach().reshape(-1)
    sums = [
        chunk.to(torch.float64, copy=True).square_().sum()
        for chunk in torch.split(flat, CHUNK_SIZE[flat.device.type])
    ]
    return torch.stack(sums).sum() if len(sums) != 1 else sums[0]


def needs_gradient_norm(config: TrainingConfig) -> bool:
    """Return whether a step depends on other stages' gradients: to clip, or to be skipped."""
    return config.clip_norm is not None or config.skip_nonfinite


def clip_factor(squares: Iterable[float], config: TrainingConfig) -> float | None:
    """Return the step factor of an iteration; None: its step is skipped.

    A step is skipped if the norm of all gradients is not finite and `[training] skip_nonfinite` is
    set. `squares` has, for each layer, the sum of squares of its gradients
    (`PartOptimizer.layer_squares`).
    """
    # The total is rounded once. So it depends neither on the order of layers nor on which worker
    # holds which, and all workers get the same bits.
    norm = math.sqrt(_exact_sum(squares))
    if config.skip_nonfinite and not math.isfinite(norm):
        return None
    factor = 1.0 if config.clip_norm is None else config.clip_norm / (norm + NORM_EPSILON)
    return 1.0 if factor > 1 else factor


def _exact_sum(squares: Iterable[float]) -> float:
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf
