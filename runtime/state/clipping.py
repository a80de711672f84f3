"""Factor by which a step scales the gradients of the whole model, or the decision to skip the step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.runtime.config import TrainingConfig

CHUNK_SIZE = {"cpu": 2**18, "cuda": 2**22}
"""Number of gradient elements converted to float64 at a time, by type of device.

On the host, 2 MiB stay in the cache; with 32 MiB, which are new pages each time, the sum took three times as long. On a
GPU, chunks are larger, for fewer and larger kernels.
"""
NORM_EPSILON = 1e-6
"""Number added to the norm that gradients are divided by, as in torch.nn.utils.clip_grad_norm_ and its users."""


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares of a gradient, in float64, without a whole copy of the gradient."""
    flat = gradient.detach().reshape(-1)
    sums = [chunk.to(torch.float64, copy=True).square_().sum()
            for chunk in torch.split(flat, CHUNK_SIZE[flat.device.type])]
    return torch.stack(sums).sum() if len(sums) != 1 else sums[0]


def needs_gradient_norm(config: TrainingConfig) -> bool:
    """Return whether a step depends on the gradients of other stages: to clip by their norm, or to skip a step."""
    return config.clip_norm is not None or config.skip_nonfinite


def clip_factor(squares: Iterable[float], config: TrainingConfig) -> float | None:
    """Return the factor by which a step scales all gradients to clip their norm; None if the step is skipped.

    It is skipped if the norm is not finite and `[training] skip_nonfinite` is set. The argument `squares` has, for each
    layer, the sum of squares of its gradients (`PartOptimizer.layer_squares`). The total is rounded once, so it depends
    neither on the order of layers nor on which worker holds which: all workers get the same bits.
    """
    norm = math.sqrt(_exact_sum(squares))
    if config.skip_nonfinite and not math.isfinite(norm):
        return None
    factor = 1.0 if config.clip_norm is None else config.clip_norm / (norm + NORM_EPSILON)
    return 1.0 if factor > 1 else factor


def _exact_sum(squares: Iterable[float]) -> float:
    """Return the sum of the layers' sums of squares, rounded only once; infinity if it overflows."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf
